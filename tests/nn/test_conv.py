"""`Conv` and `ConvTranspose` against NumPy loops and `jax.lax`, in any layout and on meshes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import axonym as axn
from axonym.nn import Conv, ConvTranspose
from axonym.state import from_torch_compatible_state_dict, to_torch_compatible_state_dict
from tests.helpers import assert_named, covering, spec

H, W, In, Out = axn.make_axes(height=6, width=5, channels=4, features=6)
KEY = jax.random.key(0)
UNEVEN: dict[str, Any] = {"stride": (2, 1), "padding": ((1, 2), (0, 1)), "dilation": (1, 2), "groups": 2}


def sample(*axes: axn.Axis) -> axn.NamedArray:
    return axn.random.normal(jax.random.key(1), axes)


def correlated(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, stride: Any, dilation: Any, groups: int) -> Any:
    """Compute the correlation of x(channels, height, width), padding included, one output element at a time."""
    size = [
        (n - (k - 1) * d - 1) // s + 1
        for n, k, d, s in zip(x.shape[1:], weight.shape[2:], dilation, stride, strict=True)
    ]
    result = np.zeros((len(weight), *size), np.float32)
    for o, i, j in np.ndindex(*result.shape):
        first = o // (len(weight) // groups) * weight.shape[1]
        for c, a, b in np.ndindex(*weight.shape[1:]):
            seen = x[first + c, i * stride[0] + a * dilation[0], j * stride[1] + b * dilation[1]]
            result[o, i, j] += weight[o, c, a, b] * seen
        result[o, i, j] += bias[o]
    return result


def test_conv_is_a_correlation() -> None:
    layer = Conv.init((H, "width"), In, Out, (3, 2), key=KEY, **UNEVEN)
    assert layer.weight.axes == axn.make_axes(features=6, channels=2, height=3, width=2)
    assert layer.bias is not None and layer.bias.axes == (Out,)
    x = sample(In, H, W)
    padded = np.pad(np.asarray(x.array), ((0, 0), (1, 2), (0, 1)))
    weight, bias = np.asarray(layer.weight.array), np.asarray(layer.bias.array)
    expected = correlated(padded, weight, bias, (2, 1), (1, 2), 2)
    assert_named(layer(x), axn.named(jnp.asarray(expected), ("features", "height", "width")), rtol=1e-4, atol=1e-5)


def test_conv_transpose_adds_kernels_up() -> None:
    """Each element of the input adds the kernel, from back to front, to the output; then the ends are cut off."""
    layer = ConvTranspose.init((H, W), In, Out, (3, 2), output_padding=(1, 0), key=KEY, **UNEVEN)
    x, weight = sample(In, H, W), np.asarray(layer.weight.array)
    full = np.zeros((6, 5 * 2 + 3 + 1, 4 + 1 * 2 + 1), np.float32)  # one row more: the padding of the output
    for o, c, a, b in np.ndindex(*weight.shape):
        image = np.asarray(x.array)[o // 3 * 2 + c]
        for i, j in np.ndindex(*image.shape):
            full[o, i * 2 + (2 - a), j + (1 - b) * 2] += weight[o, c, a, b] * image[i, j]
    assert layer.bias is not None
    expected = full[:, 1 : full.shape[1] - 2, 0 : full.shape[2] - 1] + np.asarray(layer.bias.array)[:, None, None]
    assert_named(layer(x), axn.named(jnp.asarray(expected), ("features", "height", "width")), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [Conv, ConvTranspose])
@pytest.mark.parametrize("names", ["height channels batch width", "width step height channels batch"])
def test_any_layout(kind: Any, names: str) -> None:
    """The same values and gradients wherever the axes are, and the output in the layout of the input."""
    layer = kind.init(("height", "width"), In, Out, 3, key=KEY, **UNEVEN)
    order, batch = names.split(), [n for n in ("batch", "step") if n in names]
    x = sample(*(axn.Axis(n, 2) for n in batch), In, H, W)

    def both(layer: Any, x: axn.NamedArray) -> Any:
        """What the layer makes of the axes in this order, and of each element of the batch on its own."""
        return layer(x.rearrange(order)), axn.vmap(layer, batch)(x)

    found, expected = jax.jit(both)(layer, x)
    assert_named(found, expected.rearrange(["features" if n == "channels" else n for n in order]), rtol=1e-4, atol=1e-5)

    def loss(i: int) -> Any:
        return jax.grad(lambda layer, x: axn.sum(both(layer, x)[i] ** 2).scalar(), (0, 1))

    found, expected = jax.jit(lambda layer, x: (loss(0)(layer, x), loss(1)(layer, x)))(layer, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), found, expected)


@pytest.mark.parametrize("padding", ["SAME", "valid"])
@pytest.mark.parametrize("stride", [1, 3])
def test_padding_by_name(padding: str, stride: int) -> None:
    """As in `jax.lax`, whatever the kernel and the dilation."""
    x = sample(H, In)
    for kernel, dilation in ((2, 2), (3, 1)):
        layer = Conv.init("height", In, Out, kernel, stride=stride, padding=padding, dilation=dilation, key=KEY)
        transposed = ConvTranspose.init(
            "height", In, Out, kernel, stride=stride, padding=padding, dilation=dilation, use_bias=False, key=KEY
        )
        numbers, raw = ("NHC", "OIH", "NHC"), jnp.expand_dims(x.array, 0)
        expected = jax.lax.conv_general_dilated(
            raw, layer.weight.array, (stride,), padding.upper(), None, (dilation,), numbers
        )
        assert layer.bias is not None
        np.testing.assert_allclose((layer(x) - layer.bias).array, expected[0], rtol=1e-4, atol=1e-5)
        expected = jax.lax.conv_transpose(
            raw, transposed.weight.array, (stride,), padding.upper(), (dilation,), ("NHC", "OIH", "NHC")
        )
        np.testing.assert_allclose(transposed(x).array, expected[0], rtol=1e-4, atol=1e-5)


def test_sizes_by_name() -> None:
    layer = Conv.init(
        ("height", "width"),
        In,
        Out,
        {"width": 2, "height": 3},
        stride={W: 2, H: 1},
        padding={"height": 1, "width": (0, 2)},
        key=KEY,
    )
    assert (layer.kernel_size, layer.stride, layer.padding) == ((3, 2), (1, 2), ((1, 1), (0, 2)))


def test_one_axis_in_and_out() -> None:
    """The weight stores the input's under another name, and a residual connection needs no renaming."""
    layer = Conv.init("height", In, In, 3, padding="SAME", use_bias=False, key=KEY)
    assert layer.weight.names == ("channels", "channels_in", "height")
    x = sample(H, In)
    expected = jax.lax.conv_general_dilated(
        jnp.expand_dims(x.array, 0), layer.weight.array, (1,), "SAME", dimension_numbers=("NHC", "OIH", "NHC")
    )
    assert_named(x + layer(x), axn.named(x.array + expected[0], x.names), rtol=1e-4, atol=1e-5)


