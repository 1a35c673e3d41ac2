"""Nodes of one job without a trainer: local roots that hold what each would have sealed."""

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcp_tiered.config import Limits
from dcp_tiered.format import layout
from dcp_tiered.format.manifest import Chunk, Entry, Head, Manifest, ShardRef
from dcp_tiered.format.shardfile import Header
from dcp_tiered.services.catalog import Catalog, Published
from dcp_tiered.services.flusher import Flusher
from dcp_tiered.services.residency import Guard
from dcp_tiered.tiers.posix import PosixTier
from tests.property.strategies import Thing, shard_bytes
from tests.support.tiers import mounted_tier

PAGE_KEYS = 1000
"""S3 lists this many keys in one request."""


class CountingTier:
    """A real tier, and a count of the requests that a store would have had to answer."""

    def __init__(self, tier: PosixTier) -> None:
        self._tier = tier
        self._lock = threading.Lock()
        self.name, self.url = tier.name, tier.url
        self.keeps_writers_apart = True
        self.requests: Counter[str] = Counter()

    def _count(self, name: str) -> None:
        with self._lock:
            self.requests[name] += 1

    def put(self, key: str, data: bytes) -> None:
        self._count("PUT")
        self._tier.put(key, data)

    def upload(self, key: str, source: Any) -> Any:
        self._count("PUT")
        return self._tier.upload(key, source)

    def delete(self, key: str) -> None:
        self._count("DELETE")
        self._tier.delete(key)

    def drop_uploads(self, prefix: str) -> None:
        self._tier.drop_uploads(prefix)

    def get(self, key: str, bytes_max: int) -> bytes:
        self._count("GET")
        return self._tier.get(key, bytes_max)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        self._count("GET")
        self._tier.read_into(key, start, buffer)

    def read_alignment(self, key: str) -> int:
        return self._tier.read_alignment(key)

    def head(self, key: str) -> Any:
        self._count("HEAD")
        return self._tier.head(key)

    def list_keys(self, prefix: str) -> Iterator[str]:
        """Yield in the order of S3, one request for each page that is begun."""
        self._count("LIST")
        for number, key in enumerate(sorted(self._tier.list_keys(prefix))):
            if number and number % PAGE_KEYS == 0:
                self._count("LIST")
            yield key

    def list_directories(self) -> Iterator[str]:
        self._count("LIST")
        yield from self._tier.list_directories()

    def close(self) -> None:
        self._tier.close()


@dataclass
class Node:
    """One local root with one rank, its flusher, and its view of the durable tier."""

    rank: int
    node: str
    local: PosixTier
    durable: CountingTier
    limits: Limits
    shards: list[ShardRef] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self, residency: Guard | None = None) -> None:
        """Begin with another flusher, which knows nothing of what the one before it did."""
        self.flusher = Flusher(
            self.local,
            self.durable,
            self.node,
            self.limits,
            lambda: False,
            residency,
        )

    def seal(
        self, checkpoint_id: str, world_size: int, token: str, policy_sha256: str | None = None
    ) -> None:
        """Write this rank's shard file."""
        header = Header(
            checkpoint_id=checkpoint_id,
            rank=self.rank,
            world_size=world_size,
            local_world_size=1,
            node=self.node,
            token=token,
            written_by="test",
            policy_sha256=policy_sha256,
        )
        made = shard_bytes(header, [Thing(f"w{self.rank}", None, (), (), (), b"bytes" * 10)])
        name = layout.shard_name(self.rank, token)
        self.local.put(layout.key(checkpoint_id, name), made.data)
        self.shards = [
            ShardRef(
                name=name,
                node=self.node,
                length=len(made.data),
                crc32c=made.crc,
                footer_start=made.footer_start,
            )
        ]


def make_nodes(count: int, base: Path, durable: Path, limits: Limits) -> list[Node]:
    """Return nodes of which nothing is saved yet."""
    nodes = []
    store = mounted_tier(durable, durable.parent)
    for rank in range(count):
        root = base / f"node-{rank}"
        root.mkdir(parents=True)
        local = PosixTier(root, root, "local")
        nodes.append(Node(rank, f"{rank:012x}", local, CountingTier(store), limits))
    return nodes


def publish(
    nodes: list[Node], checkpoint_id: str, sequence: int = 1, policy_sha256: str | None = None
) -> Published:
    """Publish on the first node what all have sealed."""
    shards = [shard for node in nodes for shard in node.shards]
    head = Head(
        checkpoint_id=checkpoint_id,
        attempt=f"{sequence:016x}",
        launch="host:1",
        node=nodes[0].node,
        sequence=sequence,
        step=1,
        metadata={},
        supersedes=(),
        world_size=len(nodes),
        written_by={"dcp_tiered": "test"},
        shards=tuple(shards),
        policy_sha256=policy_sha256,
    )
    entries = [
        Entry(
            fqn=f"w{number}",
            dtype=None,
            chunks=(Chunk(offsets=(), sizes=(), shard=number, row=0),),
        )
        for number in range(len(shards))
    ]
    manifest = Manifest(head=head, entries=entries, planner_data={})
    return Catalog(nodes[0].local, None).publish(manifest)
