"""The one place where settings become objects."""

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dcp_tiered import config
from dcp_tiered.config import Limits, Settings
from dcp_tiered.engines.arena import Arena
from dcp_tiered.engines.choose import choose, host_engine
from dcp_tiered.errors import InvalidError, ResidencyError
from dcp_tiered.format import layout
from dcp_tiered.format.residency import Fact, Observed, Verdict
from dcp_tiered.interfaces import DurableTier, Engine, LocalTier
from dcp_tiered.policy import residency_schema
from dcp_tiered.policy.residency import READING, Decision, Policy, Rule, decide
from dcp_tiered.run_url import parse_url
from dcp_tiered.services import launcher, run_directory
from dcp_tiered.services.catalog import Catalog
from dcp_tiered.services.flusher import Flusher
from dcp_tiered.services.incidents import KeyJournal, KeyNotes
from dcp_tiered.services.lock import FlusherLock
from dcp_tiered.services.no_policy import NoPolicy, RegionKept
from dcp_tiered.services.outgoing import Outgoing, never
from dcp_tiered.services.packs import PackStore
from dcp_tiered.services.residency import Guard, PolicyCheck
from dcp_tiered.services.residency_note import (
    known_policies,
    note_policy,
    noted_policy,
    read_note,
)
from dcp_tiered.services.resident_tier import (
    ReadFromResident,
    RemoveFromResident,
    ResidentTier,
)
from dcp_tiered.tiers.azure import AzurePlace
from dcp_tiered.tiers.fsspec_store import FsspecPlace
from dcp_tiered.tiers.gcs import GcsPlace
from dcp_tiered.tiers.host_pins import HostPin, azure_account, bare, google_endpoint
from dcp_tiered.tiers.mount_residency import MountLook
from dcp_tiered.tiers.mounted import MountedTier, stripes_for
from dcp_tiered.tiers.object_store import ObjectStoreTier
from dcp_tiered.tiers.posix import PosixTier
from dcp_tiered.tiers.s3 import PART_BYTES_WORTH, S3Tier
from dcp_tiered.tiers.s3_pins import Pin, compatible_endpoint, configured_region

_BUFFER_BYTES = 2 << 20
_BUFFERS = 12
"""Three are written while one is filled, others wait in the cache of the processor: 24 MiB, however
large the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The objects behind one run on this node."""

    settings: Settings
    local: PosixTier | None
    durable: DurableTier | None
    catalog: Catalog
    keeper: launcher.Keeper | launcher.External | None
    """None for a run that has nothing to flush from or to."""
    policy: Policy | None

    def node(self) -> str:
        """Return this local root's node id; note the run and the node on first use."""
        local = self.need_local()
        node = run_directory.open_node(local, secrets.token_hex(6))
        url = self.settings.url
        target = f"tiered::{url.root}" if url.protocol else url.root
        run_directory.remember_run(local, target, self.settings.public_options())
        return node

    def note_policy(self) -> None:
        """Keep the policy with the run on this node, when all ranks have agreed on it."""
        if self.policy is not None:
            note_policy(self.need_local(), self.policy)

    def policy_sha256(self) -> str | None:
        """Return the hash of the residency policy, None when the run has none."""
        return None if self.policy is None else self.policy.sha256

    def need_local(self) -> PosixTier:
        """Return the local tier.

        Raises:
            InvalidError: There is none.
        """
        if self.local is None:
            raise InvalidError(
                "no local tier is configured",
                "local",
                None,
                "Pass local='/path/on/nvme', or set FSSPEC_TIERED_LOCAL.",
            )
        return self.local

    def keep_flusher(self) -> None:
        """Start a flusher for this run on this node unless one runs already."""
        if self.keeper is not None:
            self.keeper.keep()

    def close(self) -> None:
        """Give connections back."""
        if self.keeper is not None:
            self.keeper.close()
        if self.durable is not None:
            self.durable.close()


def build(settings: Settings) -> Stack:
    """Build the tiers of a run. Nothing is contacted yet.

    Raises:
        InvalidError: The residency policy is none.
        ResidencyError: It has no rule for such a durable tier.
    """
    local = None
    if settings.local is not None:
        run_path = settings.local / layout.run_directory(settings.url.root)
        local = PosixTier(run_path, settings.local, "local")
    durable, policy = durable_tier(settings), policy_of(settings)
    return Stack(
        settings=settings,
        local=local,
        durable=durable,
        catalog=Catalog(local, durable),
        keeper=_keeper(settings, local) if local and durable else None,
        policy=policy,
    )


