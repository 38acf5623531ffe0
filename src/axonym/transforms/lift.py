"""`lift`: make a named function of a positional one.

A positional function knows how many axes its arrays have and which is which. Lifting names those axes once, in order.
All other axes of the named arrays are matched by name and mapped over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..axis import Axis, AxisSelector, Names, name_of, names_without
from ..core import errors, parsing
from ..core.function_cache import FunctionCache, Functions, WithArrays
from ..core.parameter_names import parameter_names
from ..core.tree_spec import TreeSpec, flatten_arrays, is_hashable
from ..distribution.mesh_axes import has_explicit, mesh_around
from ..named_array import NamedArray, wrap, wrap_result
from ..ops import _kernels
from ..ops._operands import check_new_axis, private
from . import _mapped_axis

_Returned: TypeAlias = ArrayLike | Sequence[ArrayLike]
"""The result of a positional function whose annotation leaves open whether that is one array or several."""


class _Decorator(Protocol):
    """The type of `lift("i j -> i")` for type checkers."""

    @overload
    def __call__(self, fn: Callable[..., jax.Array], /) -> Callable[..., NamedArray]: ...
    @overload
    def __call__(self, fn: Callable[..., Sequence[jax.Array]], /) -> Callable[..., tuple[NamedArray, ...]]: ...
    @overload
    def __call__(self, fn: Callable[..., _Returned], /) -> Callable[..., NamedArray | tuple[NamedArray, ...]]: ...


@overload
def lift(fn: str, spec: None = None, **axes: AxisSelector) -> _Decorator: ...
@overload
def lift(fn: Callable[..., jax.Array], spec: str, **axes: AxisSelector) -> Callable[..., NamedArray]: ...
@overload
def lift(
    fn: Callable[..., Sequence[jax.Array]], spec: str, **axes: AxisSelector
) -> Callable[..., tuple[NamedArray, ...]]: ...
@overload
def lift(
    fn: Callable[..., _Returned], spec: str, **axes: AxisSelector
) -> Callable[..., NamedArray | tuple[NamedArray, ...]]: ...
def lift(
    fn: str | Callable[..., _Returned], spec: str | None = None, **axes: AxisSelector
) -> _Decorator | Callable[..., NamedArray | tuple[NamedArray, ...]]:
    """Make a named function of a positional one.

    The spec lists the axes that the function takes and returns, as in `"i j, i -> j"`: a term for each array, with its
    axes in order of position, `->`, and a term for each result. An empty term is a scalar, and `_` an argument that is
    passed on unchanged. The words are axis names, or stand for axes that keywords give, here or in the call. All other
    axes of the operands are mapped over, matched by name; an operand that lacks one is the same along it. Operands are
    named arrays and scalars.

    Words that only the results have are new axes. A result keeps the layout of the first operand that has all axes that
    are mapped over; its new axes take the place of the first axis that was removed, or come last.

    Further arguments, by position or keyword, are passed to the function unchanged and must be hashable, apart from the
    arrays in modules and other trees. The function is compiled once for each of their values and, as in `jax.jit`,
    should have no side effects. Compiled code is cached by function, and reused if the function is lifted again; a
    lambda written in a loop is a new function every time, so lift it before the loop.

    The function may be a module, a method of one, or a `functools.partial`: the arrays that it holds are operands that
    are not mapped over, and can be differentiated. On Explicit mesh axes it cannot use arrays in any other way.

    With the spec in place of the function, `lift` is a decorator.

    Arguments:
        fn: the positional function. It returns an array, or a tuple of them where the spec has several results.
        spec: the axes it takes and gives.
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
        if spec is not None:
            raise TypeError("lift: expected a function, got a string. As a decorator, lift takes the spec alone.")
        return lambda decorated: lift(decorated, fn, **axes)
    if not callable(fn):
        raise TypeError(f"lift: expected a function, got {type(fn).__name__}.")
    what = f"lift({_function_name(fn)})"
    if spec is None:
        raise TypeError(f"{what}: which axes? Pass a spec such as 'i j, i -> j'.")
    expression = parsing.parse(what, spec, comma="terms")
    inputs = tuple(_words_of(expression, term) for term in expression.lhs)
    outputs = tuple(_words_of(expression, term) for term in expression.rhs)
    for term, words in zip((*expression.lhs, *expression.rhs), (*inputs, *outputs), strict=True):
        if "_" in words and (term in expression.rhs or len(words) > 1):
            parsing.fail(what, spec, term, "`_` stands alone, for an argument that is passed on; it is no axis.")
    signature = _Signature(tuple(None if words == ("_",) else words for words in inputs), outputs)
    _check_aliases(what, signature, axes)
    functions_of = Functions(fn, own=FunctionCache()).now

    def lifted(*args: Any, **kwargs: Any) -> Any:
        here = {word: kwargs.pop(word) for word in signature.words if word in kwargs}
        _check_aliases(what, signature, here)
        given = signature.separated(what, fn, args, kwargs)
        functions = functions_of()
        held = [*functions.arrays, *given.handed_on]
        aliases = tuple({**axes, **here}.items())
        plan = _LiftPlan(what, signature, len(functions.arrays), tuple(map(jnp.ndim, held)), given.names, aliases)
        kernel = functions.compiled(_build_lifted_kernel, plan, given.static)
        try:
            return wrap_result(kernel.call(*held, *given.operands), kernel.names)
        except Exception as e:
            explicit = has_explicit(mesh_around())
            if explicit and not str(e).startswith(what) and _closes_over_arrays(fn):
                e.add_note(_CLOSES_OVER_ARRAYS.format(what=what))
            raise

    return functools.update_wrapper(lifted, fn, updated=())


