"""The functions of `scalax.utils`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axonym.scalax import utils


def test_random_keys():
    rng = utils.JaxRNG(jax.random.PRNGKey(7))
    following, first = jax.random.split(jax.random.PRNGKey(7))
    np.testing.assert_array_equal(rng(), first)
    _, a, b = jax.random.split(following, 3)
    named = rng(["params", "dropout"])
    np.testing.assert_array_equal(named["params"], a)
    np.testing.assert_array_equal(named["dropout"], b)
    assert len(rng(3)) == 3 and isinstance(rng(1), tuple)
    np.testing.assert_array_equal(jax.jit(lambda key: utils.JaxRNG(key)())(jax.random.PRNGKey(7)), first)


def test_the_global_source_of_keys(monkeypatch):
    monkeypatch.setattr(utils.JaxRNG, "global_rng_generator", None)
    with pytest.raises(ValueError, match="init_global_rng"):
        utils.JaxRNG.next_rng()
    utils.JaxRNG.init_global_rng(7)
    np.testing.assert_array_equal(utils.JaxRNG.next_rng(), utils.JaxRNG.from_seed(7)())
    assert set(utils.JaxRNG.next_rng(keys=("a", "b"))) == {"a", "b"}


@pytest.mark.parametrize("short", ["bf16", "fp16", "fp32", "fp64"])
def test_types_by_name(short):
    long: Any = {"bf16": "bfloat16"}.get(short, short.replace("fp", "float"))
    assert utils.get_float_dtype_by_name(short) is utils.get_float_dtype_by_name(long) is getattr(jnp, long)


def test_only_numbers_with_a_fraction_are_converted():
    tree = {"w": jnp.ones(2), "n": jnp.arange(2), "name": "x", "h": np.ones(2, np.float16)}
    converted = utils.float_to_dtype(tree, "bf16")
    assert converted["w"].dtype == converted["h"].dtype == jnp.bfloat16
    assert converted["n"].dtype == jnp.int32 and converted["name"] == "x"
    assert utils.float_to_dtype(tree, jnp.float16)["w"].dtype == jnp.float16
    for nothing in (None, ""):
        assert utils.float_tensor_to_dtype(tree["w"], nothing) is tree["w"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: int


def test_paths(capsys):
    tree = {"layers": [Layer(1), (2, 3)]}
    assert utils.flatten_tree(tree) == {("layers", "0", "w"): 1, ("layers", "1", "0"): 2, ("layers", "1", "1"): 3}
    assert utils.flatten_tree(tree, sep=".", is_leaf=lambda x: isinstance(x, tuple)) == {
        "layers.0.w": 1,
        "layers.1": (2, 3),
    }
    named = utils.named_tree_map(lambda path, x, y: f"{path}:{x}{y}", tree, tree, sep="/")
    assert named["layers"][1] == ("layers/1/0:22", "layers/1/1:33")
    assert utils.named_tree_map(lambda path, x: path, {"a": 0}) == {"a": ("a",)}
    utils.print_pytree_structure({"w": jnp.ones((2, 3)), "x": 1}, sep=".")
    assert capsys.readouterr().out == "w: shape: (2, 3), dtype: float32\nx: shape: none, dtype: none\n"
