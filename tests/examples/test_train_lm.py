"""The training script: a run from start to end, resumed runs, and its errors."""

from __future__ import annotations

import errno
import functools
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym import insight
from axonym.state import from_torch_compatible_state_dict, load_state_dict
from examples.models.layouts import layout
from tests.examples.runs import EXAMPLES, SMALL, STEPS, Checkpoints, Problem, losses, rows, saved_steps, train, train_lm
from tests.helpers import small_disk


def abstract_state() -> Any:
    """Return the training state, without values."""
    config, strategy = train_lm.settings.parse(SMALL), train_lm.strategies.choose("data", "auto", 2, 8)
    policy = train_lm.Policy.parse(config.precision)
    return train_lm.steps.make_functions(config.model, config.optimizer, policy, strategy).abstract


# --- mappings ---


def loss_and_gradients(mapping: str | None, experts: int) -> Any:
    """Return those of one of the script's models under a mapping, or on one device, without the rest of a run."""
    config, steps = train_lm.settings.parse([*SMALL, "--experts", str(experts)]), train_lm.steps
    strategy = train_lm.strategies.choose(mapping or "data", "auto", 2, 8, microbatches=2)
    policy, axes = train_lm.Policy.parse(config.precision), steps.model_config(config.model)
    rng = np.random.default_rng(0)
    tokens = axn.named(rng.integers(0, 256, (8, 16)), ("batch", "pos"))
    model = jax.eval_shape(functools.partial(steps.llama.Llama.init, axes), key=jax.random.key(0))
    model = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.2, x.dtype), model)
    schedule = None if mapping is None else strategy.schedule()
    step = jax.value_and_grad(functools.partial(steps.loss, policy=policy, schedule=schedule, penalties=True))
    if mapping is None:
        return jax.jit(step)(model, tokens)
    with jax.set_mesh(train_lm.strategies.make_mesh(strategy)):
        return jax.block_until_ready(steps.distributed(step, strategy)(model, tokens))


@pytest.mark.parametrize(
    ("experts", "mappings"),
    [(0, ["pipeline", "pipeline+fsdp", "context"]), (8, ["expert", "pipeline"])],
    ids=["dense", "mixture"],
)
def test_the_same_is_learned(experts: int, mappings: list[str]) -> None:
    expected = jax.tree.map(np.asarray, loss_and_gradients(None, experts))
    for mapping in mappings:
        found = jax.tree.map(np.asarray, loss_and_gradients(mapping, experts))
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4, err_msg=mapping), found, expected
        )


def test_muon_exchanges_whole_matrices() -> None:
    """The optimizer's own phase has all-to-alls, and no weight is all-gathered in it."""
    config = train_lm.settings.parse([*SMALL, "--optimizer", "muon"])
    strategy = train_lm.strategies.choose("fsdp", "auto", 2, 8)
    with jax.set_mesh(train_lm.strategies.make_mesh(strategy)):
        functions = train_lm.steps.make_functions(config.model, config.optimizer, train_lm.Policy(), strategy)
        tokens = train_lm.steps.abstract_tokens(*axn.make_axes(batch=8, pos=16))
        report = insight.explain(functions.train, functions.abstract, tokens, by="partitioner")
    kinds = {c.kind for c in report.chosen(phase="optimizer") if (c.total_sent or 0) > 100}
    assert kinds == {"all-to-all"}
    with pytest.raises(Problem, match="--optimizer must be one of adamw, muon, got 'sgd'"):
        train_lm.settings.parse(["--optimizer", "sgd"])


