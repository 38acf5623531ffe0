"""Draw tokens with temperature, top-k, top-p and min-p, over a vocabulary that can be sharded.

By the Gumbel-max trick, noise is added to the logits, and the position of the largest sum is a draw from the softmax.
Noise is a function of the key, the number of the example and the number of the token, so each device makes the noise of
its own shard, and the draws do not depend on the sharding.

For top-p, bisection finds the least likely token that is kept, instead of sorting: devices sum the probability above a
threshold. The sums are of integers, since sums of floating point numbers would depend on which device adds which.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..axis import Axis, AxisSelector, AxisSpec, Names
from ..core import errors
from ..core.tree_spec import is_key
from ..custom_partitioning._top_k import best, number_of_candidates
from ..custom_partitioning.decorator import Partitioned, partitioned
from ..manual.collectives import all_gather, axis_offset, axis_size, pmax, psum
from ..named_array import NamedArray, NamedOrNumeric, describe_array, wrap
from ..ops import _kernels
from ..ops._operands import distinct, operand, require_subset, unsigned_nan
from ..sharding.shard import shard_quietly
from ._draw import Key, axis_of, check_parameters, new_axes, one_key

_WHAT = "random.categorical"


def categorical(
    key: Key,
    logits: NamedArray,
    axis: AxisSelector,
    shape: AxisSpec | None = None,
    *,
    temperature: NamedOrNumeric = 1.0,
    top_k: int | NamedOrNumeric | None = None,
    top_p: NamedOrNumeric | None = None,
    min_p: NamedOrNumeric | None = None,
    max_k: int | None = None,
) -> NamedArray:
    """Draw indices along an axis, with probabilities from logits; the axis can be sharded.

    The draws depend on key, logits and parameters, and not on the sharding or order of axes. They differ from the draws
    of `jax.random.categorical`. Each parameter is one number for all draws, or a named array with axes of the result.
    The parameters act in this order:

    1. `temperature` divides the logits. If it is 0, the largest one is taken.
    2. `top_k` keeps the `k` largest; of equal ones the first.
    3. `top_p` keeps the most likely of these: as few as together have that share of their probability, and any others
       that are as likely as the last one.
    4. `min_p` keeps elements that are at least that many times as likely as the likeliest.

    The likeliest is always kept. An example without a finite logit gives the first of the largest; one with a
    NaN gives the position of the first NaN.

    With `top_k`, only the candidates of each shard move between devices. Without it, a few numbers for each example
    move, and for `top_p` three in each of thirty steps.

    Inside a `shard_map` a device draws for its own examples, as if there were no others. Give each device its own key
    there, by `jax.random.fold_in(key, axonym.axis_index("batch"))`.

    Arguments:
        key: a random key.
        logits: the logarithms of the probabilities, up to a constant.
        axis: the axis of `logits` for the categories.
        shape: the axes of the result: all axes of `logits` except `axis`, in any order, and more axes for several draws
            from the same logits. By default there is one draw from each. Draws without replacement are those of the
            largest sums, `axonym.top_k(logits + axonym.random.gumbel(key, logits.axes), axis, k)`.
        temperature: the divisor of the logits: the higher, the more even the choice.
        top_k: the number of elements to choose from.
        top_p: the share of the probability to choose from, up to 1.
        min_p: the least probability of a choice, relative to the likeliest.
        max_k: the upper bound of `top_k`, if it is an array.

    >>> logits = axn.named([[0.0, 3.0, 2.0], [5.0, 0.0, 4.9]], ("batch", "vocab"))
    >>> axn.random.categorical(jax.random.key(0), logits, "vocab", temperature=axn.named([0.0, 1.0], "batch"), top_k=1)
    NamedArray(int32[batch=2], [1 0])
    >>> x = axn.random.categorical(jax.random.key(0), logits, "vocab", {"batch": 2, "draw": 5}, min_p=0.95)
    >>> x["batch", 0]
    NamedArray(int32[draw=5], [1 1 1 1 1])
    """
    one = one_key(_WHAT, key)
    categories = axis_of(_WHAT, logits, axis)
    batch = tuple(a for a in logits.axes if a is not categories)
    axes = batch if shape is None else new_axes(_WHAT, shape)
    if missing := [a.name for a in batch if a.name not in {b.name for b in axes}]:
        raise ValueError(
            f"{_WHAT}: the shape {errors.describe_selectors(axes)} lacks {errors.describe_axes(missing)} of the logits "
            f"{errors.describe_selectors(logits.axes)}. Add it, or reduce it away first."
        )
    distinct(_WHAT, tuple(a.name for a in (*axes, categories)))
    check_parameters(_WHAT, axes, [("logits", logits.names, (categories,))], [logits.array])
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(
            f"{_WHAT}: logits are floating point numbers, got {describe_array(logits)}. Write `logits.astype(float)`."
        )
    if categories.size == 0:
        raise ValueError(f"{_WHAT}: axis {categories.name!r} has no elements to choose from.")
    if top_k is None and max_k is not None:
        raise TypeError(
            f"{_WHAT}: `max_k` is the most that `top_k` can be, so it needs `top_k`. Pass both, or neither."
        )
    count = None if top_k is None else number_of_candidates(_WHAT, "top_k", top_k, max_k, categories)
    if count == 0:
        raise ValueError(
            f"{_WHAT}: there must be at least one element to choose from, so `top_k` cannot be 0. Leave it out to "
            "choose from all."
        )
    parameters = {
        "temperature": temperature,
        "top_k": None if max_k is None else top_k,  # if it is a number, it is static
        "top_p": top_p,
        "min_p": min_p,
    }
    operands = {argument: operand(x) for argument, x in parameters.items() if x is not None}
    for argument, most in {"temperature": math.inf, "top_p": 1, "min_p": 1}.items():
        x = parameters[argument]  # the values of an array are not checked
        if isinstance(x, (int, float, np.number)) and (not 0 <= x <= most or x == math.inf):
            upper = (" and finite" if x == math.inf else "") if most == math.inf else f" and at most {most}"
            raise ValueError(f"{_WHAT}: `{argument}` must be at least 0{upper}, got {x}.")
    out = tuple(a.name for a in axes)
    for argument, (_, names) in operands.items():
        require_subset(_WHAT, argument, names, out, " There is one for all examples, or one for each.")
    draws = tuple(a for a in axes if a.name not in logits.names)
    # Sorted, so that draws do not depend on the order of axes.
    in_order, layouts = tuple(sorted(out)), tuple(names for _, names in operands.values())
    kernel = _categorical_kernel(logits.names, categories.name, in_order, out, draws, tuple(operands), layouts, count)
    if not is_key(one):
        one = jax.random.wrap_key_data(one)
    return kernel.apply(logits.array, one, *(x for x, _ in operands.values()))


@_kernels.shared("names", "axis", "in_order", "out", "draws", "layouts")
def _categorical_kernel(
    names: Names,
    axis: str,
    in_order: Names,
    out: Names,
    draws: tuple[Axis, ...],
    arguments: tuple[str, ...],
    layouts: tuple[Names, ...],
    count: int | None,
) -> _kernels.Kernel:
    def positional(logits, key, *parameters):
        logits = jax.lax.stop_gradient(logits)
        sizes = dict(zip(names, logits.shape, strict=True)) | {a.name: a.size for a in draws}
        shape = [sizes[n] for n in in_order]
        examples = wrap(jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape), in_order)
        given = {
            argument: wrap(jnp.asarray(x, None if argument == "top_k" else jnp.float32), own)
            for argument, own, x in zip(arguments, layouts, parameters, strict=True)
        }
        # A key of this kind is two words, and a batch of keys draws the same as each key alone.
        threefry = jax.random.key_impl(key) == "threefry2x32"
        words = jax.random.key_data(key) if threefry else jax.random.bits(key, (2,), jnp.uint32)
        if draws:  # the logits lack these axes, and each device should draw its own shard
            examples = shard_quietly(examples, None, _WHAT)
        drawn = _make_sampling_operation(axis)(wrap(logits, names), words, examples, given, count=count)
        return shard_quietly(drawn.rearrange(out), None, _WHAT).array

    in_names = (names, (), *layouts)
    return _kernels.make_kernel(_WHAT, positional, in_names, out, mesh_aware=True)


@functools.lru_cache(maxsize=256)
def _make_sampling_operation(axis: str) -> Partitioned:
    """Make the operation for an axis of this name."""

    def sample(
        logits: NamedArray,
        words: jax.Array,
        examples: NamedArray,
        parameters: dict[str, NamedArray],
        *,
        count: int | None,
    ) -> NamedArray:
        logits = logits.rearrange((..., axis))
        names = (*(n for n in examples.names if n not in logits.names), *logits.names)
        if count is None:
            positions = jnp.arange(logits.axis_size(axis)) + axis_offset(axis, x=logits)
            places = wrap(positions, (axis,))
        else:  # from here on, all devices do the same
            logits, places = best(wrap(unsigned_nan(logits.array), logits.names), axis, count)

        def aligned(x: NamedArray) -> jax.Array:
            return _kernels.align(x.array, x.names, names)

        sharded = axis if count is None else None
        x = aligned(logits).astype(jnp.promote_types(logits.dtype, jnp.float32))
        given = {argument: aligned(p) for argument, p in parameters.items()}
        highest = jnp.max(x, -1, keepdims=True)
        gap = (highest if sharded is None else pmax(highest, sharded)) - x
        # Relative to the likeliest. These are excluded from the division, to have 1 even if the temperature is 0.
        weights = jnp.where(gap > 0, jnp.exp(-gap / given["temperature"]), 1).astype(jnp.float32)
        if "top_k" in given:
            rank = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
            weights = jnp.where(rank < jnp.maximum(given["top_k"], 1), weights, -1)
        least = jnp.float32(0)
        if "top_p" in given:
            least = _least_kept(weights, given["top_p"], sharded)
        if "min_p" in given:
            least = jnp.maximum(least, jnp.minimum(given["min_p"], 1))
        noise = _gumbel_noise(words, aligned(examples), aligned(places))
        scores = jnp.where(weights >= least, x + given["temperature"] * noise, -jnp.inf)
        if count is None:
            return _first_largest(wrap(scores, names), axis)
        drawn = jnp.argmax(scores, -1, keepdims=True)
        return wrap(jnp.take_along_axis(aligned(places), drawn, axis=-1)[..., 0], names[:-1])

    return partitioned(reduced=axis)(sample)


def _first_largest(x: NamedArray, axis: str) -> NamedArray:
    """Return the position of the largest element along an axis: the first of equal ones; the first NaN, if any."""
    position = x.names.index(axis)
    rest = tuple(n for n in x.names if n != axis)
    place = jnp.argmax(x.array, position, keepdims=True)
    if axis_size(axis) > 1:
        value = all_gather(wrap(jnp.take_along_axis(x.array, place, axis=position), x.names), axis)
        places = all_gather(wrap(place + axis_offset(axis, x=x), x.names), axis)
        winner = jnp.argmax(value.array, position, keepdims=True)
        place = jnp.take_along_axis(places.array, winner, axis=position)
    return wrap(jnp.squeeze(place, position).astype(jnp.int32), rest)


def _gumbel_noise(words: jax.Array, examples: jax.Array, places: jax.Array) -> jax.Array:
    """Make Gumbel noise for each position of each example.

    The upper end of the noise needs a fine resolution: in a large vocabulary, many tokens have large noise, and of two
    with the same noise the first would always be drawn. So it is made of 64 random bits.
    """
    key = jax.random.wrap_key_data(words, impl="threefry2x32")

    def bits(example: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
        high, low = jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, example), place))
        return high, low

    high, low = (b.astype(jnp.float32) for b in jnp.vectorize(bits)(examples, places))
    uniform = high * 2.0**-32 + (low + 1) * 2.0**-64
    largest = 1 - jnp.finfo(jnp.float32).epsneg
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, largest)))


# --- top-p ---

_ONE = int(np.float32(1).view(np.int32))
STEPS = _ONE.bit_length()
"""The number of steps of the bisection: one for each bit of a weight."""


def _least_kept(weights: jax.Array, share: jax.Array, sharded: str | None) -> jax.Array:
    """Return the largest weight such that all weights that are at least as large make up a given share of the total."""
    # Non-negative floats have the order of their bits, so that bisection of integers finds the weight.
    bits = jax.lax.bitcast_convert_type(weights, jnp.int32)
    count = weights.shape[-1] * (1 if sharded is None else axis_size(sharded))
    # Integer sums are exact, so they do not depend on the sharding. The sum of all digits must fit into 31 bits.
    width = min(12, 31 - count.bit_length())
    digits, rest = [], jnp.maximum(weights, 0)
    for _ in range(3):  # the digits after the point, `width` bits each; the rest is dropped
        rest = rest * 2**width
        digits.append(jnp.floor(rest).astype(jnp.int32))
        rest = rest - jnp.floor(rest)

    def sum_from(least: Any) -> jax.Array:
        sums = jnp.stack([jnp.sum(jnp.where(bits >= least, d, 0), -1, keepdims=True) for d in digits])
        first, second, third = (sums if sharded is None else psum(sums, sharded)).astype(jnp.float32)
        return (first * 2**width + second) * 2**width + third

    wanted = share * sum_from(0)

    def narrow(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = sum_from(middle) >= wanted
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low = (wanted * 0).astype(jnp.int32)  # a carry must be device-varying from the start if it is in the end
    low, _ = jax.lax.fori_loop(0, STEPS, narrow, (low, low + (_ONE + 1)))
    # Weights too small to count are also kept if everything is.
    return jnp.where(share >= 1, 0, jax.lax.bitcast_convert_type(low, jnp.float32))
