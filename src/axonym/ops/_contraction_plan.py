"""Plan and run contractions of any number of operands by name, for `dot` and `einsum`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding
from jax.typing import DTypeLike

from ..axis import Axis, Names
from ..distribution import fsdp_ops, output_sharding
from ..distribution.mesh_axes import entries_of, explicit_mesh
from . import _kernels
from ._operands import private

DotGeneral = Callable[..., jax.Array]
"""A replacement for `jax.lax.dot_general`, such as a quantized one. It may be a pytree that holds arrays."""


class Plan(NamedTuple):
    """A contraction as static data: axes that are not in `out_names` are summed over.

    `sized` holds the axes that the user gave with a size; their sizes are checked.
    """

    what: str
    in_names: tuple[Names, ...]
    out_names: Names
    precision: jax.lax.PrecisionLike = None
    preferred_element_type: DTypeLike | None = None
    sized: tuple[Axis, ...] = ()


class _OperandTerm(NamedTuple):
    names: Names
    array: jax.Array


def contract_with(plan: Plan, arrays: Sequence[jax.Array], dot_general: DotGeneral) -> jax.Array:
    """Contract with a replacement for `dot_general`. It may hold arrays, so it is not cached."""
    _kernels.check_operands(plan.what, plan.in_names, arrays)
    _kernels.check_selection(plan.what, plan.in_names, arrays, plan.sized)
    if explicit_mesh(arrays) is None:
        return contract(plan, arrays, dot_general)
    held, held_names, holding = _held_arrays(dot_general)

    def positional(*operands):
        return contract(plan, operands[: len(arrays)], holding(operands[len(arrays) :]))

    try:
        return output_sharding.call_with_output_sharding(
            plan.what,
            positional,
            [*plan.in_names, *held_names],
            plan.out_names,
            [*arrays, *held],
            summed=tuple(dict.fromkeys(n for names in plan.in_names for n in names if n not in plan.out_names)),
        )
    except Exception as e:
        if not held:
            e.add_note(_CLOSED_OVER.format(what=plan.what))
        raise


def _held_arrays(
    dot_general: DotGeneral,
) -> tuple[list[jax.Array], list[Names], Callable[[Sequence[jax.Array]], DotGeneral]]:
    """Return the arrays that a function holds, names of their axes, and a way to make it hold others.

    Where the function is handed to the partitioner or to `shard_map`, they must be operands like all others.
    """
    parts, tree = jax.tree.flatten(dot_general)
    held = [i for i, part in enumerate(parts) if isinstance(part, jax.Array)]
    names = [private(f"array {i} of dot_general", tuple(map(str, range(parts[i].ndim)))) for i in held]

    def holding(arrays: Sequence[jax.Array]) -> DotGeneral:
        rebuilt = dict(enumerate(parts)) | dict(zip(held, arrays, strict=True))
        return jax.tree.unflatten(tree, list(rebuilt.values()))

    return [parts[i] for i in held], names, holding


_CLOSED_OVER = (
    "{what}: on Explicit mesh axes, a dot_general cannot close over arrays. If yours does, make it a pytree that holds "
    "them: `jax.tree_util.Partial(fn, array)`, or a module."
)


def contract(plan: Plan, arrays: Sequence[jax.Array], dot_general: DotGeneral) -> jax.Array:
    """Multiply the operands and sum over every axis that is not in the output, two operands at a time."""
    dtype = jnp.result_type(*arrays)
    # An array that has the dtype keeps its weak type.
    arrays = [a if a.dtype == dtype else a.astype(dtype) for a in arrays]
    terms = list(map(_OperandTerm, plan.in_names, arrays))
    for first, second in _order_of_products(plan, terms):
        left, right = terms[first], terms[second]
        terms = [t for i, t in enumerate(terms) if i not in (first, second)]
        needed = set(plan.out_names).union(*(t.names for t in terms))
        # Only the last product must have the layout of the result.
        terms.append(_multiply_terms(plan, left, right, needed, None if terms else plan.out_names, dot_general))
    (last,) = terms
    last = _sum_out(plan, last, set(plan.out_names))
    result = _kernels.transpose_to(last.array, last.names, plan.out_names)
    wanted = plan.preferred_element_type
    return result if wanted is None else result.astype(wanted)


def _order_of_products(plan: Plan, terms: Sequence[_OperandTerm]) -> list[tuple[int, int]]:
    """Return the two operands to multiply at each step; each product is appended to the list."""
    if len(terms) <= 2:
        return [(0, 1)] * (len(terms) - 1)
    letters = {n: chr(ord("a") + i) for i, n in enumerate(dict.fromkeys(n for t in terms for n in t.names))}
    if len(letters) > 26:  # einsum_path has 26 letters; the order only affects speed
        return [(0, 1)] + [(0, len(terms) - k - 1) for k in range(1, len(terms) - 1)]
    spelled = ["".join(letters[n] for n in names) for names in (*(t.names for t in terms), plan.out_names)]
    equation = f"{','.join(spelled[:-1])}->{spelled[-1]}"
    shapes: list[Any] = [jax.ShapeDtypeStruct(t.array.shape, t.array.dtype) for t in terms]
    path, _ = jnp.einsum_path(equation, *shapes, optimize="optimal")
    return [(min(step), max(step)) for step in path if len(step) == 2]


def _multiply_terms(
    plan: Plan, left: _OperandTerm, right: _OperandTerm, needed: set[str], target: Names | None, dot_general: DotGeneral
) -> _OperandTerm:
    """Multiply two terms and sum over axes that no other term needs; `target` is the layout of the result, if given."""
    # First: otherwise the product would have these axes, too, only to be summed over them.
    left = _sum_out(plan, left, needed.union(right.names))
    right = _sum_out(plan, right, needed.union(left.names))
    shared = [n for n in left.names if n in right.names]
    batch = tuple(n for n in (target or left.names) if n in shared and n in needed)
    summed = tuple(n for n in shared if n not in needed)
    names = (*batch, *_free_names(left, shared), *_free_names(right, shared))
    swapped = (*batch, *_free_names(right, shared), *_free_names(left, shared))
    if target == swapped != names:  # the other order gives the target layout, and saves a transpose
        left, right, names = right, left, swapped
    layout = names if target is None else target
    dimensions = (
        (_positions_of(left.names, summed), _positions_of(right.names, summed)),
        (_positions_of(left.names, batch), _positions_of(right.names, batch)),
    )

    def multiply(x: jax.Array, y: jax.Array, dot_general: DotGeneral, mesh: AbstractMesh | None = None) -> jax.Array:
        """Multiply two arrays; `mesh` is the mesh of the operands if it has Explicit axes."""
        wanted = plan.preferred_element_type
        if not summed and mesh is None:
            x, y = _kernels.align(x, left.names, layout), _kernels.align(y, right.names, layout)
            if wanted is None:
                return x * y
            wide = jnp.result_type(x, y, wanted)
            return (x.astype(wide) * y.astype(wide)).astype(wanted)
        options: dict[str, Any] = {"precision": plan.precision, "preferred_element_type": wanted}
        if mesh is not None and dot_general is jax.lax.dot_general:
            # If a summed axis is sharded, JAX asks for the sharding of the result.
            sizes = dict(zip((*left.names, *right.names), (*x.shape, *y.shape), strict=True))
            operands = [(left.names, entries_of(x)), (right.names, entries_of(y))]
            spec = output_sharding.infer_output_spec(
                plan.what, names, [sizes[n] for n in names], operands, mesh, summed=summed
            )
            options["out_sharding"] = NamedSharding(mesh, spec)
        return _kernels.transpose_to(dot_general(x, y, dimensions, **options), names, layout)

    held, held_names, holding = _held_arrays(dot_general)
    arrays = (left.array, right.array)
    product = fsdp_ops.run_gathering_parameters(
        lambda x, y, *held: multiply(x, y, holding(held)),
        (left.names, right.names, *held_names),
        layout,
        *arrays,
        *held,
        summed=summed,
    )
    if product is None:
        product = multiply(*arrays, dot_general, explicit_mesh(arrays))
    return _OperandTerm(layout, product)


def _sum_out(plan: Plan, term: _OperandTerm, needed: set[str]) -> _OperandTerm:
    """Sum over the axes of one operand that no other term needs."""
    gone = tuple(n for n in term.names if n not in needed)
    if not gone:
        return term
    # Sum in the dtype of a product, so that it makes no difference which operands have the axis.
    array = jnp.sum(
        term.array, axis=_positions_of(term.names, gone), dtype=plan.preferred_element_type or term.array.dtype
    )
    return _OperandTerm(tuple(n for n in term.names if n in needed), array)


def _free_names(term: _OperandTerm, shared: Sequence[str]) -> Names:
    return tuple(n for n in term.names if n not in shared)


def _positions_of(layout: Names, names: Sequence[str]) -> tuple[int, ...]:
    return tuple(layout.index(n) for n in names)
