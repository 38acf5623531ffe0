"""`vmap` by name: against the positional form, for every kind of argument and result, and on meshes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import axonym as axn
import axonym.haliax as hax
from axonym.custom_partitioning import partitioned
from axonym.transforms.vmap import vmap
from tests.helpers import assert_named, draw, spec
from tests.ops.test_contraction_program import instructions

Batch, Heads, Pos, Embed, Mlp = axn.make_axes(batch=8, heads=2, pos=4, embed=8, mlp=4)
COLLECTIVE = re.compile(r"= (\S+) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(")

X, W, BIAS = draw(Batch, Pos, Embed), draw(Embed, Mlp), draw(Mlp)


def project(x: axn.NamedArray, w: axn.NamedArray, bias: axn.NamedArray) -> axn.NamedArray:
    """Apply a small function to three named arrays."""
    return axn.tanh(axn.dot(x, w, axis="embed") + bias)


def raw_project(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
    """Apply the same function by position."""
    return jnp.tanh(x @ w + bias[None])


# --- against the positional form ---


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("axis", "args", "in_axes", "names"),
    [
        (Batch, (X, W, BIAS), (0, None, None), ("batch", "pos", "mlp")),
        ("batch", (X.rearrange(("pos", "batch", "embed")), W, BIAS), (1, None, None), ("batch", "pos", "mlp")),
        (Heads, (draw(Pos, Embed), draw(Embed, Heads, Mlp), BIAS), (None, 1, None), ("heads", "pos", "mlp")),
        ("heads", (draw(Pos, Embed), draw(Embed, Mlp, Heads), draw(Mlp, Heads)), (None, 2, 1), ("heads", "pos", "mlp")),
    ],
    ids=["first", "second", "weight", "several"],
)
def test_is_the_positional_form(
    transform: Callable[..., Any], axis: Any, args: Any, in_axes: Any, names: tuple[str, ...]
) -> None:
    found = transform(vmap(project, axis))(*args)
    expected = jax.vmap(raw_project, in_axes)(*(a.array for a in args))
    assert_named(found, axn.named(expected, names), rtol=1e-6)


def test_gradient_through_it() -> None:
    found = jax.grad(lambda x, w: axn.sum(vmap(project, Batch)(x, w, BIAS)).scalar(), argnums=(0, 1))(X, W)
    expected = jax.grad(lambda x, w: jax.vmap(raw_project, (0, None, None))(x, w, BIAS.array).sum(), argnums=(0, 1))(
        X.array, W.array
    )
    for a, b, axes in zip(found, expected, (X.axes, W.axes), strict=True):
        assert_named(a, axn.named(b, axes), rtol=1e-5, atol=1e-6)


def test_of_a_gradient() -> None:
    """The gradients of each example."""
    found = vmap(jax.grad(lambda w, x: axn.sum(project(x, w, BIAS)).scalar()), Batch)(W, X)
    expected = jax.vmap(jax.grad(lambda w, x: raw_project(x, w, BIAS.array).sum()), (None, 0))(W.array, X.array)
    assert_named(found, axn.named(expected, (Batch, *W.axes)), rtol=1e-5, atol=1e-6)


@hypothesis.given(st.permutations(["batch", "pos", "embed"]), st.permutations(["batch", "heads"]), st.data())
@hypothesis.settings(max_examples=12)
def test_is_a_stack_of_calls(x_order: list[str], y_order: list[str], data: st.DataObject) -> None:
    """Whatever the layout, element i of the result is the function of element i of the arguments."""
    name = data.draw(st.sampled_from(["batch", "pos", "heads"]))
    x, y = X.rearrange(tuple(x_order)), draw(Batch, Heads, Embed).rearrange((*y_order, "embed"))

    def fn(x: axn.NamedArray, y: axn.NamedArray) -> axn.NamedArray:
        return axn.dot(x, y, axis="embed")

    size = {"batch": 8, "pos": 4, "heads": 2}[name]
    elements = [fn(*(a[{name: i}] if name in a.names else a for a in (x, y))) for i in range(size)]
    expected = axn.stack(elements, axn.Axis(name, size))
    assert_named(vmap(fn, name)(x, y).rearrange(expected.axes), expected, rtol=1e-6, atol=1e-6)


# --- the axes ---


def seen_by(fn_axes: Any, *args: Any, **options: Any) -> list[Any]:
    """Return what the mapped function gets for each argument: the names of its axes, or its shape."""
    seen: list[Any] = []

    def look(*args: Any) -> None:
        seen.extend(a.names if isinstance(a, axn.NamedArray) else getattr(a, "shape", a) for a in args)

    vmap(look, fn_axes, **options)(*args)
    return seen


def test_the_function_sees_arrays_without_the_axis() -> None:
    assert seen_by(Batch, X, W) == [("pos", "embed"), ("embed", "mlp")]
    assert seen_by(("pos", Batch), X, W) == [("embed",), ("embed", "mlp")]


@pytest.mark.parametrize("axes", [("batch", Pos), [Batch, "pos"], {"batch": 8, "pos": None}])
def test_several_axes_are_the_outer_ones_in_their_order(axes: Any) -> None:
    found = vmap(lambda x: axn.cumsum(x, "embed"), axes)(X.rearrange(("pos", "embed", "batch")))
    assert_named(found, axn.cumsum(X, "embed"), rtol=1e-6, atol=1e-6)


def test_several_axes_are_nested_calls() -> None:
    both = vmap(lambda x, b: axn.dot(x, b, axis="embed"), ("heads", "batch"))(X, draw(Embed, Heads))
    nested = vmap(vmap(lambda x, b: axn.dot(x, b, axis="embed"), "batch"), "heads")(X, draw(Embed, Heads))
    assert both.names == ("heads", "batch", "pos")
    assert_named(both, nested, rtol=1e-6, atol=1e-6)


def test_an_axis_that_no_argument_has_is_new() -> None:
    found = vmap(lambda x: axn.sum(x, "embed"), axn.Axis("copies", 3))(X)
    assert found.shape == {"copies": 3, "batch": 8, "pos": 4}
    np.testing.assert_array_equal(found.array[2], axn.sum(X, "embed").array)


def test_no_array_at_all() -> None:
    assert vmap(lambda: axn.ones(Embed), axn.Axis("copies", 3))().shape == {"copies": 3, "embed": 8}


# --- raw arrays and everything else ---


def test_raw_arrays_are_mapped_over_their_first_axis() -> None:
    raw = np.ones((8, 3), np.float32)
    assert seen_by(Batch, X, jnp.asarray(raw), raw) == [("pos", "embed"), (3,), (3,)]
    assert seen_by((Batch, Pos), X, jnp.ones((8, 4, 3))) == [("embed",), (3,)]


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"default": None}, (8, 8, 3)),
        ({"default": 1}, (8, 3)),
        ({"default": -2}, (8, 3)),
        ({"default": lambda a: 1 if a.ndim == 3 else None}, (8, 3)),
        ({"args": (0, None)}, (8, 8, 3)),
        ({"args": (None, 1), "default": None}, (8, 3)),
    ],
)
def test_where_raw_arrays_are_mapped(options: Any, shape: tuple[int, ...]) -> None:
    assert seen_by(Batch, W, jnp.ones((8, 8, 3)), **options) == [("embed", "mlp"), shape]


def test_what_is_said_of_an_argument_can_be_a_tree_prefix() -> None:
    def fn(pair: Any, *, table: Any) -> Any:
        return pair["a"] + pair["b"][0] + table["t"][0]

    a, b, t = np.arange(24.0).reshape(8, 3), np.arange(24.0).reshape(3, 8), np.arange(6.0).reshape(2, 3)
    mapped = vmap(fn, Batch, args=({"a": 0, "b": 1},), kwargs={"table": None})
    found = mapped({"a": jnp.asarray(a), "b": [jnp.asarray(b)]}, table={"t": jnp.asarray(t)})
    np.testing.assert_allclose(found, a + b.T + t[0])


def test_none_leaves_the_named_arrays_of_an_argument_alone() -> None:
    """Each example against the whole batch."""
    keys = X.rename({"batch": "others"})
    expected = axn.dot(X, keys, axis=("pos", "embed"))
    whole = vmap(lambda x, b: axn.dot(x, b.rename({"batch": "others"}), axis=("pos", "embed")), Batch, args=(0, None))
    assert_named(whole(X, X), expected, rtol=1e-5, atol=1e-5)


def test_what_is_not_an_array_passes_through() -> None:
    seen: list[Any] = []

    def fn(x: Any, scale: float, mode: str, nothing: None, *, flag: bool) -> Any:
        seen.extend((scale, mode, nothing, flag))
        return x * scale if flag else x, mode, scale, nothing

    result = vmap(fn, Batch)(X, 2.0, "mean", None, flag=True)
    assert seen == [2.0, "mean", None, True]
    assert_named(result[0], X * 2.0)
    assert result[1:] == ("mean", 2.0, None)


def test_results_of_every_kind() -> None:
    result = vmap(
        lambda x: {
            "named": x,
            "raw": x.array[0],
            "numpy": np.ones(2),
            "scalar": x.array.sum(),
            "constant": axn.ones(Mlp),
        },
        Batch,
    )(X)
    assert result["named"].axes == X.axes
    np.testing.assert_array_equal(result["raw"], X.array[:, 0])
    assert result["numpy"].shape == (8, 2)
    np.testing.assert_allclose(result["scalar"], X.array.sum((1, 2)), rtol=1e-5)
    assert result["constant"].axes == (Batch, Mlp)


def test_the_function_is_called_once_and_keeps_its_name() -> None:
    calls = []

    def fn(x: Any) -> Any:
        """What it does."""
        calls.append(x)
        return x

    mapped = vmap(fn, (Batch, Pos))
    mapped(X)
    assert len(calls) == 1
    assert (mapped.__name__, mapped.__doc__) == ("fn", "What it does.")  # pyright: ignore[reportFunctionMemberAccess]


# --- modules ---


class Linear(eqx.Module):
    """A module with a named array, a raw one, a function and a static field."""

    weight: axn.NamedArray
    scale: jax.Array
    activation: Callable[..., Any]
    name: str = eqx.field(static=True)

    @staticmethod
    def init(axes: tuple[axn.Axis, ...], *, key: jax.Array) -> Linear:
        shape = tuple(a.size for a in axes)
        return Linear(axn.named(jax.random.normal(key, shape), axes), jax.random.uniform(key), axn.tanh, "linear")

    def __call__(self, x: axn.NamedArray) -> axn.NamedArray:
        return self.activation(axn.dot(x, self.weight, axis="embed")) * self.scale


Layers = axn.Axis("layers", 3)


def make_ensemble() -> Linear:
    return vmap(Linear.init, Layers)((Embed, Mlp), key=jax.random.split(jax.random.key(0), 3))


def test_an_ensemble_is_its_members() -> None:
    ensemble = make_ensemble()
    members = [Linear.init((Embed, Mlp), key=k) for k in jax.random.split(jax.random.key(0), 3)]
    assert (ensemble.activation, ensemble.name) == (axn.tanh, "linear")
    assert_named(ensemble.weight, axn.stack([m.weight for m in members], Layers))
    np.testing.assert_array_equal(ensemble.scale, jnp.stack([m.scale for m in members]))
    found = vmap(Linear.__call__, Layers)(ensemble, X)
    assert_named(found, axn.stack([m(X) for m in members], Layers), rtol=1e-6, atol=1e-6)


def test_an_ensemble_in_two_axes() -> None:
    keys = jax.random.split(jax.random.key(0), (3, 2))
    weight = vmap(Linear.init, (Layers, Heads))((Embed,), key=keys).weight
    assert weight.axes == (Layers, Heads, Embed)
    np.testing.assert_array_equal(weight.array[1, 1], Linear.init((Embed,), key=keys[1, 1]).weight.array)


def test_a_model_of_which_some_arrays_are_elsewhere() -> None:
    """The halves of a partition have placeholders; their names lose the axis and get it back like the others'."""
    arrays, rest = eqx.partition(make_ensemble(), eqx.is_array)
    found = vmap(lambda a, r: eqx.combine(a, r)(X), Layers)(arrays, rest)
    assert_named(found, vmap(Linear.__call__, Layers)(make_ensemble(), X), rtol=1e-6)
    halves = vmap(lambda m: eqx.partition(m, eqx.is_array), Layers)(make_ensemble())
    assert jax.tree.structure(halves) == jax.tree.structure((arrays, rest))


