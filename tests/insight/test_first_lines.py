"""The first eight lines of a printed report have the fault of a step, its place, and what to try."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import axonym as axn
from axonym import nn

Batch, Time, Width, Hidden, Words, Places = axn.make_axes(batch=64, time=16, width=64, hidden=256, words=512, places=4)
MESH = {"rows": 4, "columns": 2}
COMPUTE = {"batch": "rows", "hidden": "columns", "words": "columns"}
STORED = {**COMPUTE, "batch": None, "width": "rows"}
BOTH = STORED, COMPUTE

Tree = Any


def weights(dtype: Any = jnp.float32) -> Tree:
    block = lambda: {"into": axn.ones((Width, Hidden), dtype=dtype), "out": axn.ones((Hidden, Width), dtype=dtype)}
    tables = {"words": axn.ones((Words, Width), dtype=dtype), "scores": axn.ones((Width, Words), dtype=dtype)}
    return {**tables, "blocks": [block(), block(), block()]}


def texts() -> axn.NamedArray:
    return axn.zeros((Batch, Time), dtype=int)


@dataclasses.dataclass(frozen=True)
class Model:
    """A small model, of which each part can be changed."""

    looked_up: Callable[[Tree, axn.NamedArray], axn.NamedArray] = lambda w, ids: w["words"]["words", ids]
    between: Callable[[axn.NamedArray], axn.NamedArray] = lambda x: x
    inner: Callable[[axn.NamedArray], axn.NamedArray] = lambda x: x

    def scores(self, w: Tree, ids: axn.NamedArray) -> axn.NamedArray:
        x = self.looked_up(w, ids)
        for block in w["blocks"]:
            x = self.between(
                x + axn.dot(self.inner(axn.tanh(axn.dot(x, block["into"], axis="width"))), block["out"], axis="hidden")
            )
        return axn.dot(x, w["scores"], axis="width")

    def loss(self, w: Tree, ids: axn.NamedArray) -> jax.Array:
        return axn.mean(nn.cross_entropy_loss(self.scores(w, ids), "words", ids)).scalar().astype(jnp.float32)


def descended(w: Tree, gradients: Tree) -> Tree:
    return jax.tree.map(lambda w, g: (w - 0.1 * g).astype(w.dtype), w, gradients)


PLAIN = Model()


def trained(model: Model = PLAIN) -> Callable[..., Any]:
    def step(w: Tree, ids: axn.NamedArray) -> Any:
        value, gradients = jax.value_and_grad(model.loss)(w, ids)
        return value, descended(w, gradients)

    return step


def decayed_without_shards(w: Tree, ids: axn.NamedArray) -> Any:
    value, gradients = jax.value_and_grad(Model().loss)(w, ids)
    whole = axn.unshard(w)  # HERE
    size = sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(whole))
    return value + size, descended(w, gradients)


def measured_again(w: Tree, ids: axn.NamedArray) -> Any:
    value, gradients = jax.value_and_grad(Model().loss)(w, ids)
    w = descended(w, gradients)
    right = axn.mean(axn.argmax(Model().scores(w, ids), "words") == ids)  # HERE
    return value, right, w


def taught(w: Tree, teacher: Tree, ids: axn.NamedArray) -> Any:
    def loss(w: Tree) -> jax.Array:
        return Model().loss(w, ids) + axn.mean((Model().scores(w, ids) - Model().scores(teacher, ids)) ** 2).scalar()

    return jax.value_and_grad(loss)(w)


def one_hot(w: Tree, ids: axn.NamedArray) -> axn.NamedArray:
    return axn.dot(nn.one_hot(ids, Words), w["words"], axis="words")  # HERE


def positional(w: Tree, ids: axn.NamedArray) -> axn.NamedArray:
    return axn.named(jnp.take(w["words"].array, ids.array, axis=0), ("batch", "time", "width"))  # HERE


def complete(w: Tree, ids: axn.NamedArray) -> axn.NamedArray:
    return axn.unshard(w["words"])["words", ids]  # HERE


def gathered(x: axn.NamedArray) -> axn.NamedArray:
    return axn.shard(x, {"batch": None})  # HERE


def summed(x: axn.NamedArray) -> axn.NamedArray:
    return axn.named(jnp.cumsum(x.array, -1), x.names)  # HERE


def sent_as_float32(w: Tree, ids: axn.NamedArray) -> Any:
    @axn.shard_map(in_specs=(P(), {"batch": ("rows", "columns")}), out_specs=P())
    def gradients(w: Tree, ids: axn.NamedArray) -> Any:
        own = jax.grad(Model().loss)(axn.pvary(w, ("rows", "columns")), ids)
        return jax.tree.map(lambda g: jax.lax.psum(g.astype(jnp.float32), ("rows", "columns")), own)  # HERE

    return descended(w, gradients(w, ids))


Experts, Capacity = axn.make_axes(experts=8, capacity=128)


def mixed(capacity: axn.Axis) -> Any:
    """Make a step of experts, of which each has as many slots for the tokens of a text."""

    def step(w: Tree, x: axn.NamedArray) -> Any:
        def loss(w: Tree) -> jax.Array:
            gate = nn.softmax(axn.dot(x, w["router"], axis="width"), "experts")
            chosen = nn.one_hot(axn.argmax(gate, "experts"), Experts)
            place = axn.sum((axn.cumsum(chosen, "time") - 1) * chosen, "experts")
            slot = axn.broadcast_axis(nn.one_hot(place.astype(int), capacity), Experts) * chosen
            slots = axn.dot(x, slot, axis="time")  # HERE
            h = axn.tanh(axn.dot(slots, w["into"], axis="width"))
            y = axn.dot(axn.dot(h, w["out"], axis="hidden"), slot * gate, axis=("experts", "capacity"))
            return axn.mean((y - x) ** 2).scalar()

        return jax.value_and_grad(loss)(w)

    return step


def routed() -> Tree:
    w = {
        "router": axn.ones((Width, Experts)),
        "into": axn.ones((Experts, Width, Hidden)),
        "out": axn.ones((Experts, Hidden, Width)),
    }
    return w, axn.ones((Batch, Time.resize(128), Width))


@dataclasses.dataclass(frozen=True)
class Planted:
    """A step, how it is distributed, and what the first lines of its report must say."""

    step: Callable[..., Any]
    said: str = ""
    """A regular expression, in which `{here}` is the place."""
    mapping: Any = dataclasses.field(default_factory=lambda: BOTH)
    arguments: Callable[[], Any] = lambda: (weights(), texts())

    def report(self) -> axn.insight.Report:
        mesh, args = axn.make_mesh(MESH), jax.eval_shape(self.arguments)
        return axn.insight.explain(self.step, *args, mapping=self.mapping, mesh=mesh, by="partitioner", chip="v5e")

    def first_lines(self) -> str:
        """Return the first eight lines, as a terminal of 100 columns breaks them."""
        lines = [part for line in str(self.report()).splitlines() for part in textwrap.wrap(line, 100) or [""]]
        return "\n".join(lines[:8])


ROUTED = {"batch": "rows", "experts": "columns"}
FAULTS: dict[str, Planted] = {
    "weights are gathered for their decay": Planted(
        decayed_without_shards, r"gathered{here} by a placement, (?:outside|although) .*w/scores.* Try: leave the"
    ),
    "a forward pass for a metric": Planted(
        measured_again, r"25% .* a forward pass .* second time.*{here}.* Try: .*has_aux"
    ),
    "too large a capacity": Planted(
        mixed(Capacity),
        r"87% of the compute .* empty.*{here} makes 1,024 rows of 128. Try: fewer slots",
        ROUTED,
        routed,
    ),
    "a table that is gathered": Planted(
        trained(Model(looked_up=positional)),
        r"All of w/words is gathered{here} to look rows up.* Try: table\[axis, numbers\]",
        ({"words": "columns"}, {"batch": ("rows", "columns")}),
    ),
    "a placement that gathers a table": Planted(
        trained(Model(looked_up=complete)),
        r"gathered{here} by a placement, although .* words.*w/words. Try: leave",
        COMPUTE,
    ),
    "gradients are sent as float32": Planted(
        sent_as_float32,
        r"Gradients are converted from bf16 to f32{here} before .*: w/scores.* Try: add them up in bf16",
        {"batch": ("rows", "columns")},
        lambda: (weights(jnp.bfloat16), texts()),
    ),
    "a product that looks rows up": Planted(
        trained(Model(looked_up=one_hot)), r"14% of the compute looks rows up .*one-hot.*{here}. Try: .*table\["
    ),
    "no batch": Planted(
        trained(),
        r"Nothing uses the mesh axis rows.* Try: shard batch .*75% of the compute is repeated.* at test_first_lines.py",
        {"hidden": "columns", "words": "columns"},
    ),
    "repeated along a mesh axis": Planted(
        trained(),
        r"fix: 43% of the compute is repeated, first at test_first_lines.py:.*along columns.*Try: shard hidden",
        {"batch": "rows", "words": "columns"},
    ),
    "no placement of the arguments": Planted(
        axn.named_jit(trained(), COMPUTE), r"Nothing uses the mesh axis rows.* batch.*Try: in_placement=mapping", None
    ),
    "activations are gathered between layers": Planted(
        trained(Model(between=gathered)),
        r"batch is gathered{here}, 5\d% .*a placement replicates batch.* Try: add batch",
    ),
    "code without names inside a layer": Planted(
        trained(Model(inner=summed)), r"hidden is gathered{here}, 4\d% .*without names needs all of hidden.* Try: "
    ),
}
HEALTHY: dict[str, Planted] = {
    "both mappings": Planted(trained()),
    "data parallelism": Planted(trained(), mapping={"batch": ("rows", "columns")}),
    "a capacity that fits": Planted(mixed(Capacity.resize(20)), mapping=ROUTED, arguments=routed),
    "another model's forward pass": Planted(taught, arguments=lambda: (weights(), weights(), texts())),
}


def marked() -> str:
    """Return the lines of the faults."""
    lines = Path(__file__).read_text().splitlines()
    return "|".join(f"test_first_lines.py:{i}" for i, line in enumerate(lines, 1) if line.endswith("# HERE"))


COARSE = {"a table that is gathered", "gradients are sent as float32"}
"""Faults that reports say without their parameters from JAX 0.11 on."""


@pytest.mark.parametrize("name", FAULTS)
def test_the_first_lines_have_the_fault_its_place_and_what_to_try(name: str) -> None:
    planted = FAULTS[name]
    if name in COARSE and jax.__version_info__ >= (0, 11):
        pytest.skip("XLA says less of where such a transfer comes from")
    said, here = " ".join(planted.first_lines().split()), rf".* at (?:{marked()})"
    assert re.search(planted.said.replace("{here}", here), said), said


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_step_has_nothing_to_fix(name: str) -> None:
    report = HEALTHY[name].report()
    assert HEALTHY[name].first_lines().splitlines()[2] == "Nothing to fix or to look at was found."
    assert "no product has one-hot arrays or many empty rows, or runs in a second forward pass" in report.verdict.fine


@pytest.mark.parametrize(
    ("name", "checked"),
    [
        ("a forward pass for a metric", "second forward pass"),
        ("too large a capacity", "many empty rows"),
        ("a product that looks rows up", "one-hot arrays"),
        ("activations are gathered between layers", "gathered"),
        ("repeated along a mesh axis", "repeated"),
    ],
)
def test_checks_that_found_something_are_not_said_to_be_fine(name: str, checked: str) -> None:
    assert not [x for x in FAULTS[name].report().verdict.fine if checked in x]


def test_advice_that_saves_little_is_no_line() -> None:
    """Gradient checkpointing would save a millionth of the memory of the chip."""
    assert "checkpointing" not in str(HEALTHY["both mappings"].report())
    step, args = HEALTHY["both mappings"].step, (weights(), texts())
    report = axn.insight.explain(step, *args, mapping=BOTH, mesh=axn.make_mesh(MESH), by="partitioner")
    assert "Try: gradient checkpointing" in str(report)  # no chip tells how much memory there is
