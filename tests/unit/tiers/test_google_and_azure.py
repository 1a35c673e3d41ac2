"""Who asks Google and Azure, and where it is refused to ask at all; no store is reached."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_tiered import config, stack
from dcp_tiered.errors import InvalidError, ResidencyError, UnavailableError
from dcp_tiered.tiers.azure import AzurePlace
from dcp_tiered.tiers.gcs import GcsPlace
from dcp_tiered.tiers.http_errors import scrubbed
from dcp_tiered.tiers.object_store import ObjectStoreTier
from tests.support.fault_proxy import Fault, FaultProxy

CANARY = "canary-secret-5c1d"
POLICY = {
    "version": 1,
    "allow": [
        {"provider": "aws", "partition": "aws", "regions": ["eu-central-1"], "owner": "1" * 12}
    ],
}


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    with FaultProxy() as proxy:
        proxy.inject(None, Fault(status=403))
        yield proxy


def google(endpoint: str, **options: Any) -> ObjectStoreTier:
    place = GcsPlace("bucket", {"endpoint_url": endpoint, **options}, 5.0, 4)
    return ObjectStoreTier(place, "run", request_retry_s=0.5, part_bytes=1 << 20)


def test_without_google_credentials_nothing_is_sent(
    proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even an unsigned request: a public bucket would take it."""
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    with pytest.raises(InvalidError) as raised:
        google(proxy.endpoint).put("a/record", b"1")
    assert "GOOGLE_APPLICATION_CREDENTIALS" in str(raised.value.hint)
    assert proxy.log == []


def test_a_token_goes_along_whatever_netrc_says(
    proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".netrc").write_text("default login them password theirs\n")
    (tmp_path / ".netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    for token, sent in ((CANARY, f"Bearer {CANARY}"), ("anon", None)):
        tier = google(proxy.endpoint, token=token)
        with pytest.raises(InvalidError, match="access denied") as raised:
            tier.put("a/record", b"1")
        tier.close()
        headers = {name.lower(): value for name, value in proxy.log[-1].headers.items()}
        assert headers.get("authorization") == sent
        assert CANARY not in str(raised.value)


@pytest.mark.parametrize(
    "token",
    [
        {"type": "service_account", "private_key": CANARY},
        {"type": "authorized_user", "refresh_token": CANARY},
        {"private_key": CANARY},
        ["list", CANARY],
    ],
)
def test_a_token_that_is_none_is_refused_and_not_repeated(
    token: Any, proxy: FaultProxy, tmp_path: Path
) -> None:
    (tmp_path / "token.json").write_text(json.dumps(token))
    for given in (token, str(tmp_path / "token.json")):
        with pytest.raises(InvalidError) as raised:
            google(proxy.endpoint, token=given).head("a/record")
        assert CANARY not in f"{raised.value} {raised.value.__cause__}"
    assert proxy.log == []


def test_a_signed_url_is_not_repeated() -> None:
    text = f"Max retries exceeded with url: /c/b?sv=1&sig={CANARY}&x=1 (upload_id={CANARY})"
    assert CANARY not in scrubbed(OSError(text))
    assert "sv=1" in scrubbed(OSError(text))


def test_a_sas_token_is_in_no_message() -> None:
    options = {
        "account_name": "a",
        "account_host": "127.0.0.1:1",
        "sas_token": f"sv=1&sig={CANARY}",
    }
    tier = ObjectStoreTier(
        AzurePlace("container", options, 1.0), "run", request_retry_s=0.1, part_bytes=1 << 20
    )
    with pytest.raises(UnavailableError) as raised:
        tier.head("a/record")
    assert CANARY not in str(raised.value)
    tier.close()


def test_an_azure_run_without_an_account_is_refused() -> None:
    with pytest.raises(InvalidError, match="no Azure storage account"):
        AzurePlace("container", {}, 5.0)


@pytest.mark.parametrize("protocol", ["gs", "az"])
def test_a_policy_refuses_a_provider_that_it_cannot_name(protocol: str) -> None:
    """I10: unknown is not allowed."""
    run = config.settings(
        f"tiered::{protocol}://bucket/run",
        options={protocol: {"account_name": "a", "token": "anon"}},
        residency=POLICY,
    )
    with pytest.raises(ResidencyError, match=f"no rule for {protocol}"):
        stack.build(run)


@pytest.mark.parametrize(
    ("protocol", "option"),
    [("gs", {"requester_pays": True}), ("az", {"location_mode": "secondary"})],
)
def test_an_option_that_would_be_ignored_is_refused(protocol: str, option: dict[str, Any]) -> None:
    run = config.settings(
        f"tiered::{protocol}://bucket/run",
        options={protocol: {"account_name": "a", **option}},
    )
    with pytest.raises(InvalidError, match=next(iter(option))):
        stack.build(run)
