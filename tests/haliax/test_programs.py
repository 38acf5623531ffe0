"""Small programs in the style of Haliax, which give the same numbers with Haliax and `axonym.haliax`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

optax = pytest.importorskip("optax")


def train_mlp(hax: Any, hnn: Any) -> list[float]:
    """Train an MLP with `named_jit` and Optax; return the losses."""
    Batch, In, Hidden, Out = hax.make_axes(batch=8, inputs=4, hidden=16, outputs=3)
    model = hnn.MLP.init(In, Out, width=Hidden, depth=2, activation=hax.tanh, key=jax.random.key(0))
    x = hax.random.normal(jax.random.key(1), (Batch, In))
    y = hnn.one_hot(hax.arange(Batch) % Out.size, Out)
    optimizer = optax.adam(1e-2)

    @hax.named_jit
    def step(model: Any, state: Any, x: Any, y: Any) -> Any:
        def loss_fn(model: Any) -> Any:
            return hnn.cross_entropy_loss(model(x), Out, y).scalar()

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state, loss

    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    losses = []
    for _ in range(5):
        model, state, loss = step(model, state, x, y)
        losses.append(float(loss))
    return losses


def scanned_transformer(hax: Any, hnn: Any) -> list[float]:
    """Run a causal transformer with scanned blocks; return its loss and the norm of its gradient."""
    Batch, Pos, Embed, Heads, HeadSize, Mlp, Vocab = hax.make_axes(
        batch=2, position=8, embed=16, heads=2, head_size=8, mlp=32, vocab=13
    )
    Layers = hax.Axis("layers", 3)
    KeyPos = Pos.alias("key_position")

    class Block(eqx.Module):
        norm_1: Any
        qkv: Any
        out: Any
        norm_2: Any
        mlp: Any

        @staticmethod
        def init(*, key: Any) -> Block:
            k1, k2, k3 = jax.random.split(key, 3)
            return Block(
                norm_1=hnn.LayerNorm.init(Embed),
                qkv=hnn.Linear.init(Embed, (hax.Axis("qkv", 3), Heads, HeadSize), key=k1),
                out=hnn.Linear.init((Heads, HeadSize), Embed, key=k2, use_bias=False),
                norm_2=hnn.RmsNorm.init(Embed, use_bias=False),
                mlp=hnn.MLP.init(Embed, Embed, width=Mlp, depth=1, activation=hnn.gelu, key=k3),
            )

        def __call__(self, x: Any, mask: Any) -> Any:
            q, k, v = self.qkv(self.norm_1(x)).unbind("qkv")
            k, v = k.rename({Pos.name: KeyPos.name}), v.rename({Pos.name: KeyPos.name})
            attended = hnn.attention.dot_product_attention(KeyPos, HeadSize, q, k, v, mask=mask)
            x = x + self.out(attended)
            return x + self.mlp(self.norm_2(x))

    class Model(eqx.Module):
        table: Any
        layers: Any

        def __call__(self, tokens: Any) -> Any:
            mask = hnn.attention.causal_mask(Pos, KeyPos)
            return self.table.unembed(self.layers.fold(self.table.embed(tokens), mask))

    k1, k2 = jax.random.split(jax.random.key(0))
    layers = hnn.Stacked.init(Layers, Block, gradient_checkpointing=True)(key=jax.random.split(k1, Layers.size))
    model = Model(hnn.Embedding.init(Vocab, Embed, key=k2), layers)
    tokens = (hax.arange(Pos) * 3 + hax.arange(Batch).broadcast_axis(Pos)) % Vocab.size

    @hax.named_jit
    def loss_and_norm(model: Model) -> Any:
        def loss_fn(model: Model) -> Any:
            targets = hnn.one_hot(hax.roll(tokens, -1, Pos), Vocab)
            return hnn.cross_entropy_loss(model(tokens), Vocab, targets).scalar()

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        return loss, jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))

    return [float(x) for x in loss_and_norm(model)]


def windowed_attention(hax: Any, hnn: Any) -> list[float]:
    """Compute attention with a prefix, weights by `einsum`, and chunks read and written by dynamic slices in a loop."""
    Pos, Head = hax.make_axes(position=8, head_size=4)
    KeyPos = Pos.alias("key_position")
    kq, kk, kv = jax.random.split(jax.random.key(2), 3)
    q, k = hax.random.normal(kq, (Pos, Head)), hax.random.normal(kk, (KeyPos, Head))
    v = hax.random.normal(kv, (KeyPos, Head))
    mask = hnn.attention.causal_mask(Pos, KeyPos) | (hax.arange(KeyPos) < 2).broadcast_axis(Pos)
    weights = hnn.attention.dot_product_attention_weights(Head, KeyPos, q, k, mask=mask)
    out = hax.einsum("position key_position, key_position head_size -> position head_size", weights, v)

    def add(carry: Any, i: Any) -> Any:
        chunk = out[Pos, hax.dslice(i * 3, 3)]
        return hax.updated_slice(carry, {"position": i}, chunk * 2), chunk.sum()

    carry, sums = hax.scan(add, hax.Axis("steps", 3))(hax.zeros_like(out), jnp.arange(3))
    return [*map(float, sums.array), float(carry.sum().array), float(hax.max(out).array)]


EXPECTED: dict[Callable[[Any, Any], list[float]], list[float]] = {
    train_mlp: [1.228298, 1.082753, 0.9582681, 0.8504512, 0.755383],
    scanned_transformer: [2.690152, 2.289],
    windowed_attention: [-3.75422, -2.717902, 2.183861, -2.481581, 1.032475],
}
"""The results of Haliax 1.4."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning:haliax")  # what Haliax itself still uses
@pytest.mark.parametrize("package", ["axonym.haliax", "haliax"])
@pytest.mark.parametrize("program", EXPECTED, ids=lambda p: p.__name__)
def test_a_program_gives_the_numbers_of_haliax(program: Callable[[Any, Any], list[float]], package: str) -> None:
    hax = pytest.importorskip(package, reason="Haliax cannot be imported", exc_type=ImportError)
    found = program(hax, importlib.import_module(f"{package}.nn"))
    np.testing.assert_allclose(found, EXPECTED[program], rtol=2e-5)
