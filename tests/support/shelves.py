"""Make the packages in `shelf` installed, for this process and those that it starts."""

from pathlib import Path

import fsspec
import pytest

FOLDER = Path(__file__).parent / "shelf"


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fsspec find the protocols `shelf` and `plainshelf`, as after `pip install`."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("PYTHONPATH", str(FOLDER), prepend=":")
    fsspec.process_entries()
