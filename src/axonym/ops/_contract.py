"""The engine under `dot` and `einsum`: a contraction of any number of operands, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from .. import _kernels, _mesh
from .._mesh import Names
from ..axis import AxisSelection

DotGeneral = Callable[..., jax.Array]
"""A replacement for `jax.lax.dot_general`, such as a quantised one."""


class Plan(NamedTuple):
    """What to contract, as static data: axes that are not in `out_names` are summed over."""

    what: str
    in_names: tuple[Names, ...]
    out_names: Names
    precision: Any = None
    preferred_element_type: Any = None


class _Term(NamedTuple):
    names: Names
    array: jax.Array


def make_contraction_kernel(plan: Plan, selection: AxisSelection | None = None) -> _kernels.Kernel:
    """A kernel for a contraction with `jax.lax.dot_general`."""

    def positional(*arrays):
        return contract(plan, arrays, jax.lax.dot_general)

    return _kernels.make_kernel(
        plan.what, positional, plan.in_names, plan.out_names, mesh_aware=True, selection=selection
    )


def contract_with(plan: Plan, arrays: Sequence[jax.Array], dot_general: DotGeneral) -> jax.Array:
    """A contraction with another `dot_general`. It may carry arrays of its own, so nothing about it is cached."""
    _kernels.check_operands(plan.what, plan.in_names, arrays)
    return _mesh.run(
        plan.what, lambda *xs: contract(plan, xs, dot_general), plan.in_names, plan.out_names, arrays
    )


def contract(plan: Plan, arrays: Sequence[jax.Array], dot_general: DotGeneral) -> jax.Array:
    """Multiply the operands and sum over every axis that is not in the output, two operands at a time."""
    dtype = jnp.result_type(*arrays)
    terms = [_Term(n, a.astype(dtype)) for n, a in zip(plan.in_names, arrays, strict=True)]
    for first, second in _order(plan, terms):
        left, right = terms[first], terms[second]
        terms = [t for i, t in enumerate(terms) if i not in (first, second)]
        needed = set(plan.out_names).union(*(t.names for t in terms))
        # The last product should come out in the layout of the result; those before it in any.
        terms.append(_multiply(plan, left, right, needed, None if terms else plan.out_names, dot_general))
    (last,) = terms
    last = _sum_out(plan, last, set(plan.out_names))
    return _kernels.transpose_to(last.array, last.names, plan.out_names)


def _order(plan: Plan, terms: Sequence[_Term]) -> list[tuple[int, int]]:
    """Which two operands to multiply at each step; each product goes to the end of the list."""
    if len(terms) <= 2:
        return [(0, 1)] * (len(terms) - 1)
    letters = {n: chr(ord("a") + i) for i, n in enumerate(dict.fromkeys(n for t in terms for n in t.names))}
    if len(letters) > 26:  # einsum_path has no more letters of one case; the order only affects speed
        return [(0, 1)] + [(0, len(terms) - k - 1) for k in range(1, len(terms) - 1)]
    spelled = ["".join(letters[n] for n in names) for names in (*(t.names for t in terms), plan.out_names)]
    equation = f"{','.join(spelled[:-1])}->{spelled[-1]}"
    shapes = [jax.ShapeDtypeStruct(t.array.shape, t.array.dtype) for t in terms]
    path, _ = jnp.einsum_path(equation, *shapes, optimize="optimal")
    return [(min(step), max(step)) for step in path if len(step) == 2]


def _multiply(
    plan: Plan, left: _Term, right: _Term, needed: set[str], target: Names | None, dot_general: DotGeneral
) -> _Term:
    left = _sum_out(plan, left, needed.union(right.names))
    right = _sum_out(plan, right, needed.union(left.names))
    shared = [n for n in left.names if n in right.names]
    batch = tuple(n for n in (target or left.names) if n in shared and n in needed)
    summed = tuple(n for n in shared if n not in needed)
    names = (*batch, *_free(left, shared), *_free(right, shared))
    swapped = (*batch, *_free(right, shared), *_free(left, shared))
    if target == swapped != names:  # the other order gives the layout that is wanted, and saves a transpose
        left, right, names = right, left, swapped
    mesh = _mesh.explicit_mesh([left.array, right.array])
    if not summed and mesh is None:
        names = target or names
        product = _kernels.align(left.array, left.names, names) * _kernels.align(right.array, right.names, names)
        wanted = plan.preferred_element_type
        return _Term(names, product if wanted is None else product.astype(wanted))
    dimensions = (
        (_positions(left, summed), _positions(right, summed)),
        (_positions(left, batch), _positions(right, batch)),
    )
    options: dict[str, Any] = {
        "precision": plan.precision,
        "preferred_element_type": plan.preferred_element_type,
    }
    if mesh is not None and dot_general is jax.lax.dot_general:
        # Where a summed axis is split, JAX asks how the result should be: as its axes are in the operands.
        sizes = dict(zip((*left.names, *right.names), (*left.array.shape, *right.array.shape), strict=True))
        operands = [(t.names, _mesh.entries_of(t.array)) for t in (left, right)]
        spec = _mesh.place(plan.what, names, [sizes[n] for n in names], operands, mesh)
        options["out_sharding"] = NamedSharding(mesh, spec)
    product = dot_general(left.array, right.array, dimensions, **options)
    layout = names if target is None else target
    return _Term(layout, _kernels.transpose_to(product, names, layout))


def _sum_out(plan: Plan, term: _Term, needed: set[str]) -> _Term:
    """Sum over the axes that nothing else needs."""
    gone = tuple(n for n in term.names if n not in needed)
    if not gone:
        return term
    array = jnp.sum(term.array, axis=_positions(term, gone), dtype=plan.preferred_element_type)
    return _Term(tuple(n for n in term.names if n in needed), array)


def _free(term: _Term, shared: Sequence[str]) -> Names:
    return tuple(n for n in term.names if n not in shared)


def _positions(term: _Term, names: Sequence[str]) -> tuple[int, ...]:
    return tuple(term.names.index(n) for n in names)
