"""Any object store that fsspec has an implementation for, by literal calls about one file each.

Nothing is expanded, globbed or listed recursively, and no listing is believed a second time. An
implementation is not trusted with more than such a call: what exists is looked for before anything
is written, "not there" counts only where a look and a listing agree, and every call has a bound.
"""

import inspect
import io
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dcp_tiered.errors import InvalidError, TieredError
from dcp_tiered.format.residency import Fact, Observed, Verdict
from dcp_tiered.interfaces import ObjectInfo
from dcp_tiered.tiers import fsspec_errors
from dcp_tiered.tiers.fsspec_errors import BrokenOffError, NoBucketError, NotThereError
from dcp_tiered.tiers.http_errors import RefusedError
from dcp_tiered.tiers.object_client import Body, Page
from dcp_tiered.tiers.s3_errors import TIER

_BLOCK_BYTES_MIN = 5 << 20
"""Stores that speak S3, or are modelled on it, take no smaller parts."""
_PARTS_MAX = 10_000
"""Nor more of them."""
_WHOLE_BYTES_MAX = 2 << 30
"""What is sent by one call lies in memory; larger packs than this come of one large shard file."""
_BYTES_PER_SECOND_MIN = 256 << 10
"""A call that moves bytes more slowly than this is not waited for."""
_LIST_S = 60.0
"""One directory takes an implementation a request for each thousand names or so."""
_COMMIT_S = 300.0
"""A store may take minutes to put thousands of parts together."""
_HANGING_MAX = 64
"""Calls that were given up and have not returned yet; with so many no other one is begun."""
_hanging: set[Future[Any]] = set()


@dataclass(kw_only=True)
class _Upload:
    """An object on its way: a stream of parts, or bytes in memory for one call."""

    key: str
    file: Any = None
    data: io.BytesIO = field(default_factory=io.BytesIO)


class FsspecPlace:
    """A bucket that fsspec can reach.

    Args:
        protocol: Its name in fsspec.
        bucket: The first part of the path; it is never created.
        options: Handed to the implementation.
        request_timeout_s: How long a call may take, on top of the time that its bytes take.
        part_bytes: Size of one request of a large upload.

    Raises:
        InvalidError: There is no such implementation; the hint says what to install.
    """

    chunk_bytes = 1
    keeps_writers_apart = False

    def __init__(
        self,
        protocol: str,
        bucket: str,
        options: Mapping[str, Any],
        request_timeout_s: float,
        part_bytes: int,
    ) -> None:
        self.url = f"{protocol}://{bucket}"
        self._protocol, self._bucket = protocol, bucket
        self._options = dict(options)
        self._timeout_s = request_timeout_s
        self._block_bytes = max(part_bytes, _BLOCK_BYTES_MIN)
        self._need_implementation()

    def connect(self) -> "FsspecClient":
        """Return a client of this process, with an instance of the implementation of its own."""
        import fsspec

        options = {**self._options, "use_listings_cache": False, "skip_instance_cache": True}
        files = bounded(self._timeout_s, fsspec.filesystem, self._protocol, **options)
        return FsspecClient(files, self._bucket, self._block_bytes, self._timeout_s)

    def refusal(self, exc: Exception) -> RefusedError | None:
        """Return the reply behind an exception; see `Place.refusal`."""
        return fsspec_errors.refusal(exc)

    def translate(self, exc: Exception, doing: str, where: str) -> tuple[TieredError, bool]:
        """Return our error for what an implementation raised; see `Place.translate`."""
        return fsspec_errors.translate(exc, doing, where, self._options)

    def _need_implementation(self) -> None:
        import fsspec

        try:
            fsspec.get_filesystem_class(self._protocol)
        except ValueError:
            hint = "Install the package that provides it, or correct the URL."
            text = f"fsspec knows no protocol {self._protocol!r}"
            raise InvalidError(text, TIER, self.url, hint) from None
        except ImportError as exc:
            hint = f"{exc}." if str(exc) else "Install the package that provides it."
            text = f"protocol {self._protocol!r} cannot be loaded"
            raise InvalidError(text, TIER, self.url, hint) from exc


