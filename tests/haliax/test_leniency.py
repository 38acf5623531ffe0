"""Calls that Haliax accepts and the native functions do not, with its results (checked against Haliax 1.4)."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import axonym as axn
import axonym.haliax as hax
from tests.helpers import spec


def test_a_class_of_strings() -> None:
    class Axes(metaclass=hax.util.StringHolderEnum):
        DATA = "data"
        MODEL = "model"

    assert list(Axes) == ["data", "model"] and Axes.DATA == "data" and "model" in Axes


def test_meshes(auto_mesh: jax.sharding.Mesh) -> None:
    with pytest.warns(DeprecationWarning, match="`axonym.current_mesh` is public"):
        assert hax.partitioning._get_mesh() is None
    with hax.partitioning.mesh_context(auto_mesh), pytest.warns(DeprecationWarning):
        assert hax.partitioning._get_mesh().shape == auto_mesh.shape  # pyright: ignore[reportOptionalMemberAccess]


def test_dot_with_the_axis_first() -> None:
    x = hax.ones({"a": 2})
    with pytest.warns(DeprecationWarning, match="`axis` is a keyword argument"):
        assert hax.dot("a", x, x).item() == 2
    assert hax.dot(x, x, axis="a").item() == 2


TAKEN = [
    (hax.named([9, -4, -5], "k"), ("b", "k"), [[np.nan, 0, np.nan], [np.nan, 4, np.nan]]),
    (hax.named([9, 0], "b"), ("b",), [np.nan, 4]),
    (hax.named([[9, 0], [1, -9]], ("k", "b")), ("k", "b"), [[np.nan, 4], [1, np.nan]]),
    (hax.named([[9, 0], [1, -9]], ("a", "b")), ("a", "b"), [[np.nan, 4], [1, np.nan]]),
    (9, ("b",), [np.nan, np.nan]),
    (-1, ("b",), [3, 7]),
]


@pytest.mark.parametrize("index, names, expected", TAKEN)
def test_take_fills_what_is_out_of_range(index: Any, names: tuple[str, ...], expected: list[Any]) -> None:
    x = hax.named(jnp.arange(8.0).reshape(2, 4), ("b", "a"))
    for taken in (hax.take(x, "a", index), jax.jit(lambda x: hax.take(x, "a", index))(x)):
        assert taken.names == names
        np.testing.assert_array_equal(taken.array, expected)


def test_what_take_fills_integers_with() -> None:
    for dtype, expected in ((jnp.int8, -128), (jnp.uint8, 255), (jnp.int32, -(2**31)), (jnp.bool_, True)):
        assert hax.take(hax.zeros({"a": 2}, dtype=dtype), "a", hax.named([5, 0], "b")).tolist() == [expected, 0]


def test_embeddings_of_tokens_out_of_range() -> None:
    layer = hax.nn.Embedding.init(hax.Axis("v", 3), hax.Axis("e", 1), key=jax.random.key(0))
    embedded = hax.named_jit(layer.embed)(hax.named(jnp.array([5, 0]), "b"))
    np.testing.assert_array_equal(embedded.array, [[np.nan], *layer.weight.array[:1]])


def test_check_shape() -> None:
    assert hax.core.check_shape((2, 3), ("a", hax.Axis("b", 3))) == (hax.Axis("a", 2), hax.Axis("b", 3))
    assert hax.core.check_shape((2,), "a") == (hax.Axis("a", 2),)
    for axes in (("a", hax.Axis("b", 4)), ("a",)):
        with pytest.raises(ValueError, match="NamedArray"):
            hax.core.check_shape((2, 3), axes)


def test_keywords(auto_mesh: jax.sharding.Mesh) -> None:
    x = hax.ones({"embed": 8})
    with jax.set_mesh(auto_mesh):
        assert spec(hax.shard(x=x, mapping={"embed": "data"})) == ("data",)
        assert spec(hax.shard_with_axis_mapping(x=x, mapping={"embed": "data"})) == ("data",)
        step = hax.fsdp(fn=lambda w: w + 1, parameter_mapping={"embed": "data"}, compute_mapping={})
        assert spec(jax.block_until_ready(step(x))) == ("data",)


def test_what_is_missing_is_a_runtime_warning(auto_mesh: jax.sharding.Mesh) -> None:
    x = hax.ones({"embed": 8})
    with pytest.warns(RuntimeWarning, match="no mapping is active"):
        assert hax.shard(x) is x
    with pytest.warns(RuntimeWarning, match="no mesh is active"):
        assert hax.shard(x, {"embed": "data"}) is x


def test_argsort_of_all_elements() -> None:
    x = hax.named([[3, 1], [2, 0]], ("x", "y"))
    np.testing.assert_array_equal(hax.argsort(x, None), [3, 1, 2, 0])
    assert hax.argsort(x, "y").tolist() == [[1, 0], [1, 0]]


def test_renaming_axes_that_an_array_lacks() -> None:
    x = hax.ones({"a": 2, "b": 3})
    assert hax.rename(x, {"a": "c", "z": "y"}).names == hax.rename(x, {hax.Axis("a", 2): "c"}).names == ("c", "b")


def test_state_dicts_with_more_than_the_tree_has() -> None:
    tree = {"layer": hax.nn.Linear.init(hax.Axis("i", 2), hax.Axis("o", 3), key=jax.random.key(0))}
    entries = {**hax.state_dict.to_state_dict(tree, "model"), "model.layer.inv_freq": np.ones(2), "head": np.ones(2)}
    for load in (hax.state_dict.from_state_dict, hax.state_dict.from_torch_compatible_state_dict):
        assert load(tree, entries, prefix="model")["layer"].bias.tolist() == [0, 0, 0]
        with pytest.raises(ValueError, match=r"'other\.layer\.bias' is missing"):
            load(tree, entries, prefix="other")
    with pytest.raises(ValueError, match=r"'model\.layer\.inv_freq' is in the state dict, but not in the tree"):
        axn.state.from_state_dict(tree, entries, "model")


def test_trees_by_keyword() -> None:
    parts = hax.tree_util.hashable_partition(pytree={"a": hax.ones({"a": 2}), "b": "b"}, filter_spec=eqx.is_array)
    assert hax.tree_util.hashable_combine(*parts)["b"] == "b" and hash(parts[1])


def test_draws_of_categorical() -> None:
    """The numbers are those that Haliax draws."""
    logits = hax.named(jnp.arange(12.0).reshape(4, 3), ("a", "b"))
    assert hax.random.categorical(jax.random.key(0), logits, "b").tolist() == [1, 1, 2, 1]
    drawn = hax.random.categorical(jax.random.key(0), logits, "b", shape=(hax.Axis("s", 2), hax.Axis("a", 4)))
    assert drawn.tolist() == [[1, 1, 2, 1], [2, 2, 2, 2]]


def test_what_does_not_exist_raises() -> None:
    for module in (hax, hax.nn, hax.partitioning):
        with pytest.raises(AttributeError, match="no attribute 'nosuch'"):
            module.nosuch  # pyright: ignore[reportAttributeAccessIssue]


# --- slices that do not fit ---

READS: list[tuple[Any, int, list[int]]] = [
    (3, 3, [3, 0, 0]),
    (-1, 2, [3, 0]),
    (-3, 2, [1, 2]),
    (-6, 4, [0, 0, 0, 1]),
    (0, 6, [0, 1, 2, 3, 0, 0]),
    (9, 2, [0, 0]),
    (1, 2, [1, 2]),
]


@pytest.mark.parametrize("start, length, expected", READS)
def test_zeros_are_read_outside_of_an_axis(start: int, length: int, expected: list[int]) -> None:
    x = hax.arange(hax.Axis("a", 4))
    assert x["a", hax.dslice(start, length)].tolist() == expected
    assert x["a", hax.ds(jnp.array(start), length)].tolist() == expected
    assert hax.named_jit(lambda i: x["a", hax.dslice(i, length)])(start).tolist() == expected
    assert jax.jit(lambda i: hax.index(x, {"a": hax.dslice(i, length)}))(start).tolist() == expected


def test_slices_that_do_not_fit_beside_other_indices() -> None:
    x = hax.named(jnp.arange(12.0).reshape(4, 3), ("a", "b"))
    outside = hax.dslice(3, 2)
    assert x["a", outside, "b", hax.dslice(2, 2)].rearrange(("b", "a")).tolist() == [[11, 0], [0, 0]]
    assert x["a", outside, "b", 1].tolist() == [10, 0]
    assert x["a", outside, "b", 1:].rearrange(("a", "b")).tolist() == [[10, 11], [0, 0]]
    assert x["a", outside, "b", hax.named([0, 1], "c")].rearrange(("c", "a")).tolist() == [[9, 0], [10, 0]]
    assert x["a", hax.dslice(2, 3), "b", hax.named([0, 1, 2], "a")].tolist() == [6, 10, 0]
    gradient = jax.grad(lambda v: (hax.named(v, "a")["a", hax.dslice(3, 3)] * 2).sum().scalar())(jnp.arange(4.0))
    assert gradient.tolist() == [0, 0, 0, 2]


def test_updates_that_do_not_fit() -> None:
    x = hax.arange(hax.Axis("a", 4))
    assert x.at["a", hax.dslice(3, 3)].get().tolist() == [3, 3, 3]
    assert x.at["a", hax.dslice(0, 6)].get().tolist() == [0, 1, 2, 3, 3, 3]
    assert x.at["a", hax.dslice(3, 3)].get(mode="fill", fill_value=-7).tolist() == [3, -7, -7]
    assert x.at["a", hax.dslice(3, 3)].set(9).tolist() == [0, 1, 2, 9]
    assert x.at["a", hax.dslice(-1, 2)].add(9).tolist() == [9, 1, 2, 12]
    assert x.at["a", hax.dslice(2, 3)].set(hax.named([7, 8, 9], "a")).tolist() == [0, 1, 7, 8]


def test_slice_moves_what_does_not_fit() -> None:
    x = hax.arange(hax.Axis("a", 4))
    assert hax.slice(x, "a", start=3, length=3).tolist() == [1, 2, 3]
    assert [hax.slice(x, "a", start=s, length=2).tolist() for s in (-1, -3, -9)] == [[2, 3], [1, 2], [0, 1]]
    assert hax.slice(x, {"a": -1}, {"a": hax.Axis("b", 2)}).axes == (hax.Axis("b", 2),)
    for lengths in ({"a": 3}, {hax.Axis("a", 4): hax.Axis("b", 3)}):
        with pytest.raises(ValueError, match="slice: 3 elements from 2 on do not fit axis 'a' of size 4"):
            hax.slice(x, {"a": 2}, lengths)


def test_updated_slice_moves_what_does_not_fit() -> None:
    x, two = hax.arange(hax.Axis("a", 4)), hax.full(hax.Axis("a", 2), 9)
    for start, expected in ((-1, [0, 1, 9, 9]), (-3, [0, 9, 9, 3]), (-9, [9, 9, 2, 3]), (jnp.array(3), [0, 1, 9, 9])):
        assert hax.updated_slice(x, {"a": start}, two).tolist() == expected
        assert x.updated_slice({"a": start}, two).tolist() == expected  # pyright: ignore[reportAttributeAccessIssue]
    assert hax.updated_slice(x, {"a": 4}, hax.named(9, ())).tolist() == [0, 1, 2, 9]
    with pytest.raises(ValueError, match="2 elements from 3 on do not fit axis 'a' of size 4"):
        hax.updated_slice(x, {"a": 3}, two)


def test_native_slices_and_references_stay_strict() -> None:
    x = hax.arange(hax.Axis("a", 4))
    for index in (axn.ds(3, 3), axn.ds(-1, 2)):
        with pytest.raises(IndexError, match="out of range"):
            x["a", index]
    with pytest.raises(IndexError, match="out of range"):
        hax.new_ref(x)["a", hax.dslice(3, 3)]
    ref = hax.new_ref(x)
    ref["a", hax.dslice(jnp.array(1), 2)] = 7
    assert hax.freeze(ref).tolist() == [0, 7, 7, 3]


# --- placement ---


def trees(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    sharded = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("data")))
    return {
        "raw": jnp.ones((8, 4)),
        "scalar": jnp.ones(()),
        "number": 2.5,
        "numpy": np.ones(2),
        "text": "x",
        "sharded": sharded,
        "named": hax.ones({"a": 8, "b": 4}),
        "named sharded": hax.named(sharded, ("a", "b")),
    }


REPLICATED = {"raw": P(None), "scalar": P(), "number": P(), "numpy": P(None), "text": None}


def test_pspec_for(auto_mesh: jax.sharding.Mesh) -> None:
    mapping = {"a": "data", "b": "model"}
    kept = {"sharded": None, "named": None, "named sharded": None}
    assert hax.partitioning.pspec_for(trees(auto_mesh), mapping) == {**REPLICATED, **kept}
    by_mapping = {"sharded": P(None), "named": P("data", "model"), "named sharded": P("data", "model")}
    found = hax.partitioning.pspec_for(trees(auto_mesh), mapping, preserve_existing_shardings=False)
    assert found == {**REPLICATED, **by_mapping}
    seen = []
    jax.jit(lambda x: seen.append(hax.partitioning.pspec_for((x, hax.named(x, ("a", "b"))), mapping)))(jnp.ones((8, 4)))
    assert seen == [(P(None), P("data", "model"))]
    with pytest.raises(ValueError, match="no mapping is active"):
        hax.partitioning.pspec_for(jnp.ones(2))


def test_infer_resource_partitions(auto_mesh: jax.sharding.Mesh) -> None:
    tree, mapping = trees(auto_mesh), {"a": "data", "b": "model"}
    replicated = {k: None if s is None else NamedSharding(auto_mesh, s) for k, s in REPLICATED.items()}
    with jax.set_mesh(auto_mesh):
        kept = {"sharded": tree["sharded"].sharding, "named sharded": tree["sharded"].sharding}
        kept["named"] = tree["named"].array.sharding
        assert hax.partitioning.infer_resource_partitions(tree, mapping) == {**replicated, **kept}
        placed = {k: NamedSharding(auto_mesh, P("data", "model")) for k in ("named", "named sharded")}
        placed["sharded"] = NamedSharding(auto_mesh, P(None))
        found = hax.partitioning.infer_resource_partitions(tree, mapping, preserve_existing_shardings=False)
        assert found == {**replicated, **placed}
    with pytest.raises(ValueError, match="mesh"):
        hax.partitioning.infer_resource_partitions(tree, mapping)


def test_keywords_of_named_jit(auto_mesh: jax.sharding.Mesh) -> None:
    x = hax.ones({"a": 8, "b": 4})

    def double(x: hax.NamedArray) -> hax.NamedArray:
        return x * 2

    with jax.set_mesh(auto_mesh):
        a, b = {"a": "data"}, {"b": "model"}
        for compiled in (hax.named_jit(double, axis_resources=a), hax.named_jit(axis_resources=a)(double)):
            assert spec(compiled(x)) == ("data", None)
        step = hax.named_jit(double, axis_resources=a, in_axis_resources=b, out_axis_resources=b)
        assert spec(step(x)) == (None, "model")
        given = x.copy()
        hax.named_jit(double, donate_args=(True,))(given)
        assert given.array.is_deleted()
        given = x.copy()
        hax.named_jit(double, donate_kwargs={"x": True})(x=given)
        assert given.array.is_deleted()


# --- functions over an axis ---


def test_a_policy_is_kept_as_given() -> None:
    policy = hax.ScanCheckpointPolicy(save_carries=False, save_block_internals=True)
    assert policy.save_carries is False and policy.save_block_internals is True
    assert hax.nn.ScanCheckpointPolicy is hax.nn.scan.ScanCheckpointPolicy is hax.ScanCheckpointPolicy
    assert isinstance(hax.ScanCheckpointPolicy.from_bool_or_str("offload"), hax.ScanCheckpointPolicy)
    hax.ScanCheckpointPolicy(simple=True, save_carries=False), hax.ScanCheckpointPolicy(nested=1)
    xs = hax.arange(hax.Axis("a", 4), dtype=jnp.float32) + 1

    def last(scale: float, **options: Any) -> jax.Array:
        return hax.fold(lambda c, x: c * hax.sin(x * scale), "a", **options)(hax.named(1.0, ()), xs).scalar()

    np.testing.assert_allclose(jax.grad(last)(0.5), jax.grad(lambda s: last(s, remat=policy))(0.5), rtol=1e-6)


def test_raw_carries_and_raw_arrays_beside_named_ones() -> None:
    A = hax.Axis("a", 4)
    x, raw = hax.arange(A), jnp.ones((4, 2))
    carry, ys = hax.scan(lambda c, x: (c + 1, x * c), A)(jnp.zeros(()), x)
    assert isinstance(carry, jax.Array) and carry == 4 and ys.tolist() == [0, 1, 4, 9]
    carry, ys = hax.scan(lambda c, x, r: (c + x, r.sum() + c), A)(hax.zeros(()), x, raw)
    assert carry.tolist() == 6 and ys.tolist() == [2, 2, 3, 5]
    carry, ys = hax.scan(lambda c, r: (c + r.sum(), r * 2), A)(0.0, raw)
    assert carry == 8 and ys.shape == (4, 2)
    assert hax.fold(lambda c, x, r: c + r, A)(jnp.zeros(2), x, raw).tolist() == [4, 4]
    assert hax.map(lambda r: r * 2, A)(raw).tolist() == [[2, 2]] * 4


# --- orders, expressions, layers ---


@pytest.mark.parametrize(
    "order, expected",
    [
        (("d", ..., "b", ...), "dabc"),
        ((..., "b", ...), "abcd"),
        ((..., "d", ..., "a", ...), "dabc"),
        (("b", ..., ...), "bacd"),
        ((..., ..., "b"), "acdb"),
        (("b", ..., "d", ...), "badc"),
    ],
)
def test_orders_with_two_ellipses(order: Any, expected: str) -> None:
    x = hax.ones({"a": 2, "b": 3, "c": 4, "d": 5})
    assert "".join(hax.rearrange(x, order).names) == expected
    assert "".join(x.rearrange(order).names) == expected
    assert "".join(hax.dot(x, hax.ones({"e": 1}), axis="e", out_axes=order).names) == expected


def test_axes_that_one_operand_alone_has_are_summed_there() -> None:
    x, w = hax.ones({"a": 2, "b": 3}), hax.ones({"c": 4})
    for found in (
        hax.dot(x, w, axis="b"),
        hax.dot(x, w, axis=hax.Axis("b", 3)),
        hax.einsum("{b} -> ", x, w),
        hax.einsum("{B c} -> c", x, w, B="b"),
    ):
        assert found.shape == {"a": 2, "c": 4} and np.all(np.asarray(found.array) == 3)
    assert hax.dot(x, x, w, axis=("b", "c")).tolist() == [12, 12]
    with pytest.raises(ValueError, match="no operand has axis 'd'"):
        hax.dot(x, w, axis="d")
    with pytest.raises(ValueError, match=r"^dot: only operand 0 has axis 'b'"):
        x.dot(w, axis="b")


def test_sizes_that_an_expression_does_not_use() -> None:
    x = hax.ones({"a": 4, "b": 3})
    assert hax.rearrange(x, "a b -> b a", q=3).names == ("b", "a")
    assert hax.rearrange(x, "(i j) b -> i (m: j b)", i=2, q=3, m=6).shape == {"i": 2, "m": 6}
    with pytest.raises(ValueError, match="'q' is given by keyword"):  # Haliax refuses this, too
        hax.einsum("{a b} -> a", x, q="c")


def test_logsumexp() -> None:
    x = hax.ones({"a": 4, "b": 3})
    np.testing.assert_allclose(hax.nn.logsumexp(x).array, 3.4849067, rtol=1e-6)
    np.testing.assert_allclose(hax.nn.logsumexp(x, "a").array, [2.3862944] * 3, rtol=1e-6)


def test_names_of_parameters_for_dropout_and_epsilon() -> None:
    attention, key = hax.nn.attention, jax.random.key(0)
    kept = attention.dropout_mask((hax.Axis("pos", 4), hax.Axis("key_pos", 1000)), dropout_rate=0.25, key=key)
    assert kept.names == ("pos", "key_pos") and kept.dtype == bool
    np.testing.assert_allclose(np.mean(kept.array), 0.75, atol=0.02)
    x = hax.ones({"pos": 2, "d": 2})
    found = attention.dot_product_attention(
        "key_pos", "d", x, *[x.rename({"pos": "key_pos"})] * 2, dropout=1.0, prng=key
    )
    assert found.sum().item() == 0
    np.testing.assert_allclose(hax.nn.standardize(hax.arange(hax.Axis("d", 2)), "d", epsilon=0.75).array, [-0.5, 0.5])


def test_use_gmm_without_a_tpu() -> None:
    layer = hax.nn.MoELinear.init(*hax.make_axes(e=2, i=4, o=3), key=jax.random.key(0), use_gmm=True)
    assert layer.use_gmm and isinstance(layer, axn.nn.MoELinear)
    out = layer(hax.ones({"t": 4, "i": 4}), hax.named([2, 2], "e"))
    np.testing.assert_allclose(out.sum().array, 5.94592, rtol=1e-5)


@pytest.mark.parametrize("mapping", [{}, {"t": "data"}, {"i": "data"}], ids=str)
def test_use_gmm_on_a_mesh(mapping: dict[str, str], auto_mesh: jax.sharding.Mesh) -> None:
    """The numbers are those of `use_gmm=False`; those of Haliax differ where the tokens or the inputs are sharded."""
    experts, inputs, outputs, tokens = hax.make_axes(e=2, i=4, o=3, t=8)
    x, groups = hax.random.normal(jax.random.key(1), (tokens, inputs)), hax.named([3, 5], "e")
    found = []
    for use_gmm in (True, False):
        layer = hax.nn.MoELinear.init(experts, inputs, outputs, key=jax.random.key(0), use_gmm=use_gmm)
        compute = hax.named_jit(lambda layer, x: layer(x, groups))
        with jax.set_mesh(auto_mesh), hax.axis_mapping(mapping):
            found.append(jax.block_until_ready(compute(layer, hax.auto_sharded(x))))
    np.testing.assert_allclose(found[0].array, found[1].array, rtol=1e-5, atol=1e-5)


def test_creation_ignores_the_mapping(auto_mesh: Mesh) -> None:
    """As in Haliax, so that sizes that the mesh does not divide are fine."""
    with hax.set_mesh(auto_mesh), hax.axis_mapping({"batch": "data"}):
        for new in (hax.zeros, hax.ones, hax.arange, lambda spec: hax.full(spec, 1)):
            assert new({"batch": 5}).array.sharding.is_fully_replicated
        assert hax.linspace(hax.Axis("batch", 5), start=0, stop=1).array.sharding.is_fully_replicated
        for mask in (hax.nn.attention.causal_mask, lambda q, k: hax.nn.attention.prefix_lm_mask(q, k, 2)):
            assert mask(hax.Axis("batch", 5), hax.Axis("key_pos", 5)).array.sharding.is_fully_replicated
