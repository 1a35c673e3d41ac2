"""Names of objects and directories."""

import re

import pytest

from dcp_tiered.errors import InvalidError
from dcp_tiered.format import layout


@pytest.mark.parametrize("text", ["step-1000", "a", "0", "A.b_c=d-e", "x" * 128])
def test_a_plain_name_is_a_checkpoint_id(text: str) -> None:
    assert layout.check_checkpoint_id(text) == text


@pytest.mark.parametrize(
    "text",
    ["", ".", "..", ".a", "-a", "_a", "a/b", "/a", "a\\b", "a b", "a\n", "é", "x" * 129, None, 7],
    ids=ascii,
)
def test_anything_else_is_refused_with_a_hint(text: object) -> None:
    """O022: names are data and never become paths."""
    with pytest.raises(InvalidError, match="not a plain name") as caught:
        layout.check_checkpoint_id(text)
    assert "checkpoint_id='step-1000'" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("step-1000", 1000),
        ("step_500", 500),
        ("epoch2-step7", 7),
        ("final", None),
        ("9" * 19, None),
    ],
)
def test_the_step_is_the_last_integer(text: str, step: int | None) -> None:
    """O119: numbers are compared as numbers."""
    if step is None and text.isdigit():
        assert layout.step_of(text) == int(text[1:])  # bounded: only 18 digits are believed
    else:
        assert layout.step_of(text) == step


def test_runs_have_directories_of_their_own() -> None:
    roots = ["s3://a/run", "s3://b/run", "s3://a/run/x", "file:///a/run", "s3://a/r un"]
    directories = [layout.run_directory(root) for root in roots]
    assert len(set(directories)) == len(roots)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,40}-[0-9a-f]{8}", name) for name in directories)


@pytest.mark.parametrize("rank", [-1, 10_000_000])
def test_a_rank_that_no_name_holds_is_refused(rank: int) -> None:
    with pytest.raises(InvalidError, match="not a valid object name"):
        layout.shard_name(rank, "0" * 16)


@pytest.mark.parametrize("number", [0, -1, 1_000_000_000])
def test_a_number_that_no_record_has_is_refused(number: int) -> None:
    for make in (layout.record_name, layout.published_name):
        with pytest.raises(InvalidError):
            make(number)


@pytest.mark.parametrize(
    "name",
    ["record-01.json", "record-1.json.tmp", "xrecord-1.json", "record-1.json/..", "RECORD-1"],
)
def test_what_only_looks_like_a_name_is_none(name: str) -> None:
    assert layout.record_number(name) is None
    assert layout.published_number(name.replace("record", "published")) is None
    assert layout.shard_rank(name) is None
    assert layout.pack_node(name) is None


def test_pack_token_is_fixed_by_the_format() -> None:
    """A flusher of another version must find its predecessor's pack."""
    assert layout.pack_token(["0-0000000000000000.shard"]) == "ba0af4ae97194d15"
