"""Two-tier checkpoint storage for PyTorch Distributed Checkpoint: NVMe first, object store behind.

Names are imported on first use, so that the command line works where torch is not installed.
"""

from typing import TYPE_CHECKING, Any

from dcp_tiered.config import Limits
from dcp_tiered.errors import (
    AbsentError,
    AlreadyExistsError,
    BackpressureError,
    ConflictError,
    CorruptError,
    ExpiredError,
    IncompleteError,
    InvalidError,
    NoCheckpointError,
    ResidencyError,
    SupersededError,
    TieredError,
    UnavailableError,
    cause,
)
from dcp_tiered.version import __version__

if TYPE_CHECKING:
    from dcp_tiered.filesystem import TieredFileSystem
    from dcp_tiered.reader import TieredReader
    from dcp_tiered.writer import TieredWriter

__all__ = [
    "AbsentError",
    "AlreadyExistsError",
    "BackpressureError",
    "ConflictError",
    "CorruptError",
    "ExpiredError",
    "IncompleteError",
    "InvalidError",
    "Limits",
    "NoCheckpointError",
    "ResidencyError",
    "SupersededError",
    "TieredError",
    "TieredFileSystem",
    "TieredReader",
    "TieredWriter",
    "UnavailableError",
    "__version__",
    "cause",
]

_LAZY = {"TieredWriter": "writer", "TieredReader": "reader", "TieredFileSystem": "filesystem"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
