"""Say what an operation does to the axes of its operands: one rule for each primitive of JAX, which all readers share.

A *factor* is an axis, or a part of an axis that a reshape joins with others. A rule numbers the factors of an equation,
says which of them each dimension of each operand and result has, major to minor, and what the operation does along
those that it does not treat index by index. A dimension of size 1 has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from .jax_versions import program_of, programs_in, scan_operands

Dimension = tuple[int, ...]
Term = tuple[Dimension, ...]


class PartOf(NamedTuple):
    """A factor whose elements are some of those of another one, or are made of them."""

    part: int
    whole: int
    start: int | None = None
    """The first of them; None if values decide, or if it is made of them otherwise, as windows and frequencies are."""
    stride: int = 1


class OperationRule(NamedTuple):
    """Describes what an operation does to axes."""

    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    sizes: Sequence[int]
    """The size of each factor."""
    uses: Mapping[int, str] = MappingProxyType({})
    """What happens along the factors that do not simply pass: `sum`, `max` and so on (each device can begin alone);
    `whole`, `near` (a halo), `scan`, `sort`, `part`, `index` (another operand says where), `torn` or `position`."""
    parts: Sequence[PartOf] = ()
    values: str = ""
    """`moved` if results have the elements of the operand, `each` if each element is computed from those at its place,
    `sum` if sums of results are the results of sums; nothing if there is no more to say."""
    product: bool = False

    @property
    def summed(self) -> dict[int, str]:
        return {f: how for f, how in self.uses.items() if how in REDUCED}

    @property
    def needed(self) -> set[int]:
        """Return the factors along which devices need more than their shards."""
        return {f for f, how in self.uses.items() if how not in REDUCED and how != "position"}


REDUCED = frozenset("sum max min prod and or xor".split())


class _Equation:
    """An equation, and what its rule says so far."""

    def __init__(self, eqn: Any):
        self.params: dict[str, Any] = eqn.params
        self.name: str = eqn.primitive.name
        self.ins = [v.aval.shape for v in eqn.invars]
        self.outs = [v.aval.shape for v in eqn.outvars]
        self.invars = eqn.invars
        self.sizes: list[int] = []
        self.uses: dict[int, str] = {}
        self.parts: list[PartOf] = []

    def new(self, size: int) -> Dimension:
        if size == 1:
            return ()
        self.sizes.append(size)
        return (len(self.sizes) - 1,)

    def all_new(self, shape: Sequence[int]) -> Term:
        return tuple([self.new(n) for n in shape])

    def use(self, how: str, dims: Iterable[Dimension]) -> None:
        """Say what happens along all factors of some dimensions."""
        self.uses |= dict.fromkeys(_factors_of(dims), how)

    def part(self, new: Dimension, whole: Dimension, start: int | None = None, stride: int = 1) -> None:
        """Say that a dimension has some elements of another one, unless they are the same, or one has size 1."""
        if new and whole and new != whole:
            self.parts.append(PartOf(new[0], whole[0], start, stride))

    def rule(self, operands: Sequence[Term], *results: Term, values: str = "", product: bool = False) -> OperationRule:
        """Return the rule; operands that are left out have axes of their own."""
        rest = [self.all_new(shape) for shape in self.ins[len(operands) :]]
        return OperationRule((*operands, *rest), results, self.sizes, self.uses, self.parts, values, product)


_Maker = Callable[[_Equation], OperationRule]


def _factors_of(dims: Iterable[Dimension]) -> list[int]:
    return [f for dim in dims for f in dim]


def _as_dims(x: Any, rank: int = 0) -> tuple[int, ...]:
    return tuple(i % rank if rank else i for i in (x if isinstance(x, (tuple, list)) else (x,)))


# --- position for position ---


def _rule_of_each_position(values: str = "each", along: str = "", how: str = "whole", last: int = 0) -> _Maker:
    """Make the rule of what treats operands position for position, but for axes that a parameter lists."""

    def make(e: _Equation) -> OperationRule:
        shape = max([*e.ins, *e.outs], key=lambda s: (len(s), math.prod(s)))
        dims = e.all_new(shape)

        def term(own: Sequence[int]) -> Term:
            return tuple([d if n == m else e.new(n) for d, n, m in zip(dims, own, shape, strict=False)])

        at = _as_dims(e.params.get(along, ()), len(shape)) if along else range(len(shape) - last, len(shape))
        e.use(how, [dims[i] for i in at])
        return e.rule([*map(term, e.ins)], *map(term, e.outs), values=values)

    return make


def _rule_of_reductions(how: str, key: str = "axes") -> _Maker:
    def make(e: _Equation) -> OperationRule:
        dims, gone = e.all_new(e.ins[0]), _as_dims(e.params[key])
        result = tuple([d for i, d in enumerate(dims) if i not in gone])
        e.use(how, [dims[i] for i in gone])
        others = [dims if s == e.ins[0] else () for s in e.ins[1:]]
        return e.rule([dims, *others], *(result,) * len(e.outs), values="sum" if how == "sum" else "")

    return make


def _rule_of_same_arrays(e: _Equation) -> OperationRule:
    """Each result is an operand."""
    dims = [e.all_new(s) for s in e.ins]
    return e.rule(dims, *dims[: len(e.outs)], values="moved")


# --- layout ---


def _rule_of_layouts(dims_of: Callable[[_Equation, Term], Iterable[Dimension]]) -> _Maker:
    """Make the rule of an operation that moves elements, from a function that gives its result's dimensions."""

    def make(e: _Equation) -> OperationRule:
        dims = e.all_new(e.ins[0])
        return e.rule([dims] * len(e.ins), tuple(dims_of(e, dims)), values="moved")

    return make


