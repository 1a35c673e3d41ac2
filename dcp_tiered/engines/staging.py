"""Staging: one copy of the state into a reused, page-aligned, shared buffer, and training goes on.

The buffer is laid out like a shard file: large tensors on page borders, so that the direct engine
writes them from where they lie. Tensors that share memory are staged once. What is not a tensor is
deep-copied.
"""

import copy
import gc
import logging
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_tiered.engines.targets import flat_address
from dcp_tiered.errors import BackpressureError, InvalidError
from dcp_tiered.format.shardfile import place
from dcp_tiered.syscalls import copy_memory

_log = logging.getLogger(__name__)
_SHM = "/dev/shm"  # noqa: S108 - a mount point, not a temporary file
_SHM_SPARE_BYTES = 64 << 20
_COPY_THREADS_MAX = 4
_COPY_BYTES = 16 << 20
_LOOK_S = 0.01
_HOLDERS_MAX = 10_000
"""Objects to look through for whoever holds a state, before it is taken to be in use."""
_ASK_S = 1.0
"""After this long, and ever more rarely, ask whether the save still runs at all."""


class StagedState(dict[str, Any]):
    """A staged state dict. While it lives, the buffer behind its tensors is in use."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True)
class _Spot:
    """A tensor to stage and where it goes."""

    tensor: torch.Tensor
    start: int
    length: int


class StagingArena:
    """The staging buffer of one process; stages one state at a time.

    Args:
        wait_s: How long a state waits for the one before it to be saved.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._buffer: torch.Tensor | None = None
        self._unlock: Callable[[], object] | None = None
        """Ends the page lock of the buffer."""
        self._in_use: weakref.ref[StagedState] | None = None
        self.stalled_s = 0.0
        """Seconds that training has waited for an earlier save, all together."""
        self.staged_s = 0.0
        """Seconds that staging took otherwise."""

    @property
    def bytes_held(self) -> int:
        """Size of the buffer."""
        return 0 if self._buffer is None else self._buffer.numel()

    def prewarm(self, state_dict: Mapping[str, Any]) -> None:
        """Make and touch the buffer that `state_dict` will need, ahead of the first save."""
        self._reserve(*_plan(state_dict))

    def stage(self, state_dict: Mapping[str, Any]) -> StagedState:
        """Return a copy of a state dict that no later change of the state reaches.

        Raises:
            BackpressureError: The save before it did not end within `wait_s`.
            InvalidError: Something in it is no tensor and cannot be copied.
        """
        self._wait_until_free()
        begun = time.monotonic()
        spots, length = _plan(state_dict)
        buffer = self._reserve(spots, length)
        memo: dict[int, Any] = {}
        _copy(list(spots.values()), buffer)
        for tensor in _tensors(state_dict):
            memo[id(tensor)] = _staged(tensor, spots, buffer)
        try:
            staged = StagedState(copy.deepcopy(dict(state_dict), memo))
        except (TypeError, RuntimeError) as exc:
            raise InvalidError(
                f"the state holds something that cannot be copied: {exc}",
                None,
                None,
                "Take it out of the state, or pass a stager that knows it as"
                " dcp.async_save(async_stager=...).",
            ) from exc
        self._in_use = weakref.ref(staged)
        self.staged_s += time.monotonic() - begun
        return staged

    def close(self) -> None:
        """Let go of the buffer; a save that still uses it keeps it alive."""
        if self._unlock is not None:
            self._unlock()
        self._buffer = self._unlock = None

    def _wait_until_free(self) -> None:
        begun = time.monotonic()
        ask_at = begun + _ASK_S
        while self._in_use is not None and self._in_use() is not None:
            now = time.monotonic()
            if now > ask_at:
                if _is_abandoned(self._in_use):
                    # Whoever keeps the failed future may keep the memory, too.
                    self.close()
                    break
                ask_at = now + 2 * (now - begun)
            if now - begun > self._wait_s:
                raise BackpressureError(
                    f"the save before this one did not end within {self._wait_s:g} s",
                    "local",
                    None,
                    "Save less often, or wait for the future of dcp.async_save first.",
                )
            time.sleep(_LOOK_S)
        self.stalled_s += time.monotonic() - begun

    def _reserve(self, spots: dict[tuple[Any, ...], _Spot], length: int) -> torch.Tensor:
        if self._buffer is None or self._buffer.numel() < length:
            self.close()
            self._buffer = _new_buffer(length)
        on_cuda = any(spot.tensor.device.type == "cuda" for spot in spots.values())
        if on_cuda and self._unlock is None:
            self._unlock = _page_lock(self, self._buffer)
        return self._buffer


