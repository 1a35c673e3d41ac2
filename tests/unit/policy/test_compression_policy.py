"""When a pack is compressed, and when `auto` looks again."""

from dataclasses import replace

import pytest

from dcp_tiered.policy.compression import TRY_AGAIN_PACKS, Measured, is_wanted

SLOW, FAST = 20e6, 5e9
GOOD = Measured(link_bytes_per_s=SLOW, codec_bytes_per_s=800e6, saved_share=0.3)


@pytest.mark.parametrize(
    "measured",
    [Measured(), GOOD, replace(GOOD, link_bytes_per_s=FAST), replace(GOOD, saved_share=0)],
)
def test_what_was_asked_for_is_done_whatever_was_measured(measured: Measured) -> None:
    assert is_wanted("zstd", measured)
    assert not is_wanted("off", measured)


def test_auto_measures_the_link_first_and_tries_when_it_is_slow() -> None:
    assert not is_wanted("auto", Measured())
    assert is_wanted("auto", Measured(link_bytes_per_s=SLOW))
    assert not is_wanted("auto", Measured(link_bytes_per_s=FAST))


@pytest.mark.parametrize(
    ("link", "codec", "saved"),
    [
        (link, codec, saved)
        for link in (1e6, 1e8, 3e8, 1e9, 1e10)
        for codec in (5e7, 4e8, 2e9)
        for saved in (0.0, 0.1, 0.33, 0.66)
    ],
)
def test_auto_does_what_ends_sooner(link: float, codec: float, saved: float) -> None:
    size = 1e9
    as_it_is = size / link
    compressed = size / codec + size * (1 - saved) / link
    measured = Measured(link_bytes_per_s=link, codec_bytes_per_s=codec, saved_share=saved)
    assert is_wanted("auto", measured) == (compressed < as_it_is)


def test_what_did_not_shrink_is_tried_again_after_a_while_on_a_slow_link_only() -> None:
    useless = replace(GOOD, saved_share=0.0)
    assert not is_wanted("auto", useless)
    assert not is_wanted("auto", replace(useless, packs_since=TRY_AGAIN_PACKS - 1))
    again = replace(useless, packs_since=TRY_AGAIN_PACKS)
    assert is_wanted("auto", again)
    assert not is_wanted("auto", replace(again, link_bytes_per_s=FAST))
