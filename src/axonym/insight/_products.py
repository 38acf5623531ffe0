"""Read the products of a traced step: the flops that they need, and the arguments that they use."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from ..core.jax_versions import axes_made_manual
from ..core.source_lines import Frame, Source
from . import _scopes
from ._named_events import short_dtype
from ._traced_step import CONSTRAINTS, SAME, StepProgram, TracedArray, TracedOperation, origin


class OneHot(NamedTuple):
    """An operand of a product that tells an index from others, as `one_hot` makes."""

    before: int
    """The number of its rows that are summed."""
    after: int
    """The number of rows in the result."""
    looks_up: bool
    """True if the sum is over the numbers that the index may have."""


class Product(NamedTuple):
    """A product or a convolution."""

    scope: str
    frames: tuple[Frame, ...]
    flops: int | None
    """Its flops on all devices together, if none is repeated; None if they depend on values."""
    arguments: tuple[int | None, ...]
    """For each operand, the number of the argument that it is, in another dtype or layout, or a slice of it."""
    one_hot: OneHot | None = None
    """The operand that tells an index from others, if there is one."""


def products_of(step: StepProgram, mesh: Mapping[str, int]) -> Iterator[Product]:
    """Yield the products of a step, in the order in which they run."""
    for op in step.operations:
        if op.rule is None or not op.rule.product:
            continue
        known = all(loop.times is not None for loop in op.loops)
        flops = op.flops_each * _copies(op, mesh) * int(op.runs * op.share * _ways(op))
        if op.name == "ragged_dot_general":
            # A compiler for CPUs multiplies each row by the matrices of all groups that a device has.
            if op.eqn.params["ragged_dot_dimension_numbers"].rhs_group_dimensions:
                flops *= op.operands[2].shape[0]
            flops //= _scopes.groups(op.scope)
        arguments = tuple(origin(x).argument for x in op.operands[:2])
        one_hot = next(filter(None, (_one_hot(op, i) for i in (0, 1))), None) if flops else None
        yield Product(op.scope, op.frames, flops if known else None, arguments, one_hot)


def _copies(op: TracedOperation, mesh: Mapping[str, int]) -> int:
    """Return how many devices a per-device operation needs, of which each has a part of the work.

    A named product runs per device if it gathers parameters; the mesh axes that shard none of its axes repeat it.
    """
    operation, pipeline = _scopes.operation(op.scope), _scopes.around(op.scope, "pipeline")
    axes = {a for outer in op.around for a in axes_made_manual(outer.eqn)}
    if operation is not None and operation.name == "dot":
        # Stages of a pipeline have layers of their own.
        axes = axes & (operation.over | (pipeline.over if pipeline else set()))
    return math.prod(mesh.get(a, 1) for a in axes)


def _ways(op: TracedOperation) -> int:
    """Return how many ways conditionals around an operation may go, of those whose turns no schedule says."""
    around = [outer for outer in op.around if "branches" in outer.eqn.params]
    free = [outer for outer in around if _scopes.turns(f"{outer.scope}/{outer.name}") is None]
    return math.prod(len(outer.eqn.params["branches"]) for outer in free)


def _widened(x: TracedArray) -> tuple[str, str] | None:
    """Return the floating-point dtypes before and after a conversion to a larger one, whose result a value is."""
    while x.maker is not None and x.maker.name in SAME:
        before = x.maker.operands[0]
        if x.maker.name == "convert_element_type":
            floats = all(jnp.issubdtype(d, jnp.floating) for d in (before.dtype, x.dtype))
            larger = floats and 1 < before.dtype.itemsize < x.dtype.itemsize
            return (short_dtype(before.dtype), short_dtype(x.dtype)) if larger else None
        x = before
    return None


def _one_hot(op: TracedOperation, of: int) -> OneHot | None:
    """Describe an operand that tells an index from others, as `one_hot` makes."""
    if op.name != "dot_general" or not (counts := _counts(op.operands[of])):
        return None
    summed, batch = (own[of] for own in op.eqn.params["dimension_numbers"])
    shape = op.operands[of].shape
    before = math.prod(shape[i] for i in summed)
    rest = math.prod(n for i, n in enumerate(shape) if i not in (*summed, *batch))
    return OneHot(before, rest, len(counts) == 1 and max(counts) % before == 0)


def _counts(value: TracedArray) -> set[int]:
    """Return the sizes of counts from 0 whose equality with other numbers makes a value, up to scales."""
    waiting, found = [value], set[int]()
    for x in itertools.islice(waiting, 64):
        op = x.maker
        if op is None:
            continue
        if op.name in SAME:
            waiting.append(op.operands[0])
        elif op.name in ("and", "mul", "select_n"):
            waiting += op.operands
        elif op.name == "eq":
            for side in map(origin, op.operands):
                if side.maker is not None and side.maker.name == "iota":
                    found.add(side.shape[side.maker.eqn.params["dimension"]])
    return found


def converted_arguments(step: StepProgram) -> dict[int, str]:
    """Return, by number, the arguments that a placement constrains before they are converted to a smaller dtype."""
    found: dict[int, str] = {}
    for op in step.operations:
        if op.name in CONSTRAINTS:
            x, y = op.operands[0], op.results[0]
            dtypes = {user.results[0].dtype for user in y.users if user.name == "convert_element_type"}
            number = origin(x).argument
            if len(dtypes) == 1 == len(y.users) and number is not None:
                (dtype,) = dtypes
                if x.dtype == step.arguments[number].dtype and dtype.itemsize < x.dtype.itemsize:
                    found[number] = short_dtype(dtype)
    return found


def cast_gradients(step: StepProgram) -> Iterator[tuple[str, str, Source | None]]:
    """Yield the dtypes and the lines of conversions of gradients to a larger one before a placement or a sum."""
    for op in step.operations:
        if op.name in _PLACING and (convert := op.operands[0].maker) and convert.name == "convert_element_type":
            before = convert.operands[0].maker
            phases = [convert.phase, before.phase if before else ""]
            if (dtypes := _widened(op.operands[0])) and phases == ["", "backward"]:
                yield *dtypes, convert.source


_PLACING = *CONSTRAINTS, "psum", "psum_invariant", "reduce_scatter"
