"""Rotary position embeddings: pairs of features are rotated by an angle that grows with the position.

Feature pair `i` at position `p` is rotated by `p * frequency[i]`, so the product of a query and a key depends on their
distance, not on their positions. By default, feature `i` is paired with feature `i + size / 2`, as in published
checkpoints in the format of Hugging Face; `interleaved=True` pairs neighbors, as in the original paper.

The frequencies are given by a configuration: `Rotary`, or a subclass that extends a model to longer contexts than it
was trained on.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ...axis import AxisSelector, Names
from ...core import errors
from ...named_array import NamedArray, resolve_axes, wrap
from ...ops import _kernels
from ...ops._operands import as_float, require_named, require_subset


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary position embeddings in their original form.

    Arguments:
        theta: the base: frequencies fall from 1 to about `1 / theta`.
        partial_rotary_factor: the fraction of a head that is rotated; the rest, at its end, is unchanged.
        interleaved: whether to pair neighboring features.

    >>> axn.nn.attention.Rotary().frequencies(4)
    array([1.  , 0.01])
    """

    theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    interleaved: bool = False

    rope_type: ClassVar[str] = "default"
    _required: ClassVar[tuple[str, ...]] = ()
    """The keys that a model configuration must have."""

    def frequencies(self, size: int) -> np.ndarray:
        """Return the angle by which each pair of features is rotated per position; `size` is the number of features.

        >>> axn.nn.attention.LinearRotary(factor=2.0).frequencies(4)
        array([0.5  , 0.005])
        """
        return self.theta ** -(np.arange(0, size, 2) / size)

    @property
    def magnitude(self) -> float:
        """Return the factor of queries and keys, besides their rotation.

        >>> round(axn.nn.attention.YarnRotary(factor=4.0).magnitude, 4)
        1.1386
        """
        return 1.0

    @staticmethod
    def from_config(
        config: Mapping[str, Any] | None,
        *,
        theta: float | None = None,
        max_position_embeddings: int | None = None,
        **options: Any,
    ) -> Rotary:
        """Read the `rope_parameters` or `rope_scaling` of a model configuration in the format of Hugging Face.

        Arguments:
            config: the entry, or None for plain rotary embeddings. Unknown keys are an error, and so are missing ones
                that have no usual value.
            theta: the base, which older configurations have outside of that entry, as `rope_theta`.
            max_position_embeddings: the configuration's value of this name: the length of the training context, if an
                entry of YaRN does not give it.
            **options: further fields, such as `interleaved`.

        >>> axn.nn.attention.Rotary.from_config({"rope_type": "linear", "factor": 2.0}, theta=5e5)
        LinearRotary(theta=500000.0, partial_rotary_factor=1.0, interleaved=False, factor=2.0)
        """
        given = dict(config or {}) | options
        legacy = given.pop("type", "default")
        kind = given.pop("rope_type", legacy)
        if kind not in KINDS:
            listed = ", ".join(KINDS)
            raise ValueError(
                f"Rotary.from_config: unknown kind {kind!r}, not one of {listed}.{errors.suggestion(str(kind), KINDS)}"
            )
        if "rope_theta" in given:
            given["theta"] = given.pop("rope_theta")
        elif theta is not None:
            given["theta"] = theta
        if kind == "yarn":
            given.pop("finetuned", None)  # in some files; it means nothing
            if given.get("original_max_position_embeddings") is None:
                given["original_max_position_embeddings"] = max_position_embeddings
        fields = [f.name for f in dataclasses.fields(KINDS[kind])]
        unknown = [name for name in given if name not in fields]
        if unknown:
            raise ValueError(
                f"Rotary.from_config: {kind!r} has no {errors.quoted(unknown)}; it has {', '.join(fields)}."
                f"{errors.suggestions(unknown, fields)}"
            )
        given = {name: value for name, value in given.items() if value is not None}
        if missing := [name for name in KINDS[kind]._required if name not in given]:
            raise ValueError(f"Rotary.from_config: the entry of kind {kind!r} must have {errors.quoted(missing)}.")
        return KINDS[kind](**given)

    def to_config(self) -> dict[str, Any]:
        """Return the configuration in the form that `from_config` and other libraries read.

        >>> axn.nn.attention.Rotary(theta=5e5).to_config()
        {'rope_type': 'default', 'rope_theta': 500000.0}
        """
        optional = ("partial_rotary_factor", "interleaved")
        rest = {
            f.name: value
            for f in dataclasses.fields(self)
            if f.name != "theta"
            and (value := getattr(self, f.name)) is not None
            and not (f.name in optional and value == f.default)
        }
        return {"rope_type": self.rope_type, "rope_theta": self.theta, **rest}


