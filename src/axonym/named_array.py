"""The named array: a JAX array and the names of its axes. May change before 1.0.

A `NamedArray` stores two things, the array and a tuple of names. Sizes come from the array, so `axes` is derived.
Therefore an abstract array, a tracer, a shard inside `shard_map` or the slice that a scan passes to its body needs no
special case. The names are static pytree metadata; the array is the only leaf.

The class has only what concerns this storage. The operations are in `axonym.ops`, and those that are also methods or
operators are listed in `axonym._methods`: a method *is* the function of the same name.
"""

from __future__ import annotations

import contextvars
import functools
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, TypeGuard, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import DictKey, register_dataclass, register_pytree_with_keys
from jax.typing import ArrayLike

from .axis import Axis, AxisSelection, AxisSelector, AxisSpec, Names, interned, name_of, selectors
from .core import errors

if TYPE_CHECKING:
    from ._methods import Methods as _Base
else:

    class _Base:
        """A stand-in for `axonym._methods.Methods`, whose entries are set on `NamedArray` on import."""

        __slots__ = ()


SHAPE_CHECKS: contextvars.ContextVar[bool] = contextvars.ContextVar("axonym.shape_checks", default=True)
"""Whether `NamedArray(array, axes)` compares the axes with the array."""


class Shape(dict[str, int]):
    """The sizes of axes by name. Positions are refused, and so is iteration, which would give names for sizes.

    >>> axn.ones({"batch": 2, "embed": 3}).shape["embed"]
    3
    """

    __slots__ = ()

    def __missing__(self, name: Any) -> Any:
        listed = ", ".join(self.keys())
        if isinstance(name, (int, np.integer)):
            raise TypeError(f"A size is looked up by name, got {name}: write `x.shape[name]`. The axes are {listed}.")
        raise KeyError(f"no axis {name!r} in {errors.describe_shape(self)}.{errors.suggestion(str(name), self.keys())}")

    def __call__(self, *args: Any) -> NoReturn:
        raise TypeError(f"A shape is not called: `x.shape[name]` is a size. The axes are {', '.join(self.keys())}.")

    def __iter__(self) -> Iterator[str]:
        raise TypeError(
            f"Iterating over the shape {errors.describe_shape(self)} is ambiguous: `x.names` are the names, and "
            "`x.shape.values()` the sizes. Axes with sizes, `x.axes`, are what most operations take."
        )


