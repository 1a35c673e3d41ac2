"""One pack on its way to the durable tier: as it is, or compressed where that is wanted."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from typing import Any

from dcp_tiered.config import Limits
from dcp_tiered.errors import TieredError
from dcp_tiered.format import layout
from dcp_tiered.format.columns import canonical_json, parse_json
from dcp_tiered.format.pack import Pack, compressed_name
from dcp_tiered.interfaces import LocalTier
from dcp_tiered.policy import compression
from dcp_tiered.policy.compression import Measured
from dcp_tiered.services import catalog
from dcp_tiered.services.compressing import compressed
from dcp_tiered.services.packs import Checked, PackStore

_log = logging.getLogger(__name__)
_FILE_BYTES_MAX = 1 << 16
_KNOWN = tuple(field.name for field in fields(Measured))


class PackUpload:
    """Uploads packs and decides which are compressed; used by the threads of several checkpoints.

    Args:
        local: The run's directory.
        packs: Where to.
        limits: Bounds.
        stop: Asked while a pack is compressed; True ends that with an error.
        mode: One of `config.COMPRESSIONS`.
    """

    def __init__(
        self,
        local: LocalTier,
        packs: PackStore,
        limits: Limits,
        stop: Callable[[], bool],
        mode: str,
    ) -> None:
        self._local = local
        self._packs = packs
        self._limits = limits
        self._stop = stop
        self._mode = mode
        self._lock = threading.Lock()
        self._measured = _read(local) if mode == "auto" else Measured()

    def upload(self, checkpoint_id: str, plan: Pack, check: Callable[[], None]) -> Pack:
        """Bring a pack to the durable tier and verify it there; return it as it lies there.

        Args:
            checkpoint_id: The id.
            plan: The pack without compression.
            check: Called before each read of what leaves; ends the upload by raising.
        """
        if self._mode == "off":
            self._packs.upload(checkpoint_id, plan, check)
            return plan
        if (there := self._there(checkpoint_id, plan)) is not None:
            return there
        if compression.is_wanted(self._mode, self._measured):
            pack = self._compress(checkpoint_id, plan, check)
        else:
            self._note(packs_since=self._measured.packs_since + 1)
            pack = None
        return pack or self._timed(plan, lambda: self._packs.upload(checkpoint_id, plan, check))

    def _there(self, checkpoint_id: str, plan: Pack) -> Pack | None:
        """Return what a flusher before this one uploaded, compressed or not."""
        pack = self._packs.verified(checkpoint_id, compressed_name(plan))
        if pack is not None and pack.shards == plan.shards:
            return pack
        return plan if self._packs.is_verified(checkpoint_id, plan) else None

    def _compress(self, checkpoint_id: str, plan: Pack, check: Callable[[], None]) -> Pack | None:
        """Compress and upload a pack; return None where it is best uploaded as it is."""

        def stop() -> bool:
            check()
            return self._stop()

        begun = time.monotonic()
        with compressed(self._local, checkpoint_id, plan, self._limits, stop) as spool:
            seconds = max(time.monotonic() - begun, 1e-6)
            pack = None if spool is None else spool.pack
            self._note(
                codec_bytes_per_s=plan.length / seconds,
                saved_share=0.0 if pack is None else 1 - pack.length / plan.length,
                packs_since=0,
            )
            if spool is None or pack is None:
                return None
            _log.info(
                "compressed %s of %s: %d of %d bytes, %.2f s",
                pack.name,
                checkpoint_id,
                pack.length,
                plan.length,
                seconds,
            )
            body = Checked(spool, check)
            return self._timed(pack, lambda: self._packs.send(checkpoint_id, pack, body, check))

    def _timed(self, pack: Pack, upload: Callable[[], None]) -> Pack:
        """Upload a pack and note how fast the link was; return the pack."""
        begun = time.monotonic()
        upload()
        if pack.length >= compression.LINK_BYTES_MIN:
            self._note(link_bytes_per_s=pack.length / max(time.monotonic() - begun, 1e-6))
        return pack

    def _note(self, **changes: Any) -> None:
        """Remember what was measured; for `auto` also for the next flusher.

        There may be one flusher per checkpoint, which ends when that is durable.
        """
        with self._lock:
            self._measured = replace(self._measured, **changes)
            if self._mode == "auto":
                self._write()

    def _write(self) -> None:
        try:
            data = canonical_json(asdict(self._measured))
            catalog.replace(self._local, layout.MEASURED_FILE, data)
        except TieredError as exc:
            _log.warning("cannot note how fast the link is: %s", exc)


def _read(local: LocalTier) -> Measured:
    """Return what the flusher before has measured; nothing where that is damaged or missing."""
    try:
        noted = parse_json(local.get(layout.MEASURED_FILE, _FILE_BYTES_MAX))
    except TieredError:
        return Measured()
    known = {name: noted.get(name) for name in _KNOWN}
    if not all(isinstance(value, int | float) for value in known.values() if value is not None):
        return Measured()
    return Measured(**{name: value for name, value in known.items() if value is not None})
