"""The annotations `Named[...]`, `Float[...]` and others, as classes that work with `isinstance`.

An annotation is made once for each `NamedArrayAxes`, and checks it in `__instancecheck__`. Inside a function decorated
with jaxtyping's `jaxtyped`, it also checks that axes have the sizes they had before in the same call. For code that
reads annotations, it is a `typing.Annotated`.

Jaxtyping is imported where it is needed: every program imports this file, and few use annotations.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import operator
import types
from collections.abc import Set
from types import EllipsisType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, Union, get_args, get_origin

import jax

from ..axis import Axis, Names
from ..named_array import NamedArray, describe_array
from .matching import SHORT, Annotation, NamedArrayAxes, NamedArrayAxesSpec, mismatch, point, read

Named: TypeAlias = NamedArray

_ANY = "Named[...]"
"""The beginning of messages about an annotation."""


# --- one size for each name in a call ---


def _sizes_conflict(x: NamedArray, asked: NamedArrayAxes) -> bool:
    """Return whether an axis has changed its size within a call that jaxtyping checks; if not, record the sizes."""
    return hasattr(x.array, "shape") and not isinstance(x.array, _positional_annotation(asked, x.names))


def _first_conflict(x: NamedArray, asked: NamedArrayAxes) -> Axis:
    alone = ((a, jax.ShapeDtypeStruct((a.size,), bool)) for a in x.axes)
    return next(a for a, struct in alone if not isinstance(struct, _positional_annotation(asked, (a.name,))))


@functools.lru_cache(maxsize=4096)
def _positional_annotation(asked: NamedArrayAxes, names: Names) -> Any:
    """Return jaxtyping's annotation for a raw array with these axes, using the requested names."""
    import jaxtyping

    known = [n if n in asked.names and n.isidentifier() else "_" for n in names]
    return jaxtyping.Shaped[Any, " ".join(known)]


# --- annotations as classes ---


class _Checking(Annotation):
    """The metaclass of classes that implement `isinstance`."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return not mismatch(_ANY, instance, cls.asked) and not _sizes_conflict(instance, cls.asked)

    def __instancecheck_str__(cls, instance: Any) -> str:
        """Explain why `isinstance` is false: beartype, and so jaxtyping, puts this in its message."""
        if problem := mismatch(_ANY, instance, cls.asked):
            return problem
        if not _sizes_conflict(instance, cls.asked):
            return ""
        axis = _first_conflict(instance, cls.asked)
        message = f"{_ANY}: axis {axis.name!r} of {describe_array(instance)} has another size than before in this call."
        return point(message, cls.asked, axis.name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{cls} is an annotation. Make arrays with `NamedArray(array, axes)` or `axonym.named`.")

    def __repr__(cls) -> str:
        return f"{cls.__module__}.{cls.__qualname__}"  # beartype parses the text of `repr(cls | None)`


class _TypingAnnotation(_Checking):
    """The metaclass of annotations: to `typing.get_args` and `typing.get_origin`, they are a `typing.Annotated`."""

    __class__ = property(lambda cls: type(Annotated[int, None]))  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    @property
    def __origin__(cls) -> Any:
        """Return a class that makes the same checks: `typing.get_type_hints` keeps nothing else of an annotation."""
        return _make_annotation(cls.asked, _Checking)

    @property
    def __args__(cls) -> tuple[Any, ...]:
        return (cls.__origin__,)

    @property
    def __metadata__(cls) -> tuple[NamedArrayAxes, ...]:
        return (cls.asked,)


@functools.lru_cache(maxsize=4096)
def _make_annotation(asked: NamedArrayAxes, kind: type[_Checking]) -> _Checking:
    return kind(repr(asked), (), {"asked": asked, "__module__": "axonym.typing", "__slots__": ()})


for _kind in (_Checking, _TypingAnnotation):
    copyreg.pickle(_kind, lambda annotation: (_make_annotation, (annotation.asked, type(annotation))))


def annotate(cls: type, spec: NamedArrayAxesSpec) -> Any:
    """Return the annotation for `NamedArray[...]`.

    >>> axn.typing.Named["batch", "embed", ...]
    axonym.typing.Named["batch embed ..."]
    """
    if isinstance(spec, tuple) and spec and spec[0] is NamedArray:  # as in annotations with a dtype
        spec = spec[1] if len(spec) == 2 else spec[1:]
    return _make_annotation(read(_ANY, spec), _TypingAnnotation)


class _Typed:
    """A dtype annotation such as `Float` or `f32`, which is subscripted with an array type and axes."""

    def __init__(self, name: str, full_name: str | None = None):
        self.name, self.full_name = name, full_name or name
        SHORT[self.full_name] = name

    @property
    def dtype(self) -> Any:
        """Return jaxtyping's class for this dtype."""
        import jaxtyping

        return getattr(jaxtyping, self.full_name)

    def __getitem__(self, item: Any) -> Any:
        array_type, *spec = item if isinstance(item, tuple) else (item,)
        if isinstance(array_type, (str, Axis, EllipsisType, Set)):  # no array type: a named array
            array_type, spec = NamedArray, [item]
        if get_origin(array_type) in (Union, types.UnionType):
            return functools.reduce(operator.or_, (self[(t, *spec)] for t in get_args(array_type)))
        if array_type is not NamedArray:
            return self.dtype[item]
        asked = read(f"{self.name}[...]", spec[0] if len(spec) == 1 else spec)
        return _make_annotation(dataclasses.replace(asked, dtype=self.dtype), _TypingAnnotation)

    def __repr__(self) -> str:
        return f"axonym.typing.{self.name}"


if TYPE_CHECKING:
    from typing import (
        Annotated as Bool,
        Annotated as Complex,
        Annotated as Float,
        Annotated as Inexact,
        Annotated as Int,
        Annotated as Integer,
        Annotated as Key,
        Annotated as Num,
        Annotated as Real,
        Annotated as Shaped,
        Annotated as UInt,
        Annotated as bf16,
        Annotated as bool_,
        Annotated as complex64,
        Annotated as complex128,
        Annotated as f16,
        Annotated as f32,
        Annotated as f64,
        Annotated as i8,
        Annotated as i16,
        Annotated as i32,
        Annotated as i64,
        Annotated as u8,
        Annotated as u16,
        Annotated as u32,
        Annotated as u64,
    )
else:
    Bool, Complex, Float, Inexact, Int, Integer = map(_Typed, ("Bool", "Complex", "Float", "Inexact", "Int", "Integer"))
    Key, Num, Real, Shaped, UInt = map(_Typed, ("Key", "Num", "Real", "Shaped", "UInt"))
    bool_, bf16 = Bool, _Typed("bf16", "BFloat16")
    complex64, complex128 = (_Typed(f"complex{n}", f"Complex{n}") for n in (64, 128))
    f16, f32, f64 = (_Typed(f"f{n}", f"Float{n}") for n in (16, 32, 64))
    i8, i16, i32, i64 = (_Typed(f"i{n}", f"Int{n}") for n in (8, 16, 32, 64))
    u8, u16, u32, u64 = (_Typed(f"u{n}", f"UInt{n}") for n in (8, 16, 32, 64))
