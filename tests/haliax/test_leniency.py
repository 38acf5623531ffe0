"""What Haliax accepts and the native functions do not, with its results (checked against Haliax 1.4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym.haliax as hax
from tests.helpers import spec


def test_a_class_of_strings() -> None:
    class Axes(metaclass=hax.util.StringHolderEnum):
        DATA = "data"
        MODEL = "model"

    assert list(Axes) == ["data", "model"] and Axes.DATA == "data" and "model" in Axes


def test_meshes(auto_mesh: jax.sharding.Mesh) -> None:
    assert hax.partitioning._get_mesh() is None
    with hax.partitioning.mesh_context(auto_mesh):
        assert hax.partitioning._get_mesh().shape == auto_mesh.shape  # pyright: ignore[reportOptionalMemberAccess]


def test_keywords(auto_mesh: jax.sharding.Mesh) -> None:
    x = hax.ones({"embed": 8})
    with jax.set_mesh(auto_mesh):
        assert spec(hax.shard(x=x, mapping={"embed": "data"})) == ("data",)
        assert spec(hax.shard_with_axis_mapping(x=x, mapping={"embed": "data"})) == ("data",)
        step = hax.fsdp(fn=lambda w: w + 1, parameter_mapping={"embed": "data"}, compute_mapping={})
        assert spec(jax.block_until_ready(step(x))) == ("data",)


def test_what_is_missing_is_a_runtime_warning(auto_mesh: jax.sharding.Mesh) -> None:
    x = hax.ones({"embed": 8})
    with pytest.warns(RuntimeWarning, match="no mapping is active"):
        assert hax.shard(x) is x
    with pytest.warns(RuntimeWarning, match="no mesh is active"):
        assert hax.shard(x, {"embed": "data"}) is x


def test_argsort_of_all_elements() -> None:
    x = hax.named([[3, 1], [2, 0]], ("x", "y"))
    np.testing.assert_array_equal(hax.argsort(x, None), [3, 1, 2, 0])
    assert hax.argsort(x, "y").tolist() == [[1, 0], [1, 0]]


def test_draws_of_categorical() -> None:
    """The numbers are those that Haliax draws."""
    logits = hax.named(jnp.arange(12.0).reshape(4, 3), ("a", "b"))
    assert hax.random.categorical(jax.random.key(0), logits, "b").tolist() == [1, 1, 2, 1]
    drawn = hax.random.categorical(jax.random.key(0), logits, "b", shape=(hax.Axis("s", 2), hax.Axis("a", 4)))
    assert drawn.tolist() == [[1, 1, 2, 1], [2, 2, 2, 2]]


def test_what_does_not_exist_raises() -> None:
    for module in (hax, hax.nn, hax.partitioning):
        with pytest.raises(AttributeError, match="no attribute 'nosuch'"):
            module.nosuch  # pyright: ignore[reportAttributeAccessIssue]
