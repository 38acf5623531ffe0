"""States of optimizers whose arrays have the names of parameters, but other axes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import axonym as axn
from axonym.state import restore_checkpoint, save_checkpoint
from tests.helpers import spec

STORAGE, COMPUTE = {"embed": "data", "mlp": "model"}, {"batch": "data", "mlp": "model"}


def params() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"w": {"embed": 16, "mlp": 24}, "b": {"mlp": 24}, "layers": {"layer": 3, "embed": 16, "mlp": 24}}
    draw = lambda shape: axn.named(jnp.asarray(rng.normal(size=tuple(shape.values())), jnp.float32), tuple(shape))
    return {name: draw(shape) for name, shape in shapes.items()}


def loss(params: Any, x: Any) -> Any:
    w = params["w"] + axn.sum(params["layers"], "layer")
    return axn.mean((axn.dot(x, w, axis="embed") + params["b"]) ** 2).scalar()


def shampoo(rate: float) -> optax.GradientTransformation:
    """Return a form of Shampoo with the inverse of two matrices for each matrix, and a mean of squares for the rest."""

    def init(params: Any) -> Any:
        square = lambda p: (jnp.eye(p.shape[0]), jnp.eye(p.shape[1])) if p.ndim == 2 else jnp.zeros(())
        return jax.tree.map(square, params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        def accumulated(g: Any, s: Any) -> Any:
            return (s[0] + g @ g.T, s[1] + g.T @ g) if g.ndim == 2 else s + jnp.mean(g**2)

        def scaled(g: Any, s: Any) -> Any:
            if g.ndim != 2:
                return -rate * g / jnp.sqrt(s + 1)
            return -rate * jnp.linalg.solve(s[1], jnp.linalg.solve(s[0], g).T).T

        state = jax.tree.map(accumulated, updates, state)
        return jax.tree.map(scaled, updates, state), state

    return optax.GradientTransformation(init, update)


OPTIMIZERS = {
    "adafactor": (
        lambda: optax.adafactor(0.01, min_dim_size_to_factor=8),
        {
            "v_row/w": ("data",),
            "v_col/w": ("model",),
            "v_row/layers": (None, "data"),
            "v/w": (None,),
            "v_row/b": (None,),
        },
    ),
    "muon": (lambda: contrib.muon(0.01), {"mu/w": ("data", "model"), "mu/layers": (None, "data", "model")}),
    "shampoo": (lambda: shampoo(0.01), {"w/0": ("data", None), "w/1": ("model", None), "b": (), "layers": ()}),
    "adam": (lambda: optax.adam(0.01), {"mu/w": ("data", "model"), "nu/b": ("model",)}),
}


def specs(tree: Any) -> dict[str, Any]:
    """Return the spec of each array by path, without the optimizer's own levels."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/").replace("/array", "")
    return {"/" + name(path): spec(x) for path, x in paths if isinstance(x.sharding, jax.NamedSharding)}


