"""Documents for AWS: what they deny and allow, evaluated as AWS does, for requests of all kinds."""

import json
from fnmatch import fnmatchcase
from typing import Any

import pytest

from dcp_tiered.errors import InvalidError
from dcp_tiered.policy.permissions import ROLES
from dcp_tiered.policy.residency_export import export
from dcp_tiered.policy.residency_schema import parse

ACCOUNT = "123456789012"
POLICY = {"allow": ["aws:eu-central-1", "aws:eu-west-1"], "owner": ACCOUNT}
ROOT = "s3://ckpt/run42"
HERE = "arn:aws:s3:::ckpt/run42/step-1/packs/p.pack"
GOOD = {
    "aws:RequestedRegion": "eu-central-1",
    "aws:ResourceAccount": ACCOUNT,
    "aws:SecureTransport": "true",
}
CREATE = GOOD | {"s3:LocationConstraint": "eu-central-1"}


def made(form: str, role: str | None = None, policy: Any = None, root: str = ROOT) -> Any:
    return json.loads(export(parse(policy or POLICY), root, form, role))


def some(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def holds(condition: dict[str, Any], context: dict[str, str]) -> bool:
    return all(
        holds_for(operator, context.get(key), some(wanted))
        for operator, keys in condition.items()
        for key, wanted in keys.items()
    )


def holds_for(operator: str, found: str | None, wanted: list[str]) -> bool:
    if operator == "Null":
        return wanted == [str(found is None).lower()]
    if operator == "StringNotEquals":
        return found not in wanted  # true without the key, too
    assert operator in ("StringEquals", "Bool")
    return found in wanted


def effects(document: Any, action: str, resource: str, context: dict[str, str]) -> set[str]:
    """Return the effects of the statements that are about a request."""
    found = set()
    for one in document["Statement"]:
        about = any(fnmatchcase(resource, arn) for arn in some(one.get("Resource", [])))
        if "NotResource" in one:
            about = not any(fnmatchcase(resource, arn) for arn in some(one["NotResource"]))
        named = any(fnmatchcase(action, pattern) for pattern in one["Action"])
        if about and named and holds(one.get("Condition", {}), context):
            found.add(one["Effect"])
    return found


def without(context: dict[str, str], key: str) -> dict[str, str]:
    return {name: value for name, value in context.items() if name != key}


@pytest.mark.parametrize("form", ["iam", "scp"])
def test_what_the_run_does_is_not_denied(form):
    document = made(form)
    for action in ROLES["flusher"].actions():
        on = HERE if action in ROLES["flusher"].objects else "arn:aws:s3:::ckpt"
        assert effects(document, action, on, GOOD) == set(), action


@pytest.mark.parametrize("form", ["iam", "scp"])
@pytest.mark.parametrize(
    "change",
    [
        {"aws:RequestedRegion": "us-east-1"},
        {"aws:RequestedRegion": "eu-west-2"},
        {"aws:ResourceAccount": "999999999999"},
        {"aws:SecureTransport": "false"},
    ],
    ids=str,
)
def test_data_goes_nowhere_else(form, change):
    for action in ("s3:PutObject", "s3:ReplicateObject"):
        assert effects(made(form), action, HERE, GOOD | change) == {"Deny"}


@pytest.mark.parametrize("form", ["iam", "scp"])
def test_an_unknown_account_is_not_allowed(form):
    context = without(GOOD, "aws:ResourceAccount")
    assert effects(made(form), "s3:PutObject", HERE, context) == {"Deny"}


def test_a_role_writes_below_its_run_only():
    for other in ("arn:aws:s3:::other/run42/x", "arn:aws:s3:::ckpt/run4", "arn:aws:s3:::ckpt/x"):
        assert effects(made("iam"), "s3:PutObject", other, GOOD) == {"Deny"}
    # An account has other buckets too, and other runs.
    assert effects(made("scp"), "s3:PutObject", "arn:aws:s3:::other/x", GOOD) == set()


@pytest.mark.parametrize("form", ["iam", "scp"])
@pytest.mark.parametrize(
    "action",
    [
        "s3:PutReplicationConfiguration",
        "s3:PutBucketPolicy",
        "s3:DeleteBucketPolicy",
        "s3:PutBucketAcl",
        "s3:PutBucketPublicAccessBlock",
        "s3:PutBucketOwnershipControls",
        "s3:PutEncryptionConfiguration",
        "s3:PutAccelerateConfiguration",
        "s3:DeleteBucket",
    ],
)
def test_settings_stay_as_they_are(form, action):
    assert effects(made(form), action, "arn:aws:s3:::ckpt", GOOD) == {"Deny"}
    elsewhere = effects(made(form), action, "arn:aws:s3:::other", GOOD)
    assert elsewhere == ({"Deny"} if form == "iam" else set())


@pytest.mark.parametrize("form", ["iam", "scp"])
def test_nothing_is_made_public(form):
    assert effects(made(form), "s3:PutObjectAcl", HERE, GOOD) == {"Deny"}
    assert effects(made(form), "s3:PutAccountPublicAccessBlock", "*", GOOD) == {"Deny"}


def test_buckets_are_made_in_allowed_regions_only():
    scp, bucket = made("scp"), "arn:aws:s3:::new"
    assert effects(scp, "s3:CreateBucket", bucket, CREATE) == set()
    for key in ("s3:LocationConstraint", "aws:RequestedRegion"):
        assert effects(scp, "s3:CreateBucket", bucket, CREATE | {key: "us-west-2"}) == {"Deny"}
    # A bucket in us-east-1 is made without a location, by a request to us-east-1.
    nowhere = without(CREATE, "s3:LocationConstraint") | {"aws:RequestedRegion": "us-east-1"}
    assert effects(scp, "s3:CreateBucket", bucket, nowhere) == {"Deny"}
    virginia = made("scp", policy={"allow": ["aws:us-east-1"], "owner": ACCOUNT})
    assert effects(virginia, "s3:CreateBucket", bucket, nowhere) == set()
    assert effects(made("iam"), "s3:CreateBucket", bucket, CREATE) == {"Deny"}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_allowed_what_it_needs_there_and_only_there(role):
    document = made("iam", role)
    for action in ROLES[role].objects:
        assert effects(document, action, HERE, GOOD) == {"Allow"}
        assert effects(document, action, "arn:aws:s3:::ckpt/run4/x", GOOD) == set()
        other = GOOD | {"aws:ResourceAccount": "999999999999"}
        assert effects(document, action, HERE, other) == set()
    for action in ROLES[role].bucket:
        assert effects(document, action, "arn:aws:s3:::ckpt", GOOD) == {"Allow"}
        assert effects(document, action, "arn:aws:s3:::other", GOOD) == set()
    for action in ("s3:DeleteObject", "s3:CreateBucket", "s3:PutBucketPolicy", "s3:PutObjectAcl"):
        if (role, action) != ("remover", "s3:DeleteObject"):
            assert effects(document, action, HERE, GOOD) == set()


def test_an_endpoint_lets_pass_what_the_roles_do_on_this_bucket():
    document = made("vpce")
    for name, role in ROLES.items():
        if name == "remover":
            continue  # it is no role of a node
        on = dict.fromkeys(role.objects, HERE) | dict.fromkeys(role.account, "*")
        for action in role.actions():
            resource = on.get(action, "arn:aws:s3:::ckpt")
            assert effects(document, action, resource, GOOD) == {"Allow"}, (name, action)
    assert {one["Principal"] for one in document["Statement"]} == {"*"}
    assert effects(document, "s3:DeleteObject", HERE, GOOD) == set()
    assert effects(document, "s3:PutObject", "arn:aws:s3:::other/run42/x", GOOD) == set()
    other = GOOD | {"aws:ResourceAccount": "999999999999"}
    assert effects(document, "s3:PutObject", HERE, other) == set()


def test_keys_are_named_where_the_policy_speaks_of_them():
    rule = {"provider": "aws", "regions": ["eu-central-1"], "owner": ACCOUNT}
    keys = {"key_regions": ["eu-west-1"], "key_accounts": ["999999999999"]}
    document = made("iam", "flusher", {"allow": [{**rule, **keys}]})
    (statement,) = (one for one in document["Statement"] if one["Sid"] == "Keys")
    assert statement["Resource"] == "arn:aws:kms:eu-west-1:999999999999:key/*"
    assert statement["Action"] == ["kms:Decrypt", "kms:GenerateDataKey"]
    assert "kms" not in json.dumps(made("iam", "flusher", {"allow": [rule]}))
    assert "kms" not in json.dumps(made("iam", "checker", {"allow": [{**rule, **keys}]}))


def test_other_partitions_have_other_names():
    policy = {"allow": ["aws-cn:cn-north-1"], "owner": ACCOUNT}
    text = json.dumps(made("iam", "flusher", policy))
    assert "arn:aws-cn:s3:::ckpt/run42/*" in text
    assert "arn:aws:" not in text


def test_the_same_policy_gives_the_same_text():
    turned = POLICY | {"allow": POLICY["allow"][::-1]}
    for form in ("iam", "scp", "vpce"):
        assert export(parse(POLICY), ROOT, form, None) == export(parse(turned), ROOT, form, None)


LARGE = [
    {
        "provider": "aws",
        "regions": [f"eu-{n}-{m}"],
        "owner": f"{n:06}{m:06}",
    }
    for n in range(10)
    for m in range(30)
]


@pytest.mark.parametrize(
    ("policy", "root", "form", "said"),
    [
        ({"allow": LARGE}, ROOT, "scp", "5120"),
        ({"allow": LARGE}, ROOT, "iam", "6144"),
        (POLICY, ROOT, "gcp-org", "Google"),
        (POLICY, ROOT, "azure", "Azure"),
        (POLICY, "file:///lustre/run", "iam", "for AWS"),
        ({"allow": [{"provider": "posix", "site_id": "f"}]}, ROOT, "iam", "for AWS"),
        ({"allow": ["aws:eu-central-1", "aws-cn:cn-north-1"], "owner": ACCOUNT}, ROOT, "iam", "cn"),
        (POLICY, "s3://ckpt/run*", "iam", "ARN"),
        (POLICY, "s3://ckpt/${aws:username}", "iam", "ARN"),
    ],
)
def test_what_cannot_be_said_is_an_error(policy, root, form, said):
    with pytest.raises(InvalidError, match=said):
        export(parse(policy), root, form, None)
