"""Advise what to write instead of names that users know from NumPy, JAX and PyTorch.

Loaded only when a program asks for a name that does not exist, to end its error with one sentence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


def _each(advice: Mapping[str, str]) -> dict[str, str]:
    """Return the advice for each of the names that a key lists."""
    return {name: text for names, text in advice.items() for name in names.split()}


_ORDER = "the order of axes never matters to an operation; `axonym.rearrange(x, ({reversed}))` changes the layout"
_MERGE = (
    "`axonym.flatten_axes(x, ({axes}), 'new')` merges axes, and "
    "`axonym.unflatten_axis(x, {last}, {'a': 2, 'b': 3})` splits one"
)
_WIDEN = "operations broadcast by name; `axonym.broadcast_axis(x, axonym.Axis('new', 1))` adds an axis"
_TAKE_AWAY = "`x[{last}, 0]` removes an axis of size 1"
_DOT = "`axonym.dot(x, y, axis={last})` sums products over an axis by name"
_CAST = "`x.astype(jnp.float32)` casts to any dtype"
_PLACE = "`axonym.shard(x, {{first}: 'data'})` places an array by name, and `jax.device_put(x, device)` on one device"
_IN_PLACE = "arrays are immutable: write `x = x + y`"
_IMMUTABLE = "arrays are immutable, so it is not needed"
_GRADIENT = "`axonym.grad(loss)(model)` computes gradients"
_NAME = "`axonym.named(a, ('batch', 'embed'))` names the axes of an array or a list"
_DRAW = "`axonym.random.{name}(key, {'batch': 8})` draws numbers with a key"
_JOIN = "`axonym.concatenate([x, y], {last})` joins along an axis, and `axonym.stack([x, y], 'new')` along a new one"
_PARTS = "[axonym.Axis({last}, 1), axonym.Axis({last}, x.axis_size({last}) - 1)]"
_SHARDED = "`axonym.shard(x, {'batch': 'data'})` places an array by name"
_OF_XARRAY = "`axonym.to_xarray(x, coords)` converts to xarray, with coordinates"
_STATEFUL = "equinox.nn.make_with_state(axonym.nn.BatchNorm.init)({})"
_NETWORK_FUNCTIONS = ("softmax", "log_softmax", "relu", "gelu", "silu", "sigmoid", "elu", "leaky_relu", "one_hot")
_IN_NN = {name: f"it is `axonym.nn.{name}`" for name in _NETWORK_FUNCTIONS}
for _along in ("softmax", "log_softmax"):
    _IN_NN[_along] = f"it is `axonym.nn.{_along}(x, {{last}})`"
_IN_LINALG = {"norm": "it is `axonym.linalg.norm(x, {last})`"}
_LIMIT = "`axonym.clip(x, 0, 1)` clips elements to a range"
_LARGEST = "`axonym.top_k(x, {last}, k)` selects the largest elements"
_MODULE = "models are Equinox modules, `class Model(equinox.Module)`"

ARRAY = _each({
    **_IN_NN,
    **_IN_LINALG,
    "clamp clamp_ clamp_min clamp_max": _LIMIT,
    "topk": _LARGEST,
    "repeat": "`axonym.tile(x, {{last}: 2})` repeats the whole array, and `axonym.repeat(x, 2, {last})` each element",
    "index_select": "`x[{last}, indices]` selects elements by a named array of indices",
    "add_ sub_ mul_ div_ zero_ fill_ copy_": _IN_PLACE,
    "T mT transpose permute swapaxes moveaxis": _ORDER,
    "reshape view": _MERGE,
    "unsqueeze expand_dims expand expand_as": _WIDEN,
    "squeeze": _TAKE_AWAY,
    "matmul mm bmm mv tensordot inner": _DOT,
    "float half double bfloat16 int long bool type": _CAST,
    "to cuda cpu device": _PLACE,
    "clone contiguous": _IMMUTABLE,
    "backward grad requires_grad requires_grad_": _GRADIENT,
    "numpy to_numpy": "`numpy.asarray(x.array)` is the array in NumPy",
    "plot imshow": "`axonym.debug.draw(x)` draws the array with Matplotlib",
    "interp": "`axonym.interp(new, positions, x)` interpolates",
    "differentiate": "`axonym.gradient(x, {last})` takes differences",
    "detach": "`jax.lax.stop_gradient(x)` stops gradients",
    "dim": "`x.ndim` is the number of axes, and `x.names` their names",
    "numel": "`x.size` is the number of elements",
    "gather": "`x[{last}, indices]` selects elements by a named array of indices",
    "masked_fill masked_fill_": "`axonym.where(mask, value, x)` chooses by a mask",
    "sel isel": "`x[{first}, 0]` selects by position; coordinates stay in xarray",
    "coords assign_coords loc attrs groupby to_xarray": _OF_XARRAY,
    "isnull notnull fillna": "`axonym.where(axonym.isnan(x), 0, x)` replaces missing values",
    "coarsen": "`axonym.unflatten_axis(x, {last}, {'block': 2, 'within': 3}).mean('within')` averages blocks",
    "dims": "`x.names` are the names of the axes",
    "values data value": "`x.array` is the JAX array",
    "scatter index_add index_add_": "`x.at[{last}, indices].set(values)` updates elements",
    "chunk": f"`axonym.split(x, {{last}}, {_PARTS})` splits an axis",
})  # fmt: skip
"""Advice by attribute of an array; `{axes}`, `{reversed}`, `{first}` and `{last}` stand for names of its axes."""

PACKAGE = _each({
    **_IN_NN,
    "transpose permute swapaxes moveaxis": _ORDER,
    "reshape view": _MERGE,
    "unsqueeze expand_dims": _WIDEN,
    "squeeze": _TAKE_AWAY,
    "matmul mm bmm tensordot inner": _DOT,
    **_IN_LINALG,
    "clamp": _LIMIT,
    "topk": _LARGEST,
    "save": "`axonym.state.save_state_dict(axonym.state.to_state_dict(model), 'model.safetensors')` writes a model",
    "load": "`axonym.state.load_state_dict('model.safetensors')` reads arrays, `axonym.state.from_state_dict` a model",
    "cat hstack vstack column_stack append concat": _JOIN,
    "array asarray tensor Tensor from_numpy as_tensor": _NAME,
    "rand": _DRAW.replace("{name}", "uniform"),
    "randn": _DRAW.replace("{name}", "normal"),
    "randint": "`axonym.random.randint(key, {'batch': 8}, 0, 10)` draws numbers with a key",
    "no_grad inference_mode": "nothing records gradients here; " + _GRADIENT,
    "manual_seed": "random functions take a key, `jax.random.key(0)`",
    "jit compile": "`jax.jit` takes functions of named arrays, and `axonym.named_jit` shards too",
    "vjp jvp eval_shape": "JAX's own take functions of named arrays",
    "with_sharding_constraint with_logical_constraint device_put reshard": _SHARDED,
    "DTensor distribute_tensor": _SHARDED,
    "DeviceMesh init_device_mesh": "`axonym.make_mesh({'data': 4, 'model': 2})` makes a mesh",
    "DDP DistributedDataParallel DataParallel pmap": "`axonym.named_jit(step, {'batch': 'data'})` computes a step whose batch is sharded",
    "FSDP FullyShardedDataParallel fully_shard": "`axonym.fsdp(step, {'embed': 'data'}, {'batch': 'data'})` computes a step whose parameters are stored sharded",
    "DataLoader": "`axonym.named(a, ('batch', 'embed'))` names the arrays of a batch, whatever loads them",
    "state_dict": "`axonym.state.to_state_dict(model)` makes a state dict",
    "Adam AdamW SGD": "optimizers are Optax's, such as `optax.adamw(1e-3)`",
    "einops": "axes have names already: " + _MERGE,
    "reduce": "`axonym.mean(x, {last})` and other reductions take the names of axes",
    "DataArray Dataset": "`axonym.from_xarray(data)` takes arrays and names from xarray",
    "logical_axis_rules axis_rules": "`with axonym.axis_mapping({'batch': 'data'}):` shards each axis over a mesh axis",
    "Mesh PartitionSpec NamedSharding": "use JAX's own from `jax.sharding`",
    "quantize_weights quantize_linear_layers": "it is in `axonym.quantization`",
    "tree_map": "`axonym.tree.map(f, model)` maps over named arrays",
    "float64 float32 float16 bfloat16 int64 int32 int8 uint8 pi inf": "it is in `jax.numpy`",
    "newaxis": _WIDEN,
    "Module": _MODULE,
})  # fmt: skip
"""Advice by name in `axonym`."""

NETWORKS = _each({
    "Conv1d Conv2d Conv3d": "`axonym.nn.Conv.init(('height', 'width'), In, Out, kernel_size=3, key=key)` takes any number of axes",
    "Sequential ModuleList": "call the layers one after another, or use `axonym.nn.Stacked`",
    "Module Parameter ModuleDict": _MODULE + ", and parameters are their fields",
    "ReLU GELU SiLU Sigmoid Tanh Softmax": "activations are functions, such as `axonym.nn.relu`",
    "Param Variable": _MODULE + ", and every array in them is a parameter: there is no wrapper",
    "Rngs make_rng": "layers take a key, `jax.random.key(0)`",
    "merge GraphDef": "models are pytrees: `equinox.partition(model, equinox.is_array)` takes one apart, `equinox.combine` joins it",
    "Dense LinearGeneral Einsum": "`axonym.nn.Linear.init(In, Out, key=key)` takes any axes",
    "Embed": "`axonym.nn.Embedding.init(In, Out, key=key)` is a table of embeddings",
    "with_partitioning with_logical_partitioning": "parameters have names: " + _SHARDED,
    "functional": "the functions are in `axonym.nn` itself",
    "CrossEntropyLoss NLLLoss cross_entropy": "`axonym.nn.cross_entropy_loss(logits, 'label', targets)`",
    "BCEWithLogitsLoss BCELoss": "`axonym.nn.binary_cross_entropy_loss(logits, targets)`",
    "MultiheadAttention MultiHeadAttention scaled_dot_product_attention": "`axonym.nn.attention.dot_product_attention(query, key, value, 'key_pos', 'head_dim')`",
    "BatchNorm1d BatchNorm2d BatchNorm3d": "`" + _STATEFUL.format("Channels, ('batch', 'height', 'width')") + "`",
    "InstanceNorm1d InstanceNorm2d InstanceNorm3d": "`axonym.nn.GroupNorm.init(Channels, Channels.size, ('height', 'width'))`",
    "RMSNorm": "`axonym.nn.RmsNorm.init(Embed, use_bias=False)`",
    "MaxPool1d MaxPool2d": "`axonym.nn.max_pool(x, {'height': 2, 'width': 2}, stride=2)`",
    "AvgPool1d AvgPool2d": "`axonym.nn.mean_pool(x, {'height': 2, 'width': 2}, stride=2)`",
})  # fmt: skip
"""Advice by name in `axonym.nn`."""


CALLS = _each({
    "arange": "arange({'pos': 8})",
    "linspace": "linspace(axonym.Axis('pos', 8), start=0, stop=1)",
    "named": "named(a, ('batch', 'embed'))",
    "one_hot": "one_hot(x, axonym.Axis('label', 10))",
    "cross_entropy_loss": "cross_entropy_loss(logits, 'label', targets)",
    "vmap": "vmap(f, 'batch')(x)",
    "scan": "scan(f, 'batch')(carry, x)",
    "dot_product_attention": "dot_product_attention(query, key, value, 'key_pos', 'head_dim')",
    "dropout": "dropout(x, 0.1, inference=False, key=key)",
    "Dropout.__init__": "Dropout(0.1)",
    "where": "where(mask, x, y)",
    "clip": "clip(x, 0, 1)",
    "stack": "stack([x, y], {new})",
    "broadcast_axis": "broadcast_axis(x, axonym.Axis({new}, 8))",
    "gamma loggamma": "{name}(key, {'batch': 8}, a)",
    "beta": "beta(key, {'batch': 8}, a, b)",
})  # fmt: skip
"""Example calls of functions for which `_call` does not write a good one; `{new}` is an axis that the array lacks."""

KEYWORDS = _each({
    "dim dims": "Axes are selected by name, `{call}`.",
    "keepdim keepdims": "It is not needed: the result broadcasts with the array by name.",
    "out inplace": "Arrays are immutable: use the result that is returned.",
    "unbiased": "Write `ddof=1` for the unbiased estimate; `ddof=0`, the default, is for a whole population.",
    "min max": "The bounds are `a_min` and `a_max`: write `{call}`.",
    "correction": "It is called `ddof` here, and 0 by default.",
})  # fmt: skip
"""Advice by unknown keyword argument."""

_ARGUMENTS = _each({
    "a array": "x",
    "arrays": "[x, y]",
    "axis": "{last}",
    "new_axes": _PARTS,
    "new_axis_name": "'new'",
    "shift": "1",
    "repeats": "2",
    "shape": "{'batch': 8}",
})  # fmt: skip


def in_call(f: Callable[..., Any], error: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the message for a call with wrong arguments, followed by a correct call."""
    name, arguments = f.__qualname__.removesuffix(".__init__"), (*args, *kwargs.values())
    parameters = list(inspect.signature(f).parameters)
    if parameters[0] == "cls":  # the class that was called, which inherits the method
        name = f"{args[0].__name__}.{f.__name__}"
        error = error.replace(f.__qualname__, name)
    keyword = error.partition("unexpected keyword argument ")[2].strip("'")
    asked = kwargs[keyword] if keyword in ("dim", "dims") else None
    flat = [x for a in arguments for x in (a if isinstance(a, (list, tuple)) else [a])]
    names = next((n for x in flat if isinstance(n := getattr(x, "names", ()), tuple) and n), ("batch", "embed"))
    if f.__qualname__ in CALLS:
        call = CALLS[f.__qualname__].replace("{name}", name)
    elif f.__qualname__.endswith(".__init__"):  # a layer is made by its `init`
        call = _call(type(arguments[0]).init, f"{name}.init")
    else:
        call = _call(f, name, along=asked is not None)
    call = call.replace("{new}", repr(asked) if isinstance(asked, str) and asked not in names else "'new'")
    if parameters[0] == "key" and arguments and not hasattr(arguments[0], "dtype"):
        return f"{error}. The first argument is a random key: write `{call}`."
    advice = KEYWORDS.get(keyword, "Write `{call}`.").replace("{call}", call)
    if asked is not None:
        one = "AxisSelector" in str(inspect.signature(f).parameters.get("axis"))
        advice = advice.replace("{last}", _by_name(asked, names, one))
    return f"{error}. {_filled(advice, tuple(map(repr, names)))}"


