"""Placements other than one mapping: shardings with a mesh of their own, and one placement for each argument."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import axonym as axn
from axonym.distribution import active_settings
from tests.helpers import spec


@pytest.mark.parametrize("traced", [False, True])
def test_a_sharding_brings_its_own_mesh(traced):
    other = axn.make_mesh({"data": 8})
    mine = NamedSharding(axn.make_mesh({"data": 4, "model": 2}), P("data"))

    def place(x):
        return axn.shard({"x": x}, {"x": mine})["x"]

    with axn.set_mesh(other):
        x = (jax.jit(place) if traced else place)(axn.ones({"batch": 8}))
    assert x.array.sharding.is_equivalent_to(mine, 1)


def test_a_sharding_needs_no_mesh_in_force():
    mine = NamedSharding(axn.make_mesh({"data": 8}), P("data"))
    placed = axn.shard({"x": axn.ones({"batch": 8}), "n": 3}, {"x": mine, "n": None})
    assert placed["x"].array.sharding.is_equivalent_to(mine, 1) and placed["n"] == 3


def test_a_sharding_and_another_mesh_contradict_each_other(mesh):
    with pytest.raises(ValueError, match="but the mesh passed is"):
        axn.shard(axn.ones({"batch": 8}), NamedSharding(mesh, P("data")), axn.make_mesh({"data": 8}))


def test_memory_kinds_are_refused():
    sharding = NamedSharding(axn.make_mesh({"data": 8}), P("data"))
    kinds = {m.kind for m in jax.devices()[0].addressable_memories()} - {jax.devices()[0].default_memory().kind}
    assert kinds
    for kind in kinds:
        with pytest.raises(ValueError, match=f"memory kind '{kind}'"):
            axn.shard(axn.ones({"batch": 8}), sharding.with_memory_kind(kind))


@pytest.mark.parametrize("by", ["mesh", "sharding"])
def test_inside_shard_map_a_mesh_by_hand_is_the_one_around(mesh, by):
    def body(x):
        if by == "mesh":
            return axn.shard(x, {"batch": "data"}, mesh) * 2
        return axn.shard(x, NamedSharding(mesh, P("data"))) * 2

    with axn.set_mesh(mesh):
        x = axn.ones({"batch": 8})
        result = jax.jit(jax.shard_map(body, in_specs=P(), out_specs=P()))(x)
    np.testing.assert_array_equal(result.array, 2 * np.ones(8))


def test_one_placement_for_each_argument(mesh):
    x = axn.ones({"batch": 8, "embed": 8})
    with axn.set_mesh(mesh):
        by_position = axn.named_jit(lambda a, b: (a, b), in_placement=({"batch": "data"}, {"embed": "model"}))
        a, b = by_position(x, x)
        assert (spec(a), spec(b)) == (("data", None), (None, "model"))
        by_name = axn.named_jit(lambda a, *, b: (a, b), in_placement={"b": P("model")})
        a, b = by_name(x, b=x)
        assert (spec(a), spec(b)) == ((None, None), ("model", None))


def test_a_compiled_method_can_be_lowered():
    class Model:
        @axn.named_jit
        def double(self, x):
            return x * 2

    model, x = Model(), axn.ones({"x": 2})
    assert model.double(x).shape == {"x": 2}
    assert model.double.lower(x).compile() is not None
    assert model.double.trace(x).jaxpr is not None
    assert model.double.__name__ == "double"


@pytest.mark.parametrize("argument", ["static_argnums", "static_argnames"])
def test_static_arguments_need_not_be_said(argument):
    with pytest.raises(TypeError, match=f"`{argument}` is not needed"):
        axn.named_jit(lambda x, mode: x, **{argument: "mode"})  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_zeros_of_both_signs_are_different_constants():
    f = axn.named_jit(lambda x, c: jax.numpy.copysign(x.array, c))
    x = axn.ones({})
    assert (f(x, 0.0), f(x, -0.0)) == (1, -1)


@pytest.mark.parametrize("merge", [False, True])
def test_a_mapping_inside_fsdp_leaves_parameters_where_they_rest(merge):
    seen = []

    def step(w, x):
        with axn.axis_mapping({"batch": "data"}, merge=merge):
            seen.append(active_settings.active_settings())
            return axn.dot(x, w, axis="embed")

    with axn.set_mesh(axn.make_mesh({"data": 8})):
        axn.fsdp(step, {"embed": "data"}, {"batch": "data"})(
            axn.ones({"embed": 8, "mlp": 2}), axn.ones({"batch": 8, "embed": 8})
        )
    assert seen[0] is not None and dict(seen[0].parameter_mapping) == {"embed": "data"}


def test_fsdp_with_a_parameter_mapping_that_extends_the_compute_mapping(mesh):
    compute = {"batch": "data", "mlp": "model"}
    x, w = axn.ones({"batch": 8, "embed": 8}), axn.ones({"embed": 8, "mlp": 4})
    with axn.set_mesh(mesh):
        step = axn.fsdp(lambda w, x: (w * 2, x * 2, axn.dot(x, w, axis="embed")), {**compute, "embed": "data"}, compute)
        parameter, activation, product = step(w, x)
    assert spec(parameter) == ("data", "model")
    assert spec(activation) == ("data", None)
    assert spec(product) == ("data", "model")


def test_random_keys():
    keys = axn.named(jax.random.split(jax.random.key(0), 8), "batch")
    mesh = axn.make_mesh({"data": 8})
    assert not axn.lint_mapping(keys, {"batch": "data"}, mesh)
    with pytest.raises(TypeError, match=r"jax\.random\.key_data"):
        axn.to_host(keys)


class Tables(eqx.Module):
    tables: Any = axn.field(axis_names=("vocab", "embed"))


def test_a_field_names_each_of_several_arrays(mesh):
    several = Tables({"a": jnp.ones((8, 4)), "b": [jnp.ones((4, 2))]})
    with axn.set_mesh(mesh):
        placed = axn.shard(several, {"vocab": "data"}).tables
    assert placed["a"].sharding.spec == placed["b"][0].sharding.spec == P("data", None)


def test_a_stack_of_modules_has_an_axis_that_its_field_does_not_name(mesh):
    stacked = eqx.filter_vmap(lambda x: Tables(x))(jnp.ones((3, 8, 4)))
    with axn.set_mesh(mesh), pytest.raises(ValueError, match=r"tables: its field names 2 axes .* shape \(3, 8, 4\)"):
        axn.shard(stacked, {"vocab": "data"})
    with axn.set_mesh(mesh):
        placed = axn.shard(stacked, P(None, "data"))
    assert placed.tables.sharding.spec == P(None, "data", None)


def test_data_in_place_is_not_touched(mesh):
    with axn.set_mesh(mesh):
        x = axn.shard(axn.ones({"batch": 8, "embed": 8}), {"batch": "data"})
        assert axn.shard(x, {"batch": ("data",)}).array is x.array
        assert axn.shard(x, {"batch": "data"}, mesh).array is x.array


def test_errors_name_the_parameter(mesh):
    def fn(model, *rest, label):
        return model

    odd = {"w": axn.ones({"embed": 3})}
    compiled = axn.named_jit(fn, in_placement={"embed": "data"})
    one_each = axn.named_jit(fn, in_placement=(None, {"embed": "data"}))
    with axn.set_mesh(mesh):
        with pytest.raises(ValueError, match=r": model/w \(embed=3\): axis 'embed' of size 3"):
            compiled(odd, label=axn.ones({"embed": 4}))
        with pytest.raises(ValueError, match=r": rest\[0\]/w \(embed=3\)"):
            compiled(axn.ones({"embed": 4}), odd, label=0)
        with pytest.raises(ValueError, match=r": label/w \(embed=3\)"):
            compiled(axn.ones({"embed": 4}), label=odd)
        with pytest.raises(ValueError, match=r": rest\[0\]/w \(embed=3\)"):
            one_each(odd, odd, label=0)
        with pytest.raises(ValueError, match=r"2 placements, and none for rest\[1\]"):
            one_each(odd, odd, odd, label=0)


def test_a_misspelled_mapping_warns_once(mesh):
    x = axn.ones({"batch": 8, "embed": 8})
    misspelled = axn.named_jit(lambda a: a * 2, {"embd": "data"})
    with axn.set_mesh(mesh):
        with pytest.warns(UserWarning, match="'embd' of its mapping names no axis .* Did you mean 'embed'"):
            misspelled(x)
        misspelled(x)
        axn.named_jit(lambda a: a * 2, {"hidden": "data"})(x)  # it may exist inside only


def test_an_entry_that_is_left_open_stays_as_it_is(mesh):
    spec_left_open = P(P.UNCONSTRAINED, "model")
    with axn.set_mesh(mesh):
        x = axn.shard(axn.ones({"batch": 8, "embed": 8}), {"batch": "data"})
        assert spec(axn.shard(x, spec_left_open)) == ("data", "model")
        assert spec(jax.jit(lambda x: axn.shard(x, spec_left_open))(x)) == ("data", "model")
