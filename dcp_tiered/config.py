"""Settings: which run, which tiers, which limits. The only reader of the environment.

A run is named by a URL, see `run_url`. Options are given per protocol, as for any fsspec chain,
with defaults from fsspec's config files and `FSSPEC_<PROTOCOL>_<OPTION>`.
"""

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcp_tiered.errors import InvalidError
from dcp_tiered.run_url import SECRET_QUERY, RunUrl, parse_url, protocol_names

ON_FULL = ("block", "fail", "supersede")
ON_LOCAL_FULL = ("fail", "write_through")
ON_VIOLATION = ("hold", "fail_save")
COMPRESSIONS = ("off", "zstd", "auto")
FLUSHERS = ("start", "external")
ENGINES = ("auto", "direct", "buffered", "gds", "kvikio")
_GOOGLE_ELSEWHERE = ("STORAGE_EMULATOR_HOST", "GOOGLE_CLOUD_UNIVERSE_DOMAIN")
"""What sends the traffic of Google's clients to another place than the URL seems to say."""
_AZURE_ACCOUNT = {
    "account_name": "AZURE_STORAGE_ACCOUNT_NAME",
    "connection_string": "AZURE_STORAGE_CONNECTION_STRING",
}
_AZURE_SECRETS = {
    "account_key": "AZURE_STORAGE_ACCOUNT_KEY",
    "sas_token": "AZURE_STORAGE_SAS_TOKEN",
    "client_id": "AZURE_STORAGE_CLIENT_ID",
    "client_secret": "AZURE_STORAGE_CLIENT_SECRET",
    "tenant_id": "AZURE_STORAGE_TENANT_ID",
}
"""The variables that adlfs reads."""
_INFLIGHT_BYTES_MIN = 16 << 20
"""A reader has one buffer of a little more than half of that at least."""
_PACE_BYTES_MIN = 1 << 20
"""Slower, a store would take a paced request for a broken one."""
_NO_BOUND = ("local_bytes_max", "bytes_per_second_max", "flush_deadline_s")
"""Limits that may be None."""
_PUBLIC_OPTIONS = (
    "account_host",
    "account_name",
    "anon",
    "endpoint_url",
    "profile",
    "requester_pays",
    "use_ssl",
)
_PARAMETERS = "s3_additional_kwargs"
_SECRET_PARAMETERS = ("SSECustomerKey", "SSECustomerKeyMD5")
"""Of those that the S3 tier lets users set; it refuses the others of the three without them."""
_NEEDS_SECRETS = "SSECustomerAlgorithm"
_PUBLIC_CLIENT_OPTIONS = ("endpoint_url", "region_name", "use_ssl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on waiting and on work, all in one place (I13)."""

    store_check_s: float = 2.0
    """How long a save asks the durable tier whether the id is taken before it goes on without."""
    request_timeout_s: float = 20.0
    """Longest silence of the store within one request, and of an upload that others wait for."""
    request_retry_s: float = 60.0
    """How long one request is tried again before the error is reported."""
    flush_retry_s_max: float = 30.0
    """Longest pause between two tries to flush a checkpoint while its store fails."""
    flush_deadline_s: float | None = None
    """After this time without a commit status says `late`; the flusher goes on with it, and others
    wait for it no longer. None: never."""
    linger_s: float = 10.0
    """How long small shard files without a manifest wait for others to share a pack with."""
    idle_exit_s: float = 30.0
    """A flusher without work ends after this."""
    poll_s: float = 0.2
    """How often local directories are looked at for work or for an answer."""
    incomplete_after_s: float = 600.0
    """How long a commit waits for packs of other nodes before status says `incomplete`."""
    commit_takeover_s: float = 60.0
    """How long other nodes leave a commit to the coordinator's node, and then each to the next."""
    stage_wait_s: float = 600.0
    """How long `dcp.async_save` waits for the save before it, whose staged copy is in the way."""
    takeover_s: float = 20.0
    """How long a new flusher waits for a running one to hand over before it is killed."""
    inflight_bytes_max: int = 128 << 20
    """Bytes read ahead of the copy into tensors while loading."""
    part_bytes: int = 64 << 20
    """Size of one request of a large upload; S3 gets no smaller ones than 16 MiB, however set."""
    pack_bytes_target: int = 1 << 30
    """Shard files of a node share a pack up to this size; larger ones are alone."""
    connections_max: int = 16
    """Requests to the durable tier that one process has on their way at once."""
    bytes_per_second_max: int | None = None
    """How fast the flusher of a run on a node may upload packs; None: as fast as it can."""
    term_grace_s: float = 20.0
    """How long a flusher goes on after SIGTERM to finish what can be finished."""
    pending_checkpoints_max: int = 8
    """How many checkpoints of a run may wait for the flusher of a node."""
    local_bytes_max: int | None = None
    """Bytes that a run may take on the local tier of a node; None: what the file system has."""
    local_share_max: float | None = None
    """The same as a share of that file system, above 0 up to 1; the smaller of both counts."""
    local_reserve_bytes: int = 1 << 30
    """Bytes of that file system to keep free; never more than a twentieth of it."""
    backpressure_wait_s: float = 300.0
    """How long a save waits for room; the other ranks wait in a collective meanwhile, and those of
    NCCL end after 600 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that turns into tiers and services; secrets are in `options` only, unprinted."""

    url: RunUrl
    local: Path | None
    """The local tier of this node, above all runs."""
    options: Mapping[str, Any] = field(repr=False)
    """Options of the durable tier's protocol, secrets included."""
    engine: str = "auto"
    """What writes to the local tier, one of `ENGINES`."""
    on_full: str = "block"
    """What a save does that finds no room, one of `ON_FULL`."""
    on_local_full: str = "fail"
    """What a save does that fills the disk, one of `ON_LOCAL_FULL`."""
    on_violation: str = "hold"
    """What a save does while the flusher finds the target not allowed, one of `ON_VIOLATION`."""
    limits: Limits = field(default_factory=Limits)
    compression: str = "off"
    """Of packs on their way to the durable tier, one of `COMPRESSIONS`."""
    flusher: str = "start"
    """Whether a save starts the node's flusher, one of `FLUSHERS`."""
    residency: Mapping[str, Any] | str | None = None
    """The residency policy as it was given, or the text of its file; parsed in `stack`."""

    def public_options(self) -> dict[str, Any]:
        """Return the options that may be written to disk: an allow-list without secrets.

        Parameters of requests are among them, or a command would store what it flushes in another
        way than the writer does; of those that the tier lets through, only a key is a secret.
        """
        public = {key: self.options[key] for key in _PUBLIC_OPTIONS if key in self.options}
        client = self.options.get("client_kwargs") or {}
        chosen = {key: client[key] for key in _PUBLIC_CLIENT_OPTIONS if key in client}
        public |= {"client_kwargs": chosen} if chosen else {}
        given = _parameters(self.options)
        shown = {key: given[key] for key in given if key not in _SECRET_PARAMETERS}
        return public | ({_PARAMETERS: shown} if shown else {})


def settings(  # noqa: PLR0913 - all that a user may say, most of it by keyword
    url: str | os.PathLike[str],
    local: str | os.PathLike[str] | None = None,
    options: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
    *,
    engine: str | None = None,
    on_full: str | None = None,
    on_local_full: str | None = None,
    residency: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    compression: str | None = None,
    on_violation: str | None = None,
    flusher: str | None = None,
    noted: Mapping[str, Any] | None = None,
) -> Settings:
    """Build settings from what a user gave, what the URL says, and fsspec's configuration.

    Args:
        url: The run's URL, see the module.
        local: The local tier; else `options["tiered"]["local"]`, else `FSSPEC_TIERED_LOCAL`.
        options: Options by protocol, such as `{"s3": {"endpoint_url": ...}}`.
        limits: Bounds that differ from the defaults.
        engine: What writes to the local tier; else `options["tiered"]["engine"]`, else `auto`.
        on_full: What a save without room does; else `options["tiered"]["on_full"]`, else `block`.
        on_local_full: What a save does that fills the disk; else the same in `options["tiered"]`,
            else `fail`.
        residency: Where the run may be flushed to: a policy or the path of its file; else
            `options["tiered"]["residency"]`, else anywhere.
        on_violation: What a save does while the target is not allowed; else
            `options["tiered"]["on_violation"]`, else `hold`.
        compression: Of packs; else `options["tiered"]["compression"]`, else `off`.
        flusher: Who starts it; else `options["tiered"]["flusher"]`, else `start`.
        noted: What the run's node noted of the durable tier's options; `options` win over it, and
            it wins over the environment, from where a key among parameters of requests comes.

    Raises:
        InvalidError: The URL or an option cannot be right.
    """
    run = parse_url(url)
    given = dict(options or {})
    known = {"tiered", *((run.protocol,) if run.protocol else ()), *protocol_names(run.protocol)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise InvalidError(
            f"options for {', '.join(unknown)}, which {run.root} does not use",
            None,
            run.root,
            f"Pass options by protocol: {', '.join(sorted(known))}.",
        )
    tiered = _protocol_options(("tiered",), given)
    durable = _with_text_key(_protocol_options(protocol_names(run.protocol), given, noted or {}))
    if run.protocol == "az":
        durable = _azure_environment(durable)
    if run.protocol == "gs":
        _refuse_other_google(durable)
    _refuse_secret_endpoint(durable)
    through = _choice("on_local_full", on_local_full, tiered, ON_LOCAL_FULL)
    if through == "write_through" and run.protocol is None:
        raise InvalidError(
            "on_local_full='write_through' in a run without a durable tier", None, run.root
        )
    return Settings(
        url=run,
        local=_local_path(run, local, tiered),
        options=durable,
        engine=_choice("engine", engine, tiered, ENGINES),
        on_full=_choice("on_full", on_full, tiered, ON_FULL),
        on_local_full=through,
        on_violation=_choice("on_violation", on_violation, tiered, ON_VIOLATION),
        compression=_choice("compression", compression, tiered, COMPRESSIONS),
        flusher=_choice("flusher", flusher, tiered, FLUSHERS),
        limits=_checked(limits or _limits(tiered.get("limits") or {})),
        residency=residency_source(tiered.get("residency") if residency is None else residency),
    )


def _azure_environment(options: dict[str, Any]) -> dict[str, Any]:
    """Add what adlfs would take from the environment.

    An account that was named stays the one that is used: a connection string in the environment
    may name another.
    """
    wanted = dict(_AZURE_SECRETS)
    if not any(options.get(name) for name in _AZURE_ACCOUNT):
        wanted |= _AZURE_ACCOUNT
    found = {name: os.environ[key] for name, key in wanted.items() if os.environ.get(key)}
    return found | options


def _refuse_other_google(options: Mapping[str, Any]) -> None:
    """Refuse a variable that would send the bytes elsewhere, unless the endpoint was given too."""
    if options.get("endpoint_url"):
        return
    for name in _GOOGLE_ELSEWHERE:
        if os.environ.get(name):
            raise InvalidError(
                f"{name} is set, and no endpoint is given",
                "durable",
                None,
                "Pass gs={'endpoint_url': ...} if that place is meant, or unset it.",
            )


def _refuse_secret_endpoint(options: Mapping[str, Any]) -> None:
    """Refuse credentials in an endpoint, which is written to disk and repeated in messages."""
    client = options.get("client_kwargs") or {}
    if not isinstance(client, Mapping):
        raise InvalidError("option client_kwargs is not a mapping")
    given = (options.get("endpoint_url"), client.get("endpoint_url"), options.get("account_host"))
    for endpoint in given:
        if endpoint and any(mark in str(endpoint) for mark in ("@", *SECRET_QUERY)):
            raise InvalidError(
                "the endpoint holds credentials, '?' or '#'",
                "durable",
                None,
                "Pass credentials by the environment or as s3={'key': ..., 'secret': ...}.",
            )


def _local_path(
    run: RunUrl, local: str | os.PathLike[str] | None, tiered: Mapping[str, Any]
) -> Path | None:
    given = [str(value) for value in (run.local, local) if value is not None]
    if len({os.path.normpath(value) for value in given}) > 1:
        raise InvalidError(
            f"local tier given twice: {given[0]} in the URL and {given[1]}",
            "local",
            None,
            "Give it once: in the URL or as local=.",
        )
    chosen = given[0] if given else tiered.get("local")
    if not chosen:
        return None
    path = Path(chosen).expanduser()
    if not path.is_absolute():
        raise InvalidError(
            f"local tier {str(path)!r} is a relative path",
            "local",
            str(path),
            "Use an absolute path: the flusher runs in another working directory.",
        )
    return path


def _protocol_options(
    names: tuple[str, ...], given: Mapping[str, Any], noted: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Merge what config files, the environment and the user say about a protocol; the last wins.

    fsspec has read files and environment when it was imported. The environment is read again, for
    what a launcher has set since then.
    """
    import fsspec.config

    environment: dict[str, Any] = {}
    fsspec.config.set_conf_env(environment, envdict=dict(os.environ))
    options: dict[str, Any] = {}
    for source in (fsspec.config.conf, environment, given):
        for name in names:
            said = source.get(name) or {}
            if not isinstance(said, Mapping):
                raise InvalidError(f"options for {name} are not a mapping")
            is_text = source is not given
            options |= {key: plain(value) if is_text else value for key, value in said.items()}
        if source is environment and noted:
            options |= _filled(noted, options)
    return options


def _filled(noted: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return noted options, with those parameters of requests that were not to be noted."""
    parameters, more = _parameters(noted), _parameters(options)
    if _NEEDS_SECRETS not in parameters:
        return dict(noted)
    secrets = {name: more[name] for name in _SECRET_PARAMETERS if name in more}
    return {**noted, _PARAMETERS: {**parameters, **secrets}}


def _parameters(options: Mapping[str, Any]) -> Mapping[str, Any]:
    given = options.get(_PARAMETERS)
    return given if isinstance(given, Mapping) else {}


def _with_text_key(options: dict[str, Any]) -> dict[str, Any]:
    """Write a key that was given as bytes as text, as botocore would: the flusher gets JSON."""
    given = _parameters(options)
    key = given.get(_SECRET_PARAMETERS[0])
    if not isinstance(key, bytes) or _SECRET_PARAMETERS[1] in given:
        return options
    digest = hashlib.md5(key, usedforsecurity=False).digest()
    pair = [base64.b64encode(data).decode() for data in (key, digest)]
    text = dict(zip(_SECRET_PARAMETERS, pair, strict=True))
    return {**options, _PARAMETERS: {**given, **text}}


def plain(value: Any) -> Any:
    """Return what a text means where all is text, as in the environment: "false" is not true."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value.startswith("{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _limits(given: Mapping[str, Any]) -> Limits:
    try:
        return Limits(**given)
    except TypeError as exc:
        raise InvalidError(f"wrong limits: {exc}") from exc


def _checked(limits: Limits) -> Limits:
    """Refuse bounds under which no save could ever begin, or no upload end."""
    least = {"pending_checkpoints_max": 1, "local_bytes_max": 1, "local_reserve_bytes": 0}
    least |= {"inflight_bytes_max": _INFLIGHT_BYTES_MIN}
    least |= {"connections_max": 1, "bytes_per_second_max": _PACE_BYTES_MIN, "term_grace_s": 0}
    least |= {"flush_deadline_s": 0}
    for name, value in {**least, "backpressure_wait_s": 0}.items():
        given = getattr(limits, name)
        if given is None and name in _NO_BOUND:
            continue
        if not isinstance(given, int | float) or not given >= value:
            raise InvalidError(f"limit {name} is {given!r} where at least {value} is needed")
    share: Any = limits.local_share_max  # whatever a file or the environment said
    if share is not None and not (isinstance(share, int | float) and 0 < share <= 1):
        raise InvalidError(f"limit local_share_max is {share!r}, which is no share above 0 up to 1")
    return limits


def _choice(
    name: str, given: str | None, tiered: Mapping[str, Any], allowed: tuple[str, ...]
) -> str:
    """Return what was asked for, or the first of what is allowed."""
    chosen = given or str(tiered.get(name) or allowed[0])
    if chosen not in allowed:
        raise InvalidError(f"{name} {chosen!r} is not one of {', '.join(allowed)}")
    return chosen


def residency_source(given: Any) -> Mapping[str, Any] | str | None:
    """Return a policy, or the text of the file that holds it.

    Raises:
        InvalidError: The file cannot be read.
    """
    if given is None or isinstance(given, Mapping):
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, TypeError, ValueError) as exc:
        raise InvalidError(
            f"cannot read the residency policy {str(given)[:200]!r}: {exc}",
            None,
            None,
            "Give a mapping or the path of a TOML file.",
        ) from exc


def launch_environment() -> tuple[int | None, int | None]:
    """Return local rank and local world size as the launcher set them, None where it did not."""
    return _integer("LOCAL_RANK"), _integer("LOCAL_WORLD_SIZE")


def child_environment() -> dict[str, str]:
    """Return the environment for a flusher: ours, with an import path that needs no cwd."""
    import sys

    paths = [os.path.abspath(path) for path in sys.path if path]  # noqa: PTH100
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def _integer(name: str) -> int | None:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return None
