"""The bytes on each device of the arguments of a step, and of the arrays kept for the backward pass."""

from __future__ import annotations

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType

import axonym as axn
from axonym import nn
from axonym.core import errors
from axonym.insight._describing import timeline
from axonym.insight._hlo import HloProgram
from tests.insight import cases

Batch, Embed, Mlp, Layers = axn.make_axes(batch=64, embed=32, mlp=128, layers=4)
OPTIMIZER = optax.adam(1e-3)
STORED, COMPUTE = {"embed": "data", "mlp": "model"}, {"batch": "data", "mlp": "model"}

# Of the two weights and two biases: the places of each device, as they are stored and as they are used.
WHOLE = 2 * 32 * 128 + 128 + 32
TENSOR = 2 * 32 * 64 + 64 + 32
SHARDED = 2 * 8 * 64 + 64 + 8


class Block(eqx.Module):
    up: nn.Linear
    down: nn.Linear
    activation: Any = nn.gelu

    @staticmethod
    def init(*, key: Any) -> Block:
        k_up, k_down = jax.random.split(key)
        return Block(nn.Linear.init(Embed, Mlp, key=k_up), nn.Linear.init(Mlp, Embed, key=k_down))

    def __call__(self, x: axn.NamedArray) -> axn.NamedArray:
        return x + self.down(self.activation(self.up(x)))


def trained(model: Any, state: Any, x: axn.NamedArray, *rest: Any, scale: Any) -> Any:
    def loss(model: Any) -> Any:
        return (axn.mean(model(x) ** 2) * scale * rest[1]).scalar()

    value, gradients = eqx.filter_value_and_grad(loss)(model)
    updates, state = OPTIMIZER.update(gradients, state)
    return value, eqx.apply_updates(model, updates), state


def start() -> Any:
    model = Block.init(key=jax.random.key(0))
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))


def given() -> tuple[tuple[Any, ...], dict[str, Any]]:
    model, state = eqx.filter_eval_shape(start)
    x, scalar = jax.eval_shape(lambda: axn.ones((Batch, Embed))), jax.ShapeDtypeStruct((), jnp.float32)
    return (model, state, x, scalar, scalar), {"scale": scalar}


def expected(parameters: int) -> dict[str, int]:
    """An argument that no result needs, `rest[0]`, is not kept. The state has two moments, and a count."""
    x = 16 * 32
    return {"model": 4 * parameters, "state": 8 * parameters + 4, "x": 4 * x, "rest[1]": 4, "scale": 4}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("step", "mapping", "parameters"),
    [
        pytest.param(trained, (STORED, COMPUTE), SHARDED, id="fsdp"),
        pytest.param(trained, COMPUTE, TENSOR, id="tensor"),
        pytest.param(trained, {"batch": "data"}, WHOLE, id="replicated"),
        pytest.param(axn.fsdp(trained, STORED, COMPUTE, donate_args=(True, True)), None, SHARDED, id="donated"),
    ],
)
def test_the_bytes_of_each_argument(step: Any, mapping: Any, parameters: int, kind: AxisType) -> None:
    args, kwargs = given()
    mesh = cases.mesh_of(kind, data=4, model=2)
    for by in ("compiled", "partitioner"):
        report = axn.insight.explain(step, *args, mapping=mapping, mesh=mesh, by=by, **kwargs)
        assert dict(report.arguments) == expected(parameters), by
        if report.memory is not None:
            assert sum(report.arguments.values()) == report.memory.arguments
    assert "arguments on each device: state " in str(report)
    assert report.to_dict()["arguments"] == expected(parameters)
    if mapping is not None:
        report = axn.insight.explain(step, *args, mapping=mapping, mesh=mesh, by="names", **kwargs)
        assert dict(report.arguments) == {**expected(parameters), "rest[0]": 4}