class NamedArray(_Base):
    """A JAX array whose axes have names.

    Arguments:
        array: any array: JAX, NumPy, abstract or traced.
        axes: its axes in order, as `Axis` (whose sizes are checked) or names.

    >>> x = axn.NamedArray(jnp.ones((2, 3)), axn.make_axes(batch=2, embed=3))
    >>> x.axes
    (Axis(name='batch', size=2), Axis(name='embed', size=3))
    >>> print(x)
    float32[batch=2, embed=3]
    [[1. 1. 1.]
     [1. 1. 1.]]
    """

    __slots__ = ("__weakref__", "array", "names")

    def __hash__(self) -> int:  # like a JAX array: equality is elementwise
        raise TypeError(
            "unhashable type: 'NamedArray'. If jax.jit is to compile a module, write `axonym.named_jit(model)` or "
            "`equinox.filter_jit(model)`, which take the arrays in it as arguments."
        )

    array: jax.Array
    """The array: a JAX array, unless you named one of another kind. A NumPy array stays in host memory, without `.at`
    and `.sharding`, until an operation, `shard` or a compiled function takes it."""
    names: Names
    """The name of each axis of the array."""

    def __init__(self, array: Any, axes: AxisSpec | AxisSelection = (), names: Names | None = None):
        # Unflattening a pytree passes `names` and may pass anything for `array`; it is on the hot path of every
        # jitted call, so this branch does nothing else.
        if names is None:
            try:
                array, names = _checked_fields(array, axes)
            except (TypeError, ValueError):
                if SHAPE_CHECKS.get() and type(array) not in (type(None), object):  # which have no shape
                    raise
                names = tuple(interned(s) for s in selectors(axes))
        self.array = array
        self.names = names

    if not TYPE_CHECKING:  # so that type checkers refuse an attribute that does not exist

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or hasattr(type(self), name):  # a property has failed: raise its own error
                return object.__getattribute__(self, name)
            from .core import foreign_names

            hint = foreign_names.of_array(name, self.names)
            raise AttributeError(f"'NamedArray' object has no attribute {name!r}.{hint}", name=name, obj=self)

        def __setitem__(self, index: Any, value: Any) -> None:
            first = self.names[0] if self.names else "axis"
            raise TypeError(
                "'NamedArray' object does not support item assignment: arrays are immutable. "
                f"Write `x = x.at[{first!r}, 0].set(value)`."
            )

        def __len__(self) -> int:
            axes = f"{errors.describe_axes(self.names)}: `x.axis_size({self.names[0]!r})`" if self.names else "()"
            raise TypeError(f"A named array has no len(), but a size for each axis of {axes}.")

    # --- properties ---

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Return the axes, with the sizes of the array.

        >>> axn.ones({"batch": 2}).axes
        (Axis(name='batch', size=2),)
        """
        return _axes_of(self.names, self._sizes())

    @property
    def shape(self) -> dict[str, int]:
        """Return the sizes by name, in order, as a dictionary.

        >>> axn.ones({"batch": 2, "embed": 3}).shape
        {'batch': 2, 'embed': 3}
        """
        return Shape({a.name: a.size for a in self.axes})

    @property
    def dtype(self) -> Any:
        """Return the dtype of the array.

        >>> axn.ones({"batch": 2}).dtype
        dtype('float32')
        """
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """Return the number of axes.

        >>> axn.ones({"batch": 2, "embed": 3}).ndim
        2
        """
        return len(self.names)

    @property
    def size(self) -> int:
        """Return the number of elements.

        >>> axn.ones({"batch": 2, "embed": 3}).size
        6
        """
        return math.prod(self._sizes())

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of all elements.

        >>> axn.ones({"batch": 2, "embed": 3}).nbytes
        24
        """
        return self.size * self.dtype.itemsize

    @property
    def sharding(self) -> jax.sharding.Sharding | None:
        """Return JAX's sharding of the array; None if it has none, as in host memory.

        >>> mesh = axn.make_mesh({"data": 2})
        >>> axn.shard(axn.ones({"batch": 2}), {"batch": "data"}, mesh).sharding.spec
        P('data',)
        """
        return getattr(self.array, "sharding", None)

    def _sizes(self) -> tuple[int, ...]:
        if self.array is None:
            raise ValueError(
                f"The named array {errors.describe_axes(self.names)} is empty: its array is None, as "
                "`equinox.partition` and `equinox.filter` leave what they filter out."
            )
        return jnp.shape(self.array)

    # --- axes ---

    def has_axis(self, axis: AxisSelection) -> bool:
        """Return whether the array has an axis, or all of several.

        >>> axn.ones({"batch": 2}).has_axis("batch"), axn.ones({"batch": 2}).has_axis(("batch", "embed"))
        (True, False)
        """
        return all(name_of(s) in self.names for s in selectors(axis))

    @overload
    def axis_size(self, axis: AxisSelector) -> int: ...
    @overload
    def axis_size(self, axis: AxisSelection) -> Any: ...
    def axis_size(self, axis: AxisSelection) -> Any:
        """Return the size of an axis, or the sizes of several.

        >>> axn.ones({"batch": 2, "embed": 3}).axis_size(("embed", "batch"))
        (3, 2)
        """
        found = self.resolve_axis(axis)
        return found.size if isinstance(found, Axis) else tuple(a.size for a in selectors(found))  # pyright: ignore

    @overload
    def resolve_axis(self, axes: AxisSelector) -> Axis: ...
    @overload
    def resolve_axis(self, axes: AxisSelection) -> Any: ...
    def resolve_axis(self, axes: AxisSelection) -> Any:
        """Return the axis with a given name, including its size, or several of them.

        >>> axn.ones({"batch": 2}).resolve_axis("batch")
        Axis(name='batch', size=2)
        """
        found = resolve_axes(self.names, self._sizes(), axes, "resolve_axis")
        if isinstance(axes, (Axis, str)):
            return found[0]
        return {a.name: a.size for a in found} if isinstance(axes, Mapping) else found

    @overload
    def axis_indices(self, axis: AxisSelector) -> int | None: ...
    @overload
    def axis_indices(self, axis: AxisSelection) -> Any: ...
    def axis_indices(self, axis: AxisSelection) -> Any:
        """Return the position of an axis, or the positions of several; None for an axis that the array lacks.

        >>> axn.ones({"batch": 2, "embed": 3}).axis_indices(("embed", "heads"))
        (1, None)
        """
        found = tuple(self.names.index(n) if (n := name_of(s)) in self.names else None for s in selectors(axis))
        return found[0] if isinstance(axis, (Axis, str)) else found

    # --- values on the host ---

    def scalar(self) -> jax.Array:
        """Return the raw array of a named array without axes.

        >>> axn.sum(axn.ones({"batch": 2})).scalar()
        Array(2., dtype=float32)
        """
        if self.names:
            raise ValueError(f"scalar: expected no axes, got {describe_array(self)}. Reduce or index them away first.")
        return self.array

    def item(self) -> int | float | Any:  # it is complex for few
        """Return the only element, as a Python number.

        >>> axn.sum(axn.ones({"batch": 2})).item()
        2.0
        """
        if self.size != 1:
            raise ValueError(f"item: expected exactly one element, got {describe_array(self)}.")
        return self.array.item()

    def tolist(self) -> Any:
        """Return the elements as nested lists, in the order of the axes.

        >>> axn.arange(axn.Axis("x", 3)).tolist()
        [0, 1, 2]
        """
        return self.array.tolist()

    def tobytes(self, order: Literal["C", "F", "A"] = "C") -> bytes:
        """Return the elements as bytes.

        >>> len(axn.arange(axn.Axis("x", 3)).tobytes())
        12
        """
        return np.asarray(self.array).tobytes(order)

    def __bool__(self) -> bool:
        element = self.array
        if not isinstance(element, (jax.Array, np.ndarray)) or element.size != 1:
            reduced = " `x.all()` and `x.any()` reduce all of them, and `axonym.where(x, a, b)` chooses by each."
            element = self._only_element("a truth value", reduced)
        try:
            return bool(element)
        except jax.errors.TracerBoolConversionError as error:
            error.add_note(
                "In a traced function, `axonym.where(condition, x, y)` chooses between values, and "
                "`axonym.cond(condition, f, g, x)` calls `f(x)` or `g(x)`."
            )
            raise

    def __int__(self) -> int:
        return int(self._only_element("int()"))

    def __float__(self) -> float:
        return float(self._only_element("float()"))

    def __complex__(self) -> complex:
        return complex(self._only_element("complex()"))

    def __index__(self) -> int:
        return self._only_element("an index").__index__()

    def _only_element(self, what: str, way_out: str = "") -> Any:
        if self.names:
            raise TypeError(
                f"{what} needs a named array without axes, got {describe_array(self)}. Reduce or index the axes away "
                f"first.{way_out}"
            )
        return self.array

    # --- Python's protocols ---

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()  # pyright: ignore[reportAttributeAccessIssue]  # which arrays have

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            f"Iterating over a named array is ambiguous: name the axis, as in `for row in x.unbind({self.names[0]!r})`."
            if len(self.names) > 1
            else f"A named array is not iterable; use `x.unbind({self.names[0]!r})`."
            if self.names
            else "A named array without axes is not iterable."
        )

    def __reduce__(self):
        return _restore, (self.array, self.names)

    def __format__(self, spec: str) -> str:
        return format(self._only_element("a format") if spec else str(self), spec)

    def __str__(self) -> str:
        values = small_values(self.array, _PRINTED) if len(self.names) <= 2 else None  # a table has at most two axes
        if values is None:
            return describe_array(self)
        return f"{describe_array(self)}{chr(10) if chr(10) in values else ' '}{values}"

    def __repr__(self) -> str:
        values = small_values(self.array)
        if values is not None:
            return f"NamedArray({describe_array(self)}, {' '.join(values.split())})"
        kind = "" if isinstance(self.array, jax.Array) else f", {type(self.array).__name__}"
        return f"NamedArray({describe_array(self)}{kind})"

    def __pdoc__(self, *, short_arrays: bool = True, **_: Any) -> Any:
        """Print as one line for each array in a tree, for Equinox's `tree_pprint` and the `repr` of its modules."""
        import wadler_lindig

        return wadler_lindig.TextDoc(describe_array(self) if short_arrays else repr(self))


