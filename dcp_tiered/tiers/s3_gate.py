"""How many requests to a store may be on their way at once: fewer after each `SlowDown`.

The number halves when the store says that it is too much, and grows back by one for every round of
requests that went well, as TCP does it. It is not remembered from one process to the next.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Lets a bounded number of requests through at a time.

    Args:
        most: How many at the most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._allowed = float(most)
        self._inside = 0
        self._round = 0
        """Grows with every cut: what was sent before it says nothing about what is allowed now."""
        self._free = threading.Condition()

    @property
    def allowed(self) -> int:
        """How many may be on their way now."""
        return int(self._allowed)

    @contextmanager
    def slot(self) -> Iterator[int]:
        """Wait for a slot and hold it for the block; the value is the round it belongs to."""
        with self._free:
            self._free.wait_for(lambda: self._inside < self.allowed)
            self._inside += 1
            sent_in = self._round
        try:
            yield sent_in
        finally:
            with self._free:
                self._inside -= 1
                self._free.notify_all()

    def went_well(self) -> None:
        """Allow a little more."""
        with self._free:
            self._allowed = min(self._most, self._allowed + 1 / self.allowed)
            self._free.notify_all()

    def slow_down(self, sent_in: int) -> bool:
        """Halve what is allowed, once for all requests of a round; return whether it was done.

        Call it inside the slot of the request that was refused.
        """
        with self._free:
            if sent_in != self._round:
                return False
            self._round += 1
            # What is on its way counts: where three of sixteen are used, eight would be no cut.
            self._allowed = float(max(1, min(self.allowed, self._inside) // 2))
            return True
