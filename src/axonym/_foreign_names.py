"""Advise what to write instead of names that users know from NumPy, JAX and PyTorch.

Loaded only when a program asks for a name that does not exist, to end its error with one sentence.
"""

from __future__ import annotations

from collections.abc import Sequence

_ORDER = "the order of axes never matters to an operation; `axonym.rearrange(x, ({reversed}))` lays the array out anew"
_MERGE = (
    "`axonym.flatten_axes(x, ({axes}), 'new')` merges axes, and "
    "`axonym.unflatten_axis(x, {last}, {'a': 2, 'b': 3})` splits one"
)
_WIDEN = "operations broadcast by name; `axonym.broadcast_axis(x, axonym.Axis('new', 1))` adds an axis"
_TAKE_AWAY = "`x[{last}, 0]` takes away an axis of size 1"
_DOT = "`axonym.dot(x, y, axis={last})` sums products over an axis by name"
_CAST = "`x.astype(jnp.float32)` casts to any dtype"
_PLACE = "`axonym.shard(x, {{first}: 'data'})` places an array by name, and `jax.device_put(x, device)` on one device"
_IMMUTABLE = "arrays are immutable, so it is not needed"
_GRADIENT = "`axonym.grad(loss)(model)` computes gradients"
_NAME = "`axonym.named(a, ('batch', 'embed'))` names the axes of an array or a list"
_DRAW = "`axonym.random.{name}(key, {'batch': 8})` draws numbers with a key"
_JOIN = "`axonym.concatenate([x, y], {last})` joins along an axis, and `axonym.stack([x, y], 'new')` along a new one"
_NETWORK_FUNCTIONS = ("softmax", "log_softmax", "relu", "gelu", "silu", "sigmoid", "elu", "leaky_relu", "one_hot")
_IN_NN = {name: f"it is `axonym.nn.{name}`" for name in _NETWORK_FUNCTIONS}

ARRAY = {
    **_IN_NN,
    **dict.fromkeys(("T", "mT", "transpose", "permute", "swapaxes", "moveaxis"), _ORDER),
    **dict.fromkeys(("reshape", "view"), _MERGE),
    **dict.fromkeys(("unsqueeze", "expand_dims", "expand", "expand_as"), _WIDEN),
    "squeeze": _TAKE_AWAY,
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "tensordot", "inner"), _DOT),
    **dict.fromkeys(("float", "half", "double", "bfloat16", "int", "long", "bool", "type"), _CAST),
    **dict.fromkeys(("to", "cuda", "cpu", "device"), _PLACE),
    **dict.fromkeys(("clone", "contiguous"), _IMMUTABLE),
    **dict.fromkeys(("backward", "grad", "requires_grad", "requires_grad_"), _GRADIENT),
    "numpy": "`numpy.asarray(x.array)` is the array in NumPy",
    "detach": "`jax.lax.stop_gradient(x)` stops gradients",
    "dim": "`x.ndim` is the number of axes, and `x.names` their names",
    "numel": "`x.size` is the number of elements",
    "gather": "`x[{last}, indices]` selects elements by a named array of indices",
    **dict.fromkeys(("masked_fill", "masked_fill_"), "`axonym.where(mask, value, x)` chooses by a mask"),
    **dict.fromkeys(("scatter", "index_add", "index_add_"), "`x.at[{last}, indices].set(values)` updates elements"),
    "chunk": "`axonym.split(x, {last}, [axonym.Axis({last}, 2), axonym.Axis({last}, 3)])` splits an axis",
}
"""By attribute of an array; `{axes}`, `{reversed}`, `{first}` and `{last}` stand for names of the array's axes."""

