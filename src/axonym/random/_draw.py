"""Shared code of all samplers: checks the key, matches parameters by name, and shards the result.

The values depend on the key, the axes and the parameters, never on the mesh, the mapping or jit: a sampler draws the
same values as the function of the same name in `jax.random` for the sizes of the axes, in their order.

The result is sharded by the active mapping, and each device draws its own shard. Without a mapping, the sharding on
Explicit mesh axes is inferred from the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import DTypeLike

from ..axis import Axis, AxisSelector, AxisSpec, Names, axes_of_spec, axis_size
from ..core import errors
from ..core.tree_spec import is_key
from ..distribution.active_settings import active_mapping
from ..distribution.mesh_axes import current_mesh, entries_by_name
from ..named_array import NamedArray, NamedOrNumeric, describe_array, resolve_axes
from ..ops import _kernels
from ..ops._new_array import sharded_kernel
from ..ops._operands import distinct, dtype_key, one_axis, operand, require_named

Key: TypeAlias = NamedOrNumeric
"""One random key, as `jax.random.key` or `jax.random.PRNGKey` make it; a named array only if it has no axes."""
Parameter: TypeAlias = NamedOrNumeric
"""A number, or a named array whose axes are all axes of the result."""


def one_key(what: str, key: Any) -> Any:
    """Return the argument, which must be one random key."""
    if isinstance(key, NamedArray):
        if key.names:
            keys = is_key(key) or key.dtype == jnp.uint32
            write = (
                "Map the function over the axes of the keys, with `axonym.vmap`."
                if keys
                else "The key is the first argument: make one with `jax.random.key(seed)`."
            )
            raise ValueError(f"{what}: expected one random key, got the named array {describe_array(key)}. {write}")
        key = key.array
    dtype = getattr(key, "dtype", None)
    typed = dtype is not None and is_key(key)
    if not typed and dtype != jnp.uint32:
        got = type(key).__name__ if dtype is None else f"an array of {dtype}"
        raise TypeError(f"{what}: the first argument is a random key, got {got}. Make one with `jax.random.key(seed)`.")
    if key.ndim != (0 if typed else 1):
        raise ValueError(
            f"{what}: expected one random key, got an array of shape {key.shape}. Take one of the keys, or map the "
            "function over them."
        )
    return key


def new_axes(what: str, shape: AxisSpec) -> tuple[Axis, ...]:
    """Return the axes of the result, which must have different names."""
    axes = axes_of_spec(shape, what)
    distinct(what, tuple(a.name for a in axes))
    return axes


def axis_of(what: str, array: Any, axis: AxisSelector) -> Axis:
    """Return the selected axis of an argument, which must be a named array."""
    names = require_named(what, array).names
    return one_axis(what, "axis", resolve_axes(names, jnp.shape(array.array), axis, what))


def draw(
    fn: Callable[..., jax.Array],
    key: Key,
    shape: AxisSpec,
    parameters: Mapping[str, Parameter] = MappingProxyType({}),
    *,
    dtype: DTypeLike | None = None,
    along: tuple[Axis, ...] = (),
    **options: Any,
) -> NamedArray:
    """Draw with a positional sampler of the same name as the operation.

    It is called as `fn(key, **parameters, shape=sizes, **options)`. `along` are the axes of a single draw, which come
    after `shape` in the result.
    """
    what = f"random.{fn.__name__.removeprefix('_')}"
    random_key: Any = one_key(what, key)
    axes = new_axes(what, shape)
    operands = [operand(x) for x in parameters.values()]
    if dtype is not None:
        options["dtype"] = dtype_key(dtype)
    in_names = tuple(names for _, names in operands)
    # Numbers from threefry keys depend on their linear index alone. XLA takes several times as long to compile them
    # over several axes as over one, so axes are merged if that changes neither the values nor the sharding. Inside of
    # jit, without a mapping, XLA shards the numbers according to their use.
    words = random_key.shape  # an old-style key is an array of numbers
    threefry = jax.random.key_impl(random_key) == "threefry2x32" if random_key.ndim == 0 else words == (2,)
    is_placed = not isinstance(random_key, Tracer) or jax.device_count() == 1
    is_placed = is_placed or (active_mapping() and current_mesh() is not None)
    merges = not along and threefry and bool(is_placed)
    kernel = _draw_kernel(what, fn, axes, along, tuple(parameters), in_names, tuple(options.items()), merges)
    return kernel.apply(random_key, *(x for x, _ in operands))


@_kernels.shared("axes", "along", "in_names")
def _draw_kernel(
    what: str,
    fn: Callable[..., jax.Array],
    axes: tuple[Axis, ...],
    along: tuple[Axis, ...],
    labels: tuple[str, ...],
    in_names: tuple[Names, ...],
    options: tuple[tuple[str, Any], ...],
    merges: bool,
) -> _kernels.Kernel:
    sizes = tuple(a.size for a in axes)
    layouts = [(label, names, ()) for label, names in zip(labels, in_names, strict=True)]

    def positional(key, *arrays):
        check_parameters(what, axes, layouts, arrays)
        of_parameters = {n for names in in_names for n in names}
        drawn_axes: list[Axis] = []
        for axis, entry in zip(axes, entries_by_name(a.name for a in axes), strict=True):
            last = drawn_axes[-1] if drawn_axes else None
            if merges and last and entry is None and of_parameters.isdisjoint((axis.name, last.name)):
                drawn_axes[-1] = Axis(last.name, last.size * axis.size)
            else:
                drawn_axes.append(axis)
        layout = tuple(a.name for a in drawn_axes)
        aligned = {
            label: _kernels.align(x, names, layout) if names else x
            for label, names, x in zip(labels, in_names, arrays, strict=True)
        }
        drawn = fn(key, **aligned, shape=tuple(a.size for a in drawn_axes), **dict(options))
        return drawn.reshape(sizes) if len(drawn_axes) < len(axes) else drawn

    return sharded_kernel(what, positional, [(), *in_names], new_axes(what, (*axes, *along)))


def check_enough(what: str, draws: Sequence[Axis], along: Axis) -> None:
    """Check that there are not more draws without replacement than elements to draw from."""
    if axis_size(draws) > along.size:
        raise ValueError(
            f"{what}: there are more draws {errors.describe_selectors(draws)} than axis {along} has positions. Draw "
            "fewer, or with replace=True."
        )


def check_parameters(
    what: str, axes: Sequence[Axis], layouts: Sequence[tuple[str, Names, tuple[Axis, ...]]], arrays: Sequence[Any]
) -> None:
    """Check that the parameters have no axes that the result lacks, and that the sizes agree."""
    problems = []
    for (label, names, more), x in zip(layouts, arrays, strict=True):
        allowed = {a.name: a.size for a in (*axes, *more)}
        described = errors.describe_axes(names, x.shape)
        if len(names) != x.ndim:
            if names:
                problems.append(f"`{label}`: {errors.wrong_rank(names, x.shape)}")
            else:
                problems.append(
                    f"`{label}` has no axis names but shape {x.shape}; name its axes with axonym.named(array, axes)."
                )
            continue
        extra = [n for n in names if n not in allowed]
        if extra:
            problems.append(
                f"`{label}` {described} has {errors.describe_axes(extra)}, which {errors.describe_shape(allowed)} "
                f"lacks. Add it to the shape, or index it away.{errors.suggestions(extra, allowed)}"
            )
        for name, size in zip(names, x.shape, strict=True):
            if size != allowed.get(name, size):
                problems.append(f"`{label}` {described} has {size} for axis {name!r}, the result has {allowed[name]}.")
    if problems:
        raise ValueError(f"{what}: " + "\n  ".join(problems))
