"""The training example on several processes, under each mapping."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

import axonym as axn
from axonym.sharding import fail_together
from tests.processes import faults

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # where a script finds the modules beside it

from examples import train_lm

STEPS = 3
SMALL = (
    "--layers 2 --embed 16 --mlp 16 --kv-heads 2 --group 1 --head-size 8 --batch 8 --length 16 --warmup 1 "
    "--learning-rate 0.02 --evaluate-every 3 --evaluate-batches 1 --save-every 2 --sample-length 4 --held-out 0.2"
).split()
MIXTURE = ("--experts", "4")


def text(folder: Path) -> Path:
    """Make text to learn from."""
    path = folder / "text.txt"
    path.write_text(" ".join(str(n) for n in range(2000)))
    return path


def train(folder: Path, *more: str, pictures: bool = False) -> list[float]:
    """Train in the folder's `run` on all devices, without pictures, which are slow, and return the losses."""
    out = folder / "run"
    arguments = ["--out", str(out), "--simulated-devices", str(jax.local_device_count())]
    if "--resume" not in more:
        arguments += [*SMALL, "--data", str(folder.parent / "text.txt"), "--steps", str(STEPS)]
    nothing = {} if pictures else dict.fromkeys(("save_placement", "save_curve"), lambda *args: None)
    with mock.patch.multiple(train_lm.pictures, **nothing) if nothing else contextlib.nullcontext():
        assert train_lm.main([*arguments, *more]) == 0
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row] + [row["held_out_loss"] for row in rows if "loss" not in row]


def train_in_one_process(folder: Path) -> None:
    """Make runs, whose losses several processes should reproduce; they resume one of them from its first step."""
    text(folder)
    for name, *more in (("one", "--save-every", "1", "--keep", "9"), ("mixture", *MIXTURE)):
        (folder / name).mkdir()
        losses = train(folder / name, "--mapping", "data", "--samples", "0", *more)
        (folder / f"{name}.json").write_text(json.dumps(losses))


def assert_losses(folder: Path, found: list[float], of: str = "one") -> None:
    expected = json.loads((folder.parent / f"{of}.json").read_text())
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    if jax.process_index() == 0:  # which deletes old checkpoints
        kept = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
        assert kept == ["step-000002", "step-000003"]


def check_fsdp_and_tensor(folder: Path) -> None:
    export = folder / "model.safetensors"
    found = train(folder, "--mapping", "fsdp+tensor", "--samples", "0", "--export", str(export), pictures=True)
    assert_losses(folder, found)
    assert export.exists() and (folder / "run" / "loss.png").exists() and (folder / "run" / "placement.png").exists()


def go_on(folder: Path, mapping: str, *options: str, samples: int = 0) -> None:
    """Resume the run of one process from its first step, under a mapping: compiling the start takes long."""
    with fail_together("copy"):
        if jax.process_index() == 0:
            one, run = folder.parent / "one" / "run", folder / "run"
            shutil.copytree(one / "checkpoints" / "step-000001", run / "checkpoints" / "step-000001")
            for name in ("config.json", "metrics.jsonl"):
                shutil.copy(one / name, run)
    more = ["--samples", str(samples), "--save-every", "2", "--keep", "2", *options]
    assert_losses(folder, train(folder, "--resume", "--mapping", mapping, *more))


def check_data(folder: Path) -> None:
    go_on(folder, "data", samples=2)
    assert (folder / "run" / "samples.txt").read_text().count("def ") == 2


def check_sequence(folder: Path) -> None:
    go_on(folder, "sequence")


def check_context(folder: Path) -> None:
    go_on(folder, "context")


def check_pipeline(folder: Path) -> None:
    go_on(folder, "pipeline", "--microbatches", "2")


def check_pipeline_and_fsdp(folder: Path) -> None:
    go_on(folder, "pipeline+fsdp", "--microbatches", "2")


def check_plan(folder: Path) -> None:
    """All processes find the same plan; a run that began under another mapping continues under a plan."""
    go_on(folder, "plan", "--explain")
    plan = (folder / "run" / "plan.json").read_text()
    assert (folder / "run" / "checkpoints" / "step-000003" / "plan.json").read_text() == plan
    explanation = (folder / "run" / "explanation.md").read_text()
    mesh = ", ".join(f"{name}={size}" for name, size in json.loads(plan)["mesh"].items())
    assert f"train on the mesh {mesh} (cpu, by='compiled')" in explanation


def check_expert(folder: Path) -> None:
    assert_losses(folder, train(folder, "--mapping", "expert", "--samples", "0", *MIXTURE), of="mixture")


