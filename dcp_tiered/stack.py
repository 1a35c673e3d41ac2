"""The one place where settings become objects."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dcp_tiered import config
from dcp_tiered.config import Limits, Settings
from dcp_tiered.engines.arena import Arena
from dcp_tiered.engines.choose import choose, host_engine
from dcp_tiered.errors import InvalidError
from dcp_tiered.format import layout
from dcp_tiered.interfaces import DurableTier, Engine
from dcp_tiered.services import launcher, run_directory
from dcp_tiered.services.catalog import Catalog
from dcp_tiered.services.flusher import Flusher
from dcp_tiered.services.lock import FlusherLock
from dcp_tiered.services.outgoing import Outgoing, never
from dcp_tiered.tiers.mounted import MountedTier, stripes_for
from dcp_tiered.tiers.posix import PosixTier
from dcp_tiered.tiers.s3 import S3Tier

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
    keeper: launcher.Keeper | None
    """None for a run that has nothing to flush from or to."""

    def node(self) -> str:
        """Return this local root's node id; note the run and the node on first use."""
        local = self.need_local()
        node = run_directory.open_node(local, secrets.token_hex(6))
        url = self.settings.url
        target = f"tiered::{url.root}" if url.protocol else url.root
        run_directory.remember_run(local, target, self.settings.public_options())
        return node

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
        if self.durable is not None:
            self.durable.close()


def build(settings: Settings) -> Stack:
    """Build the tiers of a run. Nothing is contacted yet."""
    local = None
    if settings.local is not None:
        run_path = settings.local / layout.run_directory(settings.url.root)
        local = PosixTier(run_path, settings.local, "local")
    durable = durable_tier(settings)
    return Stack(
        settings=settings,
        local=local,
        durable=durable,
        catalog=Catalog(local, durable),
        keeper=_keeper(settings, local) if local and durable else None,
    )


def _keeper(settings: Settings, local: PosixTier) -> launcher.Keeper:
    order = launcher.Order(
        run_path=str(local.root),
        base_path=str(local.base),
        url=f"tiered::{settings.url.root}",
        options=dict(settings.options),
        limits=settings.limits,
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
    if url.protocol == "s3":
        return S3Tier(
            url.path,
            settings.options,
            request_timeout_s=bounds.request_timeout_s,
            request_retry_s=bounds.request_retry_s,
            part_bytes=bounds.part_bytes,
            connections_max=bounds.connections_max,
        )
    if url.protocol == "file":
        root, stripe = Path(url.path), settings.options.get("lustre_stripe", True)
        stripes = stripes_for(bounds.pack_bytes_target) if stripe else 0
        return MountedTier(root, root.parent, _mount_engine, stripes)
    return None


def _mount_engine(directory: Path) -> Engine:
    return host_engine(directory, write_arena())


def outgoing(
    order: launcher.Order, due: Callable[[], float] = never, sent: dict[str, int] | None = None
) -> Outgoing:
    """Build the durable tier that an order's flusher writes to; see `Outgoing`."""
    run = config.settings(order.url, options=_by_protocol(order), limits=order.limits)
    durable = durable_tier(run)
    if durable is None:
        raise InvalidError("the run has no durable tier to flush to", "durable", run.url.root)
    return Outgoing(durable, order.limits.bytes_per_second_max, due, sent)


def flusher(
    order: launcher.Order, lock: FlusherLock, stopped: launcher.Stopped, out: Outgoing | None = None
) -> Flusher:
    """Build the flusher that an order asks for, with a durable tier of its own or one given."""
    durable = out or outgoing(order)
    local = local_of(order)
    for checkpoint_id in local.list_directories():
        local.sweep(checkpoint_id)
    node = run_directory.open_node(local, secrets.token_hex(6))
    return Flusher(
        local, durable, node, order.limits, lambda: stopped() or lock.asked_to_hand_over()
    )


def local_of(order: launcher.Order) -> PosixTier:
    """Return the run's directory of an order."""
    return PosixTier(Path(order.run_path), Path(order.base_path), "local")


def _by_protocol(order: launcher.Order) -> dict[str, dict[str, object]]:
    protocol = config.parse_url(order.url).protocol
    return {protocol: order.options} if protocol else {}
