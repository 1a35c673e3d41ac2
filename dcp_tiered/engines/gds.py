"""KvikIO: large tensors go from device memory to the file, and past the host where GDS works.

One file holds both kinds: host memory, small device items and the last part of a page go through
another engine; the whole pages of a large device item are KvikIO's. Its futures hold no reference
to what they write, so this does, until each of them was waited for.
"""

import ctypes
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch

from dcp_tiered.engines.device import TensorBytes
from dcp_tiered.errors import InvalidError
from dcp_tiered.interfaces import DeviceBytes, Engine, Image
from dcp_tiered.syscalls import PAGE_BYTES

Backend = Literal["gds", "kvikio", "host"]
"""GPUDirect Storage; KvikIO's own page-locked buffers; the buffers of the host engine."""

_ITEM_BYTES_MIN = 1 << 20
_ITEMS_MAX = 4
"""Items on their way: what they are written from may be a copy in scarce device memory."""
_DEFAULTS = {
    "CUFILE_LOGFILE_PATH": os.devnull,  # else cufile.log lies in the working directory
    "CUFILE_LOGGING_LEVEL": "ERROR",
    "KVIKIO_NUM_THREADS": "8",  # else one
    "KVIKIO_BOUNCE_BUFFER_SIZE": str(4 << 20),  # page-locked, one per thread; as large as a request
}
_IS_PLAIN_ALLOCATION = 10
_DEFAULTS_LOCK = threading.Lock()


class GdsEngine:
    """Writes files from host memory by another engine, and from device memory by KvikIO.

    Args:
        host: Writes whatever KvikIO does not.
        name: For messages.
        backend_of: What writes the items of a device; asked when its first large item comes.
    """

    def __init__(
        self, host: Engine, name: str, backend_of: Callable[[torch.device], Backend]
    ) -> None:
        self.name = name
        self._host = host
        self._backend_of = backend_of

    @contextmanager
    def writing(self, fd: int, length_estimate: int) -> Iterator["GdsImage"]:
        """Write one file; see `Engine.writing`."""
        with self._host.writing(fd, length_estimate) as host:
            image = GdsImage(fd, host, self._backend_of)
            try:
                yield image
            finally:
                image.settle()


@dataclass(frozen=True, slots=True)
class _Request:
    """A write on its way, and what has to live until it is done."""

    future: Any
    data: TensorBytes
    length: int

    def wait(self) -> None:
        with os_errors():
            written = self.future.get()
        if written != self.length:
            raise OSError(errno.EIO, f"KvikIO wrote {written} of {self.length} bytes")


@dataclass(slots=True)
class _Rest:
    """What follows the whole pages of an item."""

    data: TensorBytes
    start: int
    nbytes: int

    def copy_to(self, start: int, buffer: memoryview) -> None:
        self.data.copy_to(self.start + start, buffer)


class GdsImage:
    """A file that grows from front to back."""

    def __init__(self, fd: int, host: Image, backend_of: Callable[[torch.device], Backend]) -> None:
        self._fd = fd
        self._host = host
        self._backend_of = backend_of
        self._files: dict[Backend, Any] = {}
        self._requests: deque[_Request] = deque()

    def append(self, start: int, data: memoryview | DeviceBytes) -> list[int]:
        """Write `data` at `start`; see `Image.append`."""
        if not isinstance(data, TensorBytes) or data.nbytes < _ITEM_BYTES_MIN or start % PAGE_BYTES:
            return self._host.append(start, data)
        backend = self._backend_of(data.flat.device)
        if backend == "host" or (backend == "gds" and not _is_plain_allocation(data)):
            return self._host.append(start, data)
        length = data.nbytes - data.nbytes % PAGE_BYTES
        self._submit(backend, start, data, length)
        crcs = data.crcs()  # while the bytes are on their way
        if length < data.nbytes:
            # The host engine leaves the hole before it as it is: it is far larger than a page.
            self._host.append(start + length, _Rest(data, length, data.nbytes - length))
        return crcs

    def finish(self, length: int) -> None:
        """Wait for everything; see `Image.finish`."""
        self._wait_for_all_but(0)
        self._host.finish(length)

    def settle(self) -> None:
        """Wait until nobody reads device memory for this file any more, whatever happened."""
        while self._requests:
            try:
                self._wait_for_all_but(0)
            except OSError:
                continue  # the first error is on its way to the caller already
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _submit(self, backend: Backend, start: int, data: TensorBytes, length: int) -> None:
        file = self._files.get(backend)
        if file is None:
            file = self._files[backend] = open_file(self._fd, backend)
        self._wait_for_all_but(_ITEMS_MAX - 1)
        data.synchronize()  # KvikIO knows its own stream and the default one, not the trainer's
        with os_errors():
            future = file.pwrite(data, size=length, file_offset=start)
        self._requests.append(_Request(future, data, length))

    def _wait_for_all_but(self, count: int) -> None:
        while len(self._requests) > count:
            self._requests.popleft().wait()


