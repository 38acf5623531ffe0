"""`vmap`: map a function of one element over named axes."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..axis import Axis, AxisSelection, Names, name_of, names_without, selectors
from ..core import errors
from ..core.function_cache import closed, opened
from ..core.tree_spec import Slot, StaticLeaf, TreeSpec, check_rank, flatten_arrays
from ..distribution import output_sharding
from ..distribution.active_settings import active_parameter_mapping
from ..distribution.fsdp_ops import gathered_for_each_shard
from ..distribution.mesh_axes import (
    Axes,
    axes_in,
    axes_of_type,
    entries_of,
    entry_of,
    explicit_mesh,
    mesh_around,
    reshard,
    restricted,
    shard_count,
)
from ..distribution.padded_array import is_padded, refuse_padded
from ..named_array import NamedArray, wrap
from ..tree import LayerStack
from . import _mapped_axis

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

P = ParamSpec("P")
R = TypeVar("R")

RawAxis: TypeAlias = (
    "int | Callable[[jax.Array], int | None] | Sequence[RawAxis] | Mapping[Any, RawAxis] | DataclassInstance | None"
)
"""The way raw arrays are mapped: a position, None for not at all, a function from the array to one of these, or a tree
prefix of them: in a list, a tuple, a dictionary or a module."""


@errors.say_how_to_call
def vmap(
    fn: Callable[P, R],
    axis: AxisSelection,
    *,
    default: RawAxis = 0,
    args: Sequence[RawAxis] = (),
    kwargs: Mapping[str, RawAxis] | None = None,
) -> Callable[P, R]:
    """Map a function over one or several named axes: `jax.vmap` by name.

    The function is called once and sees the arguments without the axes; its results get them in front. Named arrays
    that have an axis are mapped over it, and the others are the same for every element. Raw arrays have no names and
    are mapped over their first axis by default. In an Equinox module, they are mapped if its named arrays have an axis
    that is mapped over; if it has no named arrays, `args` or `kwargs` must say how. Values that are not arrays
    are passed on unchanged, in arguments or results: a number that the function returns stays that number,
    while `map` stacks it.

    An axis that the active mapping shards stays sharded throughout. On Explicit mesh axes, arguments that are sharded
    differently along the axis are resharded first, and arrays that are not mapped are gathered over its mesh axes.

    Arguments:
        fn: the function. Its arguments and its result may be any trees.
        axis: the axes, the outermost first. One that no argument has, as when making an ensemble, needs a size.
        default: how raw arrays are mapped: a position, None for not at all, or a function from the array to one of
            these. With several axes the position is used for each in turn.
        args: the same for each positional argument, instead of `default`; each may be a tree prefix of the argument.
            None leaves the whole argument unmapped, its named arrays too.
        kwargs: the same for keyword arguments.

    >>> Batch, Embed = axn.make_axes(batch=2, embed=3)
    >>> axn.vmap(lambda x, y: axn.dot(x, y, axis=Embed), Batch)(axn.ones((Batch, Embed)), axn.ones(Embed))
    NamedArray(float32[batch=2], [3. 3.])
    >>> keys = jax.random.split(jax.random.key(0), 4)
    >>> axn.vmap(lambda key: axn.named(jax.random.normal(key, (3,)), Embed), axn.Axis("layers", 4))(keys).shape
    {'layers': 4, 'embed': 3}
    """
    selected = selectors(axis)
    names = tuple(name_of(s) for s in selected)
    if not names:
        raise ValueError("vmap: expected at least one axis to map over.")
    if len(set(names)) != len(names):
        raise ValueError(f"vmap: an axis is mapped over once, got {errors.describe_axes(names)}.")
    given = {s.name: s.size for s in selected if isinstance(s, Axis)}
    raw_axes = _RawAxes(default, args, kwargs or {})

    def mapped(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = _mapped_axis.flatten((args, kwargs))
        operands, leaves = _mapped_operands(names, leaves, raw_axes.of_leaves(names, args, kwargs), args, kwargs)
        sizes = _mapped_sizes(names, given, operands, args, kwargs)
        stores_shards = bool(active_parameter_mapping())
        opened_fn = opened(fn, closures=True) if stores_shards else None
        held, function = _mapped_axis.flatten(opened_fn)
        shards, auto = None, {}
        if stores_shards:
            shards = _find_shards(names, sizes, operands, [*leaves, *held], (args, kwargs, opened_fn))
            if shards is None:
                found = {n: _mapped_axis.mapped_to("vmap", n, sizes[n], AxisType.Explicit) for n in names}
                auto = {n: axes for n, axes in found.items() if axes}
        returned: list[TreeSpec] = []  # JAX's transform returns only arrays, so `one` leaves the rest of the tree here

        def one(arrays: Sequence[Any]) -> list[Any]:
            inner = [*leaves, *held]
            for operand, x in zip(operands, arrays, strict=True):
                inner[operand.leaf] = x if operand.inner_names is None else wrap(x, operand.inner_names)
            one_args, one_kwargs = jax.tree.unflatten(structure, inner[: len(leaves)])
            own_closure = shards is not None or auto
            call: Any = closed(jax.tree.unflatten(function, inner[len(leaves) :])) if own_closure else fn
            result = call(*one_args, **one_kwargs)
            outputs, spec = flatten_arrays(result)
            _mapped_axis.check_placed_elsewhere("vmap", sizes, inner, _mapped_axis.flatten(result)[0])
            returned[:] = [TreeSpec(spec.structure, [_with_axes(slot, names) for slot in spec.slots])]
            return outputs

        for i, leaf in enumerate(held if auto else (), len(leaves)):
            array, own = (leaf.array, leaf.names) if isinstance(leaf, NamedArray) else (leaf, None)
            if _mapped_axis.is_array(array):
                operands.append(_Operand(i, array, own, (None,) * len(names)))
        levels = [(sizes[n], auto.get(n) or _mapped_axis.spmd_axes("vmap", n, sizes[n])) for n in names]
        if shards is not None:
            operands = [operand for operand in operands if operand.leaf not in shards.parameters]
        arrays = _placed_alike(names, sizes, operands)
        if shards is not None:
            operands, arrays = shards.split(operands, arrays)
            size, spmd = levels[shards.level]
            levels[shards.level : shards.level + 1] = [(shards.count, spmd), (size // shards.count, None)]
        for level, (size, spmd) in reversed([*enumerate(levels)]):
            positions = [operand.position(level) for operand in operands]
            one = jax.vmap(one, in_axes=(positions,), axis_size=size, spmd_axis_name=spmd)
        if auto:
            one = _with_auto_axes(one, [auto.get(n, ()) for n in names])
        with _mapped_axis.collisions_named("vmap", names), _mapped_axis.announced(names, arrays):
            stacked = one(arrays)
        return returned[0].unflatten(stacked if shards is None else map(shards.merged, stacked))

    return functools.update_wrapper(mapped, fn, updated=())


# --- operands ---


@dataclasses.dataclass(frozen=True, slots=True)
class _Operand:
    """An array among the arguments."""

    leaf: int
    """The index of the leaf in the arguments."""
    array: Any
    inner_names: Names | None
    """The names inside the function, if any."""
    dims: tuple[int | None, ...]
    """The position of each axis that is mapped over."""

    def position(self, level: int) -> int | None:
        """Return the position of an axis in the array, not counting mapped axes further out."""
        dim = self.dims[level]
        return None if dim is None else dim - sum(d is not None and d < dim for d in self.dims[:level])


def _mapped_operands(
    names: Names, leaves: Sequence[Any], raw_axes: Sequence[_CheckedRawAxis], args: Any, kwargs: Any
) -> tuple[list[_Operand], list[Any]]:
    """Return the arrays among the leaves of the arguments, and the leaves, in which arrays are filled in later."""
    operands, others = [], list(leaves)
    for i, (leaf, raw) in enumerate(zip(leaves, raw_axes, strict=True)):
        if isinstance(leaf, NamedArray):
            check_rank(leaf)
            left_alone = raw.of_argument and raw.where is None
            mapped = () if left_alone else names
            inner = names_without(leaf.names, *mapped)
            if _mapped_axis.is_array(leaf.array):
                dims = tuple(leaf.names.index(n) if n in mapped and n in leaf.names else None for n in names)
                operands.append(_Operand(i, leaf.array, inner, dims))
            else:  # a placeholder, as in a model with only some of its arrays
                others[i] = wrap(leaf.array, inner)
        elif _mapped_axis.is_array(leaf):
            where = raw.where(leaf) if callable(raw.where) else raw.where
            left, dims = list(range(leaf.ndim)), (None,) * len(names)
            if where is not None:  # the position is used for each axis in turn
                fewest = leaf.ndim - len(names) + 1  # axes that are left for the last one
                if not -fewest <= where < fewest:
                    over = (
                        f"axis {names[0]!r}" if len(names) == 1 else f"{len(names)} axes {errors.describe_axes(names)}"
                    )
                    raise ValueError(
                        f"vmap: {_mapped_axis.argument_paths(args, kwargs)[i]} is a raw array of shape "
                        f"{tuple(leaf.shape)}, which cannot be mapped over {over} at position {where}. Pass a position "
                        "that it has, or None for an array that is the same for every element, in `args`, `kwargs` or "
                        "`default`."
                    )
                dims = tuple(left.pop(where) for _ in names)
            operands.append(_Operand(i, leaf, None, dims))
    return operands, others


def _mapped_sizes(
    names: Names, given: Mapping[str, int], operands: Sequence[_Operand], args: Any, kwargs: Any
) -> dict[str, int]:
    """Return the size of each axis that is mapped over, from its selector and all arrays."""
    sizes = dict(given)
    for operand in operands:
        for name, dim in zip(names, operand.dims, strict=True):
            if dim is not None and sizes.setdefault(name, operand.array.shape[dim]) != operand.array.shape[dim]:
                paths = _mapped_axis.argument_paths(args, kwargs)
                first_with = {given[name]: "the axis given"} if name in given else {}
                having = [(o, d) for o in operands if (d := o.dims[names.index(name)]) is not None]
                for other, at in having:
                    first_with.setdefault(other.array.shape[at], paths[other.leaf])
                raw = any(other.inner_names is None for other, _ in having)
                hint = " `args`, `kwargs` and `default` say how raw arrays are mapped." if raw else ""
                sides = [(path, size) for size, path in first_with.items()]
                raise ValueError(errors.size_mismatch("vmap", name, sides) + hint)
    missing = [n for n in names if n not in sizes]
    if missing:
        refuse_padded(jax.tree.leaves((args, kwargs), is_leaf=is_padded))
        known = {}
        for leaf in _mapped_axis.flatten((args, kwargs))[0]:
            known.update(leaf.shape if isinstance(leaf, NamedArray) and _mapped_axis.is_array(leaf.array) else {})
        raise ValueError(
            errors.missing_axes("vmap", missing, tuple(known), tuple(known.values()))
            + " Pass an axonym.Axis with its size to map over an axis that no argument has."
        )
    return sizes


def _placed_alike(names: Names, sizes: Mapping[str, int], operands: Sequence[_Operand]) -> list[Any]:
    """Reshard the arrays so that they can be mapped over on Explicit mesh axes.

    JAX requires a mapped axis to be sharded over the same mesh axes everywhere, and no other axis over these.
    """
    arrays = [operand.array for operand in operands]
    mesh = explicit_mesh(arrays)
    if mesh is None:
        return arrays
    entries = [entries_of(x) for x in arrays]
    placed = []
    for operand, found in zip(operands, entries, strict=True):
        its_own = {n: found[d] for n, d in zip(names, operand.dims, strict=True) if d is not None}
        placed.append((tuple(its_own), tuple(its_own.values())))
    present = tuple(n for n in names if any(n in found for found, _ in placed))
    # As if the arrays were the operands of one operation: an axis keeps its sharding, and the mapping decides ties.
    spec = output_sharding.infer_output_spec("vmap", present, [sizes[n] for n in present], placed, mesh)
    chosen = dict(zip(present, spec, strict=True))
    left = set(mesh.axis_names).difference(axes_in(spec))
    for i, (operand, found) in enumerate(zip(operands, entries, strict=True)):
        wanted = list(restricted(found, left))
        for name, dim in zip(names, operand.dims, strict=True):
            if dim is not None:
                wanted[dim] = chosen[name]
        arrays[i] = reshard(arrays[i], wanted, mesh)
    return arrays


# --- parameters that `axonym.fsdp` stores sharded ---


def _with_auto_axes(fn: Callable[[Sequence[Any]], Sequence[Any]], over: Sequence[Axes]) -> Any:
    """Make Explicit mesh axes, over which the first axes of the results are sharded, Auto inside of a function.

    Parameters are gathered per device, and `jax.shard_map` under `jax.vmap` gathers an axis that is mapped over, if it
    lies over Explicit mesh axes; over Auto ones, `spmd_axis_name` keeps it sharded.
    """

    def call(arrays: Sequence[Any]) -> list[Any]:
        mesh = jax.sharding.get_abstract_mesh()
        inside = mesh.update_axis_types(dict.fromkeys((a for axes in over for a in axes), AxisType.Auto))
        left = axes_of_type(inside, AxisType.Explicit)
        with jax.sharding.use_abstract_mesh(inside):
            stacked = fn([jax.sharding.reshard(x, restricted(entries_of(x), left)) for x in arrays])
        first = [entry_of(axes) for axes in over]
        return [jax.sharding.reshard(x, PartitionSpec(*first, *entries_of(x)[len(over) :])) for x in stacked]

    return call


@dataclasses.dataclass(frozen=True, slots=True)
class _BatchShards:
    """The shards of one of the axes, a batch, each of which is mapped over with parameters of its own.

    Inside, operations do not see the batch, so they do not recognize the parameters that are to be gathered for it.
    """

    level: int
    """The index of the axis."""
    over: Axes
    """The mesh axes that it is sharded over."""
    count: int
    parameters: dict[int, tuple[_Operand, jax.Array]]
    """The parameters by leaf, and each gathered, with an axis of the shards in front."""

    def split(self, operands: Sequence[_Operand], arrays: Sequence[Any]) -> tuple[list[_Operand], list[Any]]:
        """Split the axis into the shards and the rest, in the arrays and in the operands, and add the parameters."""
        found = []
        for operand, x in zip(operands, arrays, strict=True):
            at, dims = operand.dims[self.level], list(operand.dims)
            if at is not None:
                shape = (*x.shape[:at], self.count, x.shape[at] // self.count, *x.shape[at + 1 :])
                sharding = None
                if (mesh := explicit_mesh([x], sharded=False)) is not None:
                    entries = list(entries_of(x))
                    entries[at] = entry_of(self.over)
                    x = reshard(x, entries, mesh)
                    sharding = NamedSharding(mesh, PartitionSpec(*entries[: at + 1], None, *entries[at + 1 :]))
                x = jax.lax.reshape(x, shape, out_sharding=sharding)
                dims = [d if d is None or d <= at else d + 1 for d in dims]
            dims[self.level : self.level + 1] = (None, None) if at is None else (at, at + 1)
            found.append((dataclasses.replace(operand, dims=tuple(dims)), x))
        for operand, x in self.parameters.values():
            dims = [None if d is None else d + 1 for d in operand.dims]
            dims[self.level : self.level + 1] = (0, None)
            found.append((dataclasses.replace(operand, dims=tuple(dims)), x))
        return [operand for operand, _ in found], [x for _, x in found]

    def merged(self, x: jax.Array) -> jax.Array:
        """Merge the shards and the rest of the axis in a result, which has all axes in front."""
        at = self.level
        shape = (*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])
        entries, mesh = entries_of(x), explicit_mesh([x])
        sharding = NamedSharding(mesh, PartitionSpec(*entries[: at + 1], *entries[at + 2 :])) if mesh else None
        return jax.lax.reshape(x, shape, out_sharding=sharding)


def _find_shards(
    names: Names, sizes: Mapping[str, int], operands: list[_Operand], leaves: Sequence[Any], tree: Any
) -> _BatchShards | None:
    """Return the shards of an axis of which each uses parameters that are stored sharded; None if there is none.

    `leaves` are those of `tree`, which has the arguments and the function; `operands` are those of the arguments.
    """
    # A loop over stacked layers gathers one layer at a time; here, all would be gathered.
    parts = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, (LayerStack, NamedArray)))
    stacks = _mapped_axis.flatten([part for part in parts if isinstance(part, LayerStack)])[0]
    stacked = {id(x.array) for x in stacks if isinstance(x, NamedArray)}
    known = {operand.leaf: operand for operand in operands}
    nowhere = (None,) * len(names)
    for level, name in enumerate(names):
        kinds = (AxisType.Auto, AxisType.Explicit)
        kind, over = next(
            ((k, axes) for k in kinds if (axes := _mapped_axis.mapped_to("vmap", name, sizes[name], k))), (None, ())
        )
        by_layer = stacked if kind == AxisType.Auto else ()  # JAX refuses other parameters on Explicit axes
        parameters = {}
        for i, leaf in enumerate(leaves if over else ()):
            if isinstance(leaf, NamedArray) and _mapped_axis.is_array(leaf.array) and id(leaf.array) not in by_layer:
                operand = known.get(i, _Operand(i, leaf.array, leaf.names, nowhere))
                mapped = operand.dims[level] is not None
                gathered = None if mapped else gathered_for_each_shard(leaf.names, leaf.array, over)
                if gathered is not None:
                    parameters[i] = operand, gathered
        if parameters:
            return _BatchShards(level, over, shard_count(mesh_around(), over), parameters)
    return None


# --- how raw arrays are mapped ---


@dataclasses.dataclass(frozen=True, slots=True)
class _CheckedRawAxis:
    """How a raw array is mapped."""

    where: int | Callable[[Any], Any] | None
    of_argument: bool
    """Whether this was given for an argument, rather than by default."""


class _RawAxes:
    """How the raw arrays of all arguments are mapped."""

    def __init__(self, default: RawAxis, args: Sequence[RawAxis], kwargs: Mapping[str, RawAxis]):
        self.default = _checked_raw_axes("default", default, of_argument=False)
        self.args = [_checked_raw_axes(f"args[{i}]", a, of_argument=True) for i, a in enumerate(args)]
        self.kwargs = {k: _checked_raw_axes(f"kwargs[{k!r}]", a, of_argument=True) for k, a in kwargs.items()}

    def of_leaves(self, names: Names, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_CheckedRawAxis]:
        """Return how each leaf of the arguments is mapped if it is a raw array."""
        if unknown := [k for k in self.kwargs if k not in kwargs]:
            listed, hints = errors.quoted(unknown), errors.suggestions(unknown, kwargs)
            raise TypeError(
                f"vmap: `kwargs` says how to map {listed}, but the call has only {sorted(kwargs)} by keyword.{hints}"
            )
        if len(self.args) > len(args):
            raise TypeError(
                f"vmap: `args` says how to map {errors.counted(len(self.args), 'argument')}, but the call has "
                f"{len(args)} by position."
            )
        found: list[_CheckedRawAxis] = []
        for i, x in enumerate(args):
            path = f"args[{i}]"
            if i < len(self.args):
                found += _raw_axis_of_leaves(path, self.args[i], x)
            else:
                ways = f"args={(*[0] * i, None)}", f"args={(*[0] * i, 0)}"
                found += self._by_default(path, x, names, ways)
        for k in sorted(kwargs):  # as JAX flattens dictionaries
            path = f"kwargs[{k!r}]"
            if k in self.kwargs:
                found += _raw_axis_of_leaves(path, self.kwargs[k], kwargs[k])
            else:
                ways = f"kwargs={{{k!r}: None}}", f"kwargs={{{k!r}: 0}}"
                found += self._by_default(path, kwargs[k], names, ways)
        return found

    def _by_default(self, path: str, argument: Any, names: Names, ways: tuple[str, str]) -> list[_CheckedRawAxis]:
        """Return the same for the leaves of one argument of which nothing was said.

        A module may be the same for every element, or stacked, as a module that `vmap` has made. Then its named arrays
        have the axis, so they say how its raw arrays are mapped.
        """
        if not (isinstance(self.default, _CheckedRawAxis) and isinstance(self.default.where, int)):
            return _raw_axis_of_leaves(path, self.default, argument)
        found: list[_CheckedRawAxis] = []
        for part in jax.tree.leaves(argument, is_leaf=lambda x: isinstance(x, NamedArray) or _is_module(x)):
            if not _is_module(part):
                found.append(self.default)
                continue
            leaves = _mapped_axis.flatten(part)[0]
            of_named = [x.names for x in leaves if isinstance(x, NamedArray)]
            how = self.default
            if any(map(_mapped_axis.is_array, leaves)):
                if not of_named:
                    axis = repr(names[0] if len(names) == 1 else names)
                    shared, stacked = (f"`axonym.vmap(f, {axis}, {way})`" for way in ways)
                    raise ValueError(
                        f"vmap: {path} is a module, {type(part).__name__}, whose arrays have no names, so it could be "
                        f"the same for every element, or stacked. Write {shared} if it is the same, and {stacked} if "
                        "its arrays are mapped over their first axis."
                    )
                if not any(n in names for own in of_named for n in own):
                    how = _CheckedRawAxis(None, of_argument=False)
            found += [how] * len(leaves)
        return found


def _checked_raw_axes(what: str, spec: RawAxis, of_argument: bool) -> Any:
    def check(where: Any) -> _CheckedRawAxis:
        if where is not None and not isinstance(where, int) and not callable(where):
            raise TypeError(
                f"vmap: `{what}` must be a position, None or a function, which say how raw arrays are mapped; got "
                f"{type(where).__name__}. Named arrays are mapped by their names."
            )
        return _CheckedRawAxis(where, of_argument)

    return jax.tree.map(check, spec, is_leaf=lambda s: s is None or callable(s))


def _raw_axis_of_leaves(path: str, spec: Any, argument: Any) -> list[_CheckedRawAxis]:
    """Expand a tree prefix of an argument to a list with an entry for each leaf."""
    found: list[_CheckedRawAxis] = []
    try:
        jax.tree.map(lambda s, part: found.extend([s] * len(_mapped_axis.flatten(part)[0])), spec, argument)
    except ValueError:
        raise ValueError(
            f"vmap: the value given for {path} is not a tree prefix of it: {jax.tree.structure(spec)}, while the "
            f"argument is {_mapped_axis.flatten(argument)[1]}."
        ) from None
    return found


def _is_module(x: Any) -> bool:
    equinox = sys.modules.get("equinox")  # which is loaded if there are modules
    return equinox is not None and isinstance(x, equinox.Module)


# --- results ---


def _with_axes(slot: Slot, names: Names) -> Slot:
    """Return the spec slot of a leaf of the result, with the axes among its names."""
    if isinstance(slot, tuple):
        return _mapped_axis.stacked("vmap", wrap(None, slot), *names).names
    if isinstance(slot, StaticLeaf) and isinstance(slot.value, NamedArray):  # a placeholder for an array
        return StaticLeaf(_mapped_axis.stacked("vmap", slot.value, *names))
    return slot
