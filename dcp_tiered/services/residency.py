"""Whether bytes may leave now: looks at the target, keeps the look for a while, decides (I10).

On a refusal nothing leaves and nothing is re-routed: the checkpoint stays on this node.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from dcp_tiered.errors import ResidencyError, TieredError, UnavailableError
from dcp_tiered.format.residency import Observed
from dcp_tiered.policy.residency import REQUIRED, Decision, Judged, Policy, decide
from dcp_tiered.services.incidents import KeyJournal, KeyNotes
from dcp_tiered.services.residency_note import NOTE_FILE

_log = logging.getLogger(__name__)
REFUSED_S = 2.0
"""How long a refusal is believed: who has mended the bucket does not want to wait."""
_AGAIN_S_MAX = 5.0
"""How long after a look that was no good the next one is due at most, where nobody waits for it."""
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


class Guard(Residency, Protocol):
    """What a flusher is held to."""

    def note(self, key: str) -> None:
        """Note what is about to be written, for an incident that may be found later.

        Raises:
            ResidencyError: It may not be, since a moment ago.
            UnavailableError: The same.
        """
        ...

    def sent(self, key: str) -> None:
        """Note that nothing more of it leaves: what was noted counts until the next look."""
        ...

    def admit(self, policy_sha256: str | None) -> None:
        """Pass when a checkpoint was saved under the policy that this node's flusher is held to.

        Args:
            policy_sha256: What its manifest says; None: it was saved without a policy.

        Raises:
            ResidencyError: It was saved under another one.
        """
        ...

    def is_mine(self, policy_sha256: str | None) -> bool:
        """Tell whether what was sealed under a policy may go before its ranks have agreed on one.

        Args:
            policy_sha256: What its shard file says; None: it was sealed without a policy.
        """
        ...

    def settle(self) -> None:
        """Look at the target once more if anything was written since the last look."""
        ...

    def watch(self) -> bool:
        """Look at the target if the last look has grown old; tell whether a violation stands."""
        ...


class PolicyCheck:
    """Holds a target to a policy; as safe for threads as `observe` is.

    Args:
        policy: What is allowed.
        observe: Looks at the target.
        journal: Knows what was written since the target was allowed; None for who only reads.
        earlier: Hashes of policies that were in force on this node before, see `note_policy`.
        required: Facts that have to be known, by provider.
        now: Wall clock with a time zone: attestations expire by it.
        clock: Monotonic seconds: looks grow old by it.
    """

    def __init__(
        self,
        policy: Policy,
        observe: Callable[[], Observed],
        journal: KeyJournal | KeyNotes | None = None,
        earlier: Collection[str] = (),
        required: Mapping[str, Sequence[str]] = REQUIRED,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy, self._observe = policy, observe
        self._journal, self._earlier = journal, {policy.sha256, *earlier}
        self._required = required
        self._now, self._clock = now, clock
        self._seen: Observed | None = None
        self._seen_at = 0.0
        self._looked_at: datetime | None = None
        self._refused: tuple[float, TieredError] | None = None
        self._said: set[str] = set()
        self._lock = threading.Lock()
        self._look_at = 0.0 if journal is not None and journal.stands else math.inf
        """When `watch` looks next."""
        self._settle_at = -math.inf

    def require(self, *, fresh: bool = False) -> Mapping[str, Any]:
        """Pass when bytes may leave; see `Residency.require`."""
        with self._lock:
            now = self._clock()
            if self._refused is not None and now - self._refused[0] < REFUSED_S:
                raise self._refused[1]
            is_full = self._journal is not None and self._journal.is_full
            is_old = self._seen is None or now - self._seen_at >= self._policy.ttl_s
            if looks := fresh or is_old or is_full:
                self._look_at = self._settle_at = now + min(_AGAIN_S_MAX, self._policy.ttl_s)
                self._seen = None
                self._seen = self._observe()
                self._seen_at, self._looked_at = now, self._now()
            assert self._seen is not None
            decision = decide(
                self._policy, self._seen, self._policy.attestations, self._now(), self._required
            )
            if not decision.allowed:
                raise self._refuse(decision)
            self._refused = None
            self._say_who_answers(decision)
            at = (self._looked_at or decision.at).isoformat(timespec="seconds")
            if looks:
                self._look_at, self._settle_at = now + self._policy.ttl_s, -math.inf
                if self._journal is not None:
                    self._journal.good(at)
            return {**decision.stored(), "checked_at": at}

    def note(self, key: str) -> None:
        """Note what is about to be written; see `Guard.note`."""
        with self._lock:
            if self._refused is not None:
                raise self._refused[1]  # by a look of another thread since `require` passed
            if self._journal is not None:
                self._journal.add(key)

    def sent(self, key: str) -> None:
        """Note that nothing more of it leaves; see `Guard.sent`."""
        with self._lock:
            if self._journal is not None:
                self._journal.sent(key)

    def admit(self, policy_sha256: str | None) -> None:
        """Pass for a checkpoint that was saved under this policy; see `Guard.admit`.

        So it does for one of a policy that this one has replaced on this node, or nothing that
        was held could ever leave once its policy had been mended.
        """
        if policy_sha256 is not None and policy_sha256 not in self._earlier:
            raise another_policy(policy_sha256, f"held to policy {self._policy.sha256[:12]}")

    def is_mine(self, policy_sha256: str | None) -> bool:
        """Pass for this policy itself: one that it has replaced may not allow this target."""
        return policy_sha256 in (None, self._policy.sha256)

    def settle(self) -> None:
        """Look once more if anything was written since the last look; see `Guard.settle`."""
        if self._journal is not None and self._journal.is_open and self._clock() >= self._settle_at:
            self._look_again()

    def watch(self) -> bool:
        """Look if the last look has grown old; see `Guard.watch`."""
        if self._clock() >= self._look_at:
            self._look_again()
        return self._journal is not None and self._journal.stands

    def _look_again(self) -> None:
        try:
            self.require(fresh=True)
        except TieredError as exc:
            _log.warning("residency: nothing is flushed until a look is good: %s", exc)

    def _refuse(self, decision: Decision) -> TieredError:
        error = refusal(decision)
        self._seen, self._refused = None, (self._clock(), error)
        if self._journal is not None and isinstance(error, ResidencyError):
            self._journal.violated(decision, error.message)
        return error

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


def another_policy(policy_sha256: str, mine: str) -> ResidencyError:
    """Return the error for a checkpoint that was saved under another policy than ours."""
    return ResidencyError(
        f"checkpoint was saved under residency policy {policy_sha256[:12]}, and the flusher of this"
        f" node is {mine}",
        "durable",
        NOTE_FILE,
        "Give the same residency= to the writers on all nodes; a policy that was mended is taken"
        " over by the next save on each node.",
    )
