"""`lift`: make a named function of a positional one.

A positional function knows how many axes its arrays have and which is which. Lifting says once, in order, what those
axes are called. All other axes that named arrays bring along are matched by name and mapped over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, overload

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from .. import _errors, _kernels
from .._function_cache import FunctionCache, Functions, WithArrays
from .._mesh_axes import mesh_around
from .._tree_spec import TreeSpec
from ..array import NamedArray, wrap, wrap_result
from ..axis import Axis, AxisSelection, AxisSelector, Names, name_of
from ..ops._operands import check_new_axis, private
from . import _mapped_axis
from ._lift_signature import NUMERIC, Call, Signature, check_aliases, make_signature


class _Decorator(Protocol):
    """The type of `lift("i j -> i")` for type checkers."""

    @overload
    def __call__(self, fn: Callable[..., jax.Array], /) -> Callable[..., NamedArray]: ...
    @overload
    def __call__(self, fn: Callable[..., Sequence[jax.Array]], /) -> Callable[..., tuple[NamedArray, ...]]: ...
    @overload
    def __call__(self, fn: Callable[..., Any], /) -> Callable[..., Any]: ...


InAxes: TypeAlias = AxisSelection | Sequence[AxisSelection | None] | None
OutAxes: TypeAlias = AxisSelection | Sequence[AxisSelection] | None


@overload
def lift(
    fn: str, spec: None = None, *, in_axes: None = None, out_axes: None = None, **axes: AxisSelector
) -> _Decorator: ...
@overload
def lift(
    fn: Callable[..., jax.Array],
    spec: str | None = None,
    *,
    in_axes: InAxes = None,
    out_axes: OutAxes = None,
    **axes: AxisSelector,
) -> Callable[..., NamedArray]: ...
@overload
def lift(
    fn: Callable[..., Sequence[jax.Array]],
    spec: str | None = None,
    *,
    in_axes: InAxes = None,
    out_axes: OutAxes = None,
    **axes: AxisSelector,
) -> Callable[..., tuple[NamedArray, ...]]: ...
@overload
def lift(
    fn: Callable[..., Any],
    spec: str | None = None,
    *,
    in_axes: InAxes = None,
    out_axes: OutAxes = None,
    **axes: AxisSelector,
) -> Callable[..., Any]: ...
def lift(
    fn: Any,
    spec: str | None = None,
    *,
    in_axes: Any = None,
    out_axes: Any = None,
    **axes: AxisSelector,
) -> Any:
    """Make a named function of a positional one.

    The spec says which axes the function takes and gives, `"i j, i -> j"`: a term for each array, with the axes in the
    order of its positions, `->`, and a term for each result. A blank term is a scalar. The words are the axes' names,
    or are said to stand for others by keyword, here or when calling. All other axes of the operands are mapped over,
    matched by name; those that an operand lacks are the same for it throughout. Named arrays and scalars can be
    operands.

    Words that only the results have are new axes. A result keeps the layout of the first operand that has all the axes
    that are mapped over; its new axes stand where the first axis stood that is gone, or at the end.

    Further arguments, by position or keyword, are handed to the function as they are and must be hashable, apart from
    the arrays in modules and other trees. It is compiled once for each of their values, and as in `jax.jit`, it should
    have no side effects. What was compiled belongs to the function, and is found again if it is lifted again; a lambda
    that is written in a loop is another function every time, so lift it before the loop.

    The function may be a module, a method of one, or a `functools.partial`: the arrays that it holds are operands like
    the others, the same throughout, and can be differentiated. On Explicit mesh axes it cannot use arrays in any other
    way.

    With the spec in the place of the function, `lift` is a decorator.

    Arguments:
        fn: the positional function. It returns an array, or a tuple of them where the spec has several results.
        spec: the axes it takes and gives.
        in_axes: instead of a spec, the axes that each operand has. None is an argument that is handed on as it is.
        out_axes: the axes of the result that go with it, or a sequence of such selections for several results.
        **axes: the axis that a word stands for. Where an `Axis` is given, its size is checked.

    >>> solve = axn.lift(jnp.linalg.solve, "row col, row -> col")
    >>> solve(axn.eye(*axn.make_axes(row=2, col=2)), axn.ones({"batch": 3, "row": 2})).shape
    {'batch': 3, 'col': 2}
    >>> largest = axn.lift(jax.lax.top_k, "n -> k, k")
    >>> values, indices = largest(axn.named([3, 1, 2], "time"), 2, n="time")
    >>> values, indices
    (NamedArray(int32[k=2], [3 2]), NamedArray(int32[k=2], [0 2]))
    """
    if isinstance(fn, str):
        if spec is not None or in_axes is not None or out_axes is not None:
            raise TypeError("lift: expected a function, got a string. As a decorator, lift takes the spec alone.")
        return lambda decorated: lift(decorated, fn, **axes)
    if not callable(fn):
        raise TypeError(f"lift: expected a function, got {type(fn).__name__}.")
    what = f"lift({_name(fn)})"
    signature = make_signature(what, spec, in_axes, out_axes)
    check_aliases(what, signature, axes)
    known = {**dict(signature.axes), **axes}
    functions_of = Functions(fn, own=FunctionCache()).now

    def lifted(*args: Any, **kwargs: Any) -> Any:
        here = {word: kwargs.pop(word) for word in signature.words if word in kwargs}
        check_aliases(what, signature, here)
        given = signature.sorted_out(what, Call(fn, args, kwargs))
        functions = functions_of()
        held = [*functions.arrays, *given.handed_on]
        aliases = tuple({**known, **here}.items())
        plan = _LiftPlan(what, signature, len(functions.arrays), tuple(map(jnp.ndim, held)), given.names, aliases)
        kernel = functions.compiled(_build, plan, given.static)
        try:
            return wrap_result(kernel.call(*held, *given.operands), kernel.names)
        except Exception as e:
            explicit = AxisType.Explicit in mesh_around().axis_types
            if explicit and not str(e).startswith(what) and _closes_over_arrays(fn):
                e.add_note(_CLOSES_OVER_ARRAYS.format(what=what))
            raise

    return functools.update_wrapper(lifted, fn, updated=())


def _name(fn: Callable[..., Any]) -> str:
    """Return the name of a function for messages."""
    if isinstance(fn, functools.partial):
        return _name(fn.func)
    return getattr(fn, "__name__", type(fn).__name__)


_CLOSES_OVER_ARRAYS = (
    "{what}: the function uses arrays that it takes from around it. On Explicit mesh axes it cannot: make them "
    "operands, each with a term in the spec, or let the function hold them, as a module or a `functools.partial` does."
)


def _closes_over_arrays(fn: Any) -> bool:
    """Return whether a function uses arrays of the code around it, or of an object that JAX cannot look into."""
    if isinstance(fn, functools.partial):
        return _closes_over_arrays(fn.func)
    function = inspect.unwrap(fn)
    found = [getattr(getattr(function, "__self__", None), "__dict__", None)]
    with contextlib.suppress(TypeError):  # not written in Python
        around = inspect.getclosurevars(function)
        found += [around.nonlocals, around.globals]
    return any(isinstance(x, jax.Array) for x in jax.tree.leaves(found))


# --- from names to a kernel ---


@dataclasses.dataclass(frozen=True, slots=True)
class _LiftPlan:
    """Everything static that a kernel depends on, besides the spec of the arguments that are handed on."""

    what: str
    signature: Signature
    of_function: int
    """The number of arrays that the function holds."""
    ranks: tuple[int, ...]
    """The number of axes of each of them, and of each array in the arguments that are passed on."""
    in_names: tuple[Names, ...]
    """The axes of each operand."""
    aliases: tuple[tuple[str, AxisSelector], ...]


def _build(functions: WithArrays, plan: _LiftPlan, handed_on: TreeSpec) -> _kernels.Kernel:
    """Make a kernel for the arrays that are not mapped over, and for operands of the given names."""
    what, signature, in_names, aliases = plan.what, plan.signature, plan.in_names, plan.aliases
    count = len(plan.ranks)
    axes = {word: word for word in signature.words} | dict(aliases)
    own = [_names(axes, term) for term in signature.terms]
    if any(n not in names for names, needed in zip(in_names, own, strict=True) for n in needed):
        return _kernels.Kernel(lambda *arrays: _raise_lacking(what, in_names, own, arrays[count:]), None)
    all_own = {n for needed in own for n in needed}
    rest = [_mapped_axis.without(names, *needed) for names, needed in zip(in_names, own, strict=True)]
    _check_one_meaning(what, signature, axes, rest, all_own)
    layout = _layout(what, in_names, rest, bool(all_own))
    mapped = tuple(n for n in layout if any(n in names for names in rest))
    out_own = [_names(axes, term) for term in signature.outputs]
    out_names = tuple(_out_names(what, layout, mapped, names) for names in out_own)

    def one(sizes, held, *arrays):
        """Call the function on arrays without the axes that are mapped over."""
        (fn,) = functions(held[: plan.of_function])
        operands = [
            _kernels.transpose_to(x, _mapped_axis.without(names, *mapped), needed)
            for x, names, needed in zip(arrays, in_names, own, strict=True)
        ]
        args, kwargs = signature.put_together(operands, handed_on.unflatten(held[plan.of_function :]))
        try:
            results = fn(*args, **kwargs)
        except Exception as e:
            e.add_note(_seen(what, own, operands, mapped))
            raise
        results = _checked_results(what, signature, axes, operands, results)
        _mapped_axis.check_placed_elsewhere(what, sizes, _named(operands, own), _named(results, out_own))
        return tuple(
            _kernels.transpose_to(r, names, _mapped_axis.without(out, *mapped))
            for r, names, out in zip(results, out_own, out_names, strict=True)
        )

    def positional(*arrays):
        held, arrays = list(arrays[:count]), arrays[count:]
        sizes = {n: s for ns, x in zip(in_names, arrays, strict=True) for n, s in zip(ns, jnp.shape(x), strict=True)}
        over_all = functools.partial(one, {n: sizes[n] for n in mapped})
        for level in reversed(range(len(mapped))):
            name, outer = mapped[level], mapped[:level]
            over_all = jax.vmap(
                over_all,
                in_axes=(None, *(_position(names, name, outer) for names in in_names)),
                out_axes=tuple(_position(names, name, outer) for names in out_names),
                spmd_axis_name=_mapped_axis.spmd_axes(name, sizes[name]),
            )
        with _mapped_axis.collisions_named(what, mapped):
            results = over_all(held, *arrays)
        return results if signature.several else results[0]

    sized = tuple(axis for term in signature.terms for w in term if isinstance(axis := axes[w], Axis))
    held_names = [private(f"held array {i}", tuple(map(str, range(rank)))) for i, rank in enumerate(plan.ranks)]
    return _kernels.make_kernel(
        what,
        positional,
        (*held_names, *in_names),
        out_names if signature.several else out_names[0],
        selection=sized,
        keep_unused=False,
    )


def _seen(what: str, own: Sequence[Names], operands: Sequence[Any], mapped: Names) -> str:
    """Describe the arguments of the function."""
    types = [jax.typeof(x) for x in operands]
    listed = ", ".join(f"{t.dtype}{_errors.describe_axes(n, t.shape)}" for n, t in zip(own, types, strict=True))
    over = f", mapped over {_errors.describe_axes(mapped)}" if mapped else ""
    return f"{what}: raised by the function on {listed}{over}."


def _named(arrays: Sequence[Any], names: Sequence[Names]) -> list[Any]:
    return [wrap(x, n) for x, n in zip(arrays, names, strict=True)]


def _names(axes: Mapping[str, AxisSelector], words: Names) -> Names:
    return tuple(name_of(axes[w]) for w in words)


def _position(names: Names, name: str, outer: Names) -> int | None:
    """Return the position of an axis without those further out."""
    return _mapped_axis.without(names, *outer).index(name) if name in names else None


def _layout(what: str, in_names: tuple[Names, ...], rest: Sequence[Names], takes_axes: bool) -> Names:
    """Return the axes whose order the results keep: those of the first operand that has all mapped axes."""
    every = set().union(*rest)
    for names, mapped in zip(in_names, rest, strict=True):
        if len(mapped) == len(every):
            return names
    if not takes_axes:  # as with any elementwise operation, an outer product is not made by chance
        return _kernels.broadcast_names(what, in_names)
    return tuple(dict.fromkeys(n for names in in_names for n in names))


def _out_names(what: str, layout: Names, mapped: Names, own: Names) -> Names:
    """Return the axes of a result: those of the layout that it has, and its own in place of the first that is gone."""
    twice = [n for n in own if n in mapped or own.count(n) > 1]
    if twice:
        raise ValueError(_errors.duplicate_names(what, (*mapped, *own)))
    kept = [n in mapped or n in own for n in layout]
    place = kept.index(False) if False in kept else len(layout)
    new = tuple(n for n in own if n not in layout)
    return (*layout[:place], *new, *(n for n, keep in zip(layout[place:], kept[place:], strict=True) if keep))


# --- checks ---


def _check_one_meaning(
    what: str, signature: Signature, axes: Mapping[str, AxisSelector], rest: Sequence[Names], own: set[str]
) -> None:
    """Check that an axis has one word, and is either an axis of the function or mapped over."""
    word_of: dict[str, str] = {}
    for word in dict.fromkeys(w for term in signature.terms for w in term):
        name = name_of(axes[word])
        if name in word_of:
            raise ValueError(f"{what}: {word_of[name]!r} and {word!r} both stand for axis {name!r}; it has one word.")
        word_of[name] = word
    for i, names in enumerate(rest):
        both = [n for n in names if n in own]
        if both:
            raise ValueError(
                f"{what}: axis {both[0]!r} is the function's own in one operand, but operand {i} has it where the spec "
                "does not say so, so that it would be mapped over. Rename it in one of them."
            )


def _checked_results(
    what: str, signature: Signature, axes: Mapping[str, AxisSelector], operands: Sequence[Any], results: Any
) -> list[Any]:
    """Check that the results of the function are arrays with the axes of the spec."""
    if isinstance(results, (tuple, list)) != signature.several:
        raise TypeError(f"{what}: the function returned {_described(results)}, {_wanted(signature)}.")
    found = list(results) if signature.several else [results]
    if len(found) != len(signature.outputs):
        raise ValueError(f"{what}: the function returned {_described(results)}, {_wanted(signature)}.")
    sizes = {
        w: s for term, x in zip(signature.terms, operands, strict=True) for w, s in zip(term, x.shape, strict=True)
    }
    for i, (term, result) in enumerate(zip(signature.outputs, found, strict=True)):
        if not isinstance(result, NUMERIC):
            raise TypeError(f"{what}: the function returned {_described(result)}, where it should return raw arrays.")
        found[i] = result = jnp.asarray(result)
        if result.ndim != len(term):
            raise ValueError(
                f"{what}: the function returned an array of shape {tuple(result.shape)}, where the spec says "
                f"`{' '.join(term)}`."
            )
        for word, size in zip(term, result.shape, strict=True):
            check_new_axis(what, axes[word], size)
            if sizes.setdefault(word, size) != size:
                raise ValueError(
                    f"{what}: axis {word!r} has size {size} in result {i}, but {sizes[word]} elsewhere. An axis of "
                    "another size needs a word of its own, as in `n -> m`."
                )
    return found


def _described(results: Any) -> str:
    if isinstance(results, (tuple, list)):
        return f"{len(results)} results"
    return "one array" if isinstance(results, jax.Array) else f"a {type(results).__name__}"


def _wanted(signature: Signature) -> str:
    return f"where the spec has {len(signature.outputs)} result{'s' if signature.several else ''}"


def _raise_lacking(what: str, in_names: Sequence[Names], own: Sequence[Names], arrays: Sequence[Any]) -> None:
    problems, hints = [], ""
    for i, (names, needed, x) in enumerate(zip(in_names, own, arrays, strict=True)):
        missing = [n for n in needed if n not in names]
        if missing:
            listed = ", ".join(map(repr, missing))
            problems.append(f"operand {i} {_errors.describe_axes(names, jnp.shape(x))} has no axis {listed}")
            hints = hints or "".join(_errors.suggestion(n, names) for n in missing)
    raise ValueError(
        f"{what}: {', and '.join(problems)}.{hints} Say by keyword which axis a word of the spec stands for, as in "
        "`i='row'`."
    )