def test_initial_values() -> None:
    layer = Conv.init(("height", "width"), In.resize(64), Out.resize(64), (3, 2), groups=4, key=KEY)
    limit = 1 / (16 * 6) ** 0.5
    for values in (layer.weight.array, layer.bias.array):  # pyright: ignore[reportOptionalMemberAccess]
        assert 0.9 * limit < np.abs(values).max() <= limit
    shapes = eqx.filter_eval_shape(lambda k: ConvTranspose.init("height", In, Out, 3, key=k), KEY)
    assert shapes.weight.shape == {"features": 6, "channels": 4, "height": 3}


def test_dtypes_are_promoted() -> None:
    layer = Conv.init("height", In, Out, 3, key=KEY)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), layer)
    assert half(sample(H, In).astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert layer(sample(H, In).astype(jnp.bfloat16)).dtype == jnp.float32


def test_program_has_no_transposes() -> None:
    """One batch axis, wherever it is, goes into the convolution as it is."""
    layer = Conv.init(("height", "width"), In, Out, 3, key=KEY)
    x = sample(H, In, axn.Axis("batch", 2), W)
    assert "transpose" not in str(jax.make_jaxpr(layer)(x))


@pytest.mark.parametrize("kind", [Conv, ConvTranspose])
def test_on_meshes(kind: Any, mesh: Mesh) -> None:
    """The batch stays split, and so do output channels if the weight's are; gradients agree."""
    Batch, Features = axn.Axis("batch", 8), axn.Axis("features", 4)
    layer = kind.init("height", In, Features, 3, stride=2, key=KEY)
    x = sample(H, Batch, In)
    expected = layer(x)
    mapping = {"batch": "data", "features": "model"}

    def loss(layer: Any, x: axn.NamedArray) -> jax.Array:
        return axn.sum(layer(x) ** 2).scalar()

    gradients = jax.grad(loss)(layer, x)
    with jax.set_mesh(mesh):
        assert_named(layer(x), expected, rtol=1e-4, atol=1e-5)  # sharded over nothing
    with jax.set_mesh(mesh), axn.axis_mapping(mapping):
        placed, x = axn.shard((layer, x), mapping)
        for call in (lambda layer, x: layer(x), axn.named_jit(lambda layer, x: layer(x))):
            result = call(placed, x)
            assert_named(result, expected, rtol=1e-4, atol=1e-5)
            assert spec(result) == (None, "data", "model")
        found = jax.jit(jax.grad(loss))(placed, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), found, gradients)


