"""`dcp-tiered rm`, as an operator runs it, and what nodes that hold a copy make of it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tiered import (
    AbsentError,
    ConflictError,
    ExpiredError,
    IncompleteError,
    InvalidError,
    TieredReader,
    TieredWriter,
)
from dcp_tiered.cli import main
from dcp_tiered.filesystem import TieredFileSystem
from dcp_tiered.services.catalog import Catalog
from dcp_tiered.services.local_space import LocalSpace
from dcp_tiered.services.removal import Remover
from dcp_tiered.tiers.posix import PosixTier
from tests.conftest import QUICK, Run, end_flushers
from tests.support import runs, workers
from tests.support.amazon import ACCOUNT, Amazon, Bucket
from tests.support.fault_proxy import FaultProxy, refuse
from tests.support.nodes import make_nodes, publish
from tests.support.storage_check import Eyes
from tests.support.tiers import mounted_tier
from tests.support.workers import await_that

KINDS = pytest.mark.parametrize("kind", ["posix_run", "s3_run"])
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command about a run with the credentials in the environment."""

    def call(run: Run, name: str, *arguments: str, endpoint: str = "") -> tuple[int, str, str]:
        options = []
        if run.server is not None:
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", run.server.access_key)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", run.server.secret_key)
            options = ["-o", f"s3.endpoint_url={endpoint or run.server.endpoint}"]
        capsys.readouterr()
        code = main([*name.split(), run.url, *arguments, *options])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def saved(run: Run, *names: str, first: int = 0, **more: Any) -> dict[str, Any]:
    """Save and flush numbered states; no flusher is left. Return a writer's arguments."""
    arguments = {**run.arguments(), **more}
    mine = replace(run, local=Path(arguments["local"]))
    with runs.no_flusher(mine):
        for number, name in enumerate(names, first):
            runs.save(arguments, name, number)
    assert flush(mine) == 0
    return arguments


def flush(run: Run) -> int:
    options = []
    if run.server is not None:
        given = run.options["s3"]
        options = [f"-os3.key={given['key']}", f"-os3.secret={given['secret']}"]
    return main(["flush", str(run.local), "--timeout", "60", *options])


def below(run: Run, checkpoint_id: str) -> set[str]:
    mine = (key.partition("/") for key in sorted(Eyes(run).keys()))
    return {name for first, _, name in mine if first == checkpoint_id}


def everything(run: Run) -> dict[str, bytes]:
    eyes = Eyes(run)
    return {key: eyes.get(key) for key in sorted(eyes.keys())}


def record(run: Run, checkpoint_id: str, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Eyes(run).get(f"{checkpoint_id}/record-{number}.json"))
    return found


def states(command: Command, run: Run, *arguments: str) -> dict[str, tuple[str, str]]:
    code, out, err = command(run, "ls", "--json", *arguments)
    assert code == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    return {line["checkpoint_id"]: (line["state"], line["reason"]) for line in lines}


