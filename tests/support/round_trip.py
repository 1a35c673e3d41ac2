"""One run through a store, end to end: save, flush in a process of its own, list, load."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import QUICK
from tests.support.runs import load, save, wait

_CLI = "import sys; from dcp_tiered.cli import main; sys.exit(main())"


def round_trip(url: str, local: Path, options: dict[str, Any], **environment: str) -> None:
    """Save two checkpoints, wait until they are durable, list them, load without the local tier.

    Args:
        url: Of the run.
        local: The local tier.
        options: Of the store, by protocol, secrets included.
        **environment: What a command needs to reach the store with what the node has noted.
    """
    arguments = {"url": url, "local": str(local), "limits": QUICK, **options}
    for number in (1, 2):
        save(arguments, f"step-{number}", number)
        wait(arguments, f"step-{number}")
    listed = subprocess.run(
        [sys.executable, "-c", _CLI, "ls", url, "--local", str(local), "--json"],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=60,
    )
    lines = [json.loads(line) for line in listed.stdout.splitlines()]
    assert [(line["checkpoint_id"], line["state"]) for line in lines] == [
        ("step-1", "durable"),
        ("step-2", "durable"),
    ]
    durable_only = {"url": url, "limits": QUICK, **options}
    assert load(durable_only) == 2
    assert load(durable_only, "step-1") == 1
    noted = [path.read_text() for path in local.glob("*/run.json")]
    assert noted
    for secret in _leaves(options):
        assert not any(secret in text for text in noted)


def _leaves(options: dict[str, Any]) -> list[str]:
    secrets = ("secret", "connection_string")
    return [str(value) for given in options.values() for k, value in given.items() if k in secrets]
