"""The only module that knows the names of objects and directories.

Durable tier, below the run root, and local tier, below the run directory:

    <checkpoint id>/manifest-<attempt>.json        durable
    <checkpoint id>/packs/<node>-<token>.pack      durable
    <checkpoint id>/packs/<node>-<token>.pack.ok   durable, where the store keeps no checksum
    <checkpoint id>/record-<n>.json                durable, and a copy on the local tier
    <checkpoint id>/<rank>-<token>.shard           local
    <checkpoint id>/published-<n>.json             local
    <checkpoint id>/asked-<rank>                   local
    <checkpoint id>/saving                         local
    <checkpoint id>/superseded-<attempt>.json      local
    <checkpoint id>/keep                           local
    run.json, node.json                            local
    residency-incident-<n>.json                    local

A name that was read from storage counts only after it has passed the patterns below.
"""

import hashlib
import re

from dcp_tiered.errors import CorruptError, InvalidError
from dcp_tiered.format.fields import shown

RUN_FILE = "run.json"
NODE_FILE = "node.json"
LOCK_FILE = "flusher.lock"
LOG_FILE = "flusher.log"
STATUS_FILE = "flusher-status.json"
METRICS_FILE = "flusher-metrics.prom"
TAKEOVER_FILE = "flusher.takeover"
WANTED_FILE = "flusher.wanted"
MEASURED_FILE = "flusher-measured.json"
JOURNAL_FILE = ".residency-journal"
"""No checkpoint has such a name."""
KEEP_NAME = "keep"
SAVING_NAME = "saving"
_RESERVED = (
    RUN_FILE,
    NODE_FILE,
    LOCK_FILE,
    LOG_FILE,
    STATUS_FILE,
    METRICS_FILE,
    TAKEOVER_FILE,
    WANTED_FILE,
    MEASURED_FILE,
)

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ATTEMPT = re.compile(r"[0-9a-f]{16}")
_NODE = re.compile(r"[0-9a-f]{12}")
_SHARD = re.compile(r"(0|[1-9][0-9]{0,6})-([0-9a-f]{16})\.shard")
_MANIFEST = re.compile(r"manifest-([0-9a-f]{16})\.json")
_PACK = re.compile(r"packs/([0-9a-f]{12})-([0-9a-f]{16})\.pack")
_PUBLISHED = re.compile(r"published-([1-9][0-9]{0,8})\.json")
_SUPERSEDED = re.compile(r"superseded-([0-9a-f]{16})\.json")
_RECORD = re.compile(r"record-([1-9][0-9]{0,8})\.json")
_INCIDENT = re.compile(r"residency-incident-([1-9][0-9]{0,8})\.json")
_LAST_INTEGER = re.compile(r"([0-9]{1,18})(?!.*[0-9])")


def is_checkpoint_id(text: str) -> bool:
    """Tell whether `text` may name a checkpoint."""
    is_taken = text in _RESERVED or _INCIDENT.fullmatch(text) is not None
    return _ID.fullmatch(text) is not None and not is_taken


def check_checkpoint_id(text: object) -> str:
    """Return a checkpoint id as it was given.

    Raises:
        InvalidError: It is not one component of `[A-Za-z0-9][A-Za-z0-9._=-]{0,127}`, or it is the
            name of a file beside the checkpoints.
    """
    if isinstance(text, str) and is_checkpoint_id(text):
        return text
    raise InvalidError(
        f"checkpoint id {shown(str(text))} is not a plain name",
        None,
        None,
        "Use one name of up to 128 letters, digits and '._=-' that starts with a letter or digit,"
        " such as checkpoint_id='step-1000'; the run's URL goes to TieredWriter or TieredReader.",
    )


def step_of(checkpoint_id: str) -> int | None:
    """Return the last integer in a checkpoint id, for display and retention only."""
    match = _LAST_INTEGER.search(checkpoint_id)
    return int(match.group(1)) if match else None


def run_directory(run_root: str) -> str:
    """Return the name of the local directory of a run, unique per run root."""
    tail = run_root.rstrip("/").rsplit("/", 1)[-1]
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", tail).strip("-.")[:40] or "run"
    return f"{slug}-{hashlib.sha256(run_root.encode()).hexdigest()[:8]}"


def shard_name(rank: int, token: str) -> str:
    """Return the name of a shard file."""
    return _checked(_SHARD, f"{rank}-{token}.shard")


def shard_rank(name: str) -> int | None:
    """Return the rank in a shard file's name, None when it is not such a name."""
    match = _SHARD.fullmatch(name)
    return int(match.group(1)) if match else None


def manifest_name(attempt: str) -> str:
    """Return the name of the manifest of an attempt on the durable tier."""
    return _checked(_MANIFEST, f"manifest-{attempt}.json")


