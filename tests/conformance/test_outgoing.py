"""What stands before a durable tier in a flusher keeps the promise of `DurableTier`, paced too."""

from dcp_tiered.services.outgoing import Outgoing
from tests.conformance import test_mounted_tier


class TestOutgoing(test_mounted_tier.TestMountedTier):
    def make_tier(self, root: str) -> Outgoing:  # type: ignore[override] - it stands before one
        return Outgoing(super().make_tier(root), 1 << 30)

    def make_broken_tier(self, root: str, secret: str) -> Outgoing:  # type: ignore[override]
        return Outgoing(super().make_broken_tier(root, secret), None)
