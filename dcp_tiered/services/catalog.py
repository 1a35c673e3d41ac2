"""List, locate, publish, commit: the only code that writes manifests and records.

Readers trust the highest record on the durable tier and the highest published manifest on the
local one, nothing else (I2). Both are create-only, so "somebody was first" is settled by reading
back what is there (I4): the same attempt is a lost reply, not a rival.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TypeVar

from dcp_tiered.errors import (
    AbsentError,
    AlreadyExistsError,
    ConflictError,
    CorruptError,
    InvalidError,
    SupersededError,
    TieredError,
    from_os_error,
)
from dcp_tiered.format import layout
from dcp_tiered.format.manifest import (
    MANIFEST_BYTES_MAX,
    Head,
    Manifest,
    decode_head,
    encode_manifest,
    sha256,
)
from dcp_tiered.format.records import (
    RECORD_BYTES_MAX,
    Commit,
    Expired,
    Fence,
    Record,
    decode_record,
    encode_record,
    expired_commits,
    is_fenced,
    is_withdrawn,
    state_of,
)
from dcp_tiered.interfaces import LocalTier, Tier
from dcp_tiered.services import doorbell, superseded_notes
from dcp_tiered.services.conflicts import taken, too_many_rivals, withdrawn
from dcp_tiered.version import __version__

_log = logging.getLogger(__name__)
_APPEND_TRIES_MAX = 64
_READ_THREADS = 8
_PAGE_KEYS = 1000
"""Keys of one listing request; the manifests of an id come before its packs and records."""
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The highest manifest that a local tier shows for a checkpoint id."""

    number: int
    head: Head
    data: bytes = field(repr=False)
    """The stored bytes of the manifest."""
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCopy:
    """What one rank sees of one checkpoint on its node."""

    checkpoint_id: str
    attempt: str
    sequence: int
    supersedes: tuple[str, ...]
    sha256: str
    missing: int
    """Shard files that are not here."""
    noted: Commit | None
    """This node's copy of its commit."""


