"""Attention along a sharded sequence: values and gradients agree with plain attention, bytes with the formula."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

import axonym as axn
from axonym import Axis
from axonym.nn.attention import Causal, KVCache, apply_rotary, combine_masks_and, dot_product_attention
from tests.executed import executed
from tests.helpers import assert_named, spec

Batch, Pos, KPos, Heads, Group, Size = axn.make_axes(batch=2, pos=16, key_pos=16, heads=8, group=2, head_size=2)
CLOSE: Any = {"rtol": 1e-4, "atol": 1e-5}
MAPPING = {"pos": "data", "key_pos": "data", "heads": "model"}
WAYS = ("ring", "all_to_all", "all_gather")
RNG = np.random.default_rng(0)


def draw(*axes: axn.Axis) -> axn.NamedArray:
    return axn.named(RNG.normal(size=[a.size for a in axes]).astype(np.float32), axes)


def chance(*axes: axn.Axis) -> axn.NamedArray:
    return axn.named(RNG.random([a.size for a in axes]) < 0.6, axes)


Q, K, V = draw(Batch, Pos, Heads, Group, Size), draw(Batch, KPos, Heads, Size), draw(Batch, KPos, Heads, Size) * 2
SEGMENTS = axn.named(np.sort(RNG.integers(0, 3, (2, 16)), 1).astype(np.int32), (Batch, Pos))
NOWHERE = axn.named(np.arange(16) % 5 > 0, Pos)  # some queries attend to nothing

MASKS: dict[str, tuple[Any, Any]] = {
    "none": (None, None),
    "causal": (Causal("pos"), None),
    "a window": (Causal("pos", window=5), None),
    "segments": (Causal("pos", segments=SEGMENTS), None),
    "keys": (Causal("pos", also=chance(Batch, KPos)), None),
    "any": (chance(Pos, KPos) & NOWHERE, None),
    "a bias of keys": (Causal("pos"), draw(Heads, KPos)),
    "a bias": (None, draw(Heads, Group, Pos, KPos)),
}


def attend(q: Any, k: Any, v: Any, *, mask: Any, bias: Any = None, context: Any = None) -> axn.NamedArray:
    return dot_product_attention(q, k, v, "key_pos", "head_size", mask, bias, context=context)


def loss(operands: Any, bias: Any, mask: Any, context: Any) -> Any:
    y = attend(*operands, mask=mask, bias=bias, context=context)
    return axn.sum(axn.sin(y)).scalar(), y


def values_and_gradients(mask: Any, context: Any = None) -> Any:
    return jax.jit(jax.value_and_grad(lambda xs, bias: loss(xs, bias, mask, context), (0, 1), has_aux=True))


@functools.cache
def plain(name: str) -> Any:
    mask, bias = MASKS[name]
    return values_and_gradients(mask)((Q, K, V), bias)


def assert_close(found: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-4, atol=1e-4)


# --- values and gradients ---


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name",
    # With every version of JAX a mask of each kind, and a bias.
    [name if name in ("causal", "any", "a bias") else pytest.param(name, marks=pytest.mark.oldest) for name in MASKS],
)
def test_equals_plain_attention(name: str, way: str, auto_mesh: Mesh, explicit_mesh: Mesh) -> None:
    """On Explicit meshes half of the table, since only what is around differs."""
    mask, bias = MASKS[name]
    mesh = explicit_mesh if (list(MASKS).index(name) + WAYS.index(way)) % 2 else auto_mesh
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        operands = axn.shard((Q, K, V))
        found = jax.block_until_ready(values_and_gradients(mask, way)(operands, bias))
    assert_close(found, plain(name))
    assert spec(found[0][1]) == (None, "data", "model", None, None)


@pytest.mark.parametrize("way", WAYS)
def test_what_remains_of_other_shapes(way: str, mesh: Mesh) -> None:
    """One key head for all, features of their own for values, the sequence over two mesh axes, several blocks."""
    Batch = Axis("batch", 8)
    q, k, v = draw(Batch, Pos, Axis("heads", 3), Size), draw(Batch, KPos, Size), draw(Batch, KPos, Axis("value", 3))
    both = ("data", "model")
    expected = attend(q, k, v, mask=Causal("pos"))
    with jax.set_mesh(mesh), axn.axis_mapping({"pos": both, "key_pos": both}):
        found = jax.block_until_ready(
            jax.jit(functools.partial(attend, mask=Causal("pos"), context=way))(*axn.shard((q, k, v)))
        )
    assert_named(axn.to_host(found), expected, **CLOSE)


@pytest.mark.parametrize("way", WAYS)
def test_queries_beyond_the_keys_in_their_window(way: str, mesh: Mesh) -> None:
    """They attend to nothing, so they get the mean of all values."""
    operands = (
        draw(Axis("pos", 24), Heads, Size),
        draw(Axis("key_pos", 8), Heads, Size),
        draw(KPos.resize(8), Heads, Size),
    )
    mask = Causal("pos", window=3)
    expected = values_and_gradients(mask)(operands, None)
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        found = jax.block_until_ready(values_and_gradients(mask, way)(axn.shard(operands), None))
    assert_close(found, expected)


@pytest.mark.parametrize("way", WAYS)
def test_segments_of_any_batch_axis(way: str, mesh: Mesh) -> None:
    """The order of the axes of keys does not matter."""
    k, v = (x.rearrange(("heads", "key_pos", "batch", "head_size")) for x in (K, V))
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        found = jax.block_until_ready(values_and_gradients(MASKS["segments"][0], way)(axn.shard((Q, k, v)), None))
    (value, result), ((of_q, of_k, of_v), _) = found
    gradients = of_q, *(x.rearrange(K.names) for x in (of_k, of_v))
    assert_close(((value, result), (gradients, None)), plain("segments"))


def test_the_order_of_mesh_axes(mesh: Mesh) -> None:
    """Shards go around in the order of the mapping, also where the mesh has another one."""
    q, k = draw(Axis("pos", 16), Size), draw(Axis("key_pos", 16), Size)
    expected = values_and_gradients(Causal("pos"))((q, k, k), None)
    order = ("model", "data")
    with jax.set_mesh(mesh), axn.axis_mapping({"pos": order, "key_pos": order}):
        found = jax.block_until_ready(values_and_gradients(Causal("pos"), "ring")(axn.shard((q, k, k)), None))
    assert_close(found, expected)


def test_cross_attention_and_blocks(auto_mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer keys than queries, and shards of several blocks."""
    monkeypatch.setattr("axonym.nn.attention._blockwise.BLOCK", 8)
    q, k = draw(Axis("pos", 64), Heads, Size), draw(Axis("key_pos", 128), Heads, Size)
    for mask in (Causal("pos"), Causal("pos", window=20), None):
        expected = values_and_gradients(mask)((q, k, k), None)
        with jax.set_mesh(auto_mesh), axn.axis_mapping({"pos": "data", "key_pos": "data"}):
            found = jax.block_until_ready(values_and_gradients(mask, "ring")(axn.shard((q, k, k)), None))
        assert_close(found, expected)


