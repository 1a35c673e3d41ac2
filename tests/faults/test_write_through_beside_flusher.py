"""A save writes through: the flusher of its node leaves it alone, and `wait` finds it."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from awscrt.checksums import crc32c

from dcp_tiered import config, stack
from dcp_tiered.format import layout
from dcp_tiered.format.pack import plan_pack
from dcp_tiered.format.shardfile import Header
from dcp_tiered.services import progress
from dcp_tiered.services.catalog import Catalog
from dcp_tiered.services.lock import FlusherLock
from tests.conftest import QUICK, Run
from tests.property.strategies import Thing, shard_bytes
from tests.support.nodes import make_nodes, publish
from tests.support.sources import BytesSource, pattern

_TOKENS = ("00" * 8, "11" * 8)


class Slow(BytesSource):
    """Two parts, of which the second waits: the upload is open meanwhile."""

    def __init__(self, data: bytes, begun: threading.Event, go_on: threading.Event) -> None:
        super().__init__(data)
        self._begun, self._go_on = begun, go_on

    def pread(self, length: int, start: int) -> bytes:
        if start >= 16 << 20:
            self._begun.set()
            self._go_on.wait(60)
        return super().pread(length, start)


def test_the_flusher_aborts_no_upload_of_a_save_that_goes_on(s3_run: Run) -> None:
    """Rank 0 found room, rank 1 of the same node did not; the flusher came up between the two."""
    arguments = s3_run.arguments()
    limits = replace(s3_run.limits, part_bytes=16 << 20, linger_s=0.0)
    run = stack.build(config.settings(arguments["url"], arguments["local"], s3_run.options, limits))
    local, node = run.need_local(), run.node()
    header = Header(
        checkpoint_id="a",
        rank=0,
        world_size=4,
        local_world_size=2,
        node=node,
        token=_TOKENS[0],
        written_by="test",
    )
    shard = shard_bytes(header, [Thing("w", None, (), (), (), b"bytes" * 10)])
    local.put(layout.key("a", layout.shard_name(0, _TOKENS[0])), shard.data)
    begun, go_on = threading.Event(), threading.Event()

    body = pattern(20 << 20)
    row = (layout.shard_name(1, _TOKENS[1]), len(body), crc32c(body))
    pack = plan_pack("a", node, [row], "test")

    def save() -> None:
        data = body + bytes(pack.length - len(body) - len(pack.tail)) + pack.tail
        with stack.write_through(run) as packs:
            packs.send("a", pack, Slow(data, begun, go_on))

    assert run.keeper is not None
    order = run.keeper._order
    lock = FlusherLock(local.root)
    with ThreadPoolExecutor(1) as pool, lock.hold(None):
        saved = pool.submit(save)
        assert begun.wait(60)
        os.utime(local.path(layout.key("a", layout.shard_name(0, _TOKENS[0]))), (0, 0))
        flusher = stack.flusher(order, lock, lambda: False)
        try:
            while not any(key.endswith(".pack") for key in set(s3_run.keys())):
                flusher.step()
        finally:
            go_on.set()
        saved.result()
    run.close()
    assert s3_run.keys()[f"a/{pack.name}"] == pack.length


def test_wait_sees_a_save_that_replaced_another_and_wrote_through(tmp_path: Path) -> None:
    """The shard file that lies here is of the save before."""
    (node,) = make_nodes(1, tmp_path, tmp_path / "durable", QUICK)
    node.seal("a", 1, "0" * 16)
    (old,) = (node.local.root / "a").glob("*.shard")
    os.utime(old, (0, 0))
    progress.note_asked(node.local, "a", 0)
    node.seal("a", 1, "1" * 16)
    publish([node], "a", time.time_ns())
    (new,) = set((node.local.root / "a").glob("*.shard")) - {old}
    new.unlink()
    progress.wait(
        Catalog(node.local, None),
        node.local,
        "local",
        "a",
        0,
        timeout_s=0.0,
        poll_s=0.01,
        keep_flusher=lambda: None,
    )
