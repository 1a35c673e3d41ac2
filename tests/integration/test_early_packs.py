"""Shard files that leave while slower ranks are still writing theirs."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

from dcp_tiered import IncompleteError, TieredReader, TieredWriter, UnavailableError
from dcp_tiered.format import layout
from dcp_tiered.policy.residency_schema import parse
from dcp_tiered.services import file_locks, residency_note
from dcp_tiered.services.residency import PolicyCheck
from dcp_tiered.services.save_mark import SaveMark, saving_since
from dcp_tiered.tiers.posix import PosixTier
from tests.conftest import QUICK, Run, end_flushers, flusher_pids
from tests.format_compat import own_decoder
from tests.integration.test_cli import credentials
from tests.support import runs, workers
from tests.support.nodes import make_nodes
from tests.support.ranks import run_ranks, share_ranks
from tests.support.storage_check import Eyes, published
from tests.support.workers import await_that

MIB = 1 << 20
LARGE, SMALL = 2 * MIB, 20_000
"""Bytes of a rank's state; packs are full at one MiB."""
HELD_S = 80.0


class Held(DefaultSavePlanner):
    """Writes nothing until a file says go; then does as the file says."""

    def __init__(self, go: Path) -> None:
        super().__init__()
        self.go = go

    def resolve_data(self, write_item: Any) -> Any:
        await_that("the word to go on", self.go.exists, HELD_S)
        if self.go.read_text() == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.go.read_text() == "fail":
            raise UnavailableError("injected", "local", write_item.index.fqn)
        return super().resolve_data(write_item)