def test_half_precision_and_one_device() -> None:
    half = [x.astype(jnp.bfloat16) for x in (Q, K, V)]
    expected = attend(Q, K, V, mask=Causal("pos"))
    found = attend(*half, mask=Causal("pos"), context="ring")
    assert found.dtype == jnp.bfloat16
    assert_named(found.astype(jnp.float32), expected, rtol=0.1, atol=0.1)


def test_in_a_loop_with_rematerialization(mesh: Mesh) -> None:
    """As in a model of several layers, and with rotary positions, which do not know of the order inside."""
    Layers = Axis("layers", 2)
    w = draw(Layers, Size)

    def model(w: Any, x: axn.NamedArray, context: Any = None) -> Any:
        def layer(x: axn.NamedArray, w: axn.NamedArray) -> axn.NamedArray:
            q = k = apply_rotary(x * w, "head_size", "pos")
            k, v = (y.rename({"pos": "key_pos"}) for y in (k, x))
            return x + attend(q, k, v, mask=Causal("pos"), context=context)

        return axn.sum(axn.sin(axn.fold(layer, Layers, remat=True)(x, w))).scalar()

    x = draw(Batch, Pos, Heads, Size)
    expected = jax.jit(jax.grad(model, (0, 1)))(w, x)
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        for way in ("ring", None) if mesh.axis_types[0] is AxisType.Auto else ("ring",):
            found = jax.jit(jax.grad(functools.partial(model, context=way), (0, 1)))(w, axn.shard(x))
            assert_close(jax.block_until_ready(found), expected)


