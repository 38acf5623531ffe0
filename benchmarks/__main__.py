"""Print the measurements of all or some sections, and mark those over budget: `python -m benchmarks [section ...]`."""

from __future__ import annotations

import argparse
import platform
import sys

import jax

from . import (
    accelerator,
    calls,
    checkpoints,
    convolution,
    deep,
    draws,
    eager,
    fsdp,
    importing,
    inference,
    insight,
    llama,
    named_jit,
    names,
    optimizers,
    peers,
    program,
    published,
    rules,
    sampling,
    schedules,
    shard_map,
    stacked,
    tracing,
    transfer,
    transforms,
    uneven,
    weights,
)
from .harness import print_table

SECTIONS = {
    "calls": calls.rows,
    "eager": eager.rows,
    "names": names.rows,
    "tracing": tracing.rows,
    "program": program.rows,
    "llama": llama.rows,
    "named_jit": named_jit.rows,
    "rules": rules.rows,
    "fsdp": fsdp.rows,
    "shard_map": shard_map.rows,
    "uneven": uneven.rows,
    "transforms": transforms.rows,
    "convolution": convolution.rows,
    "stacked": stacked.rows,
    "deep": deep.rows,
    "sampling": sampling.rows,
    "draws": draws.rows,
    "weights": weights.rows,
    "transfer": transfer.rows,
    "schedules": schedules.rows,
    "optimizers": optimizers.rows,
    "checkpoints": checkpoints.rows,
    "insight": insight.rows,
    "inference": inference.rows,
    "published": published.rows,
    "import": importing.rows,
    "peers": peers.rows,
    "accelerator": accelerator.rows,
}
ON_REQUEST = "peers", "accelerator"
"""Sections that run when they are named."""


def main() -> int:
    jax.config.update("jax_num_cpu_devices", 8)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "sections",
        nargs="*",
        metavar="section",
        help=f"any of {', '.join(SECTIONS)}; by default all but {', '.join(ON_REQUEST)}",
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a row is over budget")
    args = parser.parse_args()
    unknown = [s for s in args.sections if s not in SECTIONS]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    print(f"jax {jax.__version__}, Python {platform.python_version()}, {jax.default_backend()}\n")
    sections = args.sections or [name for name in SECTIONS if name not in ON_REQUEST]
    rows = [row for name in sections for row in SECTIONS[name]()]
    print_table(rows)
    return int(args.strict and any(r.over for r in rows))


if __name__ == "__main__":
    sys.exit(main())
