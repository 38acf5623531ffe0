"""Results, orders of axes and errors that code written for Haliax depends on, with the values that Haliax gives."""

from __future__ import annotations

import re
import typing
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import axonym as axn
import axonym.haliax as hax
import axonym.haliax.nn as hnn
from tests.helpers import spec

D, H, W, Z = hax.make_axes(d=2, h=3, w=4, z=3)
X = hax.named(jnp.arange(24).reshape(2, 3, 4), (D, H, W))

# --- arrays without axes ---


def test_a_condition_without_axes_is_a_scalar() -> None:
    """So the branches of `jax.lax.cond` agree."""
    chosen = hax.where(hax.named(True, ()), -1, 3)
    assert isinstance(chosen, jax.Array) and chosen == -1
    assert jax.lax.cond(True, lambda: hax.where(hax.named(True, ()), -1, 3), lambda: jnp.int32(0)) == -1
    assert hax.where(hax.named(False, ()), X, 0).names == ("d", "h", "w")
    (positions,) = hax.where(hax.named([False, True], "x"), fill_value=-1, new_axis=hax.Axis("found", 2))
    assert positions.array.tolist() == [1, -1]
    with pytest.raises(ValueError, match="pass either"):
        hax.where(hax.named([False, True], "x"), 1)


RAW = np.arange(4)


@pytest.mark.parametrize("compute", [hax.add, lambda r, n: hax.add(n, r)])
def test_a_raw_array_and_a_named_one_without_axes(compute: Any) -> None:
    for raw in (jnp.asarray(RAW), RAW):
        result = compute(raw, hax.named(2, ()))
        assert isinstance(result, (jax.Array, np.ndarray)) and result.tolist() == [2, 3, 4, 5]
    assert hax.maximum(RAW, hax.named(2, ())).tolist() == [2, 2, 2, 3]
    for refused in (lambda: compute(jnp.asarray(RAW), hax.ones(W)), lambda: jnp.asarray(RAW) + hax.named(2, ())):
        with pytest.raises(TypeError, match="an operand has no axis names"):
            refused()


# --- abstract arrays, meshes ---


@pytest.mark.parametrize("donate", [None, (True,), (False,)])
def test_abstract_arrays_are_static(donate: Any) -> None:
    abstract = jax.ShapeDtypeStruct((2,), jnp.float32)
    tree = {"raw": abstract, "named": hax.NamedArray(abstract, D), "x": jnp.ones(2)}
    step = hax.named_jit(lambda tree: (tree, jnp.zeros(tree["raw"].shape)), donate_args=donate)
    back, made = step(tree)
    assert back["raw"] == abstract and back["named"].array == abstract and made.shape == (2,)
    assert jax.eval_shape(step, tree)[0]["x"].shape == (2,)
    assert hax.named_jit(lambda *, t: t["raw"], donate_kwargs={"t": True})(t=tree | {"x": jnp.ones(2)}) == abstract
    assert hax.named_jit(lambda x: x * 2).lower(abstract).out_info.shape == (2,)


@pytest.mark.filterwarnings("ignore:.*context manager has been deprecated")
@pytest.mark.parametrize("mapping", [{"d": "data"}, None], ids=str)
def test_draws_under_an_older_mesh(mapping: Any) -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    with mesh, hax.axis_mapping(mapping or {}):
        drawn = hax.random.normal(jax.random.key(0), (D, H))
        layer = hax.nn.Linear.init(D, H, key=jax.random.key(0))
    np.testing.assert_array_equal(drawn.array, hax.random.normal(jax.random.key(0), (D, H)).array)
    if mapping:
        assert spec(drawn) == ("data", None) and spec(layer.weight) == (None, "data")


