"""All benchmarks, or those that are named: `python -m benchmarks [name ...]`."""

import sys

import benchmarks
from benchmarks import (
    compression,
    cpu_per_gb,
    flush_vs_clients,
    harness,
    load_vs_line_rate,
    many_tensors,
    memory,
    objects_per_checkpoint,
    save_vs_line_rate,
    stall_vs_copy,
    time_to_durable,
    trainer_interference,
)

ALL: dict[str, harness.Run] = {
    "save_vs_line_rate": save_vs_line_rate.run,
    "stall_vs_copy": stall_vs_copy.run,
    "cpu_per_gb": cpu_per_gb.run,
    "trainer_interference": trainer_interference.run,
    "many_tensors": many_tensors.run,
    "load_vs_line_rate": load_vs_line_rate.run,
    "memory": memory.run,
    "flush_vs_clients": flush_vs_clients.run,
    "time_to_durable": time_to_durable.run,
    "objects_per_checkpoint": objects_per_checkpoint.run,
    "compression": compression.run,
}

if __name__ == "__main__":
    sys.exit(harness.main(ALL, benchmarks.__doc__ or ""))