@pytest.mark.parametrize(
    ("groups", "mapping", "explicit"),
    covering([1, 2, 0], [{"height": "a"}, {"batch": "a"}, {"batch": "a", "height": "b"}], [False, True]),
    ids=str,
)
def test_gradients_where_some_mesh_axes_shard_nothing(groups: int, mapping: Any, explicit: bool) -> None:
    """XLA would sum the gradient of a weight over these, too, and is wrong where the kernel is sharded."""
    Batch, Height, Features = axn.make_axes(batch=4, height=8, features=8)
    arguments: Any = ("height", In, Features, 2)
    if groups:
        layer: Any = Conv.init(*arguments, stride=2, padding=1, groups=groups, key=KEY)
    else:
        layer = ConvTranspose.init(*arguments, stride=2, dilation=3, padding=1, key=KEY)
    x = sample(In, Height, Batch)

    def loss(layer: Any, x: axn.NamedArray) -> jax.Array:
        return axn.sum(axn.sin(layer(x))).scalar()

    def check(layer: Any, x: Any) -> Any:
        gradient = jax.grad(loss)  # of the weight alone, too
        both = jax.value_and_grad(loss, (0, 1))(layer, x)
        return both, gradient(layer, x), jax.jvp(gradient, (layer, x), jax.tree.map(jnp.cos, (layer, x)))

    expected = jax.jit(check)(layer, x)
    with jax.set_mesh(axn.make_mesh({"a": 2, "b": 2, "c": 2}, explicit=explicit)), axn.axis_mapping(mapping):
        found = jax.block_until_ready(jax.jit(check)(*axn.shard((layer, x))))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), found, expected)


