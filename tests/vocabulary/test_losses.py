"""`cross_entropy_loss` over a sharded vocabulary: values and derivatives on every mesh, and communication."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from tests.vocabulary.helpers import LOGITS, Batch, Vocab, draw, moved, run

cross_entropy = functools.partial(
    axn.nn.cross_entropy_loss, reduction=None, out_of_range=float("nan"), dtype=jnp.float32
)
BOTH = {"batch": "data", "vocab": "model"}
TARGETS = axn.named(np.array([0, 63, 31, 32, 7, 8, 9, 40]), Batch)
ONE_HOT = np.eye(64)[TARGETS.array]


def softmax(x):
    x = np.exp(np.asarray(x, np.float64) - np.max(x, axis=-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


SHARES = axn.named(softmax(draw(Batch, Vocab, seed=1).array).astype(np.float32), (Batch, Vocab))


def expected_losses(x, shares):
    return -np.sum(np.log(softmax(x)) * shares, axis=-1)


def expected_gradient(x, shares):
    """Return the gradient of the sum of squares of losses."""
    return 2 * expected_losses(x, shares)[:, None] * (softmax(x) * shares.sum(1, keepdims=True) - shares)


def squares(x, targets):
    losses = cross_entropy(x, "vocab", targets)
    return axn.sum(losses * losses).scalar()


def check(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# --- all shardings ---


def test_values_and_gradients(mesh, mapping):
    def loss(x, targets):
        losses, normalizers = axn.nn.cross_entropy_loss_and_log_normalizers(x, "vocab", targets)
        return axn.sum(losses * losses).scalar(), (losses, normalizers)

    found = run(jax.grad(loss, has_aux=True), *axn.shard((LOGITS, TARGETS)))
    x = LOGITS.array
    normalizers = np.log(np.sum(np.exp(np.asarray(x, np.float64)), axis=1))
    check(found, (expected_gradient(x, ONE_HOT), (expected_losses(x, ONE_HOT), normalizers)))


def test_probabilities_as_targets(mesh):
    with axn.axis_mapping(BOTH):
        found = run(jax.grad(squares, (0, 1)), *axn.shard((LOGITS, SHARES)))
    x, shares = LOGITS.array, SHARES.array
    of_shares = -2 * expected_losses(x, shares)[:, None] * np.log(softmax(x))
    check(found, (expected_gradient(x, shares), of_shares))


def test_eagerly(mesh):
    with axn.axis_mapping(BOTH):
        x = axn.shard(LOGITS)
        losses = jax.block_until_ready(cross_entropy(x, "vocab", TARGETS))
        check(losses, expected_losses(LOGITS.array, ONE_HOT))
        assert losses.array.sharding.is_equivalent_to(jax.NamedSharding(mesh, jax.P("data")), 1)
        gradient = jax.grad(lambda x: axn.sum(cross_entropy(x, "vocab", TARGETS)).scalar())(x)
        check(jax.block_until_ready(gradient), softmax(LOGITS.array) - ONE_HOT)


def test_no_mapping_is_needed(mesh):
    x = axn.shard(LOGITS, BOTH)
    gradient = jax.block_until_ready(jax.jit(jax.grad(squares))(x, TARGETS))
    check(gradient, expected_gradient(LOGITS.array, ONE_HOT))
    assert gradient.array.sharding.is_equivalent_to(x.array.sharding, 2)


def test_logits_do_not_move(mesh):
    # the largest logit, the sum of exponentials, and the logit of the target
    numbers = {"all-reduce": 3 * 4 * 8}
    with axn.axis_mapping({"vocab": ("data", "model")}):
        x, shares = axn.shard((LOGITS, SHARES))
        assert moved(jax.value_and_grad(squares), x, TARGETS) == numbers
        assert moved(lambda x, t: cross_entropy(x, "vocab", t), x, shares) == numbers
    with axn.axis_mapping(BOTH):
        # two rows for each device, and the sum over all
        assert moved(jax.value_and_grad(squares), axn.shard(LOGITS), TARGETS) == {"all-reduce": 3 * 4 * 2 + 4}


# --- derivatives and numbers ---


def test_derivatives_of_both_directions_and_higher_order():
    def second(loss):
        return lambda x: jax.jvp(jax.grad(loss), (x,), (x,))[1]

    def plain(x):
        return jnp.sum(jnp.sum(jax.nn.log_softmax(x) * ONE_HOT.astype(np.float32), axis=1) ** 2)

    check(run(second(lambda x: squares(x, TARGETS)), LOGITS), run(second(plain), LOGITS.array))


def test_targets_of_other_kinds():
    expected = expected_losses(LOGITS.array, ONE_HOT)
    check(cross_entropy(LOGITS, "vocab", axn.named(np.asarray(TARGETS.array, np.uint32), Batch)), expected)
    check(cross_entropy(LOGITS, "vocab", axn.named(ONE_HOT.astype(bool), (Batch, Vocab))), expected)
    wide = axn.named(np.zeros((8, 1000), np.float32), ("batch", "vocab"))
    small = axn.named(np.asarray(TARGETS.array, np.int8), Batch)
    check(cross_entropy(wide, "vocab", small), np.full(8, np.log(1000.0)))
    same = cross_entropy(LOGITS, "vocab", axn.named(5, ()))
    check(same, expected_losses(LOGITS.array, np.eye(64)[np.full(8, 5)]))


def test_low_precision_is_left():
    x = LOGITS.astype(jnp.bfloat16)
    losses = cross_entropy(x, "vocab", TARGETS)
    assert losses.dtype == jnp.float32
    check(losses, expected_losses(np.asarray(x.array, np.float32), ONE_HOT))
    assert run(jax.grad(squares), x, TARGETS).dtype == jnp.bfloat16


def test_large_numbers_and_impossible_alternatives():
    x = axn.named(np.array([[1e4, 0.0, -np.inf], [0.0, -np.inf, 0.0]], np.float32), ("batch", "vocab"))
    targets = axn.named([0, 2], "batch")
    check(cross_entropy(x, "vocab", targets).array, np.log([1.0, 2.0]))
    one_hot = axn.named(np.eye(3, dtype=np.float32)[[0, 2]], ("batch", "vocab"))
    check(cross_entropy(x, "vocab", one_hot).array, np.log([1.0, 2.0]))
    total = lambda x, t: axn.sum(cross_entropy(x, "vocab", t)).scalar()
    for t in (targets, one_hot):
        check(run(jax.grad(total), x, t).array, np.array([[0.0, 0.0, 0.0], [0.5, 0.0, -0.5]]))
    assert cross_entropy(x, "vocab", axn.named([2, 1], "batch")).tolist() == [np.inf, np.inf]


def test_the_loss_of_a_good_prediction_is_exact():
    x = axn.named(np.array([1000.0, 995.0], np.float32), "vocab")
    loss, gradient = jax.value_and_grad(lambda x: cross_entropy(x, "vocab", axn.named(0, ())).scalar())(x)
    np.testing.assert_allclose(loss, np.log1p(np.exp(-5)), rtol=1e-5)
    np.testing.assert_allclose(gradient.array, [-0.0066929, 0.0066929], rtol=1e-4)


def test_what_has_no_loss():
    assert np.isnan(cross_entropy(axn.named([-np.inf] * 2, "vocab"), "vocab", axn.named(0, ())).item())
    losses = cross_entropy(axn.zeros((Batch, Vocab)), "vocab", axn.named([0, 1, -1, 64, 2, 3, -100, 5], Batch))
    assert np.isnan(losses.array).tolist() == [False, False, True, True, False, False, True, False]


def test_layout_is_kept():
    x = axn.named(np.zeros((2, 4, 3), np.float32), ("b", "vocab", "a"))
    assert cross_entropy(x, "vocab", axn.named([0, 1, 2], "a")).names == ("b", "a")


def test_refusals():
    with pytest.raises(TypeError, match=r"cross_entropy_loss: targets without axis 'vocab' are positions"):
        cross_entropy(LOGITS, "vocab", axn.named(np.ones(8, np.float32), Batch))
    with pytest.raises(ValueError, match=r"`targets` has axes \(pos\) that the array \(batch, vocab\) lacks"):
        cross_entropy(LOGITS, "vocab", axn.named([0], "pos"))
    with pytest.raises(ValueError, match=r"Did you mean 'vocab'\?"):
        cross_entropy(LOGITS, "vocabs", TARGETS)
    with pytest.raises(TypeError, match="logits are floating point numbers"):
        cross_entropy(TARGETS, "batch", axn.named(0, ()))
