"""The collectives from Shardy's passes are those of the partitioner, within the error that the report gives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

import axonym as axn
from axonym.insight import _shardy
from tests.insight import cases
from tests.insight.test_by_names import MAPPINGS, both, language_model, sent
from tests.insight.test_explain import CASES, FSDP_AND_TENSOR, batch, step, weights


def total(report: axn.insight.Report) -> int:
    return report.total_sent() or 0


@pytest.mark.parametrize(
    ("name", "mapping"),
    [("llama", m) for m in MAPPINGS] + [("gpt2", m) for m in ("data", "tensor", "features")],
)
def test_bytes_and_flops_are_those_of_the_partitioner(name: str, mapping: str) -> None:
    early, true = both(language_model(name), MAPPINGS[mapping], "shardy")
    assert sent(early) == sent(true) and early.flops == true.flops
    assert early.uncertain < 0.01 * total(true)


@pytest.mark.parametrize(
    ("case", "exact"),
    [
        ("llama tensor, explicit", True),
        ("llama sequence", False),
        ("gpt2 mixed, explicit", False),
        ("mixture, experts", True),
        ("mixture, tokens", True),
        ("classifier, height", False),
    ],
)
def test_any_compiled_step(case: str, exact: bool) -> None:
    compiled: Any
    mesh, compiled, args = CASES[case]()
    with jax.set_mesh(mesh):
        early, true = (axn.insight.explain(compiled, *args, by=by) for by in ("shardy", "partitioner"))
    assert abs(total(early) - total(true)) <= early.uncertain
    assert not exact or sent(early) == sent(true)
    assert all(c.source is not None for c in early.collectives)


@pytest.mark.parametrize("mapping", [{"batch": "data", "pos": "model"}, ({"embed": "data"}, {}), MAPPINGS["fsdp"]])
def test_what_is_off_is_within_what_the_report_says(mapping: Any) -> None:
    name = "gpt2" if mapping == MAPPINGS["fsdp"] else "llama"
    early, true = both(language_model(name), mapping, "shardy")
    assert abs(total(early) - total(true)) <= early.uncertain


def test_each_array_has_the_names_the_line_and_the_reason_of_the_partitioned_one() -> None:
    def told(report: axn.insight.Report) -> set[Any]:
        return {(c.kind, c.axes, c.array, c.phase, c.times, c.sent, c.size, str(c.source), c.operation, c.reason)
                for c in report.collectives}  # fmt: skip

    early, true = both((step, weights(), batch()), FSDP_AND_TENSOR, "shardy")
    assert told(early) == told(true)
    early, true = both(language_model("llama"), MAPPINGS["mixed"], "shardy")
    assert told(early) == told(true)


def test_a_mesh_that_no_machine_here_has() -> None:
    mesh = AbstractMesh((64, 8), ("data", "model"), (AxisType.Auto,) * 2)
    train, mapping = cases.example("train"), {"batch": "data", "mlp": "model"}
    model = jax.eval_shape(train.MODELS["llama"], jax.random.key(0))
    tokens = jax.eval_shape(lambda: axn.zeros({"batch": 128, "pos": 32}, dtype=int))
    near, far = (
        axn.insight.explain(cases.gradients, model, tokens, mapping=mapping, mesh=mesh, by=by, chip="v5e")
        for by in ("shardy", "names")
    )
    assert sent(near) == sent(far) and near.flops == far.flops and near.mesh == {"data": 64, "model": 8}
    assert near.bounds is not None and "any platform" in str(near)


def test_several_mappings_side_by_side() -> None:
    mesh = AbstractMesh((8,), ("data",), (AxisType.Auto,))
    mappings = {"stored": ({"embed": "data"}, {"batch": "data"}), "data": {"batch": "data"}}
    found = axn.insight.compare(step, [weights(), batch()], mappings, mesh=mesh, by="shardy")
    assert "all-gather over data" in str(found) and found.reports["data"].count("all-gather") == 0


def test_a_loop_whose_length_is_not_known() -> None:
    def summed(x: Any) -> Any:
        return jax.lax.while_loop(lambda x: x.array[0] < 9, lambda x: x + axn.sum(axn.ones(x.axes) * x), x)

    x = jax.eval_shape(lambda: axn.ones({"batch": 8}))
    report = axn.insight.explain(summed, x, mapping={"batch": "data"}, mesh=cases.mesh_of(data=8), by="shardy")
    assert [(c.kind, c.times) for c in report.collectives] == [("all-reduce", None)]


def test_what_a_loop_does_not_change_is_within_what_the_report_says() -> None:
    """The compiler gathers the weight once."""

    def looped(w: jax.Array, x: jax.Array) -> jax.Array:
        use = lambda x, _: (jnp.tanh(x @ jax.lax.with_sharding_constraint(w, P())), None)
        return jax.lax.scan(use, x, length=8)[0]

    mesh = cases.mesh_of(data=8)
    place = lambda spec: jax.ShapeDtypeStruct((16, 16), "float32", sharding=jax.NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        args = place(P("data")), place(P("data"))
        early, true = (axn.insight.explain(looped, *args, by=by) for by in ("shardy", "partitioner"))
    assert 0 < total(true) < total(early) <= total(true) + early.uncertain


Embed, Mlp = axn.make_axes(embed=32, mlp=64)


def multilayer(x: axn.NamedArray, up: axn.NamedArray, down: axn.NamedArray) -> axn.NamedArray:
    return x + axn.dot(axn.tanh(axn.dot(x, up, axis=Embed)), down, axis=Mlp)


REPEATED: dict[str, Any] = {
    "the same": lambda x, up, down: multilayer(x, up, down) + multilayer(x, up, down),
    "times one": lambda x, up, down: multilayer(x, up, down) + multilayer(x * 1, up, down),
    "checkpoint": lambda x, up, down: jax.checkpoint(multilayer)(multilayer(x, up, down), up, down),
    "of a constant": lambda x, up, down: x + multilayer(axn.ones(x.axes), up, down),
}


@pytest.mark.parametrize("what", REPEATED)
@pytest.mark.parametrize(
    "mapping", [({"embed": "data"}, {"batch": "data"}), {"batch": "data", "mlp": "model"}], ids=["fsdp", "tensor"]
)
def test_what_is_computed_twice_is_within_what_the_report_says(what: str, mapping: Any) -> None:
    def loss(up: axn.NamedArray, down: axn.NamedArray, x: axn.NamedArray) -> jax.Array:
        return axn.mean(axn.square(REPEATED[what](x, up, down))).scalar()

    args = jax.eval_shape(
        lambda: (axn.ones((Embed, Mlp)), axn.ones((Mlp, Embed)), axn.ones({"batch": 16, "embed": 32}))
    )
    early, true = both((jax.value_and_grad(loss, (0, 1)), *args), mapping, "shardy")
    assert total(true) <= total(early) <= total(true) + early.uncertain < 3 * total(true)


def test_what_the_compiler_gathers_around_code_for_each_device_is_within_what_the_report_says() -> None:
    """In the exchange of experts, parameters are gathered over one mesh axis and sharded over another one."""
    moe, tensor = cases.example("mixture_of_experts"), {"tokens": "data", "mlp": "model"}

    def loss(model: Any, x: Any) -> Any:
        return jax.value_and_grad(lambda model: axn.mean(axn.square(model(x)[0])).scalar())(model)

    model = jax.eval_shape(lambda: moe.Mixture.init(key=jax.random.key(0)))
    x = jax.eval_shape(lambda: axn.zeros({"tokens": 128, "embed": 16}))
    early, true = both((loss, model, x), ({"embed": "data"} | tensor, tensor), "shardy")
    assert total(early) < total(true) <= total(early) + early.uncertain


def test_what_other_passes_would_say_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    x = jax.eval_shape(lambda: axn.ones({"batch": 8}))
    mesh = cases.mesh_of(data=8)
    largest = lambda x: axn.sum(axn.top_k(x, "batch", 2)[0])
    with pytest.raises(NotImplementedError, match="its own partitioning"):
        axn.insight.explain(largest, x, mapping={"batch": "data"}, mesh=mesh, by="shardy")
    monkeypatch.setattr(_shardy, "_PASSES", "builtin.module(sdy-of-tomorrow)")
    with pytest.raises(NotImplementedError, match=r"with this version of jaxlib.*sdy-of-tomorrow"):
        axn.insight.explain(lambda x: x, x, mesh=mesh, by="shardy")


@pytest.mark.parametrize("text", ['<@mesh, [{"a":[0]}]>', "#sdy.sharding<mesh_of_tomorrow, [{}]>"])
def test_shardings_that_are_not_understood(text: str) -> None:
    with pytest.raises(NotImplementedError, match="cannot read"):
        _shardy._shardings(text)
