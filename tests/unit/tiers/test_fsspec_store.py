"""What an implementation of fsspec may do wrong, and what becomes of it; S3 is not asked."""

import errno
import threading
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from dcp_tiered.errors import (
    AbsentError,
    AlreadyExistsError,
    InvalidError,
    TieredError,
    UnavailableError,
)
from dcp_tiered.tiers import fsspec_store
from dcp_tiered.tiers.fsspec_store import FsspecPlace
from dcp_tiered.tiers.object_store import ObjectStoreTier
from tests.support.sources import BytesSource, pattern
from tests.support.workers import await_that

CANARY = "canary-secret-77ab"


class Odd(MemoryFileSystem):
    """Memory with one fault, which a test sets."""

    protocol = "oddmem"
    fault: Any = None

    def info(self, path: str, **more: Any) -> Any:
        if self.fault is not None:
            self.fault("info", path)
        return super().info(path, **more)

    def ls(self, path: str, detail: bool = True, **more: Any) -> Any:
        if self.fault is not None:
            self.fault("ls", path)
        return super().ls(path, detail, **more)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        if self.fault is not None:
            self.fault(f"pipe_file {mode}", path)
        super().pipe_file(path, value, mode, **more)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **more: Any) -> bytes:
        if self.fault is not None:
            self.fault("cat_file", path)
        return super().cat_file(path, start, end, **more)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    fsspec.register_implementation("oddmem", Odd, clobber=True)
    files = fsspec.filesystem("memory")
    files.makedirs("/odd", exist_ok=True)
    yield files
    monkeypatch.undo()
    files.rm("/odd", recursive=True)


def fault(monkeypatch: pytest.MonkeyPatch, call: str, error: Exception) -> None:
    """Let one kind of call raise."""

    def check(_: Any, doing: str, path: str) -> None:
        if doing == call:
            raise error

    monkeypatch.setattr(Odd, "fault", check)


def tier(timeout_s: float = 5.0, **options: Any) -> ObjectStoreTier:
    place = FsspecPlace("oddmem", "odd", options, timeout_s, 5 << 20)
    return ObjectStoreTier(place, "run", request_retry_s=0.2, part_bytes=5 << 20)


def test_a_protocol_that_fsspec_does_not_know_is_refused_with_the_fix() -> None:
    with pytest.raises(InvalidError, match="no protocol 'nosuchstore'") as raised:
        FsspecPlace("nosuchstore", "bucket", {}, 5.0, 1)
    assert "package" in str(raised.value.hint)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"class": "no_such_package.FileSystem", "err": "Install no_such_package to go there"}
    monkeypatch.setitem(known_implementations, "notinstalled", entry)
    with pytest.raises(InvalidError) as raised:
        FsspecPlace("notinstalled", "bucket", {}, 5.0, 1)
    assert raised.value.hint == "Install no_such_package to go there."


def test_not_found_by_a_look_alone_is_not_absent(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """swiftspec says so for every status but 200."""
    memory.pipe_file("/odd/run/a/b", b"1")
    fault(monkeypatch, "info", FileNotFoundError("the store is down"))
    with pytest.raises(UnavailableError, match="lists an object"):
        tier().head("a/b")
    with pytest.raises(UnavailableError, match="lists an object"):
        tier().put("a/b", b"2")
    assert memory.cat_file("/odd/run/a/b") == b"1"
    with pytest.raises(AbsentError):
        tier().head("a/c")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PermissionError("no"), InvalidError),
        (TimeoutError("slow"), UnavailableError),
        (OSError(errno.EIO, "broken"), UnavailableError),
        (RuntimeError("odd"), UnavailableError),
        (TypeError("odd"), InvalidError),
        (KeyError("odd"), InvalidError),
    ],
)
def test_no_failure_of_a_listing_passes_for_absent(
    error: Exception, kind: type[TieredError], memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch, "ls", error)
    for call in (lambda: tier().head("a/b"), lambda: list(tier().list_keys("a"))):
        with pytest.raises(kind, match=type(error).__name__) as raised:
            call()
        assert not isinstance(raised.value, AbsentError)
        assert raised.value.hint


