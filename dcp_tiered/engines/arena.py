"""Page-aligned, pre-faulted, reused memory under one byte budget.

First touch of fresh memory costs several times a warm copy, and O_DIRECT wants aligned addresses:
so every byte that passes through host memory passes through here, and no buffer is made per save.
"""

import contextlib
import mmap
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from dcp_tiered import metrics
from dcp_tiered.errors import BackpressureError
from dcp_tiered.metrics import Sample
from dcp_tiered.syscalls import PAGE_BYTES

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
        self.waited_s = 0.0
        """Seconds that takers waited, all together."""

    @property
    def bytes_held(self) -> int:
        """Bytes of memory that the arena keeps."""
        return self._made * self.buffer_bytes

    def samples(self, use: str) -> Iterator[Sample]:
        """Yield the metrics of this arena; `use` tells it from others."""
        labels = {"use": use}
        yield metrics.ARENA_BYTES, labels, self.bytes_held
        yield metrics.ARENA_BYTES_MAX, labels, self.buffer_bytes * self.count
        yield metrics.ARENA_WAITS, labels, self.waits
        yield metrics.ARENA_WAIT, labels, self.waited_s

    def take(self) -> memoryview:
        """Return a page-aligned, writable buffer; waits for one when all are out.

        Raises:
            BackpressureError: None came back for ten minutes.
        """
        with self._condition:
            if not self._free and self._made == self.count:
                self.waits += 1
                begun = time.monotonic()
                came = self._condition.wait_for(lambda: bool(self._free), _WAIT_S_MAX)
                self.waited_s += time.monotonic() - begun
                if not came:
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
        view = self._page_locked()
        if view is None:
            # Private, because shared memory gets no huge pages.
            area = mmap.mmap(-1, self.buffer_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                area.madvise(mmap.MADV_HUGEPAGE)
            view = memoryview(area)
        for start in range(0, self.buffer_bytes, PAGE_BYTES):
            view[start] = 0
        return view

    def _page_locked(self) -> memoryview | None:
        """Return memory that a device copies from and to at the speed of its bus, if there is one.

        Whoever has not loaded torch, or uses no device, has no use for it.
        """
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return None
        try:
            tensor = torch.empty(self.buffer_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            return None
        return None if tensor.data_ptr() % PAGE_BYTES else memoryview(tensor.numpy().data)
