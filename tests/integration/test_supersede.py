"""A save that lacks room gives up the flush of older checkpoints, and everybody learns of it."""

import json
import logging
import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tiered import (
    AbsentError,
    BackpressureError,
    SupersededError,
    TieredWriter,
)
from dcp_tiered.cli import main
from dcp_tiered.services import progress, run_directory, superseded_notes
from dcp_tiered.services.catalog import Catalog
from dcp_tiered.services.local_space import LocalSpace
from dcp_tiered.tiers.posix import PosixTier
from examples.seaweed import SeaweedS3
from tests.conftest import QUICK, Run, end_flushers, flusher_pids
from tests.support import runs, workers
from tests.support.fault_proxy import LOST_REPLY, STALL, Fault, FaultProxy, Request
from tests.support.nodes import Node, make_nodes, publish
from tests.support.ranks import run_ranks
from tests.support.storage_check import Eyes
from tests.support.workers import await_that

ONE = 800_000
"""Bytes of one state of `runs.state_of`, a little less than its shard file."""


def superseding(run: Run, **limits: Any) -> dict[str, Any]:
    limits = {"pending_checkpoints_max": 2, "backpressure_wait_s": 60.0, **limits}
    return {**runs.with_limits(run.arguments(), **limits), "tiered": {"on_full": "supersede"}}


def tier_of(run: Run) -> PosixTier:
    return PosixTier(runs.run_path(run), run.local, "local")


def states(local: PosixTier) -> dict[str, str]:
    lines = progress.status(Catalog(local, None), local)
    return {line.checkpoint_id: line.state for line in lines}


def records(eyes: Eyes, checkpoint_id: str) -> list[dict[str, Any]]:
    """Return the log of an id, read without our code."""
    keys = [key for key in sorted(eyes.keys()) if key.startswith(f"{checkpoint_id}/record-")]
    return [json.loads(eyes.get(key)) for key in keys]


def fenced(eyes: Eyes, checkpoint_id: str) -> list[str]:
    """Return the attempts that the durable tier declares dead."""
    log = records(eyes, checkpoint_id)
    return [attempt for one in log if one["kind"] == "fence" for attempt in one["attempts"]]


def notes(local: PosixTier) -> dict[str, list[str]]:
    """Return the attempts that are given up on a node, by id, as the names of files say."""
    found: dict[str, list[str]] = {}
    for path in sorted(local.root.glob("*/superseded-*.json")):
        attempt = path.stem.removeprefix("superseded-")
        assert json.loads(path.read_bytes())["attempt"] == attempt
        found.setdefault(path.parent.name, []).append(attempt)
    return found


def attempt_of(local: PosixTier, checkpoint_id: str) -> str:
    published = Catalog(local, None).published(checkpoint_id)
    assert published is not None
    return published.head.attempt