register_pytree_with_keys(  # a tree with its sizes as leaves, as any dictionary
    Shape,
    lambda shape: ([(DictKey(n), shape[n]) for n in sorted(shape.keys())], tuple(sorted(shape.keys()))),
    lambda names, sizes: dict(zip(names, sizes, strict=True)),  # pyright: ignore[reportArgumentType]
)
register_dataclass(NamedArray, data_fields=["array"], meta_fields=["names"])


def _interned(names: Iterable[str]) -> Names:
    """Intern names that come from outside, so that they are compared by identity."""
    return tuple(map(sys.intern, names))


# `jax.export` writes only the names of a tree.
jax.export.register_pytree_node_serialization(
    NamedArray,
    serialized_name="axonym.NamedArray",
    serialize_auxdata=lambda metadata: json.dumps(metadata[0]).encode(),
    deserialize_auxdata=lambda data: (_interned(json.loads(data)),),
    from_children=lambda metadata, children: wrap(*children, *metadata),  # pyright: ignore[reportArgumentType]
)
jax.export.register_pytree_node_serialization(
    Shape,
    serialized_name="axonym.Shape",
    serialize_auxdata=lambda names: json.dumps(names).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(data)),
    from_children=lambda names, sizes: Shape(zip(names, sizes, strict=True)),  # pyright: ignore[reportArgumentType]
)

