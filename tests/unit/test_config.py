"""URLs, options and where they come from."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec.config
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_tiered.config import settings
from dcp_tiered.errors import InvalidError
from dcp_tiered.run_url import RunUrl, parse_url

# -------------------------------------------------------------------------------------- URLs

GOOD = {
    # Written as: (root, protocol, path, local)
    "tiered::s3://ckpt-eu/run42": ("s3://ckpt-eu/run42", "s3", "ckpt-eu/run42", None),
    "tiered::s3://ckpt-eu/run42/": ("s3://ckpt-eu/run42", "s3", "ckpt-eu/run42", None),
    "tiered::s3://ckpt-eu/run42///": ("s3://ckpt-eu/run42", "s3", "ckpt-eu/run42", None),
    "tiered::s3://ckpt-eu//a///b": ("s3://ckpt-eu/a/b", "s3", "ckpt-eu/a/b", None),
    "tiered::s3a://ckpt-eu/run42": ("s3://ckpt-eu/run42", "s3", "ckpt-eu/run42", None),
    "tiered::s3://my.dotted.bucket/r": (
        "s3://my.dotted.bucket/r",
        "s3",
        "my.dotted.bucket/r",
        None,
    ),
    "tiered::s3://ckpt/a b/ünï": ("s3://ckpt/a b/ünï", "s3", "ckpt/a b/ünï", None),
    "tiered::s3://ckpt/100%25/%20": ("s3://ckpt/100%25/%20", "s3", "ckpt/100%25/%20", None),
    "tiered::s3://ckpt/exp[1]*{}()+=&@,;": (
        "s3://ckpt/exp[1]*{}()+=&@,;",
        "s3",
        "ckpt/exp[1]*{}()+=&@,;",
        None,
    ),
    "tiered::s3://ckpt/.hidden/..x/x..": (
        "s3://ckpt/.hidden/..x/x..",
        "s3",
        "ckpt/.hidden/..x/x..",
        None,
    ),
    "tiered::s3://ckpt/Run42": ("s3://ckpt/Run42", "s3", "ckpt/Run42", None),
    "tiered::gs://ckpt/run": ("gs://ckpt/run", "gs", "ckpt/run", None),
    "tiered::gcs://under_score.example/run/": (
        "gs://under_score.example/run",
        "gs",
        "under_score.example/run",
        None,
    ),
    "tiered::az://ckpt/a/run": ("az://ckpt/a/run", "az", "ckpt/a/run", None),
    "tiered:///nvme::abfs://ckpt/run": ("az://ckpt/run", "az", "ckpt/run", "/nvme"),
    "tiered::abfss://ckpt/run": ("az://ckpt/run", "az", "ckpt/run", None),
    "tiered::file:///mnt/run": ("file:///mnt/run", "file", "/mnt/run", None),
    "tiered::file:////mnt//run/": ("file:///mnt/run", "file", "/mnt/run", None),
    "tiered::local:///mnt/run": ("file:///mnt/run", "file", "/mnt/run", None),
    "tiered:///nvme/run": ("tiered:///nvme/run", None, "/nvme/run", "/nvme/run"),
    "tiered:////nvme//run/": ("tiered:///nvme/run", None, "/nvme/run", "/nvme/run"),
    "tiered::oss://Bucket_1//run/": ("oss://Bucket_1/run", "oss", "Bucket_1/run", None),
    "tiered:///nvme::s3://b42/p": ("s3://b42/p", "s3", "b42/p", "/nvme"),
    "tiered:///nvme/::file:///mnt/p/": ("file:///mnt/p", "file", "/mnt/p", "/nvme"),
}

BAD = {
    # Written as: a word that the message or the hint has to hold
    "": "tiered::",
    "tiered": "names no run",
    "tiered::": "no protocol",
    "tiered:": "tiered::",
    "tiered://": "absolute",
    "tiered::s3://": "bucket",
    "tiered::s3:///": "bucket",
    "tiered::s3:///p": "bucket",
    "tiered::s3://bucket": "prefix",
    "tiered::s3://bucket/": "prefix",
    "s3://bucket/run": "tiered::",
    "/mnt/run": "tiered::",
    "file:///mnt/run": "tiered::",
    "TIERED::s3://bucket/run": "tiered::",
    "tiered::S3://bucket/run": "protocol",
    "tiered::s3://Bucket/run": "bucket",
    "tiered::s3://b/run": "bucket",
    "tiered::s3://under_score/run": "bucket",
    "tiered::s3:/bucket/run": "one slash",
    "s3:/bucket/run": "one slash",
    "tiered:/nvme::s3:/bucket/run": "one slash",
    "tiered::file:/mnt/run": "one slash",
    "tiered::file://mnt/run": "absolute",
    "tiered::file://~/run": "absolute",
    "tiered::file://": "absolute",
    "tiered://nvme/run": "absolute",
    "tiered://~/run": "absolute",
    "tiered:///a/../b": "'..'",
    "tiered::s3://bucket/a/../b": "'..'",
    "tiered::s3://bucket/./b": "'.'",
    "tiered::s3://bucket/..": "'..'",
    "tiered::s3://bucket/run?x=1": "'?'",
    "tiered::s3://bucket/run#x": "'#'",
    "tiered::s3://bucket/a\\b": "backslashes",
    "tiered::s3://bucket/a\nb": "control",
    "tiered::s3://bucket/a\x00b": "control",
    "tiered::s3://bucket/\udc80": "Unicode",
    "tiered::s3://bucket/" + "x" * 1000: "too long",
    "tiered::s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/ap/run": "bucket",
    "tiered::arn:aws:s3:::bucket/run": "chains",
    "tiered::simplecache::s3://bucket/run": "chains",
    "tiered:///nvme::filecache::s3://bucket/run": "chains",
    "simplecache::tiered::s3://bucket/run": "tiered::",
    "tiered::http://host/run": "cannot be written to",
    "tiered::github://org/run": "cannot be written to",
    "tiered::memory://run": "gone with its process",
    "tiered::simplecache://bucket/run": "no store of its own",
    "tiered::tiered://bucket/run": "no store of its own",
    **{
        f"tiered::{name}://host/run": "file:///path/run"
        for name in ("sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs", "dbfs", "webdav")
    },
    "tiered::oss://": "bucket",
    "tiered::oss://bucket": "whole bucket",
    "tiered::oss://.hidden/run": "bucket",
    "tiered::oss://bucket/a/../b": "'..'",
    "tiered::az://container@account.dfs.core.windows.net/run": "account_name",
    "tiered::gs://bucket": "whole bucket",
    "tiered::az://Container/run": "bucket",
    "tiered::bucket/run": "no protocol",
}


@pytest.mark.parametrize(("text", "expected"), GOOD.items())
def test_a_url_is_taken_apart(text: str, expected: tuple[str, str | None, str, str | None]) -> None:
    """O025."""
    root, protocol, path, local = expected
    assert parse_url(text) == RunUrl(root=root, protocol=protocol, path=path, local=local)


@pytest.mark.parametrize(("text", "word"), BAD.items())
def test_what_is_no_url_of_a_run_is_refused_with_the_fix(text: str, word: str) -> None:
    """O025."""
    with pytest.raises(InvalidError) as raised:
        parse_url(text)
    assert word in f"{raised.value.message} {raised.value.hint}"
    assert raised.value.hint


@pytest.mark.parametrize(
    "text",
    ["tiered:///nvme::s3://bucket/p", "tiered::s3://bucket/p", "tiered::file:///mnt/p", "s3://b/p"],
)
def test_a_path_object_is_refused_with_the_fix(text: str) -> None:
    """O025: pathlib has made one slash of two."""
    with pytest.raises(InvalidError, match="one slash") as raised:
        parse_url(Path(text))
    assert "str" in str(raised.value.hint)


@pytest.mark.parametrize(
    "text",
    [
        "tiered::s3://AKIDCANARY:CANARY@bucket/run",
        "tiered::s3://CANARY@bucket/run",
        "tiered:///nvme::s3://u:CANARY@bucket/run",
        "tiered::s3:/u:CANARY@bucket/run",
        "tiered::u:CANARY@bucket/run",
        "s3://u:CANARY@bucket/run",
        "u:CANARY@bucket",
        "tiered::s3://bucket/run?X-Amz-Signature=CANARY",
        "tiered::s3://bucket/run#CANARY",
        "tiered::https://host/run?sig=CANARY",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(text: str) -> None:
    """O025."""
    with pytest.raises(InvalidError) as raised:
        parse_url(text)
    assert "CANARY" not in repr(raised.value) + str(raised.value)
    assert "options" in str(raised.value.hint)


_component = st.text(
    st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="/\\?#:"), min_size=1
).filter(lambda text: text not in (".", ".."))


@given(st.lists(_component, min_size=1, max_size=4), st.data())
def test_equal_runs_have_equal_roots(parts: list[str], data: st.DataObject) -> None:
    """O025: slashes make no difference, and a root is a fixed point."""

    def slashes() -> str:
        return "/" * data.draw(st.integers(1, 3))

    sloppy = slashes().join(parts) + "/" * data.draw(st.integers(0, 2))
    for scheme, first in (("s3", "bucket"), ("file", "/mnt")):
        tidy = parse_url(f"tiered::{scheme}://{first}/{'/'.join(parts)}")
        assert parse_url(f"tiered::{scheme}://{first}{slashes()}{sloppy}") == tidy
        assert parse_url(f"tiered::{tidy.root}") == tidy
        assert [part for part in tidy.path.split("/") if part][1:] == parts


@given(st.text(max_size=60))
def test_any_text_is_a_url_or_an_invalid_error(text: str) -> None:
    for candidate in (text, f"tiered::{text}", f"tiered::s3://{text}", f"tiered://{text}"):
        try:
            assert parse_url(candidate).root
        except InvalidError:
            continue


# ----------------------------------------------------------------------------------- options

S3_URL = "tiered::s3://bucket/run"


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec.config, "conf", {})
    for name in ("LOCAL", "LIMITS"):
        monkeypatch.delenv(f"FSSPEC_TIERED_{name}", raising=False)


def test_options_are_given_by_protocol() -> None:
    options = {"s3": {"key": "k", "anon": False}, "tiered": {"local": "/nvme"}}
    made = settings(S3_URL, options=options)
    assert made.options == {"key": "k", "anon": False}
    assert made.local == Path("/nvme")


@pytest.mark.parametrize("other", ["gcs", "file", "s33", "key"])
def test_options_for_a_protocol_that_is_not_used_are_refused(other: str) -> None:
    with pytest.raises(InvalidError, match=other) as raised:
        settings(S3_URL, options={other: {"key": "CANARY"}})
    assert "CANARY" not in str(raised.value)
    assert "s3" in str(raised.value.hint)


@pytest.mark.parametrize("options", [{"s3": "key"}, {"s3": {"client_kwargs": "x"}}])
def test_options_that_are_no_mapping_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidError, match="mapping"):
        settings(S3_URL, options=options)


def test_the_environment_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings(S3_URL).options == {}
    assert settings(S3_URL).local is None
    monkeypatch.setenv("FSSPEC_S3_KEY", "from-environment")
    monkeypatch.setenv("FSSPEC_TIERED_LOCAL", "/nvme")
    assert settings(S3_URL).options == {"key": "from-environment"}
    assert settings(S3_URL).local == Path("/nvme")
    monkeypatch.delenv("FSSPEC_S3_KEY")
    assert settings(S3_URL).options == {}


def test_text_in_the_environment_is_read_as_what_it_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text "false" would be true."""
    monkeypatch.setenv("FSSPEC_S3_ANON", "false")
    monkeypatch.setenv("FSSPEC_S3_USE_SSL", "True")
    monkeypatch.setenv("FSSPEC_S3_CLIENT_KWARGS", '{"region_name": "eu-central-1"}')
    monkeypatch.setenv("FSSPEC_S3_SECRET", "{not json")
    monkeypatch.setenv("FSSPEC_TIERED_LIMITS", '{"part_bytes": 8388608}')
    made = settings(S3_URL)
    assert made.options == {
        "anon": False,
        "use_ssl": True,
        "client_kwargs": {"region_name": "eu-central-1"},
        "secret": "{not json",
    }
    assert made.limits.part_bytes == 8 << 20