def build_reading(settings: Settings) -> Stack:
    """Build the tiers of a run that is only read; nothing is contacted yet.

    Raises:
        InvalidError: The residency policy is none.
        ResidencyError: It has no rule for such a durable tier.
    """
    return _in_place(build(settings), ReadFromResident)


def build_removing(settings: Settings) -> Stack:
    """Build the tiers of a run of which something is removed; see `build_reading`."""
    return _in_place(build(settings), RemoveFromResident)


def _in_place(built: Stack, wrapper: type[ReadFromResident]) -> Stack:
    """Hold a run's durable tier to the place that its policy wants, whoever else reads there.

    What is taken out of a bucket need not wait until that is private.
    """
    if built.policy is None or built.durable is None:
        return built
    asked = built.durable
    check = PolicyCheck(built.policy, _look_at_place(asked), required=READING)
    checked = wrapper(asked, check)
    return replace(built, durable=checked, catalog=Catalog(built.local, checked))


def _keeper(settings: Settings, local: PosixTier) -> launcher.Keeper | launcher.External:
    if settings.flusher == "external":
        return launcher.External(FlusherLock(local.root), local.base)
    order = launcher.Order(
        run_path=str(local.root),
        base_path=str(local.base),
        url=f"tiered::{settings.url.root}",
        options=dict(settings.options),
        limits=settings.limits,
        residency=_plain(policy_of(settings)),
        compression=settings.compression,
    )
    order.to_json()  # an option that cannot be handed over is an error now, not in the first save
    local_rank, _ = config.launch_environment()
    return launcher.Keeper(
        FlusherLock(local.root),
        order,
        may_take_over=local_rank in (None, 0),
        environment=config.child_environment(),
    )


def write_arena() -> Arena:
    """Return the buffers of a writer; none is made before it is used."""
    return Arena(_BUFFER_BYTES, _BUFFERS)


def engine(settings: Settings, directory: Path, arena: Arena) -> Engine:
    """Build what writes to the local tier.

    Raises:
        InvalidError: The engine was asked for by name and does not work there.
    """
    return choose(settings.engine, directory, arena)


def durable_tier(settings: Settings, limits: Limits | None = None) -> DurableTier | None:
    """Build the durable tier of a run, with other bounds if wanted; None when it is local only."""
    url, bounds = settings.url, limits or settings.limits
    policy = policy_of(settings)
    if url.protocol == "s3":
        return S3Tier(
            url.path,
            settings.options,
            request_timeout_s=bounds.request_timeout_s,
            request_retry_s=bounds.request_retry_s,
            part_bytes=max(bounds.part_bytes, PART_BYTES_WORTH),
            connections_max=bounds.connections_max,
            pin=None if policy is None else _pin(policy, settings),
        )
    if url.protocol == "file":
        if policy is not None and not any(rule.provider == "posix" for rule in policy.allow):
            raise _no_rule(settings, "posix")
        root, stripe = Path(url.path), settings.options.get("lustre_stripe", True)
        stripes = stripes_for(bounds.pack_bytes_target) if stripe else 0
        return MountedTier(root, root.parent, _mount_engine, stripes)
    if url.protocol is None:
        return None
    return _object_store(settings, bounds, policy)


def _object_store(settings: Settings, bounds: Limits, policy: Policy | None) -> ObjectStoreTier:
    bucket, _, prefix = settings.url.path.partition("/")
    options, timeout_s = settings.options, bounds.request_timeout_s
    place: GcsPlace | AzurePlace | FsspecPlace
    protocol = str(settings.url.protocol)
    if protocol == "gs":
        google = None if policy is None else _google_pin(policy, settings)
        place = GcsPlace(bucket, options, timeout_s, bounds.connections_max, google)
    elif protocol == "az":
        azure = None if policy is None else _azure_pin(policy, settings)
        place = AzurePlace(bucket, options, timeout_s, azure)
    elif policy is not None:
        raise ResidencyError(
            f"no residency policy can allow {protocol}: fsspec does not say where a bucket is",
            "durable",
            settings.url.root,
            "Use S3, Google, Azure or a mount, or leave the policy out; see docs/residency.md.",
        )
    else:
        place = FsspecPlace(protocol, bucket, options, timeout_s, bounds.part_bytes)
    return ObjectStoreTier(
        place,
        prefix,
        request_retry_s=bounds.request_retry_s,
        part_bytes=bounds.part_bytes,
        connections_max=bounds.connections_max,
    )


