"""Functional updates by name, such as `x.at["batch", 0].set(y)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from .. import _errors, _kernels
from ..array import NamedArray, NamedOrNumeric, wrap
from ..axis import Names
from ._index_plan import IndexLayout, Item, SliceSpec, make_plan
from ._op_types import publish
from .indexing import get_kernel, mask_names


class Update(Protocol):
    """`x.at[index].f(value)`: the array with some elements changed."""

    def __call__(
        self,
        value: NamedOrNumeric,
        *,
        mode: Any = None,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
    ) -> NamedArray: ...
    def __get__(self, instance: Any, owner: Any = None) -> Update: ...


def _update(name: str, summary: str, example: str, shown: str) -> Update:
    def op(self, value, *, mode=None, indices_are_sorted=False, unique_indices=False):
        options = _options(mode=mode, indices_are_sorted=indices_are_sorted, unique_indices=unique_indices)
        return _apply_update(name, self.array, self.index, value, options)

    doc = f"""{summary}

    Arguments:
        value: a named array that broadcasts by name to what the index selects, or a scalar.
        mode: what to do with indices out of range, as in `jax.numpy.ndarray.at`: they are dropped by default.
        indices_are_sorted: the caller promises that the indices are in order.
        unique_indices: the caller promises that no element is selected twice.

    >>> axn.named({example}, "x").at["x", 1].{name}(2)
    NamedArray({shown})
    """
    update = publish(op, name, __name__, doc)
    update.__qualname__ = f"IndexedArray.{name}"  # pyright: ignore[reportAttributeAccessIssue]
    return update  # pyright: ignore[reportReturnType]


class IndexedArray:
    """A part of an array to read or change: the result of `x.at[index]`.

    >>> axn.arange(axn.Axis("x", 3)).at["x", 0].get()
    NamedArray(int32[], 0)
    """

    __slots__ = ("array", "index")

    def __init__(self, array: NamedArray, index: SliceSpec):
        self.array = array
        self.index = index

    # fmt: off
    set = _update("set", "Replace the selected elements.", "[1, 2, 3]", "int32[x=3], [1 2 3]")
    add = _update("add", "Add a value to the selected elements, as often as each is selected.", "[1, 2, 3]", "int32[x=3], [1 4 3]")
    subtract = _update("subtract", "Subtract a value from the selected elements.", "[1, 2, 3]", "int32[x=3], [1 0 3]")
    multiply = _update("multiply", "Multiply the selected elements by a value.", "[1, 2, 3]", "int32[x=3], [1 4 3]")
    divide = _update("divide", "Divide the selected elements by a value.", "[1., 2., 3.]", "float32[x=3], [1. 1. 3.]")
    power = _update("power", "Raise the selected elements to a power.", "[1, 2, 3]", "int32[x=3], [1 4 3]")
    min = _update("min", "Return the array with the selected elements limited to at most a value.", "[1, 5, 3]", "int32[x=3], [1 2 3]")
    max = _update("max", "Return the array with the selected elements limited to at least a value.", "[1, 0, 3]", "int32[x=3], [1 2 3]")
    # fmt: on
    mul = multiply

    def get(
        self,
        *,
        mode: Any = None,
        fill_value: Any = None,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
    ) -> NamedArray:
        """Return the selected elements, with a mode for indices out of range.

        Arguments:
            mode: 'fill', 'clip' or 'promise_in_bounds', as in `jax.numpy.ndarray.at`.
            fill_value: the value of elements out of range in mode 'fill'.
            indices_are_sorted: the caller promises that the indices are in order.
            unique_indices: the caller promises that no element is selected twice.

        >>> x = axn.named([1., 2.], "x")
        >>> x.at["x", axn.named([0, 5], "y")].get(mode="fill", fill_value=-1.)
        NamedArray(float32[y=2], [ 1. -1.])
        """
        options = _options(
            mode=mode, fill_value=fill_value, indices_are_sorted=indices_are_sorted, unique_indices=unique_indices
        )
        x = self.array
        items, operands = make_plan(x, self.index, for_update=bool(options), in_range=mode is None)
        kernel = get_kernel(x.names, items, options)
        return wrap(kernel.call(x.array, *operands), kernel.names)

    def apply(self, fn: Callable[[Any], Any]) -> NamedArray:
        """Apply an elementwise function to the selected elements.

        Arguments:
            fn: a function of a raw array, such as `jnp.abs`.

        >>> axn.named([-1, -2], "x").at["x", 0].apply(jnp.abs)
        NamedArray(int32[x=2], [ 1 -2])
        """
        selected = self.get()
        return self.set(wrap(fn(selected.array), selected.names))  # pyright: ignore[reportAttributeAccessIssue]


class Indexer:
    """The type of `x.at`, which is indexed to select elements.

    >>> axn.zeros({"x": 2}).at["x", 0].set(1)
    NamedArray(float32[x=2], [1. 0.])
    """

    __slots__ = ("array",)

    def __init__(self, array: NamedArray):
        self.array = array

    def __getitem__(self, index: SliceSpec) -> IndexedArray:
        return IndexedArray(self.array, index)


def _options(*, mode: Any, fill_value: Any = None, **promises: bool) -> tuple[tuple[str, Any], ...]:
    if isinstance(fill_value, (jax.Array, np.ndarray)):  # an array cannot be a cache key; its one element can
        fill_value = fill_value.item()
    given = {"mode": mode, "fill_value": fill_value, **{k: v or None for k, v in promises.items()}}
    return tuple((k, v) for k, v in given.items() if v is not None)


def _apply_update(how: str, x: NamedArray, index: SliceSpec, value: NamedOrNumeric, options: Any) -> NamedArray:
    items, operands = make_plan(x, index, for_update=True, in_range="mode" not in dict(options))
    value_names = value.names if isinstance(value, NamedArray) else ()
    kernel = _update_kernel(how, x.names, items, value_names, options)
    return wrap(kernel.call(x.array, value.array if isinstance(value, NamedArray) else value, *operands), x.names)


@_kernels.cached
def _update_kernel(
    how: str, names: Names, items: tuple[Item, ...], value_names: Names, options: Any
) -> _kernels.Kernel:
    what = f"at[...].{how}"
    layout = IndexLayout(names, items)
    extra = [n for n in value_names if n not in layout.out_names]
    if extra:
        raise ValueError(
            f"{what}: the value has axes {_errors.describe_axes(extra)} that the selected part "
            f"{_errors.describe_axes(layout.out_names)} lacks."
        )

    def positional(a, value, *operands):
        return layout.update(how, a, value, value_names, operands, dict(options))

    # The result has the sharding of the array, whatever those of the indices and the value. The layout compares sizes.
    others = [value_names, *layout.operands]
    in_names = [names, *(mask_names(n, n) for n in others)]
    return _kernels.make_kernel(what, positional, in_names, names, same_sizes=False)