def test_stacked_layers_are_mapped_over() -> None:
    Layers = axn.Axis("layers", 3)
    make = axn.vmap(lambda key: Conv.init("height", In, Out, 3, key=key), Layers)
    layers, x = jax.jit(make)(jax.random.split(KEY, 3)), sample(H, In)
    second = jax.tree.map(lambda a: a["layers", 1], layers, is_leaf=axn.is_named_array)
    every = jax.jit(axn.vmap(lambda layer: layer(x), Layers))(layers)
    assert_named(every["layers", 1], second(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"the axes of the weight are \(layers, .*stacked layers with `axonym.vmap`"):
        layers(x)


def test_refusals_of_init() -> None:
    for error, text, arguments in (
        (ValueError, "`Spatial` has no axes", {"Spatial": ()}),
        (ValueError, "'height' would name more than one axis", {"Spatial": ("height", "height")}),
        (ValueError, "'channels' of `In` is also among the axes", {"Spatial": "channels"}),
        (ValueError, r"4 groups do not divide the channels: 6 of 'features'", {"groups": 4}),
        (ValueError, r"`kernel_size` has 2 entries for the axes \(height\)", {"kernel_size": (3, 3)}),
        (ValueError, "`stride` must be at least 1, got 0 for 'height'", {"stride": 0}),
        (ValueError, r"`dilation` is given for \(width\), but the axes are \(height\)", {"dilation": {"width": 2}}),
        (ValueError, "`padding` must be 'SAME', 'VALID' or numbers of elements, got 'full'", {"padding": "full"}),
        (TypeError, "the `padding` of an axis must be an integer or a pair", {"padding": ((1, 2, 3),)}),
        (TypeError, "`kernel_size` must be an integer or one for each axis, got 1.5", {"kernel_size": 1.5}),
    ):
        given: dict[str, Any] = {"Spatial": "height", "In": In, "Out": Out, "kernel_size": 3, "key": KEY} | arguments
        with pytest.raises(error, match=text):
            Conv.init(**given)
    with pytest.raises(ValueError, match="`output_padding` needs a padding in elements, not 'SAME'"):
        ConvTranspose.init("height", In, Out, 3, padding="SAME", output_padding=1, key=KEY)


def test_refusals_of_inputs() -> None:
    layer = Conv.init(("height", "width"), In, Out, 3, key=KEY)
    with pytest.raises(
        ValueError, match=r"Conv: no axis 'width' in \(height=6, channels=4, widht=5\). Did you mean 'widht'"
    ):
        layer(sample(H, In, W.alias("widht")))
    with pytest.raises(ValueError, match="Conv: axis 'channels' has conflicting sizes: 3 in the input, 4 in the layer"):
        layer(sample(H, In.resize(3), W))
    with pytest.raises(ValueError, match="'features' would name more than one axis"):
        layer(sample(H, In, W, Out))
    with pytest.raises(ValueError, match="larger than the input: it spans 3 elements of axis 'height', which has 2"):
        layer(sample(H.resize(2), In, W))
    with pytest.raises(TypeError, match="Conv: expected a NamedArray, got Array"):
        layer(jnp.ones((4, 6, 5)))  # pyright: ignore[reportArgumentType]


# --- PyTorch's form ---


def torch_conv_transpose(x: np.ndarray, weight: np.ndarray, stride: int, padding: int, groups: int) -> np.ndarray:
    """`torch.nn.functional.conv_transpose1d` as its documentation defines it, for x(channels, width)."""
    per_group = weight.shape[1]
    full = np.zeros((groups * per_group, (x.shape[1] - 1) * stride + weight.shape[2]), np.float32)
    for c, i in np.ndindex(*x.shape):
        group = c // (len(x) // groups)
        into = full[group * per_group : (group + 1) * per_group, i * stride : i * stride + weight.shape[2]]
        into += x[c, i] * weight[c]
    return full[:, padding : full.shape[1] - padding]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("channels", [4, 6])
def test_conv_transpose_is_that_of_pytorch(groups: int, channels: int) -> None:
    """Both ways; equal numbers of channels would hide a weight that is not transposed."""
    In, Out = axn.make_axes(channels=channels, features=6)
    layer = ConvTranspose.init("width", In, Out, 3, stride=2, padding=1, groups=groups, use_bias=False, key=KEY)
    x = sample(In, W)
    exported = to_torch_compatible_state_dict(layer)["weight"]
    assert exported.shape == (channels, 6 // groups, 3)
    expected = torch_conv_transpose(np.asarray(x.array), np.asarray(exported), 2, 1, groups)
    assert_named(layer(x), axn.named(jnp.asarray(expected), ("features", "width")), rtol=1e-4, atol=1e-5)
    template = eqx.filter_eval_shape(lambda: layer)
    loaded = from_torch_compatible_state_dict(template, {"weight": np.asarray(exported)})
    assert_named(loaded.weight, layer.weight)


def test_stacked_conv_transposes_go_to_pytorch_and_back() -> None:
    layers = axn.Axis("layers", 2)
    stacked = axn.nn.Stacked.init(layers, ConvTranspose)("width", In, In, 3, groups=2, key=jax.random.split(KEY, 2))
    exported = to_torch_compatible_state_dict(stacked)
    first = to_torch_compatible_state_dict(stacked.get_layer(0))
    np.testing.assert_array_equal(exported["0.weight"], first["weight"])
    loaded = from_torch_compatible_state_dict(stacked, exported)
    assert_named(loaded.stacked.weight, stacked.stacked.weight)


@pytest.mark.parametrize("kind", [Conv, ConvTranspose])
@pytest.mark.parametrize("channels", ["", "channels", "features"])
def test_along_a_sharded_axis(kind: Any, channels: str, mesh: Mesh) -> None:
    """Nothing is counted several times where the batch is not sharded over the rest of the mesh."""
    groups, features = (1, axn.Axis("features", 4)) if channels else (2, Out)
    layer = kind.init("height", In, features, 3, stride=2, padding="SAME", groups=groups, key=KEY)
    x = sample(axn.Axis("batch", 2), axn.Axis("height", 8), In)
    sharded_channels = {channels: "data"} if channels else {}

    def loss(layer: Any, x: axn.NamedArray) -> tuple[jax.Array, axn.NamedArray]:
        result = layer(x)
        return axn.sum(axn.sin(result)).scalar(), result

    expected = jax.grad(loss, has_aux=True)(layer, x)
    with jax.set_mesh(mesh), axn.axis_mapping({"height": "model", **sharded_channels}):
        placed = axn.shard(layer, sharded_channels), axn.shard(x)
        found = jax.jit(jax.grad(loss, has_aux=True))(*placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, expected)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_conv_transpose_with_kernels_larger_than_a_shard(jit: bool, explicit: bool) -> None:
    """XLA partitions a pad with gaps and with edges that are larger than a shard wrongly."""
    mesh = axn.make_mesh({"data": 4, "model": 2}, explicit=explicit)
    # The kernel, the stride, the dilation and the size.
    cases = [(7, 2, 1, 4), (9, 2, 1, 4), (9, 3, 1, 4), (5, 2, 3, 8), (9, 2, 2, 8), (9, 2, 3, 16), (5, 3, 2, 4)]
    for kernel, stride, dilation, size in cases if jit else cases[:1]:
        layer = ConvTranspose.init("x", In, Out, kernel, stride=stride, dilation=dilation, use_bias=False, key=KEY)

        def loss(layer: Any, x: axn.NamedArray) -> tuple[jax.Array, axn.NamedArray]:
            result = layer(x)
            return axn.sum(axn.sin(result)).scalar(), result

        run = jax.grad(loss, (0, 1), has_aux=True)
        x = sample(axn.Axis("x", size), In)
        expected = jax.jit(run)(layer, x)
        with jax.set_mesh(mesh), axn.axis_mapping({"x": "data"}):
            found = (jax.jit(run) if jit else run)(layer, axn.shard(x))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, expected)


@pytest.mark.parametrize(("sharded", "stride", "explicit"), covering(["height", "width"], [1, 2], [False, True]))
def test_collectives_along_a_sharded_axis(sharded: str, stride: int, explicit: bool) -> None:
    """One sum for the gradient of the weight, and no exchange for each position along the other axis."""
    height, width, features = axn.make_axes(height=8, width=8, features=8)
    x = sample(axn.Axis("batch", 2), height, width, In)
    mesh = axn.make_mesh({"a": 4, "b": 2}, explicit=explicit)

    def loss(layer: Any, x: axn.NamedArray) -> jax.Array:
        return axn.sum(axn.sin(layer(x))).scalar()

    counts = []
    for other in (3, 1):
        kernel: Any = {"height": other, "width": other, sharded: 3}
        layer = Conv.init((height, width), In, features, kernel, stride=stride, padding=1, use_bias=False, key=KEY)
        expected = jax.grad(loss, (0, 1))(layer, x)
        with jax.set_mesh(mesh), axn.axis_mapping({sharded: "a"}):
            placed = axn.shard(x)
            program = jax.jit(jax.grad(loss, (0, 1))).lower(layer, placed).compile()
            found = program(layer, placed)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, expected)
        kinds = r" (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("
        counts.append(collections.Counter(re.findall(kinds, program.as_text() or "")))
    assert counts[0] == counts[1]
    assert counts[0].keys() == {"all-reduce", "collective-permute"} and counts[0]["all-reduce"] == 1