def test_what_the_mesh_does_not_divide_is_replicated_in_jit(auto_mesh: Mesh) -> None:
    """With a warning; the native functions refuse it, and so do these outside of jit."""
    odd, mapping = hax.ones({"a": 5}), {"a": "data"}
    calls = {
        "shard": jax.jit(lambda x: hax.shard(x, mapping)),
        "active": hax.named_jit(lambda x: hax.auto_sharded(x), axis_resources=mapping),
        "arguments": hax.named_jit(lambda x: x * 2, in_axis_resources=mapping),
        "fsdp": hax.fsdp(lambda x: x * 2, mapping, {"b": "model"}),
    }
    with jax.set_mesh(auto_mesh):
        for name, call in calls.items():
            with pytest.warns(UserWarning, match=r"'a' is replicated, since data=\d gives \d shards"):
                assert call(odd).array.sharding.is_fully_replicated, name
        with pytest.raises(ValueError, match="is not a multiple of"):
            hax.shard(odd, mapping)
        for strict in (jax.jit(lambda x: axn.shard(x, mapping)), axn.named_jit(lambda x: x * 2, mapping)):
            with pytest.raises(ValueError, match="is not a multiple of"):
                strict(odd)
        with hax.axis_mapping(mapping), pytest.warns(UserWarning, match="is replicated"):
            layer = hax.named_jit(lambda key: hax.nn.Linear.init(odd.axes, D, key=key))(jax.random.key(0))
        assert layer.weight.array.sharding.is_fully_replicated


class Table(eqx.Module):
    other: jax.Array
    weight: jax.Array = hax.field(axis_names=("d", "h"))


def test_raw_fields_with_names() -> None:
    tree = {"table": Table(jnp.ones(2), jnp.ones((2, 3))), "x": hax.ones(D)}
    found = hax.partitioning.pspec_for(tree, {"d": "data", "h": "model"}, preserve_existing_shardings=False)
    assert found["table"].weight == P("data", "model") and found["table"].other == P(None) and found["x"] == P("data")
    kept = hax.partitioning.pspec_for(tree, {"d": "data"})
    assert kept["table"].weight is None and kept["x"] is None


# --- functions over an axis, draws ---


def test_vmap_over_no_axes() -> None:
    assert hax.vmap(lambda x: x + 1, ())(X).names == X.names
    mask = hax.nn.attention.causal_mask(D, H, hax.named(1, ()), jnp.array(0))
    assert mask.names == ("d", "h") and mask.array.tolist() == [[True, True, False], [True, True, True]]


def test_categorical_draws_along_the_axis_where_it_stands() -> None:
    logits = hax.zeros({"a": 4, "b": 3})
    assert hax.random.categorical(jax.random.PRNGKey(0), logits, "a").tolist() == [0, 3, 2]
    drawn = hax.random.categorical(jax.random.PRNGKey(0), logits, "a", shape=(hax.Axis("s", 2), hax.Axis("b", 3)))
    assert drawn.tolist() == [[0, 3, 2], [3, 1, 0]]


