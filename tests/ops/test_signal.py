"""Convolutions and products of arrays: errors for operands that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import axonym as axn
from axonym import poly
from benchmarks.communication import bytes_moved

untyped: Any = axn  # for calls that a type checker would refuse
A = axn.ones({"batch": 2, "t": 5})
V = axn.ones({"t": 3})
W = axn.ones({"xyz": 3})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: axn.convolve(A, V, "x"), ValueError, r"^convolve: no axis 'x' in \(batch=2, t=5\)"),
        (lambda: axn.convolve(A, W, "t"), ValueError, r"^convolve: no axis 't' in \(xyz=3\)"),
        (lambda: axn.convolve(A, V, axn.Axis("t", 3)), ValueError, r"^convolve: axis 't' .*: 5 in the array, 3 in the"),
        (lambda: axn.convolve(A, V, "t", "round"), ValueError, r"mode"),
        (
            lambda: axn.convolve(A, axn.ones({"t": 3, "batch": 3}), "t"),
            ValueError,
            r"^convolve: axis 'batch' has conflicting sizes: 2 in operand 0, 3 in operand 1",
        ),
        (
            lambda: untyped.convolve(A, jnp.ones(3), "t"),
            TypeError,
            r"^convolve: expected a NamedArray, got ArrayImpl",
        ),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_an_axis_of_another_size_in_each_operand_is_not_matched() -> None:
    assert axn.convolve(A, V, "t").shape == {"batch": 2, "t": 7}


@pytest.mark.parametrize("op", [lambda a, v: axn.convolve(a, v, "t"), poly.polymul], ids=["convolve", "polymul"])
def test_gradients_along_a_sharded_axis(op: Callable[..., axn.NamedArray], mesh: Mesh) -> None:
    """Nothing is counted several times where only some of the mesh axes are used."""
    a, v = (axn.named(np.cos(np.arange(size, dtype=np.float32)), "t") for size in (8, 4))

    def loss(a: axn.NamedArray, v: axn.NamedArray) -> jax.Array:
        return axn.sum(axn.cumsum(op(a, v), "t")).scalar()

    expected = jax.grad(loss, (0, 1))(a, v)
    with jax.set_mesh(mesh), axn.axis_mapping({"t": "model"}):
        found = jax.jit(jax.grad(loss, (0, 1)))(axn.shard(a), axn.shard(v, {}))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), found, expected)


@pytest.mark.parametrize("other", [AxisType.Explicit, AxisType.Auto], ids=lambda t: t.name)
def test_each_device_convolves_its_elements_of_an_axis_that_is_mapped_over(other: AxisType) -> None:
    """A mapped convolution becomes a grouped one, for which JAX cannot shard operands over Explicit mesh axes."""
    rng = np.random.default_rng(0)
    a, v = (axn.named(jnp.asarray(rng.normal(size=(4, 2, n)), "float32"), ("batch", "channel", "t")) for n in (3, 6))
    mapping = {"batch": "data", "channel": "model"}

    def one(a: axn.NamedArray, v: axn.NamedArray) -> Any:
        along = axn.convolve(a, v, "t"), axn.convolve(a, v, "t", "same"), axn.convolve(v, a, "t", "valid")
        return *along, axn.vmap(poly.polymul, "channel")(a, v)

    def values_and_gradients(a: axn.NamedArray, v: axn.NamedArray) -> Any:
        def loss(*operands: axn.NamedArray) -> Any:
            found = axn.vmap(one, "batch")(*operands)
            return sum(axn.sum(axn.sin(y)).scalar() for y in found), found

        return jax.grad(loss, (0, 1), has_aux=True)(a, v)

    expected = values_and_gradients(a, v)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit, other))
    with jax.set_mesh(mesh), axn.axis_mapping(mapping):
        placed = axn.shard((a, v))
        compiled = jax.jit(lambda *operands: axn.vmap(one, "batch")(*operands)).lower(*placed).compile()
        assert not bytes_moved(compiled)
        for found in (values_and_gradients(*placed), jax.block_until_ready(jax.jit(values_and_gradients)(*placed))):
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found, expected)
            assert {
                y.array.sharding.spec[y.names.index("batch")]
                for y in jax.tree.leaves(found, is_leaf=axn.is_named_array)
            } == {"data"}


def test_a_batch_that_no_mapping_knows_stays_sharded(auto_mesh: Mesh) -> None:
    rng = np.random.default_rng(0)
    a, v = (jnp.asarray(rng.normal(size=(8, n)), "float32") for n in (5, 3))
    expected = jnp.stack([jnp.convolve(x, y) for x, y in zip(a, v, strict=True)])

    def convolved(a: jax.Array, v: jax.Array) -> jax.Array:
        return axn.convolve(axn.named(a, ("batch", "t")), axn.named(v, ("batch", "t")), "t").array

    with jax.set_mesh(auto_mesh):
        placed = jax.device_put((a, v), NamedSharding(auto_mesh, PartitionSpec(("data", "model"))))
        compiled = jax.jit(convolved).lower(*placed).compile()
    assert not bytes_moved(compiled)
    np.testing.assert_allclose(jax.block_until_ready(compiled(*placed)), expected, rtol=1e-5, atol=1e-6)


def test_an_array_that_is_sharded_over_the_only_mesh_axis_is_its_own_kernel() -> None:
    """XLA takes wrong elements of a kernel that is sharded, if it is the input too and comes from a loop."""

    def fn(x: axn.NamedArray) -> axn.NamedArray:
        total = axn.associative_scan(axn.add, x, "t")
        return axn.convolve(total, total, "t", "same")

    x = axn.named(jnp.array([1.0, 2.0, 4.0, 8.0]), "t")
    with jax.set_mesh(axn.make_mesh({"data": 4}, devices=jax.devices()[:4])):
        found = jax.jit(fn)(axn.shard(x, {"t": "data"}))
    np.testing.assert_allclose(found.array, fn(x).array)


@pytest.mark.parametrize("mode", ["full", "same", "valid"])
@pytest.mark.parametrize("sizes", [(5, 2), (4, 4), (3, 5)])
def test_correlation_is_convolution_with_the_array_turned_around(sizes: tuple[int, int], mode: Any) -> None:
    rng = np.random.default_rng(0)
    a, v = (rng.normal(size=n) + 1j * rng.normal(size=n) for n in sizes)
    turned = axn.conj(axn.flip(axn.named(v, "t"), "t"))
    np.testing.assert_allclose(
        axn.convolve(axn.named(a, "t"), turned, "t", mode).array, np.correlate(a, v, mode), rtol=1e-5
    )