def test_a_module_that_is_not_stacked_is_the_same_for_every_element() -> None:
    """Its named arrays say so; if it has none, it takes a word, which the error shows."""
    model = Linear.init((Embed, Mlp), key=jax.random.key(0))
    assert_named(vmap(Linear.__call__, Batch)(model, X), model(X), rtol=1e-6, atol=1e-6)
    unnamed = eqx.nn.Linear(8, Batch.size, key=jax.random.key(0))  # its first axis has the size of the batch

    def apply(x: axn.NamedArray, unnamed: eqx.nn.Linear) -> jax.Array:
        return unnamed(x.array)

    rows = axn.arange((Batch, Embed), dtype=float)
    with pytest.raises(
        ValueError, match=r"args\[1\] is a module, Linear, .* `axonym.vmap\(f, 'batch', args=\(0, None\)\)`"
    ):
        vmap(apply, Batch)(rows, unnamed)
    with pytest.raises(
        ValueError, match=r"kwargs\['unnamed'\] .* `axonym.vmap\(f, 'batch', kwargs={'unnamed': None}\)`"
    ):
        vmap(apply, Batch)(rows, unnamed=unnamed)
    expected = jax.vmap(unnamed)(rows.array)
    np.testing.assert_allclose(vmap(apply, Batch, args=(0, None))(rows, unnamed), expected, rtol=1e-5)
    np.testing.assert_allclose(vmap(apply, Batch, kwargs={"unnamed": None})(rows, unnamed=unnamed), expected, rtol=1e-5)
    many = jax.vmap(lambda key: eqx.nn.Linear(8, 2, key=key))(jax.random.split(jax.random.key(0), Layers.size))
    each = vmap(apply, Layers, args=(0, 0))(rows["batch", 0], many)
    np.testing.assert_allclose(each, hax.vmap(apply, Layers)(rows["batch", 0], many))  # as in Haliax
    assert each.shape == (Layers.size, 2)


