"""The signature of a lifted function: the axes of its operands, and the arguments that are passed on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import _errors, _parsing
from .._parameter_names import parameter_names
from .._tree_spec import TreeSpec, flatten
from ..array import NamedArray
from ..axis import Axis, Names, name_of, selectors

ARRAYS = (NamedArray, jax.Array, np.ndarray)
"""The types of arrays with axes."""
NUMERIC = (jax.Array, np.ndarray, np.generic, int, float, complex)
"""The types of raw arrays and numbers."""


@dataclasses.dataclass(frozen=True)
class Signature:
    """The axes of a positional function, in words."""

    inputs: tuple[Names | None, ...]
    """The axes of each operand; None for an argument that is passed on."""
    outputs: tuple[Names, ...]
    axes: tuple[tuple[str, Axis], ...]
    """The axes that were given with their sizes."""

    @functools.cached_property
    def words(self) -> Names:
        """Return all words, once each."""
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

    def sorted_out(self, what: str, call: Call) -> Arguments:
        """Return the arguments of a call, with the arrays separated."""
        by_keyword = [f"`{k}`" for k, x in call.kwargs.items() if isinstance(x, ARRAYS)]
        if by_keyword:
            raise TypeError(
                f"{what}: got array {', '.join(by_keyword)} by keyword. Arrays are operands, given by position, one "
                f"for each term of {self.text!r}."
            )
        if len(call.args) < len(self.inputs):
            raise TypeError(
                f"{what}: the spec {self.text!r} speaks of {len(self.inputs)} arguments, the call has {len(call.args)} "
                "by position."
            )
        operands, names, handed_on = [], [], []
        for i, x in enumerate(call.args):
            if i >= len(self.inputs) or self.inputs[i] is None:
                if isinstance(x, ARRAYS):
                    raise TypeError(
                        f"{what}: {call.argument(i)} is an array for which {self.text!r} has no term. Arrays are "
                        "operands, one for each term."
                    )
                handed_on.append(x)
            elif isinstance(x, NamedArray):
                operands.append(x.array), names.append(x.names)
            elif isinstance(x, NUMERIC):
                if np.ndim(x):
                    raise TypeError(
                        f"{what}: {call.argument(i)} has no axis names but shape {tuple(np.shape(x))}. Only scalars go "
                        "without names: name its axes with axonym.named(array, axes)."
                    )
                operands.append(x), names.append(())
            else:
                raise TypeError(
                    f"{what}: {call.argument(i)} should be a NamedArray or a scalar, got {type(x).__name__}. What is "
                    "to be handed on as it is comes after the operands, or by keyword."
                )
        if not handed_on and not call.kwargs:
            return Arguments(operands, tuple(names), [], _NOTHING)
        arrays, static = flatten((handed_on, dict(call.kwargs)))
        try:
            hash(static)
        except TypeError:
            raise TypeError(self._unhashable(what, call)) from None
        return Arguments(operands, tuple(names), arrays, static)

    def _unhashable(self, what: str, call: Call) -> str:
        handed_on = {
            call.argument(i): x for i, x in enumerate(call.args) if (*self.inputs, *[None] * (i + 1))[i] is None
        }
        handed_on |= {f"`{k}`": x for k, x in call.kwargs.items()}
        for path, x in handed_on.items():
            for leaf in jax.tree.leaves(x):
                if not isinstance(leaf, ARRAYS) and type(leaf).__hash__ is None:
                    return (
                        f"{what}: {path} is handed on as it is; it is part of the program, so it must be hashable, "
                        f"which this {type(leaf).__name__} is not."
                    )
        return f"{what}: {', '.join(handed_on)} must be hashable, since what is handed on is part of the program."

    def put_together(self, operands: Sequence[Any], handed_on: Any) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments, by position and by keyword."""
        positional, by_keyword = handed_on
        arrays, rest = iter(operands), iter(positional)
        first = [next(rest) if term is None else next(arrays) for term in self.inputs]
        return [*first, *rest], by_keyword


class Arguments(NamedTuple):
    """The arguments of a lifted function, with the arrays separated."""

    operands: list[Any]
    names: tuple[Names, ...]
    """The axes of each operand."""
    handed_on: list[Any]
    """The arrays in the arguments that are handed on: in a module, say."""
    static: TreeSpec
    """All else of these."""


class Call(NamedTuple):
    """A call of a lifted function."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def argument(self, i: int) -> str:
        """Return the name of an argument, for messages."""
        name = parameter_names(self.fn, i + 1)[i]
        return f"argument {i}" if name.startswith("args[") else f"argument {i}, `{name}`,"


_, _NOTHING = flatten(([], {}))


def make_signature(what: str, spec: str | None, in_axes: Any, out_axes: Any) -> Signature:
    """Make the signature of a spec, or of the axes in its place."""
    if spec is not None:
        if in_axes is not None or out_axes is not None:
            raise TypeError(f"{what}: the axes are given by a spec or by in_axes and out_axes, not both.")
        expression = _parsing.parse(what, spec, comma="terms")
        inputs, outputs = (
            tuple(_words(expression, term) for term in side) for side in (expression.lhs, expression.rhs)
        )
        return Signature(inputs, outputs, ())
    if in_axes is None or out_axes is None:
        raise TypeError(f"{what}: which axes? Pass a spec such as 'i j, i -> j', or both in_axes and out_axes.")
    given = [in_axes] if isinstance(in_axes, (str, Axis, Mapping)) else list(in_axes)
    results = list(out_axes) if _is_several(out_axes) else [out_axes]
    chosen = [None if a is None else selectors(a) for a in (*given, *results)]
    terms = [None if c is None else tuple(map(name_of, c)) for c in chosen]
    for term in terms:
        if term is not None and len(set(term)) != len(term):
            raise ValueError(_errors.duplicate_names(what, term))
    sized = {s.name: s for c in chosen for s in c or () if isinstance(s, Axis)}
    outputs = tuple(term for term in terms[len(given) :] if term is not None)
    return Signature(tuple(terms[: len(given)]), outputs, tuple(sized.items()))


def _is_several(out_axes: Any) -> bool:
    """Return whether these are selections, one for each result, rather than the selection of a single result."""
    return not isinstance(out_axes, (str, Axis, Mapping)) and any(not isinstance(a, (str, Axis)) for a in out_axes)


def _words(expression: _parsing.Expression, term: _parsing.Term) -> Names:
    if not term.ordered:
        expression.fail(term, "the positions of a function's axes have an order, so they are written without braces.")
    for element in term.elements:
        if isinstance(element, _parsing.Dots):
            expression.fail(element, "the axes that are not written are mapped over in any case; leave the `...` out.")
        if isinstance(element, _parsing.Group):
            expression.fail(element, "axes are not split or merged here; do so before or after, with rearrange.")
    return tuple(v.name for v in term.variables)


def check_aliases(what: str, signature: Signature, axes: Mapping[str, Any]) -> None:
    """Check that keywords for axes are words of the spec, and that their values name axes."""
    for word, axis in axes.items():
        if word not in signature.words:
            known = ", ".join(map(repr, signature.words)) or "none"
            hint = _errors.suggestion(word, signature.words)
            raise TypeError(f"{what}: {word!r} is not among the axes of the spec, {known}.{hint}")
        if not isinstance(axis, (str, Axis)):
            raise TypeError(
                f"{what}: {word!r} is an axis of the spec, so it stands for an Axis or its name, got "
                f"{type(axis).__name__}. To hand an argument of that name on, call the axis something else in the spec."
            )
