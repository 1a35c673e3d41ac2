"""KvikIO's device path without a GPU: scenes that need the stub driver, each in its own process.

`python -m tests.support.on_stub SCENE DIRECTORY` with `libcuda.so.1` of `cuda_stub.c` on
LD_LIBRARY_PATH. Prints one line of JSON. What was written is looked at by the test.
"""

import ctypes
import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from dcp_tiered.engines import gds, gds_probe
from dcp_tiered.engines.arena import Arena
from dcp_tiered.engines.choose import choose
from dcp_tiered.engines.device import TensorBytes
from dcp_tiered.engines.gds import Backend, GdsEngine
from dcp_tiered.errors import InvalidError
from dcp_tiered.interfaces import Engine

MIB = 1 << 20
ITEMS = [
    # kind, start, length: host and device in turn, with and without a tail, with gaps and without
    ("host", 0, 1000),
    ("device", 4096, 3 * MIB),
    ("host", 4096 + 3 * MIB, 10),
    ("device", 4 * MIB, MIB + 1),
    ("device", 5 * MIB + 4096, 20 * MIB + 4095),
    ("device", 26 * MIB, 100_000),
    ("host", 27 * MIB, 2 * MIB + 7),
    ("device", 29 * MIB + 777, 2 * MIB),
    ("device", 40 * MIB, MIB),
]
LENGTH = 41 * MIB


def noise(number: int, length: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, length, dtype="u1")


class StubBytes(TensorBytes):
    """Host memory that the stub driver takes for a device's."""

    def __init__(self, data: np.ndarray, *, plain: bool = True) -> None:
        super().__init__(torch.from_numpy(data))
        where = ctypes.c_uint64(data.ctypes.data)
        ctypes.CDLL("libcuda.so.1").stub_declare(where, ctypes.c_size_t(len(data)), int(plain))

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        where = (self.flat.data_ptr(), False)
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": where, "version": 3}


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def engine(directory: Path, backend: Backend) -> Engine:
    host = choose("direct", directory, Arena(MIB, 4))
    return GdsEngine(host, backend, lambda _: backend)


def write_items(directory: Path, backend: Backend, *, plain: bool = True) -> dict[str, object]:
    """Write ITEMS into a nameless file, drop each at once, then give the file a name."""
    fd = os.open(directory, os.O_RDWR | os.O_TMPFILE, 0o600)
    crcs = []
    monitor = gds.load().kvikio.SummaryMonitor()
    with monitor, engine(directory, backend).writing(fd, LENGTH) as image:
        for number, (kind, start, length) in enumerate(ITEMS):
            data = noise(number, length)
            crcs.append(
                image.append(
                    start, memoryview(data) if kind == "host" else StubBytes(data, plain=plain)
                )
            )
        image.finish(LENGTH)
        posix = monitor.get().by_backend["POSIX"]["bytes_transferred"]
    links = os.open("/proc/self/fd", os.O_RDONLY)
    os.link(str(fd), directory / "image", src_dir_fd=links, follow_symlinks=True)
    copies = ctypes.CDLL("libcuda.so.1").stub_copies()
    compat = int(gds.load().kvikio.defaults.get("compat_mode"))
    left = names(Path())
    return {"crcs": crcs, "copies": copies, "cwd": left, "compat": compat, "posix": posix}


def mixed(directory: Path) -> dict[str, object]:
    return write_items(directory, "kvikio")


def not_plain(directory: Path) -> dict[str, object]:
    return write_items(directory, "gds", plain=False)


def full(directory: Path) -> dict[str, object]:
    """Write more than there is room for, with several requests on their way."""
    fd = os.open(directory / "image", os.O_RDWR | os.O_CREAT)
    codes = []
    for _ in range(3):
        try:
            with engine(directory, "kvikio").writing(fd, 0) as image:
                for number in range(4):
                    image.append(number * 8 * MIB, StubBytes(noise(number, 8 * MIB)))
                image.finish(32 * MIB)
        except OSError as exc:
            codes.append(errno.errorcode[exc.errno])
    return {"codes": codes, "files": len(names(Path("/proc/self/fd")))}


def cancelled(directory: Path) -> dict[str, object]:
    """Leave in the middle: whoever comes next may do anything to the memory."""
    fd = os.open(directory / "image", os.O_RDWR | os.O_CREAT)
    before = len(names(Path("/proc/self/fd")))
    for _ in range(2):
        try:
            with engine(directory, "kvikio").writing(fd, 0) as image:
                for number in range(2):
                    image.append(number * 40 * MIB, StubBytes(noise(number, 40 * MIB)))
                raise KeyError  # noqa: TRY301 - as a planner would
        except KeyError:
            continue
    return {"new_files": len(names(Path("/proc/self/fd"))) - before}


def forked(directory: Path) -> dict[str, object]:
    data = StubBytes(noise(0, MIB))
    fd = os.open(directory / "image", os.O_RDWR | os.O_CREAT)
    here = engine(directory, "kvikio")
    with here.writing(fd, 0) as image:
        image.append(0, data)
    child = os.fork()
    if not child:
        try:
            with here.writing(fd, 0) as image:
                image.append(0, data)
        except InvalidError as exc:
            os._exit(3 if "forked" in exc.message else 4)
        os._exit(0)
    return {"status": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}


def prove(directory: Path) -> dict[str, object]:
    """Run the step of the probe that needs no GPU."""
    data = StubBytes(noise(1, 4 * MIB + 777))
    return {"gds_bytes": gds_probe.prove(directory, "kvikio", data), "left": names(directory)}


SCENES: dict[str, Callable[[Path], dict[str, object]]] = {
    scene.__name__: scene for scene in (mixed, not_plain, full, cancelled, forked, prove)
}

if __name__ == "__main__":
    print(json.dumps(SCENES[sys.argv[1]](Path(sys.argv[2]))))