def manifest_attempt(name: str) -> str | None:
    """Return the attempt in the name of a durable manifest, None when it is not such a name."""
    match = _MANIFEST.fullmatch(name)
    return match.group(1) if match else None


def published_name(number: int) -> str:
    """Return the name under which a manifest is published on the local tier."""
    return _checked(_PUBLISHED, f"published-{number}.json")


def published_number(name: str) -> int | None:
    """Return the number in a published manifest's name, None when it is not such a name."""
    match = _PUBLISHED.fullmatch(name)
    return int(match.group(1)) if match else None


def asked_name(rank: int) -> str:
    """Return the name of the note that says when a rank last began to replace a checkpoint."""
    return f"asked-{rank}"


def superseded_name(attempt: str) -> str:
    """Return the name of the note that gives up the flush of an attempt."""
    return _checked(_SUPERSEDED, f"superseded-{attempt}.json")


def superseded_attempt(name: str) -> str | None:
    """Return the attempt in the name of such a note, None when it is not such a name."""
    match = _SUPERSEDED.fullmatch(name)
    return match.group(1) if match else None


def incident_name(number: int) -> str:
    """Return the name of an incident file in the run's directory."""
    return _checked(_INCIDENT, f"residency-incident-{number}.json")


def incident_number(name: str) -> int | None:
    """Return the number in an incident file's name, None when it is not such a name."""
    match = _INCIDENT.fullmatch(name)
    return int(match.group(1)) if match else None


def record_name(number: int) -> str:
    """Return the name of a record."""
    return _checked(_RECORD, f"record-{number}.json")


def record_number(name: str) -> int | None:
    """Return the number in a record's name, None when it is not such a name."""
    match = _RECORD.fullmatch(name)
    return int(match.group(1)) if match else None


def pack_name(node: str, token: str) -> str:
    """Return the name of a pack, relative to its checkpoint."""
    return _checked(_PACK, f"packs/{node}-{token}.pack")


def pack_node(name: str) -> str | None:
    """Return the node in a pack's name, None when it is not such a name."""
    match = _PACK.fullmatch(name)
    return match.group(1) if match else None


def pack_token(shard_names: list[str], encoder: str | None = None) -> str:
    """Derive a pack's token from what is in it, and from what compressed it, if anything did.

    A flusher that starts over after a crash groups the same shard files again, so it finds its
    predecessor's pack under the same name instead of uploading a second one.
    """
    parts = shard_names if encoder is None else [*shard_names, encoder]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def ok_name(pack: str) -> str:
    """Return the name of the object that says a pack was read back and found right."""
    return _checked(_PACK, pack) + ".ok"


def key(checkpoint_id: str, name: str) -> str:
    """Return the key of an object of a checkpoint, relative to the run root."""
    return f"{check_checkpoint_id(checkpoint_id)}/{name}"


def check_attempt(text: object) -> str:
    """Return an attempt id that was read from storage.

    Raises:
        CorruptError: It is not one.
    """
    return _from_storage(_ATTEMPT, text, "attempt id")


def check_node(text: object) -> str:
    """Return a node id that was read from storage.

    Raises:
        CorruptError: It is not one.
    """
    return _from_storage(_NODE, text, "node id")


def check_shard_name(text: object) -> str:
    """Return a shard file name that was read from storage.

    Raises:
        CorruptError: It is not one.
    """
    return _from_storage(_SHARD, text, "shard file name")


def check_pack_name(text: object) -> str:
    """Return a pack name that was read from storage.

    Raises:
        CorruptError: It is not one.
    """
    return _from_storage(_PACK, text, "pack name")


def check_sha256(text: object) -> str:
    """Return a sha256 in hexadecimal digits that was read from storage.

    Raises:
        CorruptError: It is not one.
    """
    return _from_storage(_SHA256, text, "sha256")


def check_optional_sha256(value: object) -> str | None:
    """Return a stored sha256, None where there is none.

    Raises:
        CorruptError: It is something else.
    """
    return None if value is None else check_sha256(value)


def check_stored_id(text: object) -> str:
    """Return a checkpoint id that was read from storage.

    Raises:
        CorruptError: It is not one.
    """
    found = _from_storage(_ID, text, "checkpoint id")
    if not is_checkpoint_id(found):
        raise CorruptError(f"{found!r} is not a valid checkpoint id")
    return found


def _checked(pattern: re.Pattern[str], name: str) -> str:
    if pattern.fullmatch(name) is None:
        raise InvalidError(f"{name!r} is not a valid object name")
    return name


def _from_storage(pattern: re.Pattern[str], text: object, what: str) -> str:
    if isinstance(text, str) and pattern.fullmatch(text):
        return text
    raise CorruptError(f"{shown(text)} is not a valid {what}")
