"""A small run of the training script, which its tests share."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # where a script finds the modules beside it

from examples import train_lm

EXAMPLES = Path(train_lm.__file__).parent
Problem, Checkpoints = train_lm.Problem, train_lm.checkpoints.Checkpoints

SMALL = (
    "--layers 2 --embed 16 --mlp 16 --kv-heads 2 --group 1 --head-size 8 --batch 8 --length 16 --steps 6 --warmup 1 "
    "--learning-rate 0.02 --evaluate-every 3 --evaluate-batches 1 --save-every 2 --sample-length 6 --held-out 0.2"
).split()
STEPS = 6


def train(text: Path, out: Path, *more: Any) -> int:
    return train_lm.main([*SMALL, "--data", str(text), "--out", str(out), *map(str, more)])


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in rows(out) if "loss" in row]


def saved_steps(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())