def _page_lock(owner: StagingArena, buffer: torch.Tensor) -> Callable[[], object]:
    """Lock a buffer, for copies at the speed of the bus; return what ends that.

    Memory that is unmapped while it is locked breaks later allocations of the driver, so the lock
    ends with `owner` at the latest; a save that reads the buffer after that does not need it.
    """
    cudart, where = torch.cuda.cudart(), buffer.data_ptr()
    code = int(cudart.cudaHostRegister(where, buffer.numel(), 0))
    if code:
        _log.warning(
            "cannot page-lock %d bytes, CUDA error %d: copies from the device are slower"
            " (look at 'ulimit -l')",
            buffer.numel(),
            code,
        )
        return lambda: None
    unlock = weakref.finalize(owner, cudart.cudaHostUnregister, where)
    unlock.atexit = False
    return unlock


def _is_abandoned(in_use: weakref.ref[StagedState]) -> bool:
    """Tell whether a state is only held by the traceback of a save that has failed.

    DCP tells a stager nothing about the end of a save. A failed future keeps its traceback, that
    the frames of the save, and those the staged state: memory that nobody is going to read.
    """
    running = set()
    for thread, frame in sys._current_frames().items():  # noqa: SLF001 - documented, for this
        here: FrameType | None = frame
        while here is not None and thread != threading.get_ident():
            running.add(id(here))
            here = here.f_back
    gc.collect()
    level: list[Any] = [in_use()]
    if level[0] is None:
        return True
    seen = {id(level), id(level[0]), id(sys._getframe())}  # noqa: SLF001
    while level and len(seen) < _HOLDERS_MAX:
        holders = [one for one in gc.get_referrers(*level) if id(one) not in seen]
        seen.update(map(id, holders))
        level = [one for one in holders if not isinstance(one, FrameType)]
        seen.add(id(level))
        if any(isinstance(one, ModuleType) or id(one) in running for one in holders):
            return False
        del holders
    return not level


def _new_buffer(length: int) -> torch.Tensor:
    """Return page-aligned bytes, shared so that DCP's saver process needs no copy, and touched."""
    length = max(length, 1)
    length += -length % (1 << 20)
    free = os.statvfs(_SHM).f_bavail * os.statvfs(_SHM).f_frsize if os.path.isdir(_SHM) else 0
    if free < length + _SHM_SPARE_BYTES:
        _log.warning(
            "staging %d bytes in private memory: %s has %d free (containers default to 64 MiB; give"
            " them --shm-size, which DCP's PROCESS mode needs)",
            length,
            _SHM,
            free,
        )
        buffer = torch.frombuffer(mmap.mmap(-1, length), dtype=torch.uint8)
    else:
        # What is not touched before it is shared takes no memory twice.
        buffer = torch.empty(length, dtype=torch.uint8).share_memory_()
    return buffer.zero_()


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Identify the values of a tensor: what has the same key is staged once."""
    return (
        tensor.device,
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.size()),
        tuple(tensor.stride()),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _tensors(state_dict: object) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested containers that can be staged; the rest is left to deepcopy."""
    todo: list[object] = [state_dict]
    while todo:
        value = todo.pop()
        if isinstance(value, Mapping):
            todo.extend(value.values())
        elif isinstance(value, list | tuple):
            todo.extend(value)
        elif isinstance(value, torch.Tensor) and _is_stageable(value):
            yield value


