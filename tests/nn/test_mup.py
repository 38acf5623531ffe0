"""Reparametrizations: the scales, and models that learn alike at any width."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import axonym as axn
from axonym.nn import mup
from axonym.nn.embedding import Embedding
from axonym.nn.linear import Linear
from axonym.nn.mup import learning_rate_scales

In, Out = axn.make_axes(a=2, b=8), axn.Axis("c", 5)
WIDTHS = 16, 256
STEPS, LEARNING_RATE = 3, 0.001


@pytest.mark.parametrize(
    ("kind", "init", "active", "lr"),
    [
        (mup.LinearStandardParam, 1 / 4, 1, 1),
        (mup.InputLinearMup, 1, 1, 1),
        (mup.HiddenLinearMup, 1 / 4, 1, 1 / 16),
        (mup.OutputLinearMup, 1, 1 / 16, 1),
    ],
)
def test_linear_scales(kind: Any, init: float, active: float, lr: float) -> None:
    reparam = kind(In, Out)
    assert (kind.init_scale(In, Out), reparam.active_scale, reparam.lr_scale) == (init, active, lr)


def test_embedding_scales() -> None:
    standard, wide = mup.EmbeddingStandardParam(In, Out), mup.EmbeddingMup(In, Out)
    assert standard.init_scale(Out, In) == 1 / 16 and wide.init_scale(Out, In) == 1
    assert (standard.active_scale, standard.lr_scale, standard.unembed_active_scale) == (1, 1, 1)
    assert (wide.active_scale, wide.lr_scale, wide.unembed_active_scale) == (1, 1, 1 / 16)


def test_learning_rate_scales() -> None:
    """Only the weights of layers are scaled, and what is not there stays away."""

    def make(key):
        hidden = Linear.init(In, Out, key=key, reparam_cls=mup.HiddenLinearMup)
        bare = Linear.init(In, Out, key=key, use_bias=False, reparam_cls=mup.HiddenLinearMup)
        return {"layers": [hidden, bare], "other": jnp.zeros(3)}

    model = eqx.filter_eval_shape(make, jax.random.key(0))
    scales = learning_rate_scales(model)
    assert jax.tree.structure(scales) == jax.tree.structure(model)
    assert [layer.weight.array for layer in scales["layers"]] == [1 / 16, 1 / 16]
    assert scales["layers"][0].bias.array == 1 and scales["layers"][1].bias is None and scales["other"] == 1
    without = jax.tree.map(lambda _: None, model)
    assert jax.tree.leaves(learning_rate_scales(without)) == []


class _Model(eqx.Module):
    """Tokens, a layer of each role, and back to tokens."""

    tokens: Embedding
    first: Linear
    hidden: Linear
    last: Linear

    def __call__(self, ids: axn.NamedArray, x: axn.NamedArray) -> dict[str, axn.NamedArray]:
        embedded = self.tokens(ids) + axn.tanh(self.first(x))
        hidden = axn.tanh(self.hidden(embedded))
        return {
            "embedded": embedded,
            "hidden": hidden,
            "output": self.last(hidden),
            "logits": self.tokens.unembed(hidden),
        }


def _make(width: int, use_mup: bool) -> _Model:
    Feature, Label, Vocab, Embed = axn.make_axes(feature=4, label=3, vocab=5, embed=width)
    generator = np.random.default_rng(0)

    def weight(kind: type[mup.AbstractReparam], From: axn.Axis, To: axn.Axis, *axes: axn.Axis) -> axn.NamedArray:
        drawn = generator.normal(0, kind.init_scale(From, To), [a.size for a in axes])
        return axn.named(drawn.astype(np.float32), [a.name for a in axes])

    def linear(From: axn.Axis, To: axn.Axis, kind: type[mup.AbstractLinearReparam]) -> Linear:
        stored = To, From.alias("embed_in") if From == To else From
        return Linear(weight(kind, From, To, *stored), None, From, To, None, kind)

    table = mup.EmbeddingMup if use_mup else mup.EmbeddingStandardParam
    return _Model(
        Embedding(weight(table, Vocab, Embed, Vocab, Embed), Vocab, Embed, table),
        linear(Feature, Embed, Linear.input_reparam(use_mup)),
        linear(Embed, Embed, Linear.hidden_reparam(use_mup)),
        linear(Embed, Label, Linear.output_reparam(use_mup)),
    )


def _activations(width: int, use_mup: bool) -> list[dict[str, float]]:
    """Return the size of the activations at the start, and of their change after a few steps of Adam."""
    model = _make(width, use_mup)
    ids = axn.named(np.arange(5), "batch")
    x = axn.named(np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32), ("batch", "feature"))
    adam = optax.adam(LEARNING_RATE)
    flat, unravel = ravel_pytree(model)  # one array, since every further one has to be compiled
    scales = np.concatenate(
        [
            np.full(leaf.size, s)
            for leaf, s in zip(*map(jax.tree.leaves, (model, learning_rate_scales(model))), strict=True)
        ]
    )

    def loss(flat):
        found = unravel(flat)(ids, x)
        return ((found["output"] - 1) ** 2).sum().array + ((found["logits"] - 1) ** 2).sum().array, found

    @jax.jit
    def step(flat, state):
        gradient, found = jax.grad(loss, has_aux=True)(flat)
        updates, state = adam.update(gradient, state)
        return flat + updates * scales, state, found

    flat, state, before = step(flat, adam.init(flat))
    after = before
    for _ in range(STEPS):
        flat, state, after = step(flat, state)
    start = {name: np.asarray(a.array) for name, a in before.items()}
    change = {name: np.asarray(after[name].array) - start[name] for name in start}
    return [{n: float(np.sqrt(np.mean(np.square(a)))) for n, a in tree.items()} for tree in (start, change)]


def test_coordinates() -> None:
    """Under muP neither the activations nor their changes grow with the width; under the standard one, changes do."""
    growth = {}
    for use_mup in (True, False):
        narrow, wide = (_activations(width, use_mup) for width in WIDTHS)
        growth[use_mup] = [{n: w[n] / s[n] for n in w} for s, w in zip(narrow, wide, strict=True)]
    start, change = growth[True]
    assert max(start.values()) < 1.5, start
    assert max(change.values()) < 1.5 and min(change.values()) > 0.5, change
    _, standard = growth[False]
    assert min(standard["hidden"], standard["output"], standard["logits"]) > 3, standard
