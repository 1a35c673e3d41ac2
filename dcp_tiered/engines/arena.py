"""Page-aligned, pre-faulted, reused memory under one byte budget.

First touch of fresh memory costs several times a warm copy, and O_DIRECT wants aligned addresses:
so every byte that passes through host memory passes through here, and no buffer is made per save.
"""

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dcp_tiered.errors import BackpressureError
from dcp_tiered.interfaces import PAGE_BYTES

_WAIT_S_MAX = 600.0


class Arena:
    """A pool of equal buffers.

    Args:
        buffer_bytes: Size of each buffer, a multiple of the page size.
        count: Number of buffers; together they are the budget.
    """

    def __init__(self, buffer_bytes: int, count: int) -> None:
        self.buffer_bytes = buffer_bytes
        self.count = count
        self._free: list[memoryview] = []
        self._made = 0
        self._condition = threading.Condition()
        self.waits = 0
        """How often a taker had to wait for a buffer: back-pressure instead of more memory."""

    @property
    def bytes_held(self) -> int:
        """Bytes of memory that the arena keeps."""
        return self._made * self.buffer_bytes

    def take(self) -> memoryview:
        """Return a page-aligned, writable buffer; waits for one when all are out.

        Raises:
            BackpressureError: None came back for ten minutes.
        """
        with self._condition:
            if not self._free and self._made == self.count:
                self.waits += 1
                if not self._condition.wait_for(lambda: bool(self._free), _WAIT_S_MAX):
                    raise BackpressureError(
                        "no buffer became free: the disk does not take what it is given", "local"
                    )
            if self._free:
                return self._free.pop()
            self._made += 1
        return self._make()

    def give_back(self, buffer: memoryview) -> None:
        """Return a buffer that nobody uses any more."""
        with self._condition:
            self._free.append(buffer)
            self._condition.notify()

    @contextmanager
    def borrow(self) -> Iterator[memoryview]:
        """Lend a buffer for a block."""
        buffer = self.take()
        try:
            yield buffer
        finally:
            self.give_back(buffer)

    def _make(self) -> memoryview:
        area = mmap.mmap(-1, self.buffer_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            area.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(area)
        for start in range(0, self.buffer_bytes, PAGE_BYTES):
            view[start] = 0
        return view
