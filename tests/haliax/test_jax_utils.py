"""Small helpers around JAX."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils, pallas

import axonym as axn
import axonym.haliax as hax
from axonym import tree
from axonym.haliax import jax_utils, specialized_fns, util
from axonym.haliax.jax_utils import Static

X = axn.ones({"batch": 2, "embed": 3})


# --- trees ---


def test_static_is_part_of_the_structure() -> None:
    assert jax.tree.leaves([Static("a"), 1]) == [1]
    assert jax.tree.structure(Static("a")) == jax.tree.structure(Static("a")) != jax.tree.structure(Static("b"))
    assert jax.tree.map(lambda x: x + 1, (Static(3), 1)) == (Static(3), 2)
    traced = []

    @jax.jit
    def f(how: Static, x: jax.Array) -> jax.Array:
        traced.append(how.value)
        return x

    f(Static(1), jnp.ones(2)), f(Static(1), jnp.ones(2)), f(Static(2), jnp.ones(2))
    assert traced == [1, 2]


def test_broadcast_prefix() -> None:
    assert jax_utils.broadcast_prefix((1, 2), ((3, 4), {"a": 5})) == ((1, 1), {"a": 2})
    assert jax_utils.broadcast_prefix((1, None), ((3, 4), 5), is_leaf=lambda x: x is None) == ((1, 1), None)
    named = jax_utils.broadcast_prefix("everywhere", [X])
    assert named[0].array == "everywhere" and named[0].names == X.names
    with pytest.raises(ValueError, match="structure error"):
        jax_utils.broadcast_prefix((1, None), (3, 4))


# --- processes ---


def test_with_one_process() -> None:
    tree = {"x": X, "n": np.arange(3)}
    found = jax_utils.broadcast_one_to_all(tree)
    assert found["x"].names == X.names and np.array_equal(found["n"], tree["n"])
    jax_utils.assert_equal(tree)
    jax_utils.sync_global_devices("here")


def test_processes_that_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    def disagree(tree: Any, fail_message: str = "") -> None:
        if any(np.ndim(x) == 2 for x in jax.tree.leaves(tree)):
            raise AssertionError("with all the values")

    monkeypatch.setattr(multihost_utils, "assert_equal", disagree)
    with pytest.raises(AssertionError) as raised:
        jax_utils.assert_equal({"a": [X, jnp.ones(2)], "b": jnp.ones((1, 1))}, "Not the same step")
    assert str(raised.value) == "Not the same step: the processes have different values of a/0/array, b."


# --- functions ---


class Block(eqx.Module):
    @jax_utils.named_call
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    @jax_utils.named_call
    def project(self, x: jax.Array) -> jax.Array:
        return jnp.cos(x)


def test_named_call() -> None:
    @jax_utils.named_call
    def helper(x: jax.Array) -> jax.Array:
        """Doc."""
        return jnp.tan(x)

    @jax_utils.named_call(name="other")
    def renamed(x: jax.Array) -> jax.Array:
        return jnp.exp(x)

    def f(x: jax.Array) -> jax.Array:
        block = Block()
        return block(x) + block.project(x) + helper(x) + renamed(x) + jax_utils.named_call(jnp.sqrt, "root")(x)

    text = jax.jit(f).lower(1.0).as_text(debug_info=True)
    for scope in ("Block/sin", "Block.project/cos", "helper/tan", "other/exp", "root/sqrt"):
        assert f"jit(f)/{scope}" in text, scope
    assert helper.__name__ == "helper" and helper.__doc__ == "Doc."


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("outer_size", [1, 2, 6])
def test_multilevel_scan_is_scan(reverse: bool, outer_size: int) -> None:
    def step(carry: jax.Array, x: Any) -> tuple[jax.Array, Any]:
        return jnp.sin(carry) + x["a"], {"out": carry * x["b"]}

    xs = {"a": jnp.arange(6.0), "b": jnp.arange(12.0).reshape(6, 2)}
    found = jax_utils.multilevel_scan(step, 0.5, xs, outer_size, 6, reverse)
    expected = jax.lax.scan(step, jnp.asarray(0.5), xs, reverse=reverse)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_multilevel_scan_keeps_only_the_carries_in_between() -> None:
    def total(carry: jax.Array, scan: Any) -> jax.Array:
        return jnp.sum(scan(lambda c, x: (jnp.sin(c) * x, None), carry, jnp.arange(64.0))[0])

    def kept(scan: Any) -> list[tuple[int, ...]]:
        saved = jax.make_jaxpr(lambda c: jax.vjp(lambda c: total(c, scan), c)[1])(jnp.ones(5)).out_avals
        return [x.shape for x in saved if x.shape[-1:] == (5,)]

    assert (64, 5) in kept(lambda *args: jax.lax.scan(*args))
    assert kept(lambda *args: jax_utils.multilevel_scan(*args, outer_size=8, length=64)) == [(8, 5)]


def test_multilevel_scan_without_elements_and_errors() -> None:
    carry, ys = jax_utils.multilevel_scan(lambda c, x: (c + 1, c), 0, None, 2, 6)
    assert carry == 6 and ys.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="multilevel_scan: 6 steps do not divide into 4"):
        jax_utils.multilevel_scan(lambda c, x: (c, c), 0, jnp.arange(6), 4, 6)
    with pytest.raises(ValueError, match=r"multilevel_scan: 6 steps, but `xs` has \[7\] elements"):
        jax_utils.multilevel_scan(lambda c, x: (c, c), 0, jnp.arange(7), 2, 6)


def test_filter_checkpoint() -> None:
    f = jax_utils.filter_checkpoint(lambda fn, x: fn(x).sum().scalar())
    assert jax.grad(lambda x: f(axn.sin, x))(X).names == X.names


# --- keys and shapes ---


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_shaped_rng_split(make: Any) -> None:
    key = make(0)
    assert jax_utils.shaped_rng_split(key).shape == (2, *key.shape)
    assert jax_utils.shaped_rng_split(key, (2, axn.Axis("layers", 3))).shape == (2, 3, *key.shape)
    assert jnp.array_equal(jax.random.key_data(jax_utils.shaped_rng_split(key, ())), jax.random.key_data(key))
    assert jax_utils.shaped_rng_split(key, (1, 1)).shape == (1, 1, *key.shape)


def test_to_jax_shape() -> None:
    assert jax_utils.to_jax_shape(X.axes) == (2, 3)
    assert jax_utils.to_jax_shape((axn.Axis("batch", 2), 4)) == (2, 4)
    assert jax_utils.to_jax_shape(axn.Axis("batch", 2)) == jax_utils.to_jax_shape(2) == (2,)
    with pytest.raises(TypeError):
        jax_utils.to_jax_shape("batch")  # pyright: ignore[reportArgumentType]


# --- questions ---


def test_what_is_an_array() -> None:
    for x in (X, X.array, np.ones(2), jax.ShapeDtypeStruct((2,), float)):
        assert jax_utils.is_jax_array_like(x) and util.is_jax_or_hax_array_like(x)
    for x in (3.0, [1.0], None):
        assert not jax_utils.is_jax_array_like(x) and not util.is_jax_or_hax_array_like(x)
    placeholder = jax.tree.map(lambda _: None, X)
    assert not jax_utils.is_jax_array_like(placeholder) and util.is_jax_or_hax_array_like(placeholder)


def test_what_is_a_scalar() -> None:
    scalar = X.sum()
    for x in (3, 1.5, True, 1j, np.float32(1), jnp.ones(()), scalar):
        assert jax_utils.is_scalarish(x)
    for x in (X, jnp.ones(1), [1], "1", None):
        assert not jax_utils.is_scalarish(x)
    assert jax_utils.ensure_scalar(scalar) is scalar.array
    assert jax_utils.ensure_scalar(3) == 3
    with pytest.raises(TypeError, match=r"shift must be a scalar, got float32\[batch=2, embed=3\]"):
        jax_utils.ensure_scalar(X, name="shift")


def test_where_code_runs() -> None:
    seen = [jax_utils.is_in_jit()]
    jax.jit(lambda: seen.append(jax_utils.is_in_jit()))()
    jax.vmap(lambda x: seen.append(jax_utils.is_in_jit()))(jnp.ones(2))
    assert seen == [False, True, False]
    assert not jax_utils.is_on_mac_metal()


def test_slices_of_pallas() -> None:
    assert jax_utils.is_pallas_dslice(pallas.ds(0, 3))
    assert not jax_utils.is_pallas_dslice(slice(0, 3)) and not jax_utils.is_pallas_dslice(axn.ds(0, 3))


# --- util and specialized_fns ---


def test_ensure_tuple() -> None:
    axis = axn.Axis("batch", 2)
    assert util.ensure_tuple([1, 2]) == (1, 2) and util.ensure_tuple((1,)) == (1,)
    assert util.ensure_tuple("ab") == ("ab",) and util.ensure_tuple(axis) == (axis,) and util.ensure_tuple(3) == (3,)


def test_enumerations_of_strings() -> None:
    class Names(metaclass=util.StringHolderEnum):
        DATA = "data"
        MODEL = "model"

    assert [str(n) for n in Names] == ["data", "model"]  # pyright: ignore[reportGeneralTypeIssues]
    assert jax.sharding.PartitionSpec(Names.DATA) == jax.sharding.PartitionSpec("data")


def test_the_old_import_paths() -> None:
    assert specialized_fns.top_k is hax.top_k
    assert jax_utils.maybe_rng_split is tree.maybe_rng_split
    assert util.is_named_array is axn.is_named_array