@KINDS
def test_what_is_removed_is_gone_and_nothing_else(
    kind: str, request: pytest.FixtureRequest, command: Command
) -> None:
    run: Run = request.getfixturevalue(kind)
    saved(run, "a", "a0", "b", "c")
    before = everything(run)
    going = {key for key in before if key.startswith(("a/", "b/")) and "/record-" not in key}
    code, out, _ = command(run, "rm", "a", "b", "a", "--dry-run", "--json")
    told = [json.loads(line) for line in out.splitlines()]
    assert (code, [line["checkpoint_id"] for line in told]) == (0, ["a", "b"])
    listed = {one["key"]: one["bytes"] for line in told for one in line["objects"]}
    assert listed == {key: len(before[key]) for key in going}
    assert {line["removed"] for line in told} == {False}
    code, out, _ = command(run, "rm", "a", "b", "--dry-run")
    assert code == 0
    assert all(key in out for key in going)
    assert everything(run) == before

    code, out, _ = command(run, "rm", "a", "b")
    assert code == 0
    assert [line.partition(":")[0] for line in out.splitlines()] == ["a", "b"]
    left = {key: data for key, data in before.items() if key not in going}
    after = everything(run)
    assert after.keys() == left.keys() | {"a/record-2.json", "b/record-2.json"}
    assert {key: after[key] for key in left} == left
    assert [record(run, "a", number)["kind"] for number in (1, 2)] == ["commit", "expired"]
    again = command(run, "rm", "b", "a", "--json")
    assert [json.loads(line)["objects"] for line in again[1].splitlines()] == [[], []]
    assert everything(run) == after

    assert states(command, run) == {
        "a": ("expired", "removed"),
        "b": ("expired", "removed"),
        "a0": ("durable", ""),
        "c": ("durable", ""),
    }
    assert command(run, "inspect", "a")[0] == 7
    code, out, _ = command(run, "residency audit", "--json")
    audited = [json.loads(line) for line in out.splitlines()]
    assert {line["checkpoint_id"]: line["state"] for line in audited} == {
        "a": "expired",
        "b": "expired",
        "a0": "committed",
        "c": "committed",
    }
    for arguments in (run.arguments(), run.durable_only()):
        # Also on the node that still has a copy of it.
        error = runs.error_of(runs.load, arguments, "a")
        assert type(error) is AbsentError
        assert "removed" in error.message
        assert runs.load(arguments) == 3
        assert runs.load(arguments, "a0") == 1
    assert sorted(Eyes(run).check().commits) == ["a0", "c"]
    files = TieredFileSystem(
        run.url.partition("://")[2],
        run.url.removeprefix("tiered::").partition("://")[0],
        run.options.get("s3"),
        local=str(run.local),
    )
    root = run.url.partition("://")[2]
    assert files.ls(root, detail=False) == [f"{root}/a0", f"{root}/c"]


def test_what_must_not_be_removed_is_refused_before_anything_is(
    posix_run: Run, command: Command, tmp_path: Path
) -> None:
    """I7; and a call that names several ids removes all or, where one is refused, none."""
    saved(posix_run, "a", "b", "c")
    root = tmp_path / "lustre" / "run"
    (root / "pending").mkdir()
    shutil.copy(next((root / "a").glob("manifest-*")), root / "pending")
    before = posix_run.keys()
    for name, exit_code, word in (
        ("c", 3, "newest complete"),
        ("nope", 7, "no checkpoint 'nope'"),
        ("pending", 6, "never committed"),
        ("../x", 3, "not a plain name"),
    ):
        for dry in ([], ["--dry-run"]):
            code, out, err = command(posix_run, "rm", "a", name, *dry)
            assert (code, out) == (exit_code, ""), name
            assert word in err
            assert "HINT" in err
    assert posix_run.keys() == before
    assert main(["rm", f"tiered://{posix_run.local}/run", "a"]) == 3
    # A newest one that is not whole does not count: then the one before it stays too.
    next((root / "c" / "packs").glob("*.pack")).unlink()
    for name in ("b", "c"):
        assert command(posix_run, "rm", name)[0] == 3
    assert command(posix_run, "rm", "a")[0] == 0
    assert below(posix_run, "a") == {"record-1.json", "record-2.json"}
    assert "packs/" in " ".join(below(posix_run, "b"))


def test_all_attempts_go_and_what_a_save_may_bring_stays(
    posix_run: Run, command: Command, tmp_path: Path
) -> None:
    saved(posix_run, "a", "b")
    first = below(posix_run, "a")
    saved(posix_run, "a", "c", first=2, overwrite=True)
    root, aside = tmp_path / "lustre" / "run", tmp_path / "aside"
    aside.mkdir()
    # A third attempt: its manifest and packs are there, its record is not yet.
    saved(posix_run, "a", first=4, overwrite=True)
    (root / "a" / "record-3.json").rename(aside / "record-3.json")
    for path in posix_run.run_path().glob("a/record-3.json"):
        path.unlink()
    commits = [record(posix_run, "a", number) for number in (1, 2)]
    mine = {f"manifest-{one['attempt']}.json" for one in commits}
    packs = {pack["name"] for one in commits for pack in one["packs"]}
    gone = mine | packs | {f"{name}.ok" for name in packs}
    assert first - {"record-1.json"} < gone
    (root / "a" / "notes.txt").write_text("theirs")
    third = below(posix_run, "a") - gone - {"record-1.json", "record-2.json"}
    assert len(third) == 4, "manifest, pack, what vouches for it, and what is not ours"
    code, out, _ = command(posix_run, "rm", "a", "--json")
    told = json.loads(out)
    assert (code, set(told["stay"])) == (0, {f"a/{name}" for name in third})
    assert {one["key"] for one in told["objects"]} == {f"a/{name}" for name in gone}
    assert below(posix_run, "a") == third | {f"record-{n}.json" for n in (1, 2, 3)}
    assert "objects are left" in states(command, posix_run)["a"][1]
    # It was saved after what was removed: its flusher goes on.
    assert flush(posix_run) == 0
    assert record(posix_run, "a", 4)["kind"] == "commit"
    assert runs.load(posix_run.durable_only(), "a") == 4
    assert sorted(Eyes(posix_run).check().commits) == ["a", "b", "c"]


