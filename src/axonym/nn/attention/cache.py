"""A cache of keys and values, for decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from ...axis import Axis, AxisSpec, axes_of_spec, union_axes
from ...core import errors
from ...named_array import NamedArray, NamedOrNumeric, describe_array, wrap
from ...ops._operands import known_values, one_axis, require_named
from ...ops.creation import zeros
from ...ops.elementwise import astype
from ...ops.updating import write_slice


class KVCache(eqx.Module):
    """The keys and values of all positions so far, with room for more.

    A cache is immutable: `update` returns a new one. So it can be the carry of a loop. The examples of a batch can have
    different lengths.

    `mask` gives the positions that a query can attend to. The contents of positions that are not written yet are
    undefined.

    Arguments:
        keys: the keys, with an axis of positions among others.
        lengths: the number of positions so far, for each example or for all: the next position.
        KPos: the axis of positions.
        window: the number of positions that queries attend to, if the cache keeps only the latest positions.
        checked: whether compiled programs raise an error when there is no room.

    >>> Batch, Pos, KVHeads, KPos, Size = axn.make_axes(batch=2, pos=1, kv_heads=2, key_pos=4, head_size=8)
    >>> cache = axn.nn.attention.KVCache.init(Batch, KVHeads, KPos, Size)
    >>> q = axn.ones((Batch, Pos, KVHeads, Size))
    >>> k = v = q.rename({"pos": "key_pos"})
    >>> positions = cache.positions(Pos)
    >>> cache = cache.update(k, v)
    >>> mask = cache.mask(positions)
    >>> axn.nn.attention.dot_product_attention(q, cache.keys, cache.values, KPos, Size, mask).shape
    {'batch': 2, 'pos': 1, 'kv_heads': 2, 'head_size': 8}
    >>> cache.lengths
    NamedArray(int32[batch=2], [1 1])
    """

    keys: NamedArray
    values: NamedArray
    lengths: NamedArray
    KPos: str = eqx.field(static=True)
    window: int | None = eqx.field(static=True, default=None)
    checked: bool = eqx.field(static=True, default=False)

    @classmethod
    def init(
        cls,
        Batch: AxisSpec,
        KVHeads: AxisSpec,
        KPos: Axis,
        HeadSize: Axis,
        dtype: DTypeLike = jnp.float32,
        *,
        ValueSize: Axis | None = None,
        per_example: bool = True,
        window: int | None = None,
        checked: bool = False,
    ) -> KVCache:
        """Make an empty cache, sharded by the active mapping.

        Arguments:
            Batch: the axes of examples; `()` for none.
            KVHeads: the axes of heads of keys and values; `()` for none.
            KPos: the axis of positions; its size is the capacity.
            HeadSize: the axis of features.
            ValueSize: the axis of features of values, if not the same.
            per_example: False if all examples always have one length, which makes `update` faster.
            window: overwrite the oldest positions when the cache is full. Queries attend to the `window` latest
                positions, including their own.
            checked: raise an error in compiled programs too when there is no room: see `require_room`.

        >>> from axonym.nn.attention import KVCache
        >>> cache = KVCache.init(axn.Axis("batch", 2), (), *axn.make_axes(key_pos=16, head_size=4), per_example=False)
        >>> cache.keys.shape, cache.lengths
        ({'batch': 2, 'key_pos': 16, 'head_size': 4}, NamedArray(int32[], 0))
        """
        batch, heads = axes_of_spec(Batch, "KVCache.init"), axes_of_spec(KVHeads, "KVCache.init")
        positions, HeadSize = one_axis("KVCache.init", "KPos", KPos), one_axis("KVCache.init", "HeadSize", HeadSize)
        ValueSize = HeadSize if ValueSize is None else one_axis("KVCache.init", "ValueSize", ValueSize)
        if window is not None and not 1 <= window <= positions.size:
            raise ValueError(
                f"KVCache.init: a window of {window} positions needs a capacity of at least {window}, got {positions}."
            )
        keys, values = (
            zeros((*batch, *heads, positions, features), jnp.dtype(dtype)) for features in (HeadSize, ValueSize)
        )
        lengths = zeros(batch if per_example else (), jnp.dtype(jnp.int32))
        return cls(keys, values, lengths, positions.name, window, checked)

    def positions(self, Pos: Axis) -> NamedArray:
        """Return the positions of the next tokens along their axis, for masks and rotary embeddings.

        For a single next token without an axis of positions, use `lengths`.

        >>> from axonym.nn.attention import KVCache
        >>> KVCache.init(axn.Axis("batch", 1), (), *axn.make_axes(key_pos=4, head_size=2)).positions(axn.Axis("pos", 2))
        NamedArray(int32[batch=1, pos=2], [[0 1]])
        """
        return _positions_beside(Pos, self.lengths) + self.lengths

    def __getitem__(self, index: Any) -> KVCache:
        """Return the cache of one example, or of one layer: keys, values and lengths are indexed alike.

        >>> from axonym.nn.attention import KVCache
        >>> cache = KVCache.init(axn.make_axes(layers=2, batch=4), (), *axn.make_axes(key_pos=16, head_size=4))
        >>> cache["layers", 0].keys.shape
        {'batch': 4, 'key_pos': 16, 'head_size': 4}
        """
        keys, values, lengths = (x[index] for x in (self.keys, self.values, self.lengths))
        return dataclasses.replace(self, keys=keys, values=values, lengths=lengths)

    def update(
        self,
        keys: NamedArray,
        values: NamedArray,
        count: NamedOrNumeric | None = None,
        *,
        at: Mapping[str, NamedOrNumeric] | None = None,
    ) -> KVCache:
        """Append keys and values to the cache.

        There must be room for them; outside of jit, an error is raised if there is not. In jit, and in a loop over
        layers, where lengths are not known, keys and values that do not fit are dropped or, with one length for all
        examples, overwrite the end: see `require_room`.

        Arguments:
            keys: the keys, along the cache's axis of positions; keys without that axis are for one position.
            count: the number of new positions that are valid, all by default: prompts of different lengths are padded
                at their end to one length, and `count` is the length of each. The padding is overwritten later.
            at: the index of the cache to append to, if there are several, such as `{"layers": layer}`. In a loop over
                layers that carries the cache of all, only the new positions are written, if the axes of examples come
                before `layers` in the cache.

        >>> cache = axn.nn.attention.KVCache.init(axn.Axis("batch", 2), (), *axn.make_axes(key_pos=4, head_size=1))
        >>> prompts = axn.ones({"batch": 2, "key_pos": 3, "head_size": 1})
        >>> cache.update(prompts, prompts, count=axn.named([3, 1], "batch")).lengths
        NamedArray(int32[batch=2], [3 1])
        """
        at = dict(at or {})
        if unknown := [n for n in at if not self.lengths.has_axis(n)]:
            raise ValueError(
                f"KVCache.update: at: {errors.describe_axes(unknown)} must be among the axes of the cache's lengths, "
                f"{errors.describe_shape(self.lengths.shape)}. Make the cache with `per_example=True`, or give it "
                "lengths along these axes: `dataclasses.replace(cache, lengths=...)`."
            )
        for label, x, old in (("keys", keys, self.keys), ("values", values, self.values)):
            names, KPos = require_named("KVCache.update", x).names, self.KPos
            missing = [n for n in old.names if n not in names and n != KPos and n not in at]
            extra = [n for n in names if n not in old.names or n in at]
            problems = [f"lack {errors.describe_axes(missing)}"] if missing else []
            problems += [f"have {errors.describe_axes(extra)} besides"] if extra else []
            hint = ""
            if not missing and len(extra) == 1 and KPos not in names and extra[0] not in old.names:
                hint = f" Rename it: {label}.rename({{{extra[0]!r}: {KPos!r}}})."
            if problems:
                raise ValueError(
                    f"KVCache.update: the {label} {errors.describe_shape(x.shape)} {' and '.join(problems)}, "
                    f"compared to the cache's {errors.describe_shape(old.shape)}. The axis of positions is {KPos!r}."
                    f"{hint}"
                )
        sizes = {x.axis_size(self.KPos) if x.has_axis(self.KPos) else 1 for x in (keys, values)}
        if len(sizes) > 1:
            raise ValueError(
                f"KVCache.update: keys {describe_array(keys)} and values {describe_array(values)} have different "
                "numbers of positions."
            )
        new = Axis(self.KPos, sizes.pop())
        given = count.array if isinstance(count, NamedArray) else count
        counts = np.asarray(given) if isinstance(given, int) else known_values(given)
        if counts is not None and np.any((counts < 0) | (counts > new.size)):
            raise ValueError(
                f"KVCache.update: `count` is how many of the {errors.counted(new.size, 'position')} are valid, got "
                f"{counts.min()} to {counts.max()}."
            )
        room = self.keys.axis_size(self.KPos)
        if new.size > room:
            do = "do" if new.size > 1 else "does"
            raise ValueError(
                f"KVCache.update: {errors.counted(new.size, 'position')} {do} not fit in the cache, which has room "
                f"for {room}."
            )
        if self.window is not None and new.size > (most := room - self.window + 1):
            raise ValueError(
                f"KVCache.update: {new.size} positions at once would overwrite keys that the first of them attends to: "
                f"with room for {room} and a window of {self.window}, at most {most} fit. Write fewer at a time, or "
                "make the cache larger."
            )
        before = self.lengths[at] if at else self.lengths
        lengths = astype(before + (new.size if count is None else count), before.dtype)
        if at or before.names or count is not None or (self.window is not None and new.size > 1):
            positions = _positions_beside(new, before) + before
            if self.window is not None:
                positions = positions % room

            def write(old: NamedArray, new: NamedArray) -> NamedArray:
                # Padding beyond the end is dropped, and everything if there is no such cache. No index occurs twice:
                # positions are consecutive, and not more than there is room for.
                index = {**at, self.KPos: positions}
                return old.at[index].set(astype(new, old.dtype), mode="drop", unique_indices=True)
        else:
            start = before if self.window is None else before % room

            def write(old: NamedArray, new: NamedArray) -> NamedArray:
                return write_slice(old, {**at, self.KPos: start}, new)

        # Wait for the lengths only after the writing has started.
        keys, values = write(self.keys, keys), write(self.values, values)
        lengths = self._within_room("update", lengths, new.size)
        lengths = self.lengths.at[at].set(lengths) if at else lengths
        return dataclasses.replace(self, keys=keys, values=values, lengths=lengths)

    def require_room(self, count: int) -> KVCache:
        """Return the cache, after checking that it has room for more positions.

        A model whose layers run in a loop updates its cache where lengths are not known, even outside of jit. So call
        this before the loop, or once for all tokens that are to come. In jit, only a cache made with `checked=True` is
        checked, here and in `update`: the compiled program raises the error when it runs, if the result is used in
        place of the cache. Use it to find a mistake: such an error on one of several devices ends the process.

        Arguments:
            count: the number of positions. A cache with a window always has room.

        >>> cache = axn.nn.attention.KVCache.init((), (), *axn.make_axes(key_pos=4, head_size=1))
        >>> cache.require_room(5)
        Traceback (most recent call last):
        ...
        ValueError: KVCache.require_room: with 5 more, a length exceeds the 4 positions of the cache.
        """
        within = self._within_room("require_room", self.lengths + count, count)
        return dataclasses.replace(self, lengths=within - count) if self.checked else self

    def _within_room(self, method: str, lengths: NamedArray, count: int) -> NamedArray:
        """Check that no length exceeds the capacity, and return the lengths."""
        room = self.keys.axis_size(self.KPos)
        most = errors.counted(room, "position")
        message = f"KVCache.{method}: with {count} more, a length exceeds the {most} of the cache."
        if self.window is not None:
            return lengths
        if not isinstance(lengths.array, Tracer):
            known = known_values(lengths.array)
            if known is not None and np.any(known > room):
                raise ValueError(message)
        elif self.checked:
            return wrap(eqx.error_if(lengths.array, lengths.array > room, message), lengths.names)
        return lengths

    def mask(self, positions: NamedArray) -> NamedArray:
        """Return the mask of positions that queries can attend to: their own and earlier ones, within the window.

        Arguments:
            positions: the position of each query. The keys of these positions must be in the cache already.

        >>> cache = axn.nn.attention.KVCache.init((), (), *axn.make_axes(key_pos=3, head_size=1))
        >>> positions, new = cache.positions(axn.Axis("pos", 2)), axn.ones({"key_pos": 2, "head_size": 1})
        >>> cache.update(new, new).mask(positions)
        NamedArray(bool[pos=2, key_pos=3], [[ True False False] [ True True False]])
        """
        room = self.keys.resolve_axis(self.KPos)
        held = wrap(jnp.arange(room.size), (room.name,)).broadcast_to((*self.lengths.axes, room))
        if self.window is not None:  # each slot holds the latest position written to it
            latest = self.lengths - 1
            held = latest - (latest - held) % room.size
        held = held.broadcast_to((*union_axes(positions.axes, self.lengths.axes), room))
        allowed = held <= positions
        return allowed if self.window is None else allowed & (held > positions - self.window) & (held >= 0)


def _positions_beside(Pos: Axis, lengths: NamedArray) -> NamedArray:
    """Return the numbers from 0 along an axis, broadcast to the axes of the lengths."""
    return wrap(jnp.arange(Pos.size), (Pos.name,)).broadcast_to((*lengths.axes, Pos))