def state_of(rank: int, size: int, number: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    values = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return {f"of-{rank}": values}


def save(
    rank: int,
    arguments: dict[str, Any],
    sizes: list[int],
    go: str,
    checkpoint_id: str = "step-1",
    number: int = 0,
) -> None:
    """Save one's part; the last rank when it is told to."""
    planner = Held(Path(go)) if rank == len(sizes) - 1 else DefaultSavePlanner()
    with TieredWriter(**arguments) as writer:
        dcp.save(
            state_of(rank, sizes[rank], number),
            checkpoint_id=checkpoint_id,
            storage_writer=writer,
            planner=planner,
        )


def fail_then_save(rank: int, arguments: dict[str, Any], go: str, then: str) -> None:
    """Let one save fail on the last rank, be seen, and save another one with the same writer."""
    with TieredWriter(**arguments) as writer:
        planner = Held(Path(go)) if rank == 1 else DefaultSavePlanner()
        error = runs.error_of(
            dcp.save,
            state_of(rank, LARGE),
            checkpoint_id="step-1",
            storage_writer=writer,
            planner=planner,
        )
        assert "injected" in error.message
        await_that("the word to go on", Path(then).exists, HELD_S)
        dcp.save(state_of(rank, LARGE, 2), checkpoint_id="step-2", storage_writer=writer)
        writer.wait("durable", "step-2", timeout_s=60)


def load(rank: int, arguments: dict[str, Any], sizes: list[int], number: int = 0) -> None:
    expected = state_of(rank, sizes[rank], number)
    target = {name: torch.zeros_like(value) for name, value in expected.items()}
    reader = TieredReader(**arguments)
    dcp.load(target, storage_reader=reader)
    reader.close()
    assert all(torch.equal(target[name], value) for name, value in expected.items())


def packs_of(eyes: Eyes, checkpoint_id: str = "step-1") -> list[str]:
    found = eyes.keys()
    return sorted(key for key in found if fnmatch(key, f"{checkpoint_id}/packs/*.pack"))


def arguments_of(run: Run, **changes: Any) -> dict[str, Any]:
    return runs.with_limits(run.arguments(), pack_bytes_target=MIB, **changes)


@contextmanager
def watched(run: Run, go: Path, word: str, packs: int) -> Iterator[dict[str, Any]]:
    """Give the word once so many packs are there; tell what else was there at that moment."""
    seen: dict[str, Any] = {}
    eyes = Eyes(run)

    def watch() -> None:
        await_that("packs", lambda: len(packs_of(eyes)) >= packs, HELD_S - 20)
        seen["published"] = published(runs.run_path(run))
        seen["keys"] = eyes.keys()
        go.write_text(word)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        thread.join()


def commit_of(run: Run, checkpoint_id: str = "step-1") -> dict[str, Any]:
    commits = await_that("the commit", lambda: Eyes(run).commits(checkpoint_id))
    Eyes(run).check()
    (commit,) = commits
    assert isinstance(commit, dict)
    return commit


def named(commit: dict[str, Any], checkpoint_id: str = "step-1") -> set[str]:
    """Return the keys of a commit, but for what stands beside packs on a mount."""
    names = [pack["name"] for pack in commit["packs"]]
    names += ["record-1.json", f"manifest-{commit['attempt']}.json"]
    return {f"{checkpoint_id}/{name}" for name in names}


def keys(run: Run) -> set[str]:
    found = Eyes(run).keys()
    return {key for key in found if not key.endswith(".ok")}


def status(run: Run) -> dict[str, str]:
    command = [str(Path(sys.executable).with_name("dcp-tiered")), "status", "--json"]
    done = subprocess.run([*command, str(run.local)], capture_output=True, text=True, check=True)
    lines = json.loads(done.stdout)["checkpoints"]
    return {line["checkpoint_id"]: line["state"] for line in lines}


@pytest.mark.parametrize("kind", ["s3_run", "posix_run"])
def test_a_large_shard_file_leaves_before_the_save_is_over(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run: Run = request.getfixturevalue(kind)
    go, sizes = tmp_path / "go", [LARGE, LARGE]
    with watched(run, go, "go on", 1) as seen:
        share_ranks(2, save, arguments_of(run), sizes, str(go))
    assert seen["published"] == {}, "rank 1 was still writing"
    (early,) = {key for key in seen["keys"] if not key.endswith(".ok")}
    commit = commit_of(run)
    assert len(commit["packs"]) == 2
    assert early in named(commit)
    assert keys(run) == named(commit), "nothing was uploaded twice"
    share_ranks(2, load, run.durable_only(), sizes)


def test_small_shard_files_wait_for_each_other_and_not_for_ever(
    s3_run: Run, tmp_path: Path
) -> None:
    go, sizes = tmp_path / "go", [SMALL, SMALL, SMALL]
    with watched(s3_run, go, "go on", 1) as seen:
        share_ranks(3, save, arguments_of(s3_run, linger_s=2.0), sizes, str(go))
    assert seen["published"] == {}
    (early,) = seen["keys"]
    commit = commit_of(s3_run)
    packs = [pack["name"] for pack in commit["packs"]]
    inside = [place["pack"] for place in commit["placements"]]
    assert len(packs) == 2
    assert inside.count(packs.index(early.partition("/")[2])) == 2, "ranks 0 and 1 share one"
    assert keys(s3_run) == named(commit)
    share_ranks(3, load, s3_run.durable_only(), sizes)


def test_a_save_that_dies_leaves_nothing_that_loads(s3_run: Run, tmp_path: Path) -> None:
    """What left early stays there unnamed; the save is made again under its id."""
    sizes = [LARGE, LARGE]
    go = tmp_path / "die"
    with (
        pytest.raises(AssertionError, match="rank 1 gave no answer"),
        watched(s3_run, go, "die", 1) as seen,
    ):
        run_ranks(2, save, arguments_of(s3_run), sizes, str(go), timeout_s=60)
    assert set(seen["keys"]) == keys(s3_run)
    for arguments in (s3_run.arguments(), s3_run.durable_only()):
        error = runs.error_of(load, 0, arguments, sizes)
        assert isinstance(error, IncompleteError)
    assert status(s3_run) == {"step-1": "saving"}
    go = tmp_path / "again"
    go.write_text("go on")
    share_ranks(2, save, arguments_of(s3_run), sizes, str(go), "step-1", 7)
    commit = commit_of(s3_run)
    assert keys(s3_run) == named(commit) | set(seen["keys"])
    share_ranks(2, load, s3_run.durable_only(), sizes, 7)


def test_what_an_earlier_save_left_does_not_leave_with_the_next_one(
    s3_run: Run, tmp_path: Path
) -> None:
    go, sizes = tmp_path / "die", [LARGE, LARGE]
    go.write_text("die")
    with runs.no_flusher(s3_run), pytest.raises(AssertionError, match="rank 1 gave no answer"):
        run_ranks(2, save, arguments_of(s3_run), sizes, str(go), timeout_s=60)
    (left,) = runs.shards(s3_run, "step-1")
    go = tmp_path / "go"
    with watched(s3_run, go, "go on", 1):
        share_ranks(2, save, arguments_of(s3_run, linger_s=0.0), sizes, str(go), "step-1", 7)
    commit = commit_of(s3_run)
    assert left.name not in {place["shard"] for place in commit["placements"]}
    assert keys(s3_run) == named(commit)


def test_a_flusher_that_is_killed_meanwhile_costs_no_second_pack(
    s3_run: Run, tmp_path: Path
) -> None:
    go, sizes = tmp_path / "go", [LARGE, SMALL, LARGE]
    eyes = Eyes(s3_run)

    def kill() -> None:
        await_that("both packs", lambda: len(packs_of(eyes)) >= 2, HELD_S - 20)
        end_flushers(s3_run.local)
        go.write_text("go on")

    thread = threading.Thread(target=kill)
    thread.start()
    arguments = arguments_of(s3_run, linger_s=0.5)
    share_ranks(3, save, arguments, sizes, str(go))
    thread.join()
    runs.wait(arguments, "step-1")  # to the save, the killed one may have seemed alive
    commit = commit_of(s3_run)
    assert len(commit["packs"]) == 3
    assert keys(s3_run) == named(commit)


def test_a_save_that_failed_keeps_no_flusher(s3_run: Run, tmp_path: Path) -> None:
    """Nobody tells the coordinator that another rank failed; its next save does."""
    go, then = tmp_path / "go", tmp_path / "then"
    arguments = arguments_of(s3_run, idle_exit_s=1.0)

    def watch() -> None:
        await_that("rank 0's pack", lambda: packs_of(Eyes(s3_run)), HELD_S - 20)
        go.write_text("fail")
        then.write_text("")

    thread = threading.Thread(target=watch)
    thread.start()
    share_ranks(2, fail_then_save, arguments, str(go), str(then))
    thread.join()
    await_that("the end of the flusher", lambda: not flusher_pids(s3_run.local))
    assert status(s3_run) == {"step-1": "saving", "step-2": "durable"}
    assert Eyes(s3_run).commits("step-1") == []
    assert len(packs_of(Eyes(s3_run))) == 1, "the pack that left before the save failed"


def start_drain(run: Run, deadline: str, **changes: Any) -> subprocess.Popen[str]:
    """Drain as an operator does, with the limits of tests and packs of one MiB."""
    assert run.server is not None
    command = [str(Path(sys.executable).with_name("dcp-tiered")), "drain", str(run.local)]
    limits = {name: getattr(run.limits, name) for name in ("linger_s", "poll_s", "takeover_s")}
    return subprocess.Popen(
        [*command, "--deadline", deadline],
        env={
            **os.environ,
            **credentials(run.server),
            "FSSPEC_TIERED_LIMITS": json.dumps({**limits, "pack_bytes_target": MIB} | changes),
        },
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_drain_waits_for_the_save_that_goes_on(s3_run: Run, tmp_path: Path) -> None:
    go, sizes = tmp_path / "go", [LARGE, LARGE]
    said: dict[str, Any] = {}
    eyes = Eyes(s3_run)

    def watch() -> None:
        await_that("rank 0's pack", lambda: packs_of(eyes), HELD_S - 40)
        first = start_drain(s3_run, "4s")
        said["first"] = first.communicate(), first.returncode
        second = start_drain(s3_run, "60s")
        go.write_text("go on")
        said["second"] = second.communicate(), second.returncode

    thread = threading.Thread(target=watch)
    thread.start()
    share_ranks(2, save, arguments_of(s3_run), sizes, str(go))
    thread.join()
    (text, _), code = said["first"]
    assert "step-1: stays on this node: its save is not over" in text
    assert code == 4
    (text, _), code = said["second"]
    assert text.endswith(": all durable\n")
    assert code == 0
    assert keys(s3_run) == named(commit_of(s3_run))


# ---------------------------------------------------------------- what the mark says


@pytest.fixture
def tier(tmp_path: Path) -> PosixTier:
    return PosixTier(tmp_path, tmp_path, "local")


def hold_mark(root: Path) -> None:
    mark = SaveMark(PosixTier(root, root, "local"), "step-1")
    signal.pause()
    mark.release()


def test_a_mark_ends_with_its_process(tier: PosixTier) -> None:
    process, _ = workers.start(hold_mark, tier.root)
    since = await_that("the mark", lambda: saving_since(tier, "step-1"))
    tier.put("step-1/0-00.shard", b"")
    assert since <= (tier.root / "step-1/0-00.shard").stat().st_mtime_ns
    process.kill()
    process.join()
    assert saving_since(tier, "step-1") is None
    again = SaveMark(tier, "step-1")
    renewed = saving_since(tier, "step-1")
    assert renewed is not None
    assert renewed > (tier.root / "step-1/0-00.shard").stat().st_mtime_ns
    again.release()
    assert saving_since(tier, "step-1") is None
    assert not (tier.root / "step-1" / layout.SAVING_NAME).exists()


def test_a_mark_ends_although_a_child_was_forked_meanwhile(tier: PosixTier) -> None:
    mark = SaveMark(tier, "step-1")
    with subprocess.Popen(["/bin/sleep", "60"], close_fds=False) as child:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        assert saving_since(tier, "step-1") is not None
        mark.release()
        assert saving_since(tier, "step-1") is None
        for one in (pid, child.pid):
            os.kill(one, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_of_two_saves_of_an_id_the_later_one_counts(tier: PosixTier) -> None:
    first = SaveMark(tier, "step-1")
    earlier = saving_since(tier, "step-1")
    assert earlier is not None
    time.sleep(0.02)
    second = SaveMark(tier, "step-1")
    later = saving_since(tier, "step-1")
    assert later is not None
    assert later > earlier
    first.release()
    assert saving_since(tier, "step-1") == later
    second.release()
    assert saving_since(tier, "step-1") is None


def hold_mark_beyond(root: Path) -> None:
    """Die with a mark whose descriptor a child still has."""
    mark = SaveMark(PosixTier(root, root, "local"), "step-1")
    if pid := os.fork():
        (root / "child").write_text(str(pid))
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
    mark.release()


def test_a_child_that_outlives_a_save_does_not_stand_for_the_next_one(tier: PosixTier) -> None:
    process, _ = workers.start(hold_mark_beyond, tier.root)
    process.join()
    pid = int((tier.root / "child").read_text())
    try:
        before = saving_since(tier, "step-1")
        assert before is not None, "nobody can tell"
        time.sleep(0.02)
        mark = SaveMark(tier, "step-1")
        after = saving_since(tier, "step-1")
        assert after is not None
        assert after > before, "what the dead save left is none of the new one's"
        mark.release()
        assert saving_since(tier, "step-1") is None
    finally:
        os.kill(pid, signal.SIGKILL)


def test_marks_keep_no_descriptors(tier: PosixTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def refuse(_: int) -> bool:
        raise OSError(errno.ENOLCK, "no locks available")

    before = count()
    for _ in range(20):
        SaveMark(tier, "step-1").release()
        SaveMark(tier, "step-1")
    assert count() == before
    monkeypatch.setattr(file_locks, "try_lock", refuse)
    for _ in range(20):
        SaveMark(tier, "step-1")
    assert count() == before
    assert saving_since(tier, "step-1") is None


# ---------------------------------------------------------------- residency


@pytest.mark.parametrize("sealed_under", ["another", "the same", "replaced by it", "none"])
def test_nothing_leaves_early_under_another_policy_than_it_was_sealed_under(
    sealed_under: str, tmp_path: Path
) -> None:
    """Ranks may not have agreed on one yet; the policy before this one may forbid the target."""
    mine, other = (
        parse({"allow": [{"provider": "posix", "site_id": site}]}) for site in ("fra", "iad")
    )
    node = make_nodes(2, tmp_path, tmp_path / "durable", replace(QUICK, linger_s=0.0))[1]
    if sealed_under == "replaced by it":
        residency_note.note_policy(node.local, other)
    residency_note.note_policy(node.local, mine)
    known = residency_note.known_policies(node.local)
    check = PolicyCheck(mine, lambda: pytest.fail("not looked at"), earlier=known)
    node.restart(check)
    under = {"the same": mine.sha256, "none": None}.get(sealed_under, other.sha256)
    node.seal("step-1", 2, "00" * 8, policy_sha256=under)
    node.flusher.step()
    left = list((tmp_path / "durable").rglob("*.pack"))
    assert len(left) == (sealed_under in ("the same", "none"))


@pytest.mark.parametrize("is_none", [True, False])
def test_a_flusher_without_a_policy_sends_what_was_sealed_without_one(
    is_none: bool, tmp_path: Path
) -> None:
    node = make_nodes(2, tmp_path, tmp_path / "durable", replace(QUICK, linger_s=0.0))[1]
    node.seal("step-1", 2, "00" * 8, policy_sha256=None if is_none else "ab" * 32)
    node.flusher.step()
    assert len(list((tmp_path / "durable").rglob("*.pack"))) == is_none


def test_a_shard_file_says_under_which_policy_it_was_sealed(posix_run: Run) -> None:
    policy = {"allow": [{"provider": "posix", "site_id": "fra"}]}
    runs.save(posix_run.arguments(), "with", 1, residency=policy)
    (shard,) = runs.shards(posix_run, "with")
    header, _ = own_decoder.shard_file(shard.read_bytes())
    manifest = published(runs.run_path(posix_run))["with"]
    assert header["policy_sha256"] == manifest["policy_sha256"] == parse(policy).sha256
    runs.save(posix_run.arguments(), "without", 2)
    (shard,) = runs.shards(posix_run, "without")
    header, _ = own_decoder.shard_file(shard.read_bytes())
    assert "policy_sha256" not in header