@pytest.mark.parametrize("kind", [Conv, ConvTranspose])
def test_groups_of_a_sharded_batch(kind: Any, mesh: Mesh) -> None:
    """The gradient is counted once if some mesh axes are not used, also with several batch axes."""
    layer = kind.init("height", In, Out, 3, groups=2, key=KEY)
    x = sample(axn.Axis("step", 2), axn.Axis("batch", 8), H, In)

    def loss(layer: Any, x: axn.NamedArray) -> jax.Array:
        return axn.sum(axn.sin(layer(x))).scalar()

    for inputs in (x, x["step", 0]):
        expected = jax.grad(loss)(layer, inputs)
        with jax.set_mesh(mesh), axn.axis_mapping({"batch": "data"}):
            found = jax.jit(jax.grad(loss))(axn.shard(layer), axn.shard(inputs))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, expected)


@pytest.mark.parametrize(
    ("groups", "mapping", "mesh"),
    covering([1, 2], [{"batch": "data"}, {"layers": "data"}], ["auto", "explicit"]),
    ids=str,
    indirect=["mesh"],
)
def test_mapped_over_on_a_mesh(groups: int, mapping: Any, mesh: Mesh) -> None:
    """XLA is wrong about the grouped convolution that a convolution with a weight for each element becomes."""
    Layers = axn.Axis("layers", 4)
    make = axn.vmap(lambda key: Conv.init("height", In, Out, 3, groups=groups, key=key), Layers)
    layers, x = jax.jit(make)(jax.random.split(KEY, 4)), sample(Layers, axn.Axis("batch", 8), H, In)

    def loss(layers: Any, x: axn.NamedArray) -> tuple[jax.Array, axn.NamedArray]:
        result = axn.vmap(lambda layer, x: layer(x), Layers)(layers, x)
        return axn.sum(axn.sin(result)).scalar(), result

    expected = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(layers, x)
    with jax.set_mesh(mesh), axn.axis_mapping(mapping):
        found = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(*axn.shard((layers, x), mapping))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, expected)


