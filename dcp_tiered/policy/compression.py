"""Whether a pack is compressed before it is uploaded; `auto` means: when it is durable sooner so.

A pack is compressed first, since its checksum has to be known before the first byte leaves, and
uploaded then. So a byte costs 1 / codec seconds and saves the link a part of 1 / link seconds.
"""

from dataclasses import dataclass

LINK_BYTES_MIN = 16 << 20
"""An upload of less says more of the store's answers than of the link."""
TRY_AGAIN_PACKS = 32
"""What was measured counts for so many packs that are not compressed: the next may be others."""
_CODEC_BYTES_PER_S = 500e6
_SAVED_SHARE = 0.3
"""Both are hoped for before anything is measured; a try that fails costs one pack some seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the packs before have shown; None where none has."""

    link_bytes_per_s: float | None = None
    codec_bytes_per_s: float | None = None
    """Of bytes before compression, with reading and writing them."""
    saved_share: float = 0.0
    """Of those bytes."""
    packs_since: int = 0
    """Packs since then that were not compressed."""


def is_wanted(mode: str, measured: Measured) -> bool:
    """Tell whether the next pack is to be compressed.

    Args:
        mode: One of `config.COMPRESSIONS`.
        measured: By the packs before.
    """
    if mode != "auto" or measured.link_bytes_per_s is None:
        return mode == "zstd"
    codec, saved = measured.codec_bytes_per_s, measured.saved_share
    if codec is None or measured.packs_since >= TRY_AGAIN_PACKS:
        codec, saved = _CODEC_BYTES_PER_S, _SAVED_SHARE
    return saved * codec > measured.link_bytes_per_s
