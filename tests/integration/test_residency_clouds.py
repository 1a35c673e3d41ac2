"""Runs on Google and Azure under a policy, with a flusher process, an emulator behind the hosts."""

import json
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dcp_tiered import ResidencyError
from dcp_tiered.cli import main
from tests.conftest import QUICK, end_flushers
from tests.support import clouds as played
from tests.support import runs
from tests.support.clouds import AZURE, GOOGLE, Clouds
from tests.support.disks import small_disk
from tests.support.servers import azure_store, google_store

pytestmark = pytest.mark.slow
PUBLIC = {"bindings": [{"role": "r", "members": ["allUsers"]}]}


@dataclass
class Target:
    """One provider: its server, who writes, and eyes that go around both."""

    protocol: str
    clouds: Clouds
    host: str
    options: dict[str, Any]
    policy: dict[str, Any]
    objects: Callable[[str], dict[str, bytes]]
    """Returns what is below a prefix, by the emulator's own words."""
    publish: Callable[[str | None], None]
    """Sets for whom the bucket itself is open: `blob` for everybody, None for nobody."""

    def move(self) -> None:
        """Have the bucket somewhere else."""
        if self.protocol == "gs":
            self.clouds.says["layout"]["location"] = "US-EAST1"
        else:
            about = self.clouds.accounts[played.ACCOUNT]["properties"]
            about["primaryLocation"] = "eastus"

    def open_up(self) -> None:
        """Let everybody in."""
        if self.protocol == "gs":
            self.clouds.says["bucket"]["iamConfiguration"] = {}
            self.clouds.says["iam"] = PUBLIC
        else:
            about = self.clouds.accounts[played.ACCOUNT]["properties"]
            about["allowBlobPublicAccess"] = True


@pytest.fixture(scope="module")
def google(tmp_path_factory) -> Iterator[Target]:
    with google_store(tmp_path_factory.mktemp("google")) as store:
        emulator = store.endpoint.removeprefix("http://")
        with Clouds(tmp_path_factory.mktemp("clouds"), emulator) as clouds:
            yield Target(
                protocol="gs",
                clouds=clouds,
                host=GOOGLE,
                options=played.google_options(),
                policy={"allow": ["gcs:europe-west3"], "owner": played.PROJECT, "ttl_s": 1},
                objects=lambda prefix: {n: store.read(n) for n in store.objects(prefix)},
                publish=lambda level: clouds.says.update(iam=PUBLIC if level else {}),
            )


@pytest.fixture(scope="module")
def azure(tmp_path_factory) -> Iterator[Target]:
    with azure_store(tmp_path_factory.mktemp("azure")) as store, store.client() as container:
        emulator = store.endpoint.removeprefix("http://")
        with Clouds(tmp_path_factory.mktemp("clouds"), emulator) as clouds:
            yield Target(
                protocol="az",
                clouds=clouds,
                host=AZURE,
                options=played.azure_options(store.key),
                policy={"allow": ["azure:germanywestcentral"], "owner": played.OWNER, "ttl_s": 1},
                objects=lambda prefix: {
                    name: container.download_blob(name).readall()
                    for name in container.list_blob_names(name_starts_with=prefix)
                },
                publish=partial(container.set_container_access_policy, {}),
            )


@pytest.fixture(params=["google", "azure"])
def target(request: pytest.FixtureRequest, monkeypatch) -> Target:
    found: Target = request.getfixturevalue(request.param)
    found.clouds.forget()
    for name, value in found.clouds.environment().items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def arguments(target: Target, local: Path) -> Iterator[dict[str, Any]]:
    yield {
        "url": f"tiered::{target.protocol}://{played.BUCKET}/run-{uuid.uuid4().hex[:8]}",
        "local": str(local),
        "limits": QUICK,
        target.protocol: target.options,
        "residency": target.policy,
    }
    end_flushers(local)


def prefix_of(arguments: dict[str, Any]) -> str:
    return arguments["url"].rpartition("/")[2] + "/"