@pytest.mark.parametrize("kind", [Conv, ConvTranspose])
def test_channels_sharded_over_more_devices_than_groups(kind: Any, mesh: Mesh) -> None:
    """XLA would end the process."""
    channels, features = axn.Axis("channels", 8), axn.Axis("features", 8)
    layer = kind.init("height", channels, features, 3, groups=2, key=KEY)
    x = sample(axn.Axis("batch", 2), H, channels)

    def loss(layer: Any, x: axn.NamedArray) -> tuple[jax.Array, axn.NamedArray]:
        result = layer(x)
        return axn.sum(axn.sin(result)).scalar(), result

    expected = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(layer, x)
    with jax.set_mesh(mesh), axn.axis_mapping({"features": ("data", "model")}):
        found = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(*axn.shard((layer, x)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, expected)


def test_small_numbers_are_summed_in_float32(mesh: Mesh) -> None:
    """A sum of ones in bfloat16 stops at 256."""
    layer = Conv.init(
        ("height", "width"), axn.Axis("channels", 1), axn.Axis("features", 1), 17, use_bias=False, key=KEY
    )
    layer, x = (jax.tree.map(lambda a: jnp.ones_like(a, jnp.bfloat16), tree) for tree in (layer, LARGE))
    with jax.set_mesh(mesh), axn.axis_mapping({"height": "data"}):
        found: Any = axn.named_jit(layer)(axn.shard(x))
    assert np.unique(found.array) == 288
    assert np.unique(layer(x).array) == 288


LARGE = axn.zeros({"batch": 2, "height": 32, "width": 17, "channels": 1})


def test_on_a_mesh_without_jit(mesh: Mesh) -> None:
    layer, x = Conv.init("height", In, Out, 3, padding=1, key=KEY), sample(axn.Axis("batch", 8), H, In)
    expected = layer(x)
    with jax.set_mesh(mesh), axn.axis_mapping({"batch": "data"}), jax.disable_jit():
        assert_named(layer(x), expected, rtol=1e-5, atol=1e-5)
        axn.convolve(x, axn.arange(axn.Axis("height", 3), dtype=float), "height")


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (Conv, {"kernel_size": 2, "padding": 1, "dilation": 3}),
        (ConvTranspose, {"kernel_size": 2, "stride": 2, "groups": 2}),
        (ConvTranspose, {"kernel_size": 1, "stride": 2, "padding": 1}),
    ],
)
def test_second_derivatives_along_a_sharded_axis(kind: Any, arguments: Any, explicit: bool) -> None:
    """XLA fails with one mesh axis, too."""
    channels = axn.make_axes(channels=4, features=4)
    layer = kind.init("height", *channels, **arguments, key=KEY)
    x = sample(axn.Axis("batch", 2), axn.Axis("height", 16), channels[0])

    def loss(layer: Any, x: axn.NamedArray) -> jax.Array:
        return axn.sum(axn.sin(layer(x))).scalar()

    def second(layer: Any, x: axn.NamedArray) -> Any:
        gradients = jax.grad(loss, (0, 1))
        return jax.grad(lambda *a: sum(jnp.sum(jnp.sin(g)) for g in jax.tree.leaves(gradients(*a))), (0, 1))(layer, x)

    expected = jax.jit(second)(layer, x)
    for devices in (2, 4):
        mesh = axn.make_mesh({"a": devices}, explicit=explicit, devices=jax.devices()[:devices])
        with jax.set_mesh(mesh), axn.axis_mapping({"height": "a"}):
            found = jax.jit(second)(layer, axn.shard(x))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), found, expected)


