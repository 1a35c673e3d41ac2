"""Which checkpoint to load: every rank offers what it has on its node, one rank chooses for all.

An uncommitted checkpoint counts only where every rank reaches every shard file on its own node,
since DCP spreads replicated items over the files of all ranks. Whatever is not certain stops the
choice (I8): a store that cannot be asked is never taken for one that has nothing.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from dcp_tiered.errors import (
    AbsentError,
    IncompleteError,
    InvalidError,
    NoCheckpointError,
    TieredError,
    UnavailableError,
)
from dcp_tiered.format import layout
from dcp_tiered.format.manifest import Head
from dcp_tiered.format.records import Commit, Expired
from dcp_tiered.services.catalog import Catalog, LocalCopy, Published

_log = logging.getLogger(__name__)
_NAMED_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What one rank asks for and what it sees on its node."""

    requested: str | None
    copies: tuple[LocalCopy, ...] = ()
    unpublished: tuple[str, ...] = ()
    """Ids with shard files and no manifest: a save that goes on, or one that died."""
    error: TieredError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The checkpoint that all ranks load."""

    checkpoint_id: str
    attempt: str
    sequence: int
    sha256: str
    """Of the manifest."""
    commit: Commit | None
    """None when it lies on local tiers only."""
    manifest: bytes | None = field(default=None, repr=False)
    """Stored bytes, None when every rank has them on its node."""


def offer(catalog: Catalog, requested: object) -> Offer:
    """Return what this rank has to offer; an error is an offer too: no rank waits in vain."""
    wanted = None if requested is None else str(requested)[:200]
    try:
        if requested is not None:
            layout.check_checkpoint_id(requested)
        return _look(catalog, wanted)
    except Exception as exc:  # noqa: BLE001 - an error that stays here leaves the other ranks waiting
        return Offer(requested=wanted, error=_ours(exc, "look at the local tier"))


def choose(catalog: Catalog, offers: Sequence[Offer]) -> Choice | TieredError:
    """Choose from all ranks' offers and the durable tier; runs on one rank.

    Returns:
        The choice, or the error that all ranks raise.
    """
    try:
        return _choose(catalog, offers)
    except Exception as exc:  # noqa: BLE001 - an error that stays here leaves the other ranks waiting
        return _ours(exc, "choose a checkpoint")


def with_manifest(catalog: Catalog, choice: Choice) -> Choice:
    """Return a choice with the bytes of its manifest, from this node if it came without.

    What was on this node when it was chosen may have become durable and been evicted since then:
    the commit says where it is now.

    Raises:
        UnavailableError: It was removed, and is not committed.
    """
    data = choice.manifest or catalog.published_as(choice.checkpoint_id, choice.sha256)
    if data is not None:
        return replace(choice, manifest=data)
    commit = choice.commit
    if commit is None and catalog.durable is not None:
        state = catalog.state(choice.checkpoint_id)
        commit = state if isinstance(state, Commit) else None
    if commit is None or commit.manifest_sha256 != choice.sha256:
        raise UnavailableError(
            "the chosen manifest was removed from this node meanwhile",
            "local",
            choice.checkpoint_id,
            "Load again.",
        )
    return replace(choice, commit=commit, manifest=catalog.manifest_of(commit))


def _look(catalog: Catalog, wanted: str | None) -> Offer:
    copies, unpublished = [], []
    for checkpoint_id in catalog.local_ids():
        if wanted not in (None, checkpoint_id):
            continue
        try:
            published = catalog.published(checkpoint_id)
            copy = _copy(catalog, published) if published is not None else None
            if copy is not None and copy.noted is None and _is_noted_expired(catalog, copy):
                continue
        except TieredError as exc:
            # This copy is bad, and the durable tier may have another one.
            _log.error("ignoring a damaged local checkpoint: %s", exc)
            unpublished.append(checkpoint_id)
            continue
        if copy is not None:
            copies.append(copy)
        elif catalog.sealed(checkpoint_id):
            unpublished.append(checkpoint_id)
    return Offer(requested=wanted, copies=tuple(copies), unpublished=tuple(unpublished))


def _copy(catalog: Catalog, published: Published) -> LocalCopy:
    head = published.head
    noted = catalog.noted(head.checkpoint_id)
    return LocalCopy(
        checkpoint_id=head.checkpoint_id,
        attempt=head.attempt,
        sequence=head.sequence,
        supersedes=head.supersedes,
        sha256=published.sha256,
        missing=_missing(catalog, head),
        noted=noted if noted is not None and noted.attempt == head.attempt else None,
    )


def _is_noted_expired(catalog: Catalog, copy: LocalCopy) -> bool:
    withdrawn = catalog.noted_expired(copy.checkpoint_id)
    return withdrawn is not None and withdrawn.attempt == copy.attempt


def _missing(catalog: Catalog, head: Head) -> int:
    """Count the shard files of a checkpoint that are not on this node with their length."""
    if catalog.local is None:
        return len(head.shards)
    missing = 0
    for shard in head.shards:
        try:
            info = catalog.local.head(layout.key(head.checkpoint_id, shard.name))
        except AbsentError:
            missing += 1
        else:
            missing += info.length != shard.length
    return missing


def _choose(catalog: Catalog, offers: Sequence[Offer]) -> Choice:
    for one in offers:
        if one.error is not None:
            raise one.error
    requested = {one.requested for one in offers}
    if len(requested) > 1:
        raise InvalidError(
            f"ranks ask for different checkpoints: {', '.join(sorted(map(str, requested)))[:300]}",
            None,
            None,
            "Pass the same checkpoint_id on all ranks.",
        )
    (wanted,) = requested
    everywhere = _on_every_rank(offers)
    states, unknown = _durable_states(catalog, wanted)
    candidates = [
        candidate
        for checkpoint_id in {*states, *everywhere}
        if (
            candidate := _candidate(
                catalog, states.get(checkpoint_id), everywhere.get(checkpoint_id)
            )
        )
    ]
    if unknown is not None and (wanted is None or not candidates):
        raise type(unknown)(
            f"cannot tell which checkpoint is the newest: {unknown.message}"
            if wanted is None
            else unknown.message,
            unknown.tier,
            unknown.key,
            _unknown_hint(candidates, unknown),
            unknown.errno,
        ) from unknown
    if not candidates:
        raise _nothing(catalog, wanted, offers, states)
    chosen = max(candidates, key=lambda one: one.sequence)
    _explain(chosen, offers)
    if all(_has(one, chosen) for one in offers):
        return chosen
    if _has(offers[0], chosen) or chosen.commit is None:
        return with_manifest(catalog, chosen)
    return replace(chosen, manifest=catalog.manifest_of(chosen.commit))


def _on_every_rank(offers: Sequence[Offer]) -> dict[str, LocalCopy]:
    """Return the attempts of which every rank has every shard file on its node, by id."""
    found = {}
    for copy in offers[0].copies:
        same = [
            other
            for one in offers
            for other in one.copies
            if other.checkpoint_id == copy.checkpoint_id
        ]
        if len(same) == len(offers) and all(
            other.sha256 == copy.sha256 and not other.missing for other in same
        ):
            found[copy.checkpoint_id] = copy
    return found


def _durable_states(
    catalog: Catalog, wanted: str | None
) -> tuple[dict[str, Commit | Expired | None], TieredError | None]:
    """Return what the durable tier says, and the error when it cannot be asked."""
    if catalog.durable is None:
        return {}, None
    try:
        if wanted is None:
            return catalog.states(), None
        return {wanted: catalog.state(wanted)}, None
    except TieredError as exc:
        return {}, exc


def _candidate(
    catalog: Catalog, state: Commit | Expired | None, copy: LocalCopy | None
) -> Choice | None:
    """Return what an id can be loaded as.

    The commit counts, unless the copy on all nodes is a newer attempt that replaces it. Of an id
    that was removed, only an attempt that was saved since then counts.
    """
    if isinstance(state, Expired):
        if copy is None or catalog.is_expired(copy):
            return None
        state = None
    if copy is not None and (
        state is None or state.attempt == copy.attempt or state.attempt in copy.supersedes
    ):
        commit = state if state is not None and state.attempt == copy.attempt else copy.noted
        return Choice(
            checkpoint_id=copy.checkpoint_id,
            attempt=copy.attempt,
            sequence=copy.sequence,
            sha256=copy.sha256,
            commit=commit,
        )
    if state is None:
        return None
    return Choice(
        checkpoint_id=state.checkpoint_id,
        attempt=state.attempt,
        sequence=state.sequence,
        sha256=state.manifest_sha256,
        commit=state,
    )


def _has(one: Offer, chosen: Choice) -> bool:
    return any(
        copy.checkpoint_id == chosen.checkpoint_id and copy.sha256 == chosen.sha256
        for copy in one.copies
    )


def _explain(chosen: Choice, offers: Sequence[Offer]) -> None:
    """Say which newer checkpoints were passed over and why."""
    newer: dict[str, int] = {}
    for copy in (copy for one in offers for copy in one.copies):
        if copy.sequence > chosen.sequence:
            known = newer.get(copy.checkpoint_id, 0)
            newer[copy.checkpoint_id] = max(known, copy.missing)
    for checkpoint_id, missing in sorted(newer.items()):
        _log.warning(
            "passing over %s, which is newer than %s: it is not committed and not whole on every"
            " node (up to %d shard files missing)",
            checkpoint_id,
            chosen.checkpoint_id,
            missing,
        )


def _unknown_hint(candidates: Sequence[Choice], unknown: TieredError) -> str | None:
    if not candidates:
        return unknown.hint
    newest = max(candidates, key=lambda one: one.sequence).checkpoint_id
    return (
        f"{unknown.hint or ''} To go on without the store, ask for the newest one that is whole on"
        f" this job's nodes: checkpoint_id={newest!r}."
    ).strip()


def _nothing(
    catalog: Catalog,
    wanted: str | None,
    offers: Sequence[Offer],
    states: dict[str, Commit | Expired | None],
) -> TieredError:
    """Return the error for a load that finds nothing complete."""
    where = "local" if catalog.durable is None else "durable"
    expired = {name for name, state in states.items() if isinstance(state, Expired)}
    if wanted in expired:
        return AbsentError(
            f"checkpoint {wanted!r} was removed",
            where,
            wanted,
            "'dcp-tiered ls URL' lists what there is.",
        )
    partial = {copy.checkpoint_id for one in offers for copy in one.copies}
    partial |= {name for one in offers for name in one.unpublished}
    partial |= {name for name, state in states.items() if state is None and wanted is None}
    partial -= expired
    if wanted is not None and catalog.durable is not None and wanted not in partial:
        # Another node may be bringing it up: that is not the same as an id that nobody saved.
        partial |= {wanted for _ in islice(catalog.durable.list_keys(wanted), 1)}
    if partial:
        names = ", ".join(sorted(partial)[:_NAMED_MAX])
        return IncompleteError(
            f"only incomplete checkpoints were found: {names}",
            where,
            wanted,
            "Their missing parts lie on other nodes, or their save was cut off: 'dcp-tiered status"
            " LOCAL' on each node tells. To start over on purpose, catch IncompleteError.",
        )
    if expired:
        return IncompleteError(
            f"only removed checkpoints were found: {', '.join(sorted(expired)[:_NAMED_MAX])}",
            where,
            None,
            "Their newest one should be there: find out who removed it. To start over on purpose,"
            " catch IncompleteError.",
        )
    if wanted is not None:
        return AbsentError(
            f"no checkpoint {wanted!r}", where, wanted, "'dcp-tiered ls URL' lists what there is."
        )
    return NoCheckpointError(
        "the run has no checkpoint",
        where,
        None,
        "Start from scratch if this is a new run; otherwise check the URL and local=.",
    )


def _ours(exc: Exception, doing: str) -> TieredError:
    """Return an error that can travel to all ranks."""
    if isinstance(exc, TieredError):
        return exc
    _log.error("unexpected error", exc_info=exc)
    return TieredError(f"cannot {doing}: {type(exc).__name__}: {str(exc)[:500]}")