def test_twice_differentiated(auto_mesh: Mesh) -> None:
    def norm(q: axn.NamedArray, context: Any = None) -> Any:
        of_q = jax.grad(lambda q: axn.sum(axn.sin(attend(q, K, V, mask=Causal("pos"), context=context))).scalar())(q)
        return axn.sum(of_q * of_q).scalar()

    expected = jax.jit(jax.grad(norm))(Q)
    with jax.set_mesh(auto_mesh), axn.axis_mapping(MAPPING):
        found = jax.block_until_ready(jax.jit(jax.grad(functools.partial(norm, context="ring")))(axn.shard(Q)))
    assert_close(found, expected)


def test_inside_another_shard_map(auto_mesh: Mesh) -> None:
    """The operands are shards, and what is asked for is done among the devices that have them."""

    @axn.shard_map(mesh=auto_mesh, mapping=MAPPING)
    def mapped(q: axn.NamedArray, k: axn.NamedArray, v: axn.NamedArray) -> axn.NamedArray:
        return attend(q, k, v, mask=Causal("pos"), context="ring")

    found = jax.block_until_ready(jax.jit(mapped)(Q, K, V))
    assert_named(axn.to_host(found), plain("causal")[0][1], **CLOSE)


BOTH = ("all_to_all", "ring")


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("way", [BOTH, ("all_to_all", "all_gather")], ids=["ring", "all_gather"])
def test_heads_are_exchanged_over_one_mesh_axis_and_keys_travel_along_another(
    name: str, way: Any, auto_mesh: Mesh, explicit_mesh: Mesh
) -> None:
    mask, bias = MASKS[name]
    mesh = explicit_mesh if (list(MASKS).index(name) + (way == BOTH)) % 2 else auto_mesh
    over = ("data", "model")
    with jax.set_mesh(mesh), axn.axis_mapping({"pos": over, "key_pos": over}):
        operands = axn.shard((Q, K, V))
        found = jax.block_until_ready(values_and_gradients(mask, way)(operands, bias))
    assert_close(found, plain(name))
    assert spec(found[0][1]) == (None, over, None, None, None)


def test_heads_and_ring_inside_another_shard_map_and_on_one_device(auto_mesh: Mesh) -> None:
    """In the order of the mapping, also where the mesh has another one; the window reaches over few shards."""
    over = ("model", "data")
    for name in ("causal", "a window"):
        here = functools.partial(attend, mask=MASKS[name][0], context=BOTH)
        mapped = axn.shard_map(here, mesh=auto_mesh, mapping={"pos": over, "key_pos": over})
        found = jax.block_until_ready(jax.jit(mapped)(Q, K, V))
        assert_named(axn.to_host(found), plain(name)[0][1], **CLOSE)
        assert_named(here(Q, K, V), plain(name)[0][1], **CLOSE)


@pytest.mark.parametrize("mask", [None, Causal("pos"), Causal("pos", window=7)], ids=["all", "causal", "window"])
def test_bytes_of_heads_and_ring(mask: Any) -> None:
    """Of value and gradient: a shard has `1 / b` of the heads of `b` shards, so each hop moves as many bytes."""
    mesh, a = axn.make_mesh({"ring": 4, "heads_over": 2}), 4
    k = draw(KPos, Axis("heads", 2), Size)  # too few heads for eight devices
    q, over = k.rename({"key_pos": "pos"}), ("ring", "heads_over")
    shard = q.size * 4 // 8
    with jax.set_mesh(mesh), axn.axis_mapping({"pos": over, "key_pos": over}):
        found = executed(compiled(axn.shard((q, k, k * 2)), mask, BOTH))
    zigzag = 0 if mask is None or mask.window else 2 * 2
    hops = a - 1 if mask is None or mask.window is None else 2  # 7 positions reach into two further shards of 4
    assert found == {
        "all-to-all": (8, 8 * shard),
        "collective-permute": (6 * hops + 2 + 4 * zigzag, (6 * hops + 2 + 2 * zigzag) * shard),
    }


# --- what moves ---


def compiled(operands: Any, mask: Any, way: Any, **sizes: int) -> Any:
    return jax.jit(jax.grad(lambda xs: loss(xs, None, mask, way)[0])).lower(operands).compile()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mask", [None, Causal("pos"), Causal("pos", window=5)], ids=["all", "causal", "window"])