def test_abstractly() -> None:
    found = eqx.filter_eval_shape(make_ensemble)
    assert isinstance(found.weight.array, jax.ShapeDtypeStruct)
    assert found.weight.shape == {"layers": 3, "embed": 8, "mlp": 4}


# --- on meshes ---

MAPPING = {"batch": "data", "mlp": "model"}


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("mapping", [{"batch": "data"}, MAPPING, {"batch": ("data", "model")}], ids=str)
def test_keeps_shardings(mesh: Mesh, transform: Callable[..., Any], mapping: Any) -> None:
    with jax.set_mesh(mesh):
        x, w, bias = (axn.shard(a, mapping) if set(a.names) & mapping.keys() else a for a in (X, W, BIAS))
        found = transform(vmap(project, Batch))(x, w, bias)
    assert spec(found) == (mapping["batch"], None, mapping.get("mlp"))
    np.testing.assert_allclose(found.array, vmap(project, Batch)(X, W, BIAS).array, rtol=1e-5, atol=1e-6)


def test_gradient_keeps_shardings(mesh: Mesh) -> None:
    with jax.set_mesh(mesh):
        x, w, bias = axn.shard((X, W, BIAS), MAPPING)
        loss = jax.jit(jax.grad(lambda x, w: axn.sum(vmap(project, Batch)(x, w, bias)).scalar(), argnums=(0, 1)))
        found = jax.block_until_ready(loss(x, w))
    assert (spec(found[0])[0], spec(found[1])[1]) == ("data", "model")


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_placing_inside_keeps_the_axis_where_it_is(mesh: Mesh, transform: Callable[..., Any]) -> None:
    def fn(x: axn.NamedArray) -> axn.NamedArray:
        return axn.shard(x * 2, {"embed": "model"})

    with jax.set_mesh(mesh):
        found = transform(vmap(fn, Batch))(axn.shard(X, {"batch": "data"}))
    assert spec(found) == ("data", None, "model")


