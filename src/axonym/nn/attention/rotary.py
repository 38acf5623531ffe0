"""Rotary position embeddings: pairs of features turned by an angle that grows with the position.

Feature pair `i` at position `p` is turned by `p * frequency[i]`, so that the product of a query and a key depends on
how far apart they are, not on where they are. Which features make a pair is a convention. By default it is that of
published checkpoints in the format of Hugging Face, feature `i` with feature `i + size / 2`; `interleaved=True` pairs
neighbours, as in the original paper.

How frequencies follow from the size of a head is a configuration: `Rotary` itself, or one of its kinds that stretch a
model to longer texts than it was trained on.
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

from ... import _errors, _kernels
from ...array import NamedArray, resolve, wrap
from ...axis import AxisSelector, Names
from ...ops._operands import require_named, require_subset
from ...ops.creation import arange


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary embeddings as they were first published.

    Arguments:
        theta: the base: frequencies fall from 1 to about `1 / theta`.
        partial_rotary_factor: the fraction of a head that is turned; the rest, its end, stays as it is.
        interleaved: make pairs of neighbouring features.

    >>> from axonym.nn.attention import Rotary
    >>> Rotary().frequencies(4)
    array([1.  , 0.01])
    """

    theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    interleaved: bool = False

    rope_type: ClassVar[str] = "default"

    def frequencies(self, size: int) -> np.ndarray:
        """The angle by which each pair of features is turned from one position to the next.

        Arguments:
            size: how many features are turned.

        >>> from axonym.nn.attention import LinearRotary
        >>> LinearRotary(factor=2.0).frequencies(4)
        array([0.5  , 0.005])
        """
        return self.theta ** -(np.arange(0, size, 2) / size)

    @property
    def magnitude(self) -> float:
        """What queries and keys are multiplied by besides being turned.

        >>> from axonym.nn.attention import YarnRotary
        >>> round(YarnRotary(factor=4.0).magnitude, 4)
        1.1386
        """
        return 1.0

    @staticmethod
    def from_config(config: Mapping[str, Any] | None, *, theta: float | None = None, **options: Any) -> Rotary:
        """Read the `rope_parameters` or `rope_scaling` of a model configuration in the format of Hugging Face.

        Arguments:
            config: the entry, or None for plain rotary embeddings. What it says and is not known here is an error.
            theta: the base, which older configurations have outside of that entry, as `rope_theta`.
            **options: further fields, such as `interleaved`.

        >>> from axonym.nn.attention import Rotary
        >>> Rotary.from_config({"rope_type": "linear", "factor": 2.0}, theta=5e5)
        LinearRotary(theta=500000.0, partial_rotary_factor=1.0, interleaved=False, factor=2.0)
        """
        given = dict(config or {}) | options
        legacy = given.pop("type", "default")
        kind = given.pop("rope_type", legacy)
        if kind not in KINDS:
            listed = ", ".join(KINDS)
            raise ValueError(
                f"Rotary.from_config: the kinds {listed} are known, got {kind!r}.{_errors.suggestion(str(kind), KINDS)}"
            )
        if "rope_theta" in given:
            given["theta"] = given.pop("rope_theta")
        elif theta is not None:
            given["theta"] = theta
        fields = [f.name for f in dataclasses.fields(KINDS[kind])]
        unknown = [name for name in given if name not in fields]
        if unknown:
            hints = "".join(_errors.suggestion(n, fields) for n in unknown)
            raise ValueError(
                f"Rotary.from_config: {kind!r} has no {', '.join(map(repr, unknown))}; it has {', '.join(fields)}."
                f"{hints}"
            )
        return KINDS[kind](**{name: value for name, value in given.items() if value is not None})

    def to_config(self) -> dict[str, Any]:
        """The configuration as `from_config` and other libraries read it.

        >>> from axonym.nn.attention import Rotary
        >>> Rotary(theta=5e5).to_config()
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
        theta: the base.
        partial_rotary_factor: the fraction of a head that is turned.
        interleaved: make pairs of neighbouring features.
        factor: what positions are divided by.

    >>> from axonym.nn.attention import LinearRotary
    >>> LinearRotary(factor=4.0).frequencies(2)
    array([0.25])
    """

    factor: float = 1.0

    rope_type: ClassVar[str] = "linear"

    def frequencies(self, size: int) -> np.ndarray:
        return super().frequencies(size) / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Rotary(Rotary):
    """Rotary embeddings as in Llama 3.1: low frequencies are divided by a factor, high ones kept.

    A frequency that turns fewer than `low_freq_factor` times over the context of training is low, one that turns more
    than `high_freq_factor` times is high. In between, the two are mixed.

    Arguments:
        theta: the base.
        partial_rotary_factor: the fraction of a head that is turned.
        interleaved: make pairs of neighbouring features.
        factor: what low frequencies are divided by.
        low_freq_factor: up to how many turns a frequency is low.
        high_freq_factor: from how many turns on it is high.
        original_max_position_embeddings: the context of training, in positions.

    >>> from axonym.nn.attention import Llama3Rotary, Rotary
    >>> Rotary().frequencies(4), Llama3Rotary(factor=8.0, original_max_position_embeddings=256).frequencies(4)
    (array([1.  , 0.01]), array([1.     , 0.00125]))
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    rope_type: ClassVar[str] = "llama3"

    def frequencies(self, size: int) -> np.ndarray:
        plain = super().frequencies(size)
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return plain * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class YarnRotary(Rotary):
    """Rotary embeddings as in YaRN: low frequencies are divided by a factor, and scores are sharpened.

    Frequencies of more than `beta_fast` turns over the context of training are kept, those of fewer than `beta_slow`
    are divided. In between, the two are mixed.

    Arguments:
        theta: the base.
        partial_rotary_factor: the fraction of a head that is turned.
        interleaved: make pairs of neighbouring features.
        factor: what low frequencies are divided by.
        original_max_position_embeddings: the context of training, in positions.
        beta_fast: from how many turns on a frequency is kept.
        beta_slow: up to how many turns it is divided.
        attention_factor: what queries and keys are multiplied by; by default it follows from the factor.
        mscale: with `mscale_all_dim`, another way to say that: how it grows with the factor.
        mscale_all_dim: what `mscale` is relative to.
        truncate: let the ramp begin and end at whole pairs.

    >>> from axonym.nn.attention import YarnRotary
    >>> YarnRotary(factor=4.0, original_max_position_embeddings=64).frequencies(4)
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

    def frequencies(self, size: int) -> np.ndarray:
        plain = super().frequencies(size)
        low, high = (self._pair_that_turns(turns, size) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        width = high - low or 0.001  # a step, where the ramp has no width
        divided = np.clip((np.arange(size // 2) - low) / width, 0, 1)
        return plain * (1 - divided + divided / self.factor)

    def _pair_that_turns(self, turns: float, size: int) -> float:
        """The number, with a fraction, of the pair that turns that often over the context of training."""
        return (
            size * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(self.theta))
        )

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
"""The kinds of configuration, by the names they have in model configurations."""


def apply_rotary(
    x: NamedArray,
    HeadDim: AxisSelector,
    positions: NamedArray | AxisSelector,
    config: Rotary = Rotary(),
) -> NamedArray:
    """Turn the features of queries or keys by their positions.

    Angles and products are computed in float32 at least; the result has the dtype of `x`.

    Arguments:
        x: queries or keys.
        HeadDim: the axis of features.
        positions: the position of each query or key, along axes of `x`. An axis alone stands for positions counted
            from 0 along it.
        config: how fast features turn.

    >>> from axonym.nn.attention import apply_rotary
    >>> x = axn.named([[1.0, 0.0], [1.0, 0.0]], ("pos", "head_size"))
    >>> apply_rotary(x, "head_size", "pos")
    NamedArray(float32[pos=2, head_size=2], [[1. 0. ] [0.5403 0.8415]])
    """
    require_named("apply_rotary", x)
    if not isinstance(positions, NamedArray):
        (along,) = resolve(x.names, jnp.shape(x.array), positions, "apply_rotary")
        positions = arange(along)
    kernel = _rotary_kernel(x.names, positions.names, HeadDim, config)
    return wrap(kernel.call(x.array, positions.array), kernel.names)


@_kernels.cached
def _rotary_kernel(names: Names, position_names: Names, HeadDim: AxisSelector, config: Rotary) -> _kernels.Kernel:
    what = "apply_rotary"
    features = _kernels.select_one(what, names, HeadDim)
    where = names.index(features)
    require_subset(what, "positions", position_names, tuple(n for n in names if n != features))

    def positional(x, positions):
        size = int(x.shape[where] * config.partial_rotary_factor)
        if size % 2:
            raise ValueError(
                f"{what}: features are turned in pairs, but of axis {features!r} {size} features are to be turned, an "
                f"odd number: {_errors.describe_axes(names, x.shape)}, partial_rotary_factor="
                f"{config.partial_rotary_factor}."
            )
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        frequencies = jnp.asarray(config.frequencies(size), dtype)
        angles = _kernels.align(positions.astype(dtype), position_names, names)
        angles = angles * _kernels.align(frequencies, (features,), names)
        cos, sin = jnp.cos(angles) * config.magnitude, jnp.sin(angles) * config.magnitude
        rest = x.shape[where] - size
        turned, *kept = jax.lax.split(x, (size, rest), axis=where) if rest else [x]
        turned = _turn(turned.astype(dtype), cos, sin, where, config.interleaved).astype(x.dtype)
        return jax.lax.concatenate([turned, *kept], where) if rest else turned

    return _kernels.make_kernel(what, positional, (names, position_names), names, selection=HeadDim)


def _turn(x: jax.Array, cos: jax.Array, sin: jax.Array, axis: int, interleaved: bool) -> jax.Array:
    """Pairs of features turned: those half the axis apart, or neighbours."""
    half = x.shape[axis] // 2
    if interleaved:
        pairs = jnp.reshape(x, (*x.shape[:axis], half, 2, *x.shape[axis + 1 :]))
        first, second = (jax.lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
    else:
        first, second = jax.lax.split(x, (half, half), axis=axis)
    turned = first * cos - second * sin, second * cos + first * sin
    return jnp.stack(turned, axis + 1).reshape(x.shape) if interleaved else jax.lax.concatenate(turned, axis)
