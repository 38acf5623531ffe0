"""Decoding with a cache agrees with attention over the complete text."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym.nn.attention import Causal, KVCache, apply_rotary, dot_product_attention, sliding_window_mask
from tests.helpers import assert_named, draw, spec

CLOSE: Any = {"rtol": 1e-5, "atol": 1e-5}
Batch, Pos, KPos, Heads, Group, Size = axn.make_axes(batch=4, pos=8, key_pos=8, heads=2, group=2, head_size=4)

Q, K, V = draw(Batch, Pos, Heads, Group, Size), draw(Batch, Pos, Heads, Size), draw(Batch, Pos, Heads, Size) * 2


def whole(mask: Any) -> axn.NamedArray:
    """Compute attention over all positions at once, with queries and keys rotated by their positions."""

    def attend(q: axn.NamedArray, k: axn.NamedArray, v: axn.NamedArray) -> axn.NamedArray:
        q, k = (apply_rotary(x, Size, Pos) for x in (q, k))
        return dot_product_attention(q, as_keys(k), as_keys(v), KPos, Size, mask)

    return jax.jit(attend)(Q, K, V)


def as_keys(x: axn.NamedArray) -> axn.NamedArray:
    return x.rename({"pos": "key_pos"}) if x.has_axis("pos") else x


@jax.jit
def attend(cache: KVCache, q: axn.NamedArray, k: axn.NamedArray, v: axn.NamedArray, count: Any = None) -> Any:
    """Run a layer for several positions along `pos`, or for one."""
    positions = cache.positions(q.resolve_axis("pos")) if q.has_axis("pos") else cache.lengths
    q, k = (apply_rotary(x, Size, positions) for x in (q, k))
    cache = cache.update(as_keys(k), as_keys(v), count)
    mask = cache.mask(positions)
    return cache, dot_product_attention(q, cache.keys, cache.values, "key_pos", "head_size", mask)


@pytest.fixture(scope="module")
def expected() -> axn.NamedArray:
    return whole(Causal("pos"))


def decode(cache: KVCache, *operands: axn.NamedArray) -> Any:
    """Decode one position after another, in a loop that carries the cache."""
    cache, results = axn.scan(lambda cache, *xs: attend(cache, *xs), Pos)(cache, *operands)
    return cache, results.rearrange(("batch", "pos", ...))


def in_parts(cache: KVCache, *parts: slice) -> axn.NamedArray:
    """Decode several positions at a time."""
    results = []
    for part in parts:
        cache, result = attend(cache, *(axn.named(x.array[:, part], x.names) for x in (Q, K, V)))
        results.append(result)
    return axn.named(np.concatenate([r.array for r in results], axis=1), Q.names)


def test_a_prompt_then_more(expected: axn.NamedArray) -> None:
    cache = KVCache.init(Batch, Heads, KPos, Size, per_example=False)
    assert_named(in_parts(cache, slice(0, 5), slice(5, 8)), expected, **CLOSE)


def test_prompts_of_different_lengths(expected: axn.NamedArray) -> None:
    """Padded to one length; the padding is overwritten, and no query that counts sees it."""
    lengths = axn.named(np.array([5, 1, 3, 2]), Batch)
    cache = KVCache.init(Batch, Heads, KPos, Size)
    counts = np.arange(5) < lengths.array[:, None]
    padded = [
        axn.named(np.where(counts[(...,) + (None,) * (x.ndim - 2)], x.array[:, :5], np.float32(1e3)), x.names)
        for x in (Q, K, V)
    ]
    cache, found = attend(cache, *padded, count=lengths)
    assert_named(cache.lengths, lengths.astype(jnp.int32))
    np.testing.assert_allclose(np.asarray(found.array)[counts], expected.array[:, :5][counts], **CLOSE)
    for _ in range(3):
        at = np.arange(4), np.asarray(cache.lengths.array)
        new = [axn.named(x.array[at], ("batch", *x.names[2:])) for x in (Q, K, V)]
        cache, result = attend(cache, *new)
        np.testing.assert_allclose(result.array, np.asarray(expected.array)[at], **CLOSE)
    late, _ = attend(cache, *padded, count=axn.named(np.array([0, 4, 2, 3]), Batch))
    # What does not fit is dropped, and nothing else moves.
    np.testing.assert_array_equal(late.keys.array[0], cache.keys.array[0])


def test_window() -> None:
    """A cache of five positions for a window of three: up to three at once can be written."""
    wanted = whole(sliding_window_mask(Pos, KPos, 3))
    init = functools.partial(KVCache.init, Batch, Heads, KPos.resize(5), Size, window=3)
    _, found = jax.jit(decode)(init(per_example=False), Q, K, V)
    assert_named(found, wanted, **CLOSE)
    empty = init()
    parts = in_parts(empty, slice(0, 3), slice(3, 6))
    np.testing.assert_allclose(parts.array, wanted.array[:, :6], **CLOSE)
    with pytest.raises(
        ValueError, match=r"4 positions at once would overwrite .* room for 5 and a window of 3, at most 3"
    ):
        in_parts(empty, slice(0, 4))


@pytest.mark.parametrize("split", ["heads", "key_pos"])
def test_on_meshes(split: str, mesh: Mesh, expected: axn.NamedArray) -> None:
    """The cache lies where the mapping puts it, also as what a loop carries."""
    mapping = {"batch": "data", split: "model"}
    with jax.set_mesh(mesh), axn.axis_mapping(mapping):
        empty = KVCache.init(Batch, Heads, KPos, Size)
        assert empty.keys.axes == (Batch, Heads, KPos, Size)
        assert spec(empty.keys) == tuple(mapping.get(n) for n in empty.keys.names)
        assert spec(empty.lengths) == ("data",)
        cache, found = jax.block_until_ready(jax.jit(decode)(empty, *axn.shard((Q, K, V))))
        assert spec(cache.keys) == spec(cache.values) == spec(empty.keys)
        assert spec(found) == tuple(mapping.get(n) for n in found.names)
    assert_named(axn.to_host(cache.lengths), axn.full(Batch, 8))
    assert_named(axn.to_host(found), expected, **CLOSE)


def test_in_half_precision() -> None:
    cache = KVCache.init(Batch, (), KPos, Size, jnp.bfloat16, ValueSize=axn.Axis("value_size", 3))
    keys, values = np.asarray(K.array)[:, 0, 0], axn.named(np.ones((4, 3), np.float32), ("batch", "value_size"))
    cache = jax.jit(KVCache.update)(cache, axn.named(keys, (Batch, Size)), values)
    assert cache.keys.dtype == cache.values.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(cache.keys.array)[:, 0], keys.astype(jnp.bfloat16))
    assert cache.values.axes == (Batch, KPos, axn.Axis("value_size", 3))


@pytest.mark.parametrize("per_example", [True, False])
def test_a_full_cache(per_example: bool) -> None:
    empty = KVCache.init(Batch, Heads, KPos, Size, per_example=per_example)
    full = KVCache(empty.keys, empty.values, empty.lengths + 8, "key_pos")
    with pytest.raises(ValueError, match="update: with 1 more, a length exceeds the 8 positions of the cache"):
        full.update(K["pos", 0], V["pos", 0])


class Layer(eqx.Module):
    """A layer of a model whose layers run in a loop, where lengths are not known."""

    scale: axn.NamedArray

    @staticmethod
    def init() -> Layer:
        return Layer(axn.ones(()))

    def __call__(self, x: axn.NamedArray, cache: KVCache) -> tuple[axn.NamedArray, KVCache]:
        return x, cache.update(x * self.scale, x * self.scale)


MODEL, NEW = axn.nn.Stacked.init(axn.Axis("layers", 3), Layer)(), axn.ones((Batch, Heads, KPos.resize(2), Size))


def extend(cache: KVCache, times: int) -> KVCache:
    for _ in range(times):
        cache = MODEL.scan_via(Layer.__call__)(NEW, cache)[1]
    return cache


@pytest.mark.parametrize("per_example", [True, False])
def test_a_full_cache_in_a_loop_over_layers(per_example: bool, mesh: Mesh) -> None:
    with jax.set_mesh(mesh):
        cache = KVCache.init((MODEL.Block, Batch), Heads, KPos, Size, per_example=per_example)
        assert cache.require_room(8) is cache
        full = extend(cache, 4)
        assert (full.lengths.array == 8).all()
        with pytest.raises(
            ValueError, match=r"KVCache\.require_room: with 1 more, a length exceeds the 8 positions of the cache"
        ):
            full.require_room(1)
        assert jax.jit(lambda cache: cache.require_room(9).lengths)(cache).axes == cache.lengths.axes, "not in jit"


@pytest.mark.parametrize("per_example", [True, False])
def test_a_full_cache_in_a_compiled_program(per_example: bool) -> None:
    """Checked on request. An error in a program on several simulated devices would end the process."""
    cache = KVCache.init((MODEL.Block, Batch), Heads, KPos, Size, per_example=per_example, checked=True)
    step = eqx.filter_jit(extend)
    assert (jax.block_until_ready(step(cache, 4)).lengths.array == 8).all()
    with pytest.raises(
        RuntimeError, match=r"KVCache\.update: with 2 more, a length exceeds the 8 positions of the cache"
    ):
        jax.block_until_ready(step(cache, 5))
    with pytest.raises(RuntimeError, match=r"KVCache\.require_room: with 9 more"):
        jax.block_until_ready(eqx.filter_jit(lambda cache: cache.require_room(9))(cache))


Layers = axn.Axis("layers", 8)


def write_all(cache: KVCache, keys: axn.NamedArray) -> KVCache:
    """Write the keys of each layer, in a loop that carries the cache of all layers."""

    def write(cache: KVCache, layer: Any) -> KVCache:
        new = keys * (layer + 1)
        return cache.update(new, -new, at={"layers": layer})

    return axn.fold(write, Layers)(cache, axn.arange(Layers))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("count", [1, 2])
def test_the_cache_of_all_layers(window: int | None, count: int, mesh: Mesh) -> None:
    """Updated at one layer after another, it is that of each layer, with lengths that differ."""
    with jax.set_mesh(mesh), axn.axis_mapping({"batch": "data", "heads": "model"}):
        cache = KVCache.init((Batch, Layers), Heads, KPos, Size, window=window)
        one = KVCache.init(Batch, Heads, KPos, Size, window=window)
        start = axn.shard(axn.named([0, 3, 5, 2], Batch).astype("int32"))
        cache = dataclasses.replace(cache, lengths=cache.lengths + start)
        keys = axn.shard(as_keys(K)["key_pos", axn.ds(0, count)])
        written = jax.jit(write_all)(cache, keys)
        for layer in (0, 7):
            own = keys * (layer + 1)
            expected = dataclasses.replace(one, lengths=start).update(own, -own)
            jax.tree.map(np.testing.assert_array_equal, written["layers", layer], expected)
        assert spec(written.keys)[:3] == ("data", None, "model")


def test_only_new_positions_are_written() -> None:
    """A step needs no memory for what is in the cache, which it updates where it is."""
    cache = KVCache.init((Batch, Layers), Heads, KPos.resize(4096), Size)
    keys = as_keys(K)["key_pos", axn.ds(0, 1)]
    compiled = jax.jit(write_all, donate_argnums=0).lower(cache, keys).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 50_000 < cache.keys.size


@pytest.mark.parametrize("layer", [3, 100, -4])
@pytest.mark.parametrize("per_example", [True, False])
def test_nothing_is_written_to_a_cache_that_does_not_exist(layer: int, per_example: bool) -> None:
    """In jit, where an index cannot be checked."""
    Three = Layers.resize(3)
    cache = KVCache.init((Batch, Three), Heads, KPos, Size)
    cache = cache if per_example else dataclasses.replace(cache, lengths=axn.zeros(Three, "int32"))
    new = as_keys(K)["key_pos", :1]
    update: Any = jax.jit(lambda cache, layer: cache.update(new, new, at={"layers": layer}))
    jax.tree.map(np.testing.assert_array_equal, update(cache, layer), cache)
    written = update(cache, 1)["layers", 1]
    np.testing.assert_array_equal(written.keys["key_pos", 0].array, K["pos", 0].array)
    assert (written.lengths.array == 1).all()


def test_axes_as_mappings() -> None:
    sizes = ({a.name: a.size} for a in (Batch, Heads, KPos, Size))
    assert KVCache.init(*sizes).keys.axes == (Batch, Heads, KPos, Size)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"KVCache\.init: `HeadSize` must be one axis, got \(head_size=4, more=2\)"):
        KVCache.init(Batch, Heads, KPos, {"head_size": 4, "more": 2})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.update(K, as_keys(V)), r"the keys \(batch=4, pos=8.*\) have \(pos\) besides.* 'key_pos'"),
        (lambda cache: cache.update(K, as_keys(V)), r"Rename it: keys\.rename\({'pos': 'key_pos'}\)\."),
        (lambda cache: cache.update(as_keys(K), as_keys(V)["heads", 0]), r"the values .* lack \(heads\)"),
        (lambda cache: cache.update(as_keys(K), as_keys(V)["key_pos", 0]), "have different numbers of positions"),
        (
            lambda cache: cache.update(*[axn.ones((Batch, Heads, KPos.resize(9), Size))] * 2),
            r"9 positions do not fit .* room for 8",
        ),
        (
            lambda cache: cache.update(K, K, at={"layers": 0}),
            r"at: \(layers\) must be among the axes of the cache's lengths, \(batch=4\)",
        ),
        (
            lambda cache: cache.update(as_keys(K), as_keys(V), at={"batch": 0}),
            r"the keys \(batch=4, key_pos=8.*\) have \(batch\) besides",
        ),
        (lambda cache: cache.update(as_keys(K), as_keys(V), count=9), r"`count` is how many of the 8 positions are"),
        (
            lambda cache: cache.update(as_keys(K), as_keys(V), count=axn.named([8, -1, 0, 2], "batch")),
            "positions are valid, got -1 to 8",
        ),
        (lambda cache: KVCache.init(Batch, Heads, KPos, Size, window=9), "a window of 9 positions needs a capacity"),
    ],
)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises((ValueError, IndexError), match=message):
        call(KVCache.init(Batch, Heads, KPos, Size))
