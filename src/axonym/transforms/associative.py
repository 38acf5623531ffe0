"""`associative_scan`: all prefixes of an associative operation, in parallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from .. import _errors
from .._function_cache import Functions, HeldArrays, WithArrays
from .._jax_versions import INLINE
from .._mesh_axes import entries_of, reshard
from .._tree_spec import StaticLeaf, TreeSpec, flatten
from ..axis import Axis, AxisSelector
from . import _mapped_axis
from ._carry import Words, conform

T = TypeVar("T")

_RESULT = Words(
    "result",
    "must be",
    "is",
    "is missing",
    "should not be there",
    "Place it as the operands of the function are, with `axonym.shard(..., {before})`.",
)


def associative_scan(fn: Callable[[T, T], T], elems: T, axis: AxisSelector, *, reverse: bool = False) -> T:
    """Combine the elements along an axis, keeping every intermediate result: `jax.lax.associative_scan` by name.

    The function is called on many pairs of elements at once: the axis stays in what it sees, with varying sizes. It may
    return its result in any order of axes. If the axis is sharded over Explicit mesh axes, it is gathered first,
    and the result is sharded again.

    Arguments:
        fn: an associative function of two trees like `elems`.
        elems: a tree of named arrays that all have the axis; raw arrays are taken along their first axis.
        axis: the axis.
        reverse: go from the last element to the first.

    >>> axn.associative_scan(axn.maximum, axn.named([1, 3, 2, 5], "x"), "x")
    NamedArray(int32[x=4], [1 3 3 5])
    """
    arrays, spec = flatten(elems)
    name = _mapped_axis.one_name("associative_scan", axis)
    missing = [
        i for i, names in enumerate(spec.names) if (name not in names if names is not None else not arrays[i].ndim)
    ]
    if missing or not arrays:
        raise ValueError(_without_axis(name, spec, missing))
    positions = tuple(0 if names is None else names.index(name) for names in spec.names)
    sizes = [x.shape[p] for x, p in zip(arrays, positions, strict=True)]
    given = [("the axis given", axis.size)] if isinstance(axis, Axis) else []
    if any(s != sizes[0] for s in [*sizes, *(size for _, size in given)]):
        places = [*zip(_array_paths(spec), sizes, strict=True), *given]
        raise ValueError(_errors.size_mismatch("associative_scan", name, places))
    functions = Functions(fn)
    run = functions.compiled(_build, _AssociativePlan(name, positions, reverse), spec)
    return spec.unflatten(run(functions.arrays, arrays))


class _AssociativePlan(NamedTuple):
    name: str
    positions: tuple[int, ...]
    reverse: bool


def _build(functions: WithArrays, plan: _AssociativePlan, spec: TreeSpec) -> Callable[..., Any]:
    def run(held: HeldArrays, arrays: list[Any]) -> list[Any]:
        (fn,) = functions(held)
        # JAX takes all arrays along one position. Where theirs differ, the axis goes to the front.
        together = len(set(plan.positions)) == 1
        position = plan.positions[0] if together else 0
        inner = spec
        if not together:
            inner = inner.with_names(
                n if n is None else (plan.name, *_mapped_axis.without(n, plan.name)) for n in spec.names
            )
        xs = [_mapped_axis.whole_along(x, p) for x, p in zip(arrays, plan.positions, strict=True)]
        xs = [jnp.moveaxis(x, p, position) for x, p in zip(xs, plan.positions, strict=True)]

        def combine(a: list[Any], b: list[Any]) -> list[Any]:
            types = [jax.typeof(x) for x in a]
            return conform("associative_scan", _RESULT, inner, types, fn(inner.unflatten(a), inner.unflatten(b)))

        results = jax.lax.associative_scan(combine, xs, plan.reverse, position)
        results = [jnp.moveaxis(y, position, p) for y, p in zip(results, plan.positions, strict=True)]
        return [reshard(y, entries_of(x), jax.typeof(x).sharding.mesh) for y, x in zip(results, arrays, strict=True)]

    run.__name__ = run.__qualname__ = "associative_scan"
    return jax.jit(run, inline=INLINE)


def _array_paths(spec: TreeSpec) -> list[str]:
    return [f"elems{p}" for p, slot in zip(spec.paths(), spec.slots, strict=True) if not isinstance(slot, StaticLeaf)]


def _without_axis(name: str, spec: TreeSpec, missing: list[int]) -> str:
    if not spec.names:
        return "associative_scan: there is no array to scan."
    paths, names = _array_paths(spec), spec.names
    listed = ", ".join(f"{paths[i]} {_errors.describe_axes(names[i] or ())}" for i in missing)
    known = [n for i in missing for n in names[i] or ()]
    return f"associative_scan: no axis {name!r} in {listed}.{_errors.suggestion(name, known)}"
