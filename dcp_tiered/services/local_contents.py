"""What the local tier holds of each checkpoint: how much, whether it is durable, what may go."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from dcp_tiered.errors import CorruptError, TieredError, from_os_error
from dcp_tiered.format import layout
from dcp_tiered.format.records import Commit
from dcp_tiered.format.superseded import Superseded
from dcp_tiered.interfaces import LocalTier
from dcp_tiered.services import run_directory, shard_headers, superseded_notes
from dcp_tiered.services.catalog import Catalog, Published
from dcp_tiered.services.local_changes import LocalChanges

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One checkpoint directory as it was looked at."""

    attempt: str
    sequence: int
    bytes_all: int
    durable: bool
    waits: str | None
    """The attempt that a flusher works on, empty where its manifest lies on another node."""
    evictable: tuple[tuple[str, int], ...]
    """Names and bytes that may go if the id is durable or superseded, in the order in which they
    go."""
    node: str = ""
    """The one that published it."""
    launch: str = ""
    given_up: bool = False
    """Its flush is given up on this node; unless it still waits, for good."""
    keep: bool = False
    of_several: bool = False
    """Other nodes saved a part of it."""
    bytes_saved: int = 0
    """What its save took or would have taken here, had it not written through."""

    def bytes_evictable(self) -> int:
        """Return what an eviction frees, now or, for what still waits, once it is durable."""
        ended = self.durable or (self.given_up and self.waits is None)
        return sum(size for _, size in self.evictable) if ended else self.bytes_all


@dataclass(kw_only=True)
class _Ended:
    """The attempts of an id whose flush is given up."""

    attempts: set[str] = field(default_factory=set)
    shards: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    """Those that nobody can commit any more."""
    dead_shards: set[str] = field(default_factory=set)
    last: Superseded | None = None

    @property
    def launch(self) -> str:
        """Return what published the newest."""
        return "" if self.last is None else self.last.launch

    def add(self, attempt: str, shards: set[str], *, dead: bool) -> None:
        """Take note of one."""
        self.attempts.add(attempt)
        self.shards |= shards
        if dead:
            self.dead.add(attempt)
            self.dead_shards |= shards