def test_bytes_are_those_of_the_formula(way: str, mask: Any) -> None:
    """Of value and gradient, on each of `n` devices."""
    mesh, n = axn.make_mesh({"data": 8}), 8
    k = draw(KPos, Axis("heads", 8), Size)
    q = k.rename({"key_pos": "pos"})
    shard = q.size * 4 // n  # of queries, keys, values and results alike
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING | {"heads": None}):
        found = executed(compiled(axn.shard((q, k, k * 2)), mask, way))
    zigzag = 0 if mask is None or mask.window else 2 * 2  # halves there and back, of each of these arrays
    if way == "ring":
        hops = n - 1 if mask is None or mask.window is None else 2  # 5 positions reach into two further shards of 2
        assert found == {"collective-permute": (6 * hops + 2 + 4 * zigzag, (6 * hops + 2 + 2 * zigzag) * shard)}
    elif way == "all_to_all":
        assert found == {"all-to-all": (8, 8 * shard)}
    else:
        halves = {"collective-permute": (2 * zigzag, zigzag * shard)} if zigzag else {}
        assert found == {"all-gather": (2, 2 * n * shard), "reduce-scatter": (2, 2 * shard)} | halves


def test_memory_falls_with_the_ring() -> None:
    """Compiled, not run: temporaries of value and gradient in MB, by positions; plain attention takes gigabytes."""
    table = {}
    shape = {"heads": 8, "head_size": 64}
    for devices, positions in ((8, 16384), (2, 16384)):
        mesh = axn.make_mesh({"data": devices}, devices=jax.devices()[:devices])
        with jax.set_mesh(mesh), axn.axis_mapping({"pos": "data", "key_pos": "data"}):
            placed = jax.NamedSharding(mesh, PartitionSpec("data"))
            operands = tuple(
                axn.named(jax.ShapeDtypeStruct((positions, 8, 64), np.float32, sharding=placed), (name, *shape))
                for name in ("pos", "key_pos", "key_pos")
            )
            program = compiled(operands, Causal("pos"), "ring")
        table[devices, positions] = program.memory_analysis().temp_size_in_bytes / 1e6
    assert table[8, 16384] < 182
    assert table[2, 16384] > 1.5 * table[8, 16384]


# --- what is chosen ---


def way_of(mapping: Any, q: axn.NamedArray = Q, k: axn.NamedArray = K, mask: Any = None, **options: Any) -> str:
    """Return the chosen context, as seen in the program."""
    with axn.axis_mapping(mapping):
        text = str(
            jax.make_jaxpr(lambda q, k: dot_product_attention(q, k, k, "key_pos", "head_size", mask, **options))(q, k)
        )
    ways = {"ppermute": "ring", "all_to_all": "all_to_all"}
    return " and ".join(way for primitive, way in ways.items() if primitive in text) or "plain"


def test_chooses_what_moves_less(auto_mesh: Mesh) -> None:
    with jax.set_mesh(auto_mesh):
        alike = {"pos": "data", "key_pos": "data"}
        assert way_of(alike) == "all_to_all"
        assert way_of(alike | {"heads": "model"}, Q["heads", :4], K["heads", :4]) == "ring"  # two heads for four
        assert way_of(alike, mask=Causal("pos", window=3)) == "ring"  # which reaches only one shard further
        over = ("data", "model")
        both = {"pos": over, "key_pos": over}
        assert way_of(both) == "all_to_all"
        few = Q["heads", :2], K["heads", :2]  # for one of the two mesh axes
        assert way_of(both, *few) == way_of(both, *few, Causal("pos")) == "ring and all_to_all"
        one = {"batch": 0, "heads": 0}  # nothing to exchange
        assert way_of(both, *few, Causal("pos", window=3)) == way_of(both, Q[one], K[one]) == "ring"
        assert way_of({"pos": "data"}) == way_of({"pos": "data", "key_pos": "model"}) == way_of({}) == "plain"
        assert way_of(alike, pdrop=0.5, prng=jax.random.key(0)) == "plain"


def test_cache_of_sharded_positions(mesh: Mesh) -> None:
    """A prompt that fills the cache attends along the sequence; the queries of a single token have none to share."""
    mapping = {"pos": "data", "key_pos": "data"}

    def decoded() -> Any:
        cache = KVCache.init(Batch, Heads, KPos, Size)
        mask = cache.mask(cache.positions(Pos))
        cache = cache.update(K, V)
        prompt = attend(Q, cache.keys, cache.values, mask=mask)
        with axn.axis_mapping({"pos": None}, merge=True):
            token = attend(Q["pos", -1:].rename({"pos": "pos"}), cache.keys, cache.values, mask=None)
        return prompt, token

    expected = jax.jit(decoded)()
    with jax.set_mesh(mesh), axn.axis_mapping(mapping):
        found = jax.block_until_ready(jax.jit(decoded)())
    assert_close(axn.to_host(found), expected)