class FsspecClient:
    """See `Client`.

    Args:
        files: An instance of an implementation.
        bucket: The first part of each path.
        block_bytes: Size of the parts of a stream.
        timeout_s: See `FsspecPlace`.
    """

    def __init__(self, files: Any, bucket: str, block_bytes: int, timeout_s: float) -> None:
        self._files, self._bucket = files, bucket
        _alive[id(files)] = files
        self._block_bytes, self._timeout_s = block_bytes, timeout_s
        self._has_create = "mode" in inspect.signature(files.pipe_file).parameters
        self._streams = _has_committed_files(files)
        self._bucket_answers = False

    def create(self, key: str, data: bytes, crc: int) -> ObjectInfo:
        """Create a small object; see `Client.create`."""
        del crc
        self._write(key, data)
        return ObjectInfo(key=key, length=len(data))

    def begin(self, key: str, length: int, crc: int) -> _Upload:
        """Begin a stream of parts, or with one part or none a buffer; see `Client.begin`.

        Raises:
            InvalidError: The object is too large for the only way there is.
        """
        del crc
        if length <= self._block_bytes:
            return _Upload(key=key)
        if self._streams:
            return _Upload(key=key, file=self._open(key, length))
        if length > _WHOLE_BYTES_MAX:
            raise InvalidError(
                f"{type(self._files).__name__} shows a file while it is being written, and"
                f" {length} bytes are too many for one call",
                TIER,
                f"{self._bucket}/{key}",
                "If the store speaks S3, use 's3://' and its endpoint; else save on more ranks.",
            )
        return _Upload(key=key)

    def send(self, upload: _Upload, start: int, body: Body) -> int:
        """Write a part; see `Client.send`. A stream that fails is not carried on."""
        if upload.file is None:
            upload.data.seek(start)
            for block in body:
                upload.data.write(block)
            return start + len(body)
        for block in body:
            _unbroken(self._time(self._block_bytes), upload.file.write, block)
        return start + len(body)

    def finish(self, upload: _Upload) -> None:
        """Make an object visible; see `Client.finish`. What it is then, a look has to tell."""
        if upload.file is None:
            self._write(upload.key, upload.data.getvalue())
            return
        # Sends the last part: with `autocommit=False` nobody sees anything yet.
        _unbroken(self._time(self._block_bytes), upload.file.close)
        self._refuse_taken(upload.key)
        try:
            _unbroken(_COMMIT_S, upload.file.commit)
        except BrokenOffError:
            self._refuse_taken(upload.key)
            raise

    def abandon(self, upload: _Upload) -> None:
        """Let go of the parts; see `Client.abandon`."""
        if upload.file is None:
            return
        try:
            bounded(self._timeout_s, upload.file.discard)
        finally:
            upload.file.closed = True  # or it would send what is left when it is collected

    def look(self, key: str) -> ObjectInfo:
        """Return the length; see `Client.look`."""
        found = self._find(key)
        if found is None:
            raise NotThereError
        return found

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """Fill a buffer from the front; see `Client.read_into`."""
        path, end, seconds = self._path(key), start + len(buffer), self._time(len(buffer))
        try:
            data = bounded(seconds, self._files.cat_file, path, start=start, end=end)
        except FileNotFoundError:
            raise
        except Exception:
            # A range behind the end comes as whatever an implementation makes of the refusal.
            if self.look(key).length <= start:
                return 0
            raise
        if len(data) > len(buffer):
            raise NotImplementedError("more bytes came than the range has")
        buffer[: len(data)] = data
        return len(data)

    def remove(self, key: str) -> None:
        """Remove an object; see `Client.remove`. A directory of that name is none."""
        self.look(key)
        try:
            bounded(self._timeout_s, self._files.rm_file, self._path(key))
        except FileNotFoundError:
            self.look(key)  # somebody else may have been quicker
            raise

    def page(self, prefix: str, delimiter: str, following: str | None) -> Page:
        """Return what is right in one directory; see `Client.page`. Those below it follow."""
        folder, *others = [prefix.rstrip("/")] if following is None else json.loads(following)
        children = self._children(folder)
        keys = [f"{folder}/{name}" for name, is_folder in children if not is_folder]
        folders = [f"{folder}/{name}" for name, is_folder in children if is_folder]
        if delimiter:
            return Page(keys=keys, directories=[f"{one}/" for one in folders], following=None)
        todo = [*folders, *others]
        return Page(keys=keys, directories=[], following=json.dumps(todo) if todo else None)

    def observe(self) -> Observed:
        """Raise: no rule of a policy is for such a store; see `Client.observe`."""
        raise NotImplementedError("fsspec does not say where a bucket is")

    def observe_place(self) -> Observed:
        """Raise, as `observe` does."""
        return self.observe()

    def look_public(self) -> Fact:
        """Say that nothing is known; see `Client.look_public`."""
        said = "fsspec has no question for that"
        return Fact(name="not_public", verdict=Verdict.UNKNOWN, evidence=said)

    def close(self) -> None:
        """Do nothing: an instance lets go of its connections when it is collected."""

    def _write(self, key: str, data: bytes) -> None:
        """Create an object by one call, where a look has found nothing."""
        self._refuse_taken(key)
        try:
            self._pipe(key, data)
        except Exception:
            # That it is there by now comes as whatever an implementation makes of the reply, and
            # with a time-out it may have been ourselves.
            self._refuse_taken(key)
            raise

    def _pipe(self, key: str, data: bytes) -> None:
        path, seconds = self._path(key), self._time(len(data))
        if self._has_create:
            try:
                bounded(seconds, self._files.pipe_file, path, data, mode="create")
            except (NotImplementedError, ValueError):
                pass  # it names the mode and has only the other one
            else:
                return
        bounded(seconds, self._files.pipe_file, path, data)

    def _open(self, key: str, length: int) -> Any:
        """Return a file that is seen once it is committed."""
        block = max(self._block_bytes, -(-length // _PARTS_MAX))
        open_file = partial(self._files.open, self._path(key), block_size=block, autocommit=False)
        try:
            file = bounded(self._timeout_s, open_file, mode="xb")
        except (AssertionError, NotImplementedError, TypeError, ValueError):
            file = bounded(self._timeout_s, open_file, mode="wb")
        self._files.transaction.files.clear()  # which would keep it for a commit of its own
        if not _is_committed(type(file)):
            raise NotImplementedError(f"{type(file).__name__} cannot be committed")
        return file

    def _refuse_taken(self, key: str) -> None:
        if self._find(key) is not None:
            raise FileExistsError

    def _find(self, key: str) -> ObjectInfo | None:
        """Return an object, None where a look and a listing agree that there is none."""
        self._files.invalidate_cache()
        try:
            found = bounded(self._timeout_s, self._files.info, self._path(key))
        except FileNotFoundError:
            folder, _, name = key.rpartition("/")
            if (name, False) in self._children(folder):
                raise OSError("store lists an object and does not find it") from None
            return None
        if found["type"] == "directory":
            return None
        return ObjectInfo(key=key, length=int(found["size"]))

    def _children(self, folder: str) -> list[tuple[str, bool]]:
        """Return what is right in a directory, each with whether it is one; fresh."""
        self._files.invalidate_cache()
        try:
            found = self._list(self._path(folder))
        except FileNotFoundError:
            self._need_bucket()
            return []
        self._bucket_answers = True
        children = [(_name(one), one["type"] == "directory") for one in found]
        # A file lists itself, and some stores list a directory in itself.
        return [
            (name.rpartition("/")[2], is_folder)
            for name, is_folder in children
            if f"/{name}".endswith(f"/{folder}/{name.rpartition('/')[2]}")
        ]

    def _need_bucket(self) -> None:
        """Pass when the bucket can be listed: an empty directory and no bucket look the same."""
        if self._bucket_answers:
            return
        try:
            self._list(self._bucket)
        except FileNotFoundError:
            raise NoBucketError from None
        self._bucket_answers = True

    def _path(self, key: str) -> str:
        return f"{self._bucket}/{key}"

    def _list(self, path: str) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = bounded(
            _LIST_S, self._files.ls, path, detail=True, refresh=True
        )
        return found

    def _time(self, length: int) -> float:
        """Return how long a call may take that moves that many bytes."""
        return self._timeout_s + length / _BYTES_PER_SECOND_MIN


def bounded(seconds: float, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Return what a call returns.

    fsspec waits for its loop without a bound, and implementations for their sockets. Each call
    runs in a thread of its own: one that hangs is left behind, and keeps no process from ending.

    Raises:
        TimeoutError: It has not returned in that time, or too many others still hang.
    """
    if len(_hanging) >= _HANGING_MAX:
        raise TimeoutError(f"{len(_hanging)} calls hang already")
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(call(*args, **more))
        except BaseException as exc:  # noqa: BLE001 - raised where it is waited for
            answer.set_exception(exc)

    threading.Thread(target=run, name="dcp-tiered-fsspec", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        if answer.done():
            raise
        _hanging.add(answer)
        answer.add_done_callback(_hanging.discard)
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None


def _unbroken(seconds: float, call: Callable[..., Any], *args: Any) -> None:
    """Do a step of a stream.

    Raises:
        BrokenOffError: It failed.
    """
    try:
        bounded(seconds, call, *args)
    except Exception as exc:
        raise BrokenOffError(exc) from exc


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry["name"]).rstrip("/")


def _has_committed_files(files: Any) -> bool:
    """Tell whether an implementation has files that nobody sees before they are committed.

    None is opened to find out: some are there, empty, from that moment on.
    """
    module = sys.modules[type(files)._open.__module__]  # noqa: SLF001 - what fsspec has overridden
    return any(isinstance(one, type) and _is_committed(one) for one in vars(module).values())


def _is_committed(kind: Any) -> bool:
    from fsspec.spec import AbstractBufferedFile as Plain

    if not issubclass(kind, Plain):
        return False
    return kind.commit is not Plain.commit and kind.discard is not Plain.discard


_alive: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_inherited: dict[int, list[Any]] = {}


def _hold() -> None:
    """Keep all instances over a fork, and in the child for good.

    A loop's epoll is shared by both processes: an instance that the child collects closes its
    connections, and so takes them out of the parent's loop, which then waits for ever.
    """
    _inherited[threading.get_ident()] = list(_alive.values())


def _let_go() -> None:
    _inherited.pop(threading.get_ident(), None)


os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_hanging.clear)
