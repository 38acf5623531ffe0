"""Reports agree with the compiled program: bytes, counts, flops, lines and names."""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import json
import math
import operator
import pickle
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

import axonym as axn
from axonym import insight
from axonym.insight import _compiling
from tests.insight import cases
from tests.insight.counted import counted

KINDS = {"": AxisType.Auto, ", explicit": AxisType.Explicit}
CASES: dict[str, Callable[[], cases.Case]] = {
    **{
        f"{model} {strategy}{kind}": functools.partial(cases.language_model, model, strategy, KINDS[kind])
        for model in ("llama", "gpt2")
        for strategy in cases.example("mappings").COMPUTE
        for kind in KINDS
        if (model, kind) == ("llama", "") or strategy in ("sequence", "mixed")
    },
    **{
        f"{model}, {mapping}{kind}": functools.partial(case, mapping, KINDS[kind])
        for model, module, case in (
            ("mixture", "mixture_of_experts", cases.mixture),
            ("classifier", "image_classifier", cases.classifier),
        )
        for mapping in cases.example(module).MAPPINGS
        for kind in KINDS
    },
    **{f"pipeline{kind}": functools.partial(cases.pipeline, KINDS[kind]) for kind in KINDS},
    **{f"plain JAX{kind}": functools.partial(cases.plain_jax, KINDS[kind]) for kind in KINDS},
}
"""The models of the examples under their mappings: `test_by_names.py` and `test_laws.py` count what the others send."""
NOT_KNOWN = {
    "mixture, experts": 8,
    "mixture, tokens": 2,
    "classifier, height": 36,  # gradients of weights, for each position in the kernels
    "pipeline": 6,
    "gpt2 mixed": 1,
    "plain JAX": 4,
}
"""The largest number of arrays without a reason: zero in the other cases."""
ON_ALL_VERSIONS = {
    "llama fsdp", "llama mixed", "llama sequence", "gpt2 mixed, explicit",
    "mixture, experts", "classifier, height", "pipeline, explicit", "plain JAX",
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [c if c in ON_ALL_VERSIONS else pytest.param(c, marks=pytest.mark.oldest) for c in CASES]
)
def test_bytes_and_counts_are_those_of_the_program(case: str) -> None:
    step: Any
    mesh, step, args = CASES[case]()
    with jax.set_mesh(mesh):
        report = axn.insight.explain(step, *args, by="partitioner")
        text = _compiling.partitioned(step.lower(*args))
    found: collections.Counter[Any] = collections.Counter(runs=report.count() or 0)
    for c in report.collectives:
        assert c.times is not None and c.sent is not None and c.source is not None, c
        found[c.kind, c.axes] += c.size * c.times
    assert {k: v for k, v in found.items() if v} == counted(text, mesh)
    unknown = sum(c.reason is None for c in report.collectives)
    assert unknown <= NOT_KNOWN.get(case.removesuffix(", explicit"), 0)


def test_the_partitioner_tells_what_the_compiled_program_does() -> None:
    mesh, step, args = cases.mixture("experts")
    with jax.set_mesh(mesh):
        early, late = (axn.insight.explain(step, *args, by=by) for by in ("partitioner", "compiled"))
    assert early.collectives == late.collectives and early.flops == late.flops
    assert early.memory is None and late.memory is not None


# --- flops ---


