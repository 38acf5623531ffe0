"""Draw block by block, so that each device draws only the blocks in its shard."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from ..axis import Axis, AxisSelector
from ..core import errors
from ..core.function_cache import FunctionCache, Functions, HeldArrays, WithArrays
from ..core.tree_spec import flatten_arrays
from ..distribution.mesh_axes import NO_MESH, current_mesh, mapped_on, shard_count
from ..distribution.per_device import run_per_device
from ..named_array import NamedArray, describe_array, resolve_axes, wrap
from ..ops._new_array import run_sharded
from ..ops._operands import one_axis, private
from ..sharding.jit import named_jit
from ._draw import new_axes, one_key

F = TypeVar("F", bound=Callable[..., Any])


def generate_sharded(fn: F, axis: AxisSelector | None = None) -> F:
    """Make a sampler that draws block by block along an axis, where each device draws only the blocks in its shard.

    Block `i` is drawn with the `i`-th of the keys that `jax.random.split` makes, one for each index of the axis. So the
    values do not depend on the mesh or the active mapping, but they differ from the values of `fn` itself.

    The samplers here draw each shard on its device already. This function is for samplers of your own, for keys of
    other kinds than `threefry2x32`, and for samplers that JAX cannot partition along an axis, such as `gamma` along any
    axis but the first.

    Arguments:
        fn: a function like the samplers: it takes a key, a shape and anything else, and returns a named array with the
            axes of the shape. It gets the shape without `axis`, and named arrays at one index of `axis`. Compiled code
            is kept for each `fn`, so that wrapping the same function again does not compile again.
        axis: the axis along which to take blocks; the first one of the shape by default.

    >>> def noise(key, shape, scale):
    ...     return scale * axn.random.normal(key, shape)
    >>> sharded = axn.random.generate_sharded(noise, "layers")
    >>> sharded(jax.random.key(0), {"layers": 4, "embed": 8}, axn.ones({"layers": 4})).shape
    {'layers': 4, 'embed': 8}
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    what = f"random.generate_sharded({name})"
    functions_of = Functions(fn, own=FunctionCache()).now

    @functools.wraps(fn)
    def sampler(key, shape, *args, **kwargs):
        axes = new_axes(what, shape)
        if not axes:
            raise ValueError(f"{what}: the shape has no axes to take blocks along. Write `{{'layers': 4}}`.")
        along = axes[0]
        if axis is not None:
            names, sizes = tuple(a.name for a in axes), tuple(a.size for a in axes)
            along = one_axis(what, "axis", resolve_axes(names, sizes, axis, what))
        functions = functions_of()
        generate = functions.compiled(_build_sampler, what)
        return generate(functions.arrays, one_key(what, key), axes, along, args, kwargs)

    return sampler  # pyright: ignore[reportReturnType]  # it takes what `fn` takes


def _build_sampler(functions: WithArrays, what: str) -> Callable[..., NamedArray]:
    """Make the sampler for one function, which compiles once for each set of axes and static arguments."""

    @named_jit
    def generate(held: HeldArrays, key: Any, axes: tuple[Axis, ...], along: Axis, args: Any, kwargs: Any) -> NamedArray:
        return _draw_blocks(what, functions, key, axes, along, _BlockArguments(what, (held, args, kwargs), along))

    return generate


class _BlockArguments:
    """The values that the function closes over, and its arguments after the shape: arrays, and static parts."""

    def __init__(self, what: str, tree: Any, along: Axis):
        self.arrays, spec = flatten_arrays(tree)
        # Raw arrays get names that are never the axis of the blocks, so each block gets all of them.
        self.names = [
            private(f"argument {i}", tuple(map(str, range(jnp.ndim(x))))) if names is None else names
            for i, (x, names) in enumerate(zip(self.arrays, spec.names, strict=True))
        ]
        self.positions = [names.index(along.name) if along.name in names else None for names in self.names]
        """The position of the axis of the blocks in each array, or None."""
        for x, names, position in zip(self.arrays, self.names, self.positions, strict=True):
            if position is not None and x.shape[position] != along.size:
                places = [("the shape", along.size), (f"the argument {wrap(x, names)}", x.shape[position])]
                raise ValueError(errors.size_mismatch(what, along.name, places))
        self.of_one_block = spec.with_names(
            None if names is None else tuple(n for n in names if n != along.name) for names in spec.names
        )
        """The arguments of one block, whose arrays lack the axis of the blocks."""