@KINDS
def test_a_flusher_that_does_not_know_brings_nothing_back(
    kind: str,
    request: pytest.FixtureRequest,
    command: Command,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run: Run = request.getfixturevalue(kind)
    arguments = saved(run, "a", "b")
    (runs.run_path(run) / "a" / "record-1.json").unlink()
    with TieredWriter(**arguments) as writer:
        assert {one.checkpoint_id: one.state for one in writer.status()}["a"] == "local"
    assert command(run, "rm", "a")[0] == 0
    tombstone = {"record-1.json", "record-2.json"}
    for _ in range(2):  # what it has learned, the next one knows
        capsys.readouterr()
        assert flush(run) == 0
        assert below(run, "a") == tombstone
        assert "all durable, but 1 expired" in capsys.readouterr().out
    with TieredWriter(**arguments) as writer:
        (line,) = (one for one in writer.status() if one.checkpoint_id == "a")
        assert (line.level, line.state) == ("local", "expired")
        assert "removed" in (line.error or "")
        error = runs.error_of(writer.wait, "durable", "a", timeout_s=20)
        assert isinstance(error, ExpiredError)
        writer.wait("local", "a", timeout_s=20)
    # Nor does it load while the store cannot be asked, and its room can be had.
    if run.server is None:
        store = Path(run.url.removeprefix("tiered::file://")).parent
        store.rename(store.with_name("away"))
        assert isinstance(runs.error_of(runs.load, arguments, "a"), InvalidError)
        assert runs.load(arguments, "b") == 1
        store.with_name("away").rename(store)
    local = PosixTier(runs.run_path(run), run.local, "local")
    LocalSpace(Catalog(local, None), local, replace(QUICK, local_bytes_max=1)).trim()
    assert {path.parent.name for path in local.root.glob("*/*.shard")} == {"b"}
    assert {path.name for path in (local.root / "a").iterdir()} == tombstone
    with TieredWriter(**arguments) as writer:
        assert {one.checkpoint_id for one in writer.status()} == {"b"}


@pytest.mark.parametrize(("kind", "overwrite"), [("posix_run", True), ("s3_run", False)])
def test_an_id_can_be_saved_again(
    kind: str, overwrite: bool, request: pytest.FixtureRequest, command: Command, tmp_path: Path
) -> None:
    run: Run = request.getfixturevalue(kind)
    arguments = run.arguments()
    if overwrite:
        saved(run, "a")
    else:  # by another job, which is over
        with runs.no_flusher(run):
            workers.run_together([(runs.save, (arguments, "a", 0))])
    saved(run, "b", first=1)
    assert command(run, "rm", "a")[0] == 0
    if overwrite:  # to this job the id is its own
        assert isinstance(runs.error_of(runs.save, arguments, "a", 5), ConflictError)
    with runs.no_flusher(run):
        runs.save(arguments, "a", 5, overwrite=overwrite)
        # Before it is durable it is the newest on this node, and the removed one is not meant.
        assert runs.load(arguments) == 5
        assert runs.load(arguments, "a") == 5
        assert states(command, run, "--local", str(run.local))["a"] == ("local", "")
        assert isinstance(runs.error_of(runs.load, run.durable_only(), "a"), AbsentError)
    assert flush(run) == 0
    assert [record(run, "a", n)["kind"] for n in (1, 2, 3)] == ["commit", "expired", "commit"]
    assert runs.load(run.durable_only()) == 5
    with TieredWriter(**arguments) as writer:
        assert {one.state for one in writer.status()} == {"durable"}
    checked = Eyes(run).check()
    assert checked.attempts("a") == [record(run, "a", 3)["attempt"]]
    assert command(run, "rm", "a")[0] == 3, "now it is the newest"
    other = tmp_path / "other"
    other.mkdir()
    saved(run, "c", first=6, local=str(other))
    assert command(run, "rm", "a")[0] == 0
    assert below(run, "a") == {f"record-{number}.json" for number in (1, 2, 3, 4)}
    third = tmp_path / "third"
    third.mkdir()
    saved(run, "a", first=7, local=str(third))  # a node that never had it
    assert runs.load(run.durable_only(), "a") == 7


def test_a_save_that_lost_does_not_come_back(s3_run: Run, command: Command, tmp_path: Path) -> None:
    """It is older than what was removed; its node keeps it, as before."""
    other = tmp_path / "other"
    other.mkdir()
    with runs.no_flusher(s3_run):
        runs.save(s3_run.arguments(), "a", 1)
    saved(s3_run, "a", "b", first=2, local=str(other))
    assert command(s3_run, "rm", "a")[0] == 0
    assert flush(s3_run) == 8
    assert below(s3_run, "a") == {"record-1.json", "record-2.json"}
    (shard,) = runs.shards(s3_run, "a")
    local = PosixTier(runs.run_path(s3_run), s3_run.local, "local")
    LocalSpace(Catalog(local, None), local, replace(QUICK, local_bytes_max=1)).trim()
    assert shard.exists()


def test_a_node_that_did_not_publish_uploads_nothing_again(tmp_path: Path) -> None:
    durable = tmp_path / "durable"
    nodes = make_nodes(2, tmp_path, durable, replace(QUICK, linger_s=0.0))
    for name, sequence in (("a", 1), ("b", 2)):
        for node in nodes:
            node.seal(name, 2, f"{sequence:016x}")
        publish(nodes, name, sequence)

    def is_known() -> bool:
        for node in nodes:
            node.flusher.step()
        return len([*(nodes[1].local.root).glob("*/record-1.json")]) == 2

    await_that("both commits", is_known)
    for known in [*(nodes[1].local.root / "a").glob("*.json")]:
        known.unlink()  # as if it had been killed when its pack was there
    store = mounted_tier(durable, tmp_path)
    remover = Remover(store)
    remover.withdraw(remover.choose(["a"]))
    remover.delete(remover.plan("a"))
    left = {"a/record-1.json", "a/record-2.json"}
    assert set(store.list_keys("a")) == left
    second = nodes[1]
    second.restart()
    second.durable.requests.clear()
    for _ in range(5):
        second.flusher.step()
    assert second.durable.requests["PUT"] == 0
    assert not second.flusher.has_work()
    assert set(store.list_keys("a")) == left
    local = second.local
    space = LocalSpace(Catalog(local, None), local, replace(QUICK, local_bytes_max=1))
    space.trim()
    assert {path.parent.name for path in local.root.glob("*/*.shard")} == {"b"}


def test_who_may_not_delete_is_told_and_can_go_on(s3_run: Run, command: Command) -> None:
    saved(s3_run, "a", "b")
    assert s3_run.server is not None
    with FaultProxy(s3_run.server.endpoint) as proxy:
        proxy.inject("DELETE", refuse(403, "AccessDenied"))
        code, _, err = command(s3_run, "rm", "a", endpoint=proxy.endpoint)
        assert code == 3
        assert "s3:DeleteObject" in err
        assert record(s3_run, "a", 2)["kind"] == "expired"
        state, reason = states(command, s3_run)["a"]
        assert (state, reason.partition(" ")[0]) == ("expired", "2")
        proxy.clear()
        # Whatever is busy or lost meanwhile.
        proxy.inject("DELETE", refuse(503, "SlowDown"), times=1)
        proxy.add("drop_reply", "DELETE", "manifest-")
        assert command(s3_run, "rm", "a", endpoint=proxy.endpoint)[0] == 0
    assert below(s3_run, "a") == {"record-1.json", "record-2.json"}


def test_open_uploads_of_the_id_are_aborted(s3_run: Run, command: Command) -> None:
    saved(s3_run, "a", "a0", "b")
    eyes = Eyes(s3_run)
    bucket, _, prefix = s3_run.url.removeprefix("tiered::s3://").partition("/")
    for name in ("a", "a0"):
        key = f"{prefix}/{name}/packs/{'b' * 12}-{'c' * 16}.pack"
        eyes.client.create_multipart_upload(Bucket=bucket, Key=key)
    assert len(eyes.open_uploads()) == 2
    assert command(s3_run, "rm", "a")[0] == 0
    (left,) = eyes.open_uploads()
    assert "/a0/packs/" in left


@pytest.mark.parametrize("has_copy", [False, True])
def test_a_load_that_is_overtaken_ends_whole_or_with_an_error(
    has_copy: bool, s3_run: Run, command: Command
) -> None:
    """Never wrong bytes: what is in the targets has passed its checksum or is as it was."""
    saved(s3_run, "a", "b")
    assert s3_run.server is not None
    removed = []
    reader = TieredReader(**s3_run.durable_only())
    target = {**runs.state_of(7), "n": 7}
    with FaultProxy(s3_run.server.endpoint) as proxy:
        reading = s3_run.arguments() if has_copy else s3_run.durable_only()
        reader = TieredReader(
            **{**reading, "s3": {**s3_run.options["s3"], "endpoint_url": proxy.endpoint}}
        )
        agree = reader._open

        def open_then_remove(choice: Any) -> Any:
            opened = agree(choice)
            removed.append(command(s3_run, "rm", "a")[0])
            return opened

        reader._open = open_then_remove  # type: ignore[method-assign]
        if has_copy:
            dcp.load(target, checkpoint_id="a", storage_reader=reader)
            assert runs.number_of(target) == 0
        else:
            error = runs.error_of(dcp.load, target, checkpoint_id="a", storage_reader=reader)
            assert isinstance(error, IncompleteError)
            assert "was removed since" in error.message
            for key in ("a", "b"):
                assert any(torch.equal(target[key], runs.state_of(n)[key]) for n in (0, 7))
        reader.close()
    assert removed == [0]
    assert below(s3_run, "a") == {"record-1.json", "record-2.json"}


@pytest.mark.slow
@pytest.mark.parametrize("is_theirs", [False, True])
def test_deletions_are_held_to_place_and_owner(
    is_theirs: bool,
    amazon: Amazon,
    bucket: Bucket,
    arguments: dict[str, Any],
    local: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number, name in enumerate("ab"):
        runs.save(arguments, name, number)
        runs.wait(arguments, name)
    end_flushers(local)
    for name, value in amazon.environment("eu-central-1").items():
        monkeypatch.setenv(name, value)
    policy = tmp_path / "policy.toml"
    policy.write_text(
        f'[[allow]]\nprovider = "aws"\nregions = ["eu-central-1"]\nowner = "{ACCOUNT}"\n'
    )
    before, root = dict(bucket.objects), arguments["url"].partition("ckpt/")[2]
    amazon.log.clear()
    command = ["rm", arguments["url"], "a", "-o", f"tiered.residency={policy}"]
    if is_theirs:
        bucket.owner = "999999999999"
        assert main(command) == 9
        assert {seen.method for seen in amazon.log} == {"HEAD"}
        assert bucket.objects == before
        return
    assert main(command) == 0
    assert {key for key in bucket.objects if key.startswith(f"{root}/a/")} == {
        f"{root}/a/record-1.json",
        f"{root}/a/record-2.json",
    }
    assert {seen.host for seen in amazon.log} == {"ckpt.s3.eu-central-1.amazonaws.com"}
    deleted = [seen for seen in amazon.log if seen.method == "DELETE"]
    assert {seen.headers.get("x-amz-expected-bucket-owner") for seen in deleted} == {ACCOUNT}