def _mount_engine(directory: Path) -> Engine:
    return host_engine(directory, write_arena())


def outgoing(
    order: launcher.Order, due: Callable[[], float] = never, sent: dict[str, int] | None = None
) -> Outgoing:
    """Build the durable tier that an order's flusher writes to; see `Outgoing`."""
    durable = durable_tier(_settings_of(order))
    if durable is None:
        raise InvalidError("the run has no durable tier to flush to", "durable", order.url)
    return Outgoing(durable, order.limits.bytes_per_second_max, due, sent)


def flusher(
    order: launcher.Order,
    lock: FlusherLock,
    stopped: launcher.Stopped,
    out: Outgoing | None = None,
    residency: Guard | None = None,
) -> Flusher:
    """Build the flusher that an order asks for, with a durable tier of its own or one given.

    Args:
        order: Which run, with which options.
        lock: Of the run, held.
        stopped: Tells when to end.
        out: Where to; None: a tier of its own.
        residency: Of the flusher before this one in this process; None: it looks by itself.
    """
    local = local_of(order)
    residency = residency or _guard(_settings_of(order), local, KeyJournal)
    out = out or outgoing(order)
    for checkpoint_id in local.list_directories():
        local.sweep(checkpoint_id)
    node = run_directory.open_node(local, secrets.token_hex(6))
    return Flusher(
        local,
        ResidentTier(out, residency),
        node,
        order.limits,
        lambda: stopped() or lock.asked_to_hand_over(),
        residency,
        order.compression,
        out.due,
    )


@contextmanager
def write_through(run: Stack) -> Iterator[PackStore]:
    """Give the durable tier for a shard file that has no room on this node.

    What may leave this node is held to the same as in a flusher.
    """
    local, durable = run.need_local(), run.durable
    assert durable is not None, "config refuses to write through to nothing"
    guard = _guard(_as_noted(run.settings, local), local, KeyNotes)
    with run_directory.uploading(local):
        yield PackStore(local, ResidentTier(durable, guard))


def is_outdated(order: launcher.Order) -> Callable[[], bool]:
    """Return what tells whether another policy was noted with the run since now."""
    local = local_of(order)
    before = noted_policy(local)
    return lambda: noted_policy(local) not in (None, before)


def renewed(order: launcher.Order) -> launcher.Order:
    """Return an order with the policy that was noted last, which no starter may know of yet."""
    return replace(order, residency=noted_policy(local_of(order)) or order.residency)


def local_of(order: launcher.Order) -> PosixTier:
    """Return the run's directory of an order."""
    return PosixTier(Path(order.run_path), Path(order.base_path), "local")


def policy_of(settings: Settings) -> Policy | None:
    """Return a run's residency policy, None when it has none.

    Raises:
        InvalidError: It is no policy.
    """
    return None if settings.residency is None else residency_schema.parse(settings.residency)


def look(url: str, options: Mapping[str, Mapping[str, Any]]) -> Decision:
    """Look at a run's durable tier and hold it to the policy in its options.

    Raises:
        InvalidError: The run is local only, or the policy is none.
        ResidencyError: The policy has no rule for such a durable tier.
    """
    run = config.settings(url, options=options)
    policy, durable = policy_of(run), durable_tier(run)
    if policy is None or durable is None:
        raise InvalidError("the run has no durable tier, or no policy is given", None, run.url.root)
    try:
        return decide(policy, _look_at(durable)(), policy.attestations, datetime.now(UTC))
    finally:
        durable.close()


def _guard(run: Settings, local: LocalTier, journal: type[KeyJournal] | type[KeyNotes]) -> Guard:
    """Build what is asked before anything is written; it has a tier of its own to ask with."""
    policy, durable = policy_of(run), durable_tier(run)
    assert durable is not None
    if policy is not None:
        notes = journal(local, durable.url)
        return PolicyCheck(policy, _look_at(durable), notes, known_policies(local))
    if isinstance(durable, S3Tier):
        return RegionKept(local, durable.region, durable.look_public)
    if isinstance(durable, ObjectStoreTier):
        return NoPolicy(durable.look_public)
    return NoPolicy(_public_mount(_look_at(durable)))


def _public_mount(look: Callable[[], Observed]) -> Callable[[], Fact | None]:
    def public() -> Fact | None:
        facts = (fact for fact in look().facts if fact.name == "not_public")
        return next((fact for fact in facts if fact.verdict is Verdict.DENY), None)

    return public