# --- errors ---


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: attend(Q, K, V, mask=None, context="rign"), "no such context; .* Did you mean 'ring'"),
        (lambda: attend(Q, K, V, mask=Causal("p"), context="ring"), "causal in 'p', which is not an axis"),
        (lambda: attend(Q, K, V, mask=None, context=("ring", "all_to_all")),
         r"choose one of .*, \('all_to_all', 'ring'\), \('all_to_all', 'all_gather'\)"),
        (lambda: attend(Q, K, V, mask=None, context=BOTH),
         r"over one mesh axis, data, and this needs two.*: map the positions to \('ring', 'data'\), or use 'all_to"),
        (lambda: attend(Q["pos", :6], K["key_pos", :6], V["key_pos", :6], mask=None, context="ring"),
         r"axis 'pos' of size 6 is sharded over \(data=4\), which does not divide it"),
        (lambda: attend(Q["heads", :4], K["heads", :4], V["heads", :4], mask=None, context="all_to_all"),
         r"over \(data\), which are 4 devices. They must divide .* none of \(batch=2, heads=2\)"),
        (lambda: dot_product_attention(Q, K, V, "key_pos", "head_size", pdrop=0.5, context="ring"), "no dropout"),
        (lambda: dot_product_attention(Q, K["key_pos", 0], V["key_pos", 0], (), "head_size", context="ring"),
         r"it takes one axis of key positions, not \(\)"),
        (lambda: attend(Q["pos", :8], K, V, mask=Causal("pos", segments=SEGMENTS["pos", :8]), context="ring"),
         "axis 'key_pos' has conflicting sizes: 16 in the key, 8 in the segments"),
        (lambda: Causal("pos", segments=SEGMENTS.astype(float)), "segments must be integers with the axis 'pos'"),
    ],
)  # fmt: skip
def test_errors(call: Any, text: str, auto_mesh: Mesh) -> None:
    with jax.set_mesh(auto_mesh), axn.axis_mapping(MAPPING), pytest.raises(ValueError, match=text):
        call()


def test_segments_are_combined() -> None:
    packed, windowed = Causal("pos", segments=SEGMENTS), Causal("pos", window=3)
    both = combine_masks_and(packed, windowed)
    assert both.window == 3 and both.segments is SEGMENTS
    same = axn.broadcast_to(SEGMENTS, (Batch, Pos, KPos)) == SEGMENTS.rename({"pos": "key_pos"})
    assert axn.array_equal(packed.written_out(Pos, KPos), same & Causal("pos").written_out(Pos, KPos))
    with pytest.raises(ValueError, match="both masks have segments"):
        combine_masks_and(packed, packed)


def test_heads_are_exchanged_whatever_the_order_of_the_axes() -> None:
    """XLA lays out what is exchanged as its operands are, and must do so alike for all pieces."""
    sizes = {"group": 2, "batch": 2, "heads": 4, "pos": 24, "d": 4, "key_pos": 24, "e": 6}
    rng = np.random.default_rng(0)

    def drawn(names: str) -> axn.NamedArray:
        own = names.split()
        return axn.named(rng.normal(size=[sizes[n] for n in own]).astype(np.float32), own)

    operands = tuple(map(drawn, ("group batch heads pos d", "d key_pos heads batch", "key_pos batch heads e")))
    mask, weights = drawn("key_pos") < 1, drawn("batch heads group pos e")

    def gradients(context: Any) -> Any:
        def total(operands: Any) -> Any:
            q, k, v = operands
            y = dot_product_attention(q, k, v, "key_pos", "d", mask=mask, context=context)
            return (y.rearrange(weights.names).array * weights.array).sum()

        return jax.jit(jax.grad(total), compiler_options={"xla_backend_optimization_level": 3})

    expected = gradients(None)(operands)
    mapping = {"pos": "seq", "key_pos": "seq", "batch": "data"}
    with jax.set_mesh(axn.make_mesh({"seq": 4, "data": 2}, explicit=True)), axn.axis_mapping(mapping):
        found = gradients("all_to_all")(axn.shard(operands))
    for a, b in zip(axn.to_host(found), expected, strict=True):
        assert_named(a.rearrange(b.names), b, rtol=1e-4, atol=1e-5)