PACKAGE = {
    **_IN_NN,
    **{name: ARRAY[name] for name in ("transpose", "permute", "swapaxes", "moveaxis", "reshape", "view")},
    **{
        name: ARRAY[name]
        for name in ("unsqueeze", "expand_dims", "squeeze", "matmul", "mm", "bmm", "tensordot", "inner")
    },
    **dict.fromkeys(("cat", "hstack", "vstack", "column_stack", "append"), _JOIN),
    **dict.fromkeys(("array", "asarray", "tensor", "Tensor", "from_numpy", "as_tensor"), _NAME),
    "rand": _DRAW.replace("{name}", "uniform"),
    "randn": _DRAW.replace("{name}", "normal"),
    "randint": "`axonym.random.randint(key, {'batch': 8}, 0, 10)` draws numbers with a key",
    **dict.fromkeys(("no_grad", "inference_mode"), "nothing records gradients here; " + _GRADIENT),
    "manual_seed": "random functions take a key, `jax.random.key(0)`",
    **dict.fromkeys(("jit", "compile"), "`jax.jit` takes functions of named arrays, and `axonym.named_jit` places too"),
    "Module": "models are Equinox modules, `class Model(equinox.Module)`",
}
"""By name in `axonym`."""

NETWORKS = {
    **dict.fromkeys(
        ("Conv1d", "Conv2d", "Conv3d"),
        "`axonym.nn.Conv.init(('height', 'width'), In, Out, kernel_size=3, key=key)` takes any number of axes",
    ),
    **dict.fromkeys(("Sequential", "ModuleList"), "call the layers one after another, or use `axonym.nn.Stacked`"),
    **dict.fromkeys(("Module", "Parameter", "ModuleDict"), PACKAGE["Module"] + ", and parameters are their fields"),
    **dict.fromkeys(
        ("ReLU", "GELU", "SiLU", "Sigmoid", "Tanh", "Softmax"), "activations are functions, such as `axonym.nn.relu`"
    ),
    "functional": "the functions are in `axonym.nn` itself",
    **dict.fromkeys(
        ("CrossEntropyLoss", "NLLLoss", "cross_entropy"), "`axonym.nn.cross_entropy_loss(logits, 'label', targets)`"
    ),
    **dict.fromkeys(("BCEWithLogitsLoss", "BCELoss"), "`axonym.nn.binary_cross_entropy_loss(logits, targets)`"),
    **dict.fromkeys(
        ("MultiheadAttention", "MultiHeadAttention", "scaled_dot_product_attention"),
        "`axonym.nn.attention.dot_product_attention(query, key, value, 'key_pos', 'head_dim')`",
    ),
    **dict.fromkeys(
        ("BatchNorm", "BatchNorm1d", "BatchNorm2d", "GroupNorm", "InstanceNorm2d"),
        "`LayerNorm` and `RmsNorm` are layers, and `axonym.nn.standardize(x, axes)` does it over any axes",
    ),
    "RMSNorm": "`axonym.nn.RmsNorm.init(Embed)`",
    **dict.fromkeys(
        ("MaxPool1d", "MaxPool2d", "AvgPool2d"), "`axonym.nn.max_pool(x, {'height': 2, 'width': 2}, stride=2)`"
    ),
}
"""By name in `axonym.nn`."""


def in_package(package: str, name: str) -> str:
    """Return one sentence for a name that a package lacks, or nothing."""
    known = NETWORKS if package.endswith(".nn") else PACKAGE
    return sentence(known.get(name), ("'batch'", "'embed'"))


def of_array(name: str, names: Sequence[str]) -> str:
    """Return one sentence for an attribute that named arrays lack, or nothing."""
    return sentence(ARRAY.get(name), tuple(map(repr, names)) or ("'axis'",))


def sentence(advice: str | None, axes: Sequence[str]) -> str:
    """Return a piece of advice as a sentence that names the axes of an array."""
    if advice is None:
        return ""
    end = "," if len(axes) == 1 else ""
    words = {
        "{axes}": ", ".join(axes) + end,
        "{reversed}": ", ".join(reversed(axes)) + end,
        "{first}": axes[0],
        "{last}": axes[-1],
    }
    for place, word in words.items():
        advice = advice.replace(place, word)
    return f" {advice[0].upper()}{advice[1:]}."