def test_placing_inside_speaks_for_the_mapped_axis_too(auto_mesh: Mesh) -> None:
    """A constraint in the function says by name what one outside would say, also of the axis it cannot see."""

    def fn(x: axn.NamedArray) -> axn.NamedArray:
        return axn.shard(x * 2)

    with jax.set_mesh(auto_mesh), axn.axis_mapping({"batch": "data", "embed": "model"}):
        replicated = jax.device_put(X, jax.sharding.NamedSharding(auto_mesh, P()))
        assert spec(jax.jit(vmap(fn, Batch))(replicated)) == spec(jax.jit(fn)(replicated)) == ("data", None, "model")
        assert spec(jax.jit(vmap(fn, (Pos, Batch)))(replicated)) == (None, "data", "model")


def test_the_mapping_is_not_baked_in(auto_mesh: Mesh) -> None:
    mapped = jax.jit(vmap(lambda x: axn.shard(x * 2), Batch))
    with jax.set_mesh(auto_mesh):
        for batch in ("data", "model", "data"):
            with axn.axis_mapping({"batch": batch}):
                assert spec(mapped(X)) == (batch, None, None)


def test_shard_map_inside_gathers_nothing(auto_mesh: Mesh) -> None:
    def fn(x: axn.NamedArray) -> axn.NamedArray:
        total = jax.shard_map(lambda v: jax.lax.psum(v, "model"), in_specs=P(None, "model"), out_specs=P())
        return axn.named(total(x.array), ("pos", axn.Axis("half", 4)))

    with jax.set_mesh(auto_mesh), axn.axis_mapping({"batch": "data"}):
        x = axn.shard(X)
        program = jax.jit(vmap(fn, Batch)).lower(x).compile()
        result = jax.block_until_ready(program(x))
        odd = axn.named(np.ones((3, 4, 8), np.float32), ("batch", Pos, Embed))  # not divisible by four devices
        assert jax.block_until_ready(jax.jit(vmap(fn, "batch"))(odd)).shape["batch"] == 3
    assert spec(result) == ("data", None, None)
    assert COLLECTIVE.findall(program.as_text() or "") == ["f32[2,4,4]{2,1,0}"]  # one sum, of a quarter of the batch


