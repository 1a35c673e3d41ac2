"""The directory of a run on this node: who owns it, where it flushes to, and this node's identity."""

import socket
from typing import Any

from dcp_tiered.errors import AbsentError, AlreadyExistsError, CorruptError, TieredError
from dcp_tiered.format import layout
from dcp_tiered.format.columns import canonical_json, parse_json
from dcp_tiered.interfaces import LocalTier

_FILE_BYTES_MAX = 1 << 20


def open_node(local: LocalTier, fresh_id: str) -> str:
    """Return this local root's node id, made on first use.

    Args:
        local: The run's directory.
        fresh_id: Twelve random hex digits, taken if no rank was faster.
    """
    data = canonical_json({"node": fresh_id, "host": socket.gethostname()})
    try:
        local.put(layout.NODE_FILE, data)
    except AlreadyExistsError:
        data = local.get(layout.NODE_FILE, _FILE_BYTES_MAX)
    return layout.check_node(parse_json(data).get("node"))


def node_of(local: LocalTier) -> str | None:
    """Return this local root's node id, None when nothing was ever saved here."""
    try:
        return layout.check_node(
            parse_json(local.get(layout.NODE_FILE, _FILE_BYTES_MAX)).get("node")
        )
    except AbsentError:
        return None


def remember_run(local: LocalTier, url: str, options: dict[str, Any]) -> None:
    """Note the run's URL and its options without secrets, so that `dcp-tiered flush` finds them."""
    try:
        local.put(layout.RUN_FILE, canonical_json({"url": url, "options": options}))
    except AlreadyExistsError:
        run_of(local)


def run_of(local: LocalTier) -> tuple[str, dict[str, Any]]:
    """Return the run's URL and its options without secrets.

    Raises:
        AbsentError: The directory is not that of a run.
        CorruptError: Its description is damaged.
    """
    try:
        fields = parse_json(local.get(layout.RUN_FILE, _FILE_BYTES_MAX))
    except CorruptError as exc:
        raise _damaged(local) from exc
    url, options = fields.get("url"), fields.get("options")
    if not isinstance(url, str) or not isinstance(options, dict):
        raise _damaged(local)
    return url, options


def _damaged(local: LocalTier) -> TieredError:
    path = str(local.root / layout.RUN_FILE)
    return CorruptError(
        "the run's description is damaged",
        "local",
        path,
        f"Remove {path}; the next save writes it.",
    )
