"""This node's shard files on their way to the durable tier: grouped, packed, uploaded once."""

import time
from collections.abc import Callable, Collection

from dcp_tiered.config import Limits
from dcp_tiered.errors import UnavailableError
from dcp_tiered.format import layout
from dcp_tiered.format.pack import Pack, plan_pack
from dcp_tiered.interfaces import LocalTier
from dcp_tiered.policy.packing import Candidate, group, is_alone
from dcp_tiered.services import run_directory, shard_headers
from dcp_tiered.services.catalog import Catalog
from dcp_tiered.services.pack_upload import PackUpload
from dcp_tiered.services.packs import PackStore
from dcp_tiered.services.shard_headers import Row
from dcp_tiered.version import __version__


class OwnPacks:
    """Uploads shard files of one node.

    Args:
        catalog: The run's catalog.
        local: The run's directory.
        packs: Where to.
        node: This local root's id.
        limits: Bounds.
        stop: Asked before each pack; True ends the upload with an error.
        compression: One of `config.COMPRESSIONS`.
    """

    def __init__(
        self,
        catalog: Catalog,
        local: LocalTier,
        packs: PackStore,
        node: str,
        limits: Limits,
        stop: Callable[[], bool],
        compression: str = "off",
    ) -> None:
        self._catalog = catalog
        self._local = local
        self._packs = packs
        self._node = node
        self._limits = limits
        self._stop = stop
        self._begun_ns = time.time_ns()
        self._tidied: set[str] = set()
        self._upload = PackUpload(local, packs, limits, stop, compression)

    def upload(
        self,
        checkpoint_id: str,
        rows: Collection[Row],
        uploaded: Callable[[int], None],
        check: Callable[[], None],
    ) -> dict[str, Pack]:
        """Upload and verify packs of shard files, except for those that are there already.

        Args:
            checkpoint_id: The id.
            rows: The shard files.
            uploaded: Called after each pack with the bytes that are there, before compression.
            check: Called again and again while bytes leave; ends the upload by raising.

        Returns:
            The packs of this node that hold them, by name.
        """
        self.tidy(checkpoint_id, [row[0] for row in rows])
        packs = self._there(checkpoint_id, rows)
        packed = {shard.name for pack in packs.values() for shard in pack.shards}
        todo = {row[0]: row for row in rows if row[0] not in packed}
        done = sum(pack.raw_length or pack.length for pack in packs.values())
        for chosen in group([_candidate(row) for row in todo.values()], self._target()):
            plan = plan_pack(
                checkpoint_id, self._node, [todo[one.name] for one in chosen], __version__
            )
            if self._stop():
                raise UnavailableError("flusher was asked to end", "durable", checkpoint_id)
            pack = self._upload.upload(checkpoint_id, plan, check)
            packs[pack.name] = pack
            done += pack.raw_length or pack.length
            uploaded(done)
        return packs

    def is_before_us(self, checkpoint_id: str, names: Collection[str]) -> bool:
        """Tell whether a flusher before this one may have uploaded some of these shard files."""
        sealed = (shard_headers.sealed_at(self._local, checkpoint_id, name) for name in names)
        return min(sealed, default=self._begun_ns) < self._begun_ns

    def tidy(self, checkpoint_id: str, names: Collection[str]) -> None:
        """Drop what a flusher before this one had begun to upload, when first asked for an id.

        It may have grouped the shard files otherwise, so under other names than ours. Of what was
        sealed after this process began, there was none before. While a save of this node writes
        through, what is open may be its own: then this is done the next time.

        Args:
            checkpoint_id: The id.
            names: Its shard files.
        """
        if not self.is_before_us(checkpoint_id, names) or checkpoint_id in self._tidied:
            return
        with run_directory.no_save_uploads(self._local) as alone:
            if alone:
                self._packs.durable.drop_uploads(layout.key(checkpoint_id, f"packs/{self._node}-"))
                self._tidied.add(checkpoint_id)

    def _target(self) -> int:
        return self._limits.pack_bytes_target

    def _there(self, checkpoint_id: str, rows: Collection[Row]) -> dict[str, Pack]:
        """Return packs that a flusher before this one made of these shard files.

        Most often those have the names that come out again, so the upload finds them. Only where
        they may have been grouped otherwise are the packs listed: a thousand nodes that did so for
        every checkpoint would list a million names.
        """
        names = {row[0] for row in rows}
        if not self.is_before_us(checkpoint_id, names):  # else perhaps by one with another target
            are_alone = all(is_alone(row[1], self._target()) for row in rows)
            if are_alone or not self._may_be_grouped_otherwise(checkpoint_id, names):
                return {}
        found: dict[str, Pack] = {}
        self._packs.find(checkpoint_id, found, self._node)
        wanted = set(rows)
        return {
            name: pack
            for name, pack in found.items()
            if wanted & {(shard.name, shard.length, shard.crc32c) for shard in pack.shards}
        }

    def _may_be_grouped_otherwise(self, checkpoint_id: str, names: set[str]) -> bool:
        """Tell whether these files may not have come to this flusher all at once and alone."""
        loose = sorted(names | self._catalog.unnamed(checkpoint_id))
        headers = [shard_headers.header(self._local, checkpoint_id, name) for name in loose]
        if len({header.rank for header in headers}) < len(headers):
            return True  # of two attempts
        if not shard_headers.all_ranks_are_here(headers):
            return True
        times = [shard_headers.appeared_at(self._local, checkpoint_id, name) for name in loose]
        return max(times) - min(times) >= self._limits.linger_s * 1e9


def _candidate(row: Row) -> Candidate:
    return Candidate(name=row[0], rank=layout.shard_rank(row[0]) or 0, length=row[1])
