"""The rules of names: for each primitive of JAX, how the axes of its results follow from its operands."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from ..core.source_lines import Frame, frames_of
from ..distribution.axis_marks import EXCHANGE, MARK
from ._axes import Axes, Axis, Dims, Meeting, are_apart, bases, find, fresh, last_base, leaves, size_of
from ._masks import sum_of_weights
from ._values import Axed, AxisStep, Pointer, dtype_kind

Rule: TypeAlias = Callable[[Axes, AxisStep, Sequence[Axed]], list[Axed]]


def unknown(step: AxisStep) -> list[Axed]:
    """Return results about which nothing is known."""
    return [Axed(tuple(map(fresh, v.aval.shape))) for v in step.eqn.outvars]  # pyright: ignore[reportAttributeAccessIssue]


# --- position for position ---


def _elementwise(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    dims = _shared_dims(xs)
    if dims is None:
        for x in xs:
            x.settle()
        dims = _shared_dims(xs)
    return [Axed(_met(axes, step, xs) if dims is None else dims, points=_points(step, xs)) for _ in step.eqn.outvars]


def _shared_dims(xs: Sequence[Axed]) -> Dims | None:
    """Return the axes of arrays, if all that are no scalars have the same; they then have one shape, too."""
    dims: Dims = ()
    for x in xs:
        if x.dims and x.dims is not dims:
            if dims and x.dims != dims:
                return None
            dims = x.dims
    return dims


def _met(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> Dims:
    """Return the axes of arrays with different axes that meet position for position."""
    given, crossed = [x.dims for x in xs if x.dims], len(axes.crossed)
    met = [[axis for axis in same if axis] for same in zip(*given, strict=True)]
    found = tuple([_meet(axes, step, same) for same in met])
    if any([f.base is not None for axis in found for f in axis]):
        found = tuple(_without_lone_role(axis, found, others) for axis, others in zip(found, met, strict=True))
        if step.name == "add_any":
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
    if len(roles) > 1 and not step.within("vmap(") and _is_operator(frames := list(frames_of(step.eqn))):
        if any(list(frames_of(m.eqn)) == frames for m in makers):
            axes.found.append(Meeting(roles[0], roles[1], step, "outer"))


def _is_operator(frames: Sequence[Frame]) -> bool:
    """Return whether code outside of JAX used an operator or ufunc, rather than a function of JAX that uses one."""
    inside = [*itertools.takewhile(lambda frame: frame.file.startswith(_JAX), frames)]
    return bool(inside) and inside[-1].function.rpartition(".")[2] in ("op", "deferring_binary_op", "__call__")


_JAX = jax.__file__.removesuffix("__init__.py")


def _meet(axes: Axes, step: AxisStep, same: Sequence[Axis]) -> Axis:
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


_POINTING = {"add", "sub", "select_n", "max", "min", "clamp", "convert_element_type", "copy", "rev", "rem"}


def _points(step: AxisStep, xs: Sequence[Axed]) -> tuple[Pointer, ...] | None:
    """Return the axes that a result indexes: the first operand that indexes any tells."""
    found = [x.points for x in xs if x.points is not None]
    if not found or step.name not in _POINTING or dtype_kind(step.eqn.outvars[-1]) not in ("i", "u"):
        return None
    if len(found) > 1 and step.name in ("add", "sub"):  # a distance of two positions is no position
        return None
    return found[0]


def _sort(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    """Sort arrays together: each keeps what it indexes, as the positions do that `argsort` sorts by other values."""
    return [Axed(y.dims, points=x.points) for x, y in zip(xs, _elementwise(axes, step, xs), strict=True)]


def _compared(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    """Compare position for position; an index that is compared with all positions of an axis is one of that axis."""
    results = _elementwise(axes, step, xs)
    # A length, which others are compared with, belongs to any axis.
    if step.name in ("eq", "ne") and all(x.points is not None and len(x.points) == 1 for x in xs):
        (a,), (b,) = (x.points for x in xs if x.points is not None)
        own = [p.axis is not None and leaves(p.axis) in map(leaves, x.dims) for p, x in zip((a, b), xs, strict=True)]
        if own[0] != own[1]:
            index, positions = (a, b) if own[1] else (b, a)
            _point(axes, step, index, positions.axis or ())
    return results


def _point(axes: Axes, step: AxisStep, pointer: Pointer, axis: Axis) -> None:
    """Record that a value indexes an axis."""
    if pointer.axis is None:
        pointer.axis = axis
    elif size_of(pointer.axis) == size_of(axis):
        axes.unify(pointer.axis, axis, step)


def _identity(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    return [Axed(x.dims, points=x.points) for x, _ in zip(xs, step.eqn.outvars, strict=False)]


def _marked(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    """Return an array with the names that a named operation gives its axes."""
    named = zip(xs[0].dims, step.params["names"], step.shape, strict=True)
    dims = tuple(axis if name is None or n == 1 else axes.renamed(axis, name, n, step) for axis, name, n in named)
    return [Axed(dims, points=xs[0].points)]


# --- layout ---


def _tile(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    pairs = zip(step.params["reps"], xs[0].dims, strict=True)
    return [Axed(tuple(axis if count == 1 else (*fresh(count), *axis) for count, axis in pairs), points=xs[0].points)]


def _transpose(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    return [Axed(tuple(xs[0].dims[i] for i in step.params["permutation"]), points=xs[0].points)]


def _broadcast_in_dim(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    found: list[Axis | None] = [None] * len(step.shape)
    for axis, old, at in zip(xs[0].dims, step.shape_of(0), step.params["broadcast_dimensions"], strict=True):
        if old == step.shape[at]:
            found[at] = axis
    dims = tuple(fresh(n) if axis is None else axis for axis, n in zip(found, step.shape, strict=True))
    return [Axed(dims, points=xs[0].points)]


def _squeeze(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    gone = step.params["dimensions"]
    return [Axed(tuple(a for i, a in enumerate(xs[0].dims) if i not in gone), points=xs[0].points)]


def _reshape(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    (x,), old, new = xs[:1], step.shape_of(0), step.shape
    if [n for n in old if n != 1] == [n for n in new if n != 1]:
        left = iter(axis for axis, n in zip(x.dims, old, strict=True) if n != 1)
        return [Axed(tuple(next(left) if n != 1 else () for n in new), points=x.points)]
    dims = axes.reshaped(x.dims, new)
    if dims is not None:
        _check_torn(axes, step, x.dims, dims)
    else:
        same = 0  # the last axes, as far as their sizes are the same
        while same < min(len(old), len(new)) and old[-same - 1] == new[-same - 1]:
            same += 1
        start = len(new) - same
        dims = (*map(fresh, new[:start]), *x.dims[len(old) - same :])
        torn = [axes.whole(axis) for axis in x.dims[: len(old) - same] if axis]
        if len(torn) > 1 and sorted(old) == sorted(new) and all(f.name is not None for f in torn):
            axes.found.append(Meeting(torn[0], torn[1], step, "torn"))
    return [Axed(dims, points=x.points)]


def _check_torn(axes: Axes, step: AxisStep, before: Dims, after: Dims) -> None:
    """Record that two axes share a named one, each beside others, and that there is an axis of its size."""
    for axis in before:
        if len(axis) == 1 and last_base(axis[0]).name is not None and len(own := leaves(axis)) > 1:
            holders = [x for x in map(leaves, after) if not set(own).isdisjoint(x)]
            if len(holders) == 2 and size_of(axis) in map(size_of, holders):
                others = [f for x in holders for f in x if f not in own]
                if all(not set(x).issubset(own) for x in holders) and others[0].name is not None:
                    axes.found.append(Meeting(others[0], find(axis[0]), step, "torn"))


def _split(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    (x,), at, sizes = xs, step.params["axis"], step.params["sizes"]
    starts = itertools.accumulate(sizes, initial=0)
    return [
        Axed((*x.dims[:at], _slice_of(axes, x.dims[at], start, int(n), len(set(sizes)) == 1), *x.dims[at + 1 :]))
        for start, n in zip(starts, sizes, strict=False)
    ]


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


def _slice(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    strides, starts = step.params["strides"] or (1,) * len(step.shape), step.params["start_indices"]
    dims = tuple(
        _slice_of(axes, axis, starts[i], n, _is_cut_evenly(step, i, n, strides[i]), strides[i])
        for i, (axis, n) in enumerate(zip(xs[0].dims, step.shape, strict=True))
    )
    return [Axed(dims, points=xs[0].points)]


def _is_cut_evenly(step: AxisStep, i: int, size: int, stride: int) -> bool:
    """Return whether the program takes all slices of this size along an axis, one after another or interleaved.

    Then it splits the axis into equal parts, which are one axis: q, k and v of a projection, say. A slice that is cut
    out alone is an axis of its own.
    """
    whole = step.shape_of(0)[i]
    if not 1 < size < whole or whole % size or stride not in (1, whole // size):
        return False
    taken = {s for s, e, k in step.slices[step.eqn.invars[0], i] if k == stride and -(-(e - s) // k) == size}
    return taken == (set(range(0, whole, size)) if stride == 1 else set(range(stride)))


def _pad(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    found: list[Axis] = []
    for axis, old, new, (low, high, inside) in zip(
        xs[0].dims, step.shape_of(0), step.shape, step.params["padding_config"], strict=True
    ):
        if old == new and not inside and low == high == 0:
            found.append(axis)
        elif inside and (whole := axes.of_size(axis, new, -1)) is not None:  # of which this is every other element
            found.append(whole)
        elif inside or not axis or (low < 0 < high) or (high < 0 < low):
            found.append(axes.derived(axis, new))
        elif low <= 0 and high <= 0:
            found.append(axes.derived(axis, new, (-low, old + high)))
        else:
            found.append(axes.padded(axis, low, high))
    return [Axed(tuple(found))]


def _concatenate(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    at = step.params["dimension"]
    sizes = [step.shape_of(i)[at] for i in range(len(xs))]
    joined = axes.joined([x.dims[at] for x in xs], sizes)
    dims = [joined if i == at else _meet(axes, step, [x.dims[i] for x in xs]) for i in range(len(step.shape))]
    points = None
    # The last axis of indices has a column for each axis that they index.
    if at == len(step.shape) - 1 and all(
        x.points is not None and len(x.points) == n for x, n in zip(xs, sizes, strict=True)
    ):
        points = tuple(p for x in xs for p in x.points or ())
    return [Axed(tuple(dims), points=points)]


def _stack(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    at = step.params["axis"]
    dims = [_meet(axes, step, [x.dims[i] for x in xs]) for i in range(len(xs[0].dims))]
    return [Axed((*dims[:at], fresh(len(xs)), *dims[at:]))]


def _unstack(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    at, dims = step.params["axis"], xs[0].dims
    return [Axed((*dims[:at], *dims[at + 1 :])) for _ in step.eqn.outvars]


def _dynamic_update_slice(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    x, update, *starts = xs
    for a, b, n, m, start in zip(x.dims, update.dims, step.shape_of(0), step.shape_of(1), starts, strict=True):
        if n == m and start.facts is not None and start.facts.value == 0:
            axes.unify(a, b, step)
        else:  # a block, such as the tokens that a cache takes up, of the same size by chance
            axes.derive(a, b)
            axes.derive(b, a)
    return [Axed(x.dims)]


# --- sums and products ---


def _reduce(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    gone = step.params.get("axes", step.params.get("dimensions", ()))
    dims = tuple(a for i, a in enumerate(xs[0].dims) if i not in gone)
    points = (Pointer(xs[0].dims[gone[0]]),) if step.name in ("argmax", "argmin") else None
    return [Axed(dims, points=points) for _ in step.eqn.outvars]


def _dot_general(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    (left_summed, right_summed), _ = numbers = step.params["dimension_numbers"]
    found = _product(axes, step, xs, numbers)
    sum_of_weights(axes, step, xs[0], left_summed, xs[1])
    sum_of_weights(axes, step, xs[1], right_summed, xs[0])
    return [Axed(axes.distinct(found, (xs[0].dims, xs[1].dims)))]


def _ragged_dot_general(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    numbers = step.params["ragged_dot_dimension_numbers"]
    groups = tuple(numbers.rhs_group_dimensions)
    for i in groups:
        axes.unify(xs[1].dims[i], xs[2].dims[-1], step)
    found = _product(axes, step, xs, numbers.dot_dimension_numbers, groups)
    return [Axed(axes.distinct(found if groups else (xs[2].dims[-1], *found)))]


def _product(axes: Axes, step: AxisStep, xs: Sequence[Axed], numbers: Any, groups: Sequence[int] = ()) -> Dims:
    ((left_summed, right_summed), (left_batch, right_batch)), (left, right) = numbers, (x.dims for x in xs[:2])
    for i, j in zip(left_summed, right_summed, strict=True):
        axes.unify(left[i], right[j], step)
    batch = [axes.unify(left[i], right[j], step) for i, j in zip(left_batch, right_batch, strict=True)]
    free = [axis for i, axis in enumerate(left) if i not in (*left_summed, *left_batch)]
    free += [axis for i, axis in enumerate(right) if i not in (*right_summed, *right_batch, *groups)]
    return (*batch, *free)


def _convolution(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    numbers, (left, right) = step.params["dimension_numbers"], xs
    (batch, feature, *spatial), (out_feature, in_feature, *_) = numbers.lhs_spec, numbers.rhs_spec
    groups, batch_groups = step.params["feature_group_count"], step.params["batch_group_count"]
    found: list[Axis] = [()] * len(step.shape)
    out_batch, out_channel, *out_spatial = numbers.out_spec
    whole = left.dims[feature]
    # With groups, channels are (group, channel of a group): the outputs have the groups, the kernel the other part.
    if groups > 1 and (parts := axes.reshaped((whole,), (groups, step.shape_of(0)[feature] // groups))) is not None:
        outs = axes.reshaped((right.dims[out_feature],), (groups, step.shape_of(1)[out_feature] // groups))
        if outs is not None and not step.backward:
            axes.unify(parts[0], outs[0], step)
        whole = parts[1]
    if groups == 1 or whole is not left.dims[feature]:
        axes.unify(whole, right.dims[in_feature], step)
    found[out_channel] = right.dims[out_feature]
    found[out_batch] = left.dims[batch] if batch_groups == 1 else fresh(step.shape[out_batch])
    if not step.backward:
        # Its gradient is a convolution too, in which a kernel is a result: this note gives it its axes.
        axes.convolutions.append((numbers, left.dims, right.dims))
        for i, j in zip(spatial, out_spatial, strict=True):
            found[j] = axes.resized(left.dims[i], step.shape[j])
    else:
        kernel = _kernel_of_gradient(axes, step, left.dims, right.dims)
        for i, j in enumerate(out_spatial):
            found[j] = fresh(step.shape[j])
            if kernel is not None and size_of(kernel[i]) == step.shape[j]:
                axes.derive(found[j], kernel[i])
    return [Axed(axes.distinct(tuple(found), (left.dims, right.dims)))]


def _kernel_of_gradient(axes: Axes, step: AxisStep, left: Dims, right: Dims) -> Dims | None:
    """Return the spatial axes of the kernel whose gradient a convolution is: the operand that it sums over tells."""
    numbers = step.params["dimension_numbers"]
    (in_channel, batch, *spatial), out_channel = numbers.lhs_spec, numbers.rhs_spec[0]
    own = [_parts(left[i]) for i in (batch, in_channel, *spatial)]
    for forward, x, kernel in reversed(axes.convolutions):
        if own == [_parts(x[i]) for i in forward.lhs_spec]:
            if _parts(right[out_channel]) == _parts(kernel[forward.rhs_spec[0]]):
                return tuple(kernel[i] for i in forward.rhs_spec[2:])
    return None


def _parts(axis: Axis) -> Axis:
    """Return the smallest factors of an axis, whatever its role."""
    return tuple(map(last_base, leaves(axis)))


def _resized(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    """Return arrays of which some axes have other sizes, as slices, windows and collectives make them."""
    dims = tuple(map(axes.resized, xs[0].dims, step.shape))
    return [Axed(dims, points=xs[0].points if step.name == "dynamic_slice" else None) for _ in step.eqn.outvars]


def _gathered(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    return _resized(axes, step, xs) if len(xs) == 1 and len(step.shape) == len(xs[0].dims) else unknown(step)


def _fft(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    """Return frequencies, whose axes are derived from the transformed ones."""
    count = len(step.params["fft_lengths"])
    (*kept,), changed = xs[0].dims[: len(step.shape) - count], xs[0].dims[len(step.shape) - count :]
    return [Axed((*kept, *(axes.derived(a, n) for a, n in zip(changed, step.shape[-count:], strict=True))))]


# --- look-ups ---


def _gather(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    numbers, (table, indices) = step.params["dimension_numbers"], xs
    sizes = step.params["slice_sizes"]
    _align(axes, step, table, indices, numbers.operand_batching_dims, numbers.start_indices_batching_dims)
    _look(axes, step, table.dims, indices, numbers.start_index_map)
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    slices = iter([axes.resized(table.dims[i], n) for i, n in enumerate(sizes) if i not in gone])
    rows = iter(indices.dims[:-1])
    dims = tuple(next(slices) if i in numbers.offset_dims else next(rows) for i in range(len(step.shape)))
    return [Axed(axes.distinct(dims, (table.dims, indices.dims)))]


def _align(axes: Axes, step: AxisStep, table: Axed, indices: Axed, at: Sequence[int], there: Sequence[int]) -> None:
    for i, j in zip(at, there, strict=True):
        axes.unify(table.dims[i], indices.dims[j], step)


def _look(axes: Axes, step: AxisStep, table: Dims, indices: Axed, at: Sequence[int]) -> None:
    if indices.points is not None and len(indices.points) == len(at):
        for pointer, i in zip(indices.points, at, strict=True):
            _point(axes, step, pointer, table[i])


def _scatter(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    numbers, (table, indices, updates) = step.params["dimension_numbers"], xs
    _align(axes, step, table, indices, numbers.operand_batching_dims, numbers.scatter_indices_batching_dims)
    _look(axes, step, table.dims, indices, numbers.scatter_dims_to_operand_dims)
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = iter([i for i in range(len(table.dims)) if i not in gone])
    rows = iter(range(len(indices.dims) - 1))
    for i, axis in enumerate(updates.dims):
        if i not in numbers.update_window_dims:
            axes.unify(axis, indices.dims[next(rows)], step)
        elif step.shape_of(2)[i] == step.shape_of(0)[at := next(window)]:
            axes.unify(axis, table.dims[at], step)
    return [Axed(table.dims)]


def _top_k(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    (x,), at = xs, step.params.get("axis", len(step.shape) - 1)
    dims = (*x.dims[:at], x.dims[at] if step.shape[at] == step.shape_of(0)[at] else fresh(step.shape[at]),
            *x.dims[at + 1 :])  # fmt: skip
    return [Axed(dims), Axed(dims, points=(Pointer(x.dims[at]),))]


# --- new arrays ---


def _iota(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    dims = tuple(map(fresh, step.shape))
    return [Axed(dims, points=(Pointer(dims[step.params["dimension"]]),))]


def _leading(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    """Return arrays that begin with the axes of the operand, such as keys."""
    dims = xs[0].dims if xs else ()
    return [Axed((*dims[: len(x.dims)], *x.dims[len(dims) :])) for x in unknown(step)]


# --- matrices ---


def _as_first_of_shape(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    """Return the axes of the first operand that has the shape of the result."""
    at = next((i for i in range(len(xs)) if step.shape_of(i) == step.shape), None)
    return unknown(step) if at is None else [Axed(xs[at].dims)]


def _triangular_solve(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    a, b = (x.dims for x in xs)
    at = -2 if step.params["left_side"] else -1
    batch = [axes.unify(x, y, step) for x, y in zip(a[:-2], b[:-2], strict=True)]
    solved = axes.unify(b[at], a[-1 if step.params["transpose_a"] == step.params["left_side"] else -2], step)
    return [Axed((*batch, *((solved, b[-1]) if at == -2 else (b[-2], solved))))]


def _factorized(axes: Axes, step: AxisStep, xs: Sequence[Axed]) -> list[Axed]:
    """Return factors of matrices: vectors of values, and matrices with the row, or the column, and values."""
    (*batch, row, column), sizes = xs[0].dims, step.shape_of(0)[-2:]
    values: dict[int, Axis] = {}
    found: list[Axed] = []
    for side, v in zip(_FACTORS[step.name], step.eqn.outvars, strict=False):
        shape: Sequence[int] = v.aval.shape[len(batch) :]  # pyright: ignore[reportAttributeAccessIssue]
        new = [values.setdefault(n, fresh(n)) for n in shape]
        if side == "row" and shape[0] == sizes[0]:
            new[0] = row
        elif side == "column" and shape[-1] == sizes[1]:
            new[-1] = column
        found.append(Axed((*batch, *new)))
    return found


_FACTORS = {
    "svd": ("", "row", "column"),
    "qr": ("row", "column"),
    "eigh": ("row", ""),
    "eig": ("", "row", "row"),
    "lu": ("column", "", ""),
}
"""Which axis of the operand each result of a factorization has beside the axis of the values."""


ELEMENTWISE = """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz
complex conj copy copy_p cos cosh digamma div erf erf_inv erfc exp exp2 expm1 floor igamma igamma_grad_a igammac imag
integer_pow is_finite lgamma log log1p logistic max min mul neg nextafter not one_minus_square or polygamma
population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor zeta log2 convert_element_type
cumsum cumprod cummax cummin cumlogsumexp rev threefry2x32 random_fold_in random_clone mul_add fma"""
COMPARISONS = "eq ne lt le gt ge eq_to le_to lt_to"
IDENTITIES = """optimization_barrier name stop_gradient sharding_constraint mesh_cast reshard layout_constraint pvary
pcast psum psum_invariant pmax pmin ppermute pbroadcast pcollective all_reduce cholesky lu_pivots_to_permutation
device_put cross_entropy_barrier"""
REDUCTIONS = """reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor reduce argmax argmin"""
WINDOWS = """reduce_window reduce_window_sum reduce_window_max reduce_window_min"""
SCATTERS = "scatter scatter-add scatter_add scatter-mul scatter_mul scatter-min scatter_min scatter-max scatter_max"
SCATTERS += " scatter-sub scatter_sub"

LEADING = """bitcast_convert_type random_bits random_split random_seed random_unwrap random_wrap empty axis_index
create_token after_all"""

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(COMPARISONS.split(), _compared),
    **dict.fromkeys(IDENTITIES.split(), _identity),
    MARK: _marked,
    EXCHANGE: _identity,
    **dict.fromkeys(REDUCTIONS.split(), _reduce),
    **dict.fromkeys(WINDOWS.split(), _resized),
    **dict.fromkeys(SCATTERS.split(), _scatter),
    "sort": _sort,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast_in_dim,
    "squeeze": _squeeze,
    "tile": _tile,
    "reshape": _reshape,
    "split": _split,
    "slice": _slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _unstack,
    "dynamic_slice": _resized,
    "dynamic_update_slice": _dynamic_update_slice,
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot_general,
    "conv_general_dilated": _convolution,
    "select_and_scatter_add": _as_first_of_shape,
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_gather_invariant"), _gathered),
    "fft": _fft,
    "gather": _gather,
    "top_k": _top_k,
    "approx_top_k": _top_k,
    "iota": _iota,
    # Equinox has these, and solvers use them.
    "nonbatchable": _identity,
    "select_if_vmap": _elementwise,
    "maybe_set": _as_first_of_shape,
    **dict.fromkeys(("unvmap_any", "unvmap_all", "unvmap_max"), lambda axes, step, xs: unknown(step)),
    "triangular_solve": _triangular_solve,
    **dict.fromkeys(_FACTORS, _factorized),
    **dict.fromkeys(LEADING.split(), _leading),
}
"""For each primitive, a function that returns the axes of its results."""
