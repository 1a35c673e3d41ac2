"""Uploads one after the other, as long as bytes move; beside one that is held up, the next.

A thread that waits for a file system whose target does not answer cannot be ended. So the uploads
of each checkpoint have a thread of their own, and the flusher waits for one of them at a time. One
that has been silent for too long, or whose checkpoint is late, it leaves alone until it moves. One
that nobody wants any more ends when it moves, and holds up nothing.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from dcp_tiered.errors import UnavailableError
from dcp_tiered.services.outgoing import never

_log = logging.getLogger(__name__)
_THREADS = "dcp-tiered-upload-"
_LANES_MAX = 4
_TIDY_S = 3.0
"""What is cut off when the time is over is aborted on the store: that is waited for."""
_LOOK_S = 0.5
"""How often it is asked whether a checkpoint has become late."""
T = TypeVar("T")


class HeldUpError(UnavailableError):
    """An upload goes on, and others are not to wait for it."""


class UnwantedError(UnavailableError):
    """Ends an upload whose end nobody waits for any more."""


def never_late() -> bool:
    """Return False."""
    return False


def are_left() -> bool:
    """Tell whether uploads of this process go on, which may hang for ever."""
    return any(thread.name.startswith(_THREADS) for thread in threading.enumerate())


@dataclass(kw_only=True)
class _Lane:
    moved_at: float
    ended: threading.Event = field(default_factory=threading.Event)
    said: bool = False
    unwanted: bool = False
    result: Any = None
    error: BaseException | None = None


class Lanes:
    """Threads that upload, at most four; used by one thread.

    Args:
        silence_s: How long nothing may move before the next upload begins beside it.
        due: Returns when uploads have to be over, by the monotonic clock; asked again and again.
    """

    def __init__(self, silence_s: float, due: Callable[[], float] = never) -> None:
        self._silence_s = silence_s
        self._due = due
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._unwanted: list[_Lane] = []

    def held_up(self) -> int:
        """Return how many uploads are held up now, those that nobody wants included."""
        return sum(self._is_held_up(lane) for lane in (*self._lanes.values(), *self._unwanted))

    def are_taken(self) -> bool:
        """Tell whether no other upload can begin now."""
        lanes = (*self._lanes.values(), *self._unwanted)
        return sum(not lane.ended.is_set() for lane in lanes) >= _LANES_MAX

    def abandon(self, checkpoint_id: str | None = None) -> None:
        """Want the uploads of a checkpoint no more, or any: they end when they move.

        Whatever is asked for under its id afterwards does not wait for them.
        """
        for key, lane in list(self._lanes.items()):
            if checkpoint_id in (None, key[0]):
                lane.unwanted = True
                self._unwanted.append(self._lanes.pop(key))
        self._unwanted = [lane for lane in self._unwanted if not lane.ended.is_set()]

    def is_known(self, checkpoint_id: str) -> bool:
        """Tell whether an upload of a checkpoint goes on, or has ended and was not asked for."""
        return any(name == checkpoint_id for name, _ in self._lanes)

    def is_held_up(self, checkpoint_id: str, is_late: Callable[[], bool] = never_late) -> bool:
        """Tell whether an upload of a checkpoint goes on that is not to be waited for."""
        mine = [lane for (name, _), lane in self._lanes.items() if name == checkpoint_id]
        return any(self._is_held_up(lane, is_late) for lane in mine)

    def run(
        self,
        checkpoint_id: str,
        part: str,
        work: Callable[[Callable[[], None]], T],
        is_late: Callable[[], bool] = never_late,
        until: Callable[[], bool] = never_late,
    ) -> T:
        """Return what an upload returns, or raise what it raises, when it has ended.

        Args:
            checkpoint_id: Whose upload.
            part: Which of its uploads. The same again waits for the one that goes on already;
                another one begins when that has ended.
            work: The upload; calls what it is given whenever bytes move.
            is_late: Asked while waiting; True leaves the upload alone.
            until: The same, where nothing is wrong with it.

        Raises:
            HeldUpError: It goes on; or it waits for one of four that do.
        """
        key = (checkpoint_id, part)
        for other in [one for one in self._lanes if one[0] == checkpoint_id and one != key]:
            self._await(other, is_late)  # its result is of no use to this one
        if key not in self._lanes:
            self._begin(key, work)
        lane = self._await(key, is_late, until)
        if lane.error is not None:
            raise lane.error
        return cast("T", lane.result)

    def _await(
        self,
        key: tuple[str, str],
        is_late: Callable[[], bool],
        until: Callable[[], bool] = never_late,
    ) -> _Lane:
        """Return a lane that has ended, which is none of ours then."""
        lane = self._lanes[key]
        while not lane.ended.wait(self._look_s(lane)):
            if self._is_held_up(lane, is_late) or self._is_over():
                raise self._leave(key[0], lane)
            if until():
                raise HeldUpError("upload goes on, and is waited for elsewhere", "durable", key[0])
        return self._lanes.pop(key)

    def _begin(self, key: tuple[str, str], work: Callable[[Callable[[], None]], Any]) -> None:
        if self.are_taken():
            raise HeldUpError(
                f"{_LANES_MAX} uploads go on already and are held up",
                "durable",
                key[0],
                "Look whether the durable tier answers; the flusher goes on by itself.",
            )
        lane = self._lanes[key] = _Lane(moved_at=time.monotonic())
        # The process may end although a target never answers; see `are_left`.
        name = f"{_THREADS}{key[0]}"
        threading.Thread(target=_work, args=(lane, work), name=name, daemon=True).start()

    def _is_held_up(self, lane: _Lane, is_late: Callable[[], bool] = never_late) -> bool:
        if lane.ended.is_set():
            return False
        return is_late() or time.monotonic() - lane.moved_at >= self._silence_s

    def _is_over(self) -> bool:
        return time.monotonic() >= self._due() + _TIDY_S

    def _look_s(self, lane: _Lane) -> float:
        return max(0.0, min(_LOOK_S, lane.moved_at + self._silence_s - time.monotonic()))

    def _leave(self, checkpoint_id: str, lane: _Lane) -> HeldUpError:
        silent_s = time.monotonic() - lane.moved_at
        is_silent = silent_s >= self._silence_s or self._is_over()
        why = f"nothing moved for {silent_s:.0f} s" if is_silent else "it is late"
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
        if lane.unwanted:
            raise UnwantedError("nobody waits for this upload any more", "durable")

    try:
        lane.result = work(moved)
    except BaseException as exc:  # noqa: BLE001 - raised where it is waited for
        lane.error = exc
    finally:
        lane.ended.set()
