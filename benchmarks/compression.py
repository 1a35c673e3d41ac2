"""What does compressing packs save, and what does it cost?

Ours: bytes against those of their frames in a compressed pack (`compression="zstd"`), for normal
values of deviation 0.02 in bfloat16, in float32, and in float32 that was rounded to bfloat16, as
restored master weights are. Then the processor's time for making the frames, and for decoding them,
per GB of raw bytes: one thread, without the disk. No reference, and no time of waiting.
"""

import sys
import time
from collections.abc import Callable

import torch

from benchmarks import harness
from benchmarks.harness import GB, Answer, Options
from dcp_tiered.format.frames import FRAME_BYTES, decode_frame, encode_frame

_DEVIATION = 0.02
_TARGETS = {"bfloat16": 1.4, "float32": 1.15, "float32, rounded": 2.5}
_COST_S_PER_GB_MAX = 2.0
_CODECS = {torch.bfloat16: 1, torch.float32: 2}
_MAKERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bfloat16": lambda values: values.bfloat16(),
    "float32": lambda values: values,
    "float32, rounded": lambda values: values.bfloat16().float(),
}


def run(options: Options) -> list[Answer]:
    """Answer the question on top."""
    return [answer for name in _MAKERS for answer in _measure(options, name)]


def _measure(options: Options, name: str) -> list[Answer]:
    generator = torch.Generator().manual_seed(0)
    # One frame after the other is made and forgotten: the size of the state costs no memory.
    count = max(1, options.bytes // FRAME_BYTES)
    values = torch.empty(FRAME_BYTES // 2)
    seconds: dict[str, list[float]] = {"compress": [], "decompress": []}
    ratios = []
    for _ in range(options.pairs):
        stored_bytes, spent = 0, dict.fromkeys(seconds, 0.0)
        for _ in range(count):
            tensor = _MAKERS[name](values.normal_(0, _DEVIATION, generator=generator))
            raw = tensor.view(torch.uint8).numpy().tobytes()[:FRAME_BYTES]
            codec = _CODECS[tensor.dtype]
            begun = time.thread_time()
            stored = encode_frame(codec, raw)
            spent["compress"] += time.thread_time() - begun
            assert stored is not None, "nothing saved"
            back = bytearray(len(raw))
            begun = time.thread_time()
            decode_frame(codec, memoryview(stored), memoryview(back))
            spent["decompress"] += time.thread_time() - begun
            assert back == raw, "decoded to something else"
            stored_bytes += len(stored)
        ratios.append(count * FRAME_BYTES / stored_bytes)
        for what, second in spent.items():
            seconds[what].append(second / (count * FRAME_BYTES) * GB)
    size = count * FRAME_BYTES
    costs = [
        _answer(f"processor to {what}, {name}", "s/GB", size, each, _COST_S_PER_GB_MAX, "max")
        for what, each in seconds.items()
    ]
    return [_answer(f"raw / stored, {name}", "1", size, ratios, _TARGETS[name], "min"), *costs]


def _answer(
    metric: str, unit: str, size: int, seen: list[float], target: float, bound: str
) -> Answer:
    return Answer(
        benchmark="compression",
        goal="",
        metric=metric,
        unit=unit,
        bytes=size,
        seconds=0.0,
        reference_seconds=None,
        ratio=harness.median(seen),
        ratios=seen,
        stock=None,
        target=target,
        bound=bound,
    )


if __name__ == "__main__":
    sys.exit(harness.main({"compression": run}, __doc__))