def _by_name(asked: Any, names: Sequence[str], one: bool) -> str:
    """Return the axes that were asked for, by name or by position, as they are written; or one of them."""
    each = asked if isinstance(asked, (list, tuple)) else [asked]
    at = range(-len(names), len(names))
    found = [names[x] if isinstance(x, int) and x in at else x for x in each if isinstance(x, (str, int))]
    if not found or len(found) < len(each):
        return "{last}"
    if one or len(found) == 1:
        return repr(found[-1])
    return f"({', '.join(map(repr, found))})"


def _call(f: Callable[..., Any], name: str, *, along: bool = False) -> str:
    """Return an example call with every required argument and the axis, if it is positional or `along` asks for it."""
    words = []
    for p in inspect.signature(f).parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or p.name == "cls":
            continue
        if p.default is not p.empty and (p.name != "axis" or (p.kind is p.KEYWORD_ONLY and not along)):
            continue
        word = ("Embed" if p.name == "axis" else p.name) if name.endswith(".init") else _ARGUMENTS.get(p.name, p.name)
        words.append(f"{p.name}={word}" if p.kind is p.KEYWORD_ONLY else word)
    return f"{name}({', '.join(words)})"


def in_package(package: str, name: str) -> str:
    """Return one sentence for a name that a package lacks, or an empty string."""
    if package.endswith(".random") and hasattr(jax.random, name):
        return f" It is `jax.random.{name}`."
    known = NETWORKS if package.endswith(".nn") else PACKAGE
    return sentence(known.get(name), ("'batch'", "'embed'"))


def of_array(name: str, names: Sequence[str]) -> str:
    """Return one sentence for an attribute that named arrays lack, or an empty string."""
    return sentence(ARRAY.get(name), tuple(map(repr, names)) or ("'axis'",))


def sentence(advice: str | None, axes: Sequence[str]) -> str:
    """Return advice as a sentence that names the axes of an array."""
    if advice is None:
        return ""
    advice = _filled(advice, axes)
    return f" {advice[0].upper()}{advice[1:]}."


def _filled(advice: str, axes: Sequence[str]) -> str:
    end = "," if len(axes) == 1 else ""
    words = {
        "{axes}": ", ".join(axes) + end,
        "{reversed}": ", ".join(reversed(axes)) + end,
        "{first}": axes[0],
        "{last}": axes[-1],
    }
    for place, word in words.items():
        advice = advice.replace(place, word)
    return advice
