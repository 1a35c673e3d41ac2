"""A durable tier on a directory, as the flusher builds it."""

from pathlib import Path

from dcp_tiered.engines.arena import Arena
from dcp_tiered.engines.choose import host_engine
from dcp_tiered.interfaces import Engine
from dcp_tiered.tiers.mounted import MountedTier


def best_engine(directory: Path) -> Engine:
    return host_engine(directory, Arena(1 << 20, 4))


def mounted_tier(root: Path, base: Path, stripes: int = 8) -> MountedTier:
    return MountedTier(root, base, best_engine, stripes)
