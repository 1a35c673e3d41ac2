"""Named jurisdictions: explicit lists with a date, never a prefix such as `eu-`."""

LISTED_ON = "2026-11-01"
"""A region that came later is not in the list, and so is not allowed."""

JURISDICTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    # Not eu-west-2, which is London, and not eu-central-2, which is Zurich.
    "EU": {
        "aws": (
            "eu-central-1",
            "eu-north-1",
            "eu-south-1",
            "eu-south-2",
            "eu-west-1",
            "eu-west-3",
        ),
        "aws-eusc": ("eusc-de-east-1",),
    },
}
"""Regions by jurisdiction and partition."""