NamedOrNumeric: TypeAlias = NamedArray | ArrayLike


def wrap(array: Any, names: Names) -> NamedArray:
    """Make a named array without any check, for names that are known to be right."""
    return NamedArray(array, (), names)  # positional: keywords would double the cost


def _restore(array: Any, names: Names) -> NamedArray:
    """Rebuild a named array while unpickling."""
    return wrap(array, _interned(names))


def wrap_result(result: Any, names: Any) -> Any:
    """Name the result of a kernel: return a named array, or a tuple of them."""
    if isinstance(result, (tuple, list)):
        return tuple(wrap(r, n) for r, n in zip(result, names, strict=True))
    return wrap(result, names)


def raw(x: Any) -> Any:
    """Return the raw array of a named array, and anything else as it is."""
    return x.array if isinstance(x, NamedArray) else x


def wrap_like(array: Any, x: Any) -> Any:
    """Give an array the names of a named array; return it as it is if the other one has none."""
    return wrap(array, x.names) if isinstance(x, NamedArray) else array


@errors.say_how_to_call
def named(a: Any, axis: AxisSelection) -> NamedArray:
    """Name the axes of an array, of a (nested) list of numbers, or of a number.

    `axis` has a name or an axis for each axis of `a` in order; the sizes of axes are checked.

    A NumPy array is not copied, and stays in host memory until an operation, `shard` or a compiled function takes it:
    each device then gets only its shard. `axn.named(jnp.asarray(a), axis)` copies it to the default device at once.

    >>> axn.named(jnp.zeros((2, 3)), ("batch", "embed")).shape
    {'batch': 2, 'embed': 3}
    >>> axn.named([1, 2], "x")
    NamedArray(int32[x=2], [1 2])
    """
    if isinstance(a, NamedArray):
        raise TypeError(f"named: the array already has names, {describe_array(a)}. Use `rename` to change them.")
    return NamedArray(a if hasattr(a, "shape") else jnp.asarray(a), axis)


def is_named_array(leaf: object) -> TypeGuard[NamedArray]:
    """Return whether something is a named array; useful as `is_leaf`.

    >>> axn.is_named_array(axn.ones({"x": 2})), axn.is_named_array(jnp.ones(2))
    (True, False)
    """
    return isinstance(leaf, NamedArray)


def is_jax_array_like(x: object) -> bool:
    """Return whether something has a shape and a dtype: raw, NumPy, named and abstract arrays do.

    >>> from axonym.named_array import is_jax_array_like
    >>> is_jax_array_like(np.ones(2)), is_jax_array_like(3.0)
    (True, False)
    """
    array = raw(x)  # which can be a placeholder
    return hasattr(array, "shape") and hasattr(array, "dtype")


# --- checks ---