def test_json_in_the_environment_sets_many_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSSPEC_S3", '{"key": "k", "anon": false}')
    assert settings(S3_URL).options == {"key": "k", "anon": False}


def test_the_user_wins_over_the_environment_and_that_over_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        fsspec.config,
        "conf",
        {"s3": {"key": "file", "secret": "file", "token": "file"}, "tiered": {"local": "/file"}},
    )
    monkeypatch.setenv("FSSPEC_S3_KEY", "environment")
    monkeypatch.setenv("FSSPEC_S3_SECRET", "environment")
    made = settings(S3_URL, options={"s3": {"key": "user"}})
    assert made.options == {"key": "user", "secret": "environment", "token": "file"}
    assert made.local == Path("/file")
    monkeypatch.setenv("FSSPEC_TIERED_LOCAL", "/environment")
    assert settings(S3_URL).local == Path("/environment")
    assert settings(S3_URL, options={"tiered": {"local": "/option"}}).local == Path("/option")
    assert settings(S3_URL, local="/argument").local == Path("/argument")
    assert settings("tiered:///url::s3://bucket/run").local == Path("/url")


def test_the_user_wins_under_either_name_of_a_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSSPEC_S3_KEY", "environment")
    assert settings(S3_URL, options={"s3a": {"key": "user"}}).options == {"key": "user"}


