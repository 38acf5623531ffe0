"""Pools against NumPy loops."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym.nn import max_pool, mean_pool, min_pool
from axonym.nn.pool import pool
from tests.helpers import assert_named, spec

H, B, W = axn.make_axes(height=7, batch=2, width=6)
WINDOW = {"width": 3, "height": 2}
X = axn.random.normal(jax.random.key(0), (H, B, W))


def windows(size: int, window: int, stride: int, before: int, after: int, ceil: bool) -> list[range]:
    """Return the positions in each window along an axis; those of the padding are out of range."""
    reach = size + before + after
    count = (reach - window + (stride - 1 if ceil else 0)) // stride + 1
    starts = [i * stride - before for i in range(count)]
    return [range(s, s + window) for s in starts if not ceil or s + window <= size + after or s < size]


def pooled(
    reduce: Callable[[np.ndarray], Any], stride: Any, pads: Any, ceil: bool = False, fill: float = np.nan
) -> Any:
    """Pool x along width (3) and height (2), one window at a time; padding is `fill`."""
    x = np.asarray(X.array)
    (left, right), (above, below) = pads
    rows = windows(7, 2, stride[1], above, below, ceil)
    columns = windows(6, 3, stride[0], left, right, ceil)
    padded = np.pad(x, ((5, 5), (0, 0), (5, 5)), constant_values=fill)
    result = np.zeros((len(rows), 2, len(columns)), np.float32)
    for (i, r), b, (j, c) in itertools.product(enumerate(rows), range(2), enumerate(columns)):
        result[i, b, j] = reduce(padded[r.start + 5 : r.stop + 5, b, c.start + 5 : c.stop + 5])
    return axn.named(jnp.asarray(result), X.names)


NO, SOME = ((0, 0), (0, 0)), ((1, 2), (0, 1))
CASES: list[tuple[dict[str, Any], Any, Any, bool]] = [
    ({}, (1, 1), NO, False),
    ({"stride": 2, "padding": "VALID"}, (2, 2), NO, False),
    ({"stride": (2, 3), "padding": SOME}, (2, 3), SOME, False),
    ({"stride": {"height": 3, "width": 2}, "use_ceil": True}, (2, 3), NO, True),
    ({"stride": 2, "padding": SOME, "use_ceil": True}, (2, 2), SOME, True),
    ({"stride": 2, "padding": "same"}, (2, 2), ((0, 1), (0, 1)), False),
]


@pytest.mark.parametrize(("arguments", "stride", "pads", "ceil"), CASES)
def test_pools(arguments: dict[str, Any], stride: Any, pads: Any, ceil: bool) -> None:
    assert_named(max_pool(X, WINDOW, **arguments), pooled(np.nanmax, stride, pads, ceil), rtol=1e-6)
    assert_named(min_pool(X, WINDOW, **arguments), pooled(np.nanmin, stride, pads, ceil), rtol=1e-6)
    assert_named(mean_pool(X, WINDOW, **arguments), pooled(np.nanmean, stride, pads, ceil), rtol=1e-5, atol=1e-6)
    counted = mean_pool(X, WINDOW, count_include_pad=True, **arguments)
    assert_named(counted, pooled(lambda w: w.sum() / 6, stride, pads, ceil, 0.0), rtol=1e-5, atol=1e-6)
    # The start value of a sum counts once in each window, and once for each element of padding.
    total = pool(X, WINDOW, 2.0, lambda a, b: a + b, **arguments)
    assert_named(total, pooled(lambda w: w.sum() + 2, stride, pads, ceil, 2.0), rtol=1e-5, atol=1e-5)


def test_a_last_window_starts_inside() -> None:
    """One that would hold only padding is left out, and where windows fit exactly there is none more."""
    x = axn.arange(axn.Axis("x", 7)) * 1.0
    assert max_pool(x, {"x": 2}, use_ceil=True).shape == {"x": 6}
    result = mean_pool(x, {"x": 2}, stride=2, padding=1, use_ceil=True)
    np.testing.assert_allclose(result.array, [0.0, 1.5, 3.5, 5.5])


def test_dtypes() -> None:
    x = axn.arange(axn.Axis("x", 4))
    assert_named(max_pool(x - 9, {"x": 2}), axn.named(jnp.array([-8, -7, -6]), "x"))
    assert_named(min_pool(x.astype(jnp.uint8), {"x": 2}), axn.named(jnp.array([0, 1, 2], jnp.uint8), "x"))
    assert_named(max_pool(x > 1, {"x": 2}, padding=1), axn.named(jnp.array([0, 0, 1, 1, 1], bool), "x"))
    assert_named(mean_pool(x, {"x": 2}), axn.named(jnp.array([0.5, 1.5, 2.5]), "x"))
    small = (x - 9).astype(jnp.float8_e4m3fn)  # which has no infinity, for the padding to be
    assert_named(max_pool(small, {"x": 2}, padding=1), axn.named(jnp.array([-9, -8, -7, -6, -6], small.dtype), "x"))
    many = axn.ones({"x": 1000}, jnp.bfloat16) * 1.0078125  # summed up in bfloat16, this would stop growing
    assert_named(mean_pool(many, {"x": 1000}), axn.named(jnp.array([1.0078125], jnp.bfloat16), "x"))


def test_gradients() -> None:
    x = axn.named([3.0, 1.0, 4.0, 1.0, 5.0], "x")

    def gradient(fn: Callable[[axn.NamedArray], axn.NamedArray]) -> Any:
        return jax.grad(lambda x: axn.sum(fn(x) * axn.named([1.0, 10.0], "x")).scalar())(x).array

    window: dict[str, Any] = {"Window": {"x": 3}, "stride": 2}
    np.testing.assert_allclose(gradient(lambda x: max_pool(inputs=x, **window)), [0, 0, 1, 0, 10])
    np.testing.assert_allclose(gradient(lambda x: mean_pool(inputs=x, **window)) * 3, [1, 1, 11, 10, 10], rtol=1e-6)
    product = gradient(lambda x: pool(inputs=x, init=1.0, reduce_fn=jax.lax.mul, **window))
    np.testing.assert_allclose(product, [4, 12, 3 + 50, 200, 40])
    slope = jax.grad(lambda x, init: axn.sum(pool(x, {"x": 3}, init, jnp.add, padding=1)).scalar(), 1)(x, 0.0)
    assert slope == 5 + 2


def test_on_meshes(mesh: Mesh) -> None:
    """Whether the axis of the batch or one that the window moves along is split."""
    x = axn.random.normal(jax.random.key(0), {"batch": 8, "height": 8})

    def all_of_them(x: axn.NamedArray) -> list[axn.NamedArray]:
        arguments: dict[str, Any] = {"stride": 2, "padding": "SAME"}
        return [
            max_pool(x, {"height": 3}, **arguments),
            mean_pool(x, {"height": 3}, **arguments),
            pool(x, {"height": 3}, 0.0, jax.lax.add, **arguments),
        ]

    expected = all_of_them(x)
    mapping = {"batch": "data", "height": "model"}
    with jax.set_mesh(mesh):
        for found, wanted in zip(all_of_them(x), expected, strict=True):
            assert_named(found, wanted, rtol=1e-5)
    with jax.set_mesh(mesh), axn.axis_mapping(mapping):
        x = axn.shard(x, mapping)
        for call in (all_of_them, axn.named_jit(all_of_them)):
            for found, wanted in zip(call(x), expected, strict=True):
                assert_named(found, wanted, rtol=1e-5)
                assert spec(found) == ("data", "model")


def test_gradients_of_large_windows_and_of_what_is_not_a_number() -> None:
    x = axn.random.normal(jax.random.key(5), {"height": 9, "width": 8}).rearrange(("height", "width"))
    for window in ({"height": 9, "width": 8}, {"height": 3, "width": 7}, {"height": 2, "width": 8}):
        sizes = tuple(window[n] for n in ("height", "width"))

        def positional(a: jax.Array, sizes: tuple[int, ...] = sizes) -> Any:
            return jnp.sum(jnp.sin(jax.lax.reduce_window(a, -np.inf, jax.lax.max, sizes, (1, 1), "VALID")))

        found = jax.grad(lambda x, window=window: axn.sin(max_pool(x, window)).sum().scalar())(x)
        np.testing.assert_allclose(found.array, jax.grad(positional)(x.array), rtol=1e-5)
    y = axn.named([1.0, jnp.nan, 2.0, 3.0, 4.0], "x")
    found = jax.grad(lambda y: max_pool(y, {"x": 3}).sum().scalar())(y)
    np.testing.assert_array_equal(found.array, [0, 2, 0, 0, 1])
    program = jax.make_jaxpr(jax.grad(lambda x: max_pool(x, {"height": 9, "width": 8}).sum().scalar()))(x)
    assert len(program.jaxpr.eqns) < 10, "one window needs no work of ours"


@pytest.mark.parametrize(("size", "stride"), [(2, 1), (3, 1), (5, 2), (3, 2), (15, 1), (16, 1)])
def test_gradients_along_a_sharded_axis(mesh: Mesh, size: int, stride: int) -> None:
    x = axn.named(jnp.round(4 * jax.random.normal(jax.random.key(2), (2, 16))), ("batch", "width"))  # many are equal
    weights = axn.random.normal(jax.random.key(3), {"width": 16})

    def loss(op: Any, x: axn.NamedArray) -> Any:
        y = op(x, axn.Axis("width", size), stride=stride, padding="SAME" if size < 15 else "VALID")
        return (y * weights["width", : y.axis_size("width")]).sum().scalar()

    for op, low, better in ((max_pool, -np.inf, jax.lax.max), (min_pool, np.inf, jax.lax.min)):

        def positional(a: jax.Array, low: float = low, better: Any = better) -> Any:
            y = jax.lax.reduce_window(a, low, better, (1, size), (1, stride), "SAME" if size < 15 else "VALID")
            return jnp.sum(y * weights.array[None, : y.shape[1]])

        expected = jax.grad(positional)(x.array)
        with jax.set_mesh(mesh), axn.axis_mapping({"width": "data"}):
            found = jax.jit(jax.grad(lambda x, op=op: loss(op, x)))(axn.shard(x)).array
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"max_pool: no axis 'hight' in \(height=7, .* Did you mean 'height'"):
        max_pool(X, {"hight": 2})
    with pytest.raises(ValueError, match="needs axes with sizes, got only the name 'height'"):
        max_pool(X, "height")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="it spans 9 elements of axis 'height', which has 7, and 1 of padding"):
        mean_pool(X, {"height": 9}, padding=((1, 0),))
    with pytest.raises(ValueError, match="this padding, a window contains nothing else: 2 for a window of 2 along"):
        min_pool(X, {"height": 2}, padding=2)
    with pytest.raises(ValueError, match=r"`stride` has 1 entry for the axes \(width, height\)"):
        max_pool(X, WINDOW, stride=(1,))
    with pytest.raises(ValueError, match="'height' would name more than one axis"):
        max_pool(X, (axn.Axis("height", 2), axn.Axis("height", 3)))
    with pytest.raises(TypeError, match="pool: expected a NamedArray"):
        pool(jnp.ones(3), {"x": 2}, 0.0, jax.lax.add)  # pyright: ignore[reportArgumentType]
