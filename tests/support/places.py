"""A target whose facts a test changes, and a clock that it turns."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from dcp_tiered.format.residency import Fact, Observed, Verdict
from dcp_tiered.policy.residency_schema import parse
from dcp_tiered.services.incidents import KeyJournal
from dcp_tiered.services.residency import PolicyCheck
from dcp_tiered.tiers.posix import PosixTier

POLICY = {
    "allow": [{"provider": "posix", "site_id": "fra"}],
    "ttl_s": 60,
    "attestations": [
        {
            "target": "file:///m",
            "fact": "replication",
            "by": "alice",
            "reason": "asked the operators",
            "expires": "2026-12-01T00:00:00+00:00",
        }
    ],
}
NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)


class Place:
    """The target, and the clock."""

    def __init__(self) -> None:
        self.verdicts = {"mount": "ALLOW", "not_public": "ALLOW", "replication": "UNKNOWN"}
        self.transient = False
        self.looks = 0
        self.at = 1000.0

    def observe(self) -> Observed:
        self.looks += 1
        return Observed(
            target="file:///m",
            provider="posix",
            facts=tuple(
                Fact(
                    name=name,
                    verdict=Verdict(verdict),
                    evidence="seen",
                    values=("site_id=fra",) if name == "mount" else (),
                    transient=self.transient,
                )
                for name, verdict in self.verdicts.items()
            ),
        )

    def check(self, local: Path | None = None, **more: Any) -> PolicyCheck:
        """Return a check; with a run's directory it notes keys there."""
        if local is not None:
            tier = PosixTier(local, local.parent, "local")
            more["journal"] = KeyJournal(tier, "s3://ckpt/run")
        return PolicyCheck(
            parse(POLICY),
            self.observe,
            **more,
            now=lambda: NOW + timedelta(seconds=self.at - 1000),
            clock=lambda: self.at,
        )