def test_arguments_are_brought_into_line(explicit_mesh: Mesh) -> None:
    """JAX refuses arrays that lie differently along the axis, and others that lie on its mesh axes."""
    raw = np.arange(8.0, dtype=np.float32)
    with jax.set_mesh(explicit_mesh):
        x, w = axn.shard(X, {"batch": "data"}), axn.shard(W, {"embed": "data", "mlp": "model"})
        other = draw(Batch, Embed)
        fn = vmap(lambda x, y, w, r: axn.dot(x * y, w, axis="embed") * r, Batch)
        for transform in (lambda f: f, jax.jit):
            found = transform(fn)(x, other, w, raw)
            assert spec(found) == ("data", None, "model")
        gradient = jax.grad(lambda w: axn.sum(fn(x, other, w, raw)).scalar())(w)
    assert spec(gradient) == ("data", "model")
    expected = np.einsum("bpe,be,em,b->bpm", X.array, other.array, W.array, raw)
    np.testing.assert_allclose(found.array, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda i, table: table["embed", i],
        lambda i, table: axn.take(table, "embed", i),
        lambda i, table: table["embed", i["heads", 0]],
        lambda i, table: table["embed", axn.ds(i["heads", 0], 2)],
        lambda i, table: axn.roll(table, i["heads", 0], "embed"),
        lambda i, table: jax.grad(lambda t: axn.sum(t["embed", i] ** 2).scalar())(table),
    ],
    ids=["index array", "take", "integer", "dynamic slice", "roll", "gradient"],
)
def test_mapped_indices_into_an_array_that_is_not_mapped(
    mesh: Mesh, transform: Callable[..., Any], fn: Callable[..., Any]
) -> None:
    """Nothing in the function is sharded, as far as it sees, so JAX has to be told how its result is."""
    indices = axn.named(np.arange(16, dtype=np.int32).reshape(8, 2) % 7, (Batch, Heads))
    expected = np.stack([fn(indices["batch", n], W).array for n in range(8)])
    with jax.set_mesh(mesh), axn.axis_mapping({"batch": "data"}):
        i, table = axn.shard(indices), axn.shard(W)
        found = [transform(vmap(fn, Batch))(i, table), transform(vmap(lambda i: fn(i, table), Batch))(i)]
    for x in found:
        assert spec(x)[0] == "data"
        np.testing.assert_array_equal(x.array, expected)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_partitioned_operation(mesh: Mesh, transform: Callable[..., Any]) -> None:
    @partitioned(reduced="embed")
    def total(x: axn.NamedArray) -> axn.NamedArray:
        return axn.psum(axn.sum(x, "embed"), "embed")

    with jax.set_mesh(mesh), axn.axis_mapping({"batch": "data", "embed": "model"}):
        found = transform(vmap(lambda x: total(x), Batch))(axn.shard(X))
    assert spec(found)[0] == "data"
    np.testing.assert_allclose(found.array, axn.sum(X, "embed").array, rtol=1e-5, atol=1e-5)


