"""Operations on several devices: values, shardings, the shard of each device, transformations, and errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import axonym as axn
from axonym.custom_partitioning import PartitioningRule, partitioned
from axonym.custom_partitioning.rule import inferred_shardings
from axonym.distribution.mesh_axes import mesh_axes
from axonym.manual import collectives
from tests.custom_partitioning.operations import (
    Batch,
    Embed,
    Vocab,
    check,
    draw,
    log_normalizer,
    raw_total,
    scalar_loss,
    top,
)

LOGITS = draw(Batch, Vocab)


@jax.jit
def expected_normalizer(x, temperature):
    return jax.nn.logsumexp(x / temperature, axis=1)


EXPECTED_NORMALIZER = expected_normalizer(LOGITS.array, 2.0)


# --- values and shardings ---


def test_result_and_its_sharding(mesh, mapping):
    result = jax.jit(log_normalizer)(axn.shard(LOGITS), 2.0)
    check(result.array, EXPECTED_NORMALIZER)
    assert result.array.sharding.is_equivalent_to(NamedSharding(mesh, P(mapping.get("batch"))), 1)


def test_eager_result_and_its_sharding(mesh, both_split):
    result = log_normalizer(axn.shard(LOGITS), 2.0)
    check(result.array, EXPECTED_NORMALIZER)
    assert result.array.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 1)


def test_several_results_and_options(mesh, mapping):
    values, indices = jax.jit(lambda x: top(x, k=2))(axn.shard(LOGITS))
    check((values.array, indices.array), tuple(jax.lax.top_k(LOGITS.array, 2)))
    assert values.shape == {"batch": 8, "k": 2}
    assert values.array.sharding.is_equivalent_to(NamedSharding(mesh, P(mapping.get("batch"))), 2)


def test_order_of_axes_does_not_matter(mesh, both_split):
    turned = axn.shard(axn.rearrange(LOGITS, ("vocab", "batch")))
    check(jax.jit(log_normalizer)(turned, 2.0).array, EXPECTED_NORMALIZER)


def test_each_device_gets_its_part(mesh, mapping):
    seen = []

    @partitioned
    def op(x):
        seen.append(x.shape)
        return axn.zeros_like(x) + axn.arange(x.resolve_axis("vocab")) + axn.axis_offset("vocab", x=x)

    result = jax.jit(op)(axn.shard(LOGITS))
    check(result.array, np.broadcast_to(np.arange(16.0, dtype=np.float32), (8, 16)))
    sizes = {"data": 4, "model": 2, None: 1}
    assert seen[-1] == {"batch": 8 // sizes[mapping.get("batch")], "vocab": 16 // sizes[mapping.get("vocab")]}


def test_raw_arrays_without_a_mapping(mesh):
    x = jax.device_put(LOGITS.array, P("data", "model"))
    for fn in (raw_total, jax.jit(raw_total)):
        result = fn(x, 3.0)
        check(result, LOGITS.array.sum(1) * 3)
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 1)


def test_no_mesh_in_force(auto_mesh, explicit_mesh):
    check(raw_total(LOGITS.array, 3.0), LOGITS.array.sum(1) * 3)
    for mesh in (auto_mesh, explicit_mesh):
        x = jax.device_put(LOGITS.array, NamedSharding(mesh, P("data", "model")))
        for fn in (raw_total, jax.jit(raw_total)):
            check(fn(x, 3.0), LOGITS.array.sum(1) * 3)
            assert fn(x, 3.0).sharding.spec == P("data")


def test_one_axis_over_both_mesh_axes(mesh):
    with axn.axis_mapping({"vocab": ("data", "model")}):
        check(jax.jit(log_normalizer)(axn.shard(LOGITS), 2.0).array, EXPECTED_NORMALIZER)


def test_compound_axes(mesh):
    op = partitioned("(h d) b -> h b", reduced="d", d=2)(lambda x: jnp.reshape(x, (-1, 2, x.shape[1])).sum(1))
    x = jax.device_put(np.arange(128.0, dtype=np.float32).reshape(8, 16), P("data", "model"))
    result = jax.jit(op)(x)
    check(result, np.asarray(x).reshape(4, 2, 16).sum(1))
    assert result.sharding.spec == P("data", "model")


def test_permuted(mesh, both_split):
    op = partitioned(permuted="vocab")(lambda x: axn.flip(x, "vocab"))

    @op.per_shard
    def _(x):
        devices = collectives.axis_size("vocab")
        return axn.ppermute(axn.flip(x, "vocab"), "vocab", [(i, devices - 1 - i) for i in range(devices)])

    result = jax.jit(op)(axn.shard(LOGITS))
    check(result.array, LOGITS.array[:, ::-1])
    assert result.array.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)


def test_numbers_have_no_dtype_of_their_own(mesh):
    op = partitioned(lambda x, t: x * t)
    with axn.axis_mapping({"batch": "data"}):
        assert op(axn.shard(LOGITS.astype(jnp.bfloat16)), 2.0).dtype == jnp.bfloat16
        assert op(axn.shard(axn.arange(Batch)), 2).dtype == jnp.int32


# --- transformations ---


def loss(x):
    return scalar_loss(log_normalizer(x, 2.0))


def plain_loss(x):
    return jnp.sum(jax.nn.logsumexp(x / 2.0, axis=1) ** 2)


EXPECTED_GRADIENT = jax.jit(jax.grad(plain_loss))(LOGITS.array)


def test_grad(mesh, mapping):
    check(jax.jit(jax.grad(loss))(axn.shard(LOGITS)).array, EXPECTED_GRADIENT)


@pytest.mark.parametrize(
    "transformed",
    [jax.grad(loss), jax.grad(jax.jit(loss)), jax.jit(jax.grad(jax.checkpoint(loss)))],
    ids=["eager", "of-jit", "checkpoint"],
)
def test_grad_in_other_ways(mesh, transformed):
    with axn.axis_mapping({"batch": "data", "vocab": "model"}):
        check(transformed(axn.shard(LOGITS)).array, EXPECTED_GRADIENT)


def test_jvp(mesh, both_split):
    x = axn.shard(LOGITS)
    tangent = jax.jit(lambda x: jax.jvp(lambda x: log_normalizer(x, 2.0), (x,), (x,))[1])(x)
    check(tangent.array, (jax.nn.softmax(LOGITS.array / 2, axis=1) * LOGITS.array / 2).sum(1))


def test_second_derivative(mesh, both_split):
    def second(loss):
        return jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (x,))[1])

    check(second(loss)(axn.shard(LOGITS)).array, second(plain_loss)(LOGITS.array))


def test_gradient_with_several_results_and_integers(mesh, both_split):
    gradient = jax.jit(jax.grad(lambda x: axn.sum(top(x, k=2)[0]).scalar()))(axn.shard(LOGITS))
    check(gradient.array, jax.jit(jax.grad(lambda x: jax.lax.top_k(x, 2)[0].sum()))(LOGITS.array))


def test_gradient_of_all_operands(mesh, both_split):
    """An operand that has no batch gets the sum over it."""
    op = partitioned(reduced="vocab")(lambda x, w: axn.psum(axn.dot(x, w, axis="vocab"), "vocab"))
    w = draw(Vocab, Embed, seed=1)
    got = jax.jit(jax.grad(lambda x, w: scalar_loss(op(x, w)), argnums=(0, 1)))(axn.shard(LOGITS), axn.shard(w))
    expected = jax.jit(jax.grad(lambda x, w: jnp.sum((x @ w) ** 2), argnums=(0, 1)))(LOGITS.array, w.array)
    check([g.array for g in got], list(expected))


def test_vmap(mesh, both_split):
    x, temperatures = axn.shard(LOGITS), axn.named([1.0, 2.0, 4.0], "t")
    mapped = jax.jit(lambda x: axn.vmap(lambda t: log_normalizer(x, t.scalar()), "t")(temperatures))(x)
    for i, t in enumerate((1.0, 2.0, 4.0)):
        check(np.asarray(mapped.array)[mapped.names.index("t") == 0 and i], expected_normalizer(LOGITS.array, t))


def test_vmap_of_vmap(auto_mesh):
    """The partitioner decides about the axes that `vmap` adds, too."""
    x = jax.device_put(np.stack([LOGITS.array] * 4), NamedSharding(auto_mesh, P("data", None, "model")))
    twice = jax.jit(jax.vmap(jax.vmap(raw_total, (0, None)), (None, 0)))
    result = twice(x, jnp.array([1.0, 3.0]))
    check(
        result,
        np.broadcast_to(np.asarray(LOGITS.array.sum(1))[None, None] * np.array([1, 3])[:, None, None], (2, 4, 8)),
    )
    assert result.sharding.spec == P(None, "data")


@pytest.mark.parametrize("outer", ["vmap", "grad"])
def test_vmap_and_grad(mesh, both_split, outer):
    ts = jnp.array([1.0, 2.0])
    if outer == "vmap":
        fn = jax.vmap(lambda t, x: jax.grad(lambda x: scalar_loss(log_normalizer(x, t)))(x).array, (0, None))
        check(jax.jit(fn)(ts, axn.shard(LOGITS))[1], EXPECTED_GRADIENT)
        return
    fn = lambda x: jnp.sum(jax.vmap(lambda t: log_normalizer(x, t).array)(ts)[1] ** 2)
    check(jax.jit(jax.grad(fn))(axn.shard(LOGITS)).array, EXPECTED_GRADIENT)


def test_scan(mesh, both_split):
    def run(x):
        return jax.lax.scan(lambda c, _: (c + 1, log_normalizer(x, c).array), jnp.float32(1), length=2)[1]

    check(jax.jit(run)(axn.shard(LOGITS))[1], EXPECTED_NORMALIZER)


def test_named_jit(mesh):
    with axn.axis_mapping({"batch": "data", "vocab": "model"}):
        result = axn.named_jit(lambda x: log_normalizer(x, 2.0))(LOGITS)
    check(result.array, EXPECTED_NORMALIZER)


# --- inside shard_map ---


def test_inside_shard_map_it_is_what_it_means(mesh):
    """On what is the whole array there, as any other operation."""
    inside = axn.shard_map(lambda x: log_normalizer(x, 2.0), mapping={"batch": ("data", "model")})
    result = jax.jit(inside)(LOGITS)
    check(result.array, EXPECTED_NORMALIZER)
    check(jax.jit(jax.grad(lambda x: scalar_loss(inside(x))))(LOGITS).array, EXPECTED_GRADIENT)


def test_inside_shard_map_over_some_mesh_axes(mesh, both_split):
    inside = axn.shard_map(lambda x: (log_normalizer(x, 2.0), top(x, k=2)[1]), axis_names="data")
    result, indices = jax.jit(inside)(axn.shard(LOGITS))
    check(result.array, EXPECTED_NORMALIZER)
    check(indices.array, jax.lax.top_k(LOGITS.array, 2)[1])


def test_inside_eager_shard_map_over_some_mesh_axes(mesh, both_split):
    inside = axn.shard_map(lambda x: raw_total(x.array, 3.0), axis_names="data", out_specs=P("data"))
    check(inside(axn.shard(LOGITS)), LOGITS.array.sum(1) * 3)


# --- what is refused ---


def test_gradient_needs_a_mapping(auto_mesh):
    with (
        jax.set_mesh(auto_mesh),
        pytest.raises(ValueError, match=r"over mesh axes \(data=4, model=2\)\? As the operation is diff"),
    ):
        jax.jit(jax.grad(loss))(LOGITS)


def test_gradient_inside_shard_map_over_some_mesh_axes(mesh):
    with axn.axis_mapping({"batch": "data", "vocab": "model"}):
        inside = axn.shard_map(lambda x: log_normalizer(x, 2.0), axis_names="data")
        with pytest.raises(ValueError, match="log_normalizer: inside a shard_map over some mesh axes"):
            jax.jit(jax.grad(lambda x: scalar_loss(inside(x))))(LOGITS)


def test_some_mesh_axes_by_hand_need_a_mapping(auto_mesh):
    with jax.set_mesh(auto_mesh), pytest.raises(ValueError, match=r"over mesh axes \(model=2\)\? As other mesh axes"):
        axn.shard_map(lambda x: log_normalizer(x, 2.0), axis_names="data", in_specs={"batch": "data"})(LOGITS)


def test_mapping_to_a_mesh_axis_that_is_not_there(auto_mesh):
    with (
        jax.set_mesh(auto_mesh),
        axn.axis_mapping({"vocab": "modle"}),
        pytest.raises(ValueError, match="Did you mean 'model'"),
    ):
        jax.grad(loss)(LOGITS)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            lambda x: axn.sum(x, "batch"),
            r"per shard, result 0: expected float32\(batch=8\), got the named array float32\[v",
        ),
        (lambda x: axn.sum(x, "vocab").array, r"expected float32\(batch=8\), got the raw array float32\[8\]"),
        (lambda x: (axn.sum(x, "vocab"),) * 2, r"the result is .* but the function of unsharded arrays returns"),
        (lambda x: axn.sum(x, "vocab").astype(jnp.int32), r"Both functions must give one dtype"),
        (lambda x: axn.psum(axn.sum(x, "vocab"), "vocb"), r"psum: 'vocb' is neither.*Did you mean 'vocab'"),
    ],
    ids=["axes", "raw", "structure", "dtype", "collective"],
)
def test_what_is_wrong_with_the_function_for_a_part_is_said_at_once(part, message):
    op = partitioned(reduced="vocab")(lambda x: axn.sum(x, "vocab"))
    op.per_shard(part)
    with pytest.raises(ValueError, match=message):
        op(LOGITS)


def test_a_part_of_the_wrong_size(mesh):
    op = partitioned(lambda x: x)
    op.per_shard(lambda x: axn.zeros((Batch, Vocab)))
    with (
        axn.axis_mapping({"batch": "data"}),
        pytest.raises(Exception, match=r"result 0: expected float32\(batch=2, vocab=16\), got .*batch=8, vocab=16"),
    ):
        op(axn.shard(LOGITS))


def test_arrays_of_the_code_around():
    table = jnp.arange(16.0)
    op = partitioned(lambda x: x * axn.named(table, "vocab"))
    check(op(LOGITS).array, LOGITS.array * table[None])
    with pytest.raises(ValueError, match="the function uses an array of the traced function around it"):
        jax.jit(lambda y: partitioned(lambda x: x * y)(LOGITS))(1.0)


def test_operands_and_options():
    with pytest.raises(TypeError, match="operand 1 should be an array or a number, got str"):
        log_normalizer(LOGITS, "hot")
    with pytest.raises(TypeError, match="top: `k` is handed on as it is; it is static"):
        top(LOGITS, k=[2])
    with pytest.raises(ValueError, match="This named array has 2 names"):
        jax.vmap(lambda x: log_normalizer(x, 1.0))(LOGITS)


def test_it_is_still_the_function():
    assert getattr(log_normalizer, "__name__", None) == "log_normalizer"


def test_something_else_is_not_an_operation():
    make: Any = partitioned
    with pytest.raises(TypeError, match="expected a function, got int"):
        make(3)


def test_same_program_is_compiled_once(auto_mesh):
    traced = []

    @partitioned
    def op(x):
        traced.append(1)
        return x * 2

    for _ in range(3):
        op(LOGITS)
    count = len(traced)
    op(LOGITS)
    assert len(traced) == count


# --- mesh axes, and shardings of one's own ---


def test_the_index_of_a_mesh_axis(mesh, both_split):
    """Also of one that does not shard the operands."""

    @partitioned
    def tagged(x):
        return x * 0

    @tagged.per_shard
    def _(x):
        return x * 0 + 10.0 * jax.lax.axis_index("data") + jax.lax.axis_index("model")

    expected = 10.0 * (np.arange(8) // 2)[:, None] + (np.arange(16) // 8)[None, :]
    x = axn.shard(LOGITS)
    for call in (tagged, jax.jit(tagged)):
        check(call(x).array, expected.astype(np.float32))

    @partitioned
    def where(x):
        return x * 0

    @where.per_shard
    def _(x):
        return x * 0 + axn.axis_index(axn.MeshAxis("data"))

    check(jax.jit(where)(x).array, np.broadcast_to((np.arange(8.0, dtype=np.float32) // 2)[:, None], (8, 16)))


def counting(infer: Any) -> tuple[Any, list[Any]]:
    """Return an operation whose sharding a function decides, and a list of what one device got."""
    seen: list[Any] = []

    @partitioned(reduced="vocab")
    def total(x, y):
        return axn.sum(x * y, "vocab")

    @total.per_shard
    def _(x, y):
        seen.append((x.shape, y.shape))
        return axn.psum(axn.sum(x * y, "vocab"), "vocab")

    total.infer_sharding(infer)
    return total, seen


@pytest.mark.parametrize(
    ("said", "local"),
    [
        ({}, ({"batch": 8, "vocab": 16}, {"vocab": 16})),
        ({"vocab": "model"}, ({"batch": 8, "vocab": 8}, {"vocab": 8})),
        ({"vocab": ("data", "model"), "batch": None}, ({"batch": 8, "vocab": 2}, {"vocab": 2})),
        ({"batch": ("model",), "vocab": ("data",)}, ({"batch": 4, "vocab": 4}, {"vocab": 4})),
    ],
)
def test_a_sharding_of_ones_own(mesh, both_split, said, local):
    given = []

    def infer(derived, operands, sizes):
        given.append((derived, [tuple(spec) for spec in operands], sizes))
        return said

    total, seen = counting(infer)
    y = draw(Vocab, seed=1)
    x = axn.shard(LOGITS)
    expected = LOGITS.array @ y.array
    for call in (jax.jit(total), total):
        check(call(x, axn.shard(y)).array, expected)
        assert seen[-1] == local
    derived, operands, sizes = given[-1]
    assert derived == {"batch": ("data",), "vocab": ("model",)} and sizes == {"data": 4, "model": 2}
    assert [tuple(mesh_axes(e) for e in spec) for spec in operands] == [
        (("data",), ("model",)),
        (("model",),),
    ]
    gradient = jax.jit(jax.grad(lambda x: scalar_loss(total(x, y))))(x)
    check(gradient.array, 2 * np.asarray(expected)[:, None] * np.asarray(y.array)[None, :])


def test_a_sharding_of_ones_own_under_vmap(mesh, both_split):
    total, _ = counting(lambda derived, operands, sizes: {"vocab": "model"} if len(operands[0]) == 2 else {})
    xs = axn.named(np.random.default_rng(2).normal(size=(3, 8, 16)).astype(np.float32), ("draw", "batch", "vocab"))
    y = draw(Vocab, seed=1)
    found = jax.jit(lambda xs: axn.vmap(lambda x: total(x, y), "draw")(xs))(axn.shard(xs))
    check(found.array, np.asarray(xs.array) @ np.asarray(y.array))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"vocb": "model"}, "there is no axis 'vocb'. Did you mean 'vocab'"),
        ({"vocab": "modle"}, "mesh axis 'modle', which the mesh does not have. Did you mean 'model'"),
        ({"vocab": "model", "batch": "model"}, "mesh axis 'model' can shard one axis"),
        ({"odd": "data"}, "axis 'odd' of size 6 cannot be sharded over"),
        ({"k": "data"}, "axis 'k' must be replicated"),
    ],
)
def test_what_is_wrong_with_a_sharding(said, message):
    batch, vocab, odd, k = (("batch",), ("vocab",), ("odd",), ("k",))
    rule = PartitioningRule(
        ((batch, vocab, odd),), ((batch, k),), {"batch": 8, "vocab": 16, "odd": 6, "k": 4}, replicated={"k"}
    )
    with pytest.raises(ValueError, match=f"op, inferred sharding: .*{message}"):
        inferred_shardings("op", rule, {"data": 4, "model": 2}, lambda *_: said, {}, [(None, None, None)])