def check_files_of_the_example(folder: Path) -> None:
    """Exports, pictures, samples and losses: if one process fails, all raise the error, or none does."""
    rank, path = jax.process_index(), folder / "model.safetensors"

    def broken(*args: Any, error: Exception | None = None, **kwargs: Any) -> None:
        raise error or OSError(errno.ENOSPC, "No space left on device")

    for at in range(jax.process_count()):
        model = faults.spread()
        axes = train_lm.steps.model_config(train_lm.settings.ModelSizes())
        export = functools.partial(train_lm.checkpoints.export, model, path, axes)
        own_names = mock.patch.object(train_lm.checkpoints, "layout", lambda model: None)  # which is no Llama
        with own_names, mock.patch.object(Path, "mkdir", broken) if rank == at else contextlib.nullcontext():
            text = faults.raises_everywhere(train_lm.Problem, at, export)
        assert text.startswith("The model could not be written to ") and "the disk is full" in text
        if rank == at:
            model["w1"].array.delete()
        with own_names:
            faults.raises_everywhere(RuntimeError, at, export)
        kept = train_lm.checkpoints.Checkpoints(folder / ("gone" if rank == at else ""), keep=1)
        text = faults.raises_everywhere(train_lm.Problem, at, functools.partial(kept.save, faults.spread(), 1, 8))
        assert "step-000001 could not be written, because the folder was deleted" in text
    assert not any(folder.iterdir())
    training = object.__new__(train_lm.Training)
    training.failed = set()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for _ in range(2):
            training.try_to("draw", broken)
    assert said.getvalue() == ("" if rank else "train_lm.py: Could not draw, because the disk is full.\n")
    bug = functools.partial(broken, error=ZeroDivisionError("by 0"))
    faults.raises_everywhere(ZeroDivisionError, 0, lambda: training.try_to("draw", bug))


def check_bytes_of_the_text(folder: Path) -> None:
    """For a step, each process reads only the texts of its devices."""
    data, read = train_lm.data, 0

    class Mapped:
        def __init__(self, path: Path, size: int):
            self.bytes = mapped(path, size)

        def __getitem__(self, places: Any) -> np.ndarray:
            nonlocal read
            read += self.bytes[places].nbytes
            return self.bytes[places]

    Batch, Pos = axn.make_axes(batch=8, pos=16)
    corpus, mapped = data.read(str(folder.parent / "text.txt"), 0.2, Batch, Pos), data._mapped
    texts = data.Texts(corpus.train, Pos.size, seed=0)
    sharding = jax.NamedSharding(axn.make_mesh({"data": 8}), jax.P("data"))
    with mock.patch.object(data, "_mapped", Mapped):
        tokens = texts.batch(5, Batch, Pos, sharding)
    assert read == Batch.size * Pos.size // jax.process_count()
    expected = [texts.text[np.arange(16) + texts.start_of(5 + i)] for i in range(8)]
    np.testing.assert_array_equal(axn.to_host(tokens).array, expected)


def check_hosts_that_differ(folder: Path) -> None:
    """In code, down to a constant, in a mapping, or in a text: each ends with one line, before anything is computed."""
    rank, steps = jax.process_index(), train_lm.steps
    own = folder / str(rank)  # hosts have files of their own under the same names
    own.mkdir()
    shuffled = mock.patch.object(train_lm.data.Texts, "order", rank)
    for name in ("the step", "mapping", "texts", "order"):
        mapping = {"batch": "data"} | ({"mlp": None} if rank and name == "mapping" else {})
        (own / "mapping.json").write_text(json.dumps({"mesh": {"data": -1}, "mapping": mapping}))
        (own / "text.txt").write_text("0123456789" * 300 + str(rank if name == "texts" else 0))
        arguments = ["--out", str(folder / "run"), "--simulated-devices", str(jax.local_device_count()), *SMALL]
        arguments += ["--data", "text.txt", "--mapping", "mapping.json", "--steps", str(STEPS)]
        constant = functools.partial(steps.optax.adamw, eps=1e-7 * (1 + rank))
        changed = mock.patch.object(steps.optax, "adamw", constant) if name == "the step" else contextlib.nullcontext()
        changed = shuffled if name == "order" else changed
        with changed, contextlib.chdir(own), contextlib.redirect_stderr(io.StringIO()) as said:
            assert train_lm.main(arguments) == 1
        said_of = "texts" if name == "order" else name
        expected = f"train_lm.py: The start: {said_of} must be the same in every process, but differ: process 0: "
        assert said.getvalue().startswith(expected) and said.getvalue().count("\n") == 1, said.getvalue()
        assert "; process 1: " in said.getvalue()
        assert not list((folder / "run").glob("checkpoints/*"))
