"""Read the rules of operations as names: axes that are one factor of a rule are one axis.

Beside rules, names need what is no business of axes alone: which values are positions of an axis (`Pointer`), what two
roles of an axis mean, which slices of an axis are taken together, and of which convolution another one is the gradient.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence

import jax

from ..core.operation_rules import PRIMITIVES, OperationRule, PartOf, Term
from ..core.source_lines import frames_of
from ..distribution.axis_marks import MARK
from ._axes import Axes, Axis, Dims, Meeting, are_apart, bases, find, fresh, last_base, leaves, size_of
from ._masks import sum_of_weights
from ._values import Axed, AxisStep, Pointer, dtype_kind

RULES = PRIMITIVES
COMPARISONS = "eq ne lt le gt ge eq_to le_to lt_to"


def unknown(step: AxisStep) -> list[Axed]:
    """Return results about which nothing is known."""
    return [Axed(tuple(map(fresh, v.aval.shape))) for v in step.eqn.outvars]  # pyright: ignore[reportAttributeAccessIssue]


def results_by_rule(axes: Axes, step: AxisStep, rule: OperationRule, xs: Sequence[Axed]) -> list[Axed]:
    """Return the results of an operation, given its rule."""
    if step.name == MARK:  # a named operation names its axes
        named = zip(xs[0].dims, step.params["names"], step.shape, strict=True)
        dims = [axis if name is None or n == 1 else axes.renamed(axis, name, n, step) for axis, name, n in named]
        return [Axed(tuple(dims), points=xs[0].points)]
    if rule.values in ("each", "linear") or step.name == "sort":
        results = [_dims_together(axes, step, xs)] * len(step.eqn.outvars)
    else:
        found = _Reading(axes, step, rule, xs)
        results = [*map(found.result, rule.results)]
        if step.name == "dot_general":
            for i, summed in enumerate(step.params["dimension_numbers"][0]):
                sum_of_weights(axes, step, xs[i], summed, xs[1 - i])
        if len(rule.operands) > 1 and len(results) == 1 and step.name not in ("concatenate", "stack"):
            results = [axes.distinct(results[0], [x.dims for x in xs[:2]])]
    if step.name == "iota":
        return [Axed(results[0], points=(Pointer(results[0][step.params["dimension"]]),))]
    found = [Axed(dims, points=_pointers_of_result(axes, step, rule, xs, i)) for i, dims in enumerate(results)]
    if step.name == "transpose":
        found[0].transposed_from = xs[0]
    elif step.name in _KEEPING_TERMS:
        found[0].terms = tuple([term for x in xs if x.dims for term in x.terms[-4:]])
    return found


class _Reading:
    """The axes of the factors of a rule."""

    def __init__(self, axes: Axes, step: AxisStep, rule: OperationRule, xs: Sequence[Axed]) -> None:
        self._axes, self._step, self._rule, self._xs = axes, step, rule, xs
        self._compound: dict[tuple[int, ...], Axis] = {}
        self._parts = {p.part: p for p in rule.parts}
        self._wholes = {p.whole: p for p in rule.parts}
        met: dict[int, list[Axis]] = {}
        if step.name == "reshape" and not step.backward:
            self._check_torn(xs[0].dims)
        of_gradient = step.name == "conv_general_dilated" and step.backward
        for i, (x, term) in enumerate(zip(xs, rule.operands, strict=True)):
            for axis, factors in zip(x.dims, term, strict=True):
                pieces = (axis,) if len(factors) == 1 else axes.reshaped((axis,), [rule.sizes[f] for f in factors])
                self._compound[factors] = axis
                for f, piece in zip(factors, pieces or (), strict=False):
                    # A grouped convolution has the groups of its kernel, but not if it is a gradient.
                    if not (of_gradient and i == 0 and len(factors) > 1 and f == factors[0]):
                        met.setdefault(f, []).append(piece)
        self._known = {f: _axis_that_meets(axes, step, same) for f, same in sorted(met.items())}
        if step.name == "conv_general_dilated" and not of_gradient:
            # Its gradient is a convolution too, in which a kernel is a result: this note gives it its axes.
            axes.convolutions.append((step.params["dimension_numbers"], xs[0].dims, xs[1].dims))
        if step.name == "dynamic_update_slice":
            for part in rule.parts:
                new, old = self._known[part.part], self._known[part.whole]
                if part.start == 0 and size_of(new) == size_of(old):
                    axes.unify(old, new, step)
                else:  # a block, such as the tokens that a cache takes up, of the same size by chance
                    axes.derive(old, new)
                    axes.derive(new, old)
        if step.name in ("gather", "scatter") or step.name.startswith("scatter"):
            numbers = step.params["dimension_numbers"]
            at = numbers.start_index_map if step.name == "gather" else numbers.scatter_dims_to_operand_dims
            pointers = xs[1].points or ()
            for pointer, i in zip(pointers, at, strict=False) if len(pointers) == len(at) else ():
                _point_at(axes, step, pointer, xs[0].dims[i])

    def result(self, term: Term) -> Dims:
        known = self._compound
        return tuple([
            self._axis(factors[0], i) if len(factors) == 1 else known[factors] if factors in known
            else tuple([g for f in factors for g in self._axis(f, i)])
            for i, factors in enumerate(term)
        ])  # fmt: skip

    def _axis(self, f: int, at: int) -> Axis:
        if f not in self._known or self._rule.uses.get(f) == "torn":
            self._known[f] = self._made(f, at)
        return self._known[f]

    def _made(self, f: int, at: int) -> Axis:
        """Return the axis of a factor that no operand has."""
        axes, step, size = self._axes, self._step, self._rule.sizes[f]
        if step.name == "concatenate":
            return axes.joined([x.dims[at] for x in self._xs], [step.shape_of(i)[at] for i in range(len(self._xs))])
        if (part := self._parts.get(f)) is not None:
            whole = self._known[part.whole]
            if step.name == "fft":
                return axes.derived(whole, size)
            if step.name == "conv_general_dilated" and step.backward:
                kernel = _kernel_of_gradient(axes, step, self._xs[0].dims, self._xs[1].dims)
                i, new = step.params["dimension_numbers"].out_spec[2:].index(at), fresh(size)
                if kernel is not None and size_of(kernel[i]) == size:
                    axes.derive(new, kernel[i])
                return new
            if part.start is None:
                return axes.resized(whole, size)
            if step.name == "pad":
                return axes.derived(whole, size, (part.start, part.start + size))
            return _slice_of(axes, whole, part.start, size, _are_equal(step, self._rule, part), part.stride)
        if (part := self._wholes.get(f)) is not None and part.start is not None:
            piece = self._known[part.part]
            if part.stride > 1:
                return axes.of_size(piece, size, -1) or axes.derived(piece, size)
            return axes.padded(piece, part.start, size - size_of(piece) - part.start)
        return fresh(size)

    def _check_torn(self, before: Dims) -> None:
        """Record that a reshape gives the place of one named axis to another, though it keeps the order of elements."""
        parts = [(x, len(own) == 1) for own in map(self._axes.named_parts, before) for x in own]
        shape = [n for n in self._step.shape if n != 1]
        while parts and shape and 0 not in self._step.shape:
            # The first axes that have as many elements as the first sizes: no others take part in what happens here.
            m = n = 1
            while (a := math.prod(x.size for x, _ in parts[:m])) != (b := math.prod(shape[:n])):
                m, n = (m + 1, n) if a < b else (m, n + 1)
            (group, sizes), (parts, shape) = (parts[:m], shape[:n]), (parts[m:], shape[n:])
            own = [x.size for x, _ in group]
            ends, new = ([*itertools.accumulate(s, operator.mul)] for s in (own, sizes))
            divides = all(b % a == 0 for a, b in itertools.pairwise(sorted({*ends, *new})))
            if min(m, n) < 2 or (m == n == 2 and divides and all(alone for _, alone in group)):
                continue  # the last is as it is where neighbors along an axis are joined
            named = [i for i, (x, _) in enumerate(group) if last_base(x).name is not None]
            moved = [i for i in named if own[i] in sizes and (m != n or sizes[i] != own[i]) and not any(
                q // k <= ends[i] // own[i] and ends[i] // own[i] % (q // k) == 0 == q % ends[i]
                for q, k in zip(new, sizes, strict=True))]  # fmt: skip
            if moved and len(named) > 1:
                others = [i for i in (*moved, *named) if i != moved[0]]
                taker = next((i for i in others if m == n and own[i] == sizes[moved[0]]), others[0])
                self._axes.found.append(Meeting(group[moved[0]][0], group[taker][0], self._step, "torn"))


def _are_equal(step: AxisStep, rule: OperationRule, part: PartOf) -> bool:
    """Return whether the program takes all slices of this size along an axis, one after another or interleaved.

    Then it splits the axis into equal parts, which are one axis: q, k and v of a projection, say. A slice that is cut
    out alone is an axis of its own.
    """
    if step.name == "split":
        return len(set(step.params["sizes"])) == 1
    i = rule.operands[0].index((part.whole,))
    size, whole, stride = rule.sizes[part.part], rule.sizes[part.whole], part.stride
    if not 1 < size < whole or whole % size or stride not in (1, whole // size):
        return False
    taken = {s for s, e, k in step.slices[step.eqn.invars[0], i] if k == stride and -(-(e - s) // k) == size}
    return taken == (set(range(0, whole, size)) if stride == 1 else set(range(stride)))


def _slice_of(axes: Axes, axis: Axis, start: int, size: int, equal: bool, stride: int = 1) -> Axis:
    """Return a slice of an axis. `equal` slices that make up all of it are one factor, unless they have two names."""
    whole = size_of(axis)
    if size in (0, 1, whole):
        return axis if size == whole else fresh(size)
    if equal and (part := _equal_slice(axes, axis, start, size, stride)) is not None:
        return part
    return axes.derived(axis, size, (start, start + size) if stride == 1 else None)


def _equal_slice(axes: Axes, axis: Axis, start: int, size: int, stride: int) -> Axis | None:
    """Return the factor that each of the equal slices of an axis is; None if this one is an axis of its own."""
    number = len(axes.equal_slices)
    axes.equal_slices.append(None)
    if number in axes.separate or (axis and (start, start + size) in (axes.whole(axis).parts or ())):
        return None
    count, blocks = size_of(axis) // size, stride == 1  # otherwise the slices are interleaved
    if (split := axes.reshaped((axis,), (count, size) if blocks else (size, count))) is None:
        return None
    part = split[1] if blocks else split[0]
    made, slice_of = axes.whole(part), (axis, start if blocks else -1)
    if "*" not in (axes.whole(axis).name or ""):
        axes.equal_slices[number] = made
    if slice_of not in made.part_of:
        made.part_of += (slice_of,)
    return part


def _kernel_of_gradient(axes: Axes, step: AxisStep, left: Dims, right: Dims) -> Dims | None:
    """Return the spatial axes of the kernel whose gradient a convolution is: the operand that it sums over tells."""
    numbers = step.params["dimension_numbers"]
    (in_channel, batch, *spatial), out_channel = numbers.lhs_spec, numbers.rhs_spec[0]
    own = [_smallest_factors(left[i]) for i in (batch, in_channel, *spatial)]
    for forward, x, kernel in reversed(axes.convolutions):
        if own == [_smallest_factors(x[i]) for i in forward.lhs_spec]:
            if _smallest_factors(right[out_channel]) == _smallest_factors(kernel[forward.rhs_spec[0]]):
                return tuple(kernel[i] for i in forward.rhs_spec[2:])
    return None


def _smallest_factors(axis: Axis) -> Axis:
    """Return the smallest factors of an axis, whatever its role."""
    return tuple(map(last_base, leaves(axis)))


# --- position for position ---


def _dims_together(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> Dims:
    """Return the axes of a result that arrays make position for position."""
    dims = _shared_dims(xs)
    if dims is None:
        for x in xs:
            x.settle()
        dims = _shared_dims(xs)
    return _dims_that_meet(axes, step, xs) if dims is None else dims


def _shared_dims(xs: Sequence[Axed]) -> Dims | None:
    """Return the axes of arrays, if all that are no scalars have the same; they then have one shape, too."""
    dims: Dims = ()
    for x in xs:
        if x.dims and x.dims is not dims:
            if dims and x.dims != dims:
                return None
            dims = x.dims
    return dims


def _dims_that_meet(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> Dims:
    """Return the axes of arrays with different axes that meet position for position."""
    given, crossed = [x.dims for x in xs if x.dims], len(axes.crossed)
    met = [[axis for axis in same if axis] for same in zip(*given, strict=True)]
    found = tuple([_axis_that_meets(axes, step, same) for same in met])
    if any([f.base is not None for axis in found for f in axis]):
        found = tuple(_without_lone_role(axis, found, others) for axis, others in zip(found, met, strict=True))
        terms = [term for x in xs for term in x.terms]
        if step.name == "add_any" or any(x.transposed_from in terms for x in terms):  # as in `x + x.T`
            del axes.crossed[crossed:]
    dims = axes.distinct(found, [own for own in given if all(map(operator.eq, map(bool, own), map(bool, found)))])
    if dims is not found:
        _check_promotion(axes, step, found, dims, xs)
    return dims


def _check_promotion(axes: Axes, step: AxisStep, before: Sequence[Axis], after: Dims, xs: Sequence[Axed]) -> None:
    """Record an outer product of an axis with itself that comes from an implicit promotion of ranks."""
    facts = [x.facts for x in xs if x.facts is not None]
    makers = [f.promoted_by for f in facts if f.promoted_by is not None]
    if not makers or any(f.opened for f in facts):  # an axis that is opened is meant, as in `x[:, None] - x`
        return
    changed = [axis for axis, own in zip(after, before, strict=True) if axis != leaves(own)]
    roles = [f for axis in changed for f in axis if f.base is not None]
    if len(roles) < 2 or step.within("vmap("):
        return
    # Only if code outside of JAX used an operator or ufunc, rather than a function of JAX that uses one.
    frames = list(frames_of(step.eqn))
    of_jax = [*itertools.takewhile(lambda frame: frame.file.startswith(_JAX), frames)]
    if of_jax and of_jax[-1].function.rpartition(".")[2] in ("op", "deferring_binary_op", "__call__"):
        if any(list(frames_of(m.eqn)) == frames for m in makers):
            axes.found.append(Meeting(roles[0], roles[1], step, "outer"))


_JAX = jax.__file__.removesuffix("__init__.py")


def _axis_that_meets(axes: Axes, step: AxisStep, same: Sequence[Axis]) -> Axis:
    found = same[0] if same else ()
    for axis in same[1:]:
        if axis != found:
            found = axes.unify(found, axis, step)
    return found


def _without_lone_role(axis: Axis, dims: Sequence[Axis], met: Sequence[Axis]) -> Axis:
    """Return the base of a role that meets it or another role of it, unless the array has further roles of it."""
    if len(axis) != 1 or (role := find(axis[0])).base is None:
        return axis
    base = last_base(role)
    if any(last_base(f) is base for other in dims if other is not axis for f in leaves(other)):
        return axis
    others = {find(a[0]) for a in met if len(a) == 1}
    if own := [b for b in bases(role) if b is not role and b in others]:
        return (own[0],)
    return (base,) if any(are_apart(role, other) for other in others) else axis


# --- positions ---

_KEEPING_TERMS = {"add", "sub", "neg", "mul", "div", "broadcast_in_dim", "reshape", "convert_element_type"}
_LOST = {"pad", "split", "stack", "unstack", "gather"}
_POINTING = {"add", "sub", "select_n", "max", "min", "clamp", "convert_element_type", "copy", "rev", "rem"}


def _pointers_of_result(
    axes: Axes, step: AxisStep, rule: OperationRule, xs: Sequence[Axed], i: int
) -> tuple[Pointer, ...] | None:
    """Return the axes that a result indexes."""
    if step.name in ("argmax", "argmin"):
        return (Pointer(xs[0].dims[step.params["axes"][0]]),)
    if step.name in ("top_k", "approx_top_k"):
        return (Pointer(xs[0].dims[step.params.get("axis", len(step.shape) - 1)]),) if i else None
    if step.name == "concatenate":
        # The last axis of indices has a column for each axis that they index.
        at, told = step.params["dimension"], [x.points or () for x in xs]
        fits = at == len(step.shape) - 1 and all(len(p) == step.shape_of(i)[at] for i, p in enumerate(told))
        return tuple(p for own in told for p in own) if fits else None
    if rule.values == "moved" and step.name not in _LOST:
        return xs[min(i, len(xs) - 1)].points if xs else None
    if rule.values not in ("each", "linear"):
        return None
    told = [(x, x.points) for x in xs if x.points is not None]
    # An index that is compared with all positions of an axis is one of that axis; a length belongs to any axis.
    if step.name in ("eq", "ne") and len(told) == len(xs) and all(len(points) == 1 for _, points in told):
        (a, b) = (points[0] for _, points in told)
        of_a, of_b = (p.axis is not None and leaves(p.axis) in map(leaves, x.dims) for x, (p,) in told)
        if of_a != of_b:
            index, positions = (a, b) if of_b else (b, a)
            _point_at(axes, step, index, positions.axis or ())
    if not told or step.name not in _POINTING or dtype_kind(step.eqn.outvars[-1]) not in ("i", "u"):
        return None
    # The first operand that indexes an axis tells, but a distance of two positions is no position.
    return None if len(told) > 1 and step.name in ("add", "sub") else told[0][1]


def _point_at(axes: Axes, step: AxisStep, pointer: Pointer, axis: Axis) -> None:
    """Record that a value indexes an axis."""
    if pointer.axis is None:
        pointer.axis = axis
    elif size_of(pointer.axis) == size_of(axis):
        axes.unify(pointer.axis, axis, step)
