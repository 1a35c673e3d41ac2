"""Hold the evidence in a commit record to a policy, afterwards.

A record keeps what was found of each fact, not the raw answers of the store: places, accounts and
keys can be compared with any policy, the rest stands as it was judged then. A fact that the policy
needs and the record does not have is unknown.
"""

from datetime import datetime

from dcp_tiered.format.residency import Evidence
from dcp_tiered.policy.residency import Decision, Policy, decide


def judge_again(policy: Policy, evidence: Evidence, now: datetime) -> Decision:
    """Return what a policy makes of evidence.

    An attestation of the policy counts when it counts now, or did when the target was looked at:
    one that has run out since was good for what was committed before.
    """
    decision = decide(policy, evidence.observed, policy.attestations, now)
    if decision.allowed:
        return decision
    then = decide(policy, evidence.observed, policy.attestations, evidence.checked_at)
    return then if then.allowed else decision
