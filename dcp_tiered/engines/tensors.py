"""Tensors as bytes: what can be stored, its row-major bytes, and back into a target."""

import ctypes
import io
import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcp_tiered.errors import InvalidError

_log = logging.getLogger(__name__)

_OBJECT_BYTES = 16 << 20
"""An opaque object larger than this is worth a warning."""


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


@cache
def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name.

    Raises:
        InvalidError: This torch does not have it.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidError(
            f"this torch {torch.__version__} has no dtype {name}",
            None,
            None,
            "Install a newer torch.",
        )
    return dtype


def check_item(item: WriteItem, dtypes: tuple[str, ...]) -> None:
    """Refuse an item of a plan that has no representation among `dtypes`.

    Raises:
        InvalidError: It cannot be stored; the key is in it.
    """
    fqn = item.index.fqn
    if not isinstance(fqn, str):
        raise InvalidError(
            f"key {fqn!r} is a {type(fqn).__name__}, not a string",
            None,
            repr(fqn),
            "Use string keys, or let the planner flatten the state dict, which makes them strings.",
        )
    if item.type is WriteItemType.BYTE_IO:
        return
    if item.tensor_data is None:
        raise InvalidError("the plan describes a tensor without its size", None, fqn)
    properties = item.tensor_data.properties
    if properties.layout is not torch.strided:
        raise InvalidError(
            f"a tensor of layout {properties.layout} cannot be stored",
            None,
            fqn,
            "Convert it first, for instance with .to_dense().",
        )
    if dtype_name(properties.dtype) not in dtypes:
        raise InvalidError(
            f"dtype {properties.dtype} cannot be stored",
            None,
            fqn,
            f"Use one of {', '.join(dtypes)}.",
        )


def check_loadable(fqn: str, data: io.BytesIO, hint: str) -> None:
    """Refuse an object that `torch.load(weights_only=True)` refuses; leaves `data` at its start.

    Raises:
        InvalidError: It is not plain data, a tensor, or of a class that the user allowed.
    """
    data.seek(0)
    try:
        torch.load(data, weights_only=True, map_location="cpu")
    except Exception as exc:
        # What torch says before that is general advice, in bold type.
        reason = " ".join(str(exc).rpartition("WeightsUnpickler error:")[2].split())[:300]
        raise InvalidError(f"object cannot be loaded safely: {reason}", None, fqn, hint) from exc
    finally:
        data.seek(0)


def warn_of_size(fqn: str, data: io.BytesIO) -> None:
    """Say that an object is large: usually it drags along a tensor of which it is a slice."""
    length = len(data.getbuffer())
    if length > _OBJECT_BYTES:
        _log.warning(
            "object %r takes %d bytes: a tensor inside an object is stored with its whole storage,"
            " so clone() a slice, or put tensors where the planner sees them",
            fqn,
            length,
        )


def plain_tensor(fqn: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return an ordinary strided tensor with the values of `tensor`; copies only if it must.

    A tensor on a CUDA device stays there, one on another accelerator is copied to the host.

    Raises:
        InvalidError: It has no values of its own that could be stored.
    """
    tensor = tensor.detach()
    wait = getattr(tensor, "wait", None)
    if type(tensor).__name__ == "AsyncCollectiveTensor" and callable(wait):
        tensor = wait()
    if type(tensor) is not torch.Tensor:
        # The second sign is torch's protocol for subclasses whose values lie in inner tensors.
        if _has_no_memory(tensor) or hasattr(tensor, "__tensor_flatten__"):
            raise InvalidError(
                f"tensor subclass {type(tensor).__name__} has no bytes of its own",
                None,
                fqn,
                "Save its inner tensors, for instance from a state_dict hook.",
            )
        tensor = tensor.as_subclass(torch.Tensor)
    if tensor.device.type == "meta":
        raise InvalidError(
            "tensor is on the meta device and has no values", None, fqn, "Materialise it first."
        )
    if tensor.is_quantized:
        raise InvalidError(
            "quantized tensors cannot be stored", None, fqn, "Save int_repr() instead."
        )
    if not _has_storage(tensor):
        raise InvalidError(
            "tensor has lost its memory", None, fqn, "Save it before its storage is freed."
        )
    if tensor.device.type not in ("cpu", "cuda"):
        tensor = tensor.cpu()
    return tensor.resolve_conj().resolve_neg()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the row-major bytes of a plain tensor; copies only what is not contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _has_storage(tensor: torch.Tensor) -> bool:
    """Tell whether a plain tensor lies inside its storage, which can be resized below it."""
    if not tensor.numel():
        return True
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= needed


def small_bytes(
    tensor: object, dtype: torch.dtype, sizes: Sequence[int], length: int
) -> bytes | None:
    """Return a copy of the row-major bytes of a small tensor if that takes no call but this one.

    Args:
        tensor: A tensor, or anything else.
        dtype: What its dtype has to be.
        sizes: What its shape has to be.
        length: Bytes that such a tensor takes, at least one.

    Returns:
        None for a tensor that is not what it has to be, or that `plain_tensor` has to see: a
        subclass, one that is not in host memory, not contiguous, or a view that negates or
        conjugates.
    """
    if (
        (type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter)
        and tensor.dtype is dtype
        and tensor.shape == sizes
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not (dtype.is_complex and tensor.is_conj())
    ):
        address = tensor.data_ptr()
        # Behind an offset, an address does not tell whether there is memory.
        if address and (not tensor.storage_offset() or _has_storage(tensor)):
            return ctypes.string_at(address, length)
    return None


def box_view(
    data: memoryview,
    dtype: torch.dtype,
    first: int,
    lengths: tuple[int, ...],
    sizes: tuple[int, ...],
) -> torch.Tensor:
    """Return a box of a row-major chunk as a tensor that shares memory with `data`.

    Args:
        data: Writable bytes of the chunk, from some element on.
        dtype: Of the elements.
        first: The box's first element, counted in elements from the start of `data`.
        lengths: Shape of the box.
        sizes: Shape of the chunk.
    """
    flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype)
    strides = [1] * len(sizes)
    for dim in reversed(range(len(sizes) - 1)):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return flat.as_strided(lengths, strides, first)


def _has_no_memory(tensor: torch.Tensor) -> bool:
    if not tensor.numel() or tensor.device.type == "meta":
        return False
    try:
        return not tensor.data_ptr()
    except RuntimeError:
        return True
