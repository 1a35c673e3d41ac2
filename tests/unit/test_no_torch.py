"""The command line and everything behind it start where torch is not installed."""

import subprocess
import sys

_CODE = """
import importlib, pkgutil, sys
sys.modules["torch"] = None
import dcp_tiered
rooms = ("cli", "services", "tiers", "format", "policy")
names = ["dcp_tiered.stack", "dcp_tiered.config"]
for room in rooms:
    package = importlib.import_module(f"dcp_tiered.{room}")
    walk = pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    names += [found.name for found in walk]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def test_all_but_writer_reader_and_engines_import_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CODE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 25