def _checked_fields(array: Any, axes: AxisSelection) -> tuple[Any, Names]:
    found = selectors(axes)
    names = errors.distinct("NamedArray", tuple(interned(s) for s in found))
    if isinstance(array, NamedArray):
        raise TypeError(
            f"NamedArray: the array already has names, {describe_array(array)}. Use `rename` to change them."
        )
    if isinstance(array, (bool, int, float, complex)):
        array = jnp.asarray(array)
    shape = getattr(array, "shape", None)
    if shape is None:
        raise TypeError(f"NamedArray: expected an array, got {type(array).__name__}. Lists go through `axonym.named`.")
    if len(shape) != len(names):
        words = re.split(r"[\s,]+", names[0].strip()) if len(names) == 1 else []
        hint = f" Names are a sequence: {tuple(words)}." if len(words) > 1 else ""
        if len(shape) == len(names) + 1 and shape[-1] == 2 and getattr(array, "dtype", None) == jnp.uint32:
            hint += (
                " Keys of `jax.random.PRNGKey` have a last dimension of their own; those of `jax.random.key` do not. "
                "`axonym.scan` and `axonym.vmap` take raw keys."
            )
        raise ValueError(
            f"NamedArray: {errors.counted(len(names), 'axis', 'axes')} {errors.describe_selectors(found)} for an "
            f"array of rank {len(shape)}, shape {tuple(shape)}.{hint}"
        )
    for s, size in zip(found, shape, strict=True):
        if isinstance(s, Axis) and s.size != size:
            raise ValueError(
                f"NamedArray: axis {s.name!r} has size {s.size}, but the array has {size} there: axes "
                f"{errors.describe_selectors(found)}, shape {tuple(shape)}."
            )
    return array, names


@functools.lru_cache(maxsize=4096)
def _axes_of(names: Names, shape: tuple[int, ...]) -> tuple[Axis, ...]:
    if len(names) != len(shape):
        raise ValueError(errors.wrong_rank(names, shape))
    return tuple(map(Axis, names, shape))


def resolve_axes(names: Names, shape: tuple[int, ...], selection: AxisSelection, what: str) -> tuple[Axis, ...]:
    """Return the selected axes of an array with these names and sizes; unknown names and other sizes are errors."""
    known = dict(zip(names, _axes_of(names, shape), strict=True))
    found = selectors(selection)
    missing = [n for s in found if (n := name_of(s)) not in known]
    if missing:
        raise ValueError(errors.missing_axes(what, missing, names, shape))
    for s in found:
        if isinstance(s, Axis) and known[s.name] is not s:
            places = [("the array", known[s.name].size), ("the argument", s.size)]
            raise ValueError(errors.size_mismatch(what, s.name, places))
    return tuple(known[name_of(s)] for s in found)


# --- representation ---

_SMALL, _PRINTED = 64, 32
"""Up to this many elements are shown by `repr`, and by `print`, where each row is a line."""


def describe_array(array: Any) -> str:
    """Describe an array by its dtype and axes, without its values.

    Arguments:
        array: an array of any kind.

    >>> axn.debug.describe_array(axn.zeros({"batch": 4})), axn.debug.describe_array(jnp.zeros((2, 3)))
    ('float32[batch=4]', 'float32[2, 3]')
    """
    if not isinstance(array, NamedArray):
        if not hasattr(array, "dtype"):
            raise TypeError(f"describe_array: expected an array, got {type(array).__name__}.")
        return f"{array.dtype}[{', '.join(map(str, array.shape))}]"
    raw, names = array.array, array.names
    dtype = getattr(raw, "dtype", None)
    if dtype is None or isinstance(raw, NamedArray):  # `jax.jacrev` makes a `NamedArray` in a `NamedArray`
        return f"{type(raw).__name__}{errors.describe_axes(names)}"
    shape = jnp.shape(raw)
    if len(shape) != len(names):
        return f"{dtype}[{', '.join(names)}] over shape {shape}"
    return f"{dtype}[{', '.join(f'{n}={s}' for n, s in zip(names, shape, strict=True))}]"


def small_values(array: Any, most: int = _SMALL) -> str | None:
    """Return the values of a small array, or None if showing them could take long: a host must not wait for another.

    >>> from axonym.named_array import small_values
    >>> small_values(np.arange(3)), small_values(np.arange(3), most=2)
    ('[0 1 2]', None)
    """
    if not isinstance(array, (jax.Array, np.ndarray)) or isinstance(array, Tracer) or array.size > most:
        return None
    if isinstance(array, jax.Array) and (
        array.is_deleted() or not (array.is_fully_addressable or array.is_fully_replicated)
    ):
        return None
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return None
    # jax 0.10 cannot copy what a program on Explicit mesh axes returns without elements.
    values = np.asarray(array) if array.size else np.empty(array.shape)
    return np.array2string(values, precision=4, separator=" ", max_line_width=10_000)