def test_uniform_broadcasts_its_bounds_before_it_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the compiler may round a draw differently from Haliax."""
    bounds: list[tuple[int, ...]] = []

    def uniform(key: Any, minval: Any, maxval: Any, shape: Any, dtype: Any) -> jax.Array:
        bounds.extend((jnp.shape(minval), jnp.shape(maxval)))
        return jnp.clip(jnp.zeros(shape, dtype), minval, maxval)

    monkeypatch.setattr(jax.random, "uniform", uniform)
    low = hax.arange(hax.Axis("a", 4), start=-5.0)
    hax.random.uniform(jax.random.PRNGKey(0), {"a": 4, "b": 5}, minval=low, maxval=0.5)
    assert bounds == [(4, 5), ()]


# --- orders ---

OF_WZ = hax.zeros((W, Z), dtype=int)


@pytest.mark.parametrize(
    "compute, names",
    [
        (lambda: hax.tril(X, "d", "h"), "wdh"),
        (lambda: hax.triu(X, "h", "d"), "whd"),
        (lambda: X["d", hax.zeros(Z, dtype=int), "w", hax.zeros(Z, dtype=int)], "zh"),
        (lambda: X["d", hax.zeros(Z, dtype=int), "h", 0], "zw"),
        (lambda: X["h", 1:], "dhw"),
        (lambda: X["w", [0, 3]], "dhw"),
        (lambda: hax.take(X, "h", OF_WZ), "zdw"),
        (lambda: hax.rearrange(X, "{d h} -> ... h d ..."), "hdw"),
        (lambda: hax.rearrange(X, "a b c -> ... b ... a"), "hwd"),
        (lambda: hax.rearrange(X, "a ... c -> c ... a ..."), "wdh"),
        (lambda: hax.rearrange(X, "a b c -> b ... (z: a) ..."), "hzw"),
        (lambda: hax.rearrange(X, "{d w} -> ... (z: d w) ..."), "zh"),
        (lambda: hax.rearrange(X, "d (q: i j) w -> i w d j", i=1), "iwdj"),
        (lambda: hax.einsum("{d w} -> w ...", X, hax.ones(W)), "wdh"),
        (lambda: hax.einsum("{q} -> ... q ...", X, hax.ones(W), q="h"), "dhw"),
        (lambda: hax.einsum("-> w ... d", X, hax.ones(W)), "whd"),
    ],
)
def test_orders(compute: Any, names: str) -> None:
    assert "".join(compute().names) == names


def test_raw_index_arrays_pick_along_their_axis() -> None:
    index = jnp.array([3, 0])
    assert X.take("w", index).tolist() == hax.take(X, "w", index).tolist() == X["w", index].tolist()


# --- errors, dtypes, layers ---


def test_errors() -> None:
    with pytest.raises(TypeError, match="`shift` is a scalar"):
        hax.roll(X, hax.ones(D), "h")
    for equation in ("d h w -> d", "{d} -> ..."):
        with pytest.raises(ValueError, match=r"'?q'? is given by keyword but does not appear"):
            hax.einsum(equation, X, q="h")


def test_dtypes_of_annotations() -> None:
    annotation = hax.haxtyping.f32["d h"]
    assert typing.get_args(annotation)[1].dtype == jnp.float32
    assert str(typing.get_args(hax.haxtyping.Float["d"])[1].dtype) == "float"
    assert typing.get_args(annotation)[0] is hax.NamedArray and hax.ones((D, H)).matches_axes(annotation)
    assert not hax.ones((D, H), dtype=jnp.int32).matches_axes(hax.haxtyping.Float["d h"])
    assert isinstance(jnp.ones(2), hax.haxtyping.f32[jax.Array, "n"])


@pytest.mark.parametrize("layer", [hax.nn.LayerNorm, hax.nn.RmsNorm])
def test_norms_keep_half_precision(layer: Any) -> None:
    x = (X * jnp.bfloat16(0.25)).astype(jnp.bfloat16)
    norm = layer.init(W)
    assert norm.weight.dtype == jnp.float32 and norm(x).dtype == jnp.bfloat16 and norm(X).dtype == jnp.float32
    native = getattr(axn.nn, layer.__name__)(W, norm.weight, norm.bias)(x)
    np.testing.assert_array_equal(norm(x).array, native.array.astype(jnp.bfloat16))


# --- the newest Haliax ---


def test_shard_map(auto_mesh: Mesh) -> None:
    @hax.shard_map
    def less(x: Any) -> Any:
        return {"expanded": hax.broadcast_axis(x - 1, W), "total": jax.lax.psum(x.sum("d").array, "data")}

    x = hax.arange({"d": 8, "h": 3})
    with jax.set_mesh(auto_mesh), hax.axis_mapping({"d": "data"}):
        found = jax.block_until_ready(less(x))
        assert found["expanded"].names == ("w", "d", "h") and "data" in spec(found["expanded"])
        np.testing.assert_array_equal(found["expanded"]["w", 0].array, x.array - 1)
        np.testing.assert_array_equal(found["total"], x.array.sum(0))
    checked = hax.shard_map(lambda x: x * 2, mesh=auto_mesh, axis_mapping={"d": "data"}, check_rep=True)
    np.testing.assert_array_equal(checked(x).array, x.array * 2)


def test_out_sharding(explicit_mesh: Mesh) -> None:
    x, y = hax.ones({"d": 8, "h": 3}), hax.ones({"h": 3})
    with jax.set_mesh(explicit_mesh):
        assert spec(jax.jit(lambda x: hax.dot(x, y, axis="h", out_sharding=P("data")))(x)) == ("data",)
        assert spec(jax.jit(lambda x: hax.einsum("d h, h -> d", x, y, out_sharding=P("data")))(x)) == ("data",)
    with jax.set_mesh(explicit_mesh), hax.axis_mapping({"d": "data"}):
        assert spec(jax.jit(lambda x: hax.dot(x, y, axis="h"))(x)) == ("data",)
    assert hax.partitioning.all_mesh_axes_explicit(explicit_mesh, P("data", None))
    assert not hax.partitioning.all_mesh_axes_explicit(None, P("data"))
    assert hax.partitioning.get_pspec_for_manual_mesh("d", {"d": "data"}, mesh=explicit_mesh) == P("data")


def test_weights_of_losses() -> None:
    losses, weight = hax.named([1.0, 5.0, 9.0], "x"), hax.named([3.0, 1.0, 0.0], "x")
    reduce_loss = hax.nn.loss.maybe_reduce_loss
    assert reduce_loss(losses, hax.mean, None, None, weight).item() == 2
    assert reduce_loss(losses, hax.sum, "x", hax.named([True, False, True], "x"), weight).item() == 3
    assert reduce_loss(losses, None, None, None, weight).tolist() == [3, 5, 0]
    assert reduce_loss(losses, hax.mean, None, None, weight * 0).item() == 0
    numbers = 1 - hax.nn.one_hot(-1, hax.Axis("x", 3), dtype=jnp.float32)
    assert reduce_loss(losses, hax.mean, None, numbers).item() == 3
    assert reduce_loss(losses, None, None, numbers).tolist() == [1, 5, 0]
    logits = hax.named([[0.0, 1.0], [2.0, 0.0]], ("x", "label"))
    targets, weight = hax.nn.one_hot(hax.named([0, 1], "x"), hax.Axis("label", 2)), hax.named([1.0, 3.0], "x")
    each = hax.nn.cross_entropy_loss(logits, "label", targets, None)
    found = hax.nn.cross_entropy_loss(logits, "label", targets, hax.sum, None, weight, "x")
    np.testing.assert_allclose(found.array, (each * weight).sum().array, rtol=1e-6)
    found = hax.nn.binary_cross_entropy_loss(logits, targets, hax.sum, weight=weight)
    np.testing.assert_allclose(
        found.array, (hax.nn.binary_cross_entropy_loss(logits, targets, None) * weight).sum().array, rtol=1e-6
    )


def test_ragged_dot() -> None:
    lhs, rhs = jax.random.normal(jax.random.key(0), (6, 4)), jax.random.normal(jax.random.key(1), (2, 4, 3))
    sizes = jnp.array([2, 4])
    expected = jnp.concatenate([lhs[:2] @ rhs[0], lhs[2:] @ rhs[1]])
    np.testing.assert_allclose(hax.nn.ragged_dot(lhs, rhs, sizes), expected, rtol=1e-5)
    from axonym.haliax.nn.ragged_dot import ragged_dot

    assert ragged_dot is hax.nn.ragged_dot
    op = hax.quantization.Fp8RaggedDotOp.init(amax_history_length=2, rev_dtype=jnp.float8_e4m3fn)
    np.testing.assert_allclose(ragged_dot(lhs, rhs, sizes, op=op), expected, atol=0.3)
    gradient = jax.grad(lambda op: ragged_dot(lhs, rhs, sizes, op=op).sum())(op)
    overwrites, left = hax.quantization.partition_for_grad_overwrite({"op": gradient, "w": lhs})
    assert overwrites["op"].input_amax_history[0] == jnp.abs(lhs).max() and left["op"] is None
    with pytest.raises(ValueError, match="without `implementation`"):
        ragged_dot(lhs, rhs, sizes, implementation="xla", op=op)


def test_dtypes_of_fp8() -> None:
    x = jnp.array([[300.0, 1.0]])
    for dtype, largest in ((jnp.float8_e4m3fn, 448), (jnp.float8_e5m2, 57344)):
        op = hax.quantization.Fp8DotGeneralOp.init(2, fwd_dtype=dtype)
        found = op(x * 1000, jnp.ones((2, 1)), (((1,), (0,)), ((), ())))
        np.testing.assert_allclose(found, min(largest, 300000) + min(largest, 1000), rtol=0.1)


class Scale(eqx.Module):
    weight: jax.Array
    shared: float = eqx.field(static=True, default=2.0)

    @staticmethod
    def init(key: jax.Array) -> Scale:
        return Scale(jax.random.normal(key, (2,)))

    def __call__(self, x: jax.Array, shift: Any = 0.0) -> jax.Array:
        return x * self.weight + shift


def test_stacked_raw_arrays() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    layers = hax.nn.array_stacked.ArrayStacked.init(3, Scale, gradient_checkpointing=True)(keys)
    x, shifts = jnp.ones(2), jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_allclose(layers.fold(x), jnp.prod(layers.stacked.weight, 0), rtol=1e-6)
    expected = x
    for i, layer in enumerate(layers.unstacked()):
        expected = layer(expected, shifts[:, i])
    np.testing.assert_allclose(layers.fold(x, shifts, in_axes=1), expected, rtol=1e-6)
    last, outputs = layers.scan_via(lambda layer, c, *, s: (c + s, c), in_axes=(None, {"s": 0}))(0.0, s=jnp.arange(3.0))
    assert last == 3 and outputs.tolist() == [0, 0, 1]
    mapped = layers.vmap_via(lambda layer, x: layer(x))(x)
    np.testing.assert_allclose(mapped, layers.stacked.weight, rtol=1e-6)
    gradient = jax.grad(lambda layers: layers.fold(x).sum())(layers)
    assert gradient.stacked.weight.shape == (3, 2)
    norms = hax.tree_util.scan_aware_tree_map(lambda w: w / jnp.linalg.norm(w), layers)
    np.testing.assert_allclose(jnp.linalg.norm(norms.stacked.weight, axis=1), 1, rtol=1e-6)
    entries = layers.to_state_dict("m")
    assert sorted(entries) == ["m.0.weight", "m.1.weight", "m.2.weight"]
    back = hax.state_dict.from_state_dict(layers, entries, "m")
    np.testing.assert_array_equal(back.stacked.weight, layers.stacked.weight)
    with pytest.raises(ValueError, match="is not the 3 layers"):
        layers.fold(x, shifts, in_axes=0)


class Transposed(axn.state.ModuleWithStateDictSerialization):
    """A layer whose own methods expect the arrays of all layers, as code written for Haliax does."""

    weight: hax.NamedArray
    eps: float = 0.1

    @staticmethod
    def init(key: jax.Array) -> Transposed:
        return Transposed(hax.random.normal(key, (H, W)))

    def to_state_dict(self, prefix: str | None = None) -> dict[str, Any]:
        assert self.weight.names == ("z", "h", "w")
        weight = jnp.swapaxes(self.weight.array, -1, -2)
        return {f"{prefix}.{i}.t": weight[:, i] for i in range(4)} | {f"{prefix}.eps": self.eps}

    def from_state_dict(self, state_dict: Any, prefix: str | None = None) -> Transposed:
        rows = [state_dict[f"{prefix}.{i}.t"] for i in range(4)]
        assert all(isinstance(row, (jax.Array, np.ndarray)) and row.shape == (3, 3) for row in rows)
        loaded = jnp.swapaxes(jnp.stack(rows, 1), -1, -2)
        return eqx.tree_at(lambda m: (m.weight.array, m.eps), self, (loaded, state_dict[f"{prefix}.eps"]))


def stacked_layers(layer: Any) -> Any:
    return hnn.Stacked.init(Z, layer)(jax.random.split(jax.random.key(0), 3))


@pytest.mark.parametrize("traced", [False, True])
def test_own_methods_of_stacked_layers_get_all_layers(traced: bool, mesh: Mesh) -> None:
    layers = stacked_layers(Transposed)
    entries = hax.state_dict.to_state_dict(layers, "m")
    assert entries.keys() == {f"m.{z}.{w}.t" for z in range(3) for w in range(4)} | {"m.eps"}
    np.testing.assert_array_equal(entries["m.2.1.t"], layers.stacked.weight.array[2, :, 1])
    template = eqx.filter_eval_shape(stacked_layers, Transposed)
    numbers, arrays = {"m.eps": 0.5}, {key: x for key, x in entries.items() if key != "m.eps"}

    def load(arrays: Any) -> Any:
        return hax.state_dict.from_state_dict({"m": template}, numbers | arrays)["m"].stacked

    with jax.set_mesh(mesh), hax.axis_mapping({"w": "model"}):
        loaded = hax.named_jit(load)(arrays) if traced else load(arrays)
    np.testing.assert_array_equal(loaded.weight.array, layers.stacked.weight.array)
    assert spec(loaded.weight) == (None, None, "model") and loaded.eps == 0.5


class Plain(eqx.Module):
    weight: hax.NamedArray
    steps: jax.Array
    eps: float = 0.1

    @staticmethod
    def init(key: jax.Array) -> Plain:
        return Plain(hax.random.normal(key, W), jnp.zeros((), jnp.int8))


def test_entries_of_all_layers(tmp_path: Any, mesh: Mesh) -> None:
    """A file is read one shard at a time, and entries of a number in each layer are accepted if they are equal."""
    layers, path = stacked_layers(Plain), tmp_path / "layers.safetensors"
    arrays, rest = eqx.partition(layers, eqx.is_array)
    axn.state.save_state_dict(hax.state_dict.to_state_dict(arrays, "m"), path)
    entries = dict(axn.state.load_state_dict(path))
    assert entries.keys() == {f"m.{z}.{key}" for z in range(3) for key in ("weight", "steps")}
    template = eqx.combine(jax.eval_shape(lambda: arrays), rest)
    load = hax.state_dict.from_state_dict
    with jax.set_mesh(mesh), hax.axis_mapping({"w": "data"}):
        loaded = load(template, entries | {f"m.{z}.eps": 0.5 for z in range(3)}, "m")
    assert spec(loaded.stacked.weight) == (None, "data") and loaded.stacked.eps == 0.5
    np.testing.assert_array_equal(loaded.stacked.weight.array, layers.stacked.weight.array)
    assert loaded.stacked.steps.dtype == jnp.int8
    unfit = {
        "'m.*.eps' differs among the layers": {f"m.{z}.eps": 0.5 * z for z in range(3)},
        "'m.1.steps' has values from 300 to 300, which int8 cannot represent": {"m.1.steps": np.asarray(300)},
        "'m.1.steps' has dtype float64": {"m.1.steps": np.asarray(0.5)},
        "'m.3.weight' is one layer too many": {"m.3.weight": np.zeros(4, np.float32)},
        "'m.1.weight' has shape (5,)": {"m.1.weight": np.zeros(5, np.float32)},
    }
    for message, others in unfit.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            load(layers, entries | others, "m")
    fewer = {key: x for key, x in entries.items() if key != "m.1.weight"}
    with pytest.raises(ValueError, match=r"'m.1.weight' is missing"):
        load(layers, fewer, "m")
    with pytest.raises(ValueError, match=r"'m.2.weight' is missing"):
        load(layers, {}, "m")
    other = jax.tree.map(jnp.zeros_like, layers, is_leaf=eqx.is_array)
    kept = load(other, fewer, "m", strict=False).stacked.weight.array
    np.testing.assert_array_equal(kept, layers.stacked.weight.array.at[1].set(0))
    more = entries | {"m.3.weight": np.zeros(4, np.float32)}
    assert eqx.tree_equal(axn.state.from_state_dict(layers, more, "m", ignore=["m.3.*"]), layers)


class Changing(Plain):
    """A layer whose method changes the state dict, in each way that a dictionary has."""

    init = staticmethod(lambda key: Changing(hax.random.normal(key, W), jnp.zeros((), jnp.int8)))

    def from_state_dict(self, state_dict: Any, prefix: str | None = None) -> Any:
        d = state_dict.copy() | {"other": 1}
        d.update(twice=2 * d[f"{prefix}.weight"])
        d[f"{prefix}.weight"] = d.pop("twice")
        assert d.setdefault(f"{prefix}.steps", None).shape == (3,) and f"{prefix}.weight" in dict(d)
        return eqx.tree_at(lambda m: m.weight.array, self, d[f"{prefix}.weight"])


class Renamed(axn.state.ModuleWithStateDictSerialization):
    """A layer without a key of its own, and an entry that has another prefix."""

    weight: hax.NamedArray

    init = staticmethod(lambda key: Renamed(hax.random.normal(key, W)))

    def _state_dict_key_map(self) -> dict[str, str | None]:
        return {"weight": None}

    def to_state_dict(self, prefix: str | None = None) -> dict[str, Any]:
        return super().to_state_dict(prefix) | {"shared.table": np.arange(6)}


def test_own_methods_as_with_haliax() -> None:
    layers = stacked_layers(Changing)
    loaded = hax.state_dict.from_state_dict(layers, hax.state_dict.to_state_dict(layers, "m"), "m")
    np.testing.assert_array_equal(loaded.stacked.weight.array, 2 * layers.stacked.weight.array)
    layers = stacked_layers(Renamed)
    entries = hax.state_dict.to_state_dict(layers, "m")
    assert {key: x.shape for key, x in entries.items()} == {"m": (3, 4), "shared.table": (6,)}
    assert eqx.tree_equal(hax.state_dict.from_state_dict(layers, entries, "m"), layers)


@pytest.mark.parametrize("first", [False, True])
def test_entries_of_layers_win(first: bool) -> None:
    layers = stacked_layers(Plain)
    entries, stale = hax.state_dict.to_state_dict(layers, "m"), {"m.weight": np.zeros((3, 4), np.float32)}
    both = stale | entries if first else entries | stale
    assert eqx.tree_equal(hax.state_dict.from_state_dict(layers, both, "m"), layers)


def test_padded_layers_keep_their_numbers() -> None:
    make = hnn.Stacked.init(Z, Plain, divisible_by=2)
    layers = eqx.tree_at(lambda s: s.stacked.eps, make(jax.random.split(jax.random.key(0), 3)), 0.7)
    entries = hax.state_dict.to_state_dict(layers, "m")
    template = make(jax.random.split(jax.random.key(1), 3))
    assert eqx.tree_equal(hax.state_dict.from_state_dict(template, entries, "m"), layers)


def test_a_wrong_number_of_layers_is_not_written() -> None:
    class Constant(Renamed):
        init = staticmethod(lambda key: Constant(hax.random.normal(key, W)))

        def to_state_dict(self, prefix: str | None = None) -> dict[str, Any]:
            return {f"{prefix}.constant": np.arange(7)}

    with pytest.raises(ValueError, match=r"'m.constant' has shape \(7,\), which does not start with z\(3\)"):
        hax.state_dict.to_state_dict(stacked_layers(Constant), "m")


def test_stacked_layers_in_stacked_layers() -> None:
    class Group(eqx.Module):
        inner: hnn.Stacked

        @staticmethod
        def init(key: jax.Array) -> Group:
            return Group(hnn.Stacked.init(D, Plain)(jax.random.split(key, 2)))

    layers = stacked_layers(Group)
    entries = hax.state_dict.to_state_dict(layers, "m")
    np.testing.assert_array_equal(entries["m.2.inner.1.weight"], layers.stacked.inner.stacked.weight.array[2, 1])
    back = hax.state_dict.from_state_dict(layers, entries, "m")
    assert eqx.tree_equal(back, layers)


def test_marks() -> None:
    assert hax.testing.skip_if_not_enough_devices(9999, "why").args == (True,)
    assert "why" in hax.testing.skip_if_not_enough_devices(9999, "why").kwargs["reason"]


# --- positional functions as named ones ---


def test_wrapping() -> None:
    wrap = hax.wrap
    assert wrap.wrap_elemwise_binary(jnp.add)(X, hax.ones(W)).names == X.names
    assert wrap.wrap_elemwise_binary(jnp.add)(hax.named(1, ()), jnp.arange(2)).tolist() == [1, 2]
    assert wrap.wrap_reduction_call(jnp.sum, X, ("d", "h")).names == ("w",)
    assert wrap.wrap_reduction_call(jnp.sum, X, None, where=X > 22).item() == 23
    assert wrap.wrap_axiswise_call(jnp.sort, X, "d", single_axis_only=True).names == X.names
    with pytest.raises(ValueError, match="takes one axis"):
        wrap.wrap_axiswise_call(jnp.sort, X, ("d", "h"), single_axis_only=True)


def test_helpers() -> None:
    class Call(eqx.Module):
        __wrapped__ = property(lambda self: jnp.sum)

        def __call__(self) -> int:
            return 1

    assert hax.util.safe_wraps(jnp.sum)(Call())() == 1
    with pytest.raises(ValueError, match="no element"):
        hax.util.index_where(lambda x: x > 5, [1, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda x: hax.shard(x))(hax.ones(D))  # nothing says where, and nothing is said about it in jit


def test_what_public_code_takes_from_private_modules() -> None:
    class Tied(hax.state_dict.ModuleWithStateDictSerialization):
        weight: hax.NamedArray

        def to_state_dict(self, prefix: str | None = None) -> Any:
            return {"tied": 1, **hax._src.state_dict.default_eqx_module_to_state_dict(self, prefix)}

        def from_state_dict(self, state_dict: Any, prefix: str | None = None) -> Any:
            assert state_dict["tied"] == 1
            return hax._src.state_dict.default_eqx_module_from_state_dict(self, state_dict, prefix)

    entries = hax.state_dict.to_state_dict(Tied(X), "x")
    assert entries.keys() == {"tied", "x.weight"}
    assert hax.all(hax.state_dict.from_state_dict(Tied(0 * X), entries, "x").weight == X)
    plain = hax._src.state_dict.default_eqx_module_to_state_dict(hax.nn.Dropout(0.5))
    assert hax._src.state_dict.default_eqx_module_from_state_dict(hax.nn.Dropout(0.1), plain) is not None
    assert hax.ScanCheckpointPolicy._mk("nested").nested
    assert hax.quantization.CustomGradientAccumulation is axn.quantization.OverwriteWithGradient
    assert type(None) in typing.get_args(hax.NamedOrNumeric | None)