def flops_of(jaxpr: Any) -> int:
    """Those of all products in a traced function."""
    found = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (summed, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            found += 2 * eqn.outvars[0].aval.size * math.prod(shape[i] for i in summed)
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            found += times * flops_of(inner) if hasattr(inner, "eqns") else 0
    return found


@pytest.mark.parametrize("strategy", ["data", "tensor"])
def test_flops_are_those_of_all_products(strategy: str) -> None:
    """Every product is sharded over all devices."""
    mesh, step, (model, tokens) = cases.language_model("gpt2", strategy)
    with jax.set_mesh(mesh):
        report = axn.insight.explain(step, model, tokens, by="partitioner")
    assert report.flops is not None
    assert 8 * report.flops == flops_of(jax.make_jaxpr(cases.gradients)(model, tokens).jaxpr)


# --- names, lines and phases ---

Batch, Embed, Mlp = axn.make_axes(batch=16, embed=32, mlp=48)


def ones() -> Any:
    return {"up": axn.ones((Embed, Mlp)), "down": axn.ones((Mlp, Embed))}


def weights() -> Any:
    return jax.eval_shape(ones)


def batch() -> Any:
    return jax.eval_shape(lambda: axn.ones((Batch, Embed)))


def loss(w: Any, x: Any) -> jax.Array:
    hidden = axn.tanh(axn.dot(x, w["up"], axis="embed"))
    return axn.mean(axn.dot(hidden, w["down"], axis="mlp")).scalar()


def step(w: Any, x: Any) -> Any:
    return jax.value_and_grad(loss)(w, x)


def line_of(function: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


FSDP_AND_TENSOR = {"embed": "data", "mlp": "model"}, {"batch": "data", "mlp": "model"}


def test_each_array_has_names_a_phase_a_line_and_a_reason(mesh: Any) -> None:
    with jax.set_mesh(mesh):
        report = axn.insight.explain(step, weights(), batch(), mapping=FSDP_AND_TENSOR, by="partitioner")
    up, down = line_of(loss, "hidden = "), line_of(loss, "return")
    stored = "embed is stored sharded over data, and all-gathered where it is used"
    by_batch, by_mlp = "sums over batch, which is sharded over data", "sums over mlp, which is sharded over model"
    of_up, of_down = f"the gradient of [embed, mlp] {by_batch}", f"the gradient of [mlp, embed] {by_batch}"
    assert {(c.kind, c.axes, c.array, c.phase, c.source and c.source.line, c.reason) for c in report.collectives} == {
        ("all-gather", ("data",), "f32[embed=32, mlp=24]", "forward", up, stored),
        ("all-gather", ("data",), "f32[mlp=24, embed=32]", "forward", down, stored),
        ("reduce-scatter", ("data",), "f32[embed=32, mlp=24]", "backward", up, of_up),
        ("reduce-scatter", ("data",), "f32[mlp=24, embed=32]", "backward", down, of_down),
        ("all-reduce", ("model",), "f32[batch=4, embed=32]", "forward", down, by_mlp),
        ("all-reduce", ("data",), "f32[]", "forward", down, by_batch),
    }
    assert report.mesh == {"data": 4, "model": 2}
    assert report.total_sent("model") == 2 * (4 * 32 * 4) * 1 // 2
    assert report.total_sent(kind="all-gather") == 2 * (32 * 24 * 4) * 3 // 4
    assert report.total_sent("data", "reduce-scatter", "backward") == 2 * (32 * 24 * 4) * 3 // 4


def test_lines_are_those_of_each_call() -> None:
    """Also where two calls share a compiled operation."""

    def twice(x: Any) -> Any:
        first = axn.sum(x, "batch")
        again = axn.sum(x * 2, "batch")
        return first, again

    with jax.set_mesh(cases.mesh_of(data=8)):
        report = axn.insight.explain(twice, batch(), mapping={"batch": "data"}, by="partitioner")
    assert {c.source.line for c in report.collectives if c.source} == {
        line_of(twice, "first ="),
        line_of(twice, "again ="),
    }


def test_what_is_computed_again_is_told_from_the_backward_pass() -> None:
    def layer(x: Any, w: Any) -> Any:
        return axn.tanh(axn.dot(axn.tanh(axn.dot(x, w["up"], axis="embed")), w["down"], axis="mlp"))

    def again(w: Any, x: Any) -> Any:
        def total(w: Any) -> jax.Array:
            return axn.mean(axn.fold(layer, "layers", remat=True)(x, w)).scalar()

        return jax.value_and_grad(total)(w)

    w = jax.eval_shape(lambda: {k: axn.broadcast_axis(x, axn.Axis("layers", 3)) for k, x in ones().items()})
    with jax.set_mesh(cases.mesh_of(data=4, model=2)):
        report = axn.insight.explain(again, w, batch(), mapping=FSDP_AND_TENSOR, by="partitioner")
    gathers = collections.Counter((c.phase, c.times) for c in report.collectives if c.kind == "all-gather")
    assert gathers == {("forward", 3): 2, ("recomputed", 3): 2}
    assert {c.phase for c in report.collectives if c.kind == "reduce-scatter"} == {"backward"}


def test_loops_are_counted_and_those_of_unknown_length_are_not() -> None:
    def summed(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x.sum(0, keepdims=True) + x, P("data"))

    x = jax.ShapeDtypeStruct((8, 4), "float32")
    with jax.set_mesh(cases.mesh_of(data=8)):
        known = axn.insight.explain(
            lambda x: jax.lax.fori_loop(0, 5, lambda _, x: summed(x), jax.lax.with_sharding_constraint(x, P("data"))), x
        )
        unknown = axn.insight.explain(
            lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 9, summed, jax.lax.with_sharding_constraint(x, P("data"))),
            x,
        )
    assert [(c.kind, c.times) for c in known.collectives] == [("all-reduce", 5)]
    assert None in {c.times for c in unknown.collectives}
    assert unknown.total_sent() is None and "and more that depends on values" in str(unknown)


def test_an_array_without_names_has_no_reason() -> None:
    x = jax.ShapeDtypeStruct((8, 4), "float32", sharding=jax.NamedSharding(cases.mesh_of(data=8), P("data")))
    (found,) = axn.insight.explain(jax.jit(lambda x: jnp.sum(x, axis=0)), x, by="partitioner").collectives
    assert (found.kind, found.axes, found.array, found.reason) == ("all-reduce", ("data",), "f32[4]", None)
    assert found.source is not None and found.source.file == __file__


# --- meshes, forms and bounds ---


def test_a_mesh_without_devices_takes_those_of_the_machine() -> None:
    small = AbstractMesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
    report = axn.insight.explain(step, weights(), batch(), mapping=FSDP_AND_TENSOR, mesh=small, by="partitioner")
    assert report.mesh == {"data": 4, "model": 2} and len(report.collectives) == 6
    large = AbstractMesh((8, 4), ("data", "model"), (AxisType.Auto,) * 2)
    near, far = (
        axn.insight.explain(step, weights(), batch(), mapping=FSDP_AND_TENSOR, mesh=large, by=by)
        for by in ("partitioner", "names")
    )
    assert near.mesh == {"data": 8, "model": 4} and near.total_sent() == far.total_sent() and near.flops == far.flops
    placed = jax.ShapeDtypeStruct((64, 64), "float32", sharding=jax.NamedSharding(large, P("data")))
    (found,) = axn.insight.explain(jax.jit(jnp.sum), placed, mesh=large, by="partitioner").collectives
    assert found.axes == ("data",)
    with pytest.raises(ValueError, match="has 32 devices and this process 8"):
        axn.insight.explain(step, weights(), batch(), mesh=large)


def test_the_forms_of_a_report() -> None:
    with jax.set_mesh(cases.mesh_of(data=4, model=2)):
        report = axn.insight.explain(step, weights(), batch(), mapping=FSDP_AND_TENSOR, chip="v5e")
    assert report.memory is not None and report.bounds is not None and report.flops is not None
    assert report.memory.arguments == 4 * (2 * 8 * 24 + 4 * 32)
    assert report.bounds.compute is not None and report.bounds.compute * 197e12 == pytest.approx(report.flops)
    assert report.bounds.links["data",] == pytest.approx((report.total_sent("data") or 0) / 200e9)
    text, data = str(report), json.loads(report.to_json())
    assert (
        "over data: each device sends" in text
        and "all-gather" in text
        and f"bottleneck: {report.bounds.bottleneck}" in text
    )
    assert "### over model" in text and "- 1 x 512 B  all-reduce  forward" in text
    assert data["collectives"][0]["kind"] and data["mesh"] == {"data": 4, "model": 2}
    assert data["bounds"]["links"][0]["axes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "guess"}, "`by` is one of 'compiled', 'partitioner'"),
        ({"chip": "v0"}, "the chips with figures are v4, v5e"),
        ({"mapping": 3}, "a mapping is a resource mapping, or a pair"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        axn.insight.explain(step, weights(), batch(), **options)


def test_a_compiled_step_takes_no_other_mapping() -> None:
    with pytest.raises(ValueError, match="compiled with mappings of its own"):
        axn.insight.explain(axn.named_jit(step), weights(), batch(), mapping={"batch": "data"})


@pytest.mark.parametrize("function", ["explain", "compare", "snapshot", "plan", "Contract.check"])
def test_what_is_reported_on_is_called_as_elsewhere(function: str) -> None:
    """The parameter has the name that it has in the transforms and in `named_jit`."""
    found = operator.attrgetter(function)(axn.insight)
    assert next(name for name in inspect.signature(found).parameters if name != "self") == "fn"
    assert next(iter(inspect.signature(axn.named_jit).parameters)) == "fn"


def test_other_threads_compile_meanwhile(mesh: Any) -> None:
    """Also functions of the name of the step, whose compilation is not ended, nor the process."""
    done, failed = threading.Event(), []

    def compile_steps() -> None:
        for i in itertools.count():

            def step(x: Any, i: int = i) -> Any:
                return jnp.tanh(x @ x) + i

            try:
                jax.jit(step).lower(jax.ShapeDtypeStruct((4, 4), "float32")).compile()
            except Exception as error:
                failed.append(error)
            if done.is_set():
                return

    others = [threading.Thread(target=compile_steps) for _ in range(2)]
    for thread in others:
        thread.start()
    try:
        for i in range(20):

            def step(x: Any, i: int = i) -> Any:
                return axn.sum(x * i, "batch")

            report = axn.insight.explain(step, batch(), mapping={"batch": "data"}, mesh=mesh, by="partitioner")
            assert report.count("all-reduce") == 1
    finally:
        done.set()
        for thread in others:
            thread.join()
    assert not failed


@pytest.mark.parametrize("by", ["partitioner", "names"])
def test_a_report_under_an_active_mapping_is_written_and_kept(by: str) -> None:
    mesh = axn.make_mesh({"data": 8})
    with jax.set_mesh(mesh), axn.axis_mapping({"batch": "data"}):
        report = insight.explain(lambda x: x.sum("embed"), axn.ones({"batch": 8, "embed": 4}), by=by)
    assert pickle.loads(pickle.dumps(report)).to_json() == report.to_json()


def test_a_report_moves_no_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = list[Any]()
    monkeypatch.setattr(jax, "device_put", lambda x, *args, **kwargs: moved.append(x))
    mesh = axn.make_mesh({"data": 8})
    by_name = axn.named_jit(lambda x: x * 2, in_placement={"batch": "data"})
    by_sharding = axn.named_jit(lambda x: x * 2, in_placement=jax.NamedSharding(mesh, jax.P("data")))
    with jax.set_mesh(mesh):
        report = axn.insight.explain(by_name, axn.named(np.ones((16, 4), np.float32), ("batch", "embed")))
    assert report.placed[0].over == (("data",), ()) and report.placed[0].bytes == 32
    assert axn.insight.explain(by_sharding, jnp.ones((16, 4))).placed[0].bytes == 32 and not moved