class Catalog:
    """What checkpoints there are, on both tiers of one run.

    Args:
        local: This node's tier, None when there is none.
        durable: None for a run that is local only.
    """

    def __init__(self, local: LocalTier | None, durable: Tier | None) -> None:
        self.local = local
        self.durable = durable

    def local_ids(self) -> list[str]:
        """Return the checkpoint ids that this node's tier has something of."""
        if self.local is None:
            return []
        return sorted(filter(layout.is_checkpoint_id, self.local.list_directories()))

    def published(self, checkpoint_id: str) -> Published | None:
        """Return the highest published manifest of an id on this node.

        Raises:
            CorruptError: It is there and damaged.
        """
        for number, key, data in self._manifests(checkpoint_id):
            head = self._head(checkpoint_id, key, data)
            return Published(number=number, head=head, data=data, sha256=sha256(data))
        return None

    def last_sequence(self) -> int:
        """Return the greatest sequence on this node; a damaged manifest does not stop a save."""
        last = 0
        for checkpoint_id in self.local_ids():
            try:
                published = self.published(checkpoint_id)
            except TieredError as exc:
                _log.warning("ignoring a damaged local checkpoint: %s", exc)
                continue
            last = max(last, published.head.sequence if published else 0)
        return last

    def published_shards(self, checkpoint_id: str) -> set[str]:
        """Return the shard files that any manifest published on this node names, old ones too.

        Raises:
            CorruptError: One of the manifests is damaged.
        """
        names: set[str] = set()
        for _, key, data in self._manifests(checkpoint_id):
            names |= {shard.name for shard in self._head(checkpoint_id, key, data).shards}
        return names

    def published_as(self, checkpoint_id: str, wanted: str) -> bytes | None:
        """Return the published manifest with a sha256, also when a newer one is there meanwhile."""
        for _, _, data in self._manifests(checkpoint_id):
            if sha256(data) == wanted:
                return data
        return None

    def _manifests(self, checkpoint_id: str) -> Iterator[tuple[int, str, bytes]]:
        """Yield number, key and bytes of an id's manifests on this node, the highest first."""
        if self.local is None:
            return
        numbers = self._numbers(self.local, checkpoint_id, layout.published_number)
        for number in sorted(numbers, reverse=True):
            key = layout.key(checkpoint_id, layout.published_name(number))
            # One that is gone since we looked was evicted, and lower ones before it.
            with contextlib.suppress(AbsentError):
                yield number, key, self.local.get(key, MANIFEST_BYTES_MAX)

    def _head(self, checkpoint_id: str, key: str, data: bytes) -> Head:
        path = self._need_local().root / key
        hint = f"Save under another checkpoint_id, or remove {path} to give this copy up."
        try:
            head = _with_key("local", key, lambda: decode_head(data))
        except CorruptError as exc:
            text = f"published manifest is damaged: {exc.message}"
            raise CorruptError(text, "local", key, hint) from exc
        if head.checkpoint_id != checkpoint_id:
            raise CorruptError(f"manifest is of {head.checkpoint_id!r}", "local", key, hint)
        return head

    def sealed(self, checkpoint_id: str) -> list[str]:
        """Return the names of the shard files of an id on this node."""
        if self.local is None:
            return []
        names = (key.partition("/")[2] for key in self.local.list_keys(checkpoint_id))
        return sorted(name for name in names if layout.shard_rank(name) is not None)

    def unnamed(self, checkpoint_id: str) -> frozenset[str]:
        """Return the shard files that no manifest, commit or note known on this node names.

        A manifest alone does not answer for the whole directory: the coordinator may have been on
        this node for an older save of the id and be on another one now.
        """
        sealed = frozenset(self.sealed(checkpoint_id))
        if not sealed:
            return sealed
        sealed -= self.noted_shards(checkpoint_id)
        for note in superseded_notes.read(self.local, checkpoint_id):
            sealed -= set(note.shards)
        return sealed - self.published_shards(checkpoint_id) if sealed else sealed

    def publish(self, manifest: Manifest) -> Published:
        """Make a manifest visible on the local tier: the save is over.

        A manifest that another node published and this one has a copy of is no rival: whether its
        attempt owns the id is for the durable tier to say.

        Raises:
            ConflictError: Another attempt published this id in the meantime.
        """
        local = self._need_local()
        head = manifest.head
        data = encode_manifest(manifest)
        for _ in range(_APPEND_TRIES_MAX):
            current = self.published(head.checkpoint_id)
            if current is not None and current.head.attempt == head.attempt:
                return current
            if (
                current is not None
                and current.head.node == head.node
                and current.head.attempt not in head.supersedes
            ):
                raise taken(head.checkpoint_id, "local", "published", current.head.attempt)
            number = 1 if current is None else current.number + 1
            try:
                local.put(layout.key(head.checkpoint_id, layout.published_name(number)), data)
            except AlreadyExistsError:
                continue
            doorbell.ring(local.root)
            return Published(number=number, head=head, data=data, sha256=sha256(data))
        raise ConflictError("others keep publishing this id", "local", head.checkpoint_id)

    def records(self, checkpoint_id: str, tier: Tier | None = None) -> dict[int, Record]:
        """Return the log of an id, fresh from the durable tier (or from one that copies it).

        Raises:
            CorruptError: A record is damaged: then nobody can say what the id is.
        """
        store = tier or self._need_durable()
        numbers = self._numbers(store, checkpoint_id, layout.record_number)
        read = partial(self._record, store, checkpoint_id)
        return dict(zip(numbers, parallel(read, numbers), strict=True))

    def _record(self, store: Tier, checkpoint_id: str, number: int) -> Record:
        key = layout.key(checkpoint_id, layout.record_name(number))
        data = store.get(key, RECORD_BYTES_MAX)
        return _with_key(store.name, key, lambda: decode_record(data, checkpoint_id))

    def state(self, checkpoint_id: str) -> Commit | Expired | None:
        """Return what the durable tier says an id is; reads the highest records only."""
        store = self._need_durable()
        for number in self._numbers(store, checkpoint_id, layout.record_number)[::-1]:
            record = self._record(store, checkpoint_id, number)
            if isinstance(record, Commit | Expired):
                return record
        return None

    def states(self) -> dict[str, Commit | Expired | None]:
        """Return what every id of the run is on the durable tier; None for one without a state."""
        ids = sorted(filter(layout.is_checkpoint_id, self._need_durable().list_directories()))
        return dict(zip(ids, parallel(self.state, ids), strict=True))

    def noted(self, checkpoint_id: str) -> Commit | None:
        """Return the commit of an id that this node has a copy of, without asking the store.

        A damaged copy counts as none: it stands for nothing that the store could not say again.
        """
        try:
            state = state_of(self._copies(checkpoint_id))[1]
        except (CorruptError, InvalidError) as exc:
            _log.warning("copy of a record is damaged: %s", exc)
            return None
        return state if isinstance(state, Commit) else None

    def noted_expired(self, checkpoint_id: str) -> Commit | None:
        """Return the commit of an id that this node knows to be withdrawn, if it is the last."""
        try:
            copies = self._copies(checkpoint_id)
        except (CorruptError, InvalidError):
            return None
        withdrawn = expired_commits(copies)
        is_expired = isinstance(state_of(copies)[1], Expired)
        return withdrawn[-1] if is_expired and withdrawn else None

    def noted_shards(self, checkpoint_id: str) -> set[str]:
        """Return the shard files that any commit copied to this node places, old ones too."""
        try:
            copies = self._copies(checkpoint_id).values()
        except (CorruptError, InvalidError):
            return set()
        commits = [record for record in copies if isinstance(record, Commit)]
        return {place.shard for commit in commits for place in commit.placements}

    def is_noted_dead(self, checkpoint_id: str, attempt: str) -> bool:
        """Tell whether this node has a copy of a record that declares an attempt dead."""
        try:
            return is_fenced(self._copies(checkpoint_id).values(), attempt)
        except (CorruptError, InvalidError):
            return False

    def note(self, record: Record, number: int) -> None:
        """Keep a copy of a record that was read back from the durable tier on this node.

        A copy that says something else is replaced: it is damaged, or of a store that was wiped.
        """
        local = self._need_local()
        key = layout.key(record.checkpoint_id, layout.record_name(number))
        data = encode_record(record, __version__)
        try:
            local.put(key, data)
        except AlreadyExistsError:
            if _is_copy(local, key, data):
                return
            _log.warning("replacing a copy of a record that differs from it: %s", key)
            replace(local, key, data)

    def note_log(self, checkpoint_id: str) -> None:
        """Keep copies of what the durable tier says of an id, now that it was removed there."""
        for number, record in sorted(self.records(checkpoint_id).items()):
            self.note(record, number)

    def _copies(self, checkpoint_id: str) -> dict[int, Record]:
        return {} if self.local is None else self.records(checkpoint_id, self.local)

    def manifest_of(self, commit: Commit) -> bytes:
        """Return the stored bytes of the manifest that a commit names, checked.

        Raises:
            CorruptError: They are not the ones that were committed.
        """
        key = layout.key(commit.checkpoint_id, layout.manifest_name(commit.attempt))
        if commit.manifest_length > MANIFEST_BYTES_MAX:
            raise CorruptError("record names a manifest that is too large", "durable", key)
        data = self._need_durable().get(key, commit.manifest_length)
        if sha256(data) != commit.manifest_sha256:
            raise CorruptError(
                "manifest checksum mismatch",
                "durable",
                key,
                "The object was changed after it was written; load an older checkpoint by its id.",
            )
        return data

    def put_manifest(self, published: Published) -> None:
        """Copy a published manifest to the durable tier, where it is pending until it is committed.

        Raises:
            ConflictError: Other bytes are there under this attempt's name.
        """
        durable = self._need_durable()
        head = published.head
        key = layout.key(head.checkpoint_id, layout.manifest_name(head.attempt))
        try:
            durable.put(key, published.data)
        except AlreadyExistsError:
            if sha256(durable.get(key, MANIFEST_BYTES_MAX)) != published.sha256:
                raise ConflictError(
                    "another manifest has this attempt's name", "durable", key
                ) from None

    def is_exclusive(self, published: Published) -> bool:
        """Tell whether the durable tier refuses a key that is taken.

        Asked with a manifest that is there already: where it is replaced, it is by itself. A client
        that can only look before it writes is not asked: that would find what it has just put.
        """
        if not self._need_durable().keeps_writers_apart:
            return False
        head = published.head
        key = layout.key(head.checkpoint_id, layout.manifest_name(head.attempt))
        try:
            self._need_durable().put(key, published.data)
        except AlreadyExistsError:
            return True
        return False

    def pending(self, checkpoint_id: str, known: Collection[str]) -> dict[str, bytes]:
        """Return manifests on the durable tier by attempt, save those of `known` attempts.

        One request lists, whatever number of packs there is: where a store lists in another order
        than by name, a manifest may be missed until it is committed.
        """
        durable = self._need_durable()
        keys = islice(durable.list_keys(checkpoint_id), _PAGE_KEYS)
        attempts = {layout.manifest_attempt(key.partition("/")[2]) for key in keys} - {None}
        return {
            attempt: durable.get(
                layout.key(checkpoint_id, layout.manifest_name(attempt)), MANIFEST_BYTES_MAX
            )
            for attempt in attempts
            if attempt is not None and attempt not in known
        }

    def adopt(self, checkpoint_id: str, data: bytes) -> None:
        """Show a manifest of the durable tier on this node too, unless a newer one is here.

        Raises:
            CorruptError: It is damaged, or of another id.
        """
        current = self.published(checkpoint_id)
        number = 1 if current is None else current.number + 1
        key = layout.key(checkpoint_id, layout.published_name(number))
        head = self._head(checkpoint_id, key, data)
        if current is None or current.head.sequence < head.sequence:
            with contextlib.suppress(AlreadyExistsError):  # by a save that goes on: looked at again
                self._need_local().put(key, data)

    def follow(self, checkpoint_id: str, log: dict[int, Record]) -> None:
        """Add to a log the records that were appended to it, one request each and one more.

        For those who wait: a thousand nodes that list a thousand packs again and again do not. Who
        is about to append lists the log.
        """
        while True:
            number = max(log, default=0) + 1
            try:
                log[number] = self._record(self._need_durable(), checkpoint_id, number)
            except AbsentError:
                return

    def may_commit(
        self, head: Head, log: Mapping[int, Record] | None = None
    ) -> tuple[int, Commit | None]:
        """Decide whether an attempt may be committed on top of what is there.

        Args:
            head: The attempt's manifest.
            log: What is there, if it has been read already.

        Returns:
            The number of the highest record, and this attempt's own commit if it is there already.

        Raises:
            ConflictError: Another attempt is committed.
            ExpiredError: This attempt was committed, and removed since then.
            SupersededError: This attempt was declared dead.
        """
        records = self.records(head.checkpoint_id) if log is None else log
        highest, state = state_of(records)
        if isinstance(state, Commit):
            if state.attempt == head.attempt:
                return highest, state
            if state.attempt not in head.supersedes:
                raise taken(head.checkpoint_id, "durable", "committed", state.attempt)
        if is_fenced(records.values(), head.attempt):
            raise SupersededError(
                f"attempt {head.attempt} was declared dead before it was complete",
                "durable",
                head.checkpoint_id,
                "Save again; its local copy can still be loaded on this node.",
            )
        if is_withdrawn(records, head.attempt, head.sequence, head.supersedes):
            raise withdrawn(head, expired_commits(records))
        return highest, None

    def is_expired(self, saved: Head | LocalCopy) -> bool:
        """Tell whether an attempt on this node went when its id was removed; asks the store."""
        log = self.records(saved.checkpoint_id)
        return is_withdrawn(log, saved.attempt, saved.sequence, saved.supersedes)

    def expire(self, commit: Commit) -> None:
        """Withdraw a commit: the id is no checkpoint from then on, whatever of it is still there.

        Raises:
            ConflictError: Another attempt was committed meanwhile.
        """
        durable, checkpoint_id = self._need_durable(), commit.checkpoint_id
        record = encode_record(Expired(checkpoint_id=checkpoint_id), __version__)
        for _ in range(_APPEND_TRIES_MAX):
            highest, state = state_of(self.records(checkpoint_id))
            if isinstance(state, Expired):
                return
            if state is None or state.attempt != commit.attempt:
                raise ConflictError(
                    f"checkpoint {checkpoint_id!r} was saved again meanwhile",
                    "durable",
                    checkpoint_id,
                    "Nothing of it was removed; look at 'dcp-tiered ls URL' and try again.",
                )
            key = layout.key(checkpoint_id, layout.record_name(highest + 1))
            with contextlib.suppress(AlreadyExistsError):  # perhaps by a try whose reply was lost
                durable.put(key, record)
        raise too_many_rivals(checkpoint_id)

    def commit(self, head: Head, make: Callable[[], Commit], settle_s: float = 0.0) -> Commit:
        """Append the commit of an attempt and return it as it was read back.

        Args:
            head: The attempt's manifest.
            make: Verifies what is about to be claimed, then returns the record; called before every
                try, since whatever made a try fail may have changed that.
            settle_s: How long to wait before it is read back: where the store lets two writers in,
                the other one has come by then.

        Raises:
            ConflictError: Another attempt owns the id.
        """
        durable = self._need_durable()
        for _ in range(_APPEND_TRIES_MAX):
            highest, mine = self.may_commit(head)
            if mine is not None:
                self.note(mine, highest)
                return mine
            commit = make()
            key = layout.key(head.checkpoint_id, layout.record_name(highest + 1))
            try:
                durable.put(key, encode_record(commit, __version__))
            except AlreadyExistsError:
                continue
            time.sleep(settle_s)
        raise too_many_rivals(head.checkpoint_id)

    def fence(self, checkpoint_id: str, attempt: str, prepare: Callable[[], None]) -> Commit | None:
        """Declare an attempt dead, keep a copy of the record, and return its commit if it has one.

        Whichever record was there first counts: what is committed stays so.

        Args:
            checkpoint_id: The id.
            attempt: The attempt that is to be dead.
            prepare: Called before a fence is put.
        """
        durable = self._need_durable()
        fence = Fence(checkpoint_id=checkpoint_id, attempts=(attempt,))
        for _ in range(_APPEND_TRIES_MAX):
            log = self.records(checkpoint_id)
            for number, record in sorted(log.items()):
                if isinstance(record, Commit) and record.attempt == attempt:
                    self.note(record, number)
                    return record
                if is_fenced([record], attempt):
                    self.note(record, number)
                    return None
            prepare()
            key = layout.key(checkpoint_id, layout.record_name(max(log, default=0) + 1))
            with contextlib.suppress(AlreadyExistsError):
                durable.put(key, encode_record(fence, __version__))
        raise too_many_rivals(checkpoint_id)

    def _numbers(
        self, tier: Tier | None, checkpoint_id: str, number_of: Callable[[str], int | None]
    ) -> list[int]:
        if tier is None:
            return []
        names = (key.partition("/")[2] for key in tier.list_keys(checkpoint_id))
        return sorted(number for name in names if (number := number_of(name)) is not None)

    def _need_local(self) -> LocalTier:
        if self.local is None:
            raise InvalidError("no local tier", "local", None, "Pass local='/path/on/nvme'.")
        return self.local

    def _need_durable(self) -> Tier:
        if self.durable is None:
            raise InvalidError(
                "the run has no durable tier",
                "durable",
                None,
                "Use a URL as 'tiered::s3://bucket/run'.",
            )
        return self.durable


