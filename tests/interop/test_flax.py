"""Models of Flax NNX and Linen are placed by the names that they give their axes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx

import axonym as axn
from axonym.sharding import LogicalAxesRule
from tests.helpers import spec

MAPPING = {"embed": "data", "mlp": "model"}


class Nnx(nnx.Module):
    def __init__(self, rngs: Any):
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        bias = nnx.with_partitioning(nnx.initializers.zeros_init(), ("mlp",))
        self.up = nnx.Linear(8, 16, rngs=rngs, kernel_init=kernel, bias_init=bias)
        self.table = nnx.Param(jnp.ones((3, 8)), out_sharding=(None, "embed"))
        self.plain = nnx.Param(jnp.ones(5))


def nnx_model() -> Nnx:
    with nnx.use_eager_sharding(False):  # the names are no mesh axes
        return Nnx(nnx.Rngs(0))


untyped: Any = linen  # for functions that it does not export for type checkers


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        init = linen.initializers.lecun_normal()
        x = linen.Dense(16, kernel_init=linen.with_partitioning(init, ("embed", "mlp")), name="up")(x)
        return linen.Dense(8, kernel_init=linen.with_logical_partitioning(init, ("mlp", "embed")), name="down")(x)


def specs(tree: Any) -> dict[str, tuple[Any, ...]]:
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
    sharded = {name(path): spec(x) for path, x in paths if isinstance(x.sharding, jax.NamedSharding)}
    return {path: entries for path, entries in sharded.items() if any(entries)}


EXPECTED = {"up/kernel": ("data", "model"), "up/bias": ("model",), "table": (None, "data")}


def test_nnx(mesh: jax.sharding.Mesh) -> None:
    state = nnx.state(nnx_model())
    with jax.set_mesh(mesh):
        assert specs(axn.shard(state, MAPPING)) == EXPECTED
        with axn.axis_mapping(MAPPING):
            assert specs(axn.shard(nnx_model())) == EXPECTED
            assert specs(axn.named_jit(lambda s: s, in_placement=MAPPING)(state)) == EXPECTED


def test_nnx_as_rules_see_it(mesh: jax.sharding.Mesh) -> None:
    with jax.set_mesh(mesh):
        rest = axn.sharding.TreePathShardingRule(("plain", jax.P("model")), (".*", jax.P()))
        state = nnx.state(nnx_model())
        state["plain"] = nnx.Param(jnp.ones(6))
        assert specs(axn.shard(state, MAPPING | rest)) == EXPECTED | {"plain": ("model",)}
        (only,) = axn.lint_mapping(state, {"embd": "data", "mlp": "model"})
    assert "axis 'embd' is in the mapping but not in the tree. Did you mean 'embed'?" in only.message


def test_nnx_optimizer(mesh: jax.sharding.Mesh) -> None:
    with nnx.use_eager_sharding(False):
        state = nnx.state(nnx.Optimizer(nnx_model(), optax.adam(1e-3), wrt=nnx.Param))
    with jax.set_mesh(mesh):
        found = specs(axn.shard(state, MAPPING))
    assert found == {f"opt_state/0/{part}/{path}": s for part in ("mu", "nu") for path, s in EXPECTED.items()}


def test_nnx_abstract_model(mesh: jax.sharding.Mesh) -> None:
    with nnx.use_eager_sharding(False):
        state = nnx.state(nnx.eval_shape(lambda: Nnx(nnx.Rngs(0))))
    with jax.set_mesh(mesh):
        assert specs({k: v for k, v in axn.shard(state, MAPPING).items() if k == "up"}) == {
            k: v for k, v in EXPECTED.items() if k.startswith("up")
        }


def test_linen(mesh: jax.sharding.Mesh) -> None:
    params = Linen().init(jax.random.key(0), jnp.ones((2, 8)))["params"]
    expected = {"up/kernel": ("data", "model"), "down/kernel": ("model", "data")}
    with jax.set_mesh(mesh):
        assert specs(axn.shard(params, MAPPING)) == expected
        state = optax.adam(1e-3).init(params)
        found = specs(axn.shard(state, MAPPING))
    assert found == {f"0/{part}/{path}": s for part in ("mu", "nu") for path, s in expected.items()}


def test_names_that_do_not_fit(auto_mesh: jax.sharding.Mesh) -> None:
    box = linen.Partitioned(jnp.ones((2, 3, 4)), names=("embed", "mlp"))
    with jax.set_mesh(auto_mesh), pytest.raises(ValueError, match=r"w/value.*2 axes \(embed, mlp\).*shape \(2, 3, 4\)"):
        axn.shard({"w": box}, MAPPING)
    box = linen.Partitioned(jnp.ones((2, 3)), names=("embed", "mlp"))
    with (
        jax.set_mesh(auto_mesh),
        pytest.raises(ValueError, match=r"axis 'mlp' of size 3 cannot be sharded over model=2"),
    ):
        axn.shard({"w": box}, {"mlp": "model"})


# --- trees of names ---

PARAMS = {"layers": [{"up": jnp.ones((8, 16)), "scale": jnp.ones(8)}], "table": jnp.ones((3, 8))}
NAMES = {"layers": [{"up": ("embed", "mlp"), "scale": ("embed",)}], "table": jax.P(None, "embed")}
BY_NAMES = {"layers/0/up": ("data", "model"), "layers/0/scale": ("data",), "table": (None, "data")}


def test_a_tree_of_names(mesh: jax.sharding.Mesh) -> None:
    rule = LogicalAxesRule(NAMES, MAPPING)
    with jax.set_mesh(mesh):
        assert specs(axn.shard(PARAMS, rule)) == BY_NAMES
        moments = specs(axn.shard(optax.adam(1e-3).init(PARAMS), rule | jax.P()))
        assert {path: s for path, s in moments.items() if "mu" in path} == {f"0/mu/{p}": s for p, s in BY_NAMES.items()}
        assert not axn.lint_mapping(PARAMS, rule, large=1 << 40)
    assert rule == LogicalAxesRule(NAMES, MAPPING) != LogicalAxesRule(NAMES, {"embed": "data"})


def test_linen_writes_such_a_tree(mesh: jax.sharding.Mesh) -> None:
    boxed = Linen().init(jax.random.key(0), jnp.ones((2, 8)))
    raw, rule = linen.unbox(boxed), LogicalAxesRule(linen.get_partition_spec(boxed), MAPPING)
    with jax.set_mesh(mesh):
        found = specs(axn.shard(raw, rule))
    assert found == {"params/up/kernel": ("data", "model"), "params/down/kernel": ("model", "data")}


def test_logical_axis_rules_of_flax(mesh: jax.sharding.Mesh) -> None:
    """The first rule of a name whose mesh axes the array does not use yet, in the order of the rules."""
    rules = [("mlp", "model"), ("embed", ("data", "model")), ("embed", "data"), ("heads", "model"), ("vocab", None)]
    shapes = {"up": ("embed", "mlp"), "out": ("heads", "embed"), "table": ("vocab", "embed")}
    with jax.set_mesh(mesh):
        arrays = {name: jnp.ones((8, 8)) for name in shapes}
        found = specs(axn.shard(arrays, LogicalAxesRule(shapes, rules)))
    with linen.logical_axis_rules(rules):
        assert found == {n: tuple(untyped.logical_to_mesh_axes(names)) for n, names in shapes.items()}
    assert found == {"up": ("data", "model"), "out": (None, ("data", "model")), "table": (None, ("data", "model"))}


def test_what_is_wrong_with_a_tree_of_names(auto_mesh: jax.sharding.Mesh) -> None:
    with jax.set_mesh(auto_mesh):
        with pytest.raises(
            ValueError, match=r"tabl \(3, 8\): the tree of names has none for it\. Did you mean 'table'\?"
        ):
            axn.shard({"tabl": jnp.ones((3, 8))}, LogicalAxesRule(NAMES, MAPPING))
        with pytest.raises(ValueError, match=r"table has shape \(3,\), and its names are \(None, embed\)\."):
            axn.shard({"table": jnp.ones(3)}, LogicalAxesRule(NAMES, MAPPING))
        (only,) = axn.lint_mapping(PARAMS, LogicalAxesRule(NAMES, {"embd": "data"}), large=1 << 40)
        assert only.message.endswith("Did you mean 'embed'?")
    with pytest.raises(TypeError, match=r"LogicalAxesRule: w must be a tuple of names"):
        LogicalAxesRule({"w": 3}, MAPPING)
