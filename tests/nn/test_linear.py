"""`Linear` against `jnp.einsum`, on meshes, and in the compiled program."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym.nn.linear import Linear
from axonym.nn.mup import HiddenLinearMup, InputLinearMup, LinearStandardParam, OutputLinearMup
from benchmarks.program import instructions
from tests.helpers import assert_named, spec

Batch, Embed, Mlp, Heads, Size = axn.make_axes(batch=4, embed=8, mlp=6, heads=2, size=3)
KEY = jax.random.key(0, impl="rbg")  # which compiles faster


def _numbers(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def _input(*axes: axn.Axis) -> axn.NamedArray:
    return axn.named(_numbers(tuple(a.size for a in axes)), axes)


def _layer(In: Any, Out: Any, **options: Any) -> Linear:
    """Make a layer of NumPy numbers, so that nothing has to be compiled."""
    shapes = eqx.filter_eval_shape(Linear.init, In, Out, key=KEY, **options)
    return jax.tree.map(lambda x: jnp.asarray(_numbers(x.shape)), shapes)


@pytest.mark.parametrize("out_first", [True, False])
@pytest.mark.parametrize(
    ("In", "Out", "axes", "weight", "result"),
    [
        (Embed, Mlp, (Batch, Embed), "me", "bm"),
        (Embed, (Heads, Size), (Embed, Batch), "hse", "bhs"),
        ((Heads, Size), Embed, (Size, Batch, Heads), "ehs", "be"),
        ({"embed": 8}, [Mlp], (Embed,), "me", "m"),
        ((), Mlp, (Batch,), "m", "bm"),
        (Embed, (), (Batch, Embed), "e", "b"),
        (Embed, Embed, (Batch, Embed), "Ee", "bE"),  # a capital is the axis of the output
        ((Heads, Size), (Size, Mlp), (Batch, Heads, Size), "Smhs", "bSm"),
        (Size, (Heads, Mlp), (Batch, Heads, Size), "hms", "bhm"),
    ],
)
def test_values(In: Any, Out: Any, axes: tuple[axn.Axis, ...], weight: str, result: str, out_first: bool) -> None:
    layer, x = _layer(In, Out, out_first=out_first), _input(*axes)
    assert layer.out_first is out_first or In == () or Out == ()
    assert layer.bias is not None
    out_letters = weight[: layer.bias.ndim]
    stored = weight if out_first else weight[layer.bias.ndim :] + out_letters
    letters = "".join(a.name[0] for a in axes)
    product = np.einsum(f"{letters},{stored}->{result}", x.array, layer.weight.array)
    bias = np.einsum(f"{out_letters},{result}->{result}", layer.bias.array, np.ones_like(product))
    names = {a.name[0]: a.name for a in (Batch, Embed, Mlp, Heads, Size)}
    expected = axn.named(product + bias, [names[letter.lower()] for letter in result])
    assert_named(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_an_axis_in_and_out() -> None:
    """The weight calls the axis of the input something else, which no other axis is called."""
    assert _layer(Embed, Embed).weight.names == ("embed", "embed_in")
    Taken = axn.Axis("embed_in", 2)
    layer = _layer((Embed, Taken), Embed)
    assert layer.weight.names == ("embed", "embed_in_in", "embed_in")
    assert layer.reparam == LinearStandardParam((Embed, Taken), Embed)
    assert layer(_input(Batch, Taken, Embed)).axes == (Batch, Embed)


def test_how_the_weights_start() -> None:
    In, Out = axn.make_axes(embed=100, mlp=500)
    layer = Linear.init(In, Out, key=KEY, init_scale=0.5)
    expected = jax.random.truncated_normal(KEY, -3, 3, (500, 100)) * (0.5 / 10)
    np.testing.assert_allclose(layer.weight.array, expected, rtol=1e-6)
    assert layer.bias is not None and layer.bias.axes == (Out,) and not layer.bias.array.any()
    output = Linear.init(In, Out, key=KEY, use_bias=False, reparam_cls=OutputLinearMup)
    np.testing.assert_allclose(output.weight.array, expected * 20, rtol=1e-6)
    assert output.bias is None


def test_parametrizations() -> None:
    x = _input(Batch, Embed)
    for kind, output in ((InputLinearMup, 1), (HiddenLinearMup, 1), (OutputLinearMup, 1 / 8)):
        layer = _layer(Embed, Mlp, reparam_cls=kind)
        assert layer.reparam == kind(Embed, Mlp)
        assert layer.bias is not None
        expected = output * (x.array @ layer.weight.array.T) + layer.bias.array[None]  # the bias is not scaled
        np.testing.assert_allclose(layer(x).array, expected, rtol=1e-5, atol=1e-6)
    assert Linear.input_reparam() is InputLinearMup and Linear.input_reparam(False) is LinearStandardParam
    assert Linear.hidden_reparam() is HiddenLinearMup and Linear.hidden_reparam(False) is LinearStandardParam
    assert Linear.output_reparam() is OutputLinearMup and Linear.output_reparam(False) is LinearStandardParam


class _Doubled(eqx.Module):
    """A replacement for `jax.lax.dot_general` that holds an array."""

    factor: jax.Array

    def __call__(self, lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None):
        return self.factor * jax.lax.dot_general(
            lhs, rhs, dimension_numbers, precision=precision, preferred_element_type=preferred_element_type
        )


def test_dot_general(mesh: Mesh) -> None:
    plain = _layer(Embed, Mlp, use_bias=False)
    doubled = Linear(plain.weight, None, Embed, Mlp, _Doubled(jnp.float32(2)))
    x = _input(Batch, Embed)

    @jax.jit
    @jax.grad
    def gradient(layer, x):
        return layer(x).sum().array

    with jax.set_mesh(mesh), axn.axis_mapping({"batch": "data", "mlp": "model"}):
        placed = axn.shard((doubled, x))
        np.testing.assert_allclose(placed[0](placed[1]).array, 2 * plain(x).array, rtol=1e-5)
        found = gradient(*placed)
    np.testing.assert_allclose(found.dot_general.factor, plain(x).sum().array, rtol=1e-4)
    assert spec(found.weight) == ("model", None)


def test_a_function_as_dot_general_is_no_leaf() -> None:
    seen = []

    def dot_general(*args, **kwargs):
        seen.append(args[2])
        return jax.lax.dot_general(*args, **kwargs)

    layer = _layer(Embed, Mlp, dot_general=dot_general)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(layer))
    jax.jit(lambda layer, x: layer(x))(layer, _input(Batch, Embed))
    assert seen == [(((1,), (1,)), ((), ()))]


def test_placements(mesh: Mesh) -> None:
    """Layers split by their output, by their input, and by both though they are one axis."""
    up, down, square = _layer(Embed, Mlp), _layer(Mlp, Embed), _layer(Embed, Embed)
    x = _input(Batch, Embed)

    def run(up, down, square, x):
        hidden = up(x)
        return hidden, square(down(hidden))

    expected = run(up, down, square, x)
    with jax.set_mesh(mesh), axn.axis_mapping({"batch": "data", "mlp": "model"}):
        layers = axn.shard((up, down))
        square = axn.shard(square, {"embed": "model", "embed_in": "data"})
        assert spec(layers[0].weight) == ("model", None) and spec(layers[1].weight) == (None, "model")
        assert spec(square.weight) == ("model", "data")
        for call in (run, jax.jit(run)):
            found = jax.block_until_ready(call(*layers, square, axn.shard(x)))
            for y, e in zip(found, expected, strict=True):
                assert_named(y, e, rtol=1e-4, atol=1e-5)
            assert spec(found[0]) == spec(found[1]) == ("data", "model")


@pytest.mark.parametrize("out_first", [True, False])
def test_the_program_is_that_of_the_positional_form(out_first: bool) -> None:
    layer, x = _layer(Embed, Mlp, out_first=out_first), _input(Batch, Embed)
    assert layer.bias is not None

    def theirs(weight, bias, x):
        return ((x @ (weight.T if out_first else weight) + bias[None]) ** 2).sum()

    ours = jax.jit(jax.value_and_grad(lambda layer, x: (layer(x) ** 2).sum().array, (0, 1)))
    raw = layer.weight.array, layer.bias.array, x.array
    expected = jax.jit(jax.value_and_grad(theirs, (0, 1, 2))).lower(*raw).compile()
    assert instructions(ours.lower(layer, x).compile()) == instructions(expected)


def test_many_layers_at_once() -> None:
    """Made by vmap, a layer has an axis more in front; what it is does not change."""
    make = axn.vmap(Linear.init, axn.Axis("layers", 3))
    shapes = jax.eval_shape(lambda keys: make(Embed, Embed, key=keys), jax.random.split(KEY, 3))
    assert shapes.weight.names == ("layers", "embed", "embed_in") and shapes.out_first
    stack: Linear = jax.tree.map(lambda x: _numbers(x.shape), shapes)
    assert stack.bias is not None
    x = _input(Batch, Embed)
    expected = np.einsum("be,lfe->blf", x.array, stack.weight.array) + stack.bias.array
    assert_named(stack(x), axn.named(expected, ("batch", "layers", "embed")), rtol=1e-5, atol=1e-5)


def test_abstract_layers() -> None:
    layer = eqx.filter_eval_shape(Linear.init, Embed, Mlp, key=KEY)
    assert layer.weight.axes == (Mlp, Embed) and layer.out_first
    assert eqx.filter_eval_shape(layer, _input(Batch, Embed)).axes == (Batch, Mlp)
    empty = jax.tree.map(lambda _: None, layer)
    assert empty.out_first and empty.weight.array is None


def test_inside_shard_map(mesh: Mesh) -> None:
    """The parts of a layer are layers of their part of the axes."""
    layer, x = _layer(Embed, Mlp), _input(Batch, Embed)
    with jax.set_mesh(mesh):
        mapping = {"batch": "data", "mlp": "model"}
        run = axn.shard_map(lambda layer, x: layer(x), in_specs=mapping, out_specs=mapping)
        found = jax.jit(run)(layer, x)
    assert_named(found, layer(x), rtol=1e-5, atol=1e-6)


def test_errors() -> None:
    layer = _layer(Embed, Mlp)
    with pytest.raises(ValueError, match=r"Linear: no axis 'embed' in \(embde=8\). Did.*maps \(embed=8\) to \(mlp=6\)"):
        layer(axn.ones({"embde": 8}))
    with pytest.raises(ValueError, match="Linear: axis 'embed' has conflicting sizes: 5 in the input, 8 in the layer"):
        layer(axn.ones({"embed": 5}))
    with pytest.raises(TypeError, match="Linear: expected a NamedArray"):
        layer(jnp.ones(8))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="Linear needs axes with sizes, got only the name 'embed'"):
        Linear.init("embed", Mlp, key=KEY)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="the first argument is a random key"):
        Linear.init(Embed, Mlp, key=None)  # pyright: ignore[reportArgumentType]