@dataclasses.dataclass(frozen=True)
class LinearRotary(Rotary):
    """Rotary embeddings with positions divided by a factor.

    Arguments:
        theta, partial_rotary_factor, interleaved: as in `Rotary`.
        factor: the number that positions are divided by.

    >>> axn.nn.attention.LinearRotary(factor=4.0).frequencies(2)
    array([0.25])
    """

    factor: float = 1.0

    rope_type: ClassVar[str] = "linear"
    _required: ClassVar[tuple[str, ...]] = ("factor",)

    def frequencies(self, size: int) -> np.ndarray:
        return super().frequencies(size) / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Rotary(Rotary):
    """Rotary embeddings as in Llama 3.1: low frequencies are divided by a factor, high ones kept.

    A frequency with fewer than `low_freq_factor` rotations over the training context is low, one with more than
    `high_freq_factor` rotations is high. In between, both are interpolated.

    Arguments:
        theta, partial_rotary_factor, interleaved: as in `Rotary`.
        factor: the number that low frequencies are divided by.
        low_freq_factor: the number of rotations below which a frequency is low.
        high_freq_factor: the number of rotations above which a frequency is high.
        original_max_position_embeddings: the length of the training context.

    >>> from axonym.nn.attention import Llama3Rotary, Rotary
    >>> Rotary().frequencies(4), Llama3Rotary(factor=8.0, original_max_position_embeddings=256).frequencies(4)
    (array([1.  , 0.01]), array([1.     , 0.00125]))
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    rope_type: ClassVar[str] = "llama3"
    _required: ClassVar[tuple[str, ...]] = (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    )

    def frequencies(self, size: int) -> np.ndarray:
        plain = super().frequencies(size)
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return plain * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class YarnRotary(Rotary):
    """Rotary embeddings as in YaRN: low frequencies are divided by a factor, and scores are sharpened.

    Frequencies with more than `beta_fast` rotations over the training context are kept, frequencies with fewer than
    `beta_slow` are divided. In between, both are interpolated.

    Arguments:
        theta, partial_rotary_factor, interleaved: as in `Rotary`.
        factor: the number that low frequencies are divided by.
        original_max_position_embeddings: the length of the training context.
        beta_fast: the number of rotations above which a frequency is kept.
        beta_slow: the number of rotations below which a frequency is divided.
        attention_factor: the factor of queries and keys; by default computed from `factor`.
        mscale: with `mscale_all_dim`, another way to give `attention_factor`: the growth with `factor`.
        mscale_all_dim: the growth that `mscale` is relative to.
        truncate: whether the interpolation begins and ends at a pair, not between two.

    >>> axn.nn.attention.YarnRotary(factor=4.0, original_max_position_embeddings=64).frequencies(4)
    array([1.    , 0.0025])
    """

    factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    rope_type: ClassVar[str] = "yarn"
    _required: ClassVar[tuple[str, ...]] = ("factor", "original_max_position_embeddings")

    def frequencies(self, size: int) -> np.ndarray:
        plain = super().frequencies(size)
        # The fractional indices of the pairs with so many rotations over the training context.
        low, high = (
            size * math.log(self.original_max_position_embeddings / (count * 2 * math.pi)) / (2 * math.log(self.theta))
            for count in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        width = high - low or 0.001  # a step if low and high are equal
        divided = np.clip((np.arange(size // 2) - low) / width, 0, 1)
        return plain * (1 - divided + divided / self.factor)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    def _growth(self, scale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0


KINDS: Mapping[str, type[Rotary]] = types.MappingProxyType(
    {kind.rope_type: kind for kind in (Rotary, LinearRotary, Llama3Rotary, YarnRotary)}
)
"""The classes of configurations, by their names in model configurations."""


def apply_rotary(
    x: NamedArray, HeadDim: AxisSelector, positions: NamedArray | AxisSelector, config: Rotary = Rotary()
) -> NamedArray:
    """Rotate the features of queries or keys by their positions.

    Angles and products are computed in float32 at least; the result has the dtype of `x`.

    Arguments:
        HeadDim: the axis of features.
        positions: the position of each query or key, along axes of `x`. An axis stands for positions from 0 along that
            axis.

    >>> x = axn.named([[1.0, 0.0], [1.0, 0.0]], ("pos", "head_size"))
    >>> axn.nn.attention.apply_rotary(x, "head_size", "pos")
    NamedArray(float32[pos=2, head_size=2], [[1. 0. ] [0.5403 0.8415]])
    """
    require_named("apply_rotary", x)
    if not isinstance(positions, NamedArray):
        (along,) = resolve_axes(x.names, jnp.shape(x.array), positions, "apply_rotary")
        positions = wrap(jnp.arange(along.size), (along.name,))
    return _rotary_kernel(x.names, positions.names, HeadDim, config).apply(x.array, positions.array)


@_kernels.shared("names", "position_names", "HeadDim")
def _rotary_kernel(names: Names, position_names: Names, HeadDim: AxisSelector, config: Rotary) -> _kernels.Kernel:
    what = "apply_rotary"
    features = _kernels.select_one(what, names, HeadDim)
    where = names.index(features)
    require_subset(what, "positions", position_names, tuple(n for n in names if n != features))

    def positional(x, positions):
        size = int(x.shape[where] * config.partial_rotary_factor)
        if size % 2:
            raise ValueError(
                f"{what}: features are rotated in pairs, but {size} features of axis {features!r} are to be rotated, "
                f"an odd number: {errors.describe_axes(names, x.shape)}, partial_rotary_factor="
                f"{config.partial_rotary_factor}."
            )
        x = as_float(x)
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        frequencies = jnp.asarray(config.frequencies(size), dtype)
        angles = _kernels.align(positions.astype(dtype), position_names, names)
        angles = angles * _kernels.align(frequencies, (features,), names)
        cos, sin = jnp.cos(angles) * config.magnitude, jnp.sin(angles) * config.magnitude
        rest = x.shape[where] - size
        turned, *kept = jax.lax.split(x, (size, rest), axis=where) if rest else [x]
        turned = _rotate_pairs(turned.astype(dtype), cos, sin, where, config.interleaved).astype(x.dtype)
        return jax.lax.concatenate([turned, *kept], where) if rest else turned

    return _kernels.make_kernel(what, positional, (names, position_names), names, selection=HeadDim)


def _rotate_pairs(x: jax.Array, cos: jax.Array, sin: jax.Array, axis: int, interleaved: bool) -> jax.Array:
    """Rotate pairs of features, which are half the axis apart, or neighbors."""
    half = x.shape[axis] // 2
    if interleaved:
        pairs = jnp.reshape(x, (*x.shape[:axis], half, 2, *x.shape[axis + 1 :]))
        first, second = (jax.lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
    else:
        first, second = jax.lax.split(x, (half, half), axis=axis)
    turned = first * cos - second * sin, second * cos + first * sin
    return jnp.stack(turned, axis + 1).reshape(x.shape) if interleaved else jax.lax.concatenate(turned, axis)
