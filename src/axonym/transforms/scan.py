"""`scan`, `fold`, `map` and `associative_scan`: loops over a named axis.

The first three are `jax.lax.scan` over the slices of the arguments that have the axis. The body sees the arguments
without it; the carry goes from step to step; the body's other results are stacked along the axis.

On Explicit mesh axes a loop visits every slice on every device, so an argument that is sharded over the looped axis is
gathered along it first. The stacked outputs are sharded again as the arguments were: an output axis keeps the sharding
that it has in the operands. On Auto mesh axes both are left to the partitioner.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from ..axis import Axis, AxisSelector, Names, names_without
from ..core import errors
from ..core.function_cache import Functions, HeldArrays, WithArrays, jitted_as
from ..core.jax_versions import stackable
from ..core.tree_spec import ARRAYS_AND_NUMBERS, FlatTree, StaticLeaf, TreeSpec, flatten_arrays
from ..distribution import output_sharding
from ..distribution.mesh_axes import check_mapped, entries_of, explicit_mesh, reshard
from ..distribution.padded_array import is_padded, refuse_padded
from ..named_array import wrap
from ..ops import _prefixes
from ..ops._operands import private
from . import _mapped_axis
from ._carry import CARRY, MismatchMessages, conform_to_spec, run_settled
from ._function_types import ToSame, ToSameAndOther
from .rematerialization import ScanCheckpointPolicy, ScanCheckpointSpec, checkpointed_scan, policy_of

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Carry = TypeVar("Carry")

ScannedSpec: TypeAlias = bool | Callable[[Any], bool]
"""Which of the arrays that could be scanned are: all, none, or the ones for which a function returns True."""


@errors.say_how_to_call
def scan(
    fn: Callable[Concatenate[Carry, P], tuple[Carry, R]],
    axis: AxisSelector,
    *,
    remat: ScanCheckpointSpec = False,
    reverse: bool = False,
    unroll: int | bool = 1,
    is_scanned: ScannedSpec = True,
) -> ToSameAndOther[Carry, P, R]:
    """Loop over an axis with a carry, and stack what each step returns: `jax.lax.scan` by name.

    The result is a function of an initial carry and of any arguments. Named arrays that have the axis are scanned, and
    the others are the same in every step. Raw arrays have no names: their first axis is scanned. Scalars, and values
    that are not arrays, are the same in every step. The outputs of the body get the axis in front.

    The carry keeps its axes, sizes, dtypes and sharding from step to step; only the order of axes may change, since it
    is layout. As with `jax.lax.scan`, a body is not traced again for arguments of the same spec, so it must not depend
    on anything that changes between calls. It may be a module, a method of one, or a `functools.partial`: the arrays
    that these hold can change.

    Values that are not arrays, including Python numbers, are part of the program, so that a body can branch on them.
    Each new value compiles again: pass a number that changes as an array, `jnp.float32(rate)`.

    Arguments:
        fn: the body, from a carry and the arguments of one step to the next carry and an output.
        axis: the axis. If no scanned array has it, it needs a size.
        remat: the values to keep for the backward pass: a `ScanCheckpointPolicy`, or a word for one. True computes each
            step again from its carry; False keeps everything.
        reverse: go from the last step to the first. Outputs stand where their inputs stood.
        unroll: how many steps to put into one turn of the loop; True for all.
        is_scanned: which of the arrays that could be scanned are: all, none, or the ones for which a function of the
            named or raw array returns True.

    >>> Time, Embed = axn.make_axes(time=3, embed=2)
    >>> decay = axn.scan(lambda h, x: (0.5 * h + x, h.sum()), Time)
    >>> final, sums = decay(axn.zeros(Embed), axn.ones((Time, Embed)))
    >>> final, sums
    (NamedArray(float32[embed=2], [1.75 1.75]), NamedArray(float32[time=3], [0. 2. 3.]))
    """
    run = _runner_of_loop("scan", fn, axis, remat, reverse, unroll, is_scanned)

    def scanned(init: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return run(init, args, kwargs)

    return functools.update_wrapper(scanned, fn, updated=())


def fold(
    fn: Callable[Concatenate[Carry, P], Carry],
    axis: AxisSelector,
    *,
    remat: ScanCheckpointSpec = False,
    reverse: bool = False,
    unroll: int | bool = 1,
    is_scanned: ScannedSpec = True,
) -> ToSame[Carry, P]:
    """Loop over an axis with a carry, and return the last one: `scan` without outputs, with the same options.

    >>> Time, Embed = axn.make_axes(time=3, embed=2)
    >>> axn.fold(lambda h, x: 0.5 * h + x, Time)(axn.zeros(Embed), axn.ones((Time, Embed)))
    NamedArray(float32[embed=2], [1.75 1.75])
    """
    run = _runner_of_loop("fold", fn, axis, remat, reverse, unroll, is_scanned)

    def folded(init: Any, *args: Any, **kwargs: Any) -> Any:
        return run(init, args, kwargs)[0]

    return functools.update_wrapper(folded, fn, updated=())


def map(
    fn: Callable[P, R],
    axis: AxisSelector,
    *,
    remat: ScanCheckpointSpec = False,
    reverse: bool = False,
    unroll: int | bool = 1,
    is_mapped: ScannedSpec = True,
) -> Callable[P, R]:
    """Apply a function to one slice after the other: `scan` without a carry, with the same options.

    It computes what `vmap` does, in a loop: slower, with the memory of one step. A number that the function returns is
    stacked, as in `jax.lax.map`, while `vmap` passes it on unchanged.

    >>> axn.map(lambda x: x * x, "x")(axn.arange(axn.Axis("x", 3)))
    NamedArray(int32[x=3], [0 1 4])
    """
    run = _runner_of_loop("map", fn, axis, remat, reverse, unroll, is_mapped)

    def mapped(*args: Any, **kwargs: Any) -> Any:
        return run(None, args, kwargs)[1]

    return functools.update_wrapper(mapped, fn, updated=())


@dataclasses.dataclass(frozen=True, slots=True)
class _Loop:
    """The part of a loop that is known before it is called."""

    what: str
    name: str
    """The name of the axis."""
    policy: ScanCheckpointPolicy
    reverse: bool
    unroll: int | bool
    key: StaticLeaf = dataclasses.field(init=False)
    """Distinguishes True from 1, which mean different things as numbers of steps or groups."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", StaticLeaf((self.policy, self.unroll)))
        if not isinstance(self.unroll, int) or (self.unroll is not False and self.unroll < 1):
            raise ValueError(f"{self.what}: `unroll` is a number of steps, at least 1, or True; got {self.unroll}.")

    def step(self, fn: Callable[..., Any], carry: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the next carry, and an output."""
        if self.what == "map":
            return None, fn(*args, **kwargs)
        result = fn(carry, *args, **kwargs)
        if self.what == "fold":
            return result, None
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(
                "scan: the body must return a pair, the next carry and an output (None for nothing), not "
                + (f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}")
                + ". Use `fold` for a body that returns the carry alone."
            )
        return result


@dataclasses.dataclass(frozen=True, slots=True)
class _LoopPlan:
    """The static options of a compiled loop, besides the specs of its carry and its arguments."""

    loop: _Loop
    length: int
    unroll: int
    positions: tuple[int | None, ...]
    """The position of the axis in each array of the arguments; None if the array is the same in every step."""


def _runner_of_loop(
    what: str,
    fn: Callable[..., Any],
    axis: AxisSelector,
    remat: ScanCheckpointSpec,
    reverse: bool,
    unroll: int | bool,
    is_scanned: ScannedSpec,
) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """Return a function from a carry and arguments to the last carry and the outputs."""
    loop = _Loop(what, _mapped_axis.one_name(what, axis), policy_of(remat), reverse, unroll)
    functions_of = Functions(fn).now

    def run(init: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        functions = functions_of()
        carry, carry_spec = flatten_arrays(init, ARRAYS_AND_NUMBERS)
        arrays, spec = flatten_arrays((args, kwargs))
        choose = None if is_scanned is True else is_scanned if callable(is_scanned) else lambda _: False
        positions: list[int | None] = []
        for x, names in zip(arrays, spec.names, strict=True):
            has_axis = x.ndim > 0 if names is None else loop.name in names
            if not has_axis or (choose is not None and not choose(x if names is None else wrap(x, names))):
                positions.append(None)
            else:
                positions.append(0 if names is None else names.index(loop.name))
        sizes = [x.shape[p] for x, p in zip(arrays, positions, strict=True) if p is not None]
        if isinstance(axis, Axis):
            sizes.append(axis.size)
        if not sizes:
            refuse_padded(jax.tree.leaves((args, kwargs), is_leaf=is_padded))
            known = list(dict.fromkeys(n for names in spec.names for n in names or ()))
            hint = "" if loop.name in known else errors.suggestion(loop.name, known)
            raise ValueError(
                f"{what}: no scanned array has axis {loop.name!r}; the arguments have {errors.describe_axes(known)}."
                f"{hint} To loop without scanning anything, pass an Axis with a size."
            )
        if any(s != sizes[0] for s in sizes):
            raise ValueError(_sizes_differ(loop, axis, spec, arrays, positions))
        steps = max(1, sizes[0] if loop.unroll is True else loop.unroll)
        compiled = functions.compiled(_build_loop, _LoopPlan(loop, sizes[0], steps, tuple(positions)), carry_spec, spec)
        carry, outputs = compiled(functions.arrays, carry, arrays)
        return carry_spec.unflatten(carry), outputs.tree()

    return run


# --- the compiled loop ---


def _build_loop(
    functions: WithArrays, plan: _LoopPlan, carry_spec: TreeSpec, arguments: TreeSpec
) -> Callable[..., Any]:
    """Compile the loop as one jitted function from raw arrays to raw arrays."""
    loop, name = plan.loop, plan.loop.name
    in_step = arguments.with_names(
        names if names is None or p is None else names_without(names, name)
        for names, p in zip(arguments.names, plan.positions, strict=True)
    )

    def run(held: HeldArrays, carry: list[Any], arrays: list[Any]) -> tuple[list[Any], FlatTree]:
        check_mapped(loop.what, (name,))
        (fn,) = functions(held)
        scanned = [(i, p) for i, p in enumerate(plan.positions) if p is not None]
        # A loop slices one step after another, so each device needs all steps of the array.
        xs = [jnp.moveaxis(_mapped_axis.gathered_along(arrays[i], p), p, 0) for i, p in scanned]
        returned: list[TreeSpec] = []

        def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            # Arrays that are the same in every step are constants of the loop, and not copied into its inputs.
            of_step = list(arrays)
            for (i, _), x in zip(scanned, slices, strict=True):
                of_step[i] = x
            args, kwargs = in_step.unflatten(of_step)
            new, output = loop.step(fn, carry_spec.unflatten(carry), args, kwargs)
            outputs, spec = flatten_arrays(output, ARRAYS_AND_NUMBERS)
            returned[:] = [spec.weak(carry_spec, arguments)]  # a step can be traced again, with stronger types
            types = [jax.typeof(c) for c in carry]
            return conform_to_spec(loop.what, CARRY, carry_spec, types, new, settles=True), [
                stackable(y) for y in outputs
            ]

        def looped(carry: list[Any]) -> Any:
            return checkpointed_scan(
                loop.policy,
                f"{loop.what}({name})",
                step,
                carry,
                xs,
                length=plan.length,
                reverse=loop.reverse,
                unroll=plan.unroll,
            )

        final, ys = run_settled(looped, loop.what, carry)
        (spec,) = returned
        stacked = spec.with_names(
            names if names is None else _mapped_axis.stacked(loop.what, wrap(None, names), name).names
            for names in spec.names
        )
        sources = [(arrays[i], p) for i, p in scanned]
        ys = [_sharded_again(loop.what, name, y, n, sources) for y, n in zip(ys, stacked.names, strict=True)]
        return final, FlatTree(ys, stacked)

    return jitted_as(loop.what, run)


def _sharded_again(
    what: str, name: str, y: jax.Array, names: Names | None, scanned: Sequence[tuple[jax.Array, int]]
) -> jax.Array:
    """Shard an output along the axis like the scanned arrays."""
    mesh = explicit_mesh([y, *(x for x, _ in scanned)])
    if mesh is None:
        return y
    # A raw output has no names: private ones, which no mapping knows, keep the sharding that the body gave it.
    rest = names[1:] if names is not None else private("an output", tuple(str(i) for i in range(1, y.ndim)))
    entries = entries_of(y)
    operands = [((name,), (entries_of(x)[p],)) for x, p in scanned]
    spec = output_sharding.infer_output_spec(what, (name, *rest), y.shape, [*operands, (rest, entries[1:])], mesh)
    return reshard(y, spec, mesh)


# --- messages ---


def _sizes_differ(
    loop: _Loop, axis: AxisSelector, spec: TreeSpec, arrays: Sequence[Any], positions: Sequence[int | None]
) -> str:
    paths = zip(_mapped_axis.argument_paths(*spec.unflatten(arrays)), spec.slots, strict=True)
    of_arrays = [path for path, slot in paths if not isinstance(slot, StaticLeaf)]
    found = zip(of_arrays, arrays, spec.names, positions, strict=True)
    scanned = [(path, x.shape[p], names) for path, x, names, p in found if p is not None]
    places = [(path, size) for path, size, _ in scanned]
    places += [("the axis given", axis.size)] if isinstance(axis, Axis) else []
    text = errors.size_mismatch(loop.what, loop.name, places)
    raw = [path for path, _, names in scanned if names is None]
    if not raw:
        return text
    option = "is_mapped" if loop.what == "map" else "is_scanned"
    return (
        f"{text} Raw arrays are taken along their first axis: {', '.join(raw)}. Name their axes, or leave them out "
        f"with `{option}`."
    )


# --- parallel prefixes of an associative operation ---

_RESULT = MismatchMessages(
    "result",
    "must be",
    "is",
    "is missing",
    "should not be there",
    "Place it as the operands of the function are, with `axonym.shard(..., {before})`.",
)


def associative_scan(fn: Callable[[T, T], T], elems: T, axis: AxisSelector, *, reverse: bool = False) -> T:
    """Combine the elements along an axis, keeping every intermediate result: `jax.lax.associative_scan` by name.

    The function is called on many pairs of elements at once: its arguments keep the axis, with varying sizes. It may
    return its result in any order of axes. If the axis is sharded over Explicit mesh axes, it is gathered first,
    and the result is sharded again.

    Arguments:
        fn: an associative function of two trees like `elems`.
        elems: a tree of named arrays that all have the axis; raw arrays are taken along their first axis.
        reverse: go from the last element to the first.

    >>> axn.associative_scan(axn.maximum, axn.named([1, 3, 2, 5], "x"), "x")
    NamedArray(int32[x=4], [1 3 3 5])
    """
    arrays, spec = flatten_arrays(elems)
    name = _mapped_axis.one_name("associative_scan", axis)
    missing = [
        i for i, names in enumerate(spec.names) if (name not in names if names is not None else not arrays[i].ndim)
    ]
    if missing or not arrays:
        if not arrays:
            raise ValueError("associative_scan: there is no array to scan.")
        paths = _array_paths(spec)
        listed = ", ".join(f"{paths[i]} {errors.describe_axes(spec.names[i] or ())}" for i in missing)
        hint = errors.suggestion(name, [n for i in missing for n in spec.names[i] or ()])
        raise ValueError(f"associative_scan: no axis {name!r} in {listed}.{hint}")
    positions = tuple(0 if names is None else names.index(name) for names in spec.names)
    sizes = [x.shape[p] for x, p in zip(arrays, positions, strict=True)]
    given = [("the axis given", axis.size)] if isinstance(axis, Axis) else []
    if any(s != sizes[0] for s in [*sizes, *(size for _, size in given)]):
        places = [*zip(_array_paths(spec), sizes, strict=True), *given]
        raise ValueError(errors.size_mismatch("associative_scan", name, places))
    functions = Functions(fn)
    run = functions.compiled(_build_associative, (name, positions, reverse), spec)
    return spec.unflatten(run(functions.arrays, arrays))


def _build_associative(
    functions: WithArrays, plan: tuple[str, tuple[int, ...], bool], spec: TreeSpec
) -> Callable[..., Any]:
    name, positions, reverse = plan

    def run(held: HeldArrays, arrays: list[Any]) -> list[Any]:
        (fn,) = functions(held)
        # JAX scans all arrays along one position. If theirs differ, the axis moves to the front.
        together = len(set(positions)) == 1
        position = positions[0] if together else 0
        inner = spec
        if not together:
            inner = inner.with_names(n if n is None else (name, *names_without(n, name)) for n in spec.names)
        xs = [_mapped_axis.gathered_along(x, p) for x, p in zip(arrays, positions, strict=True)]
        xs = [jnp.moveaxis(x, p, position) for x, p in zip(xs, positions, strict=True)]

        def combine(a: list[Any], b: list[Any]) -> list[Any]:
            types = [jax.typeof(x) for x in a]
            return conform_to_spec(
                "associative_scan", _RESULT, inner, types, fn(inner.unflatten(a), inner.unflatten(b))
            )

        xs = [jnp.flip(x, position) for x in xs] if reverse else xs
        results = _prefixes.associative_scan(combine, xs, position)
        if xs[0].shape[position] > 1:  # as in JAX
            results = [jax.lax.convert_element_type(y, y.dtype) if jax.typeof(y).weak_type else y for y in results]
        results = [jnp.flip(y, position) for y in results] if reverse else results
        results = [jnp.moveaxis(y, position, p) for y, p in zip(results, positions, strict=True)]
        return [reshard(y, entries_of(x), jax.typeof(x).sharding.mesh) for y, x in zip(results, arrays, strict=True)]

    return jitted_as("associative_scan", run)


def _array_paths(spec: TreeSpec) -> list[str]:
    return [f"elems{p}" for p, slot in zip(spec.paths(), spec.slots, strict=True) if not isinstance(slot, StaticLeaf)]