def _look_at(durable: DurableTier) -> Callable[[], Observed]:
    if isinstance(durable, MountedTier):
        return MountLook(durable.base)
    assert isinstance(durable, S3Tier | ObjectStoreTier)
    return durable.observe


def _look_at_place(durable: DurableTier) -> Callable[[], Observed]:
    if isinstance(durable, S3Tier | ObjectStoreTier):
        return durable.observe_place
    return _look_at(durable)


def _pin(policy: Policy, settings: Settings) -> Pin:
    """Return where requests may go: what the rule says that fits the run's endpoint and region."""
    endpoint = compatible_endpoint(settings.options)
    providers = ("aws",) if endpoint is None else ("r2", "s3compat")
    rules = [
        rule for rule in policy.allow if rule.provider in providers and rule.endpoint == endpoint
    ]
    if not rules:
        raise _no_rule(settings, endpoint or "aws")
    region = configured_region(settings.options)
    rule = next((one for one in rules if region in one.regions), rules[0])
    others = [one for one in policy.allow if one.provider == rule.provider and one.owner]
    return Pin(
        regions=rule.regions,
        partition=rule.partition,
        owner=rule.owner,
        endpoint=rule.endpoint,
        jurisdiction=rule.jurisdiction,
        replica_accounts=tuple(sorted({one.owner for one in others if one.owner})),
        replica_regions=tuple(sorted({region for one in others for region in one.regions})),
    )


def _google_pin(policy: Policy, settings: Settings) -> HostPin:
    """Return where requests to Google may go: the endpoint given, else the only one allowed."""
    given = bare(str(settings.options.get("endpoint_url") or ""))
    allowed = {
        endpoint: HostPin(endpoint=endpoint, place=place, owner=str(rule.owner))
        for rule in policy.allow
        if rule.provider == "gcs"
        for endpoint, place in _google_endpoints(rule)
    }
    if not allowed:
        raise _no_rule(settings, "gs")
    if settings.options.get("endpoint_url"):
        if given not in allowed:
            raise _no_rule(settings, given)
        return allowed[given]
    if len(allowed) > 1:
        raise ResidencyError(
            f"residency policy allows {len(allowed)} endpoints of Google, and none is given",
            "durable",
            settings.url.root,
            f"Pass that of the bucket's location, such as gs={{'endpoint_url': {min(allowed)!r}}}.",
        )
    return next(iter(allowed.values()))


def _google_endpoints(rule: Rule) -> list[tuple[str, str]]:
    """Return the endpoints that a rule allows, each with its name in facts."""
    if rule.endpoint is not None:
        return [(rule.endpoint, rule.endpoint)]
    return [(google_endpoint(location), rule.place(location)) for location in rule.locations]


def _azure_pin(policy: Policy, settings: Settings) -> HostPin:
    """Return where requests to Azure may go: to the account's own host, or a rule's endpoint."""
    account, endpoint = azure_account(settings.options)
    own = azure_account({"account_name": account})[1]
    fitting = [
        rule
        for rule in policy.allow
        if rule.provider == "azure"
        and rule.account in (None, account)
        and endpoint == (rule.endpoint or own)
    ]
    if not fitting:
        raise _no_rule(settings, f"az at {endpoint}")
    rule = max(fitting, key=lambda one: one.account is not None)
    return HostPin(endpoint=endpoint, place=endpoint, owner=str(rule.owner))


def _no_rule(settings: Settings, what: str) -> ResidencyError:
    return ResidencyError(
        f"residency policy has no rule for {what}",
        "durable",
        settings.url.root,
        "Add one if that place is meant; see docs/residency.md.",
    )


def _settings_of(order: launcher.Order) -> Settings:
    """Return an order's settings."""
    run = config.settings(order.url, options=_by_protocol(order), limits=order.limits)
    return _as_noted(replace(run, residency=order.residency), local_of(order))


def _as_noted(run: Settings, local: LocalTier) -> Settings:
    """Return settings with the policy that was noted on this node where they bring none."""
    policy = run.residency or read_note(local).get("policy")
    return replace(run, residency=policy)


def _plain(policy: Policy | None) -> dict[str, Any] | None:
    return None if policy is None else dict(policy.plain)


def _by_protocol(order: launcher.Order) -> dict[str, dict[str, object]]:
    protocol = parse_url(order.url).protocol
    return {protocol: order.options} if protocol else {}