def _dims_of_broadcast(e: _Equation, dims: Term) -> Term:
    kept = zip(e.params["broadcast_dimensions"], dims, e.ins[0], strict=True)
    found = {j: d for j, d, n in kept if n == e.outs[0][j]}
    return tuple([found.get(j) or e.new(n) for j, n in enumerate(e.outs[0])])


def _rule_of_reshapes(e: _Equation) -> OperationRule:
    """Refine both shapes until they have the same factors; where sizes do not divide each other, axes are torn."""
    order = e.params["dimensions"] or range(len(e.ins[0]))  # JAX permutes the operand first
    shapes = tuple([e.ins[0][i] for i in order]), e.outs[0]
    if 0 in shapes[0]:
        return e.rule([e.all_new(e.ins[0])], e.all_new(shapes[1]), values="moved")
    found: tuple[list[Dimension], list[Dimension]] = ([()] * len(shapes[0]), [()] * len(shapes[1]))
    left = [[(i, n) for i, n in enumerate(s) if n != 1][::-1] for s in shapes]
    while left[0] and left[1]:
        (i, m), (j, n) = left[0].pop(), left[1].pop()
        small, large = min(m, n), max(m, n)
        if large % small == 0:
            f = e.new(small)
            found[0][i], found[1][j] = (*found[0][i], *f), (*found[1][j], *f)
            if m != n:
                left[m < n].append((j if m < n else i, large // small))
            continue
        # The rest of this group has no common factors: those that are found stay parts of their axes.
        group, total = ([(i, m)], [(j, n)]), [m, n]
        while total[0] != total[1]:
            side = total[0] > total[1]
            at = left[side].pop()
            group[side].append(at)
            total[side] *= at[1]
        for side, own in enumerate(group):
            for at, size in own:
                f = e.new(size)
                found[side][at] = (*found[side][at], *f)
                e.use("torn", [f])
    operand = tuple([d for _, d in sorted(zip(order, found[0], strict=True))])
    return e.rule([operand], tuple(found[1]), values="moved")


def _rule_of_slices(e: _Equation) -> OperationRule:
    dims, result = e.all_new(e.ins[0]), list[Dimension]()
    starts, strides = e.params.get("start_indices", [None] * len(dims)), e.params.get("strides") or [1] * len(dims)
    for d, n, m, start, stride in zip(dims, e.ins[0], e.outs[0], starts, strides, strict=True):
        result.append(d if n == m else e.new(m))
        if n != m:
            e.use("part", [d])
            e.part(result[-1], d, start, stride)
    return e.rule([dims], tuple(result), values="moved")


def _rule_of_splits(e: _Equation) -> OperationRule:
    dims, at, start, results = e.all_new(e.ins[0]), e.params["axis"], 0, list[Term]()
    for n in e.params["sizes"]:
        new = dims[at] if n == e.ins[0][at] else e.new(n)
        e.part(new, dims[at], start)
        results.append((*dims[:at], new, *dims[at + 1 :]))
        start += n
    e.use("part", [dims[at]] if len(results) > 1 else [])
    return e.rule([dims], *results, values="moved")


def _rule_of_pads(e: _Equation) -> OperationRule:
    dims, result = e.all_new(e.ins[0]), list[Dimension]()
    for d, m, (low, high, inside) in zip(dims, e.outs[0], e.params["padding_config"], strict=True):
        if not (low or high or inside):
            result.append(d)
            continue
        result.append(new := e.new(m))
        e.use("part", [d])
        if low >= 0 and high >= 0:
            e.part(d, new, low, inside + 1)
        else:
            e.part(new, d, -low if low <= 0 and high <= 0 and not inside else None)
    return e.rule([dims, ()], tuple(result), values="moved")


def _rule_of_concatenations(e: _Equation) -> OperationRule:
    at, dims, start, operands = e.params["dimension"], e.all_new(e.outs[0]), 0, list[Term]()
    for shape in e.ins:
        own = dims[at] if shape[at] == e.outs[0][at] else e.new(shape[at])
        operands.append((*dims[:at], own, *dims[at + 1 :]))
        e.use("part", [own] if own != dims[at] else [])
        e.part(own, dims[at], start)
        start += shape[at]
    return e.rule(operands, dims, values="moved")


def _rule_of_unstacks(e: _Equation) -> OperationRule:
    at, dims = e.params["axis"], e.all_new(e.ins[0])
    e.use("part", [dims[at]])
    return e.rule([dims], *((*dims[:at], *dims[at + 1 :]),) * len(e.outs), values="moved")


def _rule_of_slice_updates(e: _Equation) -> OperationRule:
    """`dynamic_update_slice`: the update is a part of the operand, also where it has its size."""
    dims, update = e.all_new(e.ins[0]), e.all_new(e.ins[1])
    for d, new, n, m, at in zip(dims, update, e.ins[0], e.ins[1], e.invars[2:], strict=True):
        e.use("part", [d] if n != m else [])
        e.part(new, d, 0 if getattr(at, "val", None) == 0 else None)
    return e.rule([dims, update], dims)


# --- products ---


def _rule_of_products(e: _Equation, numbers: Any, groups: Sequence[int] = ()) -> OperationRule:
    (summed, batch), left = numbers, e.all_new(e.ins[0])
    same = {j: left[i] for pair in (summed, batch) for i, j in zip(*pair, strict=True)}
    right = tuple([same[j] if j in same else e.new(n) for j, n in enumerate(e.ins[1])])
    free = [d for i, d in enumerate(left) if i not in (*summed[0], *batch[0])]
    free += [d for j, d in enumerate(right) if j not in (*summed[1], *batch[1], *groups)]
    e.use("sum", [left[i] for i in summed[0]])
    return e.rule([left, right], (*(left[i] for i in batch[0]), *free), values="sum", product=True)


def _grouped_product(e: _Equation) -> OperationRule:
    numbers = e.params["ragged_dot_dimension_numbers"]
    groups = tuple(numbers.rhs_group_dimensions)
    found = _rule_of_products(e, numbers.dot_dimension_numbers, groups)
    left, right, sizes = found.operands
    rows = dict.fromkeys(_factors_of(left[i] for i in numbers.lhs_ragged_dimensions), "grouped")
    if groups:
        terms, (result,) = (left, right, (*sizes[:-1], right[groups[0]])), found.results
    else:
        terms, result = found.operands, (sizes[-1], *found.results[0])
    uses = {**rows, **found.uses, **dict.fromkeys(sizes[-1] if not groups else right[groups[0]], "grouped")}
    return found._replace(operands=terms, results=(result,), uses=uses)


def _rule_of_convolutions(e: _Equation) -> OperationRule:
    numbers, groups = e.params["dimension_numbers"], e.params["feature_group_count"]
    (batch, channel, *spatial), (feature, inner, *window) = numbers.lhs_spec, numbers.rhs_spec
    (out_batch, out_feature, *places) = numbers.out_spec
    left, right, out = (list[Dimension]([()] * len(s)) for s in (*e.ins, *e.outs))
    # With groups, channels are (group, channel of a group): the features have the groups, the kernel the other part.
    group = e.new(groups)
    right[inner] = e.new(e.ins[1][inner])
    left[channel] = (*group, *right[inner])
    right[feature] = out[out_feature] = (*group, *e.new(e.ins[1][feature] // groups))
    left[batch] = e.new(e.ins[0][batch])
    one = e.params["batch_group_count"] == 1
    out[out_batch] = left[batch] if one else e.new(e.outs[0][out_batch])
    e.use("sum", [right[inner]])
    for i, j, k in zip(spatial, window, places, strict=True):
        left[i], right[j], out[k] = e.new(e.ins[0][i]), e.new(e.ins[1][j]), e.new(e.outs[0][k])
        e.use("near", [left[i], right[j], out[k]])
        e.part(out[k], left[i])
    if groups > 1 or not one:
        e.use("whole", [left[channel], out[out_feature], out[out_batch]])
    return e.rule([tuple(left), tuple(right)], tuple(out), product=True)


# --- windows, look-ups, matrices ---


def _rule_of_windows(e: _Equation) -> OperationRule:
    """Windows, and collectives inside `shard_map`: an axis stays, or becomes one of another size."""
    if sizes := e.params.get("window_dimensions"):
        # Padding on one side, cut on the other, moves elements without changing the size.
        windows = [n + any(pad) for n, pad in zip(sizes, e.params["padding"], strict=True)]
    else:
        windows = [1 if a == b else 2 for a, b in zip(e.ins[0], e.outs[0], strict=False)]
    dims, result = e.all_new(e.ins[0]), list[Dimension]()
    for d, n, m, w in zip(dims, e.ins[0], e.outs[0], windows, strict=True):
        result.append(d if n == m else e.new(m))
        e.use("near", [d] if w > 1 else [])
        e.part(result[-1], d)
    return e.rule([dims], *(tuple(result),) * len(e.outs))


def _looked_up(e: _Equation) -> OperationRule:
    numbers, (table, indices) = e.params["dimension_numbers"], e.ins[:2]
    dims, rows = e.all_new(table), [e.new(n) for n in indices[:-1]]
    for i, j in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        rows[j] = dims[i]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    window = list[Dimension]()
    for i, (n, m) in enumerate(zip(table, e.params["slice_sizes"], strict=True)):
        if i in numbers.operand_batching_dims:
            continue
        if n != m or i in numbers.collapsed_slice_dims:
            e.use("index" if i in numbers.start_index_map else "part", [dims[i]])
        if i not in gone:
            window.append(dims[i] if n == m else e.new(m))
            e.part(window[-1], dims[i])
    left, right = iter(window), iter(rows)
    result = tuple([next(left) if i in numbers.offset_dims else next(right) for i in range(len(e.outs[0]))])
    return e.rule([dims, (*rows, e.new(indices[-1]))], result, values="moved")


def _rule_of_scatters(e: _Equation) -> OperationRule:
    numbers, (table, indices, updates) = e.params["dimension_numbers"], e.ins
    dims, rows = e.all_new(table), [e.new(n) for n in indices[:-1]]
    for i, j in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        rows[j] = dims[i]
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window, left = iter([i for i in range(len(table)) if i not in gone]), iter(rows)
    found, full = list[Dimension](), {*numbers.operand_batching_dims}
    for i, n in enumerate(updates):
        if i not in numbers.update_window_dims:
            found.append(next(left))
        elif n == table[at := next(window)]:
            found.append(dims[at])
            full.add(at)
        else:
            found.append(e.new(n))
            e.part(found[-1], dims[at])
    for i in range(len(table)):
        if i not in full:  # written in places that an index says, or in the first ones
            e.use("index" if i in numbers.scatter_dims_to_operand_dims else "part", [dims[i]])
    if "add" in e.name:
        e.use("sum", [d for d in rows if d not in dims])
    return e.rule([dims, (*rows, e.new(indices[-1])), tuple(found)], dims)


def _rule_of_top_k(e: _Equation) -> OperationRule:
    dims = e.all_new(e.ins[0])
    at = e.params.get("axis", e.params.get("reduction_dimension", len(dims) - 1)) % len(dims)
    k = dims[at] if e.outs[0][at] == e.ins[0][at] else e.new(e.outs[0][at])
    e.use("sort", [dims[at]])
    return e.rule([dims], *((*dims[:at], k, *dims[at + 1 :]),) * len(e.outs))


def _rule_of_iota(e: _Equation) -> OperationRule:
    dims = e.all_new(e.outs[0])
    e.use("position", [dims[e.params["dimension"]]])
    return e.rule([], dims)


def _rule_of_transforms(e: _Equation) -> OperationRule:
    dims, result = e.all_new(e.ins[0]), e.all_new(e.outs[0])
    last = len(dims) - len(e.params["fft_lengths"])
    e.use("whole", dims[last:])
    for d, new in zip(dims[last:], result[last:], strict=True):
        e.part(new, d)
    return e.rule([dims], (*dims[:last], *result[last:]))


def _rule_of_keys(e: _Equation) -> OperationRule:
    """Results begin with the axes of the operand, as keys do."""
    dims = e.all_new(e.ins[0]) if e.ins else ()
    kept = [(*dims[: len(s)], *e.all_new(s[len(dims) :])) for s in e.outs]
    e.use("position", [d for term in kept for d in term if d not in dims])
    return e.rule([dims] if e.ins else [], *kept)


def _as_first_of_shape(e: _Equation) -> OperationRule:
    """The result has the axes of the first operand of its shape; axes without windows are those of all operands."""
    at = next((i for i, s in enumerate(e.ins) if s == e.outs[0]), None)
    windows, padding = e.params.get("window_dimensions", ()), e.params.get("padding", ())
    shared = {}
    for i, (w, pad) in enumerate(zip(windows, padding, strict=True)):
        if w == 1 and not any(pad) and len({s[i] for s in (*e.ins, *e.outs)}) == 1:
            shared[i] = e.new(e.outs[0][i])
    dims = [tuple([shared.get(i) or e.new(n) for i, n in enumerate(s)]) for s in e.ins]
    result = tuple([shared.get(i) or e.new(n) for i, n in enumerate(e.outs[0])]) if at is None else dims[at]
    e.use("near", [d for own in dims for d, w in zip(own, windows, strict=False) if w > 1])
    return e.rule(dims, result)


def _rule_of_unrelated_axes(e: _Equation) -> OperationRule:
    """Results have axes of their own, and depend on all of the operands."""
    dims = [e.all_new(s) for s in e.ins]
    e.use("whole", [d for own in dims for d in own])
    return e.rule(dims, *map(e.all_new, e.outs))


def _rule_of_triangular_solves(e: _Equation) -> OperationRule:
    """`triangular_solve`."""
    b, left = e.all_new(e.ins[1]), e.params["left_side"]
    solved, row = b[-2 if left else -1], e.new(e.ins[0][-1])
    square = [row, solved] if e.params["transpose_a"] != left else [solved, row]
    e.use("whole", square)
    return e.rule([(*b[:-2], *square), b], b)


def _rule_of_factorizations(*sides: str) -> _Maker:
    """Matrices are factorized: each result has the rows or the columns, or neither, beside the axis of the values."""

    def make(e: _Equation) -> OperationRule:
        dims, values, results = e.all_new(e.ins[0]), dict[int, Dimension](), list[Term]()
        (*batch, row, column), sizes = dims, e.ins[0][-2:]
        for side, s in zip(sides, e.outs, strict=False):
            new = [values[n] if n in values else values.setdefault(n, e.new(n)) for n in s[len(batch) :]]
            if side == "row" and s[len(batch)] == sizes[0]:
                new[0] = row
            elif side == "column" and s[-1] == sizes[1]:
                new[-1] = column
            results.append((*batch, *new))
        e.use("whole", [row, column])
        return e.rule([dims], *results)

    return make


def _makers_of(names: str, make: _Maker) -> dict[str, _Maker]:
    return dict.fromkeys(names.split(), make)


PRIMITIVES: dict[str, _Maker] = {
    **_makers_of(
        """abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj cos
        cosh digamma div erf erf_inv erfc exp exp2 expm1 floor igamma igamma_grad_a igammac imag integer_pow is_finite
        lgamma log log1p logistic max min mul nextafter not one_minus_square or polygamma polynomial population_count
        pow real regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic
        shift_right_logical sign sin sinh sqrt square tan tanh xor zeta log2 threefry2x32 random_fold_in random_clone
        mul_add fma eq ne lt le gt ge eq_to le_to lt_to select_if_vmap""",
        _rule_of_each_position(),
    ),
    **_makers_of("add add_any sub neg", _rule_of_each_position("linear")),
    **_makers_of(
        """convert_element_type copy copy_p reduce_precision optimization_barrier name stop_gradient sharding_constraint
        mesh_cast reshard layout_constraint pvary pcast psum psum_invariant pmax pmin ppermute pbroadcast pcollective
        all_reduce device_put cross_entropy_barrier nonbatchable named_axes exchanged""",
        _rule_of_same_arrays,
    ),
    **_makers_of("cumsum cumprod cummax cummin cumlogsumexp", _rule_of_each_position("", "axis", "scan")),
    "sort": _rule_of_each_position("moved", "dimension", "sort"),
    "rev": _rule_of_each_position("moved", "dimensions", "near"),
    "cholesky": _rule_of_each_position("", last=2),
    "lu_pivots_to_permutation": _rule_of_each_position("", last=1),
    **{f"reduce_{how}": _rule_of_reductions(how) for how in REDUCED},
    **_makers_of("argmax argmin", _rule_of_reductions("sort")),
    "reduce": _rule_of_reductions("whole", "dimensions"),
    "transpose": _rule_of_layouts(lambda e, dims: [dims[i] for i in e.params["permutation"]]),
    "broadcast_in_dim": _rule_of_layouts(_dims_of_broadcast),
    "squeeze": _rule_of_layouts(lambda e, dims: [d for i, d in enumerate(dims) if i not in e.params["dimensions"]]),
    "tile": _rule_of_layouts(
        lambda e, dims: [d if r == 1 else (*e.new(r), *d) for r, d in zip(e.params["reps"], dims, strict=True)]
    ),
    "stack": _rule_of_layouts(
        lambda e, dims: [*dims[: e.params["axis"]], e.new(len(e.ins)), *dims[e.params["axis"] :]]
    ),
    "reshape": _rule_of_reshapes,
    **_makers_of("slice dynamic_slice", _rule_of_slices),
    "split": _rule_of_splits,
    "pad": _rule_of_pads,
    "concatenate": _rule_of_concatenations,
    "unstack": _rule_of_unstacks,
    "dynamic_update_slice": _rule_of_slice_updates,
    "dot_general": lambda e: _rule_of_products(e, e.params["dimension_numbers"]),
    "ragged_dot_general": _grouped_product,
    "conv_general_dilated": _rule_of_convolutions,
    **_makers_of("reduce_window reduce_window_sum reduce_window_max reduce_window_min", _rule_of_windows),
    **_makers_of("all_gather reduce_scatter all_gather_invariant", _rule_of_windows),
    **_makers_of("select_and_scatter_add select_and_gather_add maybe_set", _as_first_of_shape),
    "gather": _looked_up,
    **_makers_of("scatter scatter-add scatter_add scatter-mul scatter_mul scatter-min scatter_min", _rule_of_scatters),
    **_makers_of("scatter-max scatter_max scatter-sub scatter_sub", _rule_of_scatters),
    **_makers_of("top_k approx_top_k", _rule_of_top_k),
    "iota": _rule_of_iota,
    "fft": _rule_of_transforms,
    **_makers_of(
        "bitcast_convert_type random_bits random_split random_seed random_unwrap random_wrap empty", _rule_of_keys
    ),
    **_makers_of("axis_index create_token after_all", _rule_of_keys),
    **_makers_of("unvmap_any unvmap_all unvmap_max", _rule_of_unrelated_axes),
    "triangular_solve": _rule_of_triangular_solves,
    "svd": _rule_of_factorizations("", "row", "column"),
    "qr": _rule_of_factorizations("row", "column"),
    "eigh": _rule_of_factorizations("row", ""),
    "eig": _rule_of_factorizations("", "row", "row"),
    "lu": _rule_of_factorizations("column", "", ""),
}
"""For each primitive, a function that makes the rule of an equation."""


def rule_of(eqn: Any) -> OperationRule | None:
    """Return the rule of an equation; None if its primitive has none, or calls functions."""
    make = PRIMITIVES.get(eqn.primitive.name)
    return None if make is None else make(_Equation(eqn))


# --- functions inside of an equation ---


class Inside(NamedTuple):
    """A function that an equation runs."""

    jaxpr: Any
    how: str
    """`call`, `loop`, `test` (of a loop), `branch`, `device`."""
    operands: Sequence[int]
    """The operand of the equation that each argument is."""
    carried: int = 0
    """How many results are the arguments of the next run: the first ones."""
    first: int = 0
    """The first carried argument."""
    sliced: int = 0
    """How many arguments, the last ones, are slices of the operands along their first axis, and so are the results
    after the carried ones of the results of the equation."""
    times: int | None = 1
    """None if values decide."""
    constants: Sequence[Any] = ()
    """The values of its constants."""


def inside(eqn: Any) -> list[Inside]:
    """Return the functions that an equation runs, which is all that a walk over a program has to know of it."""
    name, params = eqn.primitive.name, eqn.params
    count = len(eqn.invars)
    if name == "scan":
        consts, carry, scanned = scan_operands(params, range(count))
        return [
            Inside(params["jaxpr"].jaxpr, "loop", [*consts, *carry, *scanned], len(carry), len(consts), len(scanned),
                   params["length"], params["jaxpr"].consts)
        ]  # fmt: skip
    if name == "while":
        tests, consts = params["cond_nconsts"], params["body_nconsts"]
        carry = range(tests + consts, count)
        test, body = params["cond_jaxpr"], params["body_jaxpr"]
        operands = [*range(tests), *carry]
        return [
            Inside(test.jaxpr, "test", operands, len(carry), tests, times=None, constants=test.consts),
            Inside(body.jaxpr, "loop", range(tests, count), len(carry), consts, times=None, constants=body.consts),
        ]
    if name == "cond":
        return [Inside(x.jaxpr, "branch", range(1, count), constants=x.consts) for x in params["branches"]]
    if name == "shard_map":
        return [Inside(params["jaxpr"], "device", range(count))]
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        if (found := params.get(key)) is not None:
            jaxpr = getattr(found, "jaxpr", found)
            fits = len(jaxpr.invars) == count and len(jaxpr.outvars) == len(eqn.outvars)
            constants = getattr(found, "consts", ())
            return [Inside(jaxpr, "call", range(count), constants=constants)] if fits else []
    found = program_of(params, eqn.invars)
    return [] if found is None else [Inside(found, "call", range(count))]


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a program, and of all programs in them, also of those that no rule enters."""
    for eqn in jaxpr.eqns:
        yield eqn
        for program in [f.jaxpr for f in inside(eqn)] or programs_in(eqn):
            yield from equations(program)
