"""Parse the axes and dtype of an annotation, and check arrays against them.

`read` turns every form of annotation into a `NamedArrayAxes`; `mismatch` compares an array with one, and returns a
message that points at the mismatch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence, Set
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import jax.numpy as jnp

from ..axis import Axis, AxisSelector, Names, PartialShapeDict, name_of, selectors
from ..core import errors, parsing
from ..named_array import NamedArray, describe_array

if TYPE_CHECKING:
    import jaxtyping

__all__ = ["NamedArrayAxes", "NamedArrayAxesSpec", "check_axes", "matches_axes"]

_Array = TypeVar("_Array", bound=NamedArray)

SHORT: dict[str, str] = {}
"""The names in annotations of jaxtyping's dtype classes, by their own names."""


@dataclasses.dataclass(frozen=True)
class NamedArrayAxes:
    """The axes and the dtype that an annotation requires.

    Arguments:
        before: the axes before the ellipsis, as names, or as `Axis` if the size matters. Without an ellipsis or without
            an order, all axes.
        after: the axes after the ellipsis.
        ordered: whether the order matters.
        subset: whether there may be more axes: between `before` and `after` if `ordered`, else anywhere.
        dtype: a dtype, or a class of dtypes such as `jaxtyping.Float`; None for any.

    >>> axn.typing.NamedArrayAxes(("batch",), ("embed",), subset=True)
    Named["batch ... embed"]
    """

    before: tuple[AxisSelector, ...]
    after: tuple[AxisSelector, ...] = ()
    ordered: bool = True
    subset: bool = False
    dtype: Any | None = None

    def __post_init__(self) -> None:
        if self.after and not (self.ordered and self.subset):
            raise ValueError("NamedArrayAxes: axes come after an ellipsis, so `after` needs `subset` and `ordered`.")
        errors.distinct("NamedArrayAxes", self.names)
        if self.dtype is not None:
            object.__setattr__(self, "dtype", _dtype_class(self.dtype))

    @property
    def selectors(self) -> tuple[AxisSelector, ...]:
        """Return the required axes.

        >>> axn.typing.NamedArrayAxes(("batch",), ("embed",), subset=True).selectors
        ('batch', 'embed')
        """
        return self.before + self.after

    @property
    def names(self) -> Names:
        """Return the names of the required axes.

        >>> axn.typing.NamedArrayAxes((axn.Axis("batch", 8), "embed")).names
        ('batch', 'embed')
        """
        return tuple(name_of(s) for s in self.selectors)

    def __repr__(self) -> str:
        return _write_annotation(self).text


class Annotation(type):
    """The metaclass of annotations."""

    asked: NamedArrayAxes


NamedArrayAxesSpec: TypeAlias = (
    NamedArrayAxes
    | str
    | AxisSelector
    | EllipsisType
    | Sequence[AxisSelector | EllipsisType]
    | Set[AxisSelector | EllipsisType]
    | PartialShapeDict
    | type[NamedArray]
)
"""A specification of axes in any form: the contents of the brackets of `Named`, or an annotation itself."""


def read(what: str, spec: Any) -> NamedArrayAxes:
    """Parse a specification of any form."""
    if isinstance(spec, NamedArrayAxes):
        return spec
    if isinstance(spec, Annotation):
        return spec.asked
    for asked in getattr(spec, "__metadata__", ()):  # of a `typing.Annotated`
        if isinstance(asked, NamedArrayAxes):
            return asked
    if spec is NamedArray:
        return NamedArrayAxes((), subset=True)
    if isinstance(spec, str):
        return _read_text(what, spec)
    if isinstance(spec, (Axis, Mapping)):
        spec = selectors(spec)
    if spec is ...:
        spec = (...,)
    if not isinstance(spec, (Sequence, Set)):
        raise TypeError(f"{what}: axes are given as a string, a sequence or a set, got {type(spec).__name__}.")
    items: tuple[Any, ...] = tuple(spec)
    for item in items:
        if not isinstance(item, (Axis, str, EllipsisType)):
            raise TypeError(f"{what}: expected an axis, its name or `...`, got {type(item).__name__}.")
    if isinstance(spec, Set):
        axes = sorted((i for i in items if i is not ...), key=name_of)  # the order of a set varies between runs
        return NamedArrayAxes(tuple(axes), ordered=False, subset=... in items)
    if items.count(...) > 1:
        raise ValueError(f"{what}: a second `...`; one takes all the axes that are not named.")
    dots = items.index(...) if ... in items else len(items)
    return NamedArrayAxes(items[:dots], items[dots + 1 :], subset=... in items)


@functools.lru_cache(maxsize=4096)
def _read_text(what: str, text: str) -> NamedArrayAxes:
    (term,) = parsing.parse_terms(what, text, comma="elements", sizes=True)
    for group in term.groups:
        parsing.fail(what, text, group, "an annotation cannot contain parentheses: name the merged axis itself.")
    axes = [e.name if e.size is None else Axis(e.name, e.size) for e in term.variables]
    before = len(axes) if term.dots is None or not term.ordered else term.elements.index(term.dots)
    return NamedArrayAxes(tuple(axes[:before]), tuple(axes[before:]), term.ordered, term.dots is not None)