def _function_name(fn: Callable[..., Any]) -> str:
    """Return the name of a function for messages."""
    if isinstance(fn, functools.partial):
        return _function_name(fn.func)
    return getattr(fn, "__name__", type(fn).__name__)


_CLOSES_OVER_ARRAYS = (
    "{what}: the function closes over arrays, which does not work on Explicit mesh axes. Make them operands, each with "
    "a term in the spec, or hold them in a module or a `functools.partial`."
)


def _closes_over_arrays(fn: Any) -> bool:
    """Return whether a function uses arrays from the surrounding code, or in an object that JAX cannot flatten."""
    if isinstance(fn, functools.partial):
        return _closes_over_arrays(fn.func)
    function = inspect.unwrap(fn)
    found = [getattr(getattr(function, "__self__", None), "__dict__", None)]
    with contextlib.suppress(TypeError):  # not written in Python
        around = inspect.getclosurevars(function)
        found += [around.nonlocals, around.globals]
    return any(isinstance(x, jax.Array) for x in jax.tree.leaves(found))


# --- the signature: axes of operands, and other arguments ---

_ARRAYS = (NamedArray, jax.Array, np.ndarray)
"""The types of arrays with axes."""
_NUMERIC = (jax.Array, np.ndarray, np.generic, int, float, complex)
"""The types of raw arrays and numbers."""