def test_a_config_file_of_fsspec_counts(tmp_path: Path) -> None:
    (tmp_path / "conf.json").write_text(
        json.dumps({"tiered": {"local": "/nvme"}, "s3": {"key": "file", "secret": "file"}})
    )
    code = (
        "from dcp_tiered.config import settings\n"
        f"made = settings({S3_URL!r})\n"
        "print(made.local, made.options['key'], made.options['secret'])"
    )
    environment = {"FSSPEC_CONFIG_DIR": str(tmp_path), "FSSPEC_S3_KEY": "environment", "PATH": ""}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["/nvme", "environment", "file"]


# ------------------------------------------------------------------------------- local tier


@pytest.mark.parametrize("local", ["nvme", "./nvme", "../nvme"])
def test_a_relative_local_tier_is_refused(local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidError, match="relative"):
        settings(S3_URL, local=local)
    monkeypatch.setenv("FSSPEC_TIERED_LOCAL", local)
    with pytest.raises(InvalidError, match="relative"):
        settings(S3_URL)


def test_the_home_directory_may_hold_the_local_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert settings(S3_URL, local="~/nvme").local == Path("/home/somebody/nvme")
    assert settings(S3_URL, local=Path("/nvme")).local == Path("/nvme")


def test_two_different_local_tiers_are_refused() -> None:
    with pytest.raises(InvalidError, match="twice"):
        settings("tiered:///a::s3://bucket/run", local="/b")
    assert settings("tiered:///a::s3://bucket/run", local="/a/").local == Path("/a")


