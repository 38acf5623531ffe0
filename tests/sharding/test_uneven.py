"""Axes that their mesh axes do not divide: stored padded, with their true size inside compiled functions."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import axonym as axn
import axonym.haliax as hax
from axonym import nn
from axonym.distribution.padded_array import PaddedArray, is_padded, padded_array, stored
from axonym.named_array import raw
from tests.helpers import assert_named

Batch, Pos, Embed, Mlp = axn.make_axes(batch=8, pos=4, embed=8, mlp=12)
Vocab, Heads, HeadSize, Experts = axn.make_axes(vocab=28, heads=28, head_size=4, experts=60)
X = axn.named(np.arange(28.0, dtype=np.float32), "vocab")
OPTIMIZER = optax.adam(0.1)
COLLECTIVE = re.compile(r"= (\S+) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\(")


def draw(*axes: axn.Axis) -> axn.NamedArray:
    rng = np.random.default_rng(sum(a.size for a in axes))
    return axn.named(rng.normal(size=[a.size for a in axes]).astype(np.float32) / 4, axes)


def devices_of(**sizes: int) -> Mesh:
    return axn.make_mesh(sizes, devices=jax.devices()[: int(np.prod([*sizes.values()]))])


def poisoned(tree: Any) -> Any:
    """Put NaN, or a large number, into all padding."""

    def poison(x: Any) -> Any:
        if not is_padded(x):
            return x
        kept = np.pad(np.ones(x.shape, bool), [(0, n - m) for n, m in zip(x.array.shape, x.shape, strict=True)])
        wrong = jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 2**30
        return padded_array(jnp.where(jax.device_put(kept, x.sharding), x.array, wrong), x.shape)

    return jax.tree.map(poison, tree, is_leaf=is_padded)


# --- models ---


def of_tokens(params: Any, tokens: axn.NamedArray) -> Any:
    (vocab,) = (a for a in params["table"].axes if a.name == "vocab")
    h = axn.tanh(params["table"].take("vocab", tokens))
    logits = axn.dot(h, params["out"], axis=Embed)
    return axn.mean(nn.cross_entropy_loss(logits, vocab, nn.one_hot(axn.roll(tokens, 1, "pos"), vocab))).scalar()


def of_heads(params: Any, x: axn.NamedArray) -> Any:
    q, k, v = (axn.dot(x, params[n], axis=Embed) for n in "qkv")
    k, v = (y.rename({"pos": "key_pos"}) for y in (k, v))
    y = nn.attention.dot_product_attention(q, k, v, "key_pos", HeadSize)
    return axn.mean(axn.square(axn.dot(y, params["o"], axis=(Heads, HeadSize)) - x)).scalar()


def of_experts(params: Any, x: axn.NamedArray) -> Any:
    scores = nn.softmax(axn.dot(x, params["router"], axis=Embed), Experts)
    each = axn.dot(nn.gelu(axn.dot(x, params["up"], axis=Embed)), params["down"], axis=Mlp)
    chosen = axn.argmax(axn.dot(x, params["router"], axis=Embed), Experts)

    def of_rows(params: Any, rows: axn.NamedArray, sizes: axn.NamedArray) -> axn.NamedArray:
        layer = nn.MoELinear(params["up"], None, Experts, Embed, Mlp)
        return nn.gelu(layer(rows, sizes))

    sent = nn.dispatch(of_rows, {"up": params["up"]}, x, chosen, Experts, round_size=32)
    return (axn.mean(axn.square(axn.dot(each, scores, axis=Experts) - x)) + axn.mean(sent)).scalar()


def of_dense_experts(params: Any, x: axn.NamedArray) -> Any:
    scores = nn.softmax(axn.dot(x, params["router"], axis=Embed), Experts)
    each = axn.dot(nn.gelu(axn.dot(x, params["up"], axis=Embed)), params["down"], axis=Mlp)
    return axn.mean(axn.square(axn.dot(each, scores, axis=Experts) - x)).scalar()


def of_batch(params: Any, x: axn.NamedArray) -> Any:
    h = nn.standardize(axn.dot(x, params["up"], axis=Embed), "batch")
    y = axn.dot(nn.gelu(h), params["down"], axis=Mlp)
    return (axn.mean(axn.square(y - x)) + axn.max(y) + axn.std(y["pos", 0])).scalar()


def of_rolls(params: Any, x: axn.NamedArray) -> Any:
    u = params["u"]
    for _ in range(3):
        u = u + 0.1 * (axn.roll(u, 1, "vocab") + axn.roll(u, -1, "vocab") - 2 * u) * params["speed"]
    return axn.mean(axn.square(u - x)).scalar()


def tokens_of(vocab: axn.Axis) -> axn.NamedArray:
    return axn.named(np.random.default_rng(0).integers(0, 1001, (8, 4)).astype(np.int32), ("batch", "pos"))


def vocabulary(size: int) -> tuple[Any, Any]:
    vocab = axn.Axis("vocab", size)
    return {"table": draw(vocab, Embed), "out": draw(Embed, vocab)}, tokens_of(vocab)


LARGE = axn.Axis("batch", 100)
ONE, TWO = {"data": 8}, {"data": 4, "model": 2}
HEADS = {n: draw(Embed, Heads, HeadSize) for n in "qkv"} | {"o": draw(Heads, HeadSize, Embed)}
EXPERTS = {"router": draw(Embed, Experts), "up": draw(Experts, Embed, Mlp), "down": draw(Experts, Mlp, Embed)}
CASES: dict[str, tuple[Any, Any, Any, dict[str, int], Any]] = {
    "vocabulary": (of_tokens, *vocabulary(1001), ONE, {"vocab": "data"}),
    "vocabulary and batch": (of_tokens, *vocabulary(1001), TWO, {"vocab": "model", "batch": "data"}),
    "vocabulary over both": (of_tokens, *vocabulary(1001), TWO, {"vocab": ("data", "model")}),
    "heads": (of_heads, HEADS, draw(Batch, Pos, Embed), ONE, {"heads": "data"}),
    "heads over both": (of_heads, HEADS, draw(Batch, Pos, Embed), TWO, {"heads": ("data", "model")}),
    "experts": (of_experts, EXPERTS, draw(Batch, Pos, Embed), ONE, {"experts": "data"}),
    "experts over both": (of_dense_experts, EXPERTS, draw(Batch, Pos, Embed), TWO, {"experts": ("data", "model")}),
    "batch": (
        of_batch,
        {"up": draw(Embed, Mlp), "down": draw(Mlp, Embed)},
        draw(LARGE, Pos, Embed),
        ONE,
        {"batch": "data"},
    ),
    "batch and features": (
        of_batch,
        {"up": draw(Embed, Mlp), "down": draw(Mlp, Embed)},
        draw(LARGE, Pos, Embed),
        {"a": 2, "b": 3},
        {"batch": "b", "mlp": "a"},
    ),
    "rolls": (of_rolls, {"u": draw(Vocab), "speed": draw(Vocab)}, draw(Vocab), ONE, {"vocab": "data"}),
}


def step_of(loss: Any) -> Any:
    def step(state: Any, x: axn.NamedArray) -> Any:
        params, kept = state
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, kept = OPTIMIZER.update(gradients, kept, params)
        return (optax.apply_updates(params, updates), kept), value

    return step


def start(params: Any) -> Any:
    return params, OPTIMIZER.init(params)


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_one_device(case: str) -> None:
    """Three steps of Adam, with NaN in all padding before each; the state is donated."""
    loss, params, x, sizes, mapping = CASES[case]
    one = jax.jit(step_of(loss))
    with jax.set_mesh(devices_of(**sizes)), axn.axis_mapping(mapping, uneven="pad"):
        state, placed = axn.named_jit(start)(params), axn.shard(x)
        assert any(map(is_padded, jax.tree.leaves((state, placed), is_leaf=is_padded)))
        step: Any = axn.named_jit(step_of(loss), donate_args=(True, False))
        given = state
        expected: Any = start(params)
        for _ in range(3):
            given = poisoned(state)
            state, value = jax.block_until_ready(step(given, poisoned(placed)))
            assert all(y.is_deleted() for y in jax.tree.leaves(given[0]))
            expected, wanted = one(expected, x)
            np.testing.assert_allclose(value, wanted, rtol=2e-5)
        assert jax.tree.structure(given) == jax.tree.structure(state)
        for found, true in zip(jax.tree.leaves(axn.to_host(state)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(found, true, rtol=1e-3, atol=2e-4)


def program(size: int, mapping: Any) -> Any:
    """Compile a step of the model with a vocabulary of a size."""
    params, tokens = vocabulary(size)
    with axn.axis_mapping(mapping, uneven="pad"):
        state, placed = jax.eval_shape(axn.named_jit(start), params), axn.shard(tokens)
        step: Any = axn.named_jit(step_of(of_tokens), donate_args=(True, False))
        return step.lower(state, placed).compile()


@pytest.mark.parametrize(
    ("sizes", "mapping"),
    [(ONE, {"vocab": "data"}), (TWO, {"vocab": "model", "batch": "data"})],
    ids=["one axis", "two axes"],
)
def test_the_program_is_that_of_the_rounded_size(sizes: dict[str, int], mapping: Any) -> None:
    """The same collectives of the same sizes, and the state is overwritten: see `benchmarks.uneven` for a larger one.

    Memory has room for masked copies of the state alone, which weighs more in so small a model.
    """
    with jax.set_mesh(devices_of(**sizes)):
        uneven, even = (program(size, mapping) for size in (1001, 1008))
    found, wanted = (Counter(COLLECTIVE.findall(p.as_text())) for p in (uneven, even))
    assert wanted
    assert found == wanted
    ours, theirs = (p.memory_analysis() for p in (uneven, even))
    assert ours.temp_size_in_bytes < theirs.temp_size_in_bytes + ours.alias_size_in_bytes
    assert 0.98 * theirs.alias_size_in_bytes < ours.alias_size_in_bytes <= theirs.alias_size_in_bytes


# --- storage ---


def of_two_layers(params: Any, x: axn.NamedArray) -> Any:
    def loss(params: Any) -> Any:
        h = axn.tanh(axn.dot(x, params["w"], axis="embed"))
        each = axn.vmap(lambda h: axn.dot(h, params["v"], axis="mlp"), "batch")(h)
        return axn.mean(axn.square(each * params["scale"] - x)).scalar()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, gradients), value


@pytest.mark.parametrize("sizes", [ONE, TWO], ids=["one axis", "two axes"])
def test_fsdp_operates_on_uneven_parameters_as_on_even_ones(sizes: dict[str, int]) -> None:
    """A product, a product under vmap and an elementwise one: gathers and reduce-scatters of the rounded size."""
    mapping = {"batch": "data", "mlp": "model"} if "model" in sizes else {"batch": "data"}
    sent = []
    for size in (29, 32):
        odd = axn.Axis("embed", size)
        params = {"w": draw(odd, Mlp), "v": draw(Mlp, odd), "scale": draw(odd)}
        x = draw(axn.Axis("batch", 16), odd)
        expected = jax.jit(of_two_layers)(params, x)
        with jax.set_mesh(devices_of(**sizes)):
            compiled = axn.fsdp(of_two_layers, {"embed": "data"}, mapping, uneven="pad")
            placed = poisoned(axn.shard((params, x), ({"embed": "data"}, mapping), uneven="pad"))
            found = axn.to_host(jax.block_until_ready(compiled(*placed)))
            sent.append(Counter(COLLECTIVE.findall(str(compiled.lower(*placed).compile().as_text()))))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
    assert {kind for _, kind in sent[0]} >= {"all-gather", "reduce-scatter"}
    assert Counter((shape.replace("29", "32"), kind) for shape, kind in sent[0].elements()) == sent[1]


def test_fsdp_stores_uneven_parameters_padded() -> None:
    """With an uneven batch too, which its operations leave to the partitioner."""
    odd = axn.Axis("embed", 28)
    params, x = {"w": draw(odd, Mlp), "v": draw(Mlp, odd), "scale": draw(odd)}, draw(LARGE, odd)
    expected = of_two_layers(params, x)
    with jax.set_mesh(devices_of(data=8)):
        compiled = axn.fsdp(of_two_layers, {"embed": "data"}, {"batch": "data"}, uneven="pad")
        x = axn.shard(x, {"batch": "data"}, uneven="pad")
        nested = jax.block_until_ready(axn.named_jit(lambda p, x: compiled(p, x))(params, x))
        found = jax.block_until_ready(compiled(params, x))  # JAX may take the program of the call before
    for tree in (nested, found):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), axn.to_host(tree), expected)
    assert found[0]["w"].array.array.shape == (32, 12)
    assert found[0]["w"].sharding.spec[0] == "data"


def test_new_arrays_inside_are_those_of_one_device() -> None:
    def make() -> Any:
        key = jax.random.key(0)
        return {
            "zeros": axn.zeros((Vocab, Embed)),
            "arange": axn.arange(Vocab),
            "normal": axn.random.normal(key, (Embed, Vocab)),
            "layer": nn.Linear.init(Embed, Vocab, key=key),
        }

    expected = make()
    with jax.set_mesh(devices_of(data=8)):
        made = axn.named_jit(make, {"vocab": "data"}, uneven="pad")()
    assert all(isinstance(x.array, PaddedArray) for x in jax.tree.leaves(made, is_leaf=axn.is_named_array))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), axn.to_host(made), expected)


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int64"])
def test_positions_have_any_dtype(dtype: str) -> None:
    """XLA would end the process if it scattered along uneven axes by positions that are not int32."""

    def both(x: axn.NamedArray, numbers: axn.NamedArray) -> Any:
        def loss(x: axn.NamedArray) -> Any:
            sums = axn.segment_sum(x, numbers, axn.Axis("segment", 3))
            taken = x.take("embed", numbers) * axn.take_along_axis(x, numbers, "embed", mode="promise_in_bounds")
            return axn.sum(axn.sin(sums)).array + axn.sum(taken).array

        return jax.value_and_grad(loss)(x)

    with jax.enable_x64(dtype == "int64"):
        numbers = np.arange(28, dtype=dtype) % 5  # the last of them are in no segment
        args = draw(Vocab, Embed), axn.named(numbers, "vocab")
        expected = jax.jit(both)(*args)
        with jax.set_mesh(devices_of(data=8)), axn.axis_mapping({"vocab": "data"}, uneven="pad"):
            found = axn.to_host(axn.named_jit(both)(*axn.shard(args)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


def test_checkpoints_have_true_sizes(tmp_path: Path) -> None:
    """Saved on eight devices; restored on three, on four, which divide the size, and by a template without padding."""
    mapping = {"vocab": "data"}
    keys = axn.named(jax.random.split(jax.random.key(0), 28), "vocab")
    tree = {"w": draw(Embed, Vocab), "keys": keys, "raw": X.array}
    placement = {"w": mapping, "keys": mapping, "raw": jax.P("data")}
    saved = axn.shard(tree, placement, devices_of(data=8), uneven="pad")
    assert sum(map(is_padded, jax.tree.leaves(saved, is_leaf=is_padded))) == 3
    axn.state.save_checkpoint(tmp_path / "1", {n: x if n == "keys" else poisoned(x) for n, x in saved.items()})
    turned = tree | {"w": tree["w"].rearrange(("vocab", "embed"))}
    for template, expected, devices, size in (
        (saved, tree, 3, 30),
        (jax.eval_shape(lambda: turned), turned, 3, 30),
        (tree, tree, 4, 28),
    ):
        mesh = devices_of(data=devices)
        found: Any = axn.state.restore_checkpoint(tmp_path / "1", template, placement, mesh=mesh, uneven="pad")
        arrays = [stored(raw(x)) for x in found.values()]
        assert [max(x.shape) for x in arrays] == [size] * 3
        assert all(len(x.sharding.device_set) == devices and "data" in x.sharding.spec for x in arrays)
        assert_named(axn.to_host(found["w"]), expected["w"])
        np.testing.assert_array_equal(axn.to_host(found["raw"]), X.array)
        data = jax.random.key_data(axn.unshard(found["keys"], mesh=mesh).array)
        np.testing.assert_array_equal(data, jax.random.key_data(keys.array))
    plain: Any = axn.state.restore_checkpoint(tmp_path / "1", tree)
    assert_named(plain["w"], tree["w"])
    kept: Any = axn.state.restore_checkpoint(tmp_path / "1", saved)  # the sharding of the template
    assert kept["w"].array.array.shape == (8, 32)


def test_state_dicts_have_true_sizes(tmp_path: Path) -> None:
    tree = {"w": draw(Embed, Vocab), "b": X}
    with jax.set_mesh(devices_of(data=8)), axn.axis_mapping({"vocab": "data"}, uneven="pad"):
        saved = poisoned(axn.shard(tree))
        entries = axn.state.to_numpy_state_dict(saved)
        loaded = axn.state.from_state_dict(saved, entries)
        assert loaded["w"].array.array.shape == (8, 32)
        jax.tree.map(np.testing.assert_array_equal, axn.to_host(loaded), axn.to_host(tree))
        axn.state.save_state_dict(axn.state.to_state_dict(saved), tmp_path / "w.safetensors")
    written = axn.state.load_state_dict(tmp_path / "w.safetensors")
    np.testing.assert_array_equal(written["w"], tree["w"].array)
    np.testing.assert_array_equal(written["b"], X.array)


def test_compiled_functions_call_each_other() -> None:
    inner = axn.named_jit(lambda x: 2 * x)
    with jax.set_mesh(devices_of(data=8)), axn.axis_mapping({"vocab": "data"}, uneven="pad"):
        placed = poisoned(axn.shard(X))
        once = axn.named_jit(lambda x: inner(x) + axn.sum(inner(x)))
        loop = axn.named_jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, carry: inner(carry), x))
        slope = axn.named_jit(jax.grad(lambda x: axn.sum(axn.sin(inner(x))).scalar()))
        found = [axn.to_host(fn(placed)) for fn in (once, loop, slope)]
        assert is_padded(inner(placed).array), "the same program, called outside"
        assert is_padded(jax.eval_shape(inner, placed).array)
        assert "all-gather" not in str(once.lower(placed).compile().as_text())
    for x, expected in zip(found, (2 * X + axn.sum(2 * X), 8 * X, 2 * axn.cos(2 * X)), strict=True):
        np.testing.assert_allclose(x.array, expected.array, rtol=1e-5)


@pytest.mark.parametrize("over", ["x", ("x", "y")], ids=str)
def test_gathered_arrays_keep_the_signs_of_zeros(over: Any) -> None:
    x = axn.named(-np.zeros(11, np.float32), "vocab")
    with jax.set_mesh(devices_of(x=4, y=2)), axn.axis_mapping({"vocab": over}, uneven="pad"):
        padded = axn.shard(x)
        assert is_padded(padded.array)
        for gathered in (axn.unshard(padded), axn.unshard(axn.named_jit(lambda x: x * 1)(padded)), axn.to_host(padded)):
            assert np.signbit(np.asarray(gathered.array)).all()


def test_plans_refuse_padded_arrays() -> None:
    mesh = devices_of(data=8)
    placed, whole = axn.shard(X, {"vocab": "data"}, mesh, uneven="pad"), axn.shard(X, {}, mesh)
    for plan in (
        lambda: axn.transfer(placed, whole),
        lambda: axn.transfer(whole, placed),
        lambda: axn.remap(placed, {}, mesh),
    ):
        with pytest.raises(ValueError, match="is stored padded, which plans cannot copy"):
            plan()


def test_shard_moves_padded_arrays() -> None:
    x, mapping = draw(Vocab, Embed), {"vocab": "data", "embed": "model"}
    mesh, few = devices_of(data=4, model=2), devices_of(data=3, model=2)
    placed = axn.shard(x, mapping, few, uneven="pad")
    assert repr(placed.array) == "PaddedArray(float32[28, 8], stored as [30, 8])"
    assert axn.shard(placed, mapping, few, uneven="pad").array is placed.array
    kept = axn.unshard(poisoned(placed), {"embed": "model"}, few)
    assert kept.array.sharding.spec == jax.P("data", None)
    others: list[Any] = [axn.unshard(poisoned(placed), mesh=few), axn.shard(placed, mapping, mesh), kept]
    for y in others:
        assert_named(axn.to_host(y), x)
    turned = axn.shard(placed, {"vocab": ("model", "data"), "embed": None}, mesh, uneven="pad")
    assert stored(turned.array).shape == (32, 8)
    assert_named(axn.to_host(turned), x)


def test_batches_are_stored_padded() -> None:
    mesh, x = devices_of(data=8), draw(LARGE, Embed)
    with pytest.raises(ValueError, match=r"cannot be sharded over data=8.* pass `uneven='pad'`"):
        axn.sharding.from_process_local_data(x, "batch", "data", mesh)
    loaded = axn.sharding.from_process_local_data(x, "batch", "data", mesh, uneven="pad")
    assert loaded.array.array.shape == (104, 8)
    assert_named(axn.to_host(loaded), x)


# --- refusals ---


def test_without_the_setting_it_is_an_error_that_names_it() -> None:
    placed = axn.shard(X, {"vocab": "data"}, devices_of(data=8), uneven="pad")
    message = "28 is not a multiple of 8.*pass `uneven='pad'` to axonym.axis_mapping, shard, named_jit or fsdp"
    with jax.set_mesh(devices_of(data=8)):
        for attempt in (
            lambda: axn.shard(X, {"vocab": "data"}),
            lambda: axn.named_jit(lambda x: 2 * x, {"vocab": "data"})(placed),
            lambda: axn.named_jit(lambda: axn.sum(axn.zeros(Vocab)), {"vocab": "data"})(),
        ):
            with pytest.raises(ValueError, match=message):
                attempt()
    untyped: Any = "zeros"
    for wrong in (axn.axis_mapping, lambda **k: axn.named_jit(abs, **k), lambda **k: axn.shard(X, {}, **k)):
        with pytest.raises(ValueError, match="`uneven` is 'pad', 'replicate' or None, got 'zeros'"):
            wrong(uneven=untyped)
    with pytest.raises(ValueError, match=r"^from_process_local_data: `uneven` is 'pad' or None, got 'replicate'"):
        axn.sharding.from_process_local_data(np.ones(28), mesh=devices_of(data=8), uneven="replicate")


@pytest.mark.parametrize("compiled", [axn.named_jit, hax.named_jit])
def test_pad_stays_active_under_replicate(compiled: Any) -> None:
    step = compiled(lambda x: 2 * x, uneven="replicate")  # of another mapping than the active one
    with jax.set_mesh(devices_of(data=8)), axn.axis_mapping({"vocab": "data"}, uneven="pad"):
        found = step(axn.shard(X))
        assert is_padded(raw(found)) and is_padded(raw(hax.shard(X)))
        np.testing.assert_array_equal(axn.unshard(found).array, 2 * X.array)


def test_explicit_and_manual_mesh_axes_are_refused_by_name() -> None:
    mapping = {"vocab": "data"}
    with jax.set_mesh(axn.make_mesh({"data": 8}, explicit=True)), axn.axis_mapping(mapping, uneven="pad"):
        for attempt in (lambda: axn.shard(X), axn.named_jit(lambda: axn.zeros(Vocab))):
            with pytest.raises(ValueError, match="`uneven='pad'` needs Auto mesh axes, but 'data' is Explicit"):
                attempt()
    odd = axn.Axis("vocab", 30)

    def inside(x: axn.NamedArray) -> axn.NamedArray:
        return x + axn.sum(axn.shard(x.broadcast_axis(odd)))

    with jax.set_mesh(devices_of(data=4, model=2)), axn.axis_mapping(mapping, pos="model", uneven="pad"):
        with pytest.raises(ValueError, match=r"axis 'vocab' of size 30 .* is not a multiple of 4\.(?!.*uneven)"):
            axn.named_jit(axn.shard_map(lambda x: x))(draw(odd))
        with pytest.raises(ValueError, match="needs Auto mesh axes, but 'model' is Manual"):
            axn.named_jit(axn.shard_map(inside, axis_names={"model"}))(draw(Pos))


PADDED_OPERATIONS = {
    "add": lambda x: x + 1,
    "dot": lambda x: axn.dot(x, x, axis="vocab"),
    "index": lambda x: x["vocab", 3],
    "like": axn.zeros_like,
    "method": lambda x: x.astype("int32"),
    "scan": lambda x: axn.map(lambda row: row, "vocab")(x),
    "stencil": axn.stencil(lambda u: u(vocab=1) - u(), {"vocab": "edge"}),
    "vmap": lambda x: axn.vmap(lambda row: row, "vocab")(x),
    "jax.numpy": lambda x: jnp.sum(x.array),
    "operator": lambda x: x.array + 1,
    "numpy": lambda x: np.asarray(x.array),
    "jit": jax.jit(lambda x: 2 * x),
    "grad": jax.grad(lambda x: axn.sum(x).scalar()),
}


@pytest.mark.parametrize("operation", PADDED_OPERATIONS)
def test_nothing_computes_with_padded_arrays(operation: str) -> None:
    placed = axn.shard(X, {"vocab": "data"}, devices_of(data=8), uneven="pad")
    with pytest.raises((TypeError, AttributeError), match=r"stored padded to .*axonym.named_jit or axonym.fsdp"):
        PADDED_OPERATIONS[operation](placed)


def test_uneven_axes_need_a_compiled_function() -> None:
    with jax.set_mesh(devices_of(data=8)), axn.axis_mapping({"vocab": "data"}, uneven="pad"):
        with pytest.raises(ValueError, match=r"zeros .*\(vocab=28\).*compiled by axonym.named_jit"):
            axn.zeros(Vocab)
        with pytest.raises(ValueError, match=r"shard: .*\(vocab=28\).*Differentiate in a function compiled by"):
            jax.grad(lambda x: axn.sum(axn.shard(x)).scalar())(X)
        with axn.axis_mapping({"embed": None}, merge=True):
            assert is_padded(axn.shard(X).array)
        lines = axn.debug.describe_shardings(axn.shard(X)).splitlines()
        assert lines[:2] == [
            "the array: float32[vocab=28], 16 B of 128 B on each of 8 CPU devices",
            "  vocab=32 over data=8, 4 on each",
        ]


def test_reports_know_donated_arrays_that_are_stored_padded() -> None:
    """They are the arguments of the program, with their padding."""
    params, tokens = vocabulary(1001)
    with jax.set_mesh(devices_of(data=8)), axn.axis_mapping({"vocab": "data"}, uneven="pad"):
        state = jax.eval_shape(axn.named_jit(start), params)
        report = axn.insight.explain(axn.named_jit(step_of(of_tokens), donate_args=(True, False)), state, tokens)
    rows = 1008 // 8
    assert report.arguments["state"] == 3 * 2 * 4 * rows * Embed.size + 4  # table and head, with their moments
    assert any(c.reason == "sums over vocab, which is sharded over data" for c in report.collectives)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x["z", axn.argsort(x, "z")],
        lambda x: axn.random.permutation(jax.random.key(0), x, "z"),
    ],
    ids=["look-up", "permutation"],
)
@pytest.mark.parametrize("over", ["data", "model"])
def test_gradients_beside_padded_results(auto_mesh: Mesh, fn: Any, over: Any) -> None:
    """XLA scatters padding if the result of a look-up is returned, stored padded, beside the gradient."""
    x = axn.named(jnp.asarray(np.random.default_rng(0).normal(size=7), jnp.float32), "z")

    def step(x: axn.NamedArray) -> Any:
        def loss(x: axn.NamedArray) -> Any:
            y = fn(x)
            return (y * axn.cos(axn.arange(y.resolve_axis("z"), dtype=jnp.float32))).sum(), y

        return axn.grad(loss, has_aux=True)(x)

    expected = step(x)
    with axn.set_mesh(auto_mesh), axn.axis_mapping({"z": over}, uneven="pad"):
        found = axn.unshard(jax.block_until_ready(axn.named_jit(step)(axn.shard(x))))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


# --- operations with partitioning of their own, and derivatives ---

LOGITS = axn.named(np.random.default_rng(0).normal(size=(7, 11)).astype(np.float32), ("batch", "vocab"))
PICKED: dict[str, Any] = {
    "top_k": lambda x: axn.top_k(x, "vocab", 3),
    "categorical": lambda x: axn.random.categorical(jax.random.key(3), x, "vocab"),
}


@pytest.mark.parametrize("mapping", [{"batch": "data"}, {"vocab": "data"}, {"vocab": ("data", "model")}], ids=str)
@pytest.mark.parametrize("name", PICKED)
def test_picks_from_uneven_logits(name: str, mapping: dict[str, Any]) -> None:
    """JAX refused the padded shards of their partitioning rules where the argument came in one piece."""
    pick = PICKED[name]
    expected = jax.jit(pick)(LOGITS)
    with jax.set_mesh(devices_of(data=4, model=2)):
        compiled = {
            "in_placement": axn.named_jit(pick, mapping, in_placement=mapping, uneven="pad"),
            "fsdp": axn.fsdp(pick, mapping, {}, uneven="pad"),
            "padded": axn.named_jit(pick, mapping, uneven="pad"),
        }
        for how, step in compiled.items():
            found = jax.block_until_ready(step(axn.shard(LOGITS, mapping, uneven="pad") if how == "padded" else LOGITS))
            if how != "fsdp" and "batch" in mapping:
                assert all(is_padded(x.array) for x in jax.tree.leaves(found, is_leaf=axn.is_named_array)), how
            jax.tree.map(np.testing.assert_array_equal, axn.unshard(found), expected)


def test_gradients_of_a_compiled_function_outside_jit() -> None:
    mapping = {"vocab": "data"}
    with jax.set_mesh(devices_of(data=8)):
        loss = axn.named_jit(lambda x: axn.sum(axn.sin(x) * x).scalar(), mapping, uneven="pad")
        x = poisoned(axn.shard(X, mapping, uneven="pad"))
        expected = jax.grad(lambda x: axn.sum(axn.sin(x) * x).scalar())(X)
        value, gradient = axn.value_and_grad(loss)(x)
        for found in (jax.grad(loss)(x), axn.grad(loss)(x), gradient):
            assert is_padded(found.array) and found.axes == X.axes
            np.testing.assert_allclose(axn.unshard(found).array, expected.array, rtol=1e-5)
        np.testing.assert_allclose(value, loss(x))