def test_warmup_by_default() -> None:
    """It follows from the steps, also of a run that goes on for fewer or more; what is asked for is kept."""
    parse, load = train_lm.settings.parse, train_lm.settings._filled
    found = [parse(["--steps", str(steps)]).optimizer for steps in (1, 3, 20, 30, 300, 3000)]
    assert [of.warmup_steps for of in found] == [0, 0, 2, 3, 30, 30]
    for steps in (1, 3):
        rate = train_lm.steps.make_optimizer(parse(["--steps", str(steps)]).optimizer)
        assert jax.tree.leaves(rate.init(axn.ones({"embed": 2})))
    chosen = parse(["--steps", "20", "--warmup", "5"])
    for config, expected in ((chosen, 5), (parse(["--steps", "20"]), 10)):
        loaded = load(train_lm.settings.Config(), train_lm.settings.as_json(config), [], "")
        assert parse(["--steps", "100"], loaded).optimizer.warmup_steps == expected


def test_experts_by_default() -> None:
    parse = train_lm.settings.parse
    assert parse(["--mapping", "expert"]).model.experts == 8 and parse([]).model.experts == 0
    assert [parse(["--mapping", "expert", "--experts", n]).model.experts for n in ("4", "0")] == [4, 0]


# --- runs ---


def test_learns_and_leaves_files(finished: Path) -> None:
    found = losses(finished)
    assert len(found) == STEPS and found[-1] < found[0] - 0.5
    assert [row["step"] for row in rows(finished) if "held_out_loss" in row] == [3, 6]
    assert saved_steps(finished) == ["step-000002", "step-000004", "step-000006"]
    for name in ("loss.png", "placement.png"):
        assert (finished / name).read_bytes().startswith(b"\x89PNG")
    assert (finished / "samples.txt").read_text().count("\ndef ") == 4


def test_output_without_a_terminal(finished: Path) -> None:
    printed = (finished / "printed.txt").read_text()
    assert printed.replace("\n", "").isprintable()
    assert re.search(r"^step 6/6  loss \d\.\d{3}  [\d,]+ tokens/s  0:00:00 left$", printed, flags=re.MULTILINE)
    assert re.search(r"^step 6: loss \d\.\d{3} on held-out text", printed, flags=re.MULTILINE)
    # A weight of 2 layers, 16 hidden features and 16 of the stream: 2048 bytes, an eighth on each device.
    placed = "layers=2 mlp=16→model embed=16→data +2.0 kB +256 bytes"
    assert re.search(r"blocks\.stacked\.mlp\.up_proj\.weight +" + placed, printed)
    assert "batch=8 over data=4, 2 on each" in printed


