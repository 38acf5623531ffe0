"""Pages to look at: of real steps, and of reports with names that nobody should choose."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

import axonym as axn
from axonym import insight
from examples.models import llama

HOSTILE = (
    "<script>hacked = 1</script>",
    '"onload="hacked=2',
    "{{body}}",
    "\u202eexe.eman\u202c",
    "\u05e9\u05dd",
    "a\0b",
    "]]>",
)
"""Names of axes: HTML, an attribute, the template's own, text that runs backwards, Hebrew, and ends of strings."""

SIZES = {"vocab": 128256, "embed": 8192, "layers": 80, "kv_heads": 8, "group": 8, "head_size": 128, "mlp": 28672}


def train(model: llama.Llama, tokens: axn.NamedArray) -> tuple[jax.Array, llama.Llama]:
    value, gradients = jax.value_and_grad(llama.Llama.loss)(model, tokens)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, model, gradients)


def sharded(**over: str) -> Any:
    return {"embed": "data", **over}, {"batch": "data", **over}


@functools.cache
def large() -> insight.Comparison:
    """A Llama of 70B on 512 chips, with the heads of another model in its mapping, and with its own."""
    vocab, embed, layers, kv_heads, group, head_size, mlp = itertools.starmap(axn.Axis, SIZES.items())
    config = llama.Config(
        Vocab=vocab, Embed=embed, Layers=layers, KVHeads=kv_heads, Group=group, HeadSize=head_size, Mlp=mlp
    )
    model = jax.eval_shape(lambda key: llama.Llama.init(config, key=key), jax.random.key(0))
    tokens = jax.eval_shape(lambda: axn.zeros({"batch": 512, "pos": 4096}, dtype=int))
    mesh = AbstractMesh((64, 8), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    mappings = {
        "heads": sharded(heads="model", mlp="model", vocab="model"),
        "kv_heads": sharded(kv_heads="model", mlp="model", vocab="model"),
    }
    return insight.compare(train, [model, tokens], mappings, mesh=mesh, by="names", chip="v5p")


def small_step(w: Any, x: axn.NamedArray) -> Any:
    def loss(w: Any) -> jax.Array:
        return axn.mean(axn.dot(axn.tanh(axn.dot(x, w["up"], axis="embed")), w["down"], axis="mlp")).scalar()

    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))


def small_arguments() -> tuple[Any, Any]:
    w = jax.eval_shape(lambda: {"up": axn.ones({"embed": 64, "mlp": 256}), "down": axn.ones({"mlp": 256, "embed": 64})})
    return w, jax.eval_shape(lambda: axn.ones({"batch": 32, "embed": 64}))


@functools.cache
def compiled() -> insight.Report:
    """A small step with its memory over time."""
    mesh, mapping = (
        axn.make_mesh({"data": 4, "model": 2}),
        ({"embed": "data", "mlp": "model"}, {"batch": "data", "mlp": "model"}),
    )
    return insight.explain(small_step, *small_arguments(), mapping=mapping, mesh=mesh, chip="v5e")


@functools.cache
def planned() -> insight.MappingPlan:
    return insight.plan(small_step, *small_arguments(), chips=64, ask=0)


@functools.cache
def hostile() -> insight.Report:
    """A report in which everything has a hostile name."""
    report = large().reports["heads"]
    names = itertools.cycle(HOSTILE)
    mesh = dict(zip(HOSTILE, (2, 2, 2, 1, 1, 1, 1), strict=True))
    collectives = tuple(
        dataclasses.replace(
            c, axes=(name,), array=f"f32[{name}=8]", operation=f"dot[{name}]", reason=f"because of {name}, over {name}",
            parameters=(f"model/{name}",), source=insight.Source(f"/{name}/x.py", 1, name),
        )
        for c, name in zip(report.collectives, names, strict=False)
    )  # fmt: skip
    placed = tuple(
        dataclasses.replace(
            x, path=f"{name}/{x.path}", axes=(name,) * len(x.axes), replicated_over=(name,),
            over=((HOSTILE[0],), *((),) * (len(x.axes) - 1)),
        )
        for x, name in zip(report.placed, names, strict=False)
    )  # fmt: skip
    assert report.bounds is not None
    bounds = dataclasses.replace(report.bounds, chip=HOSTILE[0], links={(name,): 1.0 for name in HOSTILE})
    return dataclasses.replace(
        report, step=HOSTILE[0], mesh=mesh, collectives=collectives, placed=placed, bounds=bounds, notes=HOSTILE,
        mapping=dict.fromkeys(HOSTILE, HOSTILE[0]), axes=HOSTILE, repeated=(),
    )  # fmt: skip


@functools.cache
def unrolled() -> insight.Report:
    """As many transfers and arguments as 80 layers without a loop have, all of them different."""
    report = large().reports["kv_heads"]
    transfers = tuple(
        dataclasses.replace(c, source=insight.Source("/model.py", i, "call"))
        for i, c in enumerate(itertools.islice(itertools.cycle(report.collectives), 2720))
    )
    arrays = tuple(
        dataclasses.replace(x, path=f"model/part_{i // 27}/{x.path}_{i}")
        for i, x in enumerate(itertools.islice(itertools.cycle(report.placed), 2171))
    )
    return dataclasses.replace(report, collectives=transfers, placed=arrays)
