"""The page that compares libraries is correct: its blocks give the same values, and its table is true."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import Mesh

import axonym as axn

PAGE = (Path(__file__).parent.parent / "docs" / "why.md").read_text()
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
MAPPING = {"batch": "data", "heads": "model", "mlp": "model"}


def _block(section: str) -> str:
    text = next(s for s in SECTIONS if s.startswith(section))
    return re.findall(r"^```python.*?\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)[0]


def _library(name: str) -> Any:
    """Import a library that may not be installed, or not work with this JAX."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"{name}: {error}")


def _run(section: str, namespace: dict[str, Any]) -> dict[str, Any]:
    namespace = dict(namespace)
    with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"):  # JAX's default
        warnings.simplefilter("ignore")
        exec(_block(section), namespace)
    return namespace


@pytest.fixture(scope="module")
def sizes() -> dict[str, Any]:
    return _run("", {})


@pytest.fixture(scope="module")
def plain(sizes: dict[str, Any]) -> dict[str, Any]:
    return _run("Plain JAX", sizes)


def test_axonym_computes_what_plain_jax_does(plain: dict[str, Any]) -> None:
    y = _run("Axonym", plain)["y"]
    assert y.array.sharding.spec == P("data", None, None)
    np.testing.assert_allclose(y.array, plain["plain"], atol=1e-5)


def test_nnx_computes_what_plain_jax_does(plain: dict[str, Any], explicit_mesh: Mesh) -> None:
    nnx = _library("flax.nnx")
    model = _run("Flax NNX", plain)["model"]
    with jax.set_mesh(explicit_mesh), jax.numpy_rank_promotion("allow"):
        for name, weight in plain["weights"].items():
            parameter: Any = model.norm1.scale if name == "norm1" else getattr(getattr(model, name), "kernel", None)
            parameter = model.norm2.scale if name == "norm2" else parameter
            parameter.set_value(jax.device_put(weight, parameter.get_value().sharding))
        y = nnx.jit(type(model).__call__)(model, jax.device_put(plain["inputs"], P("data")))
    np.testing.assert_allclose(jax.block_until_ready(y), plain["plain"], atol=1e-5)


def test_haliax_computes_what_plain_jax_does(plain: dict[str, Any]) -> None:
    _library("haliax")
    np.testing.assert_allclose(_run("Haliax", plain)["y"].array, plain["plain"], atol=1e-5)


# --- the table ---


def test_a_square_weight_in_the_other_order(plain: dict[str, Any]) -> None:
    x, w = plain["inputs"], np.arange(32.0 * 32).reshape(32, 32)
    named, weight = axn.named(x, ("batch", "pos", "embed")), axn.named(w, ("embed", "mlp"))
    assert axn.allclose(
        axn.dot(named, weight, axis="embed"), axn.dot(named, weight.rearrange(("mlp", "embed")), axis="embed")
    )
    assert not np.allclose(x @ w, x @ w.T)


def test_a_misspelt_logical_axis(explicit_mesh: Mesh) -> None:
    with jax.set_mesh(explicit_mesh), pytest.warns(UserWarning, match="Did you mean 'embed'"):
        axn.shard(axn.ones({"embed": 8}), {"embde": "data"})


def test_a_size_that_the_mesh_does_not_divide(explicit_mesh: Mesh) -> None:
    with jax.set_mesh(explicit_mesh):
        with pytest.raises(ValueError, match="axis 'batch' of size 6"):
            axn.named_jit(axn.shard, {"batch": "data"})(axn.ones({"batch": 6}))
        with pytest.raises(ValueError, match="array axis 0"):
            jax.device_put(jnp.ones(6), P("data"))


def test_plain_jit_under_another_mapping(mesh: Mesh) -> None:
    double = jax.jit(lambda x: axn.shard(x * 2))
    with jax.set_mesh(mesh):
        for mesh_axis in ("data", "model"):
            with axn.axis_mapping({"batch": mesh_axis}):
                assert double(axn.ones({"batch": 8})).array.sharding.spec == P(mesh_axis)


def test_haliax(explicit_mesh: Mesh, auto_mesh: Mesh) -> None:
    hax = _library("haliax")
    x = hax.named(np.ones((8, 8), np.float32), ("batch", "embed"))
    with jax.set_mesh(explicit_mesh):
        assert hax.shard(x, {"bacth": "data"}).array.sharding.is_fully_replicated
        with hax.axis_mapping({"batch": "data"}), pytest.raises(Exception, match="ambiguous"):
            hax.named_jit(lambda x: hax.dot(x, x, axis="batch"))(hax.shard(x))
    double = jax.jit(lambda x: hax.auto_sharded(x * 2))
    with jax.set_mesh(auto_mesh):
        for mesh_axis in ("data", "model"):
            with hax.axis_mapping({"batch": mesh_axis}):
                assert double(x).array.sharding.spec[0] == "data"
    assert not hasattr(hax, "shard_map")


def test_nnx(explicit_mesh: Mesh) -> None:
    nnx = _library("flax.nnx")
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embde", None))
    rules = nnx.logical_axis_rules([("embed", "data")])
    with jax.set_mesh(explicit_mesh), rules, pytest.raises(ValueError, match="not found in mesh"):
        nnx.Linear(8, 4, kernel_init=init, rngs=nnx.Rngs(0))
