"""Compressed packs end to end: smaller objects, the same values, on other ranks and after kills."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_tiered import CorruptError, InvalidError, TieredReader, TieredWriter
from dcp_tiered.config import settings
from tests.conftest import Run, end_flushers, flusher_pids
from tests.format_compat import own_decoder
from tests.integration.test_reader import BoxPlanner
from tests.support import runs, states
from tests.support.ranks import share_ranks
from tests.support.storage_check import Eyes
from tests.support.workers import await_that

MIB = 1 << 20
ZSTD = {"compression": "zstd"}


def weights() -> dict[str, Any]:
    """Return what a training state is made of: some shrinks, some does not."""
    torch.manual_seed(5)
    return {
        "w": (torch.randn(1500, 1024) * 0.02).bfloat16(),
        "m": torch.randn(700, 1023) * 0.02,
        "master": (torch.randn(512, 1024) * 0.02).bfloat16().float(),
        "half": torch.randn(300, 500).half(),
        "double": torch.randn(20_000).double(),
        "tokens": torch.arange(100_000),
        "empty": torch.zeros(0, 4),
        "strided": (torch.randn(300, 600) * 0.02).bfloat16().t(),
        "small": [torch.randn(7) for _ in range(20)],
        "step": 7,
    }


def save(run: Run, checkpoint_id: str, state: dict[str, Any], **more: Any) -> None:
    with TieredWriter(**run.arguments(), **more) as writer:
        dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=writer)
        writer.wait("durable", checkpoint_id, timeout_s=60)


def load(run: Run, checkpoint_id: str, target: dict[str, Any], planner: Any = None) -> None:
    """Load from the durable tier only."""
    reader = TieredReader(**run.durable_only())
    try:
        dcp.load(target, checkpoint_id=checkpoint_id, storage_reader=reader, planner=planner)
        assert reader.bytes_read["durable"] > 0
    finally:
        reader.close()


def packs(run: Run, checkpoint_id: str) -> list[str]:
    prefix = f"{checkpoint_id}/packs/"
    return [key for key in run.keys() if key.startswith(prefix) and key.endswith(".pack")]  # noqa: SIM118


def test_a_compressed_checkpoint_is_smaller_and_the_same(s3_run: Run) -> None:
    state = weights()
    save(s3_run, "raw", state)
    end_flushers(s3_run.local)  # its options are those of the writer that started it
    save(s3_run, "small", state, **ZSTD)
    sizes = {name: s3_run.keys()[packs(s3_run, name)[0]] for name in ("raw", "small")}
    assert sizes["small"] < sizes["raw"] * 0.75
    commits = Eyes(s3_run).check().commits
    assert commits["small"][0]["requires"] == ["frames"]
    assert commits["raw"][0]["requires"] == []
    assert "raw_length" not in commits["raw"][0]["packs"][0]
    for name in ("raw", "small"):  # one reader takes both
        target = states.zeroed(state)
        load(s3_run, name, target)
        assert states.difference(state, target) is None


@pytest.mark.parametrize(
    ("offsets", "lengths"),
    [
        ((0, 0), (1, 1)),
        ((1499, 1023), (1, 1)),
        ((100, 0), (64, 1024)),  # within a frame
        ((500, 0), (600, 1024)),  # across frames
        ((0, 3), (1500, 5)),  # a column: strided
    ],
)
def test_a_part_of_a_tensor_is_read(
    offsets: tuple[int, int], lengths: tuple[int, int], boxes: tuple[Run, torch.Tensor]
) -> None:
    run, tensor = boxes
    target = {"w": torch.zeros_like(tensor)}
    load(run, "a", target, BoxPlanner(offsets, lengths))
    box = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
    expected = torch.zeros_like(tensor)
    expected[box] = tensor[box]
    assert states.bits(target["w"]) == states.bits(expected)


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, torch.Tensor]:
    directory = tmp_path_factory.mktemp("boxes")
    for name in ("lustre", "nvme"):
        (directory / name).mkdir()
    run = Run(url=f"tiered::file://{directory}/lustre/run", local=directory / "nvme")
    save(run, "a", {"w": weights()["w"]}, **ZSTD)
    return run, weights()["w"]


def save_sharded(rank: int, arguments: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = weights()
    parts = {name: distribute_tensor(state[name], mesh, [Shard(0)]) for name in ("w", "m")}
    with TieredWriter(**arguments) as writer:
        dcp.save(parts, checkpoint_id="a", storage_writer=writer)
        writer.wait("durable", "a", timeout_s=60)


@pytest.mark.slow
def test_shard_files_of_two_ranks_share_a_pack_and_load_on_one(posix_run: Run) -> None:
    """The second one begins behind the end of the stored pack."""
    share_ranks(2, save_sharded, {**posix_run.arguments(), **ZSTD})
    (commit,) = Eyes(posix_run).check().commits["a"]
    (pack,) = commit["packs"]
    assert max(place["start"] for place in commit["placements"]) > pack["raw_length"] // 3
    target = {name: torch.zeros_like(weights()[name]) for name in ("w", "m")}
    load(posix_run, "a", target)
    for name, tensor in target.items():
        assert states.bits(tensor) == states.bits(weights()[name])


def frames_of(data: bytes) -> list[tuple[int, int, int]]:
    """Return codec, first and last byte in the pack of every frame."""
    _, _, arrays = own_decoder.footer(data, b"DCPTPAK1")
    rows, at = [], 0
    for codec, length in zip(arrays["codec"], arrays["stored"], strict=True):
        rows.append((codec, at, at + length))
        at += length
    return rows


@pytest.mark.parametrize("where", ["lengths", "noise", "exponents", "as it is", "table", "cut"])
def test_damage_is_named_and_reaches_no_tensor(where: str, posix_run: Run) -> None:
    state = {name: weights()[name] for name in ("w", "tokens")}
    save(posix_run, "a", state, **ZSTD)
    (key,) = packs(posix_run, "a")
    path = Path(posix_run.url.removeprefix("tiered::file://")) / key
    path.chmod(0o600)
    data = path.read_bytes()
    frames = frames_of(data)
    packed = next(row for row in frames if row[0])
    at = {
        "lengths": packed[1] + 1,
        "noise": packed[1] + 1000,
        "exponents": packed[2] - 1000,
        "as it is": frames[-1][2] - 300_000,
        "table": len(data) - 60,
    }
    if where == "cut":
        os.truncate(path, len(data) - 100)
    else:
        runs.flip_bit(path, at[where])
    target = {name: torch.ones_like(tensor) for name, tensor in state.items()}
    error = runs.error_of(load, posix_run, "a", target)
    assert isinstance(error, CorruptError)
    assert error.tier == "durable"
    assert (error.key or "").endswith(key)
    for name, tensor in state.items():
        good = (target[name] == tensor) | (target[name] == 1) | (target[name] == 0)
        assert bool(good.all()), "only what was verified, what was there before, or zeros"


def spools(pid: int) -> list[Path]:
    """Return the nameless files on the local tier that a process has open."""
    found = []
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if link.readlink().name.endswith("(deleted)") and "nvme" in str(link.readlink()):
                    found.append(link)
    return found


@pytest.mark.slow
def test_kill_in_the_middle_of_compressing_leaves_nothing(posix_run: Run) -> None:
    state = {"w": (torch.randn(48 * MIB) * 0.02).bfloat16()}
    with TieredWriter(**posix_run.arguments(), **ZSTD) as writer:
        dcp.save(state, checkpoint_id="a", storage_writer=writer)
    (pid,) = await_that("a flusher", lambda: flusher_pids(posix_run.local))
    await_that("a spool", lambda: any(link.stat().st_size > MIB for link in spools(pid)))
    os.kill(pid, signal.SIGKILL)
    await_that("its end", lambda: not Path(f"/proc/{pid}").exists())
    assert packs(posix_run, "a") == []
    (shard,) = runs.shards(posix_run, "a")
    assert {path.name for path in shard.parent.iterdir()} == {shard.name, "published-1.json"}
    runs.wait({**posix_run.arguments(), **ZSTD}, "a")
    assert Eyes(posix_run).check().commits["a"][0]["packs"][0]["raw_length"] > 96 * MIB
    target = {"w": torch.zeros_like(state["w"])}
    load(posix_run, "a", target)
    assert torch.equal(target["w"], state["w"])


def test_the_option_is_given_in_three_ways(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "tiered::s3://bucket/run"
    assert settings(url).compression == "off"
    assert settings(url, options={"tiered": {"compression": "auto"}}).compression == "auto"
    monkeypatch.setenv("FSSPEC_TIERED_COMPRESSION", "zstd")
    assert settings(url).compression == "zstd"
    assert settings(url, compression="off").compression == "off"
    with pytest.raises(InvalidError, match="off, zstd, auto"):
        TieredWriter(url, local=str(local), compression="gzip")
