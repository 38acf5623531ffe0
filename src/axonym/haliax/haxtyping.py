"""Annotations with a dtype, whose metadata have Haliax's dtypes."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, get_args, get_origin

import jax.numpy as jnp
import jaxtyping

from .. import typing as _native
from ..named_array import NamedArray
from ..typing import *  # noqa: F403  # the same names, but for those below


class DTypeCategory(type(jaxtyping.AbstractDtype)):
    """A dtype of an annotation: a class of jaxtyping that is equal to a dtype of JAX, and prints a name.

    >>> import jaxtyping
    >>> category = hax.haxtyping.DTypeCategory("float", jnp.floating)
    >>> category, category == jnp.floating, jaxtyping.Float.dtypes == category.dtypes
    (float, True, True)
    """

    name: str
    category: Any

    def __new__(cls, name: str, category: Any) -> DTypeCategory:
        like = getattr(jaxtyping, _JAXTYPING[category])
        return super().__new__(cls, like.__name__, (jaxtyping.AbstractDtype,), {"dtypes": list(like.dtypes)})

    def __init__(cls, name: str, category: Any) -> None:
        cls.name, cls.category = name, category

    def __eq__(cls, other: object) -> bool:
        return cls is other or cls.category is getattr(other, "category", other)

    def __hash__(cls) -> int:
        return hash(cls.category)

    def __repr__(cls) -> str:
        return cls.name


_JAXTYPING = {
    **{jnp.floating: "Float", jnp.complexfloating: "Complex", jnp.signedinteger: "Int", jnp.unsignedinteger: "UInt"},
    **{getattr(jnp, f"float{n}"): f"Float{n}" for n in (16, 32, 64)},
    **{getattr(jnp, f"int{n}"): f"Int{n}" for n in (8, 16, 32, 64)},
    **{getattr(jnp, f"uint{n}"): f"UInt{n}" for n in (8, 16, 32, 64)},
    **{jnp.bool_: "Bool", jnp.bfloat16: "BFloat16", jnp.complex64: "Complex64", jnp.complex128: "Complex128"},
}


class _Typed:
    def __init__(self, native: Any, name: str, dtype: Any):
        self._native, self._dtype = native, DTypeCategory(name, dtype)

    def __getitem__(self, item: Any) -> Any:
        found = self._native[item]
        if get_origin(found) is not Annotated:  # an annotation of raw arrays, or of several types
            return found
        return Annotated[NamedArray, dataclasses.replace(get_args(found)[1], dtype=self._dtype)]

    def __repr__(self) -> str:
        return repr(self._native)


# fmt: off
f16, f32, f64 = (_Typed(getattr(_native, f"f{n}"), f"float{n}", getattr(jnp, f"float{n}")) for n in (16, 32, 64))
i8, i16, i32, i64 = (_Typed(getattr(_native, f"i{n}"), f"int{n}", getattr(jnp, f"int{n}")) for n in (8, 16, 32, 64))
u8, u16, u32, u64 = (_Typed(getattr(_native, f"u{n}"), f"uint{n}", getattr(jnp, f"uint{n}")) for n in (8, 16, 32, 64))
bf16, bool_ = _Typed(_native.bf16, "bfloat16", jnp.bfloat16), _Typed(_native.bool_, "bool", jnp.bool_)
complex64 = _Typed(_native.complex64, "complex64", jnp.complex64)
complex128 = _Typed(_native.complex128, "complex128", jnp.complex128)
Float, Complex = _Typed(_native.Float, "float", jnp.floating), _Typed(_native.Complex, "complex", jnp.complexfloating)
Int, UInt = _Typed(_native.Int, "int", jnp.signedinteger), _Typed(_native.UInt, "uInt", jnp.unsignedinteger)
# fmt: on
