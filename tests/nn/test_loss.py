"""Losses against the positional formulas, and the communication for sharded labels."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym.nn.loss import (
    UNSPECIFIED,
    binary_cross_entropy_loss,
    cross_entropy_loss,
    cross_entropy_loss_and_log_normalizers,
    reduce_loss,
)
from tests.helpers import assert_named, spec

Batch, Label, Pos = axn.make_axes(batch=4, label=6, pos=2)
RAW = np.random.default_rng(0).normal(size=(4, 6, 2)).astype(np.float32) * 3
LOGITS = axn.named(RAW, (Batch, Label, Pos))
LABELS = np.array([[0, 5], [2, 2], [1, 4], [3, 0]])
TARGETS = axn.named(LABELS.T, (Pos, Batch))
NORMALIZERS = np.log(np.exp(RAW.astype(np.float64)).sum(1))
LOSSES = NORMALIZERS - np.take_along_axis(RAW, LABELS[:, None], 1)[:, 0]
MASK = axn.named(np.array([True, False]), Pos)


def _one_hot(labels: np.ndarray) -> axn.NamedArray:
    return axn.named((labels[:, None] == np.arange(6)[None, :, None]).astype(np.float32), (Batch, Label, Pos))


@pytest.mark.parametrize(
    "targets", [TARGETS, TARGETS.astype(np.uint8), _one_hot(LABELS)], ids=["labels", "bytes", "probabilities"]
)
def test_cross_entropy(targets: axn.NamedArray) -> None:
    loss, normalizers = cross_entropy_loss_and_log_normalizers(LOGITS, Label, targets)
    assert_named(loss, axn.named(LOSSES.astype(np.float32), (Batch, Pos)), rtol=1e-5)
    assert_named(normalizers, axn.named(NORMALIZERS.astype(np.float32), (Batch, Pos)), rtol=1e-5)
    np.testing.assert_allclose(cross_entropy_loss(LOGITS, "label", targets).array, LOSSES.mean(), rtol=1e-5)


def test_soft_targets() -> None:
    weights = np.random.default_rng(1).uniform(size=(6, 4)).astype(np.float32)
    found = cross_entropy_loss(LOGITS, Label, axn.named(weights, (Label, Batch)), reduction=None)
    expected = (weights.T[:, :, None] * (NORMALIZERS[:, None] - RAW)).sum(1)
    np.testing.assert_allclose(found.array, expected, rtol=1e-5)


def test_binary_targets_need_no_promotion() -> None:
    logits = axn.named([0.0, 9.0], "x").astype(jnp.bfloat16)
    for dtype in (bool, jnp.uint8, jnp.bfloat16):
        targets = axn.named([1, 0], "x").astype(dtype)
        with jax.numpy_dtype_promotion("strict"):
            loss = axn.nn.binary_cross_entropy_loss(logits, targets, reduction=None)
        assert loss.dtype == jnp.bfloat16
        np.testing.assert_allclose(loss.array, [0.6931, 9], rtol=1e-2)


def test_labels_that_are_not_there_cost_nothing() -> None:
    targets = axn.named(np.array([[-100, 5], [2, 6], [1, 4], [3, 0]]), (Batch, Pos))

    @jax.jit
    @jax.value_and_grad
    def run(logits):
        return cross_entropy_loss(logits, Label, targets, axn.sum, out_of_range=0.0).array

    value, gradient = run(LOGITS)
    np.testing.assert_allclose(value, LOSSES.sum() - LOSSES[0, 0] - LOSSES[1, 1], rtol=1e-5)
    assert not gradient.array[0, :, 0].any() and not gradient.array[1, :, 1].any()


def test_targets_out_of_range_are_an_error_where_they_are_known() -> None:
    targets = axn.named(np.array([[-100, 5], [2, 6], [1, 4], [3, 0]]), (Batch, Pos))
    wrong = r"cross_entropy_loss\w*: -100, 6 out of range for axis 'label' of size 6: a target lies in 0\.\.5"
    for call in (
        lambda: cross_entropy_loss(LOGITS, Label, targets),
        lambda: cross_entropy_loss_and_log_normalizers(LOGITS, Label, targets),
        lambda: axn.grad(lambda logits: cross_entropy_loss(logits, Label, targets))(LOGITS),
    ):
        with pytest.raises(IndexError, match=wrong):
            call()
    with pytest.raises(IndexError, match="cross_entropy_loss: 6 out of range"):
        cross_entropy_loss(LOGITS, Label, targets, ignore_index=-100)
    loss = jax.jit(lambda targets: cross_entropy_loss(LOGITS, Label, targets, axn.sum))(targets)
    np.testing.assert_allclose(loss.array, LOSSES.sum() - LOSSES[0, 0] - LOSSES[1, 1], rtol=1e-5)
    assert np.isnan(cross_entropy_loss(LOGITS, Label, targets, out_of_range=np.nan).array)


@pytest.mark.parametrize("ignored", [-100, 3])
def test_targets_that_are_ignored(ignored: int) -> None:
    """The mean is that of the others, also where the label exists."""
    raw = np.array([[ignored, 5], [2, ignored], [1, 4], [0, 0]])
    targets, kept = axn.named(raw, (Batch, Pos)), axn.named(raw != ignored, (Batch, Pos))
    found = cross_entropy_loss(LOGITS, Label, targets, ignore_index=ignored)
    expected = cross_entropy_loss(LOGITS, Label, axn.where(kept, targets, 0), where=kept)
    np.testing.assert_allclose(found.array, expected.array, rtol=1e-6)
    losses, _ = cross_entropy_loss_and_log_normalizers(LOGITS, Label, targets, ignore_index=ignored)
    assert not losses.array[~kept.array].any() and losses.array[kept.array].all()
    with pytest.raises(ValueError, match="`ignore_index` is for targets that are positions along 'label'"):
        cross_entropy_loss(LOGITS, Label, axn.ones((Batch, Label)), ignore_index=0)


def test_good_predictions_and_impossible_labels() -> None:
    """A small loss is exact however large the logits, and a label of probability zero does no harm."""
    logits = axn.named(np.array([1000.0, 995.0, -np.inf], np.float32), "label")

    @jax.jit
    @jax.value_and_grad
    def run(logits):
        return cross_entropy_loss(logits, "label", axn.named(np.array(0), ())).array

    value, gradient = run(logits)
    np.testing.assert_allclose(value, np.log1p(np.exp(-5)), rtol=1e-5)
    np.testing.assert_allclose(gradient.array, [-0.0066929, 0.0066929, 0], rtol=1e-4)


def test_low_precision_is_left_and_comes_back() -> None:
    exact = RAW.astype(jnp.bfloat16).astype(np.float64)
    expected = np.log(np.exp(exact).sum(1)) - np.take_along_axis(exact, LABELS[:, None], 1)[:, 0]
    for found in cross_entropy_loss_and_log_normalizers(LOGITS.astype(jnp.bfloat16), Label, TARGETS):
        assert found.dtype == jnp.bfloat16
    loss = cross_entropy_loss(LOGITS.astype(jnp.bfloat16), Label, TARGETS, reduction=None)
    np.testing.assert_array_equal(loss.array, expected.astype(jnp.bfloat16))


def test_split_labels_are_not_gathered(mesh: Mesh) -> None:
    """Only numbers without labels are exchanged, in the gradient too."""
    right = (LABELS[:, None] == np.arange(6)[None, :, None]).astype(np.float32)
    expected = (np.exp(RAW - NORMALIZERS[:, None]) - right) / 8

    def loss(logits, targets):
        return cross_entropy_loss(logits, Label, targets).array

    with jax.set_mesh(mesh):
        placed = axn.shard((LOGITS, TARGETS), {"batch": "data", "label": "model"})
        program = jax.jit(jax.value_and_grad(loss)).lower(*placed).compile()
        value, gradient = program(*placed)
    np.testing.assert_allclose(value, LOSSES.mean(), rtol=1e-5)
    np.testing.assert_allclose(gradient.array, expected, atol=1e-6)
    assert spec(gradient) == ("data", "model", None)
    exchanged = re.findall(
        r"= f32\[([\d,]*)\]\S* (all-\w+|reduce-scatter|collective-permute)\(", program.as_text() or ""
    )
    assert exchanged and all(kind == "all-reduce" and "3" not in size for size, kind in exchanged)


def test_binary_cross_entropy() -> None:
    logits, targets = np.array([-30.0, -1.0, 0.0, 20.0], np.float32), np.array([0.25, 1, 0, 1], np.float32)
    found = binary_cross_entropy_loss(axn.named(logits, "x"), axn.named(targets, "x"), reduction=None)
    exact = logits.astype(np.float64)
    expected = targets * np.log1p(np.exp(-exact)) + (1 - targets) * np.log1p(np.exp(exact))
    np.testing.assert_allclose(found.array, expected, rtol=1e-5)
    total = binary_cross_entropy_loss(axn.named(logits, "x"), axn.named(targets, "x"), axn.sum)
    np.testing.assert_allclose(total.array, expected.sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, LOSSES.mean()),
        ({"reduction": UNSPECIFIED, "where": MASK}, LOSSES[:, 0].mean()),
        ({"reduction": axn.sum, "reduction_axis": "pos"}, LOSSES.sum(1)),
        ({"reduction": axn.max, "reduction_axis": (Pos,), "where": MASK}, LOSSES[:, 0]),
        ({"reduction": None}, LOSSES),
        ({"reduction": None, "where": MASK}, LOSSES * [1, 0]),
        ({"reduction_axis": ()}, LOSSES),
        ({"reduction_axis": (), "where": MASK}, LOSSES * [1, 0]),
    ],
)
def test_reductions(options: dict[str, Any], expected: np.ndarray) -> None:
    losses = axn.named(LOSSES.astype(np.float32), (Batch, Pos))
    names = losses.names[: np.ndim(expected)]
    for found in (reduce_loss(losses, **options), cross_entropy_loss(LOGITS, Label, TARGETS, **options)):
        assert_named(found, axn.named(np.asarray(expected, np.float32), names), rtol=1e-5)
    positional = [options.get(k, d) for k, d in (("reduction", UNSPECIFIED), ("where", None), ("reduction_axis", None))]
    np.testing.assert_allclose(reduce_loss(losses, *positional).array, expected, rtol=1e-5)


def test_errors() -> None:
    with pytest.raises(
        TypeError, match=r"targets without axis 'label' are positions along it, so they are integers, got float32 \("
    ):
        cross_entropy_loss(LOGITS, Label, axn.ones(Batch))
    with pytest.raises(ValueError, match=r"cross_entropy_loss: no axis 'lable' in .* Did you mean 'label'"):
        cross_entropy_loss(LOGITS, "lable", TARGETS)
    with pytest.raises(ValueError, match=r"`targets` has axes \(heads\) that the array"):
        cross_entropy_loss(LOGITS, Label, axn.zeros({"heads": 2}, dtype=int))
    with pytest.raises(TypeError, match=r"`reduction` must be a function such as `axonym.sum`, or None .* got 'sum'"):
        cross_entropy_loss(LOGITS, Label, TARGETS, reduction="sum")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="axis 'batch' has conflicting sizes"):
        cross_entropy_loss(LOGITS, Label, axn.zeros({"batch": 3}, dtype=int))


def test_more_labels_than_bytes() -> None:
    logits = axn.named(np.zeros(300, np.float32), "label")
    found = cross_entropy_loss(logits, "label", axn.named(np.array(255, np.uint8), ()))
    np.testing.assert_allclose(found.array, np.log(300), rtol=1e-6)


def test_a_small_dtype_lacks_the_ignored_target() -> None:
    """The number that stands in its place is not ignored."""
    logits, targets = axn.zeros({"batch": 2, "label": 300}), axn.named(np.array([156, 3], np.uint8), "batch")
    mean = cross_entropy_loss(logits, "label", targets, axn.sum, ignore_index=-100)
    np.testing.assert_allclose(mean.array, 2 * np.log(300), rtol=1e-6)
    each, _ = cross_entropy_loss_and_log_normalizers(logits, "label", targets, ignore_index=-100)
    np.testing.assert_allclose(each.array, np.log(300), rtol=1e-6)