def test_wrong_limits_are_refused() -> None:
    with pytest.raises(InvalidError, match="part_byts"):
        settings(S3_URL, options={"tiered": {"limits": {"part_byts": 1}}})


# ----------------------------------------------------------------------------------- secrets

_CANARY = "CANARY-9f8e7d"
_PUBLIC = {"anon", "endpoint_url", "profile", "use_ssl", "client_kwargs", "region_name"}
_secret = st.text(max_size=5).map(lambda text: f"{text}{_CANARY}{text}")
_names = st.text(min_size=1, max_size=12) | st.sampled_from(
    ["key", "secret", "token", "username", "password", "aws_secret_access_key", "config_kwargs"]
)
_hidden = _names.filter(lambda name: name not in _PUBLIC)
_tree = st.recursive(
    _secret, lambda inner: st.dictionaries(_names, inner, max_size=3), max_leaves=5
)
_options = st.fixed_dictionaries(
    {},
    optional={
        "anon": st.booleans(),
        "endpoint_url": st.just("https://s3.example"),
        "client_kwargs": st.dictionaries(_hidden, _tree, max_size=3).map(
            lambda options: {"region_name": "eu-central-1", **options}
        ),
    },
).flatmap(
    lambda public: st.dictionaries(_hidden, _tree, min_size=1, max_size=5).map(
        lambda secret: {**secret, "secret": _CANARY, **public}
    )
)


