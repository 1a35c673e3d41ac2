"""Whether bytes may leave now: looks at the target, keeps the look for a while, decides (I10).

On a refusal nothing leaves and nothing is re-routed: the checkpoint stays on this node.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from dcp_tiered.errors import (
    AbsentError,
    AlreadyExistsError,
    CorruptError,
    ResidencyError,
    TieredError,
    UnavailableError,
)
from dcp_tiered.format.columns import canonical_json, parse_json
from dcp_tiered.format.residency import Observed
from dcp_tiered.interfaces import DurableTier, LocalTier, ObjectInfo, Source
from dcp_tiered.policy.residency import Decision, Judged, Policy, decide
from dcp_tiered.services.catalog import replace
from dcp_tiered.services.wrapped_tier import WrappedTier

_log = logging.getLogger(__name__)
NOTE_FILE = ".residency.json"
"""In the run's directory; no checkpoint has such a name."""
_NOTE_BYTES_MAX = 1 << 20
_REFUSED_S = 2.0
"""How long a refusal is believed: who has mended the bucket does not want to wait."""
_HINT = (
    "'dcp-tiered residency check URL --policy FILE' shows every fact; mend the target or the"
    " policy. The checkpoint stays on this node and is never sent elsewhere."
)


class Residency(Protocol):
    """Answers whether bytes may leave."""

    def require(self, *, fresh: bool = False) -> Mapping[str, Any] | None:
        """Pass when they may.

        Args:
            fresh: Look at the target now, however short ago that was done.

        Returns:
            What the record of a commit says about it.

        Raises:
            ResidencyError: They may not.
            UnavailableError: The store did not answer.
        """
        ...


class PolicyCheck:
    """Holds a target to a policy; as safe for threads as `observe` is.

    Args:
        policy: What is allowed.
        observe: Looks at the target.
        now: Wall clock with a time zone: attestations expire by it.
        clock: Monotonic seconds: looks grow old by it.
    """

    def __init__(
        self,
        policy: Policy,
        observe: Callable[[], Observed],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy, self._observe = policy, observe
        self._now, self._clock = now, clock
        self._seen: Observed | None = None
        self._seen_at = 0.0
        self._looked_at: datetime | None = None
        self._refused: tuple[float, TieredError] | None = None
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def require(self, *, fresh: bool = False) -> Mapping[str, Any]:
        """Pass when bytes may leave; see `Residency.require`."""
        with self._lock:
            now = self._clock()
            if self._refused is not None and now - self._refused[0] < _REFUSED_S:
                raise self._refused[1]
            if fresh or self._seen is None or now - self._seen_at >= self._policy.ttl_s:
                self._seen = None
                self._seen = self._observe()
                self._seen_at, self._looked_at = now, self._now()
            decision = decide(self._policy, self._seen, self._policy.attestations, self._now())
            if not decision.allowed:
                error = refusal(decision)
                self._seen, self._refused = None, (self._clock(), error)
                raise error
            self._refused = None
            self._say_who_answers(decision)
            at = self._looked_at or decision.at
            return {**decision.stored(), "checked_at": at.isoformat(timespec="seconds")}

    def _say_who_answers(self, decision: Decision) -> None:
        for one in decision.judged:
            if one.attestation is not None and one.fact.name not in self._said:
                self._said.add(one.fact.name)
                _log.warning(
                    "residency of %s: %s is unknown, %s answers for it until %s: %s",
                    decision.target,
                    one.fact.name,
                    one.attestation.by,
                    one.attestation.expires.isoformat(),
                    one.attestation.reason,
                )


class RegionKept:
    """Without a policy: the region that a run was first flushed to is kept.

    Args:
        local: The run's directory, which remembers it.
        region: Returns what the requests of this process are signed for.
    """

    def __init__(self, local: LocalTier, region: Callable[[], str]) -> None:
        self._local, self._region = local, region

    def require(self, *, fresh: bool = False) -> None:
        """Pass in the first region, which is noted; see `Residency.require`."""
        del fresh
        region = self._region()
        noted = read_note(self._local).get("region")
        if noted is None:
            _log.info(
                "no residency policy: this run is kept in region %s, where it is flushed first;"
                " whether the bucket is public or replicated is not looked at",
                region,
            )
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


class ResidentTier(WrappedTier):
    """A durable tier that nothing is written to unless it may be; as safe for threads as that is.

    Args:
        tier: Where to.
        residency: Asked before every write.
    """

    def __init__(self, tier: DurableTier, residency: Residency) -> None:
        super().__init__(tier)
        self._residency = residency

    def put(self, key: str, data: bytes) -> None:
        """Create a small object; see `Tier.put`."""
        self._residency.require()
        super().put(key, data)

    def upload(self, key: str, source: Source) -> ObjectInfo:
        """Create a large object; see `DurableTier.upload`."""
        self._residency.require()
        return super().upload(key, source)


def refusal(decision: Decision) -> TieredError:
    """Return the error for a target that is not allowed, or of which too little is known now."""
    if decision.rule is None:
        what = "the policy has no rule for such a target"
    else:
        what = "; ".join(_why(one) for one in decision.against())
    if decision.may_pass():
        return UnavailableError(
            f"cannot check the residency of {decision.target}: {what}"[:2000],
            "durable",
            decision.target,
            "It is looked at again; nothing leaves before.",
        )
    message = f"residency policy does not allow {decision.target}: {what}"
    return ResidencyError(message[:2000], "durable", decision.target, _HINT)


def _why(one: Judged) -> str:
    text = f"{one.fact.name} is {one.fact.verdict} ({one.fact.evidence})"
    if one.fact.permission:
        text += f", missing permission {one.fact.permission}"
    return f"{text}, {one.note}" if one.note else text


def note_policy(local: LocalTier, policy: Policy) -> None:
    """Keep the policy with the run: flushers that an operator starts are held to it too."""
    data = canonical_json({"policy": dict(policy.plain)})
    try:
        if local.get(NOTE_FILE, _NOTE_BYTES_MAX) == data:
            return
    except AbsentError:
        with contextlib.suppress(AlreadyExistsError):
            local.put(NOTE_FILE, data)
            return
    except CorruptError:
        _log.warning("writing the noted residency policy anew")
    replace(local, NOTE_FILE, data)


def read_note(local: LocalTier) -> dict[str, Any]:
    """Return what a run's directory knows of its residency; empty when nothing was noted.

    Raises:
        ResidencyError: It is damaged: a lost policy must not become none.
    """
    try:
        return parse_json(local.get(NOTE_FILE, _NOTE_BYTES_MAX))
    except AbsentError:
        return {}
    except CorruptError as exc:
        path = str(local.root / NOTE_FILE)
        raise ResidencyError(
            "the residency that was noted for this run is damaged",
            "local",
            path,
            "The next save with residency= writes it anew; or remove the file.",
        ) from exc
