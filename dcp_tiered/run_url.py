"""A run's URL: which run it is, which tiers it names, and what is wrong with it.

`tiered::s3://bucket/run42` has a durable tier, `tiered:///nvme/run42` only a local one, and
`tiered:///nvme::s3://bucket/run42` names both.
"""

import os
import re
from dataclasses import dataclass

from dcp_tiered.errors import InvalidError

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_COLLAPSED = re.compile(r"([a-z][a-z0-9+.-]*):/(?!/)")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ANY_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_GOOGLE_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")
_CREDENTIALS = re.compile(r"://[^/]*@|[^/]:[^/]*@")
SECRET_QUERY = ("?", "#")
"""What begins the part of a URL where secrets are."""
_EXAMPLE = "such as 'tiered::s3://bucket/run42'"
_USE = (
    "Use 's3://bucket/run', 'gs://bucket/run', 'az://container/run', 'file:///path/run' or another"
    " object store that fsspec knows behind 'tiered::'."
)
_FILE = ("file", "local")
_PROTOCOLS = {
    "file": _FILE,
    "s3": ("s3", "s3a"),
    "gs": ("gs", "gcs"),
    "az": ("az", "abfs", "abfss"),
}
"""Durable tiers with a client of ours, each with all its names; the first is in `RunUrl`."""
_MOUNT = "Mount it and use 'file:///path/run'; the mount needs hard links."
_GROWING = "arrow_hdfs asynclocal dask dbfs ftp hdfs jlab jupyter root sftp smb ssh webdav webhdfs"
_WRAPPERS = (
    "async_wrapper asyncwrapper blockcache cached dir filecache generic libarchive pyscript"
    " reference simplecache tar tiered zip"
)
_NO_OBJECT_STORES = (
    ("memory", "is gone with its process, and the flusher is another one", _USE),
    (_GROWING, "shows a file while it is being written", _MOUNT),
    (_WRAPPERS, "is no store of its own", _USE),
    ("data dvc gist git github http https", "cannot be written to in this way", _USE),
)
"""What fsspec has beside object stores, why it is no durable tier, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunUrl:
    """A run's URL, taken apart. Equal runs have equal `root`."""

    root: str
    """Normalised: `s3://bucket/run42`, `file:///mnt/run42` or `tiered:///nvme/run42`."""
    protocol: str | None
    """Of the durable tier: `s3`, `gs`, `az`, `file`, or fsspec's name of another object store; None
    when the run is local only."""
    path: str
    """Below the protocol: `bucket/run42`, or an absolute path."""
    local: str | None
    """Local tier named in the URL itself."""


def parse_url(url: str | os.PathLike[str]) -> RunUrl:
    """Take a run's URL apart.

    A trailing slash and an empty component make no difference.

    Raises:
        InvalidError: It is not a run's URL; the hint has the fix.
    """
    text = os.fspath(url)
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    _refuse_secrets(text)
    if _CONTROL.search(text):
        raise _invalid(text, "holds control characters or backslashes", f"Use a URL {_EXAMPLE}.")
    collapsed = _COLLAPSED.search(text)
    if collapsed:
        scheme = collapsed.group(1)
        raise _invalid(
            text,
            f"has '{scheme}:/' with one slash",
            f"A Path object collapses '//': pass the URL as a str, with '{scheme}://'.",
        )
    head, separator, target = text.partition("::")
    if head != "tiered" and not head.startswith("tiered://"):
        raise _invalid(text, "does not start with 'tiered::'", f"Use a URL {_EXAMPLE}.")
    local = _local_part(text, head)
    if not separator:
        if local is None:
            raise _invalid(text, "names no run", f"Use a URL {_EXAMPLE}.")
        return RunUrl(root=f"tiered://{local}", protocol=None, path=local, local=local)
    if "::" in target:
        raise _invalid(
            text, "chains another file system behind 'tiered'", "Let the store follow 'tiered::'."
        )
    protocol, separator, path = target.partition("://")
    if not separator or not _SCHEME.fullmatch(protocol):
        raise _invalid(text, "names no protocol for the durable tier", f"Use a URL {_EXAMPLE}.")
    if protocol in _FILE:
        path = _absolute(text, path)
        return RunUrl(root=f"file://{path}", protocol="file", path=path, local=local)
    for name, names in _PROTOCOLS.items():
        if protocol in names:
            path = _bucket_path(text, path, _GOOGLE_BUCKET if name == "gs" else _BUCKET)
            return RunUrl(root=f"{name}://{path}", protocol=name, path=path, local=local)
    _refuse_no_object_store(text, protocol)
    path = _bucket_path(text, path, _ANY_BUCKET)
    return RunUrl(root=f"{protocol}://{path}", protocol=protocol, path=path, local=local)


def _refuse_no_object_store(text: str, protocol: str) -> None:
    for names, why, hint in _NO_OBJECT_STORES:
        if protocol in names.split():
            raise _invalid(text, f"uses protocol {protocol!r}, which {why}", hint)


def _refuse_secrets(text: str) -> None:
    """Refuse credentials before anything else looks at the URL; the message never repeats it."""
    authority = _CREDENTIALS.search(text)
    if authority or any(mark in text for mark in SECRET_QUERY):
        what = "credentials" if authority else "'?' or '#'"
        raise InvalidError(
            f"the run's URL holds {what}",
            None,
            None,
            "Pass credentials by the environment or as options, such as"
            " s3={'key': ..., 'secret': ...}, and an account as az={'account_name': ...}; a run's"
            " URL is a plain path.",
        )


def _local_part(text: str, head: str) -> str | None:
    if head == "tiered":
        return None
    return _absolute(text, head.removeprefix("tiered://"))


def _absolute(text: str, path: str) -> str:
    if not path.startswith("/"):
        raise _invalid(
            text, "holds a relative path", "Use an absolute path, as in 'file:///mnt/run'."
        )
    return "/" + "/".join(_components(text, path))


def _bucket_path(text: str, path: str, bucket: re.Pattern[str]) -> str:
    parts = _components(text, path)
    if not parts or not bucket.fullmatch(parts[0]):
        raise _invalid(text, "has no valid bucket name", f"Use a URL {_EXAMPLE}.")
    if len(parts) == 1:
        raise _invalid(
            text, "names a whole bucket", "Add a prefix for the run, as in 's3://bucket/run42'."
        )
    return "/".join(parts)


def _components(text: str, path: str) -> list[str]:
    parts = [part for part in path.split("/") if part]
    if any(part in (".", "..") for part in parts):
        raise _invalid(text, "holds '.' or '..'", "Write the path out.")
    try:
        length = len(path.encode())
    except UnicodeEncodeError as exc:
        raise _invalid(text, "is not valid Unicode", "Object keys are UTF-8.") from exc
    if length > 900:  # noqa: PLR2004 - S3 keys end at 1024 bytes, ours add about 120
        raise _invalid(text, "is too long for object keys", "Use a shorter prefix.")
    return parts


def _invalid(text: str, what: str, hint: str) -> InvalidError:
    return InvalidError(f"run URL {text[:300]!r} {what}", None, None, hint)


def protocol_names(protocol: str | None) -> tuple[str, ...]:
    """Return all names of a durable tier's protocol, the one in `RunUrl` last."""
    return _PROTOCOLS.get(protocol, (protocol,))[::-1] if protocol else ()