def open_file(fd: int, backend: Backend) -> Any:
    """Open the file behind a descriptor once more, for KvikIO.

    Raises:
        InvalidError: This process was forked from one that had loaded KvikIO.
        OSError: KvikIO cannot use the file.
    """
    library = load()
    if library.pid != os.getpid():
        raise InvalidError(
            "a forked process cannot use KvikIO: its threads stayed in the parent",
            "local",
            None,
            "Start processes that save CUDA tensors with 'spawn'.",
        )
    kvikio = library.kvikio
    mode = kvikio.CompatMode.OFF if backend == "gds" else kvikio.CompatMode.ON
    # The mode of a file is what the process has set while the file is opened. "w" would truncate.
    with _DEFAULTS_LOCK, os_errors(), kvikio.defaults.set("compat_mode", mode):
        return kvikio.CuFile(f"/proc/self/fd/{fd}", "r+")


@dataclass(frozen=True, slots=True)
class Library:
    """KvikIO, and the process that loaded it."""

    kvikio: Any
    pid: int


@cache
def load() -> Library:
    """Import KvikIO with defaults of ours, which hold for the whole process; the user's go first.

    Raises:
        ImportError: It is not installed, or one of its libraries is not.
    """
    for name, value in _DEFAULTS.items():
        # KvikIO refuses two names for the number of threads.
        if name != "KVIKIO_NUM_THREADS" or "KVIKIO_NTHREADS" not in os.environ:
            os.environ.setdefault(name, value)
    import kvikio
    import kvikio.defaults

    return Library(kvikio, os.getpid())


@contextmanager
def os_errors() -> Iterator[None]:
    """Turn KvikIO's errors into the operating system's: it has the text, but not the number.

    Raises:
        OSError: With the number, EIO where the text tells none.
    """
    try:
        yield
    except RuntimeError as exc:
        text = str(exc).strip()
        matches = [code for code in errno.errorcode if text.endswith(os.strerror(code))]
        code = max(matches, key=lambda code: len(os.strerror(code)), default=errno.EIO)
        raise OSError(code, f"{os.strerror(code)} (KvikIO: {text})") from exc


def _is_plain_allocation(data: TensorBytes) -> bool:
    """Tell whether memory is one allocation of its own, as cuFile needs it.

    With `expandable_segments` a tensor may span several mappings, of which the driver names one,
    and cuFile would read beyond it. The memory is asked, not the settings: those can change. What
    can be shared by a legacy IPC handle is what cudaMalloc made (CUDA driver API,
    CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE).
    """
    answer = ctypes.c_int(0)
    pointer = ctypes.c_uint64(data.__cuda_array_interface__["data"][0])
    driver = ctypes.CDLL("libcuda.so.1")
    failed = driver.cuPointerGetAttribute(ctypes.byref(answer), _IS_PLAIN_ALLOCATION, pointer)
    return not failed and bool(answer.value)