def assert_placed(state: Any, expected: dict[str, Any]) -> None:
    found = specs(state)
    for path, entries in expected.items():
        mine = [own for key, own in found.items() if key.endswith("/" + path)]
        assert [tuple(own) for own in mine] == [entries], (path, found)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_placed_saved_restored_and_resumed(name: str, explicit: bool, tmp_path: Path) -> None:
    make: Any
    make, expected = OPTIMIZERS[name]
    optimizer = make()

    def update(grads: Any, state: Any, params: Any) -> Any:
        if not explicit or name not in ("muon", "shampoo"):
            return optimizer.update(grads, state, params)
        # Their products of raw arrays are ambiguous on Explicit axes, for JAX too.
        out = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (grads, state))
        automatic: Any = jax.sharding.auto_axes(optimizer.update, out_sharding=out)
        return automatic(grads, state, params)

    def step(params: Any, state: Any, x: Any, update: Any = update) -> Any:
        updates, state = update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    x, start = axn.ones({"batch": 8, "embed": 16}), params()
    single = jax.jit(functools.partial(step, update=optimizer.update))
    wanted = single(*single(start, optimizer.init(start), x), x)

    with jax.set_mesh(axn.make_mesh({"data": 4, "model": 2}, explicit=explicit)):
        train: Any = axn.fsdp(step, STORAGE, COMPUTE)
        placed = axn.shard((start, optimizer.init(start)), STORAGE)
        assert_placed(placed[1], expected)
        after = jax.block_until_ready(train(*placed, x))
        assert_placed(after[1], expected)
        save_checkpoint(tmp_path / "1", after)
        template = jax.eval_shape(lambda: after)
    with jax.set_mesh(axn.make_mesh({"model": 8, "data": 1}, explicit=explicit)):
        restored = restore_checkpoint(tmp_path / "1", template, {"embed": "model"})
        for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(after), strict=True):
            np.testing.assert_array_equal(a, b)
    with jax.set_mesh(axn.make_mesh({"data": 4, "model": 2}, explicit=explicit)):
        restored = restore_checkpoint(tmp_path / "1", template, STORAGE)
        assert_placed(restored[1], expected)
        resumed = jax.block_until_ready(train(*restored, x))
    for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_what_sizes_do_not_tell_is_replicated_and_said(auto_mesh: jax.sharding.Mesh) -> None:
    square = {"w": axn.ones({"embed": 16, "mlp": 16})}
    state = optax.adafactor(0.01, min_dim_size_to_factor=8).init(square)
    with jax.set_mesh(auto_mesh):
        with pytest.warns(UserWarning, match="sizes do not identify their axes: .*/v_row/w of shape") as caught:
            placed = axn.shard(state, STORAGE)
        assert len(caught) == 1
        assert_placed(placed, {"v_row/w": (None,), "v_col/w": (None,)})
        rule = axn.sharding.TreePathShardingRule(("v_row/w$", jax.P("data")), ("v_col/w$", jax.P("model"))) | STORAGE
        assert_placed(axn.shard(state, rule), {"v_row/w": ("data",), "v_col/w": ("model",)})
        assert_placed(axn.shard(state, {"embed": None}), {"v_row/w": (None,)})
        assert_placed(axn.unshard(placed), {"v_row/w": (None,)})


def test_a_state_by_itself_is_placed_as_far_as_it_tells(auto_mesh: jax.sharding.Mesh) -> None:
    """The sizes of axes come from its own arrays; the one that no size excludes is left."""
    state = optax.adafactor(0.01, min_dim_size_to_factor=8).init({n: p for n, p in params().items() if n != "layers"})
    assert_placed(axn.shard(state, STORAGE, auto_mesh), {"v_row/w": ("data",), "v_col/w": ("model",)})


def test_an_axis_that_a_data_loader_added_is_an_error(auto_mesh: jax.sharding.Mesh) -> None:
    stacked = jax.tree.map(lambda *x: np.stack(x), *[{"tokens": axn.ones({"pos": 8})}] * 4)
    with pytest.raises(ValueError, match=r"tokens: .* 1 name \(pos\) for an array of rank 2, shape \(4, 8\)"):
        axn.shard(stacked, {"pos": "data"}, auto_mesh)


def test_axes_that_a_mesh_does_not_divide_are_replicated_and_said(auto_mesh: jax.sharding.Mesh) -> None:
    """A matrix of Shampoo by itself, where no size of a parameter excludes a name."""
    state = shampoo(0.1).init({"w": axn.ones({"embed": 6, "mlp": 6})})
    with pytest.warns(UserWarning, match="sizes do not identify their axes"):
        assert_placed(axn.shard(state, STORAGE, auto_mesh), {"w/0": (None, None), "w/1": (None, None)})


def test_an_array_of_one_element_is_an_error_unless_it_stands_for_a_larger_one(auto_mesh: jax.sharding.Mesh) -> None:
    with (
        jax.set_mesh(auto_mesh),
        pytest.raises(ValueError, match="axis 'mlp' of size 1 cannot be sharded over model=2"),
    ):
        axn.shard({"x": axn.ones({"mlp": 1}), "y": axn.ones({"mlp": 8})}, STORAGE)