def test_saves_go_on_without_a_flusher(s3_run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run, arguments = s3_run, superseding(s3_run)
    local, eyes = tier_of(run), Eyes(run)
    with TieredWriter(**arguments) as writer:
        with runs.no_flusher(run), caplog.at_level(logging.WARNING, "dcp_tiered"):
            for number, name in enumerate("abcd"):
                dcp.save(runs.state_of(number), checkpoint_id=name, storage_writer=writer)
            assert sorted(notes(local)) == ["a", "b"]
            lines = {line.checkpoint_id: line for line in writer.status()}
            assert [lines[name].state for name in "abcd"] == ["superseded"] * 2 + ["local"] * 2
            assert "c needs room: 2 checkpoints wait" in str(lines["a"].error)
            error = runs.error_of(writer.wait, "durable", "a", timeout_s=30)
            assert isinstance(error, SupersededError)
            assert isinstance(error, BackpressureError)
            writer.wait("local", "a", timeout_s=5)
            assert [runs.load(arguments, name) for name in "abcd"] == [0, 1, 2, 3]
            assert runs.load(arguments) == 3
            counted = writer.metrics()
            assert counted["dcp_tiered_superseded_checkpoints_total"] == 2
            assert counted["dcp_tiered_backpressure_waits_total"] == 0
            assert eyes.keys() == {}, "the trainer writes nothing to the durable tier"
        for name in "cd":
            writer.wait("durable", name, timeout_s=60)
        await_that("the fences", lambda: fenced(eyes, "a") and fenced(eyes, "b"))
        for name in "ab":
            assert fenced(eyes, name) == notes(local)[name] == [attempt_of(local, name)]
            assert eyes.commits(name) == []
            assert runs.load(arguments, name) == "ab".index(name)
            with pytest.raises(SupersededError):
                writer.wait("durable", name, timeout_s=30)
        assert states(local) == dict(zip("abcd", ["superseded"] * 2 + ["durable"] * 2, strict=True))
    assert sorted(eyes.check().commits) == ["c", "d"]
    warned = [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]
    given_up = [line for line in warned if line.startswith("superseded: a, attempt ")]
    assert len(given_up) == 1
    assert "c needs room" in given_up[0]


@pytest.mark.slow
def test_a_store_that_is_down_holds_up_no_save_on_one_node(tmp_path: Path, local: Path) -> None:
    with SeaweedS3(tmp_path / "weed") as server:
        run = Run("tiered::s3://ckpt/run", local, {"s3": server.storage_options()}, server)
        arguments = superseding(run, request_retry_s=0.5, local_bytes_max=4 * ONE)
        server.stop()
        for number, name in enumerate("abcdef"):
            runs.save(arguments, name, number)
            held = [path.stat().st_size for path in runs.run_path(run).glob("*/*.shard")]
            assert sum(held) <= 4 * ONE
        assert flusher_pids(local), "one has been trying all the time"
        assert runs.load(arguments, "f") == 5
        assert not runs.shards(run, "a"), "its room was needed"
        server.start()
        for name in "ef":
            runs.wait(arguments, name)
        eyes = Eyes(run)
        await_that("all fences", lambda: all(fenced(eyes, name) for name in "abcd"))
        assert {name: fenced(eyes, name) for name in "abcd"} == notes(tier_of(run))
        assert sorted(eyes.check().commits) == ["e", "f"]
        with TieredWriter(**arguments) as writer, pytest.raises(SupersededError):
            writer.wait("durable", "a", timeout_s=5)
        end_flushers(local)


def test_what_is_superseded_goes_when_its_room_is_needed(posix_run: Run) -> None:
    arguments = superseding(posix_run, pending_checkpoints_max=8, local_bytes_max=3 * ONE)
    with runs.no_flusher(posix_run):
        for number, name in enumerate("abcde"):
            runs.save(arguments, name, number)
        path = runs.run_path(posix_run)
        assert sorted({file.parent.name for file in path.glob("*/*.shard")}) == ["d", "e"]
        assert sorted({file.parent.name for file in path.glob("*/published-*")}) == ["d", "e"]
        assert [runs.load(arguments, name) for name in "de"] == [3, 4]
    for name in "de":
        runs.wait(arguments, name)
    assert sorted(Eyes(posix_run).check().commits) == ["d", "e"]


def test_what_is_kept_is_flushed_and_stays(posix_run: Run) -> None:
    arguments, local = superseding(posix_run, pending_checkpoints_max=3), tier_of(posix_run)
    with TieredWriter(**arguments) as writer:
        with runs.no_flusher(posix_run):
            dcp.save(runs.state_of(0), checkpoint_id="a", storage_writer=writer)
            writer.keep("a")
            assert main(["keep", str(posix_run.local), "a"]) == 0
            assert main(["keep", str(posix_run.local), "z"]) == 7
            for number, name in enumerate("bcde", 1):
                dcp.save(runs.state_of(number), checkpoint_id=name, storage_writer=writer)
            assert sorted(notes(local)) == ["b", "c"]
            assert (local.root / "a" / "keep").read_bytes() == b""
            with pytest.raises(SupersededError):
                writer.keep("b")
            with pytest.raises(AbsentError):
                writer.keep("z")
        for name in "ade":
            writer.wait("durable", name, timeout_s=60)
    end_flushers(posix_run.local)
    space = LocalSpace(Catalog(local, None), local, replace(QUICK, local_bytes_max=1))
    assert space.free(1 << 40)
    left = [name for name in "abcde" if runs.shards(posix_run, name)]
    assert left == ["a", "e"]
    assert sorted(Eyes(posix_run).check().commits) == ["a", "d", "e"]


def test_only_the_newest_is_pending_so_a_save_waits(posix_run: Run) -> None:
    arguments = superseding(posix_run, pending_checkpoints_max=1, backpressure_wait_s=0.5)
    with runs.no_flusher(posix_run):
        runs.save(arguments, "a", 0)
        error = runs.error_of(runs.save, arguments, "b", 1)
        assert isinstance(error, BackpressureError)
        assert not isinstance(error, SupersededError)
        assert notes(tier_of(posix_run)) == {}


def test_a_new_save_of_the_id_is_not_meant(posix_run: Run) -> None:
    arguments, local, eyes = superseding(posix_run), tier_of(posix_run), Eyes(posix_run)
    with runs.no_flusher(posix_run):
        for number, name in enumerate("abc"):
            runs.save(arguments, name, number)
        (old,) = notes(local)["a"]
    await_that("the fence", lambda: fenced(eyes, "a") or (runs.wait(arguments, "c") or None))
    runs.save(arguments, "a", 7, overwrite=True)
    with TieredWriter(**arguments, overwrite=True) as writer:
        writer.wait("durable", "a", timeout_s=60)
    assert [one["kind"] for one in records(eyes, "a")] == ["fence", "commit"]
    assert fenced(eyes, "a") == [old]
    assert eyes.check().attempts("a") == [attempt_of(local, "a")] != [old]
    assert runs.load(posix_run.durable_only(), "a") == 7
    assert states(local)["a"] == "durable"


def test_an_upload_is_cut_off_when_it_is_given_up(s3_run: Run) -> None:
    """The rate would hold the others up for a minute."""
    arguments = superseding(s3_run, bytes_per_second_max=1 << 20, pack_bytes_target=1 << 20)
    large = {"w": torch.arange(8 << 20)}
    with TieredWriter(**arguments) as writer:
        dcp.save(large, checkpoint_id="a", storage_writer=writer)
        await_that("the upload", lambda: states(tier_of(s3_run))["a"] == "uploading")
        for name in "bc":
            dcp.save({"w": torch.arange(9)}, checkpoint_id=name, storage_writer=writer)
        for name in "bc":
            writer.wait("durable", name, timeout_s=60)
    eyes = Eyes(s3_run)
    await_that("the fence", lambda: fenced(eyes, "a"))
    assert [key for key in sorted(eyes.keys()) if key.startswith("a/packs/")] == []
    assert eyes.open_uploads() == []
    assert sorted(eyes.check().commits) == ["b", "c"]


@pytest.mark.slow
def test_a_flusher_may_be_killed_right_after_the_fence(s3_run: Run) -> None:
    """I11: the fence is there, and nobody here knows that it is."""
    with FaultProxy(s3_run.server.endpoint) as proxy:
        arguments = superseding(s3_run) | {"s3": runs.behind(s3_run, proxy.endpoint)["s3"]}
        rule = proxy.inject(None, LOST_REPLY, when=lambda one: is_record_of(one, "a"))
        with runs.no_flusher(s3_run):
            for number, name in enumerate("abc"):
                runs.save(arguments, name, number)
        runs.save(arguments, "d", 3)
        eyes = Eyes(s3_run)
        await_that("the fence", lambda: rule.hits and fenced(eyes, "a"))
        end_flushers(s3_run.local)
        proxy.clear()
        copy = runs.run_path(s3_run) / "a" / "record-1.json"
        assert not copy.exists()
        runs.wait(arguments, "d")
        await_that("the copy", copy.exists)
        assert copy.read_bytes() == eyes.get("a/record-1.json")
        assert fenced(eyes, "a") == notes(tier_of(s3_run))["a"]
        assert states(tier_of(s3_run))["a"] == "superseded"
        assert "a" not in eyes.check().commits
        end_flushers(s3_run.local)


def put_room(node: Node, checkpoint_id: str) -> None:
    """Have a node make room for a save, while its flusher works."""
    limits = replace(node.limits, pending_checkpoints_max=2, backpressure_wait_s=20.0)
    LocalSpace(Catalog(node.local, None), node.local, limits).admit(
        checkpoint_id, 10, "supersede", lambda: step([node])
    )


def step(nodes: list[Node]) -> None:
    for node in nodes:
        node.flusher.step()


def seal_and_publish(nodes: list[Node], names: str) -> None:
    for sequence, name in enumerate(names, 1):
        for node in nodes:
            node.seal(name, len(nodes), f"{sequence:08x}{node.rank:08x}")
        publish(nodes, name, sequence)


def some_nodes(count: int, path: Path) -> tuple[list[Node], Eyes]:
    durable = path / "lustre" / "run"
    durable.parent.mkdir()
    nodes = make_nodes(count, path, durable, replace(QUICK, linger_s=0.1))
    for node in nodes:
        run_directory.open_node(node.local, node.node)
    return nodes, Eyes(Run(url=f"tiered::file://{durable}", local=nodes[0].local.root))


def test_other_nodes_follow_a_fence(tmp_path: Path) -> None:
    """The third node does nothing, so that nothing can be committed."""
    nodes, eyes = some_nodes(3, tmp_path)
    first, other, third = nodes
    seal_and_publish(nodes, "ab")
    other.flusher.step()
    limits = replace(other.limits, pending_checkpoints_max=2, backpressure_wait_s=0.3)
    with pytest.raises(BackpressureError):
        LocalSpace(Catalog(other.local, None), other.local, limits).admit(
            "c", 10, "supersede", lambda: None
        )
    assert notes(other.local) == {}, "it does not decide"
    put_room(first, "c")
    assert fenced(eyes, "a") == notes(first.local)["a"] == [attempt_of(first.local, "a")]
    put_room(other, "c")
    assert notes(other.local) == notes(first.local)
    for node in (first, other):
        assert states(node.local)["a"] == "superseded"
        assert states(node.local)["b"] != "durable"
        assert (node.local.root / "a" / "record-1.json").read_bytes() == eyes.get("a/record-1.json")
    await_that("the other one", lambda: eyes.commits("b") or step(nodes))
    await_that("its end", lambda: states(third.local)["a"] == "superseded" or step(nodes))
    assert sorted(eyes.check().commits) == ["b"]
    assert [record["kind"] for record in records(eyes, "a")] == ["fence"]


def test_several_nodes_wait_until_the_fence_is_read_back(tmp_path: Path) -> None:
    nodes, eyes = some_nodes(2, tmp_path)
    seal_and_publish(nodes, "ab")
    limits = replace(nodes[0].limits, pending_checkpoints_max=2, backpressure_wait_s=0.3)
    space = LocalSpace(Catalog(nodes[0].local, None), nodes[0].local, limits)
    with pytest.raises(BackpressureError):
        space.admit("c", 10, "supersede", lambda: None)
    assert sorted(notes(nodes[0].local)) == ["a"]
    assert states(nodes[0].local) == {"a": "local", "b": "local"}
    with pytest.raises(BackpressureError):
        space.admit("c", 10, "supersede", lambda: None)
    assert sorted(notes(nodes[0].local)) == ["a"], "one is enough"
    assert eyes.keys() == {}
    nodes[0].flusher.step()
    space.admit("c", 10, "supersede", lambda: None)
    assert fenced(eyes, "a") == notes(nodes[0].local)["a"]


def test_what_one_node_wrote_through_is_given_up_without_the_store(tmp_path: Path) -> None:
    """Its shard file is not here, and no other node has one: no save waits for a fence."""
    (node,), _ = some_nodes(1, tmp_path)
    node.seal("a", 1, "0" * 16)
    published = publish([node], "a")
    (shard,) = (node.local.root / "a").glob("*.shard")
    shard.unlink()
    superseded_notes.write(node.local, published.head, node.node, "a test wants it")
    assert states(node.local)["a"] == "superseded"


def test_what_another_node_may_have_written_through_lets_nothing_go(tmp_path: Path) -> None:
    """The newer one is all here, and perhaps nowhere whole before it is durable."""
    nodes, eyes = some_nodes(2, tmp_path)
    first = nodes[0]
    seal_and_publish(nodes, "ab")
    put_room(first, "c")
    assert fenced(eyes, "a")
    catalog = Catalog(first.local, None)
    space = LocalSpace(catalog, first.local, QUICK, write_through=True)
    copies = list((first.local.root / "a").glob("*.shard"))
    assert not space.free(1)
    assert [path.exists() for path in copies] == [True]
    await_that("the commit", lambda: eyes.commits("b") or step(nodes))
    assert space.free(1)
    assert [path.exists() for path in copies] == [False]


def test_where_no_save_writes_through_the_superseded_goes_at_once(tmp_path: Path) -> None:
    nodes, eyes = some_nodes(2, tmp_path)
    seal_and_publish(nodes, "ab")
    put_room(nodes[0], "c")
    local = nodes[0].local
    assert LocalSpace(Catalog(local, None), local, QUICK).free(1)
    assert list((local.root / "a").glob("*.shard")) == []
    assert eyes.commits("b") == []


def test_another_node_that_committed_first_wins(tmp_path: Path) -> None:
    nodes, eyes = some_nodes(2, tmp_path)
    first, other = nodes
    seal_and_publish(nodes, "ab")
    first.flusher.step()
    other.flusher.step()
    published = Catalog(first.local, None).published("a")
    assert published is not None
    other.limits = replace(other.limits, commit_takeover_s=0.0)
    other.restart()
    await_that("the commit", lambda: eyes.commits("a") or step([other]))
    superseded_notes.write(first.local, published.head, first.node, "a test wants it")
    first.restart()
    assert states(first.local)["a"] == "local"
    first.flusher.step()
    assert states(first.local)["a"] == "durable"
    assert fenced(eyes, "a") == []


def save_on_nodes(rank: int, locals_: list[str], arguments: dict[str, Any]) -> list[str]:
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with TieredWriter(**{**arguments, "local": locals_[rank]}) as writer:
        for number in range(4):
            state = {f"of-{rank}": torch.full((100_000,), number), "all": torch.arange(9)}
            dcp.save(state, checkpoint_id=f"step-{number}", storage_writer=writer)
        writer.wait("durable", "step-3", timeout_s=60)
        for number in range(4):
            with suppress(SupersededError):
                writer.wait("durable", f"step-{number}", timeout_s=60)
        return [line.state for line in writer.status()]


@pytest.mark.slow
def test_two_nodes_agree(s3_run: Run, tmp_path: Path) -> None:
    """The store is slow, so the queue is full all the time."""
    other = tmp_path / "other-node"
    other.mkdir()
    with FaultProxy(s3_run.server.endpoint) as proxy:
        proxy.inject("PutObject", Fault(delay_s=0.3))
        arguments = superseding(s3_run) | {"s3": runs.behind(s3_run, proxy.endpoint)["s3"]}
        try:
            nodes = [str(s3_run.local), str(other)]
            first, second = run_ranks(2, save_on_nodes, nodes, arguments)
        finally:
            end_flushers(other)
            end_flushers(s3_run.local)
    assert first == second
    eyes = Eyes(s3_run)
    commits = eyes.check().commits
    for number, state in enumerate(first):
        assert (f"step-{number}" in commits) == (state == "durable")
        assert bool(fenced(eyes, f"step-{number}")) == (state == "superseded")
    assert "superseded" in first
    assert first[-1] == "durable"


def give_up_until_killed(run: Run, after: int) -> None:
    limits = replace(QUICK, local_bytes_max=2 * ONE + ONE // 2)
    space = LocalSpace(Catalog(tier_of(run), None), tier_of(run), limits)
    remove, gone = space._remove, []

    def remove_or_die(checkpoint_id: str, name: str) -> bool:
        if len(gone) == after:
            os.kill(os.getpid(), signal.SIGKILL)
        gone.append(name)
        return remove(checkpoint_id, name)

    space._remove = remove_or_die
    space.admit("d", ONE, "supersede", lambda: None)


@pytest.mark.parametrize("after", range(3))
def test_an_eviction_of_what_is_superseded_may_be_killed(after: int, posix_run: Run) -> None:
    """I11: nothing half loads, and what is left goes the next time."""
    arguments = posix_run.arguments()
    with runs.no_flusher(posix_run):
        for number, name in enumerate("abc"):
            runs.save(arguments, name, number)
        process, _ = workers.start(give_up_until_killed, posix_run, after)
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        path = runs.run_path(posix_run)
        left = [file for name in "ab" for file in (path / name).glob("[0-9p]*")]
        assert len(left) == 4 - after
        assert runs.load(arguments, "c") == 2
        for number, name in enumerate("ab"):
            if (path / name / "published-1.json").exists():
                assert runs.load(arguments, name) == number
            else:
                assert runs.error_of(runs.load, arguments, name)
        space = LocalSpace(Catalog(tier_of(posix_run), None), tier_of(posix_run), QUICK)
        space.free(1 << 40)
        assert [file for name in "ab" for file in (path / name).glob("[0-9p]*")] == []
    runs.wait(arguments, "c")
    assert sorted(Eyes(posix_run).check().commits) == ["c"]


def is_record_of(request: Request, checkpoint_id: str) -> bool:
    return request.method == "PUT" and f"/{checkpoint_id}/record-" in request.path


@pytest.mark.slow
def test_a_commit_on_its_way_wins(s3_run: Run) -> None:
    """The save goes on at once, and the checkpoint is durable after all."""
    local, eyes = tier_of(s3_run), Eyes(s3_run)

    def give_up(request: Request) -> None:
        published = Catalog(local, None).published("a")
        assert published is not None
        superseded_notes.write(local, published.head, published.head.node, "a test wants it")

    with FaultProxy(s3_run.server.endpoint) as proxy:
        arguments = superseding(s3_run) | {"s3": runs.behind(s3_run, proxy.endpoint)["s3"]}
        fault = Fault(hook=give_up, drop_response=True)
        proxy.inject(None, fault, times=1, when=lambda one: is_record_of(one, "a"))
        again = proxy.inject(None, STALL, when=lambda one: is_record_of(one, "a"))
        runs.save(arguments, "a", 0)
        await_that("the commit", lambda: eyes.commits("a") and again.hits)
        end_flushers(s3_run.local)
        assert states(local) == {"a": "superseded"}, "nobody here knows better yet"
        proxy.clear()
        runs.save(arguments, "b", 1)
        runs.wait(arguments, "b")
        await_that("the end of it", lambda: states(local) == {"a": "durable", "b": "durable"})
        runs.wait(arguments, "a")
        assert sorted(notes(local)) == ["a"]
        assert fenced(eyes, "a") == []
        assert sorted(eyes.check().commits) == ["a", "b"]
        assert [runs.load(s3_run.durable_only(), name) for name in "ab"] == [0, 1]
        end_flushers(s3_run.local)


def test_flush_says_what_is_superseded(posix_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = superseding(posix_run)
    with runs.no_flusher(posix_run):
        for number, name in enumerate("abc"):
            runs.save(arguments, name, number)
    assert main(["flush", str(posix_run.local)]) == 0
    assert "all durable, but 1 superseded" in capsys.readouterr().out
    assert main(["status", "--json", str(posix_run.local)]) == 0
    lines = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [line["state"] for line in lines] == ["superseded", "durable", "durable"]
    assert main(["drain", str(posix_run.local), "--deadline", "30s"]) == 0
    assert ": a: superseded: " in capsys.readouterr().out