def test_arguments_that_are_called_otherwise() -> None:
    class Scaled(eqx.Module):
        by: axn.NamedArray

        @axn.named_jit
        def __call__(self, x: axn.NamedArray, power: int, **more: Any) -> Any:
            return self.by * x**power + more["offset"]

    @jax.jit
    def plain(pair: Any, args: Any) -> Any:
        return pair[0] + pair[1]["a b"] + args[1]

    x = axn.ones({"a": 4})
    report = axn.insight.explain(Scaled(x).__call__, x, 3, offset=x)
    assert report.arguments == {"self": 16, "x": 16, "offset": 16}
    report = axn.insight.explain(plain, (x.array, {"a b": x.array}), [x.array, x.array], by="partitioner")
    assert report.arguments == {"pair": 32, "args": 16}


# --- kept for the backward pass ---


def gradients(model: Any, x: axn.NamedArray) -> Any:
    return eqx.filter_value_and_grad(lambda model: axn.mean(model.fold(x) ** 2).scalar())(model)


def test_what_is_kept_for_the_backward_pass() -> None:
    """Of each layer, its input and what the activation's derivatives need; only the input if that is recomputed."""
    layer, mesh, x = 8 * 32 * 4, cases.mesh_of(data=8), jax.eval_shape(lambda: axn.ones((Batch, Embed)))
    found = {}
    for again in (False, True):
        make = nn.Stacked.init(Layers, Block, gradient_checkpointing=again)
        model = eqx.filter_eval_shape(lambda make=make: make(key=jax.random.key(0)))
        report = axn.insight.explain(gradients, model, x, mapping={"batch": "data"}, mesh=mesh, by="partitioner")
        assert report.timeline is not None
        found[again] = report.timeline.kept_for_backward
        assert {h.kind for h in found[again]} == {"temporary"} and {h.phase for h in found[again]} == {"forward"}
        total = re.escape(errors.describe_bytes(sum(h.bytes for h in found[again])))
        assert re.search(f"^(- )?kept for the backward pass, of the temporaries: {total}: ", str(report), re.MULTILINE)
        assert len(report.to_dict()["timeline"]["kept_for_backward"]) == len(found[again])
    assert sum(h.bytes for h in found[True]) == 4 * layer + layer  # and that of the last one, for the loss
    hidden = found[False][0]
    assert hidden.array == "4 x f32[batch=8, mlp=128]" and hidden.bytes == hidden.count * 4 * 8 * 128 * 4
    assert hidden.source is not None and hidden.source.file == __file__


@pytest.mark.oldest
def test_what_is_made_late_is_not_kept_with_what_is_gone() -> None:
    """What the backward pass does not use, and what it uses and makes itself, is not kept at all."""
    text = """HloModule jit_f, is_scheduled=true

ENTRY %main (a: f32[256]) -> f32[64] {
  %a = f32[256]{0} parameter(0), metadata={op_name="x"}
  %early = f32[256]{0} negate(%a), metadata={op_name="jit(f)/jvp()/neg"}
  %ones = f32[256]{0} broadcast(%a), metadata={op_name="jit(f)/transpose(jvp())/broadcast"}
  %unused = f32[512]{0} concatenate(%early, %a), metadata={op_name="jit(f)/jvp()/concatenate"}
  %other = f32[128]{0} slice(%unused), metadata={op_name="jit(f)/jvp()/slice"}
  %one = f32[128]{0} dot(%early, %ones), metadata={op_name="jit(f)/transpose(jvp())/dot"}
  %late = f32[64]{0} slice(%other), metadata={op_name="jit(f)/jvp()/slice"}
  %two = f32[64]{0} dot(%late, %one), metadata={op_name="jit(f)/transpose(jvp())/dot"}
  ROOT %end = f32[64]{0} dot(%two, %other), metadata={op_name="jit(f)/transpose(jvp())/dot"}
}
"""
    kept = timeline(HloProgram(text, 1), {}).kept_for_backward
    assert [(h.array, h.bytes) for h in kept] == [("f32[256]", 1024), ("f32[128]", 512)]