def records(target: Target, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    found = target.objects(prefix_of(arguments))
    return [json.loads(data) for name, data in found.items() if "/record-" in name]


def test_a_commit_says_why_it_may_be_there_and_is_read_back(target, arguments, tmp_path, capsys):
    runs.save(arguments, "step-1", 1)
    runs.wait(arguments, "step-1")
    (record,) = records(target, arguments)
    said = record["residency"]
    facts = {fact["name"]: fact for fact in said["facts"]}
    assert {fact["verdict"] for fact in facts.values()} == {"ALLOW"}
    assert len(facts["location"]["values"]) == 1
    hosts = {host for host, count in target.clouds.body_bytes.items() if count}
    assert hosts <= {target.host, played.LOGIN}
    reading = {name: value for name, value in arguments.items() if name != "local"}
    assert runs.load(reading, "step-1") == 1
    target.move()
    assert isinstance(runs.error_of(runs.load, reading, "step-1"), ResidencyError)
    check_by_hand(target, arguments, tmp_path, capsys)


def check_by_hand(target, arguments, tmp_path, capsys) -> None:
    """Look and audit as an operator does, first at a bucket that has moved."""
    file = tmp_path / "policy.toml"
    kind, _, place = target.policy["allow"][0].partition(":")
    file.write_text(
        f'[[allow]]\nprovider = "{kind}"\nlocations = ["{place}"]\n'
        f'owner = "{target.policy["owner"]}"\n'
    )
    options = [f"--option={target.protocol}.{k}={v}" for k, v in target.options.items()]
    command = [arguments["url"], "--policy", str(file), *options]
    assert main(["residency", "check", *command]) == 9
    assert "not in the policy" in "".join(capsys.readouterr().out.split("\n"))
    target.clouds.forget()
    assert main(["residency", "check", *command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"].startswith(f"{target.protocol}://")
    assert main(["residency", "audit", *command, "--json"]) == 0
    assert '"finding": "evidence"' in capsys.readouterr().out
    file.write_text(file.read_text().replace(place, "elsewhere"))
    assert main(["residency", "audit", *command, "--json"]) == 9


def test_a_bucket_that_is_elsewhere_gets_nothing(target, arguments):
    target.move()
    runs.save(arguments, "step-1", 1)
    error = runs.error_of(runs.wait, arguments, "step-1")
    assert isinstance(error, ResidencyError)
    assert "location is DENY" in error.message
    assert target.objects(prefix_of(arguments)) == {}
    assert target.clouds.body_bytes[target.host] == 0


def test_what_is_written_through_goes_by_the_policy_too(target, arguments, tmp_path):
    target.move()
    with small_disk(tmp_path, 16) as disk:
        arguments |= {"local": str(disk.path), "on_local_full": "write_through"}
        free = os.statvfs(disk.path).f_bfree * os.statvfs(disk.path).f_frsize
        with (disk.path / "ballast").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free - 600_000)  # less than the state takes
        error = runs.error_of(runs.save, arguments, "step-1", 1)
        end_flushers(disk.path)
    assert isinstance(error, ResidencyError)
    assert "location is DENY" in error.message
    assert target.objects(prefix_of(arguments)) == {}
    assert target.clouds.body_bytes[target.host] == 0


def test_a_bucket_that_becomes_public_during_the_flush_gets_no_record(target, arguments):
    def on_put(said: str) -> None:
        if "/packs/" in said:
            target.open_up()

    target.clouds.on_put = on_put
    runs.save(arguments, "step-1", 1)
    error = runs.error_of(runs.wait, arguments, "step-1")
    assert isinstance(error, ResidencyError)
    assert "not_public is DENY" in error.message
    assert any("/packs/" in name for name in target.objects(prefix_of(arguments)))
    assert records(target, arguments) == []
    (incident,) = Path(arguments["local"]).glob("*/residency-incident-*.json")
    assert "/packs/" in incident.read_text()


def test_without_a_policy_a_bucket_that_is_open_gets_nothing(target, arguments):
    del arguments["residency"]
    if target.protocol == "gs":
        target.clouds.says["bucket"]["iamConfiguration"] = {}
        arguments["gs"] = target.options | {"endpoint_url": f"https://{GOOGLE}"}
    target.publish("blob")
    try:
        runs.save(arguments, "step-1", 1)
        error = runs.error_of(runs.wait, arguments, "step-1")
    finally:
        target.publish(None)
    assert isinstance(error, ResidencyError)
    assert "public" in error.message
    assert target.objects(prefix_of(arguments)) == {}


def test_an_upload_that_is_sent_to_another_host_delivers_no_byte(google, local, monkeypatch):
    """A resumable upload goes where a reply says."""
    google.clouds.forget()
    google.clouds.upload_host = played.ELSEWHERE
    for name, value in google.clouds.environment().items():
        monkeypatch.setenv(name, value)
    arguments = {
        "url": f"tiered::gs://{played.BUCKET}/led-astray",
        "local": str(local),
        "limits": QUICK,
        "gs": google.options,
        "residency": google.policy,
    }
    runs.save(arguments, "step-1", 1)
    error = runs.error_of(runs.wait, arguments, "step-1")
    assert isinstance(error, ResidencyError)
    assert "was not sent" in error.message
    assert google.clouds.body_bytes[played.ELSEWHERE] == 0
    assert not any(seen.host == played.ELSEWHERE for seen in google.clouds.log)
    assert not any("/packs/" in name for name in google.objects("led-astray/"))