def _draw_blocks(
    what: str, functions: WithArrays, key: Any, axes: tuple[Axis, ...], along: Axis, arguments: _BlockArguments
) -> NamedArray:
    """Draw all blocks, and join them at the position of the axis in the shape."""
    rest = tuple(a for a in axes if a is not along)
    position = axes.index(along)
    in_axes = (0, *arguments.positions)

    def block(key: Any, *arrays: Any) -> NamedArray:
        held, args, kwargs = arguments.of_one_block.unflatten(arrays)
        (fn,) = functions(held)
        result = fn(key, rest, *args, **kwargs)
        if not isinstance(result, NamedArray) or set(rest) - set(result.axes):
            got = describe_array(result) if isinstance(result, NamedArray) else type(result).__name__
            raise TypeError(
                f"{what}: the function must return a NamedArray with the axes of the shape it is given, "
                f"{errors.describe_selectors(rest)}, got {got}. Pass that shape to the samplers in it, or name the "
                "axes of the result with axonym.named(array, shape)."
            )
        return result.rearrange((*rest, ...))

    def blocks(*keys_and_arrays: Any) -> jax.Array:
        return _for_each(lambda *xs: block(*xs).array, in_axes, position, keys_and_arrays)

    def draw(key: Any, *arrays: Any) -> jax.Array:
        keys = jax.random.split(key, along.size)
        mesh = current_mesh()
        over = () if mesh is None else mapped_on(what, along.name, mesh, AxisType.Auto, AxisType.Explicit)
        if mesh is None or not over or along.size % shard_count(mesh, over):
            return blocks(keys, *arrays)
        return run_per_device(
            blocks,
            (keys, *arrays),
            [PartitionSpec() if i is None else PartitionSpec(*(None,) * i, over) for i in in_axes],
            PartitionSpec(*(None,) * position, over),
            mesh,
            axis_names=over,
            check_vma=False,  # so that the loops in `fn` need not mark their carries as device-varying
        )

    of_block = _axes_of_block(block, key, arguments)
    out = new_axes(what, (*of_block[:position], along, *of_block[position:]))
    drawn = run_sharded(what, draw, [(), *arguments.names], (key, *arguments.arrays), out)
    return wrap(drawn, tuple(a.name for a in out))


def _axes_of_block(block: Callable[..., NamedArray], key: Any, arguments: _BlockArguments) -> tuple[Axis, ...]:
    """Return the axes of one block, without drawing it."""
    shapes = [
        jax.ShapeDtypeStruct(x.shape if i is None else (*x.shape[:i], *x.shape[i + 1 :]), x.dtype)
        for x, i in zip(arguments.arrays, arguments.positions, strict=True)
    ]
    with jax.sharding.use_abstract_mesh(NO_MESH):  # the sharding of a block does not matter here
        return jax.eval_shape(block, jax.ShapeDtypeStruct(key.shape, key.dtype), *shapes).axes


def _for_each(
    fn: Callable[..., jax.Array], in_axes: Sequence[int | None], out_axis: int, keys_and_arrays: Sequence[Any]
) -> jax.Array:
    """Apply `fn` to each key. Except for threefry keys, the draws of `vmap` depend on the number of keys."""
    if jax.random.key_impl(keys_and_arrays[0]) == "threefry2x32":
        return jax.vmap(fn, in_axes=tuple(in_axes), out_axes=out_axis)(*keys_and_arrays)
    leading = [x if i is None else jnp.moveaxis(x, i, 0) for x, i in zip(keys_and_arrays, in_axes, strict=True)]

    def one(index: jax.Array) -> jax.Array:
        return fn(*(x if i is None else x[index] for x, i in zip(leading, in_axes, strict=True)))

    return jnp.moveaxis(jax.lax.map(one, jnp.arange(leading[0].shape[0])), 0, out_axis)
