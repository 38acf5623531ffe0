"""`while_loop`, `cond`, `switch` and `associative_scan` by name: against the positional form, and on meshes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import axonym as axn
from axonym.transforms.control import cond, fori_loop, switch, while_loop
from axonym.transforms.scan import associative_scan
from axonym.transforms.vmap import vmap
from tests.helpers import assert_named, compilations, spec

Row, Col = axn.make_axes(row=4, col=8)
X = axn.named(jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32), (Row, Col))
PLACED = {"row": "model", "col": "data"}
EAGER_AND_JIT = pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])


def turned(x: axn.NamedArray) -> axn.NamedArray:
    """Return the same array in another layout."""
    return x.rearrange(("col", "row"))


def on_mesh(mesh: Mesh, fn: Callable[..., Any], *args: axn.NamedArray) -> tuple[Any, ...]:
    """Return the result with every argument sharded over the mesh; check that it is sharded like the first argument."""
    with jax.set_mesh(mesh):
        result = jax.block_until_ready(jax.jit(fn)(*(axn.shard(a, PLACED) for a in args)))
    leaf = jax.tree.leaves(result)[-1]
    assert tuple(leaf.sharding.spec) == ("model", "data")
    return result


# --- while_loop ---


def doubled(x: axn.NamedArray) -> axn.NamedArray:
    return while_loop(lambda c: c["i"] < 3, lambda c: {"i": c["i"] + 1, "x": turned(c["x"]) * 2}, {"i": 0, "x": x})["x"]


@EAGER_AND_JIT
def test_while_loop(transform: Callable[..., Any]) -> None:
    assert_named(transform(doubled)(X), 8 * X)


def test_while_loop_on_meshes(mesh: Mesh) -> None:
    assert_named(on_mesh(mesh, doubled, X), 8 * X)


def test_while_loop_until_a_named_condition() -> None:
    found = while_loop(lambda x: (x < 100).all(), lambda x: x * 2, axn.ones(Row))
    assert_named(found, axn.full(Row, 128.0))
    assert_named(
        jax.jvp(lambda x: while_loop(lambda x: x.sum() < 100, lambda x: x * 2, x), (found,), (found,))[1], found
    )


# --- cond and switch ---


def chosen(x: axn.NamedArray, above: Any = 0.0) -> axn.NamedArray:
    return cond(x.sum() > above, lambda x: {"y": axn.sin(x)}, lambda x: {"y": -turned(x)}, x)["y"]


@EAGER_AND_JIT
@pytest.mark.parametrize("above", [-1e9, 1e9])
def test_cond(transform: Callable[..., Any], above: float) -> None:
    expected = axn.sin(X) if above < 0 else -X
    assert_named(transform(chosen)(X, above), expected, rtol=1e-6)
    gradient = transform(jax.grad(lambda x: chosen(x, above).sum().array))(X)
    assert_named(gradient, axn.cos(X) if above < 0 else -axn.ones_like(X), rtol=1e-5, atol=1e-6)


def test_cond_on_meshes(mesh: Mesh) -> None:
    assert_named(on_mesh(mesh, lambda x: chosen(x, 1e9), X), -X)


def test_cond_takes_all_kinds_of_predicates_and_leaves() -> None:
    def first(x: Any, act: Callable[[Any], Any]) -> Any:
        return act(x), 1, "kept"

    def second(x: Any, act: Callable[[Any], Any]) -> Any:
        return turned(x), jnp.int32(2), "kept"

    for predicate in (True, np.bool_(True), jnp.array(True), axn.NamedArray(jnp.array(True), ())):
        value, number, text = cond(predicate, first, second, X, axn.negative)
        assert_named(value, -X)
        assert int(number) == 1 and number.dtype == jnp.int32 and text == "kept"


@EAGER_AND_JIT
@pytest.mark.parametrize("index", [0, 1, 2, 9])
def test_switch(transform: Callable[..., Any], index: int) -> None:
    found = transform(lambda i, x: switch(i, [lambda x: x, lambda x: turned(x) + 1, lambda x: -x], x))(index, X)
    assert_named(found, [X, X + 1, -X][min(index, 2)])


def test_branches_can_be_mapped_over() -> None:
    predicates = axn.named(jnp.array([True, False, True, False]), Row)
    found = vmap(lambda p, x: cond(p, lambda x: x, lambda x: -x, x), Row)(predicates, X)
    assert_named(found, axn.where(predicates, X, -X))


# --- associative_scan ---


@EAGER_AND_JIT
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", ["row", Col])
def test_associative_scan(transform: Callable[..., Any], reverse: bool, axis: Any) -> None:
    found = transform(lambda x: associative_scan(axn.add, x, axis, reverse=reverse))(X)
    position = 0 if axis == "row" else 1
    raw = (
        np.flip(np.cumsum(np.flip(X.array, position), position), position) if reverse else np.cumsum(X.array, position)
    )
    assert_named(found, axn.named(raw, X.axes), rtol=1e-4, atol=1e-5)


def combine(p: Any, q: Any) -> Any:
    """Compose two affine functions; the layout of one result changes."""
    return q[0] * p[0], turned(q[0] * p[1] + q[1])


def recurrence(decay: axn.NamedArray, x: axn.NamedArray) -> axn.NamedArray:
    return associative_scan(combine, (decay, x), "col")[1]


DECAY = axn.named(jnp.linspace(0.1, 0.9, 8), Col)


def raw_recurrence(decay: jax.Array, x: jax.Array) -> jax.Array:
    steps = (decay, x.T)
    return jax.lax.scan(lambda h, s: (s[0] * h + s[1], s[0] * h + s[1]), jnp.zeros(4), steps)[1].T


@EAGER_AND_JIT
def test_associative_scan_of_trees_with_the_axis_in_several_places(transform: Callable[..., Any]) -> None:
    expected = axn.named(raw_recurrence(DECAY.array, X.array), X.axes)
    assert_named(transform(recurrence)(DECAY, X), expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_associative_scan() -> None:
    found = jax.jit(jax.grad(lambda d, x: (recurrence(d, x) ** 2).sum().array, argnums=(0, 1)))(DECAY, X)
    raw = jax.grad(lambda d, x: (raw_recurrence(d, x) ** 2).sum(), argnums=(0, 1))(DECAY.array, X.array)
    for a, b, like in zip(found, raw, (DECAY, X), strict=True):
        assert_named(a, axn.named(b, like.axes), rtol=1e-4, atol=1e-4)


def test_associative_scan_on_meshes(mesh: Mesh) -> None:
    """Along an axis that is split."""
    expected = axn.named(raw_recurrence(DECAY.array, X.array), X.axes)
    assert_named(on_mesh(mesh, recurrence, DECAY, X), expected, rtol=1e-4, atol=1e-5)
    gradient = jax.grad(lambda d, x: (recurrence(d, x) ** 2).sum().array, argnums=1)
    assert_named(on_mesh(mesh, gradient, DECAY, X), gradient(DECAY, X), rtol=1e-4, atol=1e-4)


PREFIXES: dict[str, Callable[[axn.NamedArray], axn.NamedArray]] = {
    "cumprod": lambda x: axn.cumprod(x, "x"),
    "nancumprod": lambda x: axn.nancumprod(x, "x"),
    "associative_scan": lambda x: associative_scan(lambda p, q: (p[0] * q[0], p[1] * q[0] + q[1]), (x, x), "x")[1],
}


@pytest.mark.parametrize("size", [8, 12])
@pytest.mark.parametrize("name", PREFIXES)
def test_gradients_along_a_sharded_axis(name: str, size: int, auto_mesh: Mesh) -> None:
    """If the cotangent is replicated, XLA partitions the strided slices and pads that others have wrongly."""
    rng = np.random.default_rng(0)
    x, given = (axn.named(rng.uniform(0.5, 1.5, size).astype(np.float32), "x") for _ in range(2))

    def gradient(x: axn.NamedArray, given: axn.NamedArray) -> axn.NamedArray:
        return jax.vjp(PREFIXES[name], x)[1](given)[0]

    def value(raw: jax.Array) -> jax.Array:
        return axn.dot(PREFIXES[name](axn.named(raw, "x")), given, axis="x").array

    expected, step = gradient(x, given), 1e-2 * np.eye(size, dtype=np.float32)
    slopes = (jax.vmap(value)(x.array + step) - jax.vmap(value)(x.array - step)) / 2e-2
    np.testing.assert_allclose(expected.array, slopes, rtol=2e-2)
    for placement in (PartitionSpec("data"), PartitionSpec()):
        operands = axn.shard(x, placement, auto_mesh), axn.shard(given, PartitionSpec(), auto_mesh)
        for out in (None, NamedSharding(auto_mesh, PartitionSpec("data"))):
            found = jax.block_until_ready(jax.jit(gradient, out_shardings=out)(*operands))
            np.testing.assert_allclose(found.array, expected.array, rtol=1e-4)


def test_associative_scan_of_raw_arrays() -> None:
    named, raw = associative_scan(lambda p, q: (p[0] + q[0], p[1] + q[1]), (X, X.array), "row")
    np.testing.assert_allclose(named.array, raw, rtol=1e-6)
    assert isinstance(raw, jax.Array)


# --- errors ---

AXES = r"is float32\[row=4\] and of the false branch is float32\[row=4, col=8\]\. Both need the same axes"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: while_loop(lambda c: c[1].sum() < 9, lambda c: (c[0], c[1].sum("col")), (0, X)), TypeError,
         r"while_loop: carry\[1\] goes in as float32\[row=4, col=8\] and comes out as float32\[row=4\]"),
        (lambda: while_loop(lambda x: x < 9, lambda x: x, X), TypeError, r"condition must be a scalar, got bool\[ro"),
        (lambda: cond(X > 0, lambda: 0, lambda: 1), TypeError, r"predicate must be a scalar.*`axonym.all`"),
        (lambda: cond(jnp.ones(3) > 0, lambda: 0, lambda: 1), TypeError, r"got an array of shape \(3,\)"),
        (lambda: cond(True, lambda x: {"y": x.sum("col")}, lambda x: {"y": x}, X), TypeError,
         r"cond: result\['y'\] of the true branch " + AXES),
        (lambda: cond(True, lambda x: {"y": x, "z": 0}, lambda x: {"y": x}, X), TypeError,
         r"must keep one structure, but result\['z'\] is in the true branch only"),
        (lambda: cond(True, lambda: "a", lambda: "b"), TypeError, "true branch is 'a' and of the false branch is 'b'"),
        (lambda: cond(True, lambda x: x, lambda x: x.astype(jnp.int32), X), TypeError, r"with `.astype\(float32\)`"),
        (lambda: cond(True, lambda: 1, lambda: 1.5), TypeError, r"is int32\[\] and of the .* float32\[\]\."),
        (lambda: switch(0, [lambda x: x, lambda x: x, lambda x: x.sum("row")], X), TypeError,
         r"switch: result of branch 0 is float32\[row=4, col=8\] and of branch 2 is float32\[col=8\]"),
        (lambda: switch(0, []), ValueError, "at least one branch"),
        (lambda: associative_scan(axn.add, {"x": X, "y": axn.ones(Col)}, "row"), ValueError,
         r"no axis 'row' in elems\['y'\] \(col\)"),
        (lambda: associative_scan(axn.add, X, "rows"), ValueError, "no axis 'rows' .*Did you mean 'row'"),
        (lambda: associative_scan(axn.add, X, Row.resize(3)), ValueError, "4 in elems, 3 in the axis given"),
        (lambda: associative_scan(axn.add, (), "row"), ValueError, "no array to scan"),
        (lambda: associative_scan(lambda a, b: (a + b).sum("col"), X, "row"), TypeError,
         r"result must be float32\[row=2, col=8\] and is float32\[row=2\]"),
    ],
)  # fmt: skip
def test_refusals(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_placements_that_differ(explicit_mesh: Mesh) -> None:
    with jax.set_mesh(explicit_mesh):
        x = axn.shard(X, PLACED)
        with pytest.raises(
            TypeError, match=r"'row' is replicated where it was sharded over 'model'.*\{'row': 'model', "
        ):
            cond(True, lambda: x, lambda: X)


def test_a_carry_starts_sharded_as_it_will_be(explicit_mesh: Mesh) -> None:
    with jax.set_mesh(explicit_mesh):
        x = axn.shard(X, PLACED)
        found = while_loop(lambda c: c.sum() < 9, lambda c: c + axn.abs(x), axn.zeros_like(X))
        assert spec(found) == spec(x)
        counted = fori_loop(0, 3, lambda i, c: c + i * x, axn.zeros(X.axes))
        assert spec(counted) == spec(x)
        assert_named(jax.block_until_ready(counted), 3.0 * X)
        with pytest.raises(
            TypeError, match=r"while_loop: the placement of the carry never settles\. .* carry goes in as"
        ):
            while_loop(
                lambda c: c.sum() < 9,
                lambda c: x if jax.typeof(c.array).sharding.spec == jax.P(None, None) else axn.shard(X, {"row": None}),
                axn.zeros(X.axes),
            )


def test_fori_loop_is_that_of_jax() -> None:
    assert_named(fori_loop(1, 4, lambda i, c: turned(c) * i, X), 6.0 * X)
    slope = jax.grad(lambda x: fori_loop(0, 3, lambda i, c: c * x, axn.named(1.0, ())).scalar())(2.0)
    assert slope == 12.0
    traced = jax.jit(lambda n: fori_loop(0, n, lambda i, c: c + i, axn.named(0, ())))(4)
    assert traced.scalar() == 6
    with pytest.raises(TypeError, match="fori_loop: `upper` must be a scalar"):
        fori_loop(0, X, lambda i, c: c, X)


def test_a_second_call_compiles_nothing() -> None:
    def first(x: Any) -> Any:
        return x

    def second(x: Any) -> Any:
        return turned(x)

    def calls() -> None:
        while_loop(_small, first, X)
        cond(True, first, second, X)
        associative_scan(axn.maximum, X, "row")

    def _small(x: Any) -> Any:
        return x.sum() < -1e9

    calls()
    with compilations() as seen:
        calls()
    assert not seen