@pytest.mark.parametrize("spec", [P("a"), P("b", "a"), P(None, ("a", "b")), P(None, None, "c")], ids=str)
@pytest.mark.parametrize(("kind", "groups"), [(Conv, 1), (Conv, 2), (ConvTranspose, 2)])
def test_arrays_sharded_by_hand(kind: Any, groups: int, spec: Any) -> None:
    """Outside of jit, the arrays tell how they are sharded; inside, a mesh is enough to be careful."""
    height, features = axn.make_axes(height=8, features=8)
    layer = kind.init("height", In, features, 2, stride=2, padding=1, groups=groups, use_bias=False, key=KEY)
    x = sample(axn.Axis("batch", 4), height, In)

    def loss(layer: Any, x: axn.NamedArray) -> jax.Array:
        return axn.sum(axn.sin(layer(x))).scalar()

    gradient = jax.grad(loss, (0, 1))

    def gradients(layer: Any, x: axn.NamedArray) -> Any:
        return jax.jvp(gradient, (layer, x), jax.tree.map(jnp.cos, (layer, x)))

    expected = jax.jit(gradients)(layer, x)
    mesh = axn.make_mesh({"a": 2, "b": 2, "c": 2})
    placed = jax.device_put((layer, x), (jax.NamedSharding(mesh, P()), jax.NamedSharding(mesh, spec)))
    found = [gradients(*placed)]
    with jax.set_mesh(mesh):
        found.append(jax.block_until_ready(jax.jit(gradients)(*placed)))
        # Every operation is compiled again with a mesh, and the second derivative follows arrays as it did without one.
        found.append((jax.block_until_ready(gradient(*placed)), expected[1]))
    for each in found:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), each, expected)


@pytest.mark.parametrize("spec", [P(None, "a"), P("b", "a"), P(None, None, "a")], ids=str)
def test_mapped_over_by_jax(spec: Any) -> None:
    """Tracers tell that they are mapped over, also inside jit; a mesh must be active there."""
    layer = Conv.init("height", In, Out, 3, use_bias=False, key=KEY)
    weights, x = (jax.random.normal(KEY, (4, *shape)) for shape in (layer.weight.array.shape, (8, 8, 4)))

    def loss(weight: jax.Array, x: jax.Array) -> jax.Array:
        own = dataclasses.replace(layer, weight=axn.named(weight, layer.weight.names))
        return axn.sum(axn.sin(own(axn.named(x, ("batch", "height", "channels"))))).scalar()

    gradients = jax.grad(lambda weights, x: jnp.sum(jax.vmap(loss)(weights, x)), (0, 1))
    expected = jax.jit(gradients)(weights, x)
    mesh = axn.make_mesh({"a": 2, "b": 2, "c": 2})
    x = jax.device_put(x, jax.NamedSharding(mesh, spec))
    for active, call in ((False, gradients), (True, gradients), (True, jax.jit(gradients))):
        with jax.set_mesh(mesh) if active else contextlib.nullcontext():
            found = jax.block_until_ready(call(weights, x))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), found, expected)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("groups", [2, 4])
