"""What may write device memory is decided by proof, and a child that proves nothing is killed."""

import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_tiered.engines import choose, gds_probe
from dcp_tiered.engines.arena import Arena
from dcp_tiered.engines.gds_probe import GdsProbe, probe_gds, run_child
from dcp_tiered.errors import InvalidError

PROVEN = {"error": None, "gds_bytes": 1 << 22}
FAILED = {"error": "cuFile says no", "gds_bytes": 0}

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture(autouse=True)
def forget() -> None:
    gds_probe._known.cache_clear()


@needs_no_gpu
def test_says_why_nothing_works_here_and_leaves_nothing(tmp_path: Path) -> None:
    found = probe_gds(tmp_path)
    assert found.what == "host"
    missing = importlib.util.find_spec("kvikio") is None
    assert ("kvikio is not installed" if missing else "CUDA not available") in found.reason
    assert list(tmp_path.iterdir()) == []


def test_cufile_is_not_tried_where_it_would_spin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gds_probe, "_UDEV", str(tmp_path))
    monkeypatch.setattr(gds_probe, "_MODULES", str(tmp_path / "modules"))
    assert "cuFile would spin" in str(gds_probe.gds_veto())
    (tmp_path / "modules").touch()
    assert gds_probe.gds_veto() is None
    monkeypatch.setattr(gds_probe, "_UDEV", str(tmp_path / "udev"))
    assert "cannot see the disks" in str(gds_probe.gds_veto())


def test_a_child_that_spins_is_killed_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch"  # the first thing that the child loads
    package.mkdir()
    (package / "__init__.py").write_text(
        f"import os, sys\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        """print('{"step": "kvikio", "error": null, "gds_bytes": 0}', flush=True)\n"""
        "while True: pass\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(gds_probe, "_LIMIT_S", 6.0)
    steps, failure = run_child(tmp_path, 0, ["kvikio", "gds"])
    assert "did not end within 6 s and was killed" in failure
    assert list(steps) == ["kvikio"], "what was proven before counts"
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()


@needs_no_gpu
def test_a_child_that_fails_is_told_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "kvikio"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libkvikio.so is broken')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    steps, failure = run_child(tmp_path, 0, ["kvikio"])
    assert steps == {}
    assert "libkvikio.so is broken" in failure


Decide = Callable[..., GdsProbe]


@pytest.fixture
def decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Decide:
    """Decide by what a child on a machine with a GPU would have said."""

    def play(gds_veto: str | None, steps: dict[str, Any], failure: str = "killed") -> GdsProbe:
        monkeypatch.setattr(gds_probe, "veto", lambda: None)
        monkeypatch.setattr(gds_probe, "gds_veto", lambda: gds_veto)
        monkeypatch.setattr(gds_probe, "run_child", lambda *_: (steps, failure))
        return probe_gds(tmp_path)

    return play


def test_the_best_that_was_proven_is_taken(decide: Decide) -> None:
    found = decide(None, {"kvikio": PROVEN, "gds": PROVEN})
    assert (found.what, found.gds_bytes) == ("gds", 1 << 22)


@pytest.mark.parametrize(
    ("gds_veto", "steps", "what", "reason"),
    [
        (None, {"kvikio": PROVEN, "gds": FAILED}, "kvikio", "cuFile says no"),
        (None, {"kvikio": PROVEN}, "kvikio", "killed"),
        ("no /run/udev", {"kvikio": PROVEN}, "kvikio", "no /run/udev"),
        (None, {}, "host", "killed"),
        ("no /run/udev", {"kvikio": FAILED}, "host", "cuFile says no"),
        (None, {"kvikio": FAILED, "gds": PROVEN}, "host", "cuFile says no"),
    ],
)
def test_what_was_not_proven_is_not_taken(
    decide: Decide, gds_veto: str | None, steps: dict[str, Any], what: str, reason: str
) -> None:
    found = decide(gds_veto, steps)
    assert found.what == what
    assert reason in found.reason


def test_a_mount_is_probed_once(decide: Decide, tmp_path: Path) -> None:
    assert decide(None, {"kvikio": PROVEN, "gds": PROVEN}).what == "gds"
    (tmp_path / "below").mkdir()
    assert probe_gds(tmp_path / "below").what == "gds"
    assert decide("no", {}).what == "gds"


def test_cufile_must_not_take_its_own_detour_in_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gds_probe, "_SITE_CONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("CUFILE_ENV_PATH_JSON", raising=False)
    made = Path(gds_probe._honest_config(str(tmp_path))).read_text()
    assert made == '{"properties": {"allow_compat_mode": false}}'
    site = tmp_path / "site.json"
    site.write_text(
        '{ // ours\n "properties": {"allow_compat_mode" : true, "use_poll_mode": false}}'
    )
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(site))
    made = Path(gds_probe._honest_config(str(tmp_path))).read_text()
    assert made == site.read_text().replace("true", "false")


def test_auto_asks_when_device_memory_comes_and_says_so_once(
    decide: Decide, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = choose.cache(choose.partial(choose._best_backend, tmp_path))
    assert asked(torch.device("cpu")) == "host"
    assert gds_probe._known() == {}, "nobody has asked yet"
    decide("no /run/udev", {"kvikio": PROVEN})
    with caplog.at_level(logging.INFO):
        assert asked(torch.device("cuda", 0)) == "kvikio"
        assert asked(torch.device("cuda", 0)) == "kvikio"
    (record,) = caplog.records
    assert "no /run/udev" in record.getMessage()


@needs_no_gpu
@pytest.mark.parametrize("name", ["gds", "kvikio"])
def test_an_engine_asked_for_by_name_does_not_fall_back(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidError, match=f"engine '{name}' does not work") as caught:
        choose.choose(name, tmp_path, Arena(4096, 1))
    assert probe_gds(tmp_path).reason in caught.value.message


def test_kvikio_by_name_is_fine_where_gds_works(decide: Decide, tmp_path: Path) -> None:
    decide(None, {"kvikio": PROVEN, "gds": PROVEN})
    assert choose.choose("kvikio", tmp_path, Arena(4096, 1)).name == "kvikio"
    decide(None, {})
    assert choose.choose("auto", tmp_path, Arena(4096, 1)).name in ("direct", "buffered")
