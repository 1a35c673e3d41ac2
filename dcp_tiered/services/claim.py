"""What a commit may claim of one attempt: every shard file in a verified pack (I1)."""

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from dcp_tiered.errors import CorruptError, IncompleteError, UnavailableError
from dcp_tiered.format import layout
from dcp_tiered.format.manifest import ShardRef
from dcp_tiered.format.pack import Pack, PackedShard
from dcp_tiered.format.records import Commit, PackRef, Placement
from dcp_tiered.services.catalog import Published, parallel
from dcp_tiered.services.packs import PackStore


class Claim:
    """The packs of one attempt, gathered over many looks: none is read twice.

    Args:
        packs: The durable tier.
        published: The attempt.
        node: Who is going to commit.
        evidence: Returns what the record says of residency, or raises where that forbids it.
    """

    def __init__(
        self,
        packs: PackStore,
        published: Published,
        node: str,
        evidence: Callable[[], Mapping[str, Any] | None],
    ) -> None:
        self._packs = packs
        self._published = published
        self._node = node
        self._evidence = evidence
        self._wanted = {shard.name: shard for shard in published.head.shards}
        self._known: dict[str, Pack] = {}

    def add(self, packs: dict[str, Pack]) -> None:
        """Take note of packs that have been verified."""
        self._known |= packs

    def look(self) -> None:
        """Find the packs of other nodes that have come since the last look.

        Raises:
            IncompleteError: Shard files are in no verified pack yet; it names nodes and ranks.
        """
        checkpoint_id = self._published.head.checkpoint_id
        if self._wanted.keys() - _contents(self._known.values()).keys():
            self._packs.find(checkpoint_id, self._known)
        where = _contents(self._known.values())
        missing = [self._wanted[name] for name in sorted(self._wanted.keys() - where.keys())]
        if missing:
            raise _incomplete(checkpoint_id, missing)

    def make(self) -> Commit:
        """Return the commit, having asked the store once more for every pack that it names.

        Raises:
            IncompleteError: See `look`.
            CorruptError: A pack holds other bytes under a shard file's name.
            UnavailableError: A pack is gone.
            ResidencyError: The store is not, or no longer, where the policy allows it to be.
        """
        self.look()
        head = self._published.head
        where = _contents(self._known.values())
        for name, shard in self._wanted.items():
            _check_same(where[name][1], shard)
        used = sorted({where[name][0].name for name in self._wanted})
        self._verify(used)
        return Commit(
            checkpoint_id=head.checkpoint_id,
            attempt=head.attempt,
            sequence=head.sequence,
            step=head.step,
            manifest_sha256=self._published.sha256,
            manifest_length=len(self._published.data),
            packs=tuple(_reference(self._known[name]) for name in used),
            placements=tuple(
                Placement(
                    shard=name, pack=used.index(where[name][0].name), start=where[name][1].start
                )
                for name in sorted(self._wanted)
            ),
            bytes_stored=head.bytes_stored(),
            committed_by=self._node,
            committed_at=datetime.now(UTC).isoformat(timespec="seconds"),
            residency=self._evidence(),
        )

    def _verify(self, names: list[str]) -> None:
        checkpoint_id = self._published.head.checkpoint_id

        def is_verified(name: str) -> bool:
            return self._packs.is_verified(checkpoint_id, self._known[name])

        for name, sound in zip(names, parallel(is_verified, names), strict=True):
            if not sound:
                raise UnavailableError(
                    "a pack is gone from the store", "durable", name, "It is uploaded again."
                )


def _reference(pack: Pack) -> PackRef:
    return PackRef(
        name=pack.name, length=pack.length, crc32c=pack.crc32c, raw_length=pack.raw_length
    )


def _check_same(packed: PackedShard, shard: ShardRef) -> None:
    if (packed.length, packed.crc32c) != (shard.length, shard.crc32c):
        raise CorruptError("a pack holds another shard file than was saved", "durable", packed.name)


def _incomplete(checkpoint_id: str, missing: list[ShardRef]) -> IncompleteError:
    """Return the error that names the nodes and ranks whose shard files are not there."""
    ranks: dict[str, list[int]] = {}
    for shard in missing:
        ranks.setdefault(shard.node, []).append(layout.shard_rank(shard.name) or 0)
    parts = [
        f"node {node} (ranks {', '.join(map(str, sorted(numbers)))[:80]})"
        for node, numbers in sorted(ranks.items())
    ]
    return IncompleteError(
        f"shard files of {len(parts)} nodes are not on the durable tier yet:"
        f" {'; '.join(parts)[:400]}",
        "durable",
        checkpoint_id,
        "Their flushers may still be at work; 'dcp-tiered status' on those nodes tells.",
    )


def _contents(packs: Iterable[Pack]) -> dict[str, tuple[Pack, PackedShard]]:
    """Return in which pack each shard file lies."""
    return {shard.name: (pack, shard) for pack in packs for shard in pack.shards}