def test_in_a_step_with_split_parameters(mesh: Mesh) -> None:
    """The weights rest sharded over the mesh axis that the examples use."""

    def loss(w: axn.NamedArray, x: axn.NamedArray) -> jax.Array:
        return axn.sum(vmap(project, Batch)(x, w, BIAS)).scalar()

    step = axn.fsdp(jax.grad(loss), {"embed": "data"}, {"batch": "data"})
    with jax.set_mesh(mesh):
        found = jax.block_until_ready(step(W, X))
    assert spec(found) == ("data", None)
    assert_named(axn.to_host(found), jax.grad(loss)(W, X), rtol=1e-4, atol=1e-5)


def test_arguments_that_disagree(explicit_mesh: Mesh) -> None:
    with jax.set_mesh(explicit_mesh):
        x, y = axn.shard(X, {"batch": "data"}), axn.shard(X, {"batch": "model"})
        with pytest.raises(ValueError, match=r"vmap: the operands shard axis 'batch' over different mesh axes"):
            vmap(lambda x, y: x * y, Batch)(x, y)
        with axn.axis_mapping({"batch": "model"}):
            assert spec(vmap(lambda x, y: x * y, Batch)(x, y)) == ("model", None, None)


def test_an_ensemble_made_where_it_goes(mesh: Mesh) -> None:
    """With its keys placed, each device makes its members."""
    keys = jax.random.split(jax.random.key(0), 8)
    make = vmap(lambda key: axn.named(jax.random.normal(key, (8,)), Embed), axn.Axis("layers", 8))
    with jax.set_mesh(mesh):
        placed = jax.device_put(keys, P("data"))
        assert spec(jax.jit(make)(placed)) == ("data", None)
        np.testing.assert_array_equal(make(placed).array, make(keys).array)


def test_two_axes_on_one_mesh_axis(mesh: Mesh) -> None:
    with jax.set_mesh(mesh), axn.axis_mapping({"batch": "data"}):
        x = axn.shard(X)
        with pytest.raises(ValueError, match=r"^vmap: the function shards .* already shards axis 'batch', over which"):
            vmap(lambda x: axn.shard(x, {"embed": "data"}), Batch)(x)


# --- the program ---


def test_adds_nothing_to_the_program() -> None:
    def loss(w: axn.NamedArray, x: axn.NamedArray) -> jax.Array:
        return axn.sum(project(x, w, BIAS)).scalar()

    def raw_loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return raw_project(x, w, BIAS.array).sum()

    ours = instructions(vmap(jax.value_and_grad(loss), Batch), W, X)
    theirs = instructions(jax.vmap(jax.value_and_grad(raw_loss), (None, 0)), W.array, X.array)
    assert ours == theirs


