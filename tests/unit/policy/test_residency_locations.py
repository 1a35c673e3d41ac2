"""Rules for Google and Azure as people write them; what they allow is in the property tests."""

import pytest

from dcp_tiered.errors import InvalidError
from dcp_tiered.policy.residency_schema import parse

SUBSCRIPTION = "00000000-1111-2222-3333-444444444444"
TOML = f"""\
[[allow]]
provider = "gcs"
locations = ["EUROPE-WEST3"]
owner = "471100000000"
key_accounts = ["my-project"]
endpoint = "https://storage.googleapis.com"

[[allow]]
provider = "azure"
locations = ["Germany West Central"]
owner = "{SUBSCRIPTION}/Training"
account = "ckpt"
redundancy = ["Standard_ZRS"]
key_vaults = ["mine.vault.azure.net"]
"""


def test_names_are_taken_as_people_write_them():
    google, azure = parse(TOML).allow
    assert (google.id, google.places()) == ("gcs-0", {"gcs:europe-west3"})
    assert (azure.id, azure.places()) == ("azure-1", {"azure:germanywestcentral"})
    assert azure.owner == f"{SUBSCRIPTION}/training"


def test_a_policy_survives_being_noted():
    policy = parse(TOML)
    again = parse(policy.plain)
    assert again.allow == policy.allow
    assert again.sha256 == policy.sha256
    assert parse(TOML.replace("_ZRS", "_LRS")).sha256 != policy.sha256


@pytest.mark.parametrize(
    ("old", "new", "key", "line"),
    [
        ('["EUROPE-WEST3"]', '["europe-*"]', "allow[0].locations", 3),
        ("locations", "regions", "allow[0].regions", 3),
        ('"471100000000"', '"my-project"', "allow[0].owner", 4),
        ('"my-project"', '"My Project"', "allow[0].key_accounts", 5),
        ('"https://storage', '"storage', "allow[0].endpoint", 6),
        ("/Training", "", "allow[1].owner", 11),
        ('account = "ckpt"', 'account = "CKPT"', "allow[1].account", 12),
        ("Standard_ZRS", "zone", "allow[1].redundancy", 13),
        ("mine.vault", "https://mine.vault", "allow[1].key_vaults", 14),
        ("key_vaults", "key_accounts", "allow[1].key_accounts", 14),
        (f'owner = "{SUBSCRIPTION}/Training"\n', "", "allow[1].owner", 8),
    ],
)
def test_a_mistake_is_named_with_its_line(old, new, key, line):
    with pytest.raises(InvalidError) as raised:
        parse(TOML.replace(old, new, 1))
    assert key in raised.value.message
    assert f"line {line}" in raised.value.message


def test_short_forms():
    google = parse({"allow": ["gcs:europe-west3", "gcs:europe-west4"], "owner": "4711"}).allow
    assert [rule.places() for rule in google] == [{"gcs:europe-west3", "gcs:europe-west4"}]
    (azure,) = parse({"allow": ["azure:EU"], "owner": f"{SUBSCRIPTION}/g"}).allow
    assert "azure:germanywestcentral" in azure.places()
    for wrong in (["gdrive:x"], ["gcs:"], ["gcs:*"], ["azure:europe-west3/"]):
        with pytest.raises(InvalidError):
            parse({"allow": wrong, "owner": "4711"})
    with pytest.raises(InvalidError, match="owner"):
        parse({"allow": ["azure:germanywestcentral"], "owner": "4711"})


@pytest.mark.parametrize(
    "place",
    [
        *("gcs:europe-west2", "gcs:europe-west6", "gcs:eu", "gcs:eur4", "gcs:us-east1"),
        *("azure:uksouth", "azure:switzerlandnorth", "azure:norwayeast", "azure:eastus"),
    ],
)
def test_eu_is_a_list_and_no_prefix(place):
    """London, Zurich and Oslo are not in it, nor is a name of several regions."""
    owners = {"gcs": "4711", "azure": f"{SUBSCRIPTION}/g"}
    provider = place.partition(":")[0]
    (rule,) = parse({"allow": [f"{provider}:EU"], "owner": owners[provider]}).allow
    assert place not in rule.places()
    assert len(rule.places()) > 10


def test_one_account_of_azure_has_one_owner():
    rule = {"provider": "azure", "locations": ["westeurope"], "account": "ckpt"}
    one, other = (rule | {"owner": f"{SUBSCRIPTION}/{group}"} for group in ("a", "b"))
    with pytest.raises(InvalidError, match="two owners"):
        parse({"allow": [one, other]})
    parse({"allow": [one, other | {"account": "copy"}]})