def replace(local: LocalTier, key: str, data: bytes) -> None:
    """Give a small local file other bytes: for copies and notes only, never for what counts."""
    path = local.root / key
    try:
        path.unlink(missing_ok=True)
    except OSError as exc:
        raise from_os_error(exc, local.name, str(path), "replace a file") from exc
    with contextlib.suppress(AlreadyExistsError):  # another process was as quick with the same
        local.put(key, data)


def _is_copy(local: LocalTier, key: str, data: bytes) -> bool:
    try:
        return local.get(key, RECORD_BYTES_MAX) == data
    except (AbsentError, CorruptError):
        return False


def newest(states: Mapping[str, Commit | Expired | None]) -> Commit | None:
    """Return the commit with the greatest sequence."""
    commits = [state for state in states.values() if isinstance(state, Commit)]
    return max(commits, key=lambda commit: commit.sequence, default=None)


def parallel(work: Callable[[T], R], items: list[T]) -> list[R]:
    """Apply `work` to every item, several at once; raise the first error."""
    if len(items) < 2:  # noqa: PLR2004 - one needs no pool
        return [work(item) for item in items]
    with ThreadPoolExecutor(_READ_THREADS, "dcp-tiered-catalog") as pool:
        return list(pool.map(work, items))


def _with_key(tier: str, key: str, decode: Callable[[], T]) -> T:
    """Decode something and name the object in what is raised."""
    try:
        return decode()
    except (CorruptError, InvalidError) as exc:
        raise type(exc)(exc.message, tier, key, exc.hint) from exc
