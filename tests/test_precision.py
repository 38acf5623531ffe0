"""The mixed-precision policy: its syntax, its casts, and functions that compute under it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym.nn import Linear
from axonym.precision import Policy, get_policy, mixed_precision
from axonym.quantization import Fp8DotGeneralOp

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
MIXED = "params=float32,compute=bfloat16,output=float32"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MIXED, (F32, BF16, F32)),
        ("output=f16, params=bf16", (BF16, BF16, F16)),
        ("c=bf16", (F32, BF16, BF16)),
        ("p=half,c=full", (F16, F32, F32)),
        ("bfloat16", (BF16, BF16, BF16)),
    ],
)
def test_strings(text: str, expected: tuple[Any, Any, Any]) -> None:
    policy = Policy.parse(text)
    assert (policy.param_dtype, policy.compute_dtype, policy.output_dtype) == tuple(map(jnp.dtype, expected))
    assert Policy.parse(str(policy)) == policy and hash(Policy.parse(str(policy))) == hash(policy)


def test_keywords() -> None:
    assert get_policy(params=F32, compute="bf16", output=np.float32) == Policy.parse(MIXED)
    assert get_policy(compute=BF16) == Policy.parse("c=bf16")
    assert get_policy(MIXED, output=F16) == get_policy(MIXED, output="f16") == Policy(F32, BF16, F16)
    assert get_policy(Policy.parse(MIXED)) == Policy(F32, BF16, F32)


def test_only_floating_arrays_are_cast() -> None:
    tree = {
        "named": axn.ones({"x": 2}),
        "abstract": axn.named(jax.ShapeDtypeStruct((2,), F32), "x"),
        "raw": jnp.ones(2, F16),
        "host": np.ones(2, np.float64),
    }
    other = {
        "ids": axn.arange(axn.Axis("x", 2)),
        "key": jax.random.key(0),
        "old key": jax.random.PRNGKey(0),
        "mask": axn.ones({"x": 2}, bool),
        "complex": jnp.ones(2, complex),
        "number": 0.5,
        "function": jnp.tanh,
        "nothing": None,
        "state": Fp8DotGeneralOp.init(2),
    }
    policy = Policy(BF16, F16, F32)
    for cast, dtype in ((policy.cast_to_param, BF16), (policy.cast_to_compute, F16), (policy.cast_to_output, F32)):
        found = cast({**tree, **other})
        assert {name: found[name].dtype for name in tree} == dict.fromkeys(tree, jnp.dtype(dtype))
        assert found["named"].axes == found["abstract"].axes == (axn.Axis("x", 2),)
        assert isinstance(found["abstract"].array, jax.ShapeDtypeStruct) and isinstance(found["host"], np.ndarray)
        for name, value in other.items():
            before, after = jax.tree.leaves(value), jax.tree.leaves(found[name])
            assert [id(x) for x in before] == [id(x) for x in after], name
    raw = jnp.ones(2)
    assert policy.cast_to_output(raw) is raw  # what is right already is not copied


def test_training_step() -> None:
    """Parameters and their gradients stay in one dtype while everything between is computed in another."""
    layer = Linear.init(axn.Axis("embed", 4), axn.Axis("mlp", 2), key=jax.random.key(0))
    x, seen = axn.random.normal(jax.random.key(1), {"batch": 3, "embed": 4}), []

    @mixed_precision(MIXED)
    def loss(layer: Linear, x: axn.NamedArray, *, scale: float) -> axn.NamedArray:
        y = layer(x)
        seen.append((layer.weight.dtype, y.dtype))
        return axn.sum(y * scale)

    value, gradient = axn.named_jit(jax.value_and_grad(lambda layer: loss(layer, x, scale=2.0).scalar()))(layer)
    assert value.dtype == gradient.weight.dtype == F32
    assert seen == [(BF16, BF16)]
    expected = np.broadcast_to(2 * np.asarray(x.array).sum(0), (2, 4))
    np.testing.assert_allclose(gradient.weight.array, expected, rtol=0.05, atol=0.05)


def test_decorated_method() -> None:
    class Double(eqx.Module):
        by: axn.NamedArray

        @mixed_precision("c=bf16,o=f16")
        def __call__(self, x: axn.NamedArray) -> Any:
            """Twice."""
            return x * self.by, self.by.dtype

    result, dtype = Double(axn.ones({"x": 2}))(axn.ones({"x": 2}))
    assert (result.dtype, dtype) == (F16, BF16)
    assert Double.__call__.__doc__ == "Twice."
    shapes = jax.eval_shape(lambda x: Double(x)(x)[0], axn.named(jax.ShapeDtypeStruct((2,), F32), "x"))
    assert shapes.dtype == F16


def test_in_the_program() -> None:
    """A cast is a conversion where it happens, of each argument once, and nothing else."""
    found = jax.make_jaxpr(mixed_precision("c=bf16,o=f32", lambda x, n: (x * x, n)))(jnp.ones(2), 3)
    assert [e.primitive.name for e in found.eqns] == ["convert_element_type", "mul", "convert_element_type"]


def test_parsing_starts_no_backend() -> None:
    """A script parses its flags before it says how many devices it simulates."""
    code = (
        "import jax, axonym as axn; axn.precision.Policy.parse('c=bf16'); jax.config.update('jax_num_cpu_devices', 3)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_arrays_that_have_the_dtype_are_not_copied() -> None:
    x = np.ones(2, np.float32)
    assert Policy().cast_to_param({"x": x})["x"] is x


def test_refusals() -> None:
    for text, message in (
        ("parms=f32", "no part 'parms=f32' in 'parms=f32'; .* Did you mean 'params'"),
        ("params=float31", "no dtype 'float31', in 'params=float31'. Did you mean 'float"),
        (",", "no dtype ',', in ','"),
        ("p=f32,params=f16", "'params' is given twice"),
        ("p=f32,c", "no part 'c' in"),
        ("int8", "`param_dtype` must be a floating-point dtype, got int8"),
    ):
        with pytest.raises(ValueError, match=message):
            Policy.parse(text)
    with pytest.raises(ValueError, match="`compute_dtype` must be a floating-point dtype, got int32"):
        get_policy(compute=jnp.int32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().param_dtype = F16  # pyright: ignore[reportAttributeAccessIssue]
