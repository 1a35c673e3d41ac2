"""DCP's write items into a shard file, and what DCP planned into columns."""

import dataclasses
import functools
import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem

from dcp_tiered.engines import shard_sink, tensors
from dcp_tiered.engines.device import TensorBytes
from dcp_tiered.engines.shard_sink import ShardSink
from dcp_tiered.errors import InvalidError, ResidencyError
from dcp_tiered.format.boxes import BYTES, TENSOR
from dcp_tiered.format.entries import COLUMNS, Entries
from dcp_tiered.format.shardfile import dtype_code
from dcp_tiered.policy.agreement import disagreement

_UNSAFE_HINT = (
    "Save plain data or tensors, allow its class with torch.serialization.add_safe_globals, or pass"
    " trust_bytes=True to TieredWriter and TieredReader if you trust the storage."
)


class Said(NamedTuple):
    """What a rank's plan tells the coordinator beside its items."""

    checkpoint_id: str
    policy_sha256: str | None
    """Of the residency policy that the rank was given."""
    node: str
    """The id of its local tier."""


def in_order(items: Sequence[WriteItem]) -> list[tuple[WriteItem, int | None]]:
    """Return items in the order in which they are written, with their bytes.

    Large tensors come first, small ones are packed behind them, opaque bytes come last: how many
    they are is not known before they are there, so it is None.
    """
    lengths = [_bytes_of(item) for item in items]
    order = sorted(range(len(items)), key=lengths.__getitem__, reverse=True)
    return [(items[at], lengths[at] if lengths[at] >= 0 else None) for at in order]


def bytes_of(items: Sequence[WriteItem]) -> int:
    """Return the bytes of items as far as they are known before they are resolved."""
    return sum(max(0, _bytes_of(item)) for item in items)


def saying(plan: SavePlan, said: Said) -> SavePlan:
    """Return a rank's plan with something to tell the coordinator."""
    return dataclasses.replace(plan, storage_data=said)


def said_by(plans: Sequence[SavePlan], checkpoint_id: str) -> dict[int, Said]:
    """Return what ranks say, as far as their plans tell.

    With plan caching, plans come empty or are those of an earlier save; what a shard file's result
    says is compared in any case, before anything is published.
    """
    said = {rank: plan.storage_data for rank, plan in enumerate(plans)}
    return {
        rank: one
        for rank, one in said.items()
        if isinstance(one, Said) and one.checkpoint_id == checkpoint_id
    }


def require_one_policy(policies: Mapping[int, str | None]) -> None:
    """Refuse a save whose ranks are held to different residency policies.

    Raises:
        ResidencyError: They are.
    """
    found = disagreement(policies)
    if found is not None:
        raise ResidencyError(
            f"ranks have different residency policies: {found}",
            None,
            None,
            "Give the same residency= on all ranks; nothing was published.",
        )


def require_one_tier(
    nodes: Mapping[int, str], world_size: int, local_world_size: int | None
) -> None:
    """Refuse a save of one machine whose ranks have different local tiers.

    The flusher of each would take what the other has for what is left of a save that died.

    Args:
        nodes: The id of its local tier by rank.
        world_size: Of the job.
        local_world_size: Ranks on this machine, None where no launcher says so.

    Raises:
        InvalidError: They do.
    """
    if local_world_size != world_size or len(set(nodes.values())) < 2:  # noqa: PLR2004 - one is one
        return
    one = min(nodes)
    other = next(rank for rank in sorted(nodes) if nodes[rank] != nodes[one])
    raise InvalidError(
        f"rank {other} has another local tier than rank {one}, and all {world_size} ranks are on"
        f" this machine (LOCAL_WORLD_SIZE={local_world_size})",
        "local",
        None,
        "Give all ranks of a machine the same local=, such as one RAID 0 of its disks; or set"
        " LOCAL_RANK=0 and LOCAL_WORLD_SIZE=1 before each writer is made, and each tier is a node"
        " of its own. Nothing was published.",
    )


def _bytes_of(item: WriteItem) -> int:
    described = item.tensor_data
    if described is None:
        return -1
    return described.chunk.sizes.numel() * described.properties.dtype.itemsize


def write(
    sink: ShardSink, item: WriteItem, length: int | None, planner: SavePlanner, *, trust_bytes: bool
) -> None:
    """Resolve an item, write its bytes, and let go of them.

    Args:
        sink: The shard file.
        item: Of DCP's plan.
        length: Its bytes, None where they are not known.
        planner: DCP's.
        trust_bytes: Write objects that `torch.load(weights_only=True)` refuses.

    Raises:
        InvalidError: It cannot be stored, or is not what the plan says.
    """
    data, described, fqn = planner.resolve_data(item), item.tensor_data, item.index.fqn
    if described is not None and length and length < shard_sink.GATHERED_BYTES_MAX:
        chunk, dtype = described.chunk, described.properties.dtype
        sizes = chunk.sizes
        raw = tensors.small_bytes(data, dtype, sizes, length)
        if raw is not None:
            name = tensors.dtype_name(dtype)
            sink.add_small((fqn, name, raw, chunk.offsets, sizes, described.size))
            return
    if isinstance(data, io.BytesIO):
        tensors.warn_of_size(fqn, data)
        if not trust_bytes:
            tensors.check_loadable(fqn, data, _UNSAFE_HINT)
        sink.add(data.getbuffer(), fqn=fqn, dtype=None)
    elif described is None:
        raise InvalidError("the plan describes a tensor without its size", None, fqn)
    else:
        _write_tensor(sink, fqn, data, described)


def _write_tensor(
    sink: ShardSink, fqn: str, data: torch.Tensor, described: TensorWriteData
) -> None:
    """Write a tensor of any size and kind."""
    sizes = tuple(described.chunk.sizes)
    plain = tensors.plain_tensor(fqn, data)
    if tuple(plain.shape) != sizes or plain.dtype != described.properties.dtype:
        raise InvalidError(
            f"tensor is {plain.dtype} of shape {tuple(plain.shape)} where the plan says"
            f" {described.properties.dtype} of shape {sizes}",
            None,
            fqn,
            "The state changed between planning and writing: do not step while a save runs.",
        )
    flat = tensors.flat_bytes(plain)
    sink.add(
        memoryview(flat.numpy().data) if flat.is_cpu else TensorBytes(flat),
        fqn=fqn,
        dtype=tensors.dtype_name(plain.dtype),
        offsets=tuple(described.chunk.offsets),
        sizes=sizes,
        shape=tuple(described.size),
    )


def planned(metadata: Metadata) -> Entries:
    """Return what DCP planned; the places of the chunks are not known yet."""
    columns: dict[str, list[int]] = {name: [] for name in COLUMNS}
    kind, dtype, grads, ndim, shape, counts, boxes, _, _ = columns.values()
    for described in metadata.state_dict_metadata.values():
        if isinstance(described, BytesStorageMetadata):
            kind.append(BYTES)
            for column in (dtype, grads, ndim):
                column.append(0)
            counts.append(1)
            continue
        kind.append(TENSOR)
        dtype.append(_dtype_code(described.properties.dtype))
        grads.append(described.properties.requires_grad)
        ndim.append(len(described.size))
        shape += described.size
        counts.append(len(described.chunks))
        for chunk in described.chunks:
            boxes += chunk.offsets
            boxes += chunk.sizes
    columns["shard"] = columns["row"] = [0] * sum(counts)
    return Entries.from_lists(list(metadata.state_dict_metadata), **columns)


@functools.cache
def _dtype_code(dtype: torch.dtype) -> int:
    return dtype_code(tensors.dtype_name(dtype))
