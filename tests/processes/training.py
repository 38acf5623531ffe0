"""The training example on several processes, under each mapping."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # where a script finds what is beside it

from examples import train_lm

STEPS = 3
SMALL = (
    "--layers 1 --embed 16 --mlp 16 --kv-heads 2 --group 1 --head-size 8 --batch 8 --length 16 --warmup 1 "
    "--learning-rate 0.02 --evaluate-every 3 --evaluate-batches 1 --save-every 2 --sample-length 4 --held-out 0.2"
).split()


def text(folder: Path) -> Path:
    """Make text to learn from."""
    path = folder / "text.txt"
    path.write_text(" ".join(str(n) for n in range(2000)))
    return path


def train(folder: Path, *more: str) -> list[float]:
    """Train with the devices that there are, and return the losses. Pictures take long: they come with samples."""
    devices = ["--simulated-devices", str(jax.local_device_count())]
    out = folder / "run"
    arguments = [*SMALL, "--data", str(folder.parent / "text.txt"), "--out", str(out), "--steps", str(STEPS), *devices]
    nothing = dict.fromkeys(("save_placement", "save_curve") if "--samples" in more else (), lambda *args: None)
    with mock.patch.multiple(train_lm.pictures, **nothing) if nothing else contextlib.nullcontext():
        assert train_lm.main([*arguments, *more]) == 0
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row] + [row["held_out_loss"] for row in rows if "loss" not in row]


def check(folder: Path, mapping: str, *more: str) -> None:
    expected = json.loads((folder.parent / "losses.json").read_text())
    np.testing.assert_allclose(train(folder, "--mapping", mapping, *more), expected, rtol=1e-4)
    assert sorted(path.name for path in (folder / "run" / "checkpoints").iterdir()) == ["step-000002", "step-000003"]


def check_fsdp_and_tensor(folder: Path) -> None:
    check(folder, "fsdp+tensor", "--samples", "0", "--export", str(folder / "model.safetensors"))
    assert (folder / "model.safetensors").exists()


def check_fsdp(folder: Path) -> None:
    check(folder, "fsdp")
    assert (folder / "run" / "samples.txt").read_text().count("def ") == 2


def check_data(folder: Path) -> None:
    check(folder, "data", "--samples", "0")


def check_tensor(folder: Path) -> None:
    check(folder, "tensor", "--samples", "0")


def check_sequence(folder: Path) -> None:
    check(folder, "sequence", "--samples", "0")
