"""`Stacked` and `BlockSeq`: results and gradients compared with hand-written loops, and the rules for arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from typing import Any

import equinox as eqx
import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym import ScanCheckpointPolicy as Policy
from axonym.nn.scan import BlockFoldable, BlockSeq, Stacked
from axonym.state import to_numpy_state_dict, to_state_dict
from tests.helpers import assert_named
from tests.nn.layers import KEY, STACKED, Batch, Embed, Layer, Layers, X, make, raw_fold, raw_parts

KINDS = pytest.mark.parametrize("kind", [Stacked, BlockSeq])


def stacked_arrays(layers: BlockFoldable[Layer]) -> list[np.ndarray]:
    """Return the arrays of all layers, stacked as in a `Stacked`."""
    return [np.stack(arrays) for arrays in zip(*map(raw_parts, layers.unstacked()), strict=True)]


class Pair(eqx.Module):
    """A layer that returns a pair."""

    by: jax.Array

    @staticmethod
    def init(by: Any) -> Pair:
        return Pair(by)

    def __call__(self, x: Any) -> Any:
        return x + self.by, x


# --- making them ---


def test_the_same_keys_make_the_same_layers() -> None:
    keys = jax.random.split(KEY, Layers.size)
    expected = [np.stack(arrays) for arrays in zip(*(raw_parts(Layer.init(key=k)) for k in keys), strict=True)]
    # A single key: typed, and as `jax.random.PRNGKey` makes them.
    for kind, key in ((Stacked, keys), (Stacked, KEY), (Stacked, jax.random.key_data(KEY)), (BlockSeq, KEY)):
        layers = kind.init(Layers, Layer)(key=key)
        for a, b in zip(stacked_arrays(layers), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_layers_as_one() -> None:
    stacked = eqx.filter_eval_shape(Stacked.init(Layers, Layer), key=KEY).stacked
    assert stacked.up.shape == {"layers": 4, "embed": 16, "mlp": 24} and stacked.scale.shape == (4,)
    assert stacked.activation is axn.tanh and stacked.rate == 0.5


@KINDS
@pytest.mark.parametrize(
    ("by", "expected"),
    [(axn.named(np.arange(4.0), Layers), [0, 1, 2, 3]), (np.arange(4.0), [0, 1, 2, 3]), (jnp.float32(3), [3] * 4)],
    ids=["named", "raw", "scalar array"],
)
def test_arguments_of_init_are_for_each_layer_or_for_all(kind: Any, by: Any, expected: list[int]) -> None:
    found = kind.init(Layers, Pair)(by).vmap(axn.zeros(Embed))[0]
    np.testing.assert_array_equal(found.array[:, 0], expected)


@KINDS
def test_layers_are_made_under_a_mapping_without_a_mesh(kind: Any) -> None:
    init = lambda: kind.init(Layers, Layer)(key=KEY).get_layer(1).up.array
    with axn.axis_mapping({"layers": "stage"}):
        found = init()
    np.testing.assert_array_equal(found, init())


def test_the_function_that_init_returns_has_the_signature_of_the_layers() -> None:
    init: Any = Stacked.init(Layers, Layer)
    assert init.__name__ == "init" and init.__wrapped__ is Layer.init


@KINDS
def test_policies_are_those_of_scans(kind: Any) -> None:
    init = lambda policy, **options: kind.init(Layers, Pair, gradient_checkpointing=policy, **options)(1.0)
    assert init("nested").gradient_checkpointing == Policy(nested=True)
    assert init(True).gradient_checkpointing == make(kind, True).gradient_checkpointing == Policy(simple=True)
    assert init("full", prevent_cse=True).gradient_checkpointing == Policy(prevent_cse=True)
    assert Stacked(STACKED, Layers).gradient_checkpointing == Policy.from_bool_or_str(False)


# --- values and gradients ---

POLICIES = [False, True, "offload", "nested", Policy(save_carries=False, offload_block_internals=["hidden"])]


@KINDS
def test_values_and_gradients_are_those_of_a_loop_by_hand(kind: Any) -> None:
    """Whatever the policy, and however much is unrolled."""
    layers = make(kind)
    raw = [*stacked_arrays(layers), X.array]
    expected = jax.value_and_grad(lambda *arrays: (raw_fold(*arrays) ** 2).mean(), argnums=(0, 1, 2, 3))(*raw)
    arrays, rest = eqx.partition(layers, eqx.is_array)

    def loss(arrays: Any, x: Any, policy: Any, unroll: Any) -> Any:
        same = dataclasses.replace(eqx.combine(arrays, rest), gradient_checkpointing=policy)
        return axn.mean(same.fold(x, unroll=unroll) ** 2).scalar()

    variants = [(policy, None) for policy in POLICIES]
    variants += [(True, 2)] if kind is Stacked else []

    @jax.jit
    def everything(arrays: Any, x: Any) -> Any:
        return [jax.value_and_grad(loss, argnums=(0, 1))(arrays, x, *variant) for variant in variants]

    for value, (of_layers, of_x) in everything(arrays, X):
        np.testing.assert_allclose(value, expected[0], rtol=1e-5)
        found = [*stacked_arrays(eqx.combine(of_layers, rest)), of_x.array]
        for a, b in zip(found, expected[1], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def kept(policy: Any, kind: Any) -> list[str]:
    """Return the types of the residuals that the backward pass gets, except the function's own arguments."""
    arrays, rest = eqx.partition(make(kind, policy), eqx.is_array)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        jax.ad_checkpoint.print_saved_residuals(lambda a, x: eqx.combine(a, rest).fold(x).sum().array, arrays, X)
    return sorted(line.split()[0] for line in printed.getvalue().splitlines() if " from the argument " not in line)