class RefusedByStoreError(Exception):
    """As the client of a store has it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"https://host/key?sign={CANARY} said no to {CANARY}")
        self.status_code = status


@pytest.mark.parametrize(
    ("status", "kind", "word"),
    [
        (403, InvalidError, "access denied"),
        (404, InvalidError, "404"),
        (307, TieredError, "elsewhere"),
        (503, UnavailableError, "503"),
    ],
)
def test_a_status_is_found_where_clients_keep_it(
    status: int,
    kind: type[TieredError],
    word: str,
    memory: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch, "info", RefusedByStoreError(status))
    with pytest.raises(kind, match=word) as raised:
        tier().head("a/b")
    assert not isinstance(raised.value, AbsentError)
    assert "RefusedByStoreError" in raised.value.message


def test_what_an_exception_says_is_repeated_without_secrets(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"GET https://host/k?AccessKeyId=x&Signature=abc%2F failed for {CANARY}"
    fault(monkeypatch, "info", RuntimeError(text))
    with pytest.raises(UnavailableError, match="https://host/k") as raised:
        tier(keys={"secret": CANARY}).head("a/b")
    assert CANARY not in str(raised.value)
    assert "abc" not in str(raised.value)


def test_a_call_that_never_returns_is_not_waited_for(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsspec itself waits for ever."""
    released, hung = threading.Event(), threading.Event()

    def hang(_: Any, doing: str, path: str) -> None:
        hung.set()
        released.wait(60)

    monkeypatch.setattr(Odd, "fault", hang)
    try:
        with pytest.raises(UnavailableError, match="no answer within"):
            tier(timeout_s=0.1).head("a/b")
        assert hung.is_set()
        hung.clear()
        monkeypatch.setattr(fsspec_store, "_HANGING_MAX", len(fsspec_store._hanging))
        with pytest.raises(UnavailableError, match="hang already"):
            tier(timeout_s=0.1).head("a/b")
        assert not hung.is_set(), "a thread is left behind for each"
    finally:
        released.set()
    await_that("their end", lambda: not fsspec_store._hanging)
    monkeypatch.setattr(Odd, "fault", None)
    with pytest.raises(AbsentError):
        tier().head("a/b")


@pytest.mark.parametrize("error", [NotImplementedError("no such mode"), ValueError("what mode")])
def test_without_create_only_writes_nothing_is_replaced(
    error: Exception, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch, "pipe_file create", error)
    tier().put("a/b", b"ours")
    assert memory.cat_file("/odd/run/a/b") == b"ours"
    with pytest.raises(AlreadyExistsError):
        tier().put("a/b", b"others")
    tier().upload("a/pack", BytesSource(b"12345"))
    assert memory.cat_file("/odd/run/a/pack") == b"12345"
    assert memory.cat_file("/odd/run/a/b") == b"ours"


def test_a_write_that_went_through_and_failed_is_told_as_there(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is raised then: some stores answer a lost race with a bad request."""

    def race(_: Any, doing: str, path: str) -> None:
        if doing == "pipe_file create":
            memory.pipe_file("/odd/run/a/b", b"theirs")
            raise OSError(errno.EINVAL, "precondition failed")

    monkeypatch.setattr(Odd, "fault", race)
    with pytest.raises(AlreadyExistsError):
        tier().put("a/b", b"ours")
    assert memory.cat_file("/odd/run/a/b") == b"theirs"


def test_who_was_replaced_at_once_is_told(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def race(_: Any, doing: str, path: str) -> None:
        if doing == "cat_file":
            memory.pipe_file("/odd/run/a/b", b"them")

    monkeypatch.setattr(Odd, "fault", race)
    with pytest.raises(AlreadyExistsError, match="replaced"):
        tier().put("a/b", b"ours")


def test_what_is_too_large_for_one_call_is_refused_before_a_byte(memory: Any) -> None:
    """There are no files that wait for a commit, and a pack is never seen half."""
    client = FsspecPlace("oddmem", "odd", {}, 5.0, 5 << 20).connect()
    with pytest.raises(InvalidError, match="too many for one call") as raised:
        client.begin("run/a/pack", (2 << 30) + 1, 0)
    assert "s3://" in str(raised.value.hint)
    assert memory.find("/odd") == []


def test_more_bytes_than_asked_are_not_taken(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a range is ignored: which of them are ours is not known then."""
    memory.pipe_file("/odd/run/a/b", pattern(100))
    monkeypatch.setattr(Odd, "cat_file", lambda *_, **__: pattern(100))
    with pytest.raises(InvalidError, match="more bytes came"):
        tier().read_into("a/b", 10, memoryview(bytearray(10)))


def test_a_missing_bucket_is_no_empty_run(memory: Any) -> None:
    place = FsspecPlace("oddmem", "nosuchbucket", {}, 5.0, 5 << 20)
    missing = ObjectStoreTier(place, "run", request_retry_s=0.2, part_bytes=5 << 20)
    for call in (lambda: missing.head("a/b"), lambda: list(missing.list_directories())):
        with pytest.raises(InvalidError, match="no such bucket") as raised:
            call()
        assert "never created" in str(raised.value.hint)
