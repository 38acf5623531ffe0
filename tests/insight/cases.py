"""Training steps to compare reports on: the models of the examples, made small, under their mappings."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import axonym as axn
from axonym import nn

Case = tuple[jax.sharding.Mesh, Callable[..., Any], tuple[Any, ...]]
"""A mesh, a compiled step, and its abstract arguments."""

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    kept = list(sys.path)
    sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "models")]
    try:
        yield
    finally:
        sys.path[:] = kept


def example(name: str) -> Any:
    """Import a module of the examples. The number of simulated devices stays."""
    with _importing(), mock.patch.object(jax.config, "update"):
        return importlib.import_module(name)


def mesh_of(kind: AxisType = AxisType.Auto, **sizes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def first_lost(axis: str, step: Callable[..., Any], *args: Any, mapping: Any) -> axn.insight.Collective | None:
    """Return the first exchange by which an axis stops being sharded; indices of look-ups do not count."""
    found = axn.insight.explain(step, *args, mapping=mapping, by="partitioner").collectives
    return next((c for c in found if axis in (*c.gathered, *c.moved) and not c.of_indices), None)


def gradients(model: Any, tokens: axn.NamedArray) -> tuple[jax.Array, Any]:
    return jax.value_and_grad(lambda model: model.loss(tokens))(model)


def language_model(name: str, strategy: str, kind: AxisType = AxisType.Auto) -> Case:
    train, mappings = example("train"), example("mappings")
    mesh = mesh_of(kind, data=4, model=2)
    model = jax.eval_shape(train.MODELS[name], jax.random.key(0))
    tokens = jax.eval_shape(lambda: axn.zeros((train.Batch, train.Pos), dtype=int))
    return mesh, mappings.distributed_step(gradients, strategy), (model, tokens)


def mixture(mapping: str, kind: AxisType = AxisType.Auto) -> Case:
    moe = example("mixture_of_experts")
    mesh = mesh_of(kind, data=2, expert=4)

    def step(model: Any, x: axn.NamedArray, y: axn.NamedArray) -> Any:
        return jax.value_and_grad(lambda model: axn.mean((model(x)[0] - y) ** 2).scalar())(model)

    model = jax.eval_shape(lambda key: moe.Mixture.init(key=key), jax.random.key(0))
    x = jax.eval_shape(lambda: axn.zeros((moe.Tokens, moe.Embed)))
    placement = moe.MAPPINGS[mapping]
    return mesh, axn.named_jit(step, placement, in_placement=(None, placement, placement)), (model, x, x)


def classifier(mapping: str, kind: AxisType = AxisType.Auto) -> Case:
    example_ = example("image_classifier")
    placement = example_.MAPPINGS[mapping]

    def step(model: Any, images: axn.NamedArray, labels: axn.NamedArray, key: jax.Array) -> Any:
        def loss(model: Any) -> jax.Array:
            return nn.cross_entropy_loss(model(images, key=key), example_.Digit, labels).scalar()

        return jax.value_and_grad(loss, allow_int=True)(model)

    model = jax.eval_shape(lambda key: example_.Classifier.init(key=key), jax.random.key(0))
    images = jax.eval_shape(lambda: axn.zeros({"batch": 32, "gray": 1, "height": 8, "width": 8}))
    labels = jax.eval_shape(lambda: axn.zeros({"batch": 32}, dtype=int))
    compiled = axn.named_jit(
        step, placement, in_placement={"images": placement, "labels": placement}, out_placement=PartitionSpec()
    )
    return mesh_of(kind, data=4, rows=2), compiled, (model, images, labels, jax.eval_shape(lambda: jax.random.key(0)))


def pipeline(kind: AxisType = AxisType.Auto) -> Case:
    Batch, Embed, Layers = axn.make_axes(batch=16, embed=8, layers=8)
    schedule = axn.schedules.OneFOneB(4, axis="batch")

    def step(model: Any, x: axn.NamedArray) -> Any:
        def loss(model: Any) -> jax.Array:
            y = model.fold_via(lambda layer, x: x + axn.tanh(layer(x)), schedule=schedule)(x)
            return axn.mean(y * y).scalar()

        return jax.value_and_grad(loss)(model)

    model = jax.eval_shape(lambda: nn.Stacked.init(Layers, nn.Linear)(Embed, Embed, key=jax.random.key(0)))
    x = jax.eval_shape(lambda: axn.zeros((Batch, Embed)))
    mapping = {"layers": "stage", "batch": "data"}
    return mesh_of(kind, stage=4, data=2), axn.named_jit(step, mapping, in_placement=mapping), (model, x)


def plain_jax(kind: AxisType = AxisType.Auto) -> Case:
    mesh = mesh_of(kind, data=4, model=2)

    def array(shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    rows = NamedSharding(mesh, PartitionSpec("data", None)) if kind is AxisType.Explicit else None

    def step(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> Any:
        def loss(weights: dict[str, jax.Array]) -> jax.Array:
            hidden = jnp.tanh(x @ weights["up"])
            return jnp.mean((jnp.einsum("bm,me->be", hidden, weights["down"], out_sharding=rows) - y) ** 2)

        value, gradient = jax.value_and_grad(loss)(weights)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient)

    weights = {"up": array((16, 32), None, "model"), "down": array((32, 16), "model", None)}
    return mesh, jax.jit(step), (weights, array((8, 16), "data"), array((8, 16), "data"))


def train_lm(name: str, kind: AxisType = AxisType.Auto) -> Case:
    """Return the training step of `train_lm.py`, with AdamW and clipping, under one of its built-in mappings."""
    with _importing():
        config, steps, strategies = (
            importlib.import_module(f"training.{m}") for m in ("config", "steps", "strategies")
        )
    layers, experts = 4 if "pipeline" in name else 2, 8 if name == "expert" else 0
    sizes = config.ModelSizes(layers=layers, embed=16, mlp=16, kv_heads=2, group=2, head_size=4, experts=experts)
    strategy = strategies.choose(name, "auto", kv_heads=2, devices=8, microbatches=2)
    mesh = axn.make_mesh(dict(strategy.mesh), explicit=kind is AxisType.Explicit)
    policy = axn.precision.Policy.parse("float32")
    start, train, _ = steps.plain_functions(
        sizes, steps.make_optimizer(config.Optimizer()), policy, strategy.schedule()
    )
    tokens = steps.abstract_tokens(*axn.make_axes(batch=16, pos=8))
    state = jax.eval_shape(start, jax.random.key(0))
    return mesh, steps.distributed(train, strategy), (state, tokens)


def explained(mapping: str, kind: AxisType = AxisType.Auto) -> Case:
    """Return the step of `explain.py`, made smaller."""
    example_ = example("explain")
    sizes = {"batch": 16, "pos": 4, "embed": 16, "mlp": 32}
    placement = getattr(example_, mapping)
    mesh = mesh_of(kind, data=4, model=2)
    distribute = axn.fsdp if isinstance(placement, tuple) else axn.named_jit
    step = distribute(example_.step, *(placement if isinstance(placement, tuple) else (placement,)))

    def array(*names: str) -> axn.NamedArray:
        return jax.eval_shape(lambda: axn.ones({n: sizes[n] for n in names}))

    return mesh, step, ({"up": array("embed", "mlp"), "down": array("mlp", "embed")}, array("batch", "pos", "embed"))


def generated(weights: str, kind: AxisType = AxisType.Auto) -> Case:
    """Return a program that writes tokens as `generate.py` does, with weights stored as in `small_weights.py`."""
    generate, small = example("generate"), example("small_weights")
    generation, llama = example("models.generation"), example("models.llama")
    Vocab, Embed, HeadSize, Mlp = axn.make_axes(vocab=8, embed=8, head_size=4, mlp=16)
    config = dataclasses.replace(small.CONFIG, Vocab=Vocab, Embed=Embed, HeadSize=HeadSize, Mlp=Mlp)
    sampling = generation.Sampling(top_k=4, top_p=0.9, repetition_penalty=1.2)

    def step(model: Any, prompts: axn.NamedArray, key: jax.Array) -> axn.NamedArray:
        return generation.generate(model, prompts, 2, key, sampling)

    def init(key: jax.Array) -> Any:
        model = llama.Llama.init(config, key=key)
        options = {**small.STORED, "int4 in groups of 4": {"dtype": "int4", "group": 4}}.get(weights)
        return axn.quantization.quantize_weights(model, **options) if options else model

    mapping = generate.MAPPING
    args = jax.eval_shape(
        lambda: (init(jax.random.key(0)), axn.zeros({"batch": 4, "pos": 3}, dtype=int), jax.random.key(0))
    )
    return mesh_of(kind, data=2, model=2), axn.named_jit(step, mapping, in_placement=mapping), args


def kernels(mapping: int, kind: AxisType = AxisType.Auto) -> Case:
    """Return the operations of `pallas_kernel.py`, whose kernels CPUs interpret, under one of its mappings."""
    example_ = example("pallas_kernel")

    def step(x: axn.NamedArray, scale: axn.NamedArray) -> Any:
        split = functools.partial(example_.normalize_split, size=example_.Embed.size)
        return example_.normalize(x, scale), split(x, scale)

    args = jax.eval_shape(lambda: (axn.zeros((example_.Row, example_.Embed)), axn.zeros(example_.Embed)))
    placement = example_.MAPPINGS[mapping]
    return mesh_of(kind, data=2, model=2), axn.named_jit(step, placement, in_placement=placement), args
