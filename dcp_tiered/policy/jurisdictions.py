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
        # Not europe-west2, which is London, not europe-west6, which is Zurich, and no location of
        # several regions: which ones those are is not for a name to say.
        "gcs": (
            "europe-central2",
            "europe-north1",
            "europe-north2",
            "europe-southwest1",
            "europe-west1",
            "europe-west10",
            "europe-west12",
            "europe-west3",
            "europe-west4",
            "europe-west8",
            "europe-west9",
        ),
        # Not uksouth and ukwest, switzerlandnorth and -west, norwayeast and -west.
        "azure": (
            "austriaeast",
            "belgiumcentral",
            "denmarkeast",
            "francecentral",
            "francesouth",
            "germanynorth",
            "germanywestcentral",
            "italynorth",
            "northeurope",
            "polandcentral",
            "spaincentral",
            "swedencentral",
            "westeurope",
        ),
    },
}
"""Regions by jurisdiction, and by partition of AWS or provider."""
