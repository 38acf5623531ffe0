"""The cost of a mapping computed from names is that of the partitioner, or it is refused."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

import axonym as axn
from axonym.precision import Policy, mixed_precision
from benchmarks.llama import CONFIG
from examples.models.llama import Llama
from tests.insight import cases
from tests.insight.test_explain import FSDP_AND_TENSOR, batch, step, weights
from tests.names.models import MODELS

ALL = ("data", "model")
TENSOR = dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), "model")
MAPPINGS: dict[str, Any] = {
    "data": {"batch": ALL},
    "fsdp": ({"embed": ALL}, {"batch": ALL}),
    "tensor": {"batch": "data"} | TENSOR,
    "mixed": ({"embed": "data"} | TENSOR, {"batch": "data"} | TENSOR),
    "hybrid": ({"embed": "data"}, {"batch": ALL}),
    "features": {"batch": "data", "embed": "model"},
    "heads": ({"embed": "data", "heads": "model"}, {"batch": "data", "heads": "model"}),
}


def language_model(name: str, optimizer: bool = False) -> tuple[Any, ...]:
    """Return a training step, and its abstract arguments."""
    train = cases.example("train")
    tokens = jax.eval_shape(lambda: axn.zeros((train.Batch, train.Pos), dtype=int))
    model = jax.eval_shape(train.MODELS[name], jax.random.key(0))
    if not optimizer:
        return cases.gradients, model, tokens
    return train.step, model, jax.eval_shape(train.OPTIMIZER.init, model), tokens


def both(case: tuple[Any, ...], mapping: Any) -> tuple[axn.insight.Report, axn.insight.Report]:
    with jax.set_mesh(cases.mesh_of(data=4, model=2)):
        early, true = (axn.insight.explain(*case, mapping=mapping, by=by) for by in ("names", "partitioner"))
    return early, true


def sent(report: axn.insight.Report) -> dict[Any, int]:
    """Return the bytes that each device sends, by mesh axes, kind and phase."""
    found: collections.Counter[Any] = collections.Counter()
    for c in report.collectives:
        assert c.total_sent is not None
        found[c.axes, c.kind, c.phase] += c.total_sent
    return found


@pytest.mark.parametrize(
    ("name", "mapping", "optimizer"),
    [
        ("llama", "data", False),
        ("llama", "fsdp", False),
        ("llama", "mixed", True),
        ("llama", "hybrid", False),
        ("llama", "features", False),
        ("gpt2", "tensor", True),
    ],
)
def test_bytes_and_flops_are_those_of_the_partitioner(name: str, mapping: str, optimizer: bool) -> None:
    early, true = both(language_model(name, optimizer), MAPPINGS[mapping])
    assert sent(early) == sent(true)
    assert early.flops == true.flops and early.uncertain <= 0.0002 * (true.total_sent() or 0)


MIXTURES: dict[str, Any] = {
    "data": {"batch": ALL},
    "hybrid": ({"embed": "data"}, {"batch": ALL}),
    "tensor": {"batch": "data"} | TENSOR,
}


@pytest.mark.parametrize("mapping", MIXTURES)
def test_mixtures_of_experts(mapping: str) -> None:
    """Each device sorts its own rows by expert. The compiler for CPUs multiplies each row by the weights of all."""
    config = dataclasses.replace(CONFIG, Experts=axn.Axis("experts", 8))
    model = jax.eval_shape(lambda: Llama.init(config, key=jax.random.key(0)))
    tokens = jax.eval_shape(lambda: axn.zeros({"batch": 16, "pos": 32}, "int32"))

    def step(model: Any, tokens: Any) -> Any:
        return jax.value_and_grad(lambda model: model.loss(tokens, penalties=True))(model)

    with jax.set_mesh(cases.mesh_of(data=4, model=2)):
        early, true = (
            axn.insight.explain(step, model, tokens, mapping=MIXTURES[mapping], by=by, chip="v5e")
            for by in ("names", "partitioner")
        )
    assert sent(early) == sent(true) and early.uncertain < 0.001 * (true.total_sent() or 0)
    assert "this is the most, since rows in no group take none" in str(early)
    extra = re.search(r"([\d,]+) of the flops multiply rows by the matrices of other groups", str(true))
    assert extra and early.flops and early.bounds and true.bounds
    least = (true.flops or 0) - int(extra[1].replace(",", ""))  # where small products are simplified
    assert 0.999 * early.flops < least <= early.flops
    assert true.bounds.compute == pytest.approx(early.bounds.compute, rel=1e-3)


def test_what_mixtures_exchange_otherwise_is_refused() -> None:
    case = cases.example("mixture_of_experts")
    model = jax.eval_shape(lambda: case.Mixture.init(key=jax.random.key(0)))
    x = jax.eval_shape(lambda: axn.zeros({"tokens": 64, "embed": 16}))
    tensor = {"tokens": "data", "mlp": "model"}
    for mapping, why in (
        ({"tokens": "data", "experts": "model"}, "an exchange of rows along experts in dispatch"),
        (({"embed": "data"} | tensor, tensor), "which is stored sharded, and sharded where it is used in MoELinear"),
    ):
        with jax.set_mesh(cases.mesh_of(data=4, model=2)), pytest.raises(ValueError, match=why):
            axn.insight.explain(lambda model, x: model(x)[0], model, x, mapping=mapping, by="names")


def test_flops_of_grouped_products() -> None:
    x, w, sizes = (
        jax.ShapeDtypeStruct(n, t) for n, t in (((64, 8), "float32"), ((4, 8, 16), "float32"), ((4,), "int32"))
    )
    product = jax.value_and_grad(lambda x, w, sizes: jax.lax.ragged_dot(x, w, sizes).sum(), (0, 1))
    report = axn.insight.explain(product, x, w, sizes, mapping={}, mesh=cases.mesh_of(data=8), by="names")
    assert report.flops == 3 * 2 * 64 * 8 * 16
    named = axn.named(x, ("rows", "embed"))
    with pytest.raises(ValueError, match="a grouped product along rows"):
        axn.insight.explain(
            lambda x, w, sizes: jax.lax.ragged_dot(x.array, w, sizes), named, w, sizes,
            mapping={"rows": "data"}, mesh=cases.mesh_of(data=8), by="names",
        )  # fmt: skip


def test_what_is_off_is_within_what_the_report_says() -> None:
    """Positions of GPT-2 are looked up in a stored table, by indices that are not sharded."""
    early, true = both(language_model("gpt2"), MAPPINGS["mixed"])
    difference = (true.total_sent() or 0) - (early.total_sent() or 0)
    assert 0 < difference <= early.uncertain < 0.02 * (true.total_sent() or 0)
    assert "may be off by" in str(early)
    assert early.flops == true.flops


def test_each_array_has_the_names_the_line_and_the_reason_of_the_compiled_one() -> None:
    def told(report: axn.insight.Report) -> set[Any]:
        return {(c.kind, c.axes, c.array, c.phase, c.times, c.sent, c.size, str(c.source), c.operation, c.reason)
                for c in report.collectives}  # fmt: skip

    early, true = both((step, weights(), batch()), FSDP_AND_TENSOR)
    assert told(early) == told(true)
    with jax.set_mesh(cases.mesh_of(data=4, model=2)):
        compiled = axn.insight.explain(step, weights(), batch(), mapping=FSDP_AND_TENSOR)
    assert early.memory is not None and compiled.memory is not None
    assert early.memory.arguments == compiled.memory.arguments
    assert early.memory.results <= compiled.memory.results  # which has the pointers of a tuple, too


def test_small_floats_are_sent_as_they_are() -> None:
    """The compiler for CPUs sends them as float32."""
    policy = Policy("float32", "bfloat16", "float32")
    _, model, tokens = language_model("llama")

    def small(model: Any, tokens: Any) -> Any:
        return jax.value_and_grad(mixed_precision(policy, lambda model: model.loss(tokens)))(model)

    early, true = both((small, model, tokens), MAPPINGS["fsdp"])
    doubled: collections.Counter[Any] = collections.Counter()
    for c in early.collectives:
        doubled[c.axes, c.kind, c.phase] += (c.total_sent or 0) * (2 if c.array.startswith("bf16") else 1)
    assert doubled == sent(true) != sent(early)


STORED = ({"embed": "data"}, {"batch": "data"})


def test_an_operation_of_several_steps_gathers_a_parameter_once() -> None:
    arguments = jax.eval_shape(lambda: (axn.ones({"embed": 16}), axn.ones({"batch": 16, "embed": 16})))
    early, true = both((lambda w, x: axn.divmod(x, w), *arguments), STORED)
    assert sent(early) == sent(true) and len(early.collectives) == 1


@pytest.mark.parametrize(
    ("operation", "mapping"),
    [
        ("mod", {"batch": "data"}),
        ("regrid", {"batch": "data"}),
        ("regrid", {"batch": "data", "embed": "model"}),
        ("regrid", {"embed": "model"}),
    ],
)
def test_a_gradient_of_what_devices_have_alike_is_summed_once(operation: str, mapping: dict[str, str]) -> None:
    """A remainder uses its divisor twice; the weights of `regrid` are replicated."""
    pairs = axn.named(np.arange(16).reshape(8, 2).T, ("corner", "batch"))
    x, divisor, weights = (axn.ones(axes) for axes in ({"batch": 16, "embed": 16}, {"embed": 16}, {"corner": 2}))
    compute, used = {
        "mod": (axn.mod, divisor),
        "regrid": (lambda x, w: axn.regrid(x, "batch", pairs, w, "corner"), weights),
    }[operation]
    gradient = jax.grad(lambda w, x: axn.sum(axn.square(compute(x, w))).scalar())
    early, true = both((gradient, used, x), mapping)
    assert sent(early) == sent(true) and len(early.collectives) == 1


def test_what_no_result_needs_is_not_counted() -> None:
    """The loss is not returned, and the gradient gathers what the forward pass does not use."""

    def update(weights: Any, x: Any) -> Any:
        up, down = weights
        loss = lambda up, down: axn.mean(axn.dot(axn.tanh(axn.dot(x, up, axis="embed")), down, axis="mlp")).scalar()
        return jax.grad(loss, (0, 1))(up, down)

    sizes = {"batch": 8, "embed": 8, "mlp": 16}
    up, down, x = (
        jax.eval_shape(lambda n=n: axn.ones({a: sizes[a] for a in n}))
        for n in (("embed", "mlp"), ("mlp", "embed"), ("batch", "embed"))
    )
    early, true = both((update, (up, down), x), STORED)
    assert sent(early) == sent(true) and early.uncertain == 0 and early.flops == true.flops
    assert sent(true)[("data",), "all-gather", "forward"] == 2 * 8 * 16 * 4 * 3 // 4


def test_what_is_gathered_twice_is_within_what_the_report_says() -> None:
    """One weight in two products is gathered once by the compiler."""

    def loss(w: Any, x: Any) -> Any:
        return axn.sum(axn.square(axn.dot(axn.dot(x, w, axis="embed"), w, axis="mlp"))).scalar()

    w, x = (jax.eval_shape(lambda n=n: axn.ones(n)) for n in ({"embed": 8, "mlp": 16}, {"batch": 8, "embed": 8}))
    early, true = both((jax.value_and_grad(loss), w, x), STORED)
    assert 0 < abs((early.total_sent() or 0) - (true.total_sent() or 0)) <= early.uncertain


def test_what_a_loop_does_not_change_is_within_what_the_report_says() -> None:
    """The compiler gathers weights once for all microbatches."""

    def loss(w: Any, x: Any) -> Any:
        one = lambda total, x: total + axn.sum(axn.square(axn.dot(x, w, axis="embed"))).scalar()
        return axn.fold(one, "micro")(0.0, x)

    w, x = (
        jax.eval_shape(lambda n=n: axn.ones(n)) for n in ({"embed": 8, "mlp": 16}, {"micro": 2, "batch": 8, "embed": 8})
    )
    early, true = both((jax.value_and_grad(loss), w, x), STORED)
    assert 0 < abs((early.total_sent() or 0) - (true.total_sent() or 0)) <= early.uncertain


@pytest.mark.parametrize("what", ["product", "sum of constants", "look-up"])
def test_what_is_computed_twice_is_within_what_the_report_says(what: str) -> None:
    """The compiler computes it once, or before the program runs."""

    def loss(w: Any, x: Any, tokens: Any) -> Any:
        if what == "product":
            first, second = (axn.dot(x, w, axis="embed") for _ in range(2))
            return axn.sum(axn.tanh(first) * second).scalar()
        if what == "sum of constants":
            return axn.sum(axn.square(axn.dot(x + axn.ones({"pos": 4, "embed": 16}), w, axis="embed"))).scalar()
        return axn.sum(axn.tanh(w["mlp", tokens]) * w["mlp", tokens]).scalar()

    args = jax.eval_shape(
        lambda: (axn.ones({"embed": 16, "mlp": 32}), axn.ones({"batch": 8, "pos": 4, "embed": 16}),
                 axn.zeros({"batch": 8}, dtype="int32"))
    )  # fmt: skip
    early, true = both((jax.value_and_grad(loss), *args), STORED)
    assert 0 < abs((early.total_sent() or 0) - (true.total_sent() or 0)) + (early.flops or 0) - (true.flops or 0)
    assert abs((early.total_sent() or 0) - (true.total_sent() or 0)) <= early.uncertain
    saved = re.search(r"save up to ([\d,]+) of the flops", str(early))
    assert (early.flops or 0) - (true.flops or 0) <= (int(saved[1].replace(",", "")) if saved else 0)


def test_a_sum_that_is_no_gradient() -> None:
    """It has the axes of a parameter, but is summed up whole, and sharded as parameters are after that."""

    def loss(w: Any, x: Any) -> Any:
        return axn.mean(axn.square((x + axn.sum(x, "batch")) * w)).scalar()

    w, x = jax.eval_shape(lambda: (axn.ones({"embed": 32}), axn.ones({"batch": 16, "pos": 8, "embed": 32})))
    early, true = both((jax.value_and_grad(loss), w, x), STORED)
    assert sent(early) == sent(true) and early.uncertain == 0
    assert sent(true)[("data",), "all-reduce", "forward"] == 2 * 8 * 32 * 4 * 3 // 4 + 6


def test_a_table_that_is_updated_from_two_mesh_axes() -> None:
    def loss(table: Any, tokens: Any) -> Any:
        return axn.mean(axn.square(table["vocab", tokens])).scalar()

    args = jax.eval_shape(
        lambda: (axn.ones({"vocab": 128, "embed": 32}), axn.zeros({"batch": 16, "pos": 8}, dtype="int32"))
    )
    early, true = both((jax.value_and_grad(loss), *args), {"batch": "data", "pos": "model"})
    assert abs((early.total_sent() or 0) - (true.total_sent() or 0)) <= early.uncertain


def test_axes_of_one_size_in_a_vmap() -> None:
    """What the operation calls by no name there is the axis of the `vmap`, and none of its own of that size."""

    def loss(w: Any, x: Any) -> Any:
        scores = axn.dot(x, w, axis="embed")
        each = axn.vmap(lambda scores: axn.square(axn.logsumexp(scores, "scores")).mean(), "batch")(scores)
        return axn.mean(each).scalar()

    w, x = jax.eval_shape(
        lambda: (axn.ones({"embed": 32, "scores": 16}), axn.ones({"batch": 16, "pos": 8, "embed": 32}))
    )
    early, true = both((jax.value_and_grad(loss), w, x), {"batch": "data"})
    assert sent(early) == sent(true) and early.flops == true.flops


def test_a_table_under_another_name() -> None:
    """Tokens are embedded and predicted with one table, whose rows have two names that are sharded alike."""

    def step(table: axn.NamedArray, tokens: axn.NamedArray) -> Any:
        def loss(table: axn.NamedArray) -> jax.Array:
            scores = axn.dot(table["vocab", tokens], table.rename({"vocab": "out"}), axis="embed")
            return axn.mean(scores**2).scalar()

        return jax.value_and_grad(loss)(table)

    table, tokens = jax.eval_shape(
        lambda: (axn.ones({"vocab": 64, "embed": 32}), axn.zeros({"batch": 16}, dtype="int32"))
    )
    mapping = {"vocab": "model", "out": "model", "batch": "data"}
    early, true = both((step, table, tokens), mapping)
    assert sent(early) == sent(true) and early.flops == true.flops and early.uncertain == 0


def test_flops_of_grouped_convolutions() -> None:
    x, kernel = (jax.ShapeDtypeStruct(n, "float32") for n in ((2, 4, 9), (6, 2, 3)))
    convolve = lambda x, kernel: jax.lax.conv_general_dilated(x, kernel, (2,), "SAME", feature_group_count=2)
    gradients = lambda x, kernel: jax.grad(lambda *args: convolve(*args).sum(), (0, 1))(x, kernel)
    for function in (convolve, gradients):
        early, true = both((function, x, kernel), {})
        assert early.flops == true.flops and early.flops


def test_any_mesh_will_do() -> None:
    case = language_model("llama")
    mesh = AbstractMesh((2, 512), ("data", "unused"), (AxisType.Auto,) * 2)
    report = axn.insight.explain(*case, mapping=MAPPINGS["data"] | {"batch": "data"}, mesh=mesh, by="names", chip="v5e")
    assert report.mesh == {"data": 2, "unused": 512} and report.bounds is not None
    assert {c.axes for c in report.collectives} == {("data",)}


def test_a_loop_whose_length_is_not_known() -> None:
    def summed(x: Any, most: Any) -> Any:
        def double(carry: Any) -> Any:
            count, x = carry
            return 2 * count, x + axn.sum(axn.ones(x.axes) * x)

        return jax.lax.while_loop(lambda carry: carry[0] < most, double, (most // most, x))

    x, most = jax.eval_shape(lambda: (axn.ones({"batch": 8}), 9))
    report = axn.insight.explain(summed, x, most, mapping={"batch": "data"}, mesh=cases.mesh_of(data=8), by="names")
    assert [(c.kind, c.times) for c in report.collectives] == [("all-reduce", None)]
    assert report.total_sent() is None


def attention_step(mask: Any, masked: Any, per_example: bool = False) -> tuple[Any, ...]:
    """Return a step with causal attention of which all axes but the heads have one size."""
    size = 16
    batch, pos, embed, heads, head_dim = axn.make_axes(batch=size, pos=size, embed=size, heads=4, head_dim=size)

    def attend(x: Any, w: Any) -> Any:
        q, k, v = (axn.dot(x, w[n], axis="embed") for n in "qkv")
        k, v = k.rename({"pos": "key_pos"}), v.rename({"pos": "key_pos"})
        weights = axn.nn.softmax(masked(mask(size), axn.dot(q, k, axis="head_dim")), axis="key_pos")
        return axn.dot(axn.dot(weights, v, axis="key_pos"), w["o"], axis=("heads", "head_dim"))

    def loss(w: Any, x: Any) -> jax.Array:
        y = axn.vmap(attend, "batch")(x, w) if per_example else attend(x, w)
        return axn.mean(y * y).scalar()

    def step(w: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(w, x)
        return value, jax.tree.map(lambda a, b: a - 0.1 * b, w, gradients)

    weights = {n: axn.ones((embed, heads, head_dim)) for n in "qkv"} | {"o": axn.ones((heads, head_dim, embed))}
    return step, *jax.eval_shape(lambda: (weights, axn.ones((batch, pos, embed))))


MASKS = {
    "named": lambda n: axn.arange(axn.Axis("pos", n)).broadcast_axis({"key_pos": n}) >= axn.arange({"key_pos": n}),
    "without names": lambda n: axn.named(jnp.tril(jnp.ones((n, n), bool)), ("pos", "key_pos")),
    "transposed": lambda n: axn.named(jnp.triu(jnp.ones((n, n), bool)), ("key_pos", "pos")),
}


@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize(
    ("how", "masked"),
    [
        ("where", lambda mask, scores: axn.where(mask, scores, -1e9)),
        ("zero", lambda mask, scores: axn.where(mask, scores, 0.0)),
        ("bias", lambda mask, scores: scores + axn.where(mask, 0.0, -1e9)),
    ],
)
def test_a_mask_whose_axes_have_the_size_of_the_batch(mask: str, how: str, masked: Any) -> None:
    case = attention_step(MASKS[mask], masked)
    for mapping in ({"batch": "data"}, {"heads": "data"}, ({"embed": "data"}, {"batch": "data"})):
        found = [
            axn.insight.explain(*case, mapping=mapping, mesh=cases.mesh_of(data=4), by=by).total_sent()
            for by in ("names", "partitioner")
        ]
        assert found[0] == found[1] and found[0], mapping
    with pytest.raises(ValueError, match="pos becomes key_pos, which is sharded otherwise"):
        axn.insight.explain(*case, mapping={"pos": "data"}, mesh=cases.mesh_of(data=4), by="names")


def test_a_vmap_over_an_axis_of_the_size_of_others() -> None:
    case = attention_step(MASKS["named"], lambda mask, scores: axn.where(mask, scores, -1e9), per_example=True)
    for mapping in ({"batch": "data"}, {"heads": "data"}, ({"embed": "data"}, {"batch": "data"})):
        early, true = both(case, mapping)
        assert early.total_sent() == true.total_sent() and early.flops == true.flops, mapping


FLOAT = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
NAMED = axn.named(FLOAT((16, 32)), ("embed", "mlp")), axn.named(FLOAT((8, 16)), ("batch", "embed"))


@eqx.filter_jit
def squares(w: Any, x: Any) -> Any:
    return jax.value_and_grad(lambda w: axn.mean(axn.square(axn.dot(x, w, axis="embed"))).scalar())(w)


def mapped(w: Any, x: Any) -> Any:
    def loss(w: Any) -> jax.Array:
        one = lambda x: axn.sum(axn.square(axn.dot(axn.named(x, ("embed",)), w, axis="embed"))).scalar()
        return jnp.mean(jax.vmap(one)(x.array))

    return jax.value_and_grad(loss)(w)


def called_back(w: Any, x: Any) -> Any:
    total = axn.sum(axn.dot(x, w, axis="embed")).array
    return total * jax.pure_callback(lambda a: a, FLOAT(()), total)


def means(centers: Any, x: Any) -> Any:
    """Move the centers of k-means."""

    def move(_: Any, centers: Any) -> Any:
        apart = axn.sum(axn.square(x.broadcast_axis({"k": 8}) - centers), "embed")
        own = (axn.arange({"k": 8}).broadcast_axis({"batch": 8}) == axn.argmin(apart, "k")) * 1.0
        return axn.dot(own, x, axis="batch") / (axn.sum(own, "batch") + 1)

    return jax.lax.fori_loop(0, 3, move, centers)


def orthogonalized(w: Any, x: Any) -> Any:
    """Multiply a gradient with itself, as Muon does, in raw JAX."""
    found = jax.grad(lambda w: axn.mean(axn.square(axn.dot(x, w, axis="embed"))).scalar())(w).array
    for _ in range(2):
        found = found + (found @ found.T) @ found
    return axn.named(w.array - found, ("embed", "mlp"))


def raw_attention(p: Any, x: Any) -> Any:
    """Attend with raw arrays, whose axes are joined and split."""

    def loss(p: Any) -> jax.Array:
        q = (x.reshape(-1, 16) @ p["up"]).reshape(8, 4, 4, 8)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q), -1)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, q).reshape(8, 4, 32)
        return jnp.mean((y @ p["down"]) ** 2)

    return jax.value_and_grad(loss)(p)


ATTENTION = (
    axn.names.distribute(
        raw_attention,
        names=({"up": "embed heads*head_dim", "down": "heads*head_dim embed"}, "batch pos embed"),
    ),
    {"up": FLOAT((16, 32)), "down": FLOAT((32, 16))},
    FLOAT((8, 4, 16)),
)


@pytest.mark.parametrize(
    ("case", "mapping", "exact"),
    [
        pytest.param((lambda w, x, s: axn.dot(x, w, axis="embed") * s, *NAMED, np.float32(2)), {"embed": "data"}, True,
                     id="numpy scalar"),
        pytest.param((squares, *NAMED), {"batch": "data"}, True, id="filter_jit"),
        pytest.param((called_back, *NAMED), {"batch": "data"}, True, id="callback"),
        pytest.param((means, axn.named(FLOAT((8, 16)), ("k", "embed")), NAMED[1]), {"batch": "data"}, True, id="means"),
        pytest.param((orthogonalized, *NAMED), {"batch": "data", "mlp": "model"}, True, id="muon"),
        pytest.param((mapped, *NAMED), STORED, False, id="vmap"),
        pytest.param(ATTENTION, {"batch": "data", "heads": "model"}, True, id="raw"),
        pytest.param(ATTENTION, STORED, False, id="raw, stored"),
    ],
)  # fmt: skip
def test_programs_of_other_kinds(case: Any, mapping: Any, exact: bool) -> None:
    early, true = both(case, mapping)
    assert early.flops == true.flops
    if exact:
        assert sent(early) == sent(true) and early.uncertain == 0
    else:
        assert 0 < abs((true.total_sent() or 0) - (early.total_sent() or 0)) <= early.uncertain


def test_bounds_take_the_least_branch() -> None:
    """The flops and the sums of the branch that takes least, and nothing of a conditional that may do nothing."""

    def step(w: Any, x: Any, i: Any) -> Any:
        once = lambda: axn.sum(axn.dot(x, w, axis="embed")).scalar()
        twice = lambda: axn.sum(axn.dot(axn.tanh(axn.dot(x, w, axis="embed")), w, axis="mlp")).scalar()
        return jax.lax.cond(i > 0, once, twice) + jax.lax.cond(i > 1, once, lambda: 0.0)

    mapping, chip = {"batch": "data"}, axn.insight.CHIPS["v5e"]
    report = axn.insight.explain(
        step, *NAMED, jax.ShapeDtypeStruct((), "int32"), mapping=mapping, mesh=cases.mesh_of(data=4), by="names",
        chip=chip,
    )  # fmt: skip
    product = 2 * 8 * 16 * 32 // 4
    assert report.flops == 2 * product and report.bounds is not None and report.bounds.compute is not None
    assert report.bounds.compute == product / chip.flops
    assert report.bounds.links == {("data",): pytest.approx(6 / chip.link_bandwidth)}
    assert report.least_flops == product and "and at least" in str(report)


def test_bounds_leave_out_products_of_8_bits() -> None:
    """Chips multiply more of them in a second; on GPUs, an all-reduce sends an array once at least."""
    chip = axn.insight.CHIPS["h100"]
    mesh = cases.mesh_of(data=4)

    def of(dtype: str) -> Any:
        return axn.ones({"embed": 16, "mlp": 32}, dtype), axn.ones({"batch": 8, "embed": 16}, dtype)

    for by, dtype in itertools.product(("names", "partitioner"), ("int8", "float32")):
        given = jax.eval_shape(lambda dtype=dtype: of(dtype))
        step = lambda w, x: axn.dot(x, w, axis="embed")
        report = axn.insight.explain(step, *given, mapping={"embed": "data"}, mesh=mesh, by=by, chip=chip)
        sent = report.total_sent()
        flops = 2 * 8 * 16 * 32 // 4
        assert report.flops == flops and sent and report.bounds is not None
        assert report.bounds.compute == (0 if dtype == "int8" else flops / chip.flops)
        assert report.bounds.links == {("data",): pytest.approx(sent / 2 / chip.link_bandwidth)}


X = jax.ShapeDtypeStruct((8, 8), "float32")


def causal(x: Any) -> Any:
    """Attend along "batch", as along a sequence."""
    keys = x.rename({"batch": "key_pos"})
    return axn.nn.attention.dot_product_attention(x, keys, keys, "key_pos", "size", axn.nn.attention.Causal("batch"))


@pytest.mark.parametrize(
    ("what", "function", "mapping", "message"),
    [
        ("sort", lambda x: axn.sort(x, "batch"), {"batch": "data"}, r"sort along batch in sort\[batch, embed"),
        ("slice", lambda x: x["batch", 1:5], {"batch": "data"}, "slice along batch"),
        ("reshape", lambda x: x.flatten_axes(("batch", "embed"), "all"), {"batch": "data"}, "reshape along batch"),
        ("plain", lambda x: jnp.linalg.qr(x.array)[0], {"batch": "data"}, "along batch"),
        ("rename", lambda x: x.rename({"batch": "other"}) * 2, {"batch": "data"}, "batch becomes other"),
        ("product", lambda x: axn.dot(x, x.rename({"batch": "b"}), axis="embed"), {"batch": "data"}, "batch becomes b"),
        ("both", lambda x: x + x.rename({"batch": "embed", "embed": "batch"}), {"batch": "data"}, "becomes batch"),
        ("named", lambda x: x + axn.named(x.array, ("embed", "batch")), {"batch": "data"}, "batch becomes embed"),
        ("returned", lambda x: (x * 2).rename({"batch": "b"}), {"batch": "data"}, "otherwise where it is returned"),
        (
            "gradient",
            jax.grad(lambda x: axn.sum(x + x.rename({"batch": "embed", "embed": "batch"})).scalar()),
            {"batch": "data"},
            "becomes batch",
        ),
        ("attention", lambda x: causal(x.broadcast_axis({"size": 4})), {"batch": "model"}, "batch becomes key_pos"),
        (
            "no gradient",
            lambda x: axn.dot(x.rename({"embed": "a"}), x, axis="batch"),
            ({"embed": "data"}, {"batch": "data"}),
            "which is no gradient",
        ),
        ("argmax", lambda x: axn.argmax(x, "batch"), {"batch": "data"}, "argmax along batch"),
        ("solve", lambda x: jnp.linalg.solve(x.array, x.array[0]), {"batch": "data"}, "lu along batch"),
        ("columns", lambda x: jnp.linalg.solve(x.array, x.array[0]), {"embed": "data"}, "triangular_solve along embed"),
        ("shift", lambda x: jax.lax.pad(x.array, 0.0, [(1, -1, 0), (0, 0, 0)]), {"batch": "data"}, "pad along batch"),
        ("placement", lambda x: axn.shard(x, P("model")), {"batch": "data"}, "without a mesh, which it asks for"),
        (
            "swap",
            lambda x: axn.shard(x, {"batch": "model", "embed": "data"}),
            {"batch": "data", "embed": "model"},
            r"several exchanges, or to mesh axes in another order in shard\[.* \(at test_by_names.py:\d+\)",
        ),
        (
            "mixed",
            lambda x: axn.shard(axn.sin(x), {"embed": "data"}) + x,
            {"batch": "data"},
            r"\[batch, embed\], which lies by another mapping than what it is used with in add",
        ),
        (
            "stored",
            lambda x: axn.shard(x, {"batch": None}),
            ({"embed": "data"}, {"batch": "data"}),
            "which lies by another mapping beside a parameter mapping",
        ),
        ("inner", lambda x: axn.shard(x, {"batch": "other"}), {}, "'batch' is mapped to mesh axis 'other', but"),
        (
            "mapped",
            lambda x: axn.vmap(lambda x: axn.shard(x, {"embed": "model"}), "batch")(x),
            {"batch": "data"},
            "a placement along batch",
        ),
        ("constraint", lambda x: jax.lax.with_sharding_constraint(x, P("model")), {"batch": "data"}, "asks for"),
        (
            "idle",
            lambda x: axn.dot(x, axn.ones({"batch": 8, "z": 4}), axis="batch"),
            ({"embed": "data"}, {}),
            "is stored sharded",
        ),
        ("one device", lambda x: x * 2, {"batch": "devices"}, "mapped to mesh axis 'devices', but the mesh has"),
        (
            "indivisible",
            lambda x: x * 2,
            {"batch": ("data", "model"), "embed": None},
            "multiple of 8.* count with a rounded size",
        ),
        ("together", lambda x: x * 2, {"batch": "data", "embed": "data"}, "both sharded over data"),
    ],
)
def test_what_names_do_not_tell_is_refused(what: str, function: Any, mapping: Any, message: str) -> None:
    x = jax.eval_shape(lambda: axn.ones({"batch": 12 if what == "indivisible" else 8, "embed": 8}))
    with jax.set_mesh(cases.mesh_of(data=4, model=2)), pytest.raises(ValueError, match=message):
        axn.insight.explain(function, x, mapping=mapping, by="names")


def _in_columns(x: axn.NamedArray) -> axn.NamedArray:
    """Compute with rows sharded along another axis, and with a new array, which the mapping active there places."""
    x = axn.shard(axn.shard(axn.sin(x)), {"embed": "data"})
    with axn.axis_mapping({"embed": "data"}):
        bias = axn.arange(x.resolve_axis("batch"), dtype=jnp.float32).broadcast_axis({"one": 1}) * 2
        x = axn.shard(axn.nn.softmax(x, "batch") * bias["one", 0])
    return axn.shard(x)


def _merged(x: axn.NamedArray) -> axn.NamedArray:
    with axn.axis_mapping(merge=True, embed=None):
        return axn.sin(axn.shard(axn.shard(axn.sin(x), {"batch": "data", "embed": "model"})))


def _turned(x: axn.NamedArray) -> Any:
    def body(x: axn.NamedArray, _: Any) -> Any:
        return _in_columns(x), None

    return jax.lax.scan(body, x, None, length=3)[0]


PLACED = {
    "there and back": (_in_columns, {"batch": "data"}),
    "there and back, gradient": (jax.grad(lambda x: axn.sum(_in_columns(x) ** 2).scalar()), {"batch": "data"}),
    "in a loop": (_turned, {"batch": "data"}),
    "result": (lambda x: axn.shard(axn.sin(x), {"embed": "data"}), {"batch": "data"}),
    "replicated": (lambda x: axn.sin(axn.shard(axn.sin(x), {})), {"batch": "data"}),
    "two axes": (lambda x: axn.shard(axn.sin(x), {"embed": ("data", "model")}).array, {"batch": ("data", "model")}),
    "minor": (lambda x: axn.shard(axn.sin(x), {"batch": "data", "embed": "model"}).array, {"batch": ("data", "model")}),
    "cut": (lambda x: axn.shard(axn.sin(x), {"batch": "data", "embed": "model"}).array, {"batch": "data"}),
    "part": (lambda x: axn.shard(axn.sin(x), {"batch": "data"}).array, {"batch": ("data", "model")}),
    "merged": (_merged, {"batch": "data", "embed": "model"}),
    "where it lies": (lambda x: axn.shard(axn.sin(x)), {"batch": "data"}),
}


@pytest.mark.parametrize("what", PLACED)
def test_a_change_of_mapping_sends_what_the_partitioner_says(what: str) -> None:
    step, mapping = PLACED[what]
    x = jax.eval_shape(lambda: axn.ones({"batch": 16, "embed": 8}))
    early, true = both((step, x), mapping)
    assert sent(early) == sent(true)
    assert bool(sent(early)) == (what not in ("cut", "where it lies"))


def test_a_plan_places_where_the_step_asks() -> None:
    """`shard` without a mapping is by each mapping that the plan tries, and sends nothing where arrays lie by it."""
    x = jax.eval_shape(lambda: axn.ones({"batch": 16, "embed": 8}))
    w = jax.eval_shape(lambda: axn.ones({"embed": 8, "mlp": 4}))
    plans = [
        axn.insight.plan(lambda w, x, own=own: axn.dot(own(axn.sin(x)), w, axis="embed"), w, x, chips=2)
        for own in (axn.exp, lambda x: axn.exp(axn.shard(x)))
    ]
    first, second = ([(p.compute, p.sent, p.flops) for p in plan.found] for plan in plans)
    assert first == second and plans[1].best.compute == {"batch": "data"}


def test_products_in_another_mapping_are_divided_by_it() -> None:
    x = jax.eval_shape(lambda: axn.ones({"batch": 16, "embed": 8}))
    w = jax.eval_shape(lambda: axn.ones({"embed": 8, "mlp": 4}))
    early, true = both(
        (lambda x, w: axn.dot(axn.shard(axn.sin(x), {"batch": ("data", "model")}), w, axis="embed").array, x, w),
        {"batch": "data"},
    )
    assert early.flops == true.flops == 2 * 2 * 8 * 4
    assert sent(early) == sent(true)


def _matrices(x: axn.NamedArray) -> axn.NamedArray:
    return axn.named(x.array[:, :, None] * jnp.eye(8)[None], ("batch", "row", "col"))


def _solved(x: axn.NamedArray, w: axn.NamedArray) -> axn.NamedArray:
    return axn.linalg.solve(_matrices(x), w, ("row", "col"))


LOCAL = {
    "solve": lambda x: _solved(x, x.rename({"embed": "row"})),
    "solve, gradient": jax.grad(lambda x: axn.sum(axn.sin(_solved(x, x.rename({"embed": "row"})))).scalar()),
    "solve by position": lambda x: jnp.linalg.solve(x.array[:, :, None] * jnp.eye(8)[None], x.array[..., None]),
    "solve for several": lambda x: _solved(x, x.rename({"embed": "row"}).broadcast_axis({"rhs": 2})),
    "inv": lambda x: axn.linalg.inv(_matrices(x), ("row", "col")),
    "det": lambda x: axn.linalg.det(_matrices(x), ("row", "col")),
    "slogdet, gradient": jax.grad(lambda x: axn.sum(axn.linalg.slogdet(_matrices(x), ("row", "col"))[1]).scalar()),
    "xor": lambda x: jax.lax.reduce_xor(x.array.astype(jnp.int32), (1,)),
    "cholesky": lambda x: jnp.linalg.cholesky(x.array[:, :, None] * jnp.eye(8)[None]),
    "tile": lambda x: jax.lax.tile(x.array, (1, 2)),
    "split": lambda x: jax.vmap(jax.random.split)(jax.random.wrap_key_data(x.array[:, :2].astype(jnp.uint32))),
}


@pytest.mark.parametrize("what", LOCAL)
def test_what_runs_along_other_axes_exchanges_nothing(what: str) -> None:
    x = jax.eval_shape(lambda: axn.ones({"batch": 8, "embed": 8}))
    early, true = both((LOCAL[what], x), {"batch": "data"})
    assert sent(early) == sent(true) == {}


def test_an_array_that_is_sharded_without_names_is_refused() -> None:
    mesh = cases.mesh_of(data=8)
    x = jax.ShapeDtypeStruct((8, 4), "float32", sharding=jax.NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match="without names that is sharded"):
        axn.insight.explain(lambda x: x.sum(), x, mapping={"batch": "data"}, mesh=mesh, by="names")


def test_a_compiled_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"takes the function that is compiled.*pass `mapping=`"):
        axn.insight.explain(axn.named_jit(lambda x: x, {}), X, by="names")
    with axn.axis_mapping({"batch": "data"}), pytest.raises(ValueError, match="mappings of its own"):
        axn.insight.explain(axn.named_jit(lambda x: x, {}), X, by="names")


def test_the_active_mapping_is_taken() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return (x @ w).sum()

    step = axn.names.distribute(jax.grad(loss), names=("embed mlp", "batch embed"))
    args = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((16, 8), "float32")
    mesh = cases.mesh_of(data=8)
    given = axn.insight.explain(step, *args, mapping={"batch": "data"}, mesh=mesh, by="names")
    with axn.axis_mapping({"batch": "data"}):
        found = axn.insight.explain(step, *args, mesh=mesh, by="names")
    assert found.collectives == given.collectives != ()


SIZES = dict.fromkeys(("batch", "features", "hidden"), 16) | {"pos": 8, "embed": 32, "mlp": 64, "vocab": 128}
SIZES |= {"heads": 4, "head_dim": 8, "layers": 2, "classes": 8}


def summed(report: axn.insight.Report) -> dict[Any, int]:
    """Return the bytes that each device sends, by mesh axes and kind, as if each reduce-scatter were an all-reduce."""
    found: collections.Counter[Any] = collections.Counter()
    for c in report.collectives:
        twice = c.kind == "reduce-scatter"
        found[c.axes, "all-reduce" if twice else c.kind] += (c.total_sent or 0) * (1 + twice)
    return found


@pytest.mark.parametrize(
    ("model", "mapping", "by", "kind", "exact"),
    [
        ("gpt2", "fsdp", "partitioner", AxisType.Auto, True),
        ("linen_scanned", "fsdp", "compiled", AxisType.Explicit, True),
        ("nnx_transformer", "heads", "partitioner", AxisType.Explicit, False),
        ("nnx_transformer", "hybrid", "partitioner", AxisType.Auto, False),
        ("equinox_transformer", "fsdp", "partitioner", AxisType.Auto, False),
    ],
)
def test_raw_models_whose_parameters_are_stored_sharded(
    model: str, mapping: str, by: Any, kind: AxisType, exact: bool
) -> None:
    """Tables are looked up and biases are added as they are stored; XLA for CPUs adds gradients up by all-reduces."""
    case = MODELS[model](SIZES)
    step = axn.names.distribute(jax.value_and_grad(case.loss), names=(case.given[0], *case.given[2:]))
    with jax.set_mesh(cases.mesh_of(kind, data=4, model=2)), jax.numpy_rank_promotion("allow"):
        early, true = (
            axn.insight.explain(step, *case.loss_args, mapping=MAPPINGS[mapping], by=b) for b in ("names", by)
        )
    assert early.flops == true.flops
    assert 0 < (true.total_sent() or 0) - (early.total_sent() or 0) <= early.uncertain
    if exact:
        assert summed(early) == summed(true)


def test_updates_of_a_raw_table_that_is_stored_sharded() -> None:
    args = FLOAT((128, 32)), jax.ShapeDtypeStruct((16,), "int32"), FLOAT((16, 32))
    step = axn.names.distribute(lambda t, i, x: t.at[i].add(x), names=("vocab embed", "batch", "batch embed"))
    early, true = both((step, *args), MAPPINGS["fsdp"])
    assert sent(early).keys() == {(ALL, "all-gather", ""), (ALL, "all-to-all", "")}
    assert sent(early) == sent(true) and early.uncertain == 0
    with pytest.raises(ValueError, match=r"a table that is stored sharded \(at test_by_names"):
        both((axn.names.distribute(lambda t, i: t[i], names=("vocab embed", "batch")), *args[:2]),
             ({"vocab": "data"}, {"batch": "data"}))  # fmt: skip
