"""Type annotations for the axes and dtypes of named arrays.

`Named[...]` lists the axes, as one string or as one item for each axis:

| annotation                              | the array has                                             |
|-----------------------------------------|-----------------------------------------------------------|
| `Named["batch embed"]`                  | these axes in this order                                  |
| `Named["batch ... embed"]`              | these, and any others in place of the dots                |
| `Named["{batch embed}"]`                | these axes in any order                                   |
| `Named["{batch embed ...}"]`            | these, and any others, in any order                       |
| `Named["batch", "embed", ...]`          | the same as `Named["batch embed ..."]`                    |
| `Named[{"batch", "embed", ...}]`        | the same as `Named["{batch embed ...}"]`                  |
| `Named["batch", Axis("embed", 4)]`      | the same as `Named["batch embed=4"]`                      |
| `Named["batch embed=4"]`                | these axes, `embed` with that size                        |
| `Named`                                 | any axes                                                  |

`Named` is a shorter name for `NamedArray`: `NamedArray["batch embed"]` is the same annotation. To annotate the dtype
too, write `Float[NamedArray, "batch embed ..."]`, with jaxtyping's names (`Float`, `Int`, `Num`, `Shaped` for any
dtype, ...) or the short name of one dtype (`f32`, `bf16`, `i32`, ...). With any other array type, as in
`Float[jax.Array, "batch embed"]`, these are the annotations of jaxtyping; but jaxtyping's own `Float` does not support
named arrays, so import it from here.

Type checkers see `NamedArray` in all of these. (Mypy reads `Shaped[NamedArray, "batch embed"]`, but not
`Named["batch embed"]`, which Pyright reads.) At run time, an annotation is a class that works with `isinstance`, which
beartype and jaxtyping's `jaxtyped` use. (Linters take a one-word string for the name of a class; as with jaxtyping, a
leading space, `Named[" batch"]`, prevents that.)

>>> from axonym.typing import Float, Named
>>> x = axn.ones({"batch": 2, "embed": 3})
>>> isinstance(x, Named["batch embed"]), isinstance(x, Named["{embed ...}"])
(True, True)
>>> isinstance(x, Float[axn.NamedArray, "embed"])
False

Inside a function decorated with `jaxtyped`, an axis that annotations name must have one size, in named and raw arrays
alike. The axes that dots stand for can have any size.
"""

from ..axis import (
    AxisSelection as AxisSelection,
    AxisSelector as AxisSelector,
    AxisSpec as AxisSpec,
    PartialShapeDict as PartialShapeDict,
    ShapeDict as ShapeDict,
)
from ..named_array import NamedOrNumeric as NamedOrNumeric
from .annotations import (
    Bool as Bool,
    Complex as Complex,
    Float as Float,
    Inexact as Inexact,
    Int as Int,
    Integer as Integer,
    Key as Key,
    Named as Named,
    Num as Num,
    Real as Real,
    Shaped as Shaped,
    UInt as UInt,
    bf16 as bf16,
    bool_ as bool_,
    complex64 as complex64,
    complex128 as complex128,
    f16 as f16,
    f32 as f32,
    f64 as f64,
    i8 as i8,
    i16 as i16,
    i32 as i32,
    i64 as i64,
    u8 as u8,
    u16 as u16,
    u32 as u32,
    u64 as u64,
)
from .arguments import ReductionFunction as ReductionFunction, SimpleReductionFunction as SimpleReductionFunction
from .matching import (
    NamedArrayAxes as NamedArrayAxes,
    NamedArrayAxesSpec as NamedArrayAxesSpec,
    check_axes as check_axes,
    matches_axes as matches_axes,
)
