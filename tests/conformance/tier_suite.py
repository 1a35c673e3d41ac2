"""What every `Tier` promises. An implementation adds a subclass that tells how to reach its store.

The oracle of each test is a `Store`: it reads and writes the store without the code under test.
"""

import multiprocessing
import os
import pickle
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import pytest

from dcp_tiered.errors import (
    AbsentError,
    AlreadyExistsError,
    CorruptError,
    InvalidError,
    TieredError,
)
from dcp_tiered.interfaces import Tier
from tests.support.sources import BytesSource, pattern

PART_BYTES = 5 << 20
"""The smallest part that S3 takes; the tiers under test are told to use it."""
SIZES = {
    "empty": 0,
    "one-byte": 1,
    "small": 70_001,
    "one-part": PART_BYTES,
    "one-part-and-a-byte": PART_BYTES + 1,
    "many-parts": 3 * PART_BYTES + 17,
}
ODD_ROOTS = [
    "with spaces and more",
    "ünï/cødé-日本",
    "exp[1]*",
    "a{b}(c)+d=e&f%g",
    "at@home",
    "100%25",
    ".hidden/..dots",
    "semi;colon,comma'quote\"$!~",
]
_THREADS = 8
_PROCESSES = 4
_SECRET = "canary-secret-9f8e7d"


class Store(Protocol):
    """A store as it really is."""

    def read(self, key: str) -> bytes:
        """Return an object."""
        ...

    def write(self, key: str, data: bytes) -> None:
        """Put an object as somebody else would."""
        ...

    def keys(self) -> set[str]:
        """Return all keys below the run root."""
        ...

    def leftovers(self) -> list[str]:
        """Return unfinished uploads and temporaries, wherever the store keeps them."""
        ...