def test_export_is_the_model(finished: Path) -> None:
    state = abstract_state()
    entries = load_state_dict(finished / "llama.safetensors")
    loaded = from_torch_compatible_state_dict(state.model, entries, layout=layout(state.model))
    with jax.set_mesh(axn.make_mesh({"data": 4, "model": 2})):
        kept, step, seen = Checkpoints(finished / "checkpoints", 9).restore(
            finished / "checkpoints" / "step-000006", state, {"embed": "data"}, accepts=True
        )
    assert (step, seen) == (STEPS, STEPS * 8)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(kept.model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_resumes_exactly_on_another_mapping(finished: Path, text: Path, tmp_path: Path) -> None:
    """A run that was killed after step 5, the last checkpoint being that of step 4, goes on elsewhere."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "checkpoints" / "step-000006")
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:-2]) + '{"step": 6, "lo')
    more = ["--mapping", "data", "--samples", "0", "--steps", str(STEPS)]
    assert train_lm.main(["--resume", "--out", str(out), *more]) == 0
    assert [row["step"] for row in rows(out) if "loss" in row] == list(range(1, STEPS + 1))
    np.testing.assert_allclose(losses(out), losses(finished), rtol=1e-4)
    assert losses(out) != losses(finished)[:4] * 2


def test_interrupted_run_goes_on_as_if_it_had_not_been(
    finished: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The disk is full when the first checkpoint is due, and Ctrl-C comes a step later."""
    out, taken, write = tmp_path / "run", 0, train_lm.checkpoints.files.save_checkpoint_async

    def full_at_first(path: str, tree: Any) -> Any:
        if tree["step"] == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, tree)

    def note(self: Any, *args: Any) -> None:
        nonlocal taken
        noted(self, *args)
        taken += 1
        if taken == 3:
            signal.raise_signal(signal.SIGINT)

    noted = train_lm.Training.note
    monkeypatch.setattr(train_lm.checkpoints.files, "save_checkpoint_async", full_at_first)
    monkeypatch.setattr(train_lm.Training, "note", note)
    before = signal.getsignal(signal.SIGINT)
    assert train(text, out, "--mapping", "fsdp+tensor") == train_lm.INTERRUPTED
    assert signal.getsignal(signal.SIGINT) is before
    printed, said = capfd.readouterr()
    assert saved_steps(out) == ["step-000003"]
    assert "step-000002 could not be written, because the disk is full; there is none before it. Training goes" in said
    assert "Stopped at step 3, which is saved." in printed
    assert f"--resume --out {out}" in printed

    assert train_lm.main(["--resume", "--out", str(out)]) == 0
    assert losses(out) == losses(finished)
    # What is written at a step is the same, too.
    assert (finished / "samples.txt").read_text().endswith((out / "samples.txt").read_text())
    assert saved_steps(out) == ["step-000004", "step-000006"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Return a folder in a small file system, and for users that cannot mount one, how large a file may be."""
    with small_disk(tmp_path / "disk") as mounted:
        yield tmp_path / "disk", "-1" if mounted else "3000"


def test_killed_in_a_save(disk: tuple[Path, str], tmp_path: Path) -> None:
    """A process that is killed at the moment when a checkpoint is all but complete leaves the one before it whole.

    So does one that cannot write, and it says so in a line: here because its file system has 256 kB.
    """
    folder, largest = disk
    script = tmp_path / "killed.py"
    script.write_text(_KILLED)
    command = [sys.executable, script, EXAMPLES, folder, largest]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert largest != "-1" or process.stderr == ""
    (failed,) = process.stdout.splitlines()
    assert re.search(r"step-000002 could not be written, because .*; \S+step-000001 is complete\.$", failed)
    kept = Checkpoints(folder, keep=2)
    assert any("step-000002" in path.name for path in folder.iterdir())  # what was not finished
    assert kept.latest() == folder / "step-000001"
    kept.remove_unfinished()
    kept.save({"x": np.arange(4)}, 2, 16)
    assert sorted(path.name for path in folder.glob("step*")) == ["step-000001", "step-000002"]
    mesh = axn.make_mesh({"data": 8})
    with jax.set_mesh(mesh):
        template: dict[str, Any] = {"x": jax.ShapeDtypeStruct((4,), int)}
        state, step, seen = kept.restore(folder / "step-000001", template, {"x": None})
    assert (state["x"].tolist(), step, seen) == ([0, 0, 0, 0], 1, 8)


_KILLED = """
import os, resource, signal, sys
sys.path.insert(0, sys.argv[1])
import jax.numpy as jnp
import numpy as np
from pathlib import Path
from training.checkpoints import Checkpoints
from training.problems import Problem

kept = Checkpoints(Path(sys.argv[2]), keep=2)
kept.save({"x": jnp.zeros(4, int)}, 1, 8)

before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), before[1]))
many = {str(i): np.random.default_rng(i).normal(size=(64, 64)) for i in range(24)}
try:
    kept.save(many, 2, 16)
except Problem as e:
    print(e)
assert not list(Path(sys.argv[2]).glob("step-000002*"))
resource.setrlimit(resource.RLIMIT_FSIZE, before)