CARRY, HIDDEN, HOST = "f32[{}8,16]", "f32[{}8,24]", "f32<host>[{}8,16]"


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (True, [CARRY]), ("recompute", [CARRY]), ("full", [CARRY]), (Policy(save_carries=False), []),
        (Policy(save_block_internals=["hidden"]), [CARRY, HIDDEN]), (Policy(save_carries="offload"), [HOST]),
        (Policy(save_carries=False, save_block_internals=["hidden"]), [HIDDEN]),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_kept_between_the_passes(policy: Any, expected: list[str]) -> None:
    """A loop keeps arrays of all layers, a sequence those of each. The first carry is an argument."""
    assert kept(policy, Stacked) == sorted(t.format("4,") for t in expected)
    assert kept(policy, BlockSeq) == sorted(t.format("") for t in expected for _ in range(3 if t == CARRY else 4))


def test_what_nested_loops_keep() -> None:
    """The carry of every second layer, and the layers cut into groups."""
    assert [t for t in kept("nested", Stacked) if t.endswith("8,16]")] == ["f32[2,8,16]"]
    assert kept("nested", BlockSeq) == ["f32[8,16]"]
    moved = Policy(nested=2, save_carries="offload")
    assert [t for t in kept(moved, Stacked) if t.endswith("8,16]")] == ["f32<host>[2,8,16]"]
    assert kept(moved, BlockSeq) == ["f32<host>[8,16]"] * 2
    with pytest.raises(ValueError, match="4 steps cannot be cut into nested=3 groups"):
        make(BlockSeq, Policy(nested=3)).fold(X)


@KINDS
def test_everything_is_kept_where_the_policy_says_so(kind: Any) -> None:
    everything = kept(False, kind)
    assert everything == kept("save_all", kind) and len(everything) > len(kept(True, kind))


# --- the other ways to apply them ---


