"""Upload, verify and find packs: what stands between a sealed shard file and a commit (I1)."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from awscrt.checksums import crc32c

from dcp_tiered.errors import AbsentError, AlreadyExistsError, CorruptError, UnavailableError
from dcp_tiered.format import layout
from dcp_tiered.format.columns import canonical_json, parse_json
from dcp_tiered.format.pack import Pack
from dcp_tiered.interfaces import DurableTier, LocalTier, ObjectInfo, Source
from dcp_tiered.services import pack_footer
from dcp_tiered.services.catalog import parallel
from dcp_tiered.services.pack_source import PackSource

_OK_BYTES_MAX = 1 << 16
_READ_BACK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class PackStore:
    """The packs of a run on the durable tier."""

    local: LocalTier
    durable: DurableTier

    def upload(self, checkpoint_id: str, pack: Pack, check: Callable[[], None]) -> None:
        """Bring a pack to the durable tier and verify it there.

        Args:
            checkpoint_id: The id.
            pack: What goes.
            check: Called before each read of the pack; ends the upload by raising.
        """
        if not self.is_verified(checkpoint_id, pack):
            with PackSource(self.local.root / checkpoint_id, pack) as source:
                try:
                    self.send(checkpoint_id, pack, Checked(source, check), check)
                except CorruptError:
                    source.check()  # says which file it is, if the fault is on this side
                    raise

    def send(
        self,
        checkpoint_id: str,
        pack: Pack,
        source: Source,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Bring the bytes of a pack to the durable tier and verify them there.

        Args:
            checkpoint_id: The id.
            pack: What goes.
            source: Its bytes.
            check: Called while it is read back, where the store has to be asked for the bytes.
        """
        key = layout.key(checkpoint_id, pack.name)
        self._verify_upload(checkpoint_id, pack, self.durable.upload(key, source), check)

    def is_verified(self, checkpoint_id: str, pack: Pack) -> bool:
        """Tell whether the store holds exactly this pack and that has been verified.

        A store that keeps a checksum of the whole object answers by itself; for any other the
        uploader's `.ok` object counts, which it puts after reading the pack back.
        """
        try:
            info = self.durable.head(layout.key(checkpoint_id, pack.name))
            return self._is(checkpoint_id, info, pack)
        except AbsentError:
            return False

    def find(self, checkpoint_id: str, known: dict[str, Pack], node: str | None = None) -> None:
        """Add to `known`, by name, the verified packs of a checkpoint that are not in it yet.

        Args:
            checkpoint_id: The checkpoint.
            known: Packs that need not be read again.
            node: Only packs of this one, None for those of all.
        """
        keys = self.durable.list_keys(layout.key(checkpoint_id, "packs"))
        names = {key.partition("/")[2] for key in keys} - known.keys()
        nodes = {name: layout.pack_node(name) for name in names}
        wanted = sorted(n for n, its in nodes.items() if its is not None and node in (None, its))
        found = parallel(lambda name: self.verified(checkpoint_id, name), wanted)
        known.update({pack.name: pack for pack in found if pack is not None})

    def verified(self, checkpoint_id: str, name: str) -> Pack | None:
        """Return the pack behind a name from its footer, None when it is no verified one."""
        key = layout.key(checkpoint_id, name)
        try:
            info = self.durable.head(key)
            pack, _ = pack_footer.read(self.durable, key, name, info.length)
            return pack if self._is(checkpoint_id, info, pack) else None
        except (AbsentError, CorruptError):
            return None

    def _is(self, checkpoint_id: str, info: ObjectInfo, pack: Pack) -> bool:
        """Tell whether what the store says of an object makes it a verified pack."""
        if info.length != pack.length or info.crc32c not in (None, pack.crc32c):
            return False
        if not info.is_as_asked:
            return False
        if info.crc32c is not None:
            return True
        ok = self.durable.get(layout.key(checkpoint_id, layout.ok_name(pack.name)), _OK_BYTES_MAX)
        return parse_json(ok) == _ok(pack)

    def _verify_upload(
        self, checkpoint_id: str, pack: Pack, info: ObjectInfo, check: Callable[[], None]
    ) -> None:
        key = layout.key(checkpoint_id, pack.name)
        if info.length != pack.length:
            raise UnavailableError(
                f"store has {info.length} of {pack.length} bytes",
                "durable",
                key,
                "It is tried again.",
            )
        if info.crc32c is None:
            self._read_back(key, pack, check)
            ok = layout.key(checkpoint_id, layout.ok_name(pack.name))
            with contextlib.suppress(AlreadyExistsError):
                self.durable.put(ok, canonical_json(_ok(pack)))
        elif info.crc32c != pack.crc32c:
            raise CorruptError("store computed another checksum than ours", "durable", key)

    def _read_back(self, key: str, pack: Pack, check: Callable[[], None]) -> None:
        crc, position = 0, 0
        buffer = memoryview(bytearray(min(_READ_BACK_BYTES, pack.length)))
        while position < pack.length:
            check()
            part = buffer[: min(len(buffer), pack.length - position)]
            self.durable.read_into(key, position, part)
            crc = crc32c(part, crc)
            position += len(part)
        if crc != pack.crc32c:
            raise CorruptError("pack reads back with other bytes than were sent", "durable", key)


class Checked:
    """A source that asks before each read."""

    def __init__(self, source: Source, check: Callable[[], None]) -> None:
        self.length, self.crc32c = source.length, source.crc32c
        self.checksum = source.checksum
        self._source, self._check = source, check

    def pread(self, length: int, start: int) -> bytes:
        """Return exactly `length` bytes from `start`."""
        self._check()
        return self._source.pread(length, start)

    def copy_into(self, fd: int, length: int, start: int) -> int:
        """Copy a range within a file system; see `Source.copy_into`."""
        self._check()
        return self._source.copy_into(fd, length, start)


def _ok(pack: Pack) -> dict[str, int]:
    return {"length": pack.length, "crc32c": pack.crc32c}
