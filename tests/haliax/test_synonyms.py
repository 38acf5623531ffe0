"""Operations under Haliax's names for them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import axonym as axn
import axonym.haliax as hax
from tests.helpers import spec

Batch = axn.Axis("batch", 2)

SYNONYMS = {
    "absolute": "abs",
    "amax": "max",
    "amin": "min",
    "around": "round",
    "bitwise_invert": "invert",
    "bitwise_not": "invert",
    "conjugate": "conj",
    "degrees": "rad2deg",
    "fix": "trunc",
    "product": "prod",
    "radians": "deg2rad",
    "ravel": "flatten",
    "nn.hard_swish": "nn.hard_silu",
    "nn.activations.hard_swish": "nn.hard_silu",
    "nn.activations.swish": "nn.silu",
    "nn.swish": "nn.silu",
    "axis.PartialAxisSpec": "axis.AxisSelection",
    "haxtyping.Named": "NamedArray",
    "partitioning.current_thread_local_mapping": "current_mapping",
    "tree_util.resize_axis": "tree.resize_axis",
    "tree_util.scan_aware_tree_map": "tree.scan_aware_map",
    "tree_util.tree_flatten": "tree.flatten",
    "tree_util.tree_leaves": "tree.leaves",
    "tree_util.tree_map": "tree.map",
    "tree_util.tree_structure": "tree.structure",
    "tree_util.tree_unflatten": "tree.unflatten",
}


@pytest.mark.parametrize(("name", "native"), SYNONYMS.items())
def test_synonyms(name: str, native: str) -> None:
    assert eval(f"hax.{name}") is eval(f"axn.{native}")
    assert "." in name or not hasattr(axn, name)


def test_methods() -> None:
    x: Any = axn.named([[1, 2], [3, 4]], ("batch", "pos"))  # in this module, which imports the package
    assert x.product("pos").tolist() == [2, 12]
    assert x.ravel("all").tolist() == x.conjugate().ravel("all").tolist() == [1, 2, 3, 4]
    assert x.at["pos", 0].mul(3).tolist() == [[3, 2], [9, 4]]
    assert x.updated_slice({"pos": 1}, axn.zeros({"batch": 2}, dtype=int)).tolist() == [[1, 0], [3, 0]]
    (array,), axes = x.tree_flatten()
    assert array is x.array and axes == x.axes
    assert hax.remainder is hax.mod and hax.true_divide is hax.divide and hax.bitwise_left_shift is hax.left_shift


def test_unique() -> None:
    x, Value = hax.named([3, 1, 3], "x"), hax.Axis("value", 2)
    assert [y.tolist() for y in hax.unique_all(x, Value)] == [[1, 3], [1, 0], [1, 0, 1], [1, 2]]
    assert [y.tolist() for y in hax.unique_counts(x, Value)] == [[1, 3], [1, 2]]
    assert [y.tolist() for y in hax.unique_inverse(x, Value)] == [[1, 3], [1, 0, 1]]
    assert hax.unique_values(x, Value).tolist() == [1, 3]


def test_ndim() -> None:
    x = hax.ones({"batch": 2, "pos": 3})
    assert (hax.ndim(x), hax.ndim(x.array), hax.ndim(3.0)) == (2, 2, 0)


def test_concat_axis_specs() -> None:
    A, B = hax.make_axes(a=2, b=3)
    assert hax.concat_axis_specs(A, (B,)) == (A, B)
    assert hax.concat_axis_specs({"a": 2}, B) == {"a": 2, "b": 3}
    with pytest.raises(ValueError, match="concat_axis_specs needs axes with sizes"):
        hax.concat_axis_specs(A, "b")  # pyright: ignore[reportArgumentType]


def test_auto_sharded(auto_mesh: jax.sharding.Mesh) -> None:
    x = hax.ones({"batch": 8, "pos": 4})
    assert hax.auto_sharded(x) is x
    with hax.axis_mapping({"batch": "data", "pos": "model"}):
        with pytest.warns(RuntimeWarning, match="no mesh is active"):
            assert hax.auto_sharded(x) is x
        with jax.set_mesh(auto_mesh):
            assert spec(hax.auto_sharded(x)) == ("data", "model")


def test_shape_checks_can_be_turned_off() -> None:
    assert hax.are_shape_checks_enabled()
    with hax.enable_shape_checks(False):
        assert not hax.are_shape_checks_enabled()
        assert hax.NamedArray(None, Batch).names == ("batch",)
        assert hax.NamedArray(jnp.zeros(5), Batch).array.shape == (5,)
        with hax.enable_shape_checks(True), pytest.raises(ValueError, match="axis 'batch' has size 2"):
            hax.NamedArray(jnp.zeros(5), Batch)
    assert hax.are_shape_checks_enabled()
