"""What reports say of names, of arguments and of loops, compared with the program."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import axonym as axn
from axonym.insight import AvoidableWork, Collective, HeldArray, PlacedArgument, RepeatedWork, Report, explain
from tests.insight import cases

MESH = {"data": 4, "model": 2}


def trained(loss: Any) -> Any:
    def step(w: Any, *args: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(w, *args)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, w, gradients)

    return step


def exchanged(report: Report) -> set[tuple[Any, ...]]:
    return {(c.kind, c.axes, c.phase, c.named_axes, c.sent) for c in report.collectives}


def test_names_may_have_any_characters() -> None:
    left, right, batch = "features (left)", "features (right)", "number of [rows], all"
    step = trained(lambda w, x: axn.mean(axn.dot(x, w, axis=left) ** 2).scalar())
    args = jax.eval_shape(lambda: (axn.ones({left: 8, right: 12}), axn.ones({batch: 16, left: 8})))
    mapping = {batch: "data", right: "model"}
    early, true = (
        explain(step, *args, mapping=mapping, mesh=axn.make_mesh(MESH), by=by) for by in ("names", "partitioner")
    )
    assert exchanged(early) == exchanged(true) and early.axes == true.axes == (left, right, batch)
    (gradient,) = (c for c in true.collectives if c.phase == "backward")
    assert gradient.parameters == ("w",) and gradient.reason == (
        f"the gradient of [{left}, {right}] sums over {batch}, which is sharded over data"
    )
    assert "along features (left)" in true.to_html()
    misspelt = explain(step, *args, mapping={right: "model"}, mesh=axn.make_mesh(MESH), by="names", chip="v5e")
    assert f"shard {batch} over data" in str(misspelt.verdict.suspicious[0])


def test_arguments_that_came_replicated_are_to_be_placed() -> None:
    mapping = {"batch": "data", "mlp": "model"}
    step = axn.named_jit(trained(lambda w, x: axn.mean(axn.tanh(axn.dot(x, w, axis="embed"))).scalar()), mapping)
    with jax.set_mesh(axn.make_mesh(MESH)):
        report = explain(
            step, axn.ones({"embed": 16, "mlp": 32}), axn.ones({"batch": 16, "embed": 16}), by="partitioner"
        )
    first = report.verdict.suspicious[0]
    assert "over which the mapping shards" in first.cause and "batch" in first.cause
    assert all(
        "in_placement" in f.advice for f in report.verdict.suspicious if "shard" in f.advice or f.severity == "fix"
    )


def nested(w: axn.NamedArray) -> Any:
    turn = lambda c, _: (axn.tanh(c + axn.sum(w * w, "batch")), None)
    outer = lambda c, _: (jax.lax.scan(turn, c, None, length=3)[0], None)
    return jax.lax.scan(outer, axn.zeros({"embed": 64}), None, length=5)[0]


def changing(w: axn.NamedArray) -> Any:
    turn = lambda c, i: (axn.tanh(c + axn.sum(w * i, "batch")), None)
    return jax.lax.scan(turn, axn.zeros({"embed": 64}), jnp.arange(5.0))[0]


@pytest.mark.parametrize(("step", "often"), [(nested, 1), (changing, 5)])
def test_a_sum_that_no_turn_of_a_loop_changes_runs_once(step: Any, often: int) -> None:
    w = jax.eval_shape(lambda: axn.ones({"batch": 16, "embed": 64}))
    for by in ("names", "partitioner"):
        report = explain(step, w, mapping={"batch": "data"}, mesh=axn.make_mesh(MESH), by=by)
        assert [c.times for c in report.collectives] == [often], by


@pytest.mark.parametrize("sizes", [(32, 64), (16, 16)])
def test_a_gradient_of_a_distributed_step_has_its_own_axes(sizes: tuple[int, int]) -> None:
    """The batch is as long as `embed`, and a shard of `mlp` too."""
    array, (embed, mlp) = (lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)), sizes
    step = trained(lambda w, x: jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2))
    names = {"up": "embed mlp", "down": "mlp embed"}, "batch embed"
    distributed = axn.names.distribute(step, names=names)
    args = {"up": array(embed, mlp), "down": array(mlp, embed)}, array(32, embed)
    mapping = {"batch": "data", "mlp": "model"}
    early, true = (
        explain(distributed, *args, mapping=mapping, mesh=axn.make_mesh(MESH), by=by) for by in ("names", "partitioner")
    )
    for report in (early, true):
        gradients = [c for c in report.collectives if c.phase == "backward" and c.kind == "all-reduce"]
        assert sorted(c.array for c in gradients) == [
            f"f32[embed={embed}, mlp={mlp // 2}]",
            f"f32[mlp={mlp // 2}, embed={embed}]",
        ]


def test_the_page_has_the_keys_of_the_records() -> None:
    text = (Path(__file__).parents[2] / "docs" / "insight.md").read_text()
    table = text.partition("## The records of a report")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    keys = {key for cell, _ in rows for key in re.findall(r"`(\w+)`", cell)}
    assert keys == {f.name for f in dataclasses.fields(Report)}
    records = [Collective, RepeatedWork, AvoidableWork, PlacedArgument, HeldArray]
    for record, (_, said) in zip(records, rows, strict=False):
        kind, *fields = re.findall(r"`(\w+)`", said)
        assert kind == record.__name__ and {*fields} <= {f.name for f in dataclasses.fields(record)}


@pytest.mark.parametrize("schedule", [axn.schedules.GPipe, axn.schedules.OneFOneB])
def test_a_pipeline_says_how_long_its_stages_wait(schedule: Any) -> None:
    """What waits is not repeated, each exchange of a tick has its reason, and each stage has the flops of its ticks."""
    Batch, Embed, Layers = axn.make_axes(batch=128, embed=64, layers=4)
    model = jax.eval_shape(lambda: axn.nn.Stacked.init(Layers, axn.nn.Linear)(Embed, Embed, key=jax.random.key(0)))
    x = jax.eval_shape(lambda: axn.zeros((Batch, Embed)))
    mapping = {"layers": "stage", "batch": "data"}
    idle = {}

    def step(model: Any, x: axn.NamedArray, microbatches: int) -> Any:
        layer, then = lambda layer, x: x + axn.tanh(layer(x)), lambda y: axn.sum(y * y).scalar()
        return jax.grad(lambda m: m.fold_via(layer, schedule=schedule(microbatches), then=then)(x))(model)

    for microbatches in (2, 4, 8, 16):
        own = functools.partial(step, microbatches=microbatches)
        report = explain(own, model, x, mapping=mapping, mesh=cases.mesh_of(data=4, stage=2), by="partitioner")
        # Forward, again in the backward pass, and that itself, which takes twice as long.
        each_pass = 2 * Batch.size * Embed.size**2 * Layers.size // 8
        assert report.flops == 4 * each_pass * (microbatches + 1) // microbatches
        assert report.repeated == () and all(c.reason for c in report.collectives)
        permutes = [c for c in report.collectives if c.kind == "collective-permute"]
        assert permutes and all("in each tick" in (c.reason or "") for c in permutes)
        (said,) = (str(x) for x in report.verdict.suspicious if "waits" in x.cause)
        idle[microbatches] = int(re.findall(r"waits in (\d+)%", said)[0])
    assert idle == {2: 33, 4: 20, 8: 11, 16: 6}


def test_devices_that_permute_what_they_keep_send_nothing() -> None:
    """As in a ring of two, whose halves are stored in another order."""
    mesh, step, args = cases.train_lm("context")
    with axn.set_mesh(mesh):
        report = explain(step, *args, by="partitioner")
    assert not [c for c in report.collectives if c.axes == () or (c.kind == "collective-permute" and not c.reason)]
