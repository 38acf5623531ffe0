"""A stack of mixtures of experts over features of documents."""

import equinox as eqx
import jax
import optax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision
from blocks import BF16, abstract, floats, integers, key_of, state_of

Tokens, Embed, Mlp, Layers, Classes = axn.make_axes(tokens=65536, embed=1024, mlp=4096, layers=8, classes=512)
Experts, Scores = axn.make_axes(experts=8, scores=8)

MESH = {"data": 4, "model": 2}
MAPPING = {"tokens": ("data", "model"), "expert": "model"}


def of_experts(layers, rows, sizes):
    up, down = layers
    return down(nn.gelu(up(rows, sizes)), sizes)


class Mixture(eqx.Module):
    norm: nn.RmsNorm
    router: nn.Linear
    layers: list[nn.MoELinear]

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 3)
        return Mixture(
            nn.RmsNorm.init(Embed, use_bias=False),
            nn.Linear.init(Embed, Scores, key=keys[0], use_bias=False),
            [nn.MoELinear.init(Experts, Embed, Mlp, key=keys[1]), nn.MoELinear.init(Experts, Mlp, Embed, key=keys[2])],
        )

    def __call__(self, x):
        h = self.norm(x)
        chances = nn.softmax(self.router(h), "scores")
        weight, chosen = axn.top_k(chances, "scores", 1, "choice")
        found = nn.dispatch(of_experts, self.layers, h, chosen["choice", 0], Experts)
        return x + weight["choice", 0] * found


class Classifier(eqx.Module):
    mixtures: nn.Stacked
    head: nn.Linear

    @staticmethod
    def init(*, key):
        first, second = jax.random.split(key)
        return Classifier(
            nn.Stacked.init(Layers, Mixture, gradient_checkpointing=True)(key=first),
            nn.Linear.init(Embed, Classes, key=second),
        )

    def __call__(self, x):
        return self.head(self.mixtures.fold(x))


optimizer = optax.adamw(1e-3)
forward = mixed_precision(BF16, Classifier.__call__)


def loss(model, x, labels):
    return nn.cross_entropy_loss(forward(model, x), "classes", labels)


def train(model, state, x, labels):
    value, gradients = axn.value_and_grad(loss)(model, x, labels)
    updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
    return value, eqx.apply_updates(model, updates), state


def arguments():
    model = abstract(Classifier.init, key=key_of())
    return model, state_of(optimizer, model), floats(Tokens, Embed), integers(Tokens)
