"""Uploads one after the other, as long as bytes move; beside one that is held up, the next.

A thread that waits for a file system whose target does not answer cannot be ended. So the uploads
of each checkpoint have a thread of their own, and the flusher waits for one of them at a time. One
that has been silent for too long, or whose checkpoint is late, it leaves alone until it moves.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from dcp_tiered.errors import UnavailableError

_log = logging.getLogger(__name__)
_LANES_MAX = 4
_LOOK_S = 0.5
"""How often it is asked whether a checkpoint has become late."""
T = TypeVar("T")


class HeldUpError(UnavailableError):
    """An upload goes on, and others are not to wait for it."""


def never() -> bool:
    """Return False: nothing is ever late."""
    return False


@dataclass(kw_only=True)
class _Lane:
    moved_at: float
    ended: threading.Event = field(default_factory=threading.Event)
    said: bool = False
    result: Any = None
    error: BaseException | None = None


class Lanes:
    """Threads that upload, at most four; used by one thread.

    Args:
        silence_s: How long nothing may move before the next upload begins beside it.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._lanes: dict[tuple[str, str], _Lane] = {}

    def held_up(self) -> int:
        """Return how many uploads are held up now."""
        return sum(self._is_held_up(lane) for lane in self._lanes.values())

    def is_held_up(self, checkpoint_id: str, is_late: Callable[[], bool] = never) -> bool:
        """Tell whether an upload of a checkpoint goes on that is not to be waited for."""
        mine = [lane for (name, _), lane in self._lanes.items() if name == checkpoint_id]
        return any(self._is_held_up(lane, is_late) for lane in mine)

    def run(
        self,
        checkpoint_id: str,
        part: str,
        work: Callable[[Callable[[], None]], T],
        is_late: Callable[[], bool] = never,
    ) -> T:
        """Return what an upload returns, or raise what it raises, when it has ended.

        Args:
            checkpoint_id: Whose upload.
            part: Which of its uploads. The same again waits for the one that goes on already.
            work: The upload; calls what it is given whenever bytes move.
            is_late: Asked while waiting; True leaves the upload alone.

        Raises:
            HeldUpError: It goes on; or it waits for one of four that do.
        """
        key = (checkpoint_id, part)
        lane = self._lanes.get(key) or self._begin(key, work)
        while not lane.ended.wait(self._look_s(lane)):
            if self._is_held_up(lane, is_late):
                raise self._leave(checkpoint_id, lane)
        del self._lanes[key]
        if lane.error is not None:
            raise lane.error
        return cast("T", lane.result)

    def _begin(self, key: tuple[str, str], work: Callable[[Callable[[], None]], Any]) -> _Lane:
        # What has ended for another attempt at this id is of no use to this one.
        for other, lane in list(self._lanes.items()):
            if other[0] == key[0] and lane.ended.is_set():
                del self._lanes[other]
        if sum(not lane.ended.is_set() for lane in self._lanes.values()) >= _LANES_MAX:
            raise HeldUpError(
                f"{_LANES_MAX} uploads go on already and are held up",
                "durable",
                key[0],
                "Look whether the durable tier answers; the flusher goes on by itself.",
            )
        lane = self._lanes[key] = _Lane(moved_at=time.monotonic())
        name = f"dcp-tiered-upload-{key[0]}"
        # The process may end although a target never answers.
        threading.Thread(target=_work, args=(lane, work), name=name, daemon=True).start()
        return lane

    def _is_held_up(self, lane: _Lane, is_late: Callable[[], bool] = never) -> bool:
        if lane.ended.is_set():
            return False
        return is_late() or time.monotonic() - lane.moved_at >= self._silence_s

    def _look_s(self, lane: _Lane) -> float:
        return max(0.0, min(_LOOK_S, lane.moved_at + self._silence_s - time.monotonic()))

    def _leave(self, checkpoint_id: str, lane: _Lane) -> HeldUpError:
        silent_s = time.monotonic() - lane.moved_at
        why = f"nothing moved for {silent_s:.0f} s" if silent_s >= self._silence_s else "it is late"
        error = HeldUpError(
            f"upload goes on, and others begin beside it: {why}",
            "durable",
            checkpoint_id,
            "Look whether the target answers, on Lustre with 'lfs check osts'.",
        )
        if not lane.said:
            lane.said = True
            _log.warning("%s", error)
        return error


def _work(lane: _Lane, work: Callable[[Callable[[], None]], Any]) -> None:
    def moved() -> None:
        lane.moved_at = time.monotonic()

    try:
        lane.result = work(moved)
    except BaseException as exc:  # noqa: BLE001 - raised where it is waited for
        lane.error = exc
    finally:
        lane.ended.set()
