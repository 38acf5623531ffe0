"""A widened program computes what the program computes, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from axonym.testing._widening import WidenedProgram

X = np.random.RandomState(0).rand(4, 4).astype(np.float32) + 4 * np.eye(4, dtype=np.float32)


def widened(fn: Callable[..., Any], *args: Any) -> tuple[list[Any], WidenedProgram]:
    program = WidenedProgram(jax.make_jaxpr(fn)(*args))
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in args]
        return jax.block_until_ready(jax.jit(program)(wide)[0]), program


def loops(x: Any) -> Any:
    y, ys = lax.scan(lambda c, row: (c * 0.5 + row, jnp.sin(c)), x[0], x, reverse=True)
    z = lax.while_loop(lambda z: z.sum() < 99, lambda z: z * 1.5 + 0.1, y)
    return lax.cond(z[0] > 3, jnp.exp, jnp.log, z), ys, lax.fori_loop(0, 3, lambda i, z: z + i / 7, z)


def gradients(x: Any) -> Any:
    """Through a rule of its own, which is not the derivative, and through rematerialization."""

    @jax.custom_vjp
    def scaled(x: Any) -> Any:
        return x * 0.3

    scaled.defvjp(lambda x: (scaled(x), x), lambda x, g: (g * x * 0.7,))
    return jax.value_and_grad(lambda x: jnp.sum(jax.checkpoint(jnp.sin)(scaled(x)) * jax.nn.relu(x - 1)))(x)


def updates(x: Any) -> Any:
    added = x.at[jnp.array([0, 0, 2])].add(x[1:]).at[1].multiply(3.0)
    windows = lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "SAME")
    return added, windows, lax.reduce(x, 0.0, lambda a, b: a + b, (0,)), jnp.sort(x), lax.top_k(x, 2)


def algebra(x: Any) -> Any:
    return jnp.linalg.solve(x, x[0]), jnp.linalg.cholesky(x @ x.T), jnp.fft.fft(x), lax.erf_inv(x / 9)


def casts(x: Any) -> Any:
    low = x.astype(jnp.bfloat16)
    product = lax.dot_general(low, low, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return product, lax.reduce_precision(x, 8, 7), (x * 10).astype(jnp.int8).astype(jnp.float16) / 3


@pytest.mark.parametrize("fn", [loops, gradients, updates, algebra, casts], ids=lambda fn: fn.__name__)
def test_results(fn: Callable[..., Any]) -> None:
    found, program = widened(fn, X)
    expected = jax.tree.leaves(jax.jit(fn)(X))
    assert not program.own_precision
    for a, b in zip(found, expected, strict=True):
        kinds = {np.dtype("int32"): np.int32, np.dtype("complex64"): np.complex128}
        assert a.dtype == kinds.get(b.dtype, np.float64)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b, a.dtype), rtol=0.02 if fn is casts else 1e-4, atol=1e-5)


def test_casts_do_not_round() -> None:
    (product, same, _), _ = widened(casts, X)
    np.testing.assert_allclose(product, X.astype(np.float64) @ X.astype(np.float64), rtol=1e-14)
    np.testing.assert_array_equal(same, X)


def test_constants_are_rounded_to_their_dtype() -> None:
    (found,), _ = widened(lambda x: x * 0.044715, X)
    np.testing.assert_array_equal(found, X.astype(np.float64) * np.float64(np.float32(0.044715)))
    low, mesh = jnp.asarray(X, jnp.bfloat16), jax.make_mesh((2,), "x", devices=jax.devices()[:2])

    def per_device(x: Any) -> Any:
        return jax.shard_map(lambda x: x * 0.044715, mesh=mesh, out_specs=jax.P("x"))(
            jax.sharding.reshard(x, jax.P("x"))
        )

    for fn in (lambda x: x * 0.044715, lambda x: x * jnp.where(x > 0, 0.044715, 0.044715), per_device):
        with jax.set_mesh(mesh):
            (found,), _ = widened(fn, low)
        np.testing.assert_array_equal(found, np.asarray(low, np.float64) * 0.044677734375)


def test_draws_are_the_same() -> None:
    key = jax.random.key(0)
    for dtype in (jnp.float32, jnp.bfloat16):
        (found,), _ = widened(lambda key: jax.random.uniform(key, (9,), dtype), key)  # noqa: B023
        np.testing.assert_array_equal(found, np.asarray(jax.random.uniform(key, (9,), dtype), np.float64))
    (found,), _ = widened(lambda key: jax.random.normal(key, (9,)), key)
    np.testing.assert_allclose(found, jax.random.normal(key, (9,)), rtol=1e-5)
    (found,), _ = widened(lambda key: jax.random.permutation(key, 9), key)
    np.testing.assert_array_equal(found, jax.random.permutation(key, 9))


def test_where_an_operation_was_called() -> None:
    """Also if it is part of a compiled function of JAX that was called elsewhere before."""
    jax.make_jaxpr(lambda x: jnp.where(x > 0, x, 1))(X)
    here = test_where_an_operation_was_called.__code__.co_firstlineno + 3

    def chosen(x: Any) -> Any:
        return jnp.where(x > 0, x, 1)

    program = WidenedProgram(jax.make_jaxpr(chosen)(X), recording=True)
    with jax.enable_x64(True):
        jax.make_jaxpr(program)([X.astype(np.float64)])
    (step,) = [step for step in program.steps if step.operation == "select_n"]
    assert step.where == f"test_widening.py:{here + 3}"
    assert [program.steps[i].operation for i in step.operands] == ["argument 0"]