# --- what is refused ---


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: vmap(project, "bach")(X, W, BIAS),
            r"no axis 'bach' in \(batch=8, .*\)\. Did you mean 'batch'\? Pass an",
        ),
        (
            lambda: vmap(abs, axn.Axis("batch", 9))(X),
            r"'batch' has conflicting sizes: 9 in the axis given, 8 in args\[0\]",
        ),
        (
            lambda: vmap(axn.add, "pos")(X, draw(axn.Axis("pos", 5))),
            r"'pos' has conflicting sizes: 4 in args\[0\], 5 in args\[1\]",
        ),
        (
            lambda: vmap(lambda x, *, m: x, Batch)(X, m={"a": [jnp.ones((7, 2))]}),
            r"8 in the axis given, 7 in kwargs\['m'\]\['a'\]\[0\].*`default`",
        ),
        (
            lambda: vmap(lambda m: m, Layers)([jnp.ones(())]),
            r"args\[0\]\[0\] is a raw array of shape \(\), .* axis 'layers'",
        ),
        (lambda: vmap(lambda k: k, (Layers, Heads))(jnp.ones(3)), r"over 2 axes \(layers, heads\) at position 0"),
        (
            lambda: vmap(lambda k: k, Layers, default=2)(jnp.ones((3, 3))),
            r"axis 'layers' at position 2\. Pass a position",
        ),
        (
            lambda: vmap(lambda x: axn.ones(Batch), Batch)(X),
            r"has axis 'batch' of its own, \(batch\).*Rename that axis",
        ),
        (
            lambda: vmap(lambda x, p: x, Batch, args=(0, (0, 0)))(X, [1]),
            r"the value given for args\[1\] is not a tree prefix",
        ),
        (lambda: vmap(abs, ())(X), "expected at least one axis"),
        (lambda: vmap(abs, (Batch, "batch"))(X), r"an axis is mapped over once, got \(batch, batch\)"),
    ],
)
def test_refuses(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^vmap: .*{message}"):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vmap(abs, Batch, args=(0, 0))(X), r"`args` says how to map 2 arguments, but the call has 1"),
        (
            lambda: vmap(lambda x, scale: x, Batch, kwargs={"scael": None})(X, scale=1),
            r"`kwargs` says how to map 'scael', .* \['scale'\] by keyword\. Did you mean 'scale'\?",
        ),
        (
            lambda: vmap(abs, Batch, default="batch"),  # pyright: ignore[reportArgumentType]
            r"`default` must be a position, .* got str",
        ),
    ],
)
def test_refuses_what_is_said_of_arguments(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^vmap: {message}"):
        call()


def test_refuses_what_a_positional_transform_left_behind() -> None:
    with pytest.raises(ValueError, match=r"3 names \(batch, pos, embed\) for an array of rank 2"):
        jax.vmap(vmap(abs, Batch))(X)
    with pytest.raises(ValueError, match=r"2 names \(pos, embed\) for an array of rank 1"):
        vmap(lambda x: jax.tree.map(lambda array: array[0], x), Batch)(X)


def test_leaves_no_tracer_behind() -> None:
    with jax.checking_leaks():
        found = vmap(lambda x: (axn.sum(x, "embed"), x.array, 3), "batch")(X)
    assert_named(found[0], axn.sum(X, "embed"))


def test_a_mesh_axis_that_is_taken(mesh: Mesh) -> None:
    """What the mapping sends to the mesh axes of what is mapped over cannot be placed there, on meshes of any type."""
    with jax.set_mesh(mesh), axn.axis_mapping({"batch": "data", "pos": "data"}):
        for transform in (lambda f: f, jax.jit):
            with pytest.raises(
                ValueError, match=r"vmap: the function shards an axis .* 'batch', over which the function is mapped"
            ):
                transform(vmap(lambda x: axn.shard(x * 2), Batch))(X)
        lying = axn.shard(X, {"pos": "data"})
        assert vmap(lambda x: x * 2, Batch)(lying).axes == X.axes  # it was placed there before
