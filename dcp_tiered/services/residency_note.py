"""What a run's directory on a node knows of its residency: the policy, or the first region."""

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from dcp_tiered.errors import (
    AbsentError,
    AlreadyExistsError,
    CorruptError,
    InvalidError,
    ResidencyError,
)
from dcp_tiered.format.columns import canonical_json, parse_json
from dcp_tiered.interfaces import LocalTier
from dcp_tiered.policy import residency_schema
from dcp_tiered.policy.residency import Policy
from dcp_tiered.services.catalog import replace

_log = logging.getLogger(__name__)
NOTE_FILE = ".residency.json"
"""In the run's directory; no checkpoint has such a name."""
_NOTE_BYTES_MAX = 1 << 20
_REPLACED_MAX = 32


def note_policy(local: LocalTier, policy: Policy) -> None:
    """Keep the policy with the run: flushers that an operator starts are held to it too.

    Of a policy that it replaces the hash is kept: what was saved under that may go by the new one.
    """
    earlier: list[str] = []
    try:
        noted = read_note(local)
        if noted.get("policy") == dict(policy.plain):
            return
        earlier = [sha for sha in _hashes(noted) if sha != policy.sha256][:_REPLACED_MAX]
    except ResidencyError:
        _log.warning("writing the noted residency policy anew")
    data = canonical_json({"policy": dict(policy.plain), "replaced": earlier})
    try:
        local.put(NOTE_FILE, data)
    except AlreadyExistsError:
        replace(local, NOTE_FILE, data)


def noted_policy(local: LocalTier) -> dict[str, Any] | None:
    """Return the policy that is noted as plain data, None where there is none or it is damaged."""
    with contextlib.suppress(ResidencyError):
        policy = read_note(local).get("policy")
        return policy if isinstance(policy, dict) else None
    return None


def known_policies(local: LocalTier) -> list[str]:
    """Return hashes of the policies that are or were in force on a node, the newest first."""
    with contextlib.suppress(ResidencyError):
        return _hashes(read_note(local))
    return []


def _hashes(note: Mapping[str, Any]) -> list[str]:
    hashes: list[str] = []
    if "policy" in note:
        with contextlib.suppress(InvalidError):
            hashes.append(residency_schema.parse(note["policy"]).sha256)
    replaced = note.get("replaced")
    return hashes + [str(sha) for sha in (replaced if isinstance(replaced, list) else [])]


def read_note(local: LocalTier) -> dict[str, Any]:
    """Return what a run's directory knows of its residency; empty when nothing was noted.

    Raises:
        ResidencyError: It is damaged: a lost policy must not become none.
    """
    try:
        return parse_json(local.get(NOTE_FILE, _NOTE_BYTES_MAX))
    except AbsentError:
        return {}
    except CorruptError as exc:
        path = str(local.root / NOTE_FILE)
        raise ResidencyError(
            "the residency that was noted for this run is damaged",
            "local",
            path,
            "The next save with residency= writes it anew; or remove the file.",
        ) from exc