def kill(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("step-000002"):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
kept.save({"x": jnp.ones(4, int)}, 2, 16)
"""


def test_last_save_fails(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that cannot be written is a problem, and deletes nothing."""

    def full(path: str, tree: Any) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: Error writing local file\nand much more")

    kept = Checkpoints(tmp_path, keep=1)
    kept.save({"x": np.zeros(4)}, 1, 8)
    monkeypatch.setattr(train_lm.checkpoints.files, "save_checkpoint_async", full)
    with pytest.raises(
        Problem, match=r"step-000002 could not be written, because the disk is full; .*1 is complete\.$"
    ):
        kept.save({"x": np.ones(4)}, 2, 16)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_the_command_to_go_on_says_what_runs_where() -> None:
    flags = "--distributed --out x --coordinator node0:1234 --processes 2 --process-index 1 --elastic --host-timeout 5"
    training = object.__new__(train_lm.Training)
    training.config, training.files = train_lm.settings.parse(flags.split()), train_lm.runs.Run(Path("a run"), 2)
    words, command = training.how_to_go_on(" with more steps", " --steps 99").split("\n")
    assert words == "To go on with more steps, on each host with its own --process-index:"
    again = train_lm.settings.parse(shlex.split(command)[2:])
    assert again.resume and again.out == Path("a run") and again.hosts == training.config.hosts
    training.config = train_lm.settings.parse([])
    assert training.how_to_go_on().startswith("To go on:\n") and training.how_to_go_on().endswith("--out 'a run'")


def test_the_commands_of_the_page() -> None:
    """Also those in the manifest for Kubernetes, where a number comes from the environment."""
    page = re.sub(r"\s+(?=--)", " ", (EXAMPLES.parent / "docs" / "several_hosts.md").read_text())
    commands = re.findall(r"python examples/train_lm\.py (--[^\"\n]*)", page.replace("$JOB_COMPLETION_INDEX", "3"))
    hosts = [train_lm.settings.parse(shlex.split(command)).hosts for command in commands]
    assert all(one.distributed for one in hosts)
    assert [(one.coordinator, one.processes, one.process_index) for one in hosts] == [
        (None, None, None),
        ("host0:1234", 2, 0),
        ("train-0.train:1234", 4, 3),
        (None, None, None),
    ]


# --- what is wrong ---


def test_unknown_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        train_lm.main(["--step", "3"])
    printed, said = capsys.readouterr()
    assert stopped.value.code == 2 and "Unrecognized options: --step" in said and not printed


# --- parts ---


def test_every_text_is_seen_once_in_a_round() -> None:
    texts = train_lm.data.Texts(np.arange(1003, dtype=np.int64) % 256, 10, seed=1)
    rounds = [[texts.start_of(r * texts.per_round + i) for i in range(texts.per_round)] for r in range(2)]
    for starts in rounds:
        gaps = np.diff(sorted(starts))
        assert len(starts) == 99 and (gaps == 10).all() and 0 <= min(starts) and max(starts) + 10 <= 1003
    assert rounds[0] != rounds[1]


def test_each_device_gets_its_part() -> None:
    Batch, Pos = axn.make_axes(batch=8, pos=16)
    texts = train_lm.data.Texts(np.arange(2000, dtype=np.uint8), 16, seed=0)
    mesh = axn.make_mesh({"data": 4, "model": 2})
    sharding = jax.NamedSharding(mesh, jax.P("data", "model"))
    tokens = texts.batch(5, Batch, Pos, sharding)
    assert tokens.array.sharding == sharding
    expected = [texts.text[texts.start_of(5 + i) :][:16] for i in range(8)]
    np.testing.assert_array_equal(np.asarray(tokens.array), expected)


def test_cache_gives_what_the_whole_text_gives() -> None:
    """The logits after tokens that come bit by bit are those of all at once."""
    llama = train_lm.steps.llama
    rng = np.random.default_rng(0)
    model = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype) * 0.3, abstract_state().model)
    tokens = axn.named(rng.integers(0, 256, (2, 9)), ("batch", "pos"))
    extend = jax.jit(llama.Llama.extend)
    cache = model.empty_cache(axn.Axis("batch", 2), axn.Axis("key_pos", 9))
    expected = jax.jit(llama.Llama.__call__)(model, tokens)
    for start in (0, 3, 6):
        logits, cache = extend(model, tokens["pos", start : start + 3], cache)
        np.testing.assert_allclose(logits.array, expected["pos", start + 2].array, atol=1e-5)


def test_text_is_safe_to_print() -> None:
    assert train_lm.data.decode(np.array([97, 27, 91, 10, 9, 255, 0])) == "a\ufffd[\n \ufffd\ufffd"
