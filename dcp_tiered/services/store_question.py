"""The one question that a save asks the durable tier: is the id taken? It may stay unanswered."""

import logging
import threading
from collections.abc import Callable

from dcp_tiered.format.records import Commit, Expired
from dcp_tiered.interfaces import DurableTier
from dcp_tiered.services.catalog import Catalog, newest

_log = logging.getLogger(__name__)


class StoreQuestion:
    """Asks about ids, one after the other.

    Args:
        make: Makes the tier to ask; None when the run has no durable one. Most of what it costs to
            make one is kept for the next save, connections are not.
        timeout_s: How long to wait for an answer.
    """

    def __init__(self, make: Callable[[], DurableTier | None], timeout_s: float) -> None:
        self._make = make
        self._timeout_s = timeout_s
        self._tier: DurableTier | None = None

    def ask(self, checkpoint_id: str, known_sequence: int) -> tuple[Commit | Expired | None, int]:
        """Return the id's state and, on the first save, the greatest sequence of the run.

        A save does not depend on it: what is missed here comes up as a conflict when the flusher
        commits.

        Args:
            checkpoint_id: The id.
            known_sequence: The greatest that is known; 0 before the first save.
        """
        tier = self._tier or self._make()
        if tier is None:
            return None, 0
        answer: list[tuple[Commit | Expired | None, int]] = []
        failure: list[Exception] = []

        def work() -> None:
            catalog = Catalog(None, tier)
            try:
                state = catalog.state(checkpoint_id)
                answer.append((state, 0))
                # A run of many checkpoints may take longer than we have: that hides no conflict.
                last = newest(catalog.states()) if known_sequence == 0 else None
                answer.append((state, last.sequence if last else 0))
            except Exception as exc:  # noqa: BLE001 - whatever it is, the save goes on
                failure.append(exc)
            finally:
                tier.close()

        thread = threading.Thread(target=work, name="dcp-tiered-ask", daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        # One that failed, or is still asked, is not asked again.
        self._tier = None if failure or thread.is_alive() else tier
        if answer:
            return answer[-1]
        reason = failure[0] if failure else f"no answer within {self._timeout_s:g} s"
        _log.warning(
            "saving %s without knowing whether it is on the durable tier already: %s",
            checkpoint_id,
            reason,
        )
        return None, 0