@given(_options)
def test_public_options_and_printed_settings_hold_no_secret(options: dict[str, Any]) -> None:
    made = settings(S3_URL, options={"s3": options})
    assert _CANARY in repr(made.options)
    assert _CANARY not in repr(made.public_options())
    assert _CANARY not in repr(made)
    for name in ("anon", "endpoint_url"):
        assert made.public_options().get(name) == options.get(name)
    if "client_kwargs" in options:
        assert made.public_options()["client_kwargs"] == {"region_name": "eu-central-1"}


@pytest.mark.parametrize("where", ["option", "client_kwargs", "environment"])
@pytest.mark.parametrize(
    "endpoint", ["https://user:CANARY@host", "https://host/?token=CANARY", "https://host/#CANARY"]
)
def test_credentials_in_an_endpoint_are_refused_and_not_repeated(
    endpoint: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endpoint is written to disk, for later flushers, and named in messages."""
    options: dict[str, Any] = {"endpoint_url": endpoint}
    if where == "client_kwargs":
        options = {"client_kwargs": options}
    if where == "environment":
        monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", endpoint)
        options = {}
    with pytest.raises(InvalidError) as raised:
        settings(S3_URL, options={"s3": options})
    assert "CANARY" not in repr(raised.value) + str(raised.value)


@pytest.mark.parametrize("name", ["STORAGE_EMULATOR_HOST", "GOOGLE_CLOUD_UNIVERSE_DOMAIN"])
def test_a_variable_that_sends_google_elsewhere_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "elsewhere.example.org")
    with pytest.raises(InvalidError, match=name):
        settings("tiered::gs://bucket/run")
    given = settings("tiered::gs://bucket/run", options={"gs": {"endpoint_url": "https://x"}})
    assert given.options["endpoint_url"] == "https://x"
    assert settings("tiered::s3://bucket/run").url.protocol == "s3"


def test_azure_is_configured_by_the_variables_of_adlfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=theirs;AccountKey=k")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "canary")
    run = "tiered::az://container/run"
    assert dict(settings(run).options) == {
        "connection_string": "AccountName=theirs;AccountKey=k",
        "account_key": "canary",
    }
    # An account that was named stays the one that is used.
    named = settings(run, options={"abfs": {"account_name": "ours"}})
    assert dict(named.options) == {"account_name": "ours", "account_key": "canary"}
    assert named.public_options() == {"account_name": "ours"}


@pytest.mark.parametrize(
    ("protocol", "secrets"),
    [
        ("gs", {"token": "canary"}),
        ("gs", {"token": {"private_key": "canary"}}),
        ("az", {"account_key": "canary", "sas_token": "canary", "client_secret": "canary"}),
        ("az", {"connection_string": "AccountKey=canary", "credential": "canary"}),
    ],
)
def test_secrets_of_google_and_azure_are_not_public(protocol: str, secrets: dict[str, Any]) -> None:
    made = settings(f"tiered::{protocol}://bucket/run", options={protocol: secrets})
    assert made.public_options() == {}
    assert "canary" not in repr(made)


def test_an_account_host_with_a_token_is_refused_and_not_repeated() -> None:
    with pytest.raises(InvalidError) as raised:
        settings("tiered::az://c42/run", options={"az": {"account_host": "h?sig=canary"}})
    assert "canary" not in str(raised.value)


def test_options_of_any_protocol_are_taken_and_not_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the stores that we know: what is given counts more than the environment."""
    monkeypatch.setenv("FSSPEC_OSS_KEY", "canary-from-the-environment")
    monkeypatch.setenv("FSSPEC_OSS_ENDPOINT", "https://theirs.example")
    given = {"oss": {"endpoint": "https://ours.example", "secret": "canary"}}
    made = settings("tiered::oss://bucket/run", options=given)
    assert dict(made.options) == {
        "key": "canary-from-the-environment",
        "endpoint": "https://ours.example",
        "secret": "canary",
    }
    assert made.public_options() == {}
    assert "canary" not in repr(made)
    with pytest.raises(InvalidError, match="does not use"):
        settings("tiered::oss://bucket/run", options={"s3": {"key": "k"}})