def test_channels_sharded_over_different_mesh_axes(groups: int, explicit: bool) -> None:
    """XLA would end the process if those of the groups are."""
    channels, features = axn.make_axes(channels=8, features=8)
    layer = Conv.init("height", channels, features, 3, padding=1, groups=groups, key=KEY)
    x = sample(axn.Axis("batch", 4), H, channels)

    def loss(layer: Any, x: axn.NamedArray) -> jax.Array:
        return axn.sum(axn.sin(layer(x))).scalar()

    expected = jax.jit(jax.grad(loss, (0, 1)))(layer, x)
    mapping = {"features": "a", "channels": "b"}
    with jax.set_mesh(axn.make_mesh({"a": 2, "b": 2, "c": 2}, explicit=explicit)), axn.axis_mapping(mapping):
        found = jax.jit(jax.grad(loss, (0, 1)))(*axn.shard((layer, x)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, expected)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("compute", [{"batch": "a"}, {"batch": ("a", "b")}], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_stored_over_several_mesh_axes(groups: int, compute: Any, explicit: bool) -> None:
    """Also over one that does not shard the batch, and would remain for the result."""
    features, storage = axn.Axis("features", 8), {"features": ("a", "b")}
    layer = Conv.init("height", In, features, 3, padding=1, groups=groups, key=KEY)
    x = sample(axn.Axis("batch", 8), H, In)

    def step(layer: Any, x: axn.NamedArray) -> Any:
        return jax.grad(lambda layer: axn.sum(axn.sin(layer(x))).scalar())(layer)

    expected = step(layer, x)
    with jax.set_mesh(axn.make_mesh({"a": 2, "b": 2, "c": 2}, explicit=explicit)):
        found = axn.fsdp(step, storage, compute)(axn.shard(layer, storage), axn.shard(x, compute))
    assert spec(found.weight) == (("a", "b"), None, None)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, expected)


def test_a_gradient_that_is_no_batch_of_products() -> None:
    conv = Conv.init("x", axn.Axis("c", 2), axn.Axis("r", 2), 3, stride=3, padding=4, dilation=2, key=jax.random.key(0))
    x = axn.arange({"x": 3, "c": 2}, dtype=jnp.float32)
    gradient = jax.grad(lambda x: axn.sum(conv(x) ** 2).scalar())
    expected = gradient(x)
    with jax.set_mesh(axn.make_mesh({"data": 2})):
        found = jax.block_until_ready(jax.jit(gradient)(x))
    np.testing.assert_allclose(found.array, expected.array, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
def test_gradients_where_the_input_is_sharded_under_other_names(kind: str, size: int) -> None:
    """Rematerialised, and beside the result; XLA added up copies of the gradient of a kernel of one position."""
    x = axn.random.normal(jax.random.key(0), {"channels": 3, "time": 4})
    layer = getattr(axn.nn, kind).init(
        "time", axn.Axis("channels", 3), axn.Axis("out", 2), size, dilation=3, padding="SAME", use_bias=False,
        key=jax.random.key(1),
    )  # fmt: skip

    def loss(stored: axn.NamedArray) -> Any:
        x = stored.rename({"stored channels": "channels", "stored time": "time"})
        y = axn.sqrt(axn.sum(axn.square(axn.flip(x, "time")), "channels") + 1) - layer(x)
        return axn.sum(y * axn.cos(axn.arange(axn.Axis("time", 4)))).scalar(), y

    step = jax.grad(jax.checkpoint(loss), has_aux=True)
    stored = x.rename({"channels": "stored channels", "time": "stored time"})
    expected = jax.jit(step)(stored)
    mapping = {"stored channels": "x", "stored time": "y"}
    mesh = axn.make_mesh({"x": 3, "y": 2}, devices=jax.devices()[:6])
    with jax.set_mesh(mesh), axn.axis_mapping(mapping):
        placed = axn.shard(stored)
        assert spec(placed) == ("x", "y")
        found = jax.tree.leaves(axn.named_jit(step)(placed))
    for a, b in zip(found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
