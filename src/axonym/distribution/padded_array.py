"""Arrays that are stored padded, because their mesh axes do not divide an axis.

JAX has no type for uneven shards outside of compiled functions. Inside, on Auto mesh axes, XLA lays out an axis of 28
over 8 devices as one of 32. So outside, such an array is stored as 32 rows, and cannot be computed with; inside,
slicing it to 28 rows moves nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

_WAY_OUT = (
    "This array of shape {shape} is stored padded to {stored}, since its mesh axes do not divide its axes, so nothing "
    "computes with it here. Pass it to a function compiled by axonym.named_jit or axonym.fsdp, which sees its true "
    "size, gather it with axonym.unshard, or copy it with axonym.to_host."
)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PaddedArray:
    """An array with padding at the end of some axes, which is not part of its values."""

    array: Any
    """The array with its padding."""
    sizes: str
    """The true sizes. As text, since `axonym.core.tree_spec` distinguishes numbers by type in every call."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the true shape."""
        return tuple(map(int, self.sizes.split()))

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return len(self.array.shape)

    @property
    def dtype(self) -> Any:
        """Return the dtype."""
        return self.array.dtype

    @property
    def sharding(self) -> Any:
        """Return the sharding of the array with its padding."""
        return self.array.sharding

    def unpadded(self) -> Any:
        """Return the values alone. On Auto mesh axes in a compiled function, this moves nothing."""
        if isinstance(self.array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self.shape, self.dtype)
        if isinstance(self.array, np.ndarray):
            return self.sliced(self.array)
        return jax.lax.slice(self.array, (0,) * self.ndim, self.shape)

    def sliced(self, x: np.ndarray) -> np.ndarray:
        """Return a copy of this array on the host without the padding."""
        return x[tuple(map(slice, self.shape))]

    def __repr__(self) -> str:
        return f"PaddedArray({self.dtype}{list(self.shape)}, stored as {list(self.array.shape)})"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name!r}: {self.way_out()}")

    def way_out(self) -> str:
        """Say why an operation refuses this array, and what to do."""
        return _WAY_OUT.format(shape=self.shape, stored=getattr(self.array, "shape", None))


def _refuse_use(self: PaddedArray, *_: Any, **__: Any) -> NoReturn:
    raise TypeError(self.way_out())


_OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift divmod"
_OTHERS = "lt le gt ge neg pos abs invert getitem iter len bool int float complex index array jax_array"
for _name in [*_OPERATORS.split(), *(f"r{n}" for n in _OPERATORS.split()), *_OTHERS.split()]:
    setattr(PaddedArray, f"__{_name}__", _refuse_use)

jax.tree_util.register_dataclass(PaddedArray, data_fields=["array"], meta_fields=["sizes"])


def padded_array(array: Any, shape: Sequence[int]) -> PaddedArray:
    """Make a padded array from an array with its padding, and the true shape."""
    return PaddedArray(array, " ".join(map(str, shape)))


def is_padded(x: object) -> bool:
    """Return whether something is a padded array."""
    return isinstance(x, PaddedArray)


def refuse_padded(arrays: Iterable[Any]) -> None:
    """Raise an error if one of the operands that an operation has refused is a padded array."""
    for x in arrays:
        if isinstance(x, PaddedArray):
            raise TypeError(x.way_out()) from None


def stored(x: Any) -> Any:
    """Return the array with its padding of a padded array, and anything else as it is."""
    return x.array if isinstance(x, PaddedArray) else x


def unpadded(tree: Any) -> Any:
    """Return a tree with the values alone of its padded arrays."""
    return jax.tree.map(lambda x: x.unpadded() if isinstance(x, PaddedArray) else x, tree, is_leaf=is_padded)


def with_padding(x: Any, shape: Sequence[int]) -> Any:
    """Add zeros at the ends of the axes of an array, up to a shape."""
    if tuple(x.shape) == tuple(shape):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)
    if isinstance(x, np.ndarray):
        return np.pad(x, [(0, new - size) for new, size in zip(shape, x.shape, strict=True)])
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(x)
        return jax.random.wrap_key_data(
            with_padding(data, (*shape, *data.shape[x.ndim :])), impl=jax.random.key_impl(x)
        )
    added = [(0, new - size, 0) for new, size in zip(shape, x.shape, strict=True)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), added)