@functools.lru_cache(maxsize=256)
def _dtype_class(dtype: Any) -> type[jaxtyping.AbstractDtype]:
    """Return a class of dtypes that contains just this dtype; return classes of dtypes unchanged."""
    import jaxtyping

    if isinstance(dtype, type) and issubclass(dtype, jaxtyping.AbstractDtype):
        return dtype
    name = jnp.dtype(dtype).type.__name__
    return type(name, (jaxtyping.AbstractDtype,), {"dtypes": [name]})


class _Written(NamedTuple):
    """An annotation as text, with the positions that messages point at."""

    text: str
    spans: dict[str, tuple[int, int]]
    """The start and end of each name."""
    end: int
    """The position where another axis would be written."""


def _write_annotation(asked: NamedArrayAxes) -> _Written:
    opening, closing = ("", "") if asked.ordered else ("{", "}")
    text = "Named" if asked.dtype is None else f"{SHORT.get(asked.dtype.__name__, asked.dtype.__name__)}[NamedArray, "
    text += ('["' if asked.dtype is None else '"') + opening
    spans = {}
    for i, item in enumerate((*asked.before, *((...,) if asked.subset else ()), *asked.after)):
        text += " " if i else ""
        if item is ...:
            text += "..."
        else:
            name = name_of(item)
            spans[name] = len(text), len(text) + len(name)
            text += name if isinstance(item, str) else f"{name}={item.size}"
    return _Written(f'{text}{closing}"]', spans, len(text))


# --- checking arrays ---


def matches_axes(self: NamedArray, spec: NamedArrayAxesSpec) -> bool:
    """Return whether an array has the axes and the dtype that an annotation requires.

    Arguments:
        spec: an annotation such as `Named["batch embed"]`, or the contents of its brackets: a string, a sequence of
            axes in order, or a set of axes in any order.

    >>> x = axn.ones({"batch": 2, "embed": 3})
    >>> x.matches_axes("batch ..."), x.matches_axes({"embed", "batch"}), x.matches_axes(("embed", "batch"))
    (True, True, False)
    """
    return not mismatch("matches_axes", self, read("matches_axes", spec))


def check_axes(array: _Array, spec: NamedArrayAxesSpec) -> _Array:
    """Return an array if it has the axes and the dtype that an annotation requires; otherwise raise an error.

    >>> x = axn.typing.check_axes(axn.ones({"batch": 2, "pos": 3, "embed": 4}), "batch ... embed")
    """
    if problem := mismatch("check_axes", array, read("check_axes", spec)):
        raise ValueError(problem)
    return array


def mismatch(what: str, x: Any, asked: NamedArrayAxes) -> str:
    """Say why a value does not match an annotation, or return an empty string if it does."""
    if not isinstance(x, NamedArray):
        return f"{what}: expected {asked}, got {type(x).__name__}."
    shape = getattr(x.array, "shape", None)
    if shape is not None and len(shape) != len(x.names):
        return f"{what}: {errors.wrong_rank(x.names, shape)}"
    if problem := _wrong_axes(what, asked, x.names, shape):
        return problem
    # The array can be a placeholder, as in a partitioned tree. A placeholder matches an annotation without a dtype.
    if asked.dtype is not None and not isinstance(x.array, _any_shape(asked.dtype)):
        return point(f"{what}: {describe_array(x)} has another dtype.", asked, None)
    return ""


@functools.lru_cache(maxsize=4096)
def _wrong_axes(what: str, asked: NamedArrayAxes, names: Names, shape: tuple[Any, ...] | None) -> str:
    has = errors.describe_axes(names, shape)
    if missing := [n for n in asked.names if n not in names]:
        return point(errors.missing_axes(what, missing, names, shape), asked, missing[0])
    extra = [n for n in names if n not in asked.names]
    if extra and not asked.subset:
        listed = errors.quoted(extra)
        return point(f"{what}: {listed} of {has} is not in the annotation. `...` allows more axes.", asked, "")
    if asked.ordered:
        # The dots take the axes in the middle.
        found = names[: len(asked.before)] + names[len(names) - len(asked.after) :]
        for name, there in zip(asked.names, found, strict=True):
            if name != there:
                message = f"{what}: {has} has {there!r} in the place of {name!r}."
                return point(f"{message} Braces, `{{a b}}`, allow any order.", asked, name)
    for s in asked.selectors:
        if isinstance(s, Axis) and shape is not None and shape[names.index(s.name)] != s.size:
            places = [("the annotation", s.size), ("the array", shape[names.index(s.name)])]
            return point(errors.size_mismatch(what, s.name, places), asked, s.name)
    return ""


@functools.lru_cache(maxsize=256)
def _any_shape(dtype: type[jaxtyping.AbstractDtype]) -> Any:
    return dtype[Any, "..."]


def point(message: str, asked: NamedArrayAxes, name: str | None) -> str:
    """Append the annotation to a message, with a caret at a name, at the dtype (None) or at the end (an empty name)."""
    text, spans, end = _write_annotation(asked)
    start, stop = (0, text.index("[")) if name is None else spans.get(name, (end, end))
    return errors.caret(text, start, stop, message)
