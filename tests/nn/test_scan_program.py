"""The cost of scanned models: the compiled program, recompilation, and communication."""

from __future__ import annotations

import gc
import math
import re
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym.nn import Linear
from axonym.nn.scan import BlockSeq, Stacked
from benchmarks.communication import bytes_moved_in_loops
from benchmarks.program import instructions
from tests.helpers import compilations, spec
from tests.nn.layers import KEY, Layer, Layers, X, make, raw_parts


class Plain(eqx.Module):
    """Two products with raw forms that leave no choice."""

    up: axn.NamedArray
    down: axn.NamedArray

    def __call__(self, x: axn.NamedArray) -> axn.NamedArray:
        return x + axn.dot(axn.tanh(axn.dot(x, self.up, axis="embed")), self.down, axis="mlp")


def apply_raw(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> jax.Array:
    return x + jnp.tanh(x @ weights[0]) @ weights[1]


@pytest.mark.parametrize("remat", [False, True])
def test_the_program_is_that_of_a_scan_by_hand(remat: bool) -> None:
    made = make(Stacked).stacked
    layers = Stacked(Plain(made.up, made.down), Layers, remat)
    body = jax.checkpoint(apply_raw, prevent_cse=False) if remat else apply_raw

    def ours(layers: Any, x: Any) -> Any:
        return axn.sum(layers.fold(x) ** 2).scalar()

    def theirs(weights: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda x, w: (body(x, w), None), x, weights)[0] ** 2)

    a = jax.jit(jax.value_and_grad(ours, argnums=(0, 1))).lower(layers, X).compile()
    raw = (made.up.array, made.down.array), X.array
    b = jax.jit(jax.value_and_grad(theirs, argnums=(0, 1))).lower(*raw).compile()
    found = instructions(a)
    assert found == instructions(b)
    assert found["while"] == 2 and found["dot"] == (7 if remat else 6)
    needs: list[Any] = [program.memory_analysis() for program in (a, b)]
    assert needs[0].temp_size_in_bytes <= needs[1].temp_size_in_bytes


def test_one_layer_is_traced_however_many_there_are() -> None:
    traced = []

    def apply_once(layer: Plain, x: Any) -> Any:
        traced.append(1)
        return layer(x)

    made = make(Stacked).stacked
    layers = Stacked(Plain(made.up, made.down), Layers)
    text = str(jax.make_jaxpr(lambda x: layers.fold_via(apply_once)(x))(X))
    assert text.count("dot_general") == 2 and "transpose" not in text and "jit[" not in text
    assert len(traced) <= 2


def test_a_second_call_compiles_nothing() -> None:
    layers = make(Stacked)
    others = jax.tree.map(lambda x: x * 2 if eqx.is_array(x) else x, layers)

    def apply(layer: Layer, x: Any) -> Any:
        return layer(x)

    layers.fold(X), layers.fold_via(apply)(X)
    with compilations() as seen:
        layers.fold(X), others.fold(X), layers.fold_via(apply)(X), others.fold_via(apply)(X)
    assert not seen


def test_functions_and_what_they_close_over_can_be_collected() -> None:
    def use() -> list[weakref.ref[Any]]:
        big = jnp.ones(8)

        def shifted(layer: Layer, x: Any) -> Any:
            return layer(x) + big[0]

        layers = make(Stacked)
        layers.fold_via(shifted)(X)
        return [weakref.ref(shifted), weakref.ref(big), weakref.ref(layers)]

    references = use()
    gc.collect()
    assert [r() for r in references] == [None, None, None]


# --- on meshes ---