def test_outputs_are_stacked() -> None:
    """Named, raw, and numbers; what is not an array is returned once."""

    def step(layer: Layer, x: Any) -> Any:
        return layer(x), {"mean": x.mean(Embed), "scale": layer.scale * 2, "number": 1.5, "same": axn.tanh, "no": None}

    expected, means = X, []
    for layer in make(BlockSeq).blocks:
        means.append(expected.mean(Embed).array)
        expected = layer(expected)
    for kind in (Stacked, BlockSeq):
        final, outputs = make(kind).scan_via(step)(X)
        assert_named(final, expected, rtol=1e-5, atol=1e-6)
        assert_named(outputs["mean"], axn.named(jnp.stack(means), (Layers, Batch)), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(outputs["scale"], STACKED.scale * 2, rtol=1e-6)
        np.testing.assert_array_equal(outputs["number"], np.full(4, 1.5))
        assert outputs["same"] is axn.tanh and outputs["no"] is None


@KINDS
def test_layers_that_return_pairs(kind: Any) -> None:
    final, before = kind.init(Layers, Pair)(jnp.arange(4.0)).scan(axn.zeros(Embed))
    assert_named(final, axn.full(Embed, 6.0))
    np.testing.assert_array_equal(before["embed", 0].array, [0, 0, 1, 3])
    with pytest.raises(ValueError, match=r"must return a pair.* not a NamedArray.*`fold`"):
        make(kind).scan(X)


def test_vmap_applies_each_layer_on_its_own() -> None:
    expected = axn.stack([layer(X, float(i)) for i, layer in enumerate(make(BlockSeq).blocks)], Layers)
    shift = axn.named(np.arange(4.0, dtype=np.float32), Layers)
    for kind in (Stacked, BlockSeq):
        assert_named(make(kind).vmap(X, shift), expected, rtol=1e-5, atol=1e-6)
        via = make(kind).vmap_via(lambda layer, x, shift: (layer(x, shift), 2.0, "x"))(X, shift=shift)
        assert_named(via[0], expected, rtol=1e-5, atol=1e-6)
        assert via[1:] == (2.0, "x")


SHIFTS: dict[str, tuple[Any, Any]] = {
    "named": (axn.named(np.arange(4.0, dtype=np.float32), Layers), [0.0, 1.0, 2.0, 3.0]),
    "raw": (np.arange(4.0, dtype=np.float32), [0.0, 1.0, 2.0, 3.0]),
    "named without the axis": (axn.ones(Embed), [axn.ones(Embed)] * 4),
    "scalar array": (jnp.float32(2), [2.0] * 4),
    "number": (2.0, [2.0] * 4),
}


@pytest.mark.parametrize(("shift", "each"), SHIFTS.values(), ids=SHIFTS)
def test_arguments_are_for_each_layer_or_for_all(shift: Any, each: list[Any]) -> None:
    expected = X
    for layer, own in zip(make(BlockSeq).blocks, each, strict=True):
        expected = layer(expected, own)
    for kind in (Stacked, BlockSeq):
        assert_named(make(kind).fold(X, shift), expected, rtol=1e-5, atol=1e-6)
        assert_named(make(kind).fold_via(Layer.__call__)(X, shift=shift), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("key", [KEY, jax.random.key_data(KEY), jax.random.split(KEY, 4)], ids=["one", "old", "each"])
def test_every_layer_has_a_key_of_its_own(key: Any) -> None:
    expected = jnp.stack([jax.random.uniform(k) for k in jax.random.split(KEY, 4)])
    for kind in (Stacked, BlockSeq):
        layers = make(kind)
        drawn = layers.vmap_via(lambda layer, *, key: jax.random.uniform(key))(key=key)
        np.testing.assert_allclose(drawn, expected, rtol=1e-6)
        drawn = layers.scan_via(lambda layer, x, *, key: (x, jax.random.uniform(key)))(0.0, key=key)[1]
        np.testing.assert_allclose(drawn, expected, rtol=1e-6)


def test_every_layer_has_a_key_of_its_own_inside_scan_and_vmap() -> None:
    rows = axn.named(jax.random.split(KEY, 3), "row")
    each = [[jax.random.uniform(k) for k in jax.random.split(row, 4)] for row in jax.random.split(KEY, 3)]
    for kind in (Stacked, BlockSeq):
        layers = make(kind)

        def draw(key, layers=layers):
            return layers.vmap_via(lambda layer, *, key: axn.random.uniform(key, ()).array)(key=key)

        drawn = axn.scan(lambda _, key: (0, draw(key)), "row")(0, rows)[1]
        np.testing.assert_allclose(drawn.array if axn.is_named_array(drawn) else drawn, each, rtol=1e-6)
        drawn = axn.vmap(draw, "row")(rows)
        np.testing.assert_allclose(drawn.array if axn.is_named_array(drawn) else drawn, each, rtol=1e-6)
        made = axn.vmap(lambda key, kind=kind: [x.up for x in kind.init(Layers, Layer)(key=key).unstacked()], "row")
        weights = jnp.stack([x.array for x in made(rows)])
        assert weights.size == 3 * 4 * Embed.size * 24 and len(jnp.unique(weights)) > 0.99 * weights.size


@KINDS
def test_keys_of_other_names_are_shared(kind: Any) -> None:
    drawn = make(kind).vmap_via(lambda layer, k: jax.random.uniform(k))(KEY)
    assert len(set(drawn.tolist())) == 1


# --- the layers themselves ---


@KINDS
def test_single_layers(kind: Any) -> None:
    layers = make(kind)
    each = layers.unstacked()
    assert len(each) == 4 and layers.Layers == layers.Block == Layers
    for i in range(4):
        for found in (each[i], layers.get_layer(i), layers.get_layer(i - 4)):
            assert_named(found.up, STACKED.up["layers", i])
            assert found.scale.shape == () and found.scale == STACKED.scale[i]
            assert found.activation is axn.tanh and found.rate == 0.5
    with pytest.raises(IndexError, match=rf"{kind.__name__}\.get_layer: layer 4 is out of range for 4 layers"):
        layers.get_layer(4)


def test_a_layer_by_a_traced_number() -> None:
    arrays, rest = eqx.partition(make(Stacked), eqx.is_array)
    found = jax.jit(lambda a, i: eqx.combine(a, rest).get_layer(i).up)(arrays, 2)
    assert_named(found, STACKED.up["layers", 2])


def test_layers_can_share_arrays() -> None:
    shared = eqx.tree_at(lambda m: m.down, STACKED, STACKED.down["layers", 0])
    layers = Stacked(shared, Layers)
    expected = X
    for layer in layers.unstacked():
        assert_named(layer.down, shared.down)
        expected = layer(expected)
    assert_named(layers.get_layer(1).down, shared.down)
    assert_named(layers.fold(X), expected, rtol=1e-5, atol=1e-6)


@KINDS
def test_models_without_values(kind: Any) -> None:
    abstract = eqx.filter_eval_shape(kind.init(Layers, Layer), key=KEY)
    for layer in (abstract.get_layer(1), abstract.unstacked()[2]):
        assert layer.up.shape == {"embed": 16, "mlp": 24} and layer.scale.shape == ()
        assert isinstance(layer.up.array, jax.ShapeDtypeStruct)
    assert eqx.filter_eval_shape(lambda m, x: m.fold(x), abstract, X).axes == X.axes
    empty = eqx.filter(make(kind), lambda _: False)
    assert empty.get_layer(0).up.array is None and empty.unstacked()[1].scale is None


class Group(eqx.Module):
    """A layer that is a stack."""

    layers: Stacked[Pair]

    @staticmethod
    def init(by: Any) -> Group:
        return Group(Stacked.init(Layers, Pair)(by))

    def __call__(self, x: Any) -> Any:
        return self.layers.scan(x)


def test_stacks_in_stacks() -> None:
    groups = Stacked.init(axn.Axis("groups", 2), Group)(np.arange(8.0).reshape(2, 4))
    final, before = groups.scan(axn.zeros(Embed))
    assert_named(final, axn.full(Embed, 28.0))
    assert before.shape == {"groups": 2, "layers": 4, "embed": 16}
    np.testing.assert_array_equal(before["embed", 0].array.ravel(), [0, 0, 1, 3, 6, 10, 15, 21])
    assert groups.get_layer(1).layers.get_layer(2).by == 6
    seen = []
    axn.tree.scan_aware_map(lambda x: seen.append(x.shape), groups)
    assert seen == [()]
    assert groups.to_state_dict("g")["g.1.layers.3.by"] == 7


def test_functions_of_trees_see_the_layers_one_by_one() -> None:
    layers = make(Stacked)
    normed = axn.tree.scan_aware_map(lambda x: x / x.max() if isinstance(x, axn.NamedArray) else x, layers)
    assert isinstance(normed, Stacked) and normed.Block == Layers
    assert_named(normed.stacked.up, STACKED.up / STACKED.up.max((Embed, "mlp")), rtol=1e-6)
    summed = axn.tree.scan_aware_map(lambda x, y: x + y if isinstance(x, axn.NamedArray) else x, layers, layers)
    assert_named(summed.stacked.down, STACKED.down * 2)
    longer = axn.tree.resize_axis(layers, "mlp", 30)
    assert longer.stacked.up.shape == {"layers": 4, "embed": 16, "mlp": 30}


def test_a_sequence_need_not_be_of_one_kind() -> None:
    first = STACKED.up["layers", 0]
    layers: BlockFoldable[Any] = BlockSeq([make(BlockSeq).blocks[0], Pair(first.array)], axn.Axis("layers", 2))
    step = lambda layer, x: (x + 1, layer.by) if isinstance(layer, Pair) else (layer(x), layer.up.array)
    x, outputs = layers.scan_via(step)(X)
    assert_named(x, make(BlockSeq).blocks[0](X) + 1, rtol=1e-6)
    np.testing.assert_array_equal(outputs, np.stack([first.array] * 2))


# --- state dicts ---


@KINDS
def test_state_dicts_have_every_layer_on_its_own(kind: Any) -> None:
    found = to_numpy_state_dict({"h": make(kind)})
    names = {"up": (16, 24), "down": (24, 16), "scale": (), "rate": ()}
    assert {k: np.shape(v) for k, v in found.items()} == {f"h.{i}.{n}": s for i in range(4) for n, s in names.items()}
    for i in range(4):
        assert isinstance(found[f"h.{i}.up"], np.ndarray)
        np.testing.assert_array_equal(found[f"h.{i}.up"], STACKED.up["layers", i].array)
    assert make(kind).to_state_dict("x").keys() == {k.replace("h", "x", 1) for k in found}
    abstract = to_state_dict(eqx.filter_eval_shape(kind.init(Layers, Layer), key=KEY))
    assert {k: np.shape(v) for k, v in abstract.items()} == {k[2:]: np.shape(v) for k, v in found.items()}


def test_each_kind_loads_what_the_other_wrote() -> None:
    state = make(Stacked).to_state_dict()
    zeros = jax.tree.map(lambda x: x * 0 if eqx.is_array(x) else x, STACKED)
    for other in (Stacked(zeros, Layers), BlockSeq(Stacked(zeros, Layers).unstacked(), Layers)):
        for template in (other, eqx.filter_eval_shape(lambda other=other: other)):
            loaded = template.from_state_dict(state)
            assert type(loaded) is type(other)
            for a, b in zip(stacked_arrays(loaded), raw_parts(STACKED), strict=True):
                np.testing.assert_array_equal(a, b)
        with pytest.raises(ValueError, match=r"'3\.up' is missing"):
            other.from_state_dict({k: v for k, v in state.items() if k != "3.up"})


def test_what_layers_share_must_be_the_same_for_all() -> None:
    layers = Stacked(eqx.tree_at(lambda m: m.down, STACKED, STACKED.down["layers", 0]), Layers)
    state = layers.to_state_dict("h")
    assert_named(layers.from_state_dict(state, "h").stacked.down, layers.stacked.down)
    state |= {"h.2.down": state["h.2.down"] + 1, "h.3.rate": 0.25}
    with pytest.raises(ValueError, match="does not fit the tree, 2 problems") as e:
        layers.from_state_dict(state, "h")
    shared = {"down": "float32[mlp=24, embed=16]", "rate": "0.5"}
    for name, x in shared.items():
        assert f"'h.*.{name}' differs among the layers, but in the tree all share {x}." in str(e.value)


# --- errors ---


@KINDS
def test_sizes_that_differ(kind: Any) -> None:
    layers, name = make(kind), kind.__name__
    message = r"axis 'layers' has conflicting sizes: 3 in args\[0\], 4 in the layers.*first axis: args\[0\]"
    for what, call in {"fold": layers.fold, "scan": layers.scan}.items():
        with pytest.raises(ValueError, match=rf"{name}\.{what}: {message}"):
            call(X, np.zeros(3))
    with pytest.raises(ValueError, match=rf"{name}\.vmap: {message}"):
        layers.vmap(np.zeros(3))
    with pytest.raises(ValueError, match=rf"{name}\.init: axis 'layers'.* 3 in kwargs\['by'\], 4 in the layers"):
        kind.init(Layers, Pair)(by=axn.zeros({"layers": 3}))


def test_what_cannot_be_made() -> None:
    with pytest.raises(TypeError, match=r"Stacked\.init: the axis of the layers must be an Axis .*, got 'layers'"):
        Stacked.init("layers", Layer)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"BlockSeq\.init: 'Module' has no `init`"):
        BlockSeq.init(Layers, eqx.Module)
    with pytest.raises(ValueError, match=r"BlockSeq: got 1 layer for the axis layers\(4\)"):
        BlockSeq([Pair(jnp.float32(1))], Layers)


def test_results_that_cannot_be_stacked() -> None:
    layers: BlockSeq[Any] = BlockSeq([make(BlockSeq).blocks[0], Pair(jnp.float32(1))], axn.Axis("layers", 2))
    with pytest.raises(TypeError, match=r"BlockSeq\.vmap: all layers must return trees of one structure, but layer 0"):
        layers.vmap(X)
    with pytest.raises(TypeError, match=r"cannot be stacked: float32\(batch=8, embed=16\), raw float32\(\)"):
        layers.vmap_via(lambda layer: layer.by if isinstance(layer, Pair) else X)()
    with pytest.raises(ValueError, match="stack: all arrays must have the same axes"):
        layers.vmap_via(lambda layer: X.mean(Embed) if isinstance(layer, Pair) else X)()


def test_turns_of_a_loop_are_counted() -> None:
    with pytest.raises(ValueError, match="`unroll` is a number of steps, at least 1, or True; got 0"):
        make(Stacked).fold(X, unroll=0)