class TierSuite:
    """The promise of `Tier`."""

    keeps_crc32c = False
    """Whether the store computes a checksum of its own."""
    lets_one_in = True
    """Whether of those that put a key at the same instant one wins, and not several."""

    @pytest.fixture
    def root(self) -> str:
        """Return a fresh name for a run root."""
        return f"run-{secrets.token_hex(6)}"

    def make_tier(self, root: str) -> Tier:
        """Return a tier with a client of its own on a run root."""
        raise NotImplementedError

    def make_store(self, root: str) -> Store:
        """Return independent eyes on a run root."""
        raise NotImplementedError

    def make_broken_tier(self, root: str, secret: str) -> Tier:
        """Return a tier that cannot reach its store; its settings hold `secret`."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self, root: str) -> Iterator[Tier]:
        tier = self.make_tier(root)
        yield tier
        tier.close()

    @pytest.fixture
    def store(self, root: str) -> Store:
        return self.make_store(root)

    # ---------------------------------------------------------------------------------- put

    @pytest.mark.parametrize("data", [b"", b"x", pattern(100_000)], ids=["empty", "byte", "100kB"])
    def test_put_makes_an_object_visible(self, tier: Tier, store: Store, data: bytes) -> None:
        tier.put("step-1/record-1.json", data)
        assert store.keys() == {"step-1/record-1.json"}
        assert store.read("step-1/record-1.json") == data
        assert store.leftovers() == []

    def test_put_does_not_replace(self, tier: Tier, store: Store) -> None:
        store.write("step-1/record-1.json", b"theirs")
        with pytest.raises(AlreadyExistsError):
            tier.put("step-1/record-1.json", b"ours")
        assert store.read("step-1/record-1.json") == b"theirs"
        assert store.leftovers() == []

    def test_put_of_the_same_bytes_again_is_told(self, tier: Tier) -> None:
        tier.put("a/b", b"same")
        with pytest.raises(AlreadyExistsError):
            tier.put("a/b", b"same")

    def test_of_racing_threads_one_puts(self, root: str, store: Store) -> None:
        tiers = [self.make_tier(root) for _ in range(_THREADS)]
        gate = threading.Barrier(_THREADS)

        def race(number: int) -> bool:
            gate.wait()
            return _wins(tiers[number], "step-1/record-1.json", number)

        with ThreadPoolExecutor(_THREADS) as pool:
            won = list(pool.map(race, range(_THREADS)))
        self._check_race(won, store)

    def test_of_racing_processes_one_puts(self, tier: Tier, store: Store) -> None:
        context = multiprocessing.get_context("spawn")
        gate = context.Barrier(_PROCESSES)
        with context.Pool(_PROCESSES, initializer=_arm, initargs=(gate,)) as pool:
            tasks = [(tier, number) for number in range(_PROCESSES)]
            won = pool.map(_race_in_process, tasks, chunksize=1)
        self._check_race(won, store)

    def _check_race(self, won: list[bool], store: Store) -> None:
        assert sum(won) == 1 or (any(won) and not self.lets_one_in)
        assert won[int(store.read("step-1/record-1.json"))], "who is there believes that it is"
        assert store.leftovers() == []

    # ------------------------------------------------------------------------------- upload

    @pytest.mark.parametrize("length", SIZES.values(), ids=SIZES)
    def test_upload_makes_an_object_visible(self, tier: Tier, store: Store, length: int) -> None:
        data = pattern(length)
        tier.upload("step-1/packs/a.pack", BytesSource(data))
        assert store.keys() == {"step-1/packs/a.pack"}
        assert store.read("step-1/packs/a.pack") == data
        assert store.leftovers() == []

    @pytest.mark.parametrize("length", [70_001, PART_BYTES + 1])
    def test_upload_of_the_same_bytes_again_is_a_success(
        self, tier: Tier, store: Store, length: int
    ) -> None:
        data = pattern(length)
        store.write("a.pack", data)
        tier.upload("a.pack", BytesSource(data))
        assert store.read("a.pack") == data

    @pytest.mark.parametrize("length", SIZES.values(), ids=SIZES)
    def test_upload_says_of_an_object_what_a_look_says(self, tier: Tier, length: int) -> None:
        """The first time by what it has sent, the second by what is there."""
        said = [tier.upload("a.pack", BytesSource(pattern(length))) for _ in range(2)]
        assert said == [tier.head("a.pack")] * 2

    @pytest.mark.parametrize("other", [b"short", pattern(70_001, "x")], ids=["length", "bytes"])
    def test_upload_over_other_bytes_is_an_error(
        self, tier: Tier, store: Store, other: bytes
    ) -> None:
        tier.upload("a.pack", BytesSource(other))
        with pytest.raises(CorruptError):
            tier.upload("a.pack", BytesSource(pattern(70_001)))
        assert store.read("a.pack") == other
        assert store.leftovers() == []

    @pytest.mark.parametrize("length", SIZES.values(), ids=SIZES)
    def test_upload_of_a_damaged_source_leaves_nothing(
        self, tier: Tier, store: Store, length: int
    ) -> None:
        data = pattern(length)
        with pytest.raises(CorruptError) as raised:
            tier.upload("a.pack", BytesSource(data, BytesSource(data).crc32c ^ 1))
        assert raised.value.key == "a.pack"
        assert store.keys() == set()
        assert store.leftovers() == []

    def test_upload_reports_a_source_that_cannot_be_read(self, tier: Tier, store: Store) -> None:
        for length in (70_001, 3 * PART_BYTES):
            with pytest.raises(CorruptError, match="disk is gone"):
                tier.upload("a.pack", _Unreadable(pattern(length), length // 2))
            assert store.keys() == set()
            assert store.leftovers() == []

    def test_uploads_of_one_object_at_once_all_succeed(self, root: str, store: Store) -> None:
        data = pattern(70_001)
        tiers = [self.make_tier(root) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda tier: tier.upload("a.pack", BytesSource(data)), tiers))
        assert store.read("a.pack") == data

    # ---------------------------------------------------------------------------------- get

    @pytest.mark.parametrize("data", [b"", b"x", pattern(300_000)], ids=["empty", "byte", "300kB"])
    def test_get_returns_what_is_there(self, tier: Tier, store: Store, data: bytes) -> None:
        store.write("a/b.json", data)
        assert tier.get("a/b.json", len(data)) == data

    def test_get_refuses_what_is_larger_than_asked(self, tier: Tier, store: Store) -> None:
        store.write("a/b.json", b"12345")
        with pytest.raises(CorruptError):
            tier.get("a/b.json", 4)

    @pytest.mark.parametrize("key", ["a/absent", "a", "a/b.jso"])
    def test_what_is_not_there_is_absent(self, tier: Tier, store: Store, key: str) -> None:
        store.write("a/b.json", b"12345")
        with pytest.raises(AbsentError):
            tier.get(key, 100)
        with pytest.raises(AbsentError):
            tier.read_into(key, 0, memoryview(bytearray(1)))
        with pytest.raises(AbsentError):
            tier.head(key)

    # ---------------------------------------------------------------------------- read_into

    def test_read_into_is_exact_at_every_border(self, tier: Tier, store: Store) -> None:
        length = (1 << 20) + 3
        data = pattern(length)
        store.write("a.pack", data)
        borders = [0, 1, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, length - 1, length]
        for start in borders:
            for end in (border for border in borders if border > start):
                buffer = bytearray(end - start + 2)
                tier.read_into("a.pack", start, memoryview(buffer)[1:-1])
                assert buffer[1:-1] == data[start:end], (start, end)
                assert (buffer[0], buffer[-1]) == (0, 0)

    def test_read_into_nothing_reads_nothing(self, tier: Tier, store: Store) -> None:
        store.write("a.pack", b"12345")
        tier.read_into("a.pack", 2, memoryview(bytearray()))

    @pytest.mark.parametrize(("start", "length"), [(0, 6), (4, 2), (5, 1), (6, 1), (1 << 40, 10)])
    def test_read_into_past_the_end_is_corrupt(
        self, tier: Tier, store: Store, start: int, length: int
    ) -> None:
        store.write("a.pack", b"12345")
        with pytest.raises(CorruptError):
            tier.read_into("a.pack", start, memoryview(bytearray(length)))

    def test_read_into_an_empty_object_is_corrupt(self, tier: Tier, store: Store) -> None:
        store.write("a.pack", b"")
        with pytest.raises(CorruptError):
            tier.read_into("a.pack", 0, memoryview(bytearray(1)))

    def test_read_into_sees_a_replaced_object(self, tier: Tier, store: Store) -> None:
        """O070: no length is remembered from an earlier look."""
        store.write("a.pack", b"long enough")
        tier.head("a.pack")
        list(tier.list_keys("a"))
        store.write("a.pack", b"longer than it was before")
        buffer = bytearray(6)
        tier.read_into("a.pack", 19, memoryview(buffer))
        assert buffer == b"before"
        store.write("a.pack", b"short")
        with pytest.raises(CorruptError):
            tier.read_into("a.pack", 4, memoryview(buffer))

    # --------------------------------------------------------------------------------- head

    @pytest.mark.parametrize("length", [0, 5, PART_BYTES + 1])
    def test_head_tells_length_and_checksum(self, tier: Tier, length: int) -> None:
        source = BytesSource(pattern(length))
        tier.upload("a/b.pack", source)
        info = tier.head("a/b.pack")
        assert (info.key, info.length) == ("a/b.pack", length)
        assert info.crc32c == (source.crc32c if self.keeps_crc32c else None)

    def test_head_of_what_others_wrote_has_a_length(self, tier: Tier, store: Store) -> None:
        store.write("a/b.pack", b"12345")
        assert tier.head("a/b.pack").length == 5

    # --------------------------------------------------------------------------------- list

    def test_a_run_root_that_is_not_there_is_empty(self, tier: Tier) -> None:
        assert list(tier.list_keys("step-1")) == []
        assert list(tier.list_directories()) == []

    def test_lists_keep_to_the_directory(self, tier: Tier, store: Store) -> None:
        theirs = {"step-1/record-1.json", "step-1/packs/a.pack"}
        others = {"step-10/record-1.json", "step-1x/b", "step-/c", "step-10/step-1/d", "top"}
        for key in theirs | others:
            store.write(key, b"x")
        assert set(tier.list_keys("step-1")) == theirs
        assert set(tier.list_keys("step-1/")) == theirs
        assert set(tier.list_keys("step-1/packs")) == {"step-1/packs/a.pack"}
        assert sorted(tier.list_directories()) == ["step-", "step-1", "step-10", "step-1x"]

    def test_run_roots_that_begin_alike_are_strangers(self, tier: Tier, root: str) -> None:
        self.make_store(f"{root}0").write("step-1/a", b"x")
        self.make_store(f"{root}/below").write("step-1/a", b"x")
        assert list(tier.list_keys("step-1")) == []
        assert list(tier.list_directories()) == ["below"]

    def test_more_than_one_page_is_listed(self, tier: Tier, store: Store) -> None:
        keys = {f"step-1/packs/{number:04}" for number in range(1003)}
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda key: store.write(key, b""), keys))
        listed = list(tier.list_keys("step-1"))
        assert len(listed) == 1003
        assert set(listed) == keys
        assert list(tier.list_directories()) == ["step-1"]

    def test_lists_and_looks_are_fresh(self, tier: Tier, root: str, store: Store) -> None:
        """O069: what others wrote a moment ago is there, for a client that looked before."""
        other = self.make_tier(root)
        for number in range(5):
            key = f"step-{number}/record-1.json"
            assert key not in tier.list_keys(f"step-{number}")
            assert f"step-{number}" not in tier.list_directories()
            with pytest.raises(AbsentError):
                tier.head(key)
            other.put(key, b"12345")
            assert list(tier.list_keys(f"step-{number}")) == [key]
            assert f"step-{number}" in tier.list_directories()
            assert tier.head(key).length == 5
        other.close()
        assert len(store.keys()) == 5

    @pytest.mark.parametrize("odd", ODD_ROOTS)
    def test_odd_run_roots_are_literal(self, odd: str, root: str) -> None:
        """O078, O079: no glob, no escape, no nesting; a sibling that would match is left alone."""
        tier, store = self.make_tier(f"{root}/{odd}"), self.make_store(f"{root}/{odd}")
        self.make_store(f"{root}/exp1x").write("step-1/sibling", b"x")
        tier.put("step-1/record-1.json", b"{}")
        tier.upload("step-1/packs/a.pack", BytesSource(b"12345"))
        # O080: once more, as a retry would, changes nothing.
        tier.upload("step-1/packs/a.pack", BytesSource(b"12345"))
        keys = {"step-1/record-1.json", "step-1/packs/a.pack"}
        assert store.keys() == keys
        assert set(tier.list_keys("step-1")) == keys
        assert list(tier.list_directories()) == ["step-1"]
        assert tier.get("step-1/record-1.json", 10) == b"{}"
        assert tier.head("step-1/packs/a.pack").length == 5
        buffer = bytearray(3)
        tier.read_into("step-1/packs/a.pack", 2, memoryview(buffer))
        assert buffer == b"345"
        tier.delete("step-1/packs/a.pack")
        assert store.keys() == {"step-1/record-1.json"}
        tier.close()

    # ------------------------------------------------------------------------------- delete

    @pytest.mark.parametrize("key", ["a/bb", "a/packs/x.pack", "a/b c+d=e&f%20g", "a/ünï-日本"])
    def test_delete_removes_exactly_that_object(self, tier: Tier, store: Store, key: str) -> None:
        """O047: nothing else whose key begins so, or that lies below it."""
        others = {f"{key}.ok", f"{key}0", f"{key[:-1]}", "a/packs/y.pack", "ab/b", "b"}
        for name in {key, *others}:
            store.write(name, b"12345")
        tier.delete(key)
        assert store.keys() == others
        assert set(tier.list_keys("a")) == others - {"ab/b", "b"}
        with pytest.raises(AbsentError):
            tier.head(key)
        with pytest.raises(AbsentError):
            tier.get(key, 5)

    def test_delete_of_what_is_not_there_is_a_success(self, tier: Tier, store: Store) -> None:
        tier.put("a/b", b"1")
        for _ in range(2):
            tier.delete("a/b")
        tier.delete("never/was")
        store.write("a/b/c", b"2")
        tier.delete("a/b")  # a directory, where there are any
        tier.delete("a/b/c/d")
        assert store.keys() == {"a/b/c"}
        tier.delete("a/b/c")
        assert store.keys() == set()

    def test_what_was_deleted_can_be_there_again(self, tier: Tier, store: Store) -> None:
        """In the same client: it remembers nothing of what was there."""
        for data in (pattern(70_001), pattern(PART_BYTES + 1, "x")):
            tier.upload("a/packs/a.pack", BytesSource(data))
            tier.put("a/record-1.json", data[:9])
            assert store.read("a/packs/a.pack") == data
            for key in ("a/packs/a.pack", "a/record-1.json"):
                tier.delete(key)
            assert list(tier.list_keys("a")) == []
            assert store.keys() == set()

    # ------------------------------------------------------------------------------- errors

    def test_errors_carry_tier_key_and_hint_and_no_secret(self, root: str) -> None:
        tier = self.make_broken_tier(root, _SECRET)
        buffer = memoryview(bytearray(5))
        calls: list[Callable[[], Any]] = [
            lambda: tier.put("step-1/a", b"x"),
            lambda: tier.upload("step-1/a", BytesSource(b"12345")),
            lambda: tier.get("step-1/a", 5),
            lambda: tier.read_into("step-1/a", 0, buffer),
            lambda: tier.head("step-1/a"),
            lambda: list(tier.list_keys("step-1")),
            lambda: list(tier.list_directories()),
            lambda: tier.delete("step-1/a"),
        ]
        for call in calls:
            with pytest.raises(InvalidError) as raised:
                call()
            error = raised.value
            assert error.tier == tier.name
            assert error.key
            assert error.hint
            assert _SECRET not in _all_text(error)
        assert _SECRET not in repr(tier)
        assert _SECRET not in tier.url

    def test_absent_is_said_with_tier_and_key(self, tier: Tier) -> None:
        with pytest.raises(AbsentError) as raised:
            tier.head("step-1/absent")
        assert raised.value.tier == tier.name
        assert str(raised.value.key).endswith("step-1/absent")

    # -------------------------------------------------------------------------- concurrency

    def test_one_tier_serves_threads_at_once(self, tier: Tier, store: Store) -> None:
        def work(number: int) -> None:
            data = pattern(20_000, str(number))
            for turn in range(5):
                key = f"step-{number}/{turn}"
                tier.put(f"{key}.json", data)
                tier.upload(f"{key}.pack", BytesSource(data))
                assert tier.get(f"{key}.json", len(data)) == data
                buffer = bytearray(100)
                tier.read_into(f"{key}.pack", 7, memoryview(buffer))
                assert buffer == data[7:107]
            assert len(list(tier.list_keys(f"step-{number}"))) == 10

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(work, range(_THREADS)))
        assert len(store.keys()) == _THREADS * 10

    def test_a_pickled_tier_works(self, tier: Tier, store: Store) -> None:
        tier.put("a/before", b"1")
        copy: Tier = pickle.loads(pickle.dumps(tier))
        copy.put("a/after", b"2")
        assert (copy.name, copy.url) == (tier.name, tier.url)
        assert store.keys() == {"a/before", "a/after"}
        copy.close()

    def test_a_tier_works_on_both_sides_of_a_fork(self, tier: Tier, store: Store) -> None:
        tier.put("a/before", b"1")
        # `_exit` from a plain fork: the child must not run pytest's ending.
        child = os.fork()
        if child == 0:
            try:
                tier.put("a/child", b"2")
                os._exit(0 if tier.get("a/before", 1) == b"1" else 2)
            finally:
                os._exit(1)
        tier.put("a/parent", b"3")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert tier.get("a/child", 1) == b"2"
        assert store.keys() == {"a/before", "a/child", "a/parent"}

    def test_a_closed_tier_opens_again(self, tier: Tier) -> None:
        tier.put("a/b", b"1")
        tier.close()
        tier.close()
        assert tier.get("a/b", 1) == b"1"


class _Unreadable(BytesSource):
    def __init__(self, data: bytes, bad_at: int) -> None:
        super().__init__(data)
        self._bad_at = bad_at

    def pread(self, length: int, start: int) -> bytes:
        if start + length > self._bad_at:
            raise CorruptError("disk is gone", "local", "a.pack")
        return super().pread(length, start)


def _all_text(error: BaseException | None) -> str:
    """Return everything that a traceback of an error would show, causes included."""
    text = ""
    while error is not None:
        text += f"{error!r} {error} {error.args}"
        error = error.__cause__ or error.__context__
    return text


def _wins(tier: Tier, key: str, number: int) -> bool:
    try:
        tier.put(key, str(number).encode())
    except AlreadyExistsError:
        return False
    except TieredError as error:
        raise AssertionError(f"a loser gets AlreadyExistsError, not {error!r}") from error
    return True


_gate: Any = None


def _arm(gate: Any) -> None:
    global _gate  # noqa: PLW0603 - how a pool hands a barrier to its processes
    _gate = gate


def _race_in_process(task: tuple[Tier, int]) -> bool:
    tier, number = task
    with pytest.raises(AbsentError):
        tier.head("step-1/record-1.json")  # connects, so that the race below is a race
    _gate.wait()
    return _wins(tier, "step-1/record-1.json", number)