STORAGE = {"embed": "data", "mlp": "model"}
COMPUTE = {"batch": "data", "mlp": "model"}
ONE_LAYER = 2 * 16 * (24 // 2) * 4
"""The bytes of a layer's two weights on every device when they are gathered."""


def step(layers: Any, x: Any) -> Any:
    loss, gradients = eqx.filter_value_and_grad(lambda m: axn.mean(m.fold(x) ** 2).scalar())(layers)
    return loss, eqx.apply_updates(layers, jax.tree.map(lambda g: -0.1 * g, gradients))


def test_fsdp_gathers_one_layer_at_a_time(mesh: Mesh) -> None:
    with jax.set_mesh(mesh):
        sharded = axn.fsdp(step, STORAGE, COMPUTE)
        inside, outside = bytes_moved_in_loops(sharded.lower(make(Stacked), X).compile())
    assert inside["all-gather"].bytes == ONE_LAYER and inside["all-gather"].count == 2
    assert inside["reduce-scatter"].bytes == ONE_LAYER // 4 and inside["reduce-scatter"].count == 2
    assert {kind for kind, moved in outside.items() if moved.bytes > 64} == set(), "the loss and the gradient of scales"


def test_checkpointed_layers_are_gathered_again(explicit_mesh: Mesh) -> None:
    """In the loop of the backward pass, rather than keeping what was gathered."""
    with jax.set_mesh(explicit_mesh):
        sharded = axn.fsdp(step, STORAGE, COMPUTE)
        inside, outside = bytes_moved_in_loops(sharded.lower(make(Stacked, True), X).compile())
    assert inside["all-gather"].bytes == 2 * ONE_LAYER and not outside["all-gather"].count


def test_named_jit_gathers_one_layer_at_a_time(mesh: Mesh) -> None:
    fold = lambda layers, x: layers.fold(x)
    with jax.set_mesh(mesh):
        sharded = axn.named_jit(fold, COMPUTE, in_placement=(STORAGE, COMPUTE), out_placement=COMPUTE)
        inside, outside = bytes_moved_in_loops(sharded.lower(make(Stacked, True), X).compile())
    assert inside["all-gather"].bytes == ONE_LAYER and not outside["all-gather"].count


class TestResults:
    """Values and placements."""

    def test_layers_are_made_where_they_belong(self, mesh: Mesh) -> None:
        with jax.set_mesh(mesh):
            made = axn.named_jit(Stacked.init(Layers, Layer), out_placement=STORAGE)(key=KEY)
            jax.block_until_ready(made.stacked.up)
        assert spec(made.stacked.up) == (None, "data", "model") and spec(made.get_layer(1).up) == ("data", "model")

    @pytest.mark.parametrize("mapping", [{"embed": ("data", "model")}, {"layers": "data", "mlp": "model"}], ids=str)
    def test_each_device_makes_its_shards_only(self, mapping: Any, mesh: Mesh) -> None:
        """No array in the program is larger than the shard of the largest parameter, however it is sharded."""
        Deep, Embed, Mlp = axn.make_axes(layers=16, embed=64, mlp=128)
        with jax.set_mesh(mesh):
            make = axn.named_jit(lambda key: Stacked.init(Deep, Linear)(Embed, Mlp, key=key), mapping)
            program = make.lower(KEY).compile()
            weight = jax.block_until_ready(make(KEY)).stacked.weight.array
        shapes = re.findall(r"\w\d+\[([\d,]+)\]", str(program.as_text()))
        sizes = [math.prod(map(int, dims.split(","))) for dims in shapes]
        assert weight.sharding.shard_shape(weight.shape) != weight.shape
        assert max(sizes) == weight.size // mesh.size
        np.testing.assert_array_equal(weight, Stacked.init(Deep, Linear)(Embed, Mlp, key=KEY).stacked.weight.array)

    def test_a_step_of_fsdp(self, mesh: Mesh) -> None:
        layers = make(Stacked, True)
        expected = eqx.filter_jit(step)(layers, X)
        with jax.set_mesh(mesh):
            loss, updated = jax.block_until_ready(axn.fsdp(step, STORAGE, COMPUTE)(layers, X))
        np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
        for a, b in zip(raw_parts(updated.stacked), raw_parts(expected[1].stacked), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        assert spec(updated.stacked.up) == (None, "data", "model")
        assert spec(updated.stacked.down) == (None, "model", "data")

    def test_loops_and_sequences_lie_alike(self, mesh: Mesh) -> None:
        run = lambda layers, x: layers.scan_via(lambda layer, x: (layer(x), x))(x)
        kinds = make(Stacked), make(BlockSeq)
        expected = run(kinds[0], X)
        with jax.set_mesh(mesh):
            x = axn.shard(X, {"batch": "data"})
            kinds = axn.shard(kinds, {"mlp": "model"})
            results = [
                run(kinds[0], x),
                *eqx.filter_jit(lambda kinds, x: [run(layers, x) for layers in kinds])(kinds, x),
            ]
            jax.block_until_ready(results)
        for final, before in results:
            np.testing.assert_allclose(final.array, expected[0].array, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(before.array, expected[1].array, rtol=1e-4, atol=1e-5)
            assert spec(final) == ("data", None) and spec(before) == (None, "data", None)
