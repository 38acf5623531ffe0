"""Products of arrays, summed over some of their axes.

`dot` takes the axes to sum over, `einsum` an equation of input and output axes. Both use `jax.lax.dot_general`, two
operands at a time, in the order that costs least if there are more. By default the result has the axes of the first
operand in order, then the axes that only the others have. `axonym.distribution.policy` decides where each product lies
and what devices exchange: `combine`, for Explicit mesh axes and for FSDP parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding
from jax.typing import DTypeLike

from ..axis import Axis, AxisSelection, AxisSelector, Names, name_of, rearrange_for_partial_order, selectors
from ..core import errors, parsing
from ..core.parsing import Dots, Expression, Name, Place, Term
from ..distribution import fsdp_ops, output_sharding
from ..distribution.axis_rules import AxisRule
from ..distribution.mesh_axes import entries_of, explicit_mesh
from ..named_array import NamedArray, wrap
from . import _kernels
from ._operands import dtype_key, private

DotGeneral = Callable[..., jax.Array]
"""A replacement for `jax.lax.dot_general`, such as a quantized one. It may be a pytree that holds arrays."""


class _Plan(NamedTuple):
    """A contraction as static data: axes that are not in `out_names` are summed over.

    `sized` holds the axes that the user gave with a size; their sizes are checked.
    """

    what: str
    in_names: tuple[Names, ...]
    out_names: Names
    precision: jax.lax.PrecisionLike = None
    preferred_element_type: DTypeLike | None = None
    sized: tuple[Axis, ...] = ()

    @property
    def uses(self) -> dict[str, str]:
        return {n: "sum" for names in self.in_names for n in names if n not in self.out_names}


class _OperandTerm(NamedTuple):
    names: Names
    array: jax.Array


class _Required:
    def __repr__(self) -> str:
        return "<required>"


_REQUIRED = _Required()
_DOT_GENERAL = jax.lax.dot_general  # finding it in its modules takes a twentieth of an eager product


def dot(
    *arrays: Any,
    axis: AxisSelection | _Required | None = _REQUIRED,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_axes: Sequence[AxisSelector | EllipsisType] | None = None,
    dot_general: DotGeneral = jax.lax.dot_general,
) -> NamedArray:
    """Multiply arrays and sum over some axes. Axes of the same name are matched; all other axes are kept.

    Arguments:
        axis: the axes to sum over, which two operands must have; None for all axes, `()` for none.
        precision: as in `jax.lax.dot_general`.
        preferred_element_type: the dtype to accumulate in and return.
        out_axes: the order of the result's axes, with `...` for the axes not named.
        dot_general: a replacement for `jax.lax.dot_general`. If it uses arrays of its own, make it a pytree that holds
            them, such as `jax.tree_util.Partial(fn, array)`; on Explicit mesh axes it must be one.

    >>> x = axn.ones({"batch": 2, "embed": 3})
    >>> w = axn.ones({"embed": 3, "mlp": 4})
    >>> axn.dot(x, w, axis="embed").shape
    {'batch': 2, 'mlp': 4}
    >>> axn.dot(x, w, axis=None)
    NamedArray(float32[], 24.)
    """
    if len(arrays) == 2 and axis is not _REQUIRED and type(arrays[0]) is type(arrays[1]) is NamedArray:
        left, right = arrays  # the common case, in which loops over the operands would double the cost
        names, raw = (left.names, right.names), (left.array, right.array)
    else:
        arrays, axis = _operands_and_axis(arrays, axis)
        names, raw = tuple(a.names for a in arrays), tuple(a.array for a in arrays)
    if type(axis) is not str:
        axis = _kernels.hashable(axis)  # pyright: ignore[reportArgumentType]  # no longer the marker
    if out_axes is not None:
        out_axes = (out_axes,) if isinstance(out_axes, (str, Axis)) else tuple(out_axes)
    if preferred_element_type is not None:
        preferred_element_type = dtype_key(preferred_element_type)
    if dot_general is _DOT_GENERAL:
        kernel = _contraction_kernel(_dot_plan, names, axis, out_axes, precision, preferred_element_type)
        return kernel.apply(*raw)
    plan = _dot_plan(names, axis, out_axes, precision, preferred_element_type)
    return wrap(_contract_with(plan, raw, dot_general), plan.out_names)


# Two caches: by the call, so that each is planned once; and by the plan, so that calls share a program that have other
# names, or spell the axes in another way.


@_kernels.cached
def _contraction_kernel(make_plan: Callable[..., _Plan], *key: Any) -> _kernels.Kernel:
    return _plan_kernel(*make_plan(*key))


@_kernels.shared("in_names", "out_names", "sized")
def _plan_kernel(
    what: str,
    in_names: tuple[Names, ...],
    out_names: Names,
    precision: Any,
    preferred_element_type: Any,
    sized: tuple[Axis, ...],
) -> _kernels.Kernel:
    plan = _Plan(what, in_names, out_names, precision, preferred_element_type, sized)

    def positional(*arrays):
        return _contract(plan, arrays, jax.lax.dot_general)

    return _kernels.make_kernel(
        what, positional, in_names, out_names, plan.uses, product=True, selection=sized, mesh_aware=True
    )


def _dot_plan(
    all_names: tuple[Names, ...],
    axis: Any,
    out_axes: tuple[Any, ...] | None,
    precision: Any,
    preferred_element_type: Any,
) -> _Plan:
    union = tuple(dict.fromkeys(n for names in all_names for n in names))
    summed = union if axis is None else tuple(map(name_of, selectors(axis)))
    if missing := [n for n in summed if n not in union]:
        operands = " and ".join(errors.describe_axes(n) for n in all_names)
        hints = errors.suggestions(missing, union)
        raise ValueError(f"dot: no operand has axis {errors.quoted(missing)}; the operands are {operands}.{hints}")
    for n in () if axis is None else summed:
        if alone := _found_in_one_operand(n, all_names):
            raise ValueError(f"dot: {alone}")
    kept = out_names = tuple(n for n in union if n not in summed)
    if out_axes is not None:
        wanted = [s if isinstance(s, EllipsisType) else name_of(s) for s in out_axes]
        named = [n for n in wanted if isinstance(n, str)]
        if unknown := [n for n in named if n not in kept]:
            raise ValueError(
                f"dot: out_axes names {errors.quoted(unknown)}, which the result does not have: summing leaves "
                f"{errors.describe_axes(kept)}."
            )
        left_out = [n for n in kept if n not in wanted]
        if left_out and ... not in wanted:
            listed = errors.quoted(left_out)
            raise ValueError(f"dot: out_axes leaves out {listed} of the result; name every axis, or add `...`.")
        if len({*named}) < len(named):
            raise ValueError(f"dot: out_axes names an axis twice: {errors.describe_axes(map(str, wanted))}.")
        out_names = rearrange_for_partial_order(wanted, kept)
    sized = tuple(s for s in (*selectors(axis), *(out_axes or ())) if isinstance(s, Axis))
    return _Plan("dot", all_names, out_names, precision, preferred_element_type, sized)


def _operands_and_axis(arrays: tuple[Any, ...], axis: Any) -> tuple[tuple[NamedArray, ...], Any]:
    """Return the operands and the axes, which may also come first: `dot("embed", x, w)`."""
    operands = [a for a in arrays if isinstance(a, NamedArray)]
    others = [a for a in arrays if not isinstance(a, NamedArray)]
    if others and axis is _REQUIRED and len(others) == 1 and isinstance(others[0], (str, Axis, tuple, list)):
        axis, others = others[0], []
    if others:
        kinds = ", ".join(type(a).__name__ for a in others)
        raise TypeError(f"dot: expected NamedArrays, got {kinds}.{errors.HOW_TO_NAME}")
    if axis is _REQUIRED:
        listed = " and ".join(errors.describe_axes(x.names, jnp.shape(x.array)) for x in operands)
        raise TypeError(f"dot of {listed}: say which axes to sum over, `axis=...`; None means all of them.")
    if not operands:
        raise TypeError("dot: expected at least one NamedArray.")
    return tuple(operands), axis


def _found_in_one_operand(name: str, all_names: Sequence[Names]) -> str:
    """Say that only one of several operands has an axis to sum over; return an empty text if that is not so."""
    having = [i for i, names in enumerate(all_names) if name in names]
    if len(all_names) == 1 or len(having) > 1:
        return ""
    others = dict.fromkeys(n for names in all_names for n in names if name not in names)
    hint = errors.suggestion(name, [n for n in others if n not in all_names[having[0]]])
    operands = " and ".join(errors.describe_axes(n) for n in all_names)
    return (
        f"only operand {having[0]} has axis {name!r}; the operands are {operands}.{hint} To sum it in that operand "
        f"alone, write `x.sum({name!r})` there."
    )


# --- einsum ---


def einsum(
    equation: str,
    *arrays: NamedArray,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    dot_general: DotGeneral = jax.lax.dot_general,
    **axis_aliases: AxisSelector,
) -> NamedArray:
    """Multiply arrays and sum over every axis that the output does not have.

    The input is written in one of three ways:

    - in order, a term for each array, `"batch h d, d -> batch h"`. The words need not be the names of the axes, but one
      word must mean one axis name throughout;
    - by name, in braces and once for all arrays, `"{h d} -> h"`. Axes not in the braces are kept, in place of the `...`
      in the output, or in front; those that are summed over must be in two arrays;
    - not at all, `"-> batch h"`: all other axes are summed over.

    `...` stands for the axes that are not named, each matched by name; the output keeps the ones that it names, or all
    of them if it has a `...` too.

    Arguments:
        equation: the axes of the operands, `->`, and the axes of the result in order.
        **axis_aliases: the axis that a word of the equation stands for. All other options are as for `dot`.

    >>> x, w = axn.ones({"batch": 2, "embed": 3}), axn.ones({"embed": 3, "mlp": 4})
    >>> axn.einsum("b e, e m -> b m", x, w).shape
    {'batch': 2, 'mlp': 4}
    >>> axn.einsum("{E mlp} -> mlp", x, w, E="embed").shape
    {'batch': 2, 'mlp': 4}
    >>> axn.einsum("-> mlp", x, w)
    NamedArray(float32[mlp=4], [6. 6. 6. 6.])
    """
    if not isinstance(equation, str):
        raise TypeError(f"einsum: the equation comes first, as a string, got {type(equation).__name__}.")
    if not arrays:
        raise TypeError("einsum: expected at least one NamedArray.")
    for x in arrays:
        if not isinstance(x, NamedArray):
            raise TypeError(
                f"einsum: expected NamedArrays, got {type(x).__name__}. Name raw arrays with axonym.named(array, axes)."
            )
    names, dtype = tuple(x.names for x in arrays), dtype_key(preferred_element_type)
    key = equation, names, tuple(axis_aliases.items()), precision, dtype
    raw = [x.array for x in arrays]
    if dot_general is _DOT_GENERAL:
        return _contraction_kernel(_einsum_plan, *key).apply(*raw)
    plan = _einsum_plan(*key)
    return wrap(_contract_with(plan, raw, dot_general), plan.out_names)


def _einsum_plan(
    equation: str,
    all_names: tuple[Names, ...],
    aliases: tuple[tuple[str, AxisSelector], ...],
    precision: Any,
    preferred_element_type: Any,
) -> _Plan:
    """Return the contraction that an equation describes."""
    expression = parsing.parse("einsum", equation, comma="terms")
    terms = (*expression.lhs, *expression.rhs)
    for group in (g for term in terms for g in term.groups):
        expression.fail(group, "axes are not split or merged here; use rearrange before or after.")
    used = {w.name for term in terms for w in _words_of(term)}
    if unused := [word for word, _ in aliases if word not in used]:
        listed, hints = errors.quoted(unused), errors.suggestions(unused, used)
        raise TypeError(f"einsum: {listed} is given by keyword but does not appear in {equation!r}.{hints}")
    meaning = _Meaning(expression, all_names, {word: name_of(a) for word, a in aliases})
    sized = tuple(a for _, a in aliases if isinstance(a, Axis))
    return _Plan("einsum", all_names, meaning.output(), precision, preferred_element_type, sized)


class _Meaning:
    """The axis that each word of an equation means."""

    def __init__(self, expression: Expression, all_names: Sequence[Names], aliases: Mapping[str, str]):
        self.expression = expression
        self.all_names = all_names
        self.aliases = aliases
        self.union: Names = tuple(dict.fromkeys(n for names in all_names for n in names))
        self.axes: dict[str, str] = {}
        self.rest_is_kept = False
        lhs = expression.lhs
        self.in_braces = in_braces = next((term for term in lhs if not term.ordered), None)
        if in_braces is not None:
            if len(lhs) > 1:
                expression.fail(in_braces, "one term in braces is for all arrays; there can be no other term.")
            self.rest = self._bind_by_name(in_braces)
            self.rest_is_kept = in_braces.dots is None
            if in_braces.dots is not None:  # it stands for axes that the output may name
                for word in _words_of(expression.rhs[0]):
                    name = self.aliases.get(word.name, word.name)
                    if word.name not in self.axes and name in self.rest:
                        self._bind(word, name)
        elif len(lhs) == 1 and not lhs[0].elements:
            self.rest = self._bind_by_name(expression.rhs[0])
        else:
            self.rest = self._bind_in_order()

    def output(self) -> Names:
        """Return the axes of the result."""
        term, *more = self.expression.rhs
        if more:
            self.expression.fail(more[0], "there is one result.")
        named = {}
        for word in _words_of(term):
            if word.name not in self.axes:
                known = errors.describe_axes(self.axes)
                hint = errors.suggestion(word.name, self.axes)
                self.expression.fail(word, f"{word.name!r} is not among the axes of the input {known}.{hint}")
            named[self.axes[word.name]] = word
        for word in _words_of(self.in_braces) if self.in_braces else ():
            name = self.axes[word.name]
            if name not in named and (alone := _found_in_one_operand(name, self.all_names)):
                self.expression.fail(word, alone)
        rest = tuple(n for n in self.rest if n not in named)
        out: list[str] = [] if term.dots or not self.rest_is_kept else list(rest)
        for element in term.elements:
            if isinstance(element, Dots):
                out += rest
            elif isinstance(element, Name):
                out.append(self.axes[element.name])
        if len(set(out)) != len(out):
            self.expression.fail(term, errors.duplicate_names("the result", out))
        return tuple(out)

    def _bind_by_name(self, term: Term) -> Names:
        """Bind each word to the axis of that name or alias; return the axes that no word names."""
        for word in _words_of(term):
            name = self.aliases.get(word.name, word.name)
            if name not in self.union:
                operands = " and ".join(errors.describe_axes(n) for n in self.all_names)
                hint = errors.suggestion(name, self.union)
                self.expression.fail(word, f"no array has axis {name!r}; the arrays are {operands}.{hint}")
            self._bind(word, name)
        return tuple(n for n in self.union if n not in self.axes.values())

    def _bind_in_order(self) -> Names:
        """Bind each word to the axis at its position; return the axes that the ellipses stand for."""
        lhs = self.expression.lhs
        if len(lhs) != len(self.all_names):
            self.expression.fail(
                Place(lhs[0].start, lhs[-1].stop), f"number of terms: {len(lhs)}, of arrays: {len(self.all_names)}."
            )
        rest: list[str] = []
        for term, names in zip(lhs, self.all_names, strict=True):
            words = len(term.elements) - (term.dots is not None)
            if words > len(names) or (term.dots is None and words != len(names)):
                hint = parsing.split_words(self.expression, [*map(len, self.all_names)])
                hint = hint or (" Words are separated by spaces." if words < len(names) else "")
                self.expression.fail(
                    term, f"number of axes: {words}, for an array with {errors.describe_axes(names)}.{hint}"
                )
            taken = iter(names)
            for element in term.elements:
                if isinstance(element, Dots):
                    rest += [next(taken) for _ in range(len(names) - words)]
                else:
                    self._bind(element, next(taken))
        return tuple(dict.fromkeys(rest))

    def _bind(self, word: Any, name: str) -> None:
        known = self.axes.setdefault(word.name, self.aliases.get(word.name, name))
        if known != name:
            self.expression.fail(
                word,
                f"{word.name!r} stands for axis {known!r} elsewhere, but for {name!r} here. One word means one axis; "
                "rename an axis first if they are meant to be summed over together.",
            )
        other = next((w for w, n in self.axes.items() if n == name and w != word.name), None)
        if other is not None:
            self.expression.fail(word, f"axis {name!r} is already called {other!r}; one axis has one word.")


def _words_of(term: Term) -> Iterator[Name]:
    return (e for e in term.elements if isinstance(e, Name))


# --- plans, of any number of operands ---


def _contract_with(plan: _Plan, arrays: Sequence[jax.Array], dot_general: DotGeneral) -> jax.Array:
    """Contract with a replacement for `dot_general`. It may hold arrays, so it is not cached."""
    _kernels.check_operands(plan.what, plan.in_names, arrays)
    _kernels.check_selection(plan.what, plan.in_names, arrays, plan.sized)
    if explicit_mesh(arrays) is None:
        return _contract(plan, arrays, dot_general)
    held, held_names, holding = _held_arrays(dot_general)

    def positional(*operands):
        return _contract(plan, operands[: len(arrays)], holding(operands[len(arrays) :]))

    try:
        return output_sharding.call_with_output_sharding(
            plan.what,
            positional,
            AxisRule([*plan.in_names, *held_names], plan.out_names, plan.uses, product=True),
            [*arrays, *held],
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


def _contract(plan: _Plan, arrays: Sequence[jax.Array], dot_general: DotGeneral) -> jax.Array:
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


def _order_of_products(plan: _Plan, terms: Sequence[_OperandTerm]) -> list[tuple[int, int]]:
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
    plan: _Plan,
    left: _OperandTerm,
    right: _OperandTerm,
    needed: set[str],
    target: Names | None,
    dot_general: DotGeneral,
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


def _sum_out(plan: _Plan, term: _OperandTerm, needed: set[str]) -> _OperandTerm:
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
