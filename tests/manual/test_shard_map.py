"""`shard_map`: arguments and results by name, everywhere that `jax.shard_map` works, with the same program."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from typing import Any

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import axonym as axn
from axonym.manual.collectives import axis_size
from benchmarks.program import instructions
from tests.conftest import MESH_AXES
from tests.helpers import assert_named, compilations
from tests.sharding.test_shard import spec

MAPPING = {"batch": "data", "mlp": "model"}


@pytest.fixture
def x() -> axn.NamedArray:
    return axn.arange(axn.make_axes(batch=8, embed=4)) * 1.0


@pytest.fixture
def w() -> axn.NamedArray:
    return axn.arange(axn.make_axes(embed=4, mlp=6)) * 0.5


def product(x: axn.NamedArray, w: axn.NamedArray) -> axn.NamedArray:
    return axn.dot(x, w, axis="embed")


def mapped(fn: Any, **options: Any) -> Any:
    """Map a function in jit, where it runs faster than eagerly."""
    return jax.jit(axn.shard_map(fn, mapping=MAPPING, **options))


# --- in and out ---


def test_arguments_come_apart_and_results_are_put_together_by_name(mesh: Mesh, x, w) -> None:
    seen = []

    @axn.shard_map(mapping=MAPPING)
    def step(x, w):
        seen.append((x.shape, w.shape))
        return {"product": product(x, w), "transposed": x.rearrange(("embed", "batch"))}

    with jax.set_mesh(mesh):
        for call in (step, jax.jit(step)):
            found = jax.block_until_ready(call(x, w))
            assert seen.pop() == ({"batch": 2, "embed": 4}, {"embed": 4, "mlp": 3})
            assert not seen, "the body is traced once"
            assert found["product"].axes == axn.make_axes(batch=8, mlp=6)
            assert spec(found["product"]) == ("data", "model")
            assert spec(found["transposed"]) == (None, "data")
            np.testing.assert_allclose(found["product"].array, x.array @ w.array)
            np.testing.assert_array_equal(found["transposed"].array, x.array.T)


CONTEXTS = {
    "jit of grad": lambda f, x, w: jax.jit(jax.grad(lambda w: (f(x, w) ** 2).sum().array))(w).array,
    "grad": lambda f, x, w: jax.grad(lambda w: (f(x, w) ** 2).sum().array)(w).array,
    "named_jit": lambda f, x, w: axn.named_jit(mapping={"mlp": "model"})(f)(x, w).array,
    "vmap": lambda f, x, w: jax.jit(jax.vmap(lambda a: f(axn.named(a, ("batch", "embed")), w).array))(
        jnp.stack([x.array, x.array + 1])
    ),
    "scan": lambda f, x, w: jax.jit(lambda x, w: jax.lax.scan(lambda c, _: (c, f(x, w).array), 0, length=2)[1])(x, w),
    "checkpoint": lambda f, x, w: jax.jit(jax.grad(lambda w: jax.checkpoint(f)(x, w).sum().array))(w).array,
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_under_transformations(mesh: Mesh, x, w, context: str) -> None:
    with jax.set_mesh(mesh):
        found = jax.block_until_ready(CONTEXTS[context](axn.shard_map(product, mapping=MAPPING), x, w))
    with warnings.catch_warnings(action="ignore"):  # a mapping without a mesh warns
        expected = CONTEXTS[context](product, x, w)
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5)


def test_vmap_over_an_axis_that_is_split(explicit_mesh: Mesh) -> None:
    """It takes its mesh axis; what is left is handled by hand."""
    total = axn.shard_map(lambda row: axn.psum(axn.sum(row, "mlp"), "mlp"), mapping={"mlp": "model"})
    with jax.set_mesh(explicit_mesh):
        x = jax.device_put(np.ones((8, 6), np.float32), P("data"))
        found = jax.jit(jax.vmap(lambda row: total(axn.named(row, "mlp")).array))(x)
    np.testing.assert_array_equal(found, np.full(8, 6.0))
    assert spec(found) == ("data",)


def test_mesh_and_mapping_are_those_of_the_call(x, w) -> None:
    step = axn.shard_map(product)
    jitted = jax.jit(step)
    w = axn.named(np.ones((4, 8), np.float32), ("embed", "mlp"))
    x = axn.to_host(x)
    for sizes in ({"data": 4, "model": 2}, {"data": 2, "model": 4}):
        for mapping, expected in ((MAPPING, ("data", "model")), ({"batch": "data"}, ("data", None))):
            with jax.set_mesh(axn.make_mesh(sizes)), axn.axis_mapping(mapping):
                assert spec(jitted(x, w)) == expected
        with jax.set_mesh(axn.make_mesh(sizes)), axn.axis_mapping(MAPPING):
            assert step(x, w).array.addressable_shards[0].data.shape == (8 // sizes["data"], 8 // sizes["model"])


def test_what_was_compiled_is_found_again(auto_mesh: Mesh, x, w) -> None:
    step = jax.jit(axn.shard_map(product))
    with jax.set_mesh(auto_mesh):
        for mapping in (MAPPING, {"batch": "data"}):
            with axn.axis_mapping(mapping):
                jax.block_until_ready(step(x, w))
        for mapping in (MAPPING, {"batch": "data"}):
            with axn.axis_mapping(mapping), compilations() as seen:
                jax.block_until_ready(step(x, w))
            assert not seen


def test_functions_are_not_kept(auto_mesh: Mesh, x) -> None:
    def body(x):
        return x

    wrapped = axn.shard_map(body, mapping=MAPPING)
    with jax.set_mesh(auto_mesh):
        jax.jit(wrapped).lower(x)
    gone = weakref.ref(body)
    del wrapped, body
    gc.collect()
    assert gone() is None


def test_a_mesh_can_be_passed(auto_mesh: Mesh, explicit_mesh: Mesh, x, w) -> None:
    assert spec(mapped(product, mesh=auto_mesh)(x, w)) == ("data", "model")
    assert spec(axn.shard_map(product, mesh=explicit_mesh, mapping=MAPPING)(x, w)) == ("data", "model")
    other = axn.make_mesh({"data": 2})
    with jax.set_mesh(auto_mesh):
        assert spec(mapped(product, mesh=auto_mesh)(x, w)) == ("data", "model")
        with pytest.raises(
            ValueError, match=r"the mesh passed is \(data=2\) of Auto axes, but the active one is \(data=4"
        ):
            mapped(product, mesh=other)(x, w)
        with pytest.raises(ValueError, match=r"the mesh passed is \(data=4, model=2\) of Explicit axes, but"):
            mapped(product, mesh=explicit_mesh)(x, w)


def test_what_is_not_an_array_goes_through(auto_mesh: Mesh, x) -> None:
    class Scale(eqx.Module):
        by: Any
        activation: Any
        bias: axn.NamedArray

        def __call__(self, x):
            return self.activation(x * self.by + self.bias)

    def step(scale: Any, *xs, key, name="unused", **more):
        assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        assert more["flag"] is True
        return scale, [scale(x) for x in xs], name, None, 3

    scale = Scale(2.0, axn.tanh, axn.ones({"embed": 4}))
    with jax.set_mesh(auto_mesh):
        call = axn.shard_map(step, mapping=MAPPING)
        returned, values, name, none, number = call(scale, x, x, key=jax.random.key(0), flag=True)
    assert (returned.by, returned.activation, name, none, number) == (2.0, axn.tanh, "unused", None, 3)
    np.testing.assert_allclose(values[1].array, np.tanh(x.array * 2.0 + 1), rtol=1e-6)
    assert spec(values[1]) == ("data", None) and spec(returned.bias) == (None,)


def test_functions_without_arrays(auto_mesh: Mesh) -> None:
    with jax.set_mesh(auto_mesh):
        made = axn.shard_map(lambda: axn.pvary(axn.zeros({"batch": 2}), "batch"), mapping=MAPPING)()
        assert axn.shard_map(lambda text: text + "!", mapping=MAPPING)("no array") == "no array!"
    assert made.shape == {"batch": 8} and spec(made) == ("data",)


def test_functions_keep_their_identity_and_methods_bind(auto_mesh: Mesh, x) -> None:
    class Model:
        @axn.shard_map(mapping=MAPPING)
        def total(self, x):
            """The total."""
            return axn.psum(axn.sum(x, "batch"), "batch")

    assert Model.total.__name__ == "total" and Model.total.__doc__ == "The total."
    with jax.set_mesh(auto_mesh):
        np.testing.assert_allclose(Model().total(x).array, x.array.sum(0))


def test_raw_arrays_take_partition_specs(mesh: Mesh, x) -> None:
    raw = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    with jax.set_mesh(mesh):
        double = mapped(lambda a, x: (a * 2, x), in_specs=(P("data"), None), out_specs=(P("data", None), None))
        found, _ = double(raw, x)
        assert spec(found) == ("data", None)
        np.testing.assert_array_equal(found, raw * 2)
        whole = mapped(lambda a: axn.named(a.shape[0] + axn.axis_index("batch")[None], "batch"))(raw)
        np.testing.assert_array_equal(whole.array, 8 + np.arange(4), "without a spec, each device has the whole of it")
        scalar = mapped(lambda x: axn.pmean(axn.mean(x), "batch").scalar())(x)
        assert scalar.shape == () and float(scalar) == 15.5


def test_raw_fields_of_modules_are_placed_by_their_names(auto_mesh: Mesh) -> None:
    class Table(eqx.Module):
        weight: Any = axn.field(axis_names=("batch", "embed"))

    with jax.set_mesh(auto_mesh):
        found = mapped(lambda t: axn.named(t.weight, ("batch", "embed")))(Table(jnp.ones((8, 2))))
    assert found.shape == {"batch": 8, "embed": 2} and spec(found) == ("data", None)


def test_placements_of_arguments_and_results(mesh: Mesh, x, w) -> None:
    seen = []

    def step(x, w, *, scale):
        seen.append((x.shape, w.shape, scale.shape))
        return x, w, scale

    scale = axn.ones({"mlp": 6})
    by_position = ({"embed": "model"}, P(None, "model"))
    by_name = {"x": {"embed": "model"}, "w": NamedSharding(mesh, P(None, "model")), "scale": {"mlp": None}}
    with jax.set_mesh(mesh):
        for in_specs, local in ((by_position, 3), (by_name, 6)):
            found = mapped(step, in_specs=in_specs)(x, w, scale=scale)
            assert seen.pop() == ({"batch": 8, "embed": 2}, {"embed": 4, "mlp": 3}, {"mlp": local})
            assert [spec(f) for f in found] == [(None, "model"), (None, "model"), ("model",) if local == 3 else (None,)]
        found = mapped(lambda x: {"a": x, "b": x}, out_specs={"a": P(None, "model"), "b": None}, in_specs=P())(x)
        assert found["a"].shape == {"batch": 8, "embed": 8}, "said with a partition spec, copies are what is meant"
        assert found["b"].shape == {"batch": 8, "embed": 4} and spec(found["b"]) == (None, None)


def test_a_mapping_makes_no_copies_of_what_is_whole(mesh: Mesh) -> None:
    def step(x, w):
        return {"s": axn.psum_scatter(axn.sum(x, "batch") * w, "embed", over="batch"), "w": w}

    x, w = axn.ones({"batch": 8}), axn.arange(axn.Axis("embed", 4)) * 1.0
    by_name = {"embed": "data"}
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match=r"result 'w' \(embed=4\) is the same on all devices of mesh axis 'data'"):
            mapped(step, out_specs=by_name)(x, w)
        for of_w, size in ((None, 4), (P(), 4), (P("data"), 16)):
            found = mapped(step, out_specs={"s": by_name, "w": of_w})(x, w)
            assert found["w"].shape == {"embed": size}
            np.testing.assert_array_equal(found["s"].array, w.array * 8)


def test_how_results_are_put_together(auto_mesh: Mesh, x) -> None:
    def step(x):
        return {
            "gathered": axn.all_gather(x, "batch", invariant=True),
            "resized": axn.sum(x, "batch").broadcast_axis(axn.Axis("batch", 1)),
            "new": axn.pvary(axn.zeros({"mlp": 3}), "mlp"),
            "unknown": axn.zeros({"other": 5}),
            "same": x * 2,
        }

    with jax.set_mesh(auto_mesh):
        found = mapped(step)(x)
    assert {n: (f.shape, spec(f)) for n, f in found.items()} == {
        "gathered": ({"batch": 8, "embed": 4}, (None, None)),
        "resized": ({"batch": 4, "embed": 4}, ("data", None)),
        "new": ({"mlp": 6}, ("model",)),
        "unknown": ({"other": 5}, (None,)),
        "same": ({"batch": 8, "embed": 4}, ("data", None)),
    }
    np.testing.assert_array_equal(found["gathered"].array, x.array)
    np.testing.assert_array_equal(found["resized"].array, x.array.reshape(4, 2, 4).sum(1))


def test_a_result_lies_as_the_argument_whose_size_it_has(auto_mesh: Mesh, x) -> None:
    """With parameters sharded like the batch, `embed` is sharded in one argument, replicated in another."""
    w = axn.ones(axn.make_axes(embed=4, mlp=6))
    step = axn.shard_map(
        lambda w, x: (w * 2, axn.dot(x, axn.all_gather(w, "embed"), axis="mlp")),
        mapping={"batch": "data"},
        in_specs=({"embed": "data"}, None),
    )
    x = axn.ones(axn.make_axes(batch=8, mlp=6))
    with jax.set_mesh(auto_mesh):
        updated, y = jax.jit(step)(w, x)
    assert (spec(updated), spec(y)) == (("data", None), ("data", None))
    assert updated.shape == w.shape and y.shape == {"batch": 8, "embed": 4}


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, Any]]:
    """Draw axes in some order, and a mapping that uses each mesh axis at most once."""
    names = draw(st.permutations(["a", "b", "c"]))
    sizes = {n: 8 * draw(st.integers(1, 2)) for n in names}
    places: dict[str, list[str]] = {n: [] for n in names}
    for mesh_axis in draw(st.permutations(MESH_AXES)):
        place = draw(st.sampled_from([*names, None]))
        if place is not None:
            places[place].append(mesh_axis)
    return sizes, {n: axes or None for n, axes in places.items()}


@hypothesis.settings(max_examples=12)
@hypothesis.given(layouts())
def test_whatever_comes_apart_is_put_together(auto_mesh: Mesh, layout) -> None:
    sizes, mapping = layout
    x = axn.arange(tuple(axn.Axis(n, s) for n, s in sizes.items()))
    split = [n for n, axes in mapping.items() if axes]

    def body(x):
        for n, axes in mapping.items():
            assert x.axis_size(n) * math.prod(auto_mesh.shape[a] for a in axes or ()) == sizes[n]
        total = axn.sum(x, tuple(sizes))
        return x.rearrange(tuple(sorted(sizes))), axn.psum(total, split) if split else total

    with jax.set_mesh(auto_mesh):
        same, total = jax.block_until_ready(jax.jit(axn.shard_map(body, mapping=mapping))(x))
    np.testing.assert_array_equal(same.rearrange(x.names).array, x.array)
    assert int(total.array) == x.array.sum()


def test_positions_differ_from_device_to_device_where_the_values_do(auto_mesh: Mesh, x) -> None:
    """JAX takes the positions that it sorts along with values for the same on all devices."""

    def positions(x):
        mapped_over = axn.vmap(lambda row: axn.argsort(row, "embed"), "batch")(x)
        return {"argsort": axn.argsort(x, "embed"), "vmap": mapped_over}

    with jax.set_mesh(auto_mesh):
        for name, found in mapped(positions)(x).items():
            assert found.array.sharding.is_equivalent_to(NamedSharding(auto_mesh, P("data")), 2), name
            assert set(map(tuple, found.rearrange(("batch", "embed")).array.tolist())) <= {(0, 1, 2, 3), (3, 2, 1, 0)}


def test_on_one_device(x, w) -> None:
    """Sizes do not tell what is split there, and the results are the same all the same."""
    step = axn.shard_map(
        lambda w, x: (w, product(x, axn.all_gather(w, "embed")), axn.psum(axn.sum(x, "batch"), "batch")),
        mapping={"batch": "data"},
        in_specs=({"embed": "data"}, None),
    )
    with jax.set_mesh(axn.make_mesh({"data": 1}, devices=jax.devices()[:1])):
        found = jax.jit(step)(w, x)
    np.testing.assert_allclose(found[1].array, x.array @ w.array)
    np.testing.assert_allclose(found[2].array, x.array.sum(0))


# --- some mesh axes, nested, unchecked ---


def test_some_mesh_axes_are_left_to_the_partitioner(mesh: Mesh, x, w) -> None:
    seen = []

    def step(x, w):
        seen.append((x.shape, w.shape))
        return axn.psum(axn.sum(axn.tanh(product(x, w)), "batch"), "batch")

    with jax.set_mesh(mesh):
        partly = axn.shard_map(step, mapping=MAPPING, axis_names="data")
        args = axn.shard((x, w), MAPPING)
        found = jax.jit(partly)(*args)
        eager = partly(*args)
        grad = jax.jit(jax.grad(lambda w: partly(args[0], w).sum().array))(args[1])
    assert seen == [({"batch": 2, "embed": 4}, {"embed": 4, "mlp": 6})] * 3
    for f in (found, eager):
        np.testing.assert_allclose(f.array, np.tanh(x.array @ w.array).sum(0), rtol=1e-5)
    expected = jax.grad(lambda w: axn.tanh(product(x, w)).sum().array)(w)
    np.testing.assert_allclose(grad.array, expected.array, rtol=1e-4, atol=1e-6)


def test_nested(mesh: Mesh, x, w) -> None:
    @axn.shard_map(axis_names="model")
    def inner(x, w):
        assert w.shape == {"embed": 4, "mlp": 3}
        return axn.psum(axn.dot(x, w, axis="embed").sum("mlp"), "mlp")

    with jax.set_mesh(mesh):
        outer = axn.shard_map(inner, mapping=MAPPING, axis_names="data")
        for found in (jax.jit(outer)(x, w), outer(x, w)):
            assert spec(found) == ("data",)
            np.testing.assert_allclose(found.array, (x.array @ w.array).sum(1), rtol=1e-6)
        with pytest.raises(ValueError, match="mesh axis 'model' of `axis_names` is manual already"):
            mapped(inner)(x, w)
        with pytest.raises(ValueError, match="makes all mesh axes manual already"):
            mapped(lambda x, w: axn.shard_map(product)(x, w))(x, w)


def test_the_gradient_of_a_nested_one(mesh: Mesh, x, w) -> None:
    """JAX lowers it where the outer one is not checked."""
    inner = axn.shard_map(product, axis_names="model")
    outer = axn.shard_map(lambda x, w: inner(x, w), mapping=MAPPING, axis_names="data", check_vma=False)
    loss = lambda fn: lambda w: (fn(x, w) ** 2).sum().array
    with jax.set_mesh(mesh):
        found = jax.jit(jax.grad(loss(outer)))(w)
    np.testing.assert_allclose(found.array, jax.grad(loss(product))(w).array, rtol=1e-5)


def test_what_is_split_can_be_split_further(auto_mesh: Mesh) -> None:
    x = axn.arange(axn.Axis("batch", 8))
    seen = []

    @axn.shard_map(mapping={"batch": "model"}, axis_names="model")
    def inner(x):
        seen.append(x.shape)
        return x, axn.all_gather(x, "batch", invariant=True), x * 0 + axn.axis_offset("batch")

    with jax.set_mesh(auto_mesh):
        same, whole, offset = jax.jit(
            axn.shard_map(inner, mapping={"batch": "data"}, axis_names="data", out_specs=(None, P(), None))
        )(x)
    assert seen == [{"batch": 1}]
    for found in (same, whole, offset):
        np.testing.assert_array_equal(found.array, x.array)


def test_other_transforms_inside(auto_mesh: Mesh, x) -> None:
    """What is jitted inside follows the sizes outside: they are part of jit's cache key."""
    offset = jax.jit(lambda x: x * 0 + axn.axis_offset("batch"))
    with jax.set_mesh(auto_mesh):
        first = mapped(offset)(x)
        split_wider = axn.shard_map(offset, mapping={"batch": ("data", "model")})(
            axn.ones(axn.make_axes(batch=16, embed=4))
        )
        mapped_inside = mapped(axn.named_jit(lambda x: axn.psum(axn.sum(x, "batch"), "batch"), {"batch": "data"}))(x)
    np.testing.assert_array_equal(first.array[:, 0], np.arange(8) // 2 * 2)
    np.testing.assert_array_equal(split_wider.array[:, 0], np.arange(16) // 2 * 2)
    np.testing.assert_allclose(mapped_inside.array, x.array.sum(0))


def test_shard_inside_leaves_alone_what_is_handled_by_hand(mesh: Mesh, x) -> None:
    with jax.set_mesh(mesh):
        found = mapped(lambda x: axn.shard(x) + 1)(x)
    np.testing.assert_array_equal(found.array, x.array + 1)


def test_unchecked(auto_mesh: Mesh, x) -> None:
    with jax.set_mesh(auto_mesh):
        found = mapped(lambda x: axn.all_gather(x, "batch"), check_vma=False)(x)
    assert found.shape == x.shape
    np.testing.assert_array_equal(found.array, x.array)


def test_mixed_mesh(auto_mesh: Mesh, x, w) -> None:
    mixed = Mesh(auto_mesh.devices, auto_mesh.axis_names, axis_types=(AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mixed):
        np.testing.assert_allclose(mapped(product)(x, w).array, x.array @ w.array)


# --- what it costs ---


def test_the_program_is_that_of_the_positional_one(auto_mesh: Mesh, x, w) -> None:
    def by_position(x, w):
        return jax.lax.psum(jnp.tanh(x @ w), "data")

    def by_name(x, w):
        return axn.psum(axn.tanh(product(x, w)), axn.MeshAxis("data"))

    with jax.set_mesh(auto_mesh):
        in_specs, out_specs = (P("data"), P(None, "model")), P(None, "model")
        theirs = jax.jit(jax.shard_map(by_position, in_specs=in_specs, out_specs=out_specs))
        theirs = theirs.lower(x.array, w.array).compile()
        ours = mapped(by_name, out_specs={"mlp": "model"}).lower(x, w).compile()
    assert instructions(ours) == instructions(theirs)


# --- what is wrong, in names ---


def test_arguments_that_do_not_fit(auto_mesh: Mesh, explicit_mesh: Mesh, x, w) -> None:
    with pytest.raises(ValueError, match="shard_map of 'product': no mesh is active"):
        mapped(product)(x, w)
    with jax.set_mesh(auto_mesh):
        with pytest.raises(ValueError, match="nothing says how the arguments are sharded: no mapping is active"):
            axn.shard_map(product)(x, w)
        with pytest.raises(
            ValueError, match=r"shard_map of 'product', arguments.*x \(batch=6.*of size 6 cannot be sharded"
        ):
            axn.shard_map(product, mapping=MAPPING)(x["batch", 0:6], w)
        with pytest.raises(ValueError, match=r"`axis_names`: mesh .* has no axis 'dta'\. Did you mean 'data'"):
            mapped(product, axis_names="dta")(x, w)
        with pytest.raises(ValueError, match=r"`in_specs` has 1 entry for 2 positional arguments, x, w"):
            mapped(product, in_specs=(None,))(x, w)
        with pytest.raises(ValueError, match=r"`in_specs` has 'ww', which is not an argument of the call"):
            mapped(product, in_specs={"ww": P()})(x, w)
        other = NamedSharding(axn.make_mesh({"data": 2}), P("data"))
        with pytest.raises(ValueError, match="x is placed on another mesh"):
            mapped(product, in_specs=(other, None))(x, w)
        with pytest.raises(TypeError, match="expected a function, got int"):
            axn.shard_map(3)  # pyright: ignore
        with pytest.raises(ValueError, match="leaves a dimension to the partitioner"):
            mapped(product, in_specs=P(P.UNCONSTRAINED))(x, w)


def test_raw_arrays_that_are_split_need_a_spec(mesh: Mesh) -> None:
    double = lambda raw: raw * 2
    with jax.set_mesh(mesh):
        raw = jax.device_put(np.arange(8.0), NamedSharding(mesh, P("data")))
        with pytest.raises(ValueError, match=r"raw \(8,\) is a raw array sharded by P.*'data'"):
            axn.shard_map(double, mapping=MAPPING)(raw)
        split = axn.shard_map(double, mapping=MAPPING, in_specs=P("data"), out_specs=P("data"))(raw)
        whole = axn.shard_map(double, mapping=MAPPING, in_specs=P())(raw)
        other = axn.shard_map(double, mapping=MAPPING, axis_names="model")(raw)
    for found in (split, whole, other):
        np.testing.assert_array_equal(found, np.arange(8.0) * 2)


def test_the_backward_pass_of_a_custom_vjp_speaks_of_mesh_axes(auto_mesh: Mesh, x) -> None:
    def make(word):
        @jax.custom_vjp
        def scaled(x):
            return x

        scaled.defvjp(lambda x: (x, None), lambda _, g: (g * axis_size(word),))
        return jax.jit(jax.grad(lambda x: axn.shard_map(scaled, mapping=MAPPING)(x).sum().array))

    with jax.set_mesh(auto_mesh):
        np.testing.assert_array_equal(make("data")(x).array, np.full((8, 4), 4.0))
        with pytest.raises(
            ValueError, match=r"No mapping is active\. If this is the backward pass of a `jax.custom_vjp`"
        ):
            make("batch")(x)
        with axn.axis_mapping(MAPPING):
            np.testing.assert_array_equal(make("batch")(x).array, np.full((8, 4), 4.0))


def step(x, w):
    return {"loss": axn.sum(x, "batch"), "ok": x, "constant": axn.zeros({"batch": 2})}


def test_results_that_cannot_be_put_together(auto_mesh: Mesh, x, w) -> None:
    with jax.set_mesh(auto_mesh):
        with pytest.raises(ValueError) as caught:
            mapped(step)(x, w)
        text = str(caught.value)
        assert text.startswith("shard_map of 'step', results: ")
        assert "result 'loss' (embed=4) varies over mesh axis 'data' (which shards 'batch')" in text
        assert "result 'constant' (batch=2) is the same on all devices of mesh axis 'data'" in text
        assert "'ok'" not in text
        with pytest.raises(ValueError, match=r"the result of shape \(2, 4\) varies over mesh axis 'data'"):
            mapped(lambda x: x.array)(x)
        with pytest.raises(
            ValueError, match=r"by the arguments, axis 'embed' of size 4 could be replicated or sharded over"
        ):
            mapped(lambda x, y: y, in_specs=({}, {"embed": "model"}))(x, axn.ones({"embed": 8}))
        with pytest.raises(ValueError, match="are both sharded over mesh axis 'data'"):
            axn.shard_map(
                lambda x: x["embed", 0].broadcast_axis(axn.Axis("other", 2)), mapping={"batch": "data", "other": "data"}
            )(x)
        with pytest.raises(ValueError, match=r"'modle', which the mesh does not have\. Did you mean 'model'"):
            mapped(lambda x: x, out_specs={"embed": "modle"})(x)


def test_what_jax_says_about_scans_is_said_in_names(auto_mesh: Mesh, x) -> None:
    def total(x, start):
        return jax.lax.scan(lambda c, row: (c + axn.named(row, "embed"), None), start, x.array)[0]

    def wrong(x):
        return axn.psum(total(x, axn.zeros({"embed": 4})), "batch")

    def right(x):
        return axn.psum(total(x, axn.pvary(axn.zeros({"embed": 4}), "batch")), "batch")

    with jax.set_mesh(auto_mesh):
        with pytest.raises(TypeError) as caught:
            mapped(wrong)(x)
        note = caught.value.__notes__[0]
        assert "shard_map of 'wrong': this error is about mesh axis 'data' (which shards 'batch')" in note
        assert "`axonym.pvary(x, 'batch')`" in note
        np.testing.assert_allclose(mapped(right)(x).array, x.array.sum(0))


@pytest.mark.parametrize("fn", [lambda x: axn.nn.gelu(x, approximate=False), axn.sinc], ids=["gelu", "sinc"])
def test_derivatives_inside_shard_map(fn: Any, auto_mesh: Mesh) -> None:
    """From jax 0.12 on, those of JAX's functions evaluate a polynomial of device-varying values, which it refuses."""
    x = axn.named(np.array([-3.0, -1.5, -0.5, -0.1, 0.0, 0.3, 1.0, 2.5], np.float32), "batch")

    def first(x: axn.NamedArray) -> axn.NamedArray:
        return jax.grad(lambda x: axn.sum(fn(x)).array)(x)

    def all_of_them(x: axn.NamedArray) -> Any:
        return fn(x), first(x), jax.grad(lambda x: axn.sum(first(x)).array)(x)

    expected = all_of_them(x)
    with jax.set_mesh(auto_mesh), axn.axis_mapping({"batch": "data"}):
        found = jax.jit(axn.shard_map(all_of_them))(x)
    for a, b in zip(found, expected, strict=True):
        assert_named(a, b, rtol=1e-4, atol=1e-5)