class LocalContents:
    """The checkpoint directories of one run on this node, each looked at when it has changed."""

    def __init__(self, catalog: Catalog, local: LocalTier) -> None:
        self._catalog = catalog
        self._local = local
        self._changes = LocalChanges(local)
        self._found: dict[str, Found] = {}

    def forget(self, checkpoint_id: str) -> None:
        """Look at a directory again although its time may be the same after a change of ours."""
        self._found.pop(checkpoint_id, None)

    def look(self) -> dict[str, Found]:
        """Return what is there now, by id."""
        ids = self._catalog.local_ids()
        for gone in self._found.keys() - set(ids):
            del self._found[gone]
        for checkpoint_id in ids:
            if checkpoint_id in self._found and self._changes.is_unchanged(checkpoint_id):
                continue
            mark = self._changes.mark(checkpoint_id)
            self._found[checkpoint_id] = self._find(checkpoint_id)
            self._changes.remember(checkpoint_id, mark)
        return self._found

    def _find(self, checkpoint_id: str) -> Found:
        files = self._files(checkpoint_id)
        bytes_all = sum(found.st_size for found in files.values())
        try:
            return self._classify(checkpoint_id, files, bytes_all)
        except TieredError as exc:
            # Whatever cannot be read is nothing that may go, and nothing to wait for.
            _log.warning("counting %s as it lies there: %s", checkpoint_id, exc)
            return Found(
                attempt="",
                sequence=0,
                bytes_all=bytes_all,
                durable=False,
                waits=None,
                evictable=(),
                bytes_saved=bytes_all,
            )

    def _classify(
        self, checkpoint_id: str, files: dict[str, os.stat_result], bytes_all: int
    ) -> Found:
        published = self._catalog.published(checkpoint_id)
        # What was removed from the durable tier may go from here as it might before.
        commit = self._catalog.noted(checkpoint_id) or self._catalog.noted_expired(checkpoint_id)
        placed = self._catalog.noted_shards(checkpoint_id)
        ended = self._ended(checkpoint_id, published, commit)
        attempt, sequence, durable, waits = "", 0, commit is not None, None
        named = placed | ended.shards
        if published is not None:
            head = published.head
            attempt, sequence, waits = head.attempt, head.sequence, head.attempt
            mine = {shard.name for shard in head.shards}
            # An attempt that lost against the one that was committed stays here, all of it.
            durable = commit is not None and mine <= placed
            named |= mine
        elif commit is None and ended.last is not None:
            attempt, sequence = ended.last.attempt, ended.last.sequence
        if commit is not None and durable:
            attempt, sequence, waits = commit.attempt, commit.sequence, None
        given_up = not durable and attempt in ended.attempts
        if given_up and attempt in ended.dead:
            waits = None
        if strays := self._strays(checkpoint_id, files, named, placed):
            durable, given_up, waits = False, False, waits or ""
            sequence = max(sequence, *(files[name].st_mtime_ns for name in strays))
        going = _going(files, placed | ended.dead_shards)
        nodes = {shard.node for shard in published.head.shards} if published is not None else set()
        return Found(
            attempt=attempt,
            sequence=sequence,
            bytes_all=bytes_all,
            durable=durable,
            waits=waits,
            evictable=tuple((name, files[name].st_size) for name in going),
            node=published.head.node if published is not None else "",
            launch=published.head.launch if published is not None else ended.launch,
            given_up=given_up,
            keep=layout.KEEP_NAME in files,
            of_several=len(nodes) > 1,
            bytes_saved=bytes_all + self._passed_by(published, files),
        )

    def _passed_by(self, published: Published | None, files: Mapping[str, os.stat_result]) -> int:
        """Return the bytes of this node's shard files that are not here."""
        if published is None:
            return 0
        try:
            node = run_directory.node_of(self._local)
        except CorruptError:
            return 0
        shards = (one for one in published.head.shards if one.node == node)
        return sum(shard.length for shard in shards if shard.name not in files)

    def _ended(
        self, checkpoint_id: str, published: Published | None, commit: Commit | None
    ) -> "_Ended":
        """Return what was given up of an id, by notes and by copies of fences."""
        ended = _Ended()
        for note in superseded_notes.read(self._local, checkpoint_id):
            dead = note.alone or self._catalog.is_noted_dead(checkpoint_id, note.attempt)
            ended.add(note.attempt, set(note.shards), dead=dead)
            ended.last = note
        if published is None or (commit is not None and commit.attempt == published.head.attempt):
            return ended
        head = published.head
        if self._catalog.is_noted_dead(checkpoint_id, head.attempt):
            ended.add(head.attempt, {shard.name for shard in head.shards}, dead=True)
        return ended

    def _strays(
        self,
        checkpoint_id: str,
        files: dict[str, os.stat_result],
        named: set[str],
        placed: set[str],
    ) -> list[str]:
        """Return shard files of a save whose manifest another node has, and no commit yet.

        Older ones than what was committed last are of a save that was cut off; so are those of a
        job that ran on this node alone.
        """
        last = max((files[name].st_mtime_ns for name in placed & files.keys()), default=0)
        found = [
            name
            for name in files
            if layout.shard_rank(name) is not None
            and name not in named
            and files[name].st_mtime_ns >= last
        ]
        return found if found and self._is_of_many_nodes(checkpoint_id, found[0]) else []

    def _is_of_many_nodes(self, checkpoint_id: str, name: str) -> bool:
        header = shard_headers.header(self._local, checkpoint_id, name)
        return not shard_headers.is_of_one_node(header)

    def _files(self, checkpoint_id: str) -> dict[str, os.stat_result]:
        path = self._local.root / checkpoint_id
        try:
            with os.scandir(path) as entries:
                return {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
        except FileNotFoundError:
            return {}  # removed by hand meanwhile
        except OSError as exc:
            raise from_os_error(exc, "local", str(path), "count bytes") from exc


def _going(files: dict[str, os.stat_result], shards: set[str]) -> list[str]:
    """Return what an eviction removes, in its order: never a newer claim before an older one."""
    numbers = {name: number for name in files if (number := layout.published_number(name))}
    return [*sorted(numbers, key=numbers.__getitem__), *sorted(shards & files.keys())]
