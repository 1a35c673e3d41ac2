"""What holds for a flush without a residency policy: the first region, and nothing public."""

import logging
import time
from collections.abc import Callable

from dcp_tiered.errors import AlreadyExistsError, ResidencyError, UnavailableError
from dcp_tiered.format.columns import canonical_json
from dcp_tiered.format.residency import Fact, Verdict
from dcp_tiered.interfaces import LocalTier
from dcp_tiered.services.residency import REFUSED_S, another_policy
from dcp_tiered.services.residency_note import NOTE_FILE, read_note

_log = logging.getLogger(__name__)


class NoPolicy:
    """Without a policy: only a target that is known to be public is refused.

    Args:
        public: Returns what is known about that, None when nothing can be; asked once, and again
            as long as it is known to be public.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        public: Callable[[], Fact | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._public, self._clock = public, clock
        self._passed = False
        self._refused: tuple[float, ResidencyError] | None = None

    def require(self, *, fresh: bool = False) -> None:
        """Pass unless the target is known to be public; see `Residency.require`."""
        del fresh
        if self._passed:
            return
        now = self._clock()
        if self._refused is not None and now - self._refused[0] < REFUSED_S:
            raise self._refused[1]
        fact = self._public()
        if fact is not None and fact.verdict is Verdict.DENY:
            error = _known_public(fact)
            self._refused = now, error
            raise error
        if fact is not None:
            _log.warning(
                "no residency policy: where the durable tier lies and where it is replicated to is"
                " not looked at; whether it is public: %s",
                fact.evidence,
            )
        self._passed = True

    def note(self, key: str) -> None:
        """Note nothing: no look would ever say whether it was right to write there."""

    def sent(self, key: str) -> None:
        """Note nothing."""

    def admit(self, policy_sha256: str | None) -> None:
        """Pass for checkpoints that were saved without a policy; see `Guard.admit`."""
        if policy_sha256 is not None:
            raise another_policy(policy_sha256, "held to none")

    def is_mine(self, policy_sha256: str | None) -> bool:
        """Pass for what was sealed without a policy; see `Guard.is_mine`."""
        return policy_sha256 is None

    def settle(self) -> None:
        """Do nothing."""

    def watch(self) -> bool:
        """Return False: nothing is looked at."""
        return False


class RegionKept(NoPolicy):
    """Without a policy: the region that a run was first flushed to is kept.

    Args:
        local: The run's directory, which remembers it.
        region: Returns what the requests of this process are signed for.
        public: See `NoPolicy`.
    """

    def __init__(
        self,
        local: LocalTier,
        region: Callable[[], str],
        public: Callable[[], Fact | None] = lambda: None,
    ) -> None:
        super().__init__(public)
        self._local, self._region = local, region

    def require(self, *, fresh: bool = False) -> None:
        """Pass in the first region, which is noted; see `Residency.require`."""
        super().require(fresh=fresh)
        region = self._region()
        noted = read_note(self._local).get("region")
        if noted is None:
            _log.info("this run is kept in region %s, where it is flushed first", region)
            noted = self._note(region)
        if noted != region:
            raise ResidencyError(
                f"run was flushed to region {noted!r} before, and would go to {region!r} now",
                "durable",
                str(self._local.root / NOTE_FILE),
                "Set the region back; if the run has to move, remove that file.",
            )

    def _note(self, region: str) -> object:
        """Note a region; return the one that is noted then."""
        try:
            self._local.put(NOTE_FILE, canonical_json({"region": region}))
        except AlreadyExistsError:  # by another process of this node
            return read_note(self._local).get("region")
        except UnavailableError as exc:
            # A full disk must not stop the flusher that empties it; the next one notes it.
            _log.warning("cannot note the region of this run: %s", exc.message)
        return region


def _known_public(fact: Fact) -> ResidencyError:
    return ResidencyError(
        f"durable tier is public: {fact.evidence}",
        "durable",
        None,
        "Close it for the public, or allow nothing else by a policy; see docs/residency.md.",
    )