def _is_stageable(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, DTensor):
        return _is_stageable(tensor.to_local())
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and tensor.device.type != "meta"
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _plan(state_dict: Mapping[str, Any]) -> tuple[dict[tuple[Any, ...], _Spot], int]:
    """Place every distinct tensor in the buffer; return the spots and the bytes needed."""
    distinct = {
        _key(local): local for tensor in _tensors(state_dict) if (local := _local(tensor)).numel()
    }
    spots, cursor = {}, 0
    for key, tensor in sorted(
        distinct.items(), key=lambda pair: -pair[1].numel() * pair[1].element_size()
    ):
        length = tensor.numel() * tensor.element_size()
        start = place(cursor, length)
        spots[key] = _Spot(tensor, start, length)
        cursor = start + length
    return spots, cursor


def _view(spot: _Spot, buffer: torch.Tensor) -> torch.Tensor:
    flat = buffer[spot.start : spot.start + spot.length].view(spot.tensor.dtype)
    return flat.view(spot.tensor.size())


def _copy(spots: list[_Spot], buffer: torch.Tensor) -> None:
    """Copy every tensor into its place; complete when this returns."""
    flat, others = [], []
    for spot in spots:
        source = flat_address(spot.tensor, spot.tensor.dtype)
        if source is None:
            others.append(spot)
        else:
            flat.append((buffer.data_ptr() + spot.start, source, spot.length))
    with _side_streams({spot.tensor.device for spot in others}):
        for spot in others:
            _view(spot, buffer).copy_(spot.tensor, non_blocking=True)
        _copy_flat(flat)


def _copy_flat(moves: list[tuple[int, int, int]]) -> None:
    """Copy bytes: target address, source address, length.

    By as many threads as torch would use, up to a few, which fill the memory's bandwidth; torch's
    own spin when they are done, and cost more.
    """
    threads = min(_COPY_THREADS_MAX, torch.get_num_threads())
    if threads == 1:
        for move in moves:
            copy_memory(*move)
        return
    pieces = [
        (target + at, source + at, min(_COPY_BYTES, length - at))
        for target, source, length in moves
        for at in range(0, length, _COPY_BYTES)
    ]
    with ThreadPoolExecutor(threads, "dcp-tiered-stage") as pool:
        for done in [pool.submit(copy_memory, *piece) for piece in pieces]:
            done.result()


@contextmanager
def _side_streams(devices: set[torch.device]) -> Iterator[None]:
    """Queue copies of the block on streams of their own; wait for them at its end.

    They begin after what was queued on each device's current stream before, and do not wait for
    what training queues on other streams meanwhile.
    """
    streams = [torch.cuda.Stream(device) for device in devices if device.type == "cuda"]
    with ExitStack() as stack:
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            stack.enter_context(torch.cuda.stream(stream))
        yield
    for stream in streams:
        stream.synchronize()
    for device in devices:
        if device.type not in ("cpu", "cuda"):
            torch.accelerator.synchronize(device)


def _staged(
    tensor: torch.Tensor, spots: dict[tuple[Any, ...], _Spot], buffer: torch.Tensor
) -> torch.Tensor:
    """Return the staged counterpart of a tensor of the state."""
    local = _local(tensor)
    copied = (
        _view(spots[_key(local)], buffer)
        if local.numel()
        else torch.empty(local.size(), dtype=local.dtype)
    )
    if not isinstance(tensor, DTensor):
        return copied
    # A DTensor takes the storage offset of the tensor that it is made from, and then torch pickles
    # its empty storage instead of its parts and crashes. So it is made from one without an offset.
    staged = DTensor(torch.empty_like(copied), tensor._spec, requires_grad=False)  # noqa: SLF001
    staged._local_tensor = copied  # noqa: SLF001
    return staged
