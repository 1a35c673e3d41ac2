"""What the commands share: options, how sizes and times look, and exit codes."""

import argparse
import contextlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from dcp_tiered import config, errors, stack
from dcp_tiered.config import Limits
from dcp_tiered.errors import AbsentError, InvalidError, TieredError
from dcp_tiered.format import layout
from dcp_tiered.services import run_directory
from dcp_tiered.tiers.posix import PosixTier

_PATIENCE = Limits(request_timeout_s=10.0, request_retry_s=10.0)
"""Who looks at a run waits at a terminal: a store that is down is told soon."""
_EXIT_CODES: tuple[tuple[type[TieredError], int], ...] = (
    (errors.InvalidError, 3),
    (errors.UnavailableError, 4),
    (errors.CorruptError, 5),
    (errors.IncompleteError, 6),
    (errors.AbsentError, 7),
    (errors.ConflictError, 8),
    (errors.ResidencyError, 9),
    (errors.BackpressureError, 10),
)


def exit_code(error: TieredError) -> int:
    """Return the exit code of an error's class."""
    return next((code for cls, code in _EXIT_CODES if isinstance(error, cls)), 1)


def console() -> Console:
    """Return where tables go; wide enough not to cut names when the output is no terminal."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=200)


def cell(text: str) -> Text:
    """Return text from a store for a table: no markup, nothing that a terminal would obey."""
    return Text("".join(c if c.isprintable() or c == "\n" else "?" for c in text))


def add_option_argument(parser: argparse.ArgumentParser) -> None:
    """Add `-o s3.endpoint_url=URL`, which may be repeated."""
    parser.add_argument(
        "-o",
        "--option",
        action="append",
        default=[],
        metavar="PROTOCOL.NAME=VALUE",
        help="an fsspec option, such as s3.endpoint_url=https://s3.example.org; give secrets by the"
        " environment instead (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)",
    )


def parse_options(pairs: list[str]) -> dict[str, dict[str, Any]]:
    """Return options by protocol.

    Raises:
        InvalidError: One is not of the form PROTOCOL.NAME=VALUE.
    """
    options: dict[str, dict[str, Any]] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        protocol, dot, option = name.partition(".")
        if not (equals and dot and protocol and option):
            raise InvalidError(
                f"option {name!r} is not of the form PROTOCOL.NAME=VALUE",
                None,
                None,
                "For instance: -o s3.endpoint_url=https://s3.example.org",
            )
        options.setdefault(protocol, {})[option] = config.plain(value)
    return options


def build_removing(url: str, pairs: list[str]) -> stack.Stack:
    """Build the durable tier of a run of which something is removed."""
    return stack.build_removing(config.settings(url, None, parse_options(pairs), _PATIENCE))


def build(url: str, local: str | None, pairs: list[str]) -> stack.Stack:
    """Build the tiers of a run as the user named it; what its node noted fills in options."""
    given = parse_options(pairs)
    settings = config.settings(url, local, given, _PATIENCE)
    noted = None
    if settings.local is not None and settings.url.protocol is not None:
        path = settings.local / layout.run_directory(settings.url.root)
        with contextlib.suppress(AbsentError):
            noted = run_directory.run_of(PosixTier(path, settings.local, "local"))[1]
    return stack.build(config.settings(url, local, given, _PATIENCE, noted=noted))


def run_directories(path: str) -> list[PosixTier]:
    """Return the runs below a local tier, or the one that `path` is.

    Raises:
        InvalidError: There is none.
    """
    root = Path(path).expanduser().absolute()
    candidates = [root, *sorted(root.iterdir())] if root.is_dir() else []
    found = []
    for candidate in candidates:
        tier = PosixTier(candidate, candidate.parent, "local")
        if candidate.is_dir():
            try:
                run_directory.run_of(tier)
            except AbsentError:
                continue
            found.append(tier)
    if not found:
        raise InvalidError(
            "no run was ever saved here",
            "local",
            str(root),
            "Give the directory that TieredWriter got as local=, or a run's directory below it.",
        )
    return found


def size(count: int) -> str:
    """Return bytes for people."""
    return decimal(count)


def moment(sequence: int) -> str:
    """Return when a checkpoint was published, UTC."""
    at = datetime.fromtimestamp(sequence / 1e9, UTC)
    return at.strftime("%Y-%m-%d %H:%M:%S")