@dataclasses.dataclass(frozen=True)
class _Signature:
    """The axes of a positional function, as words."""

    inputs: tuple[Names | None, ...]
    """The axes of each operand; None for an argument that is passed on unchanged."""
    outputs: tuple[Names, ...]

    @functools.cached_property
    def words(self) -> Names:
        """Return all different words."""
        return tuple(dict.fromkeys(w for term in (*self.inputs, *self.outputs) for w in term or ()))

    @property
    def several(self) -> bool:
        """Return whether the function returns a tuple rather than one result."""
        return len(self.outputs) > 1

    @property
    def terms(self) -> tuple[Names, ...]:
        """Return the words of each operand."""
        return tuple(term for term in self.inputs if term is not None)

    @property
    def text(self) -> str:
        """Return the axes as a spec."""
        inputs = ("_" if term is None else " ".join(term) for term in self.inputs)
        return f"{', '.join(inputs)} -> {', '.join(' '.join(term) for term in self.outputs)}"

    def separated(self, what: str, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Arguments:
        """Return the arguments of a call, with the arrays separated."""

        def argument(i: int) -> str:
            name = parameter_names(fn, i + 1)[i]
            return f"argument {i}" if name.startswith("args[") else f"argument {i}, `{name}`,"

        by_keyword = [f"`{k}`" for k, x in kwargs.items() if isinstance(x, _ARRAYS)]
        if by_keyword:
            raise TypeError(
                f"{what}: got array {', '.join(by_keyword)} by keyword. Arrays are operands, given by position, one "
                f"for each term of {self.text!r}."
            )
        if len(args) < len(self.inputs):
            raise TypeError(
                f"{what}: the spec {self.text!r} has {errors.counted(len(self.inputs), 'argument')}, but the call has "
                f"{len(args)} by position."
            )
        operands, names, handed_on = [], [], []
        for i, x in enumerate(args):
            if i >= len(self.inputs) or self.inputs[i] is None:
                if isinstance(x, _ARRAYS):
                    raise TypeError(
                        f"{what}: {argument(i)} is an array for which {self.text!r} has no term. Arrays are "
                        "operands, one for each term."
                    )
                handed_on.append(x)
            elif isinstance(x, NamedArray):
                operands.append(x.array), names.append(x.names)
            elif isinstance(x, _NUMERIC):
                if np.ndim(x):
                    raise TypeError(
                        f"{what}: {argument(i)} has no axis names but shape {tuple(np.shape(x))}. Only scalars go "
                        "without names: name its axes with axonym.named(array, axes)."
                    )
                operands.append(x), names.append(())
            else:
                raise TypeError(
                    f"{what}: {argument(i)} should be a NamedArray or a scalar, got {type(x).__name__}. Pass "
                    "other arguments after the operands, or by keyword."
                )
        if not handed_on and not kwargs:
            return _Arguments(operands, tuple(names), [], _NOTHING)
        arrays, static = flatten_arrays((handed_on, dict(kwargs)))
        if not is_hashable(static):
            passed = {argument(i): x for i, x in enumerate(args) if (*self.inputs, *[None] * (i + 1))[i] is None}
            passed |= {f"`{k}`": x for k, x in kwargs.items()}
            kinds = [
                (path, type(leaf).__name__)
                for path, x in passed.items()
                for leaf in jax.tree.leaves(x)
                if not isinstance(leaf, _ARRAYS) and type(leaf).__hash__ is None
            ]
            path, which = (kinds[0][0], f", which this {kinds[0][1]} is not") if kinds else (", ".join(passed), "")
            raise TypeError(
                f"{what}: {path} is passed on unchanged, as part of the program, so it must be hashable{which}."
            )
        return _Arguments(operands, tuple(names), arrays, static)

    def arguments(self, operands: Sequence[Any], handed_on: Any) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments, by position and by keyword."""
        positional, by_keyword = handed_on
        arrays, rest = iter(operands), iter(positional)
        first = [next(rest) if term is None else next(arrays) for term in self.inputs]
        return [*first, *rest], by_keyword


class _Arguments(NamedTuple):
    """The arguments of a lifted function, with the arrays separated."""

    operands: list[Any]
    names: tuple[Names, ...]
    """The axes of each operand."""
    handed_on: list[Any]
    """The arrays in the arguments that are passed on, in a module, say."""
    static: TreeSpec
    """The static rest of these arguments."""


_, _NOTHING = flatten_arrays(([], {}))


def _words_of(expression: parsing.Expression, term: parsing.Term) -> Names:
    if not term.ordered:
        expression.fail(term, "the positions of a function's axes have an order, so they are written without braces.")
    for element in term.elements:
        if isinstance(element, parsing.Dots):
            expression.fail(element, "axes that are not written are always mapped over; leave out the `...`.")
        if isinstance(element, parsing.Group):
            expression.fail(element, "axes are not split or merged here; use rearrange before or after.")
    return tuple(v.name for v in term.variables)


def _check_aliases(what: str, signature: _Signature, axes: Mapping[str, Any]) -> None:
    """Check that keywords for axes are words of the spec, and that their values name axes."""
    for word, axis in axes.items():
        if word not in signature.words:
            known = errors.quoted(signature.words) or "none"
            hint = errors.suggestion(word, signature.words)
            raise TypeError(f"{what}: {word!r} is not among the axes of the spec, {known}.{hint}")
        if not isinstance(axis, (str, Axis)):
            raise TypeError(
                f"{what}: {word!r} is an axis of the spec, so it stands for an Axis or its name, got "
                f"{type(axis).__name__}. To pass on an argument of that name, rename the axis in the spec."
            )


# --- from names to a kernel ---


@dataclasses.dataclass(frozen=True, slots=True)
class _LiftPlan:
    """Everything static that a kernel depends on, besides the spec of the arguments that are passed on."""

    what: str
    signature: _Signature
    of_function: int
    """The number of arrays that the function holds."""
    ranks: tuple[int, ...]
    """The number of axes of each of these arrays, and of each array in the arguments that are passed on."""
    in_names: tuple[Names, ...]
    """The axes of each operand."""
    aliases: tuple[tuple[str, AxisSelector], ...]


def _build_lifted_kernel(functions: WithArrays, plan: _LiftPlan, handed_on: TreeSpec) -> _kernels.Kernel:
    """Make a kernel for the arrays that are not mapped over, and for operands of the given names."""
    what, signature, in_names, aliases = plan.what, plan.signature, plan.in_names, plan.aliases
    count = len(plan.ranks)
    axes = {word: word for word in signature.words} | dict(aliases)
    own, out_own = (
        [tuple(name_of(axes[w]) for w in term) for term in terms] for terms in (signature.terms, signature.outputs)
    )
    if any(n not in names for names, needed in zip(in_names, own, strict=True) for n in needed):
        # A kernel that raises: the message shows sizes, and only a call has arrays.
        return _kernels.Kernel(lambda *arrays: _raise_lacking(what, in_names, own, arrays[count:]), None)
    all_own = {n for needed in own for n in needed}
    rest = [names_without(names, *needed) for names, needed in zip(in_names, own, strict=True)]
    word_of: dict[str, str] = {}
    for word in dict.fromkeys(w for term in signature.terms for w in term):
        name = name_of(axes[word])
        if name in word_of:
            raise ValueError(
                f"{what}: {word_of[name]!r} and {word!r} both stand for axis {name!r}; use one word for it."
            )
        word_of[name] = word
    for i, names in enumerate(rest):
        if both := [n for n in names if n in all_own]:
            raise ValueError(
                f"{what}: the spec lists axis {both[0]!r} for one operand, but operand {i} also has it, where the spec "
                "does not list it, so it would be mapped over. Rename it in one of them."
            )
    # Results keep the order of axes of the first operand that has all axes that are mapped over.
    every = set().union(*rest)
    layout = next((names for names, mapped in zip(in_names, rest, strict=True) if len(mapped) == len(every)), None)
    if layout is None and all_own:
        layout = tuple(dict.fromkeys(n for names in in_names for n in names))
    elif layout is None:  # as in elementwise operations, an outer product must be explicit
        layout = _kernels.broadcast_names(what, in_names)
    mapped = tuple(n for n in layout if any(n in names for names in rest))
    out_names: list[Names] = []
    for names in out_own:  # in the order of the layout, with new axes where the first one is missing
        if any(n in mapped or names.count(n) > 1 for n in names):
            raise ValueError(errors.duplicate_names(what, (*mapped, *names)))
        kept = [n in mapped or n in names for n in layout]
        place = kept.index(False) if False in kept else len(layout)
        new = [n for n in names if n not in layout]
        out_names.append((*layout[:place], *new, *itertools.compress(layout[place:], kept[place:])))

    def one(sizes, held, *arrays):
        """Call the function on arrays without the axes that are mapped over."""
        (fn,) = functions(held[: plan.of_function])
        operands = [
            _kernels.transpose_to(x, names_without(names, *mapped), needed)
            for x, names, needed in zip(arrays, in_names, own, strict=True)
        ]
        args, kwargs = signature.arguments(operands, handed_on.unflatten(held[plan.of_function :]))
        try:
            results = fn(*args, **kwargs)
        except Exception as e:
            types = zip(own, map(jax.typeof, operands), strict=True)
            listed = ", ".join(f"{t.dtype}{errors.describe_axes(n, t.shape)}" for n, t in types)
            over = f", mapped over {errors.describe_axes(mapped)}" if mapped else ""
            e.add_note(f"{what}: raised by the function on {listed}{over}.")
            raise
        results = _checked_results(what, signature, axes, operands, results)
        taken, returned = ([*map(wrap, xs, names)] for xs, names in ((operands, own), (results, out_own)))
        _mapped_axis.check_placed_elsewhere(what, sizes, taken, returned)
        return tuple(
            _kernels.transpose_to(r, names, names_without(out, *mapped))
            for r, names, out in zip(results, out_own, out_names, strict=True)
        )

    def positional(*arrays):
        held, arrays = list(arrays[:count]), arrays[count:]
        sizes = {n: s for ns, x in zip(in_names, arrays, strict=True) for n, s in zip(ns, jnp.shape(x), strict=True)}
        over_all = functools.partial(one, {n: sizes[n] for n in mapped})
        # From the innermost axis out: at each level, positions do not count the axes further out, which are gone there.
        for level in reversed(range(len(mapped))):
            name, outer = mapped[level], mapped[:level]
            over_all = jax.vmap(
                over_all,
                in_axes=(None, *(_kernels.position_without(names, name, outer) for names in in_names)),
                out_axes=tuple(_kernels.position_without(names, name, outer) for names in out_names),
                spmd_axis_name=_mapped_axis.spmd_axes(what, name, sizes[name]),
            )
        with _mapped_axis.collisions_named(what, mapped), _mapped_axis.announced(mapped, arrays):
            results = over_all(held, *arrays)
        return results if signature.several else results[0]

    sized = tuple(axis for term in signature.terms for w in term if isinstance(axis := axes[w], Axis))
    # The axes of held arrays match no axis of an operand, even if they have the same size.
    held_names = [private(f"held array {i}", tuple(map(str, range(rank)))) for i, rank in enumerate(plan.ranks)]
    return _kernels.make_kernel(
        what,
        positional,
        (*held_names, *in_names),
        tuple(out_names) if signature.several else out_names[0],
        selection=sized,
        keep_unused=False,
    )


# --- checks ---


def _checked_results(
    what: str, signature: _Signature, axes: Mapping[str, AxisSelector], operands: Sequence[Any], results: Any
) -> list[Any]:
    """Check that the results of the function are arrays with the axes of the spec."""
    is_several, count = isinstance(results, (tuple, list)), len(signature.outputs)
    if is_several != signature.several or (is_several and len(results) != count):
        kind = ValueError if is_several == signature.several else TypeError
        wanted = errors.counted(count, "result")
        raise kind(f"{what}: the function returned {_describe_results(results)}, where the spec has {wanted}.")
    found = list(results) if is_several else [results]
    sizes = {
        w: s for term, x in zip(signature.terms, operands, strict=True) for w, s in zip(term, x.shape, strict=True)
    }
    for i, (term, result) in enumerate(zip(signature.outputs, found, strict=True)):
        if not isinstance(result, _NUMERIC):
            raise TypeError(
                f"{what}: the function returned {_describe_results(result)}, where it should return raw arrays."
            )
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


def _describe_results(results: Any) -> str:
    if isinstance(results, (tuple, list)):
        return errors.counted(len(results), "result")
    return "one array" if isinstance(results, jax.Array) else f"a {type(results).__name__}"


def _raise_lacking(what: str, in_names: Sequence[Names], own: Sequence[Names], arrays: Sequence[Any]) -> None:
    problems, hints = [], ""
    for i, (names, needed, x) in enumerate(zip(in_names, own, arrays, strict=True)):
        missing = [n for n in needed if n not in names]
        if missing:
            listed = errors.quoted(missing)
            problems.append(f"operand {i} {errors.describe_axes(names, jnp.shape(x))} has no axis {listed}")
            hints = hints or errors.suggestions(missing, names)
    raise ValueError(
        f"{what}: {', and '.join(problems)}.{hints} Say by keyword which axis a word of the spec stands for, as in "
        "`i='row'`."
    )
