"""Click prediction: 26 categorical features share one hashed table, and a network reads their embeddings."""

import equinox as eqx
import jax
import optax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision
from blocks import BF16, abstract, floats, integers, key_of, state_of

Batch, Slots, Buckets, Factors = axn.make_axes(batch=65536, slots=26, buckets=6_291_456, factors=64)
Dense, Width, Layers = axn.make_axes(dense=13, width=2048, layers=4)

MESH = {"data": 8}
STORED = {"width": "data"}
COMPUTE = {"batch": "data"}


class Cross(eqx.Module):
    mix: nn.Linear
    norm: nn.RmsNorm

    @staticmethod
    def init(*, key):
        return Cross(nn.Linear.init(Width, Width, key=key), nn.RmsNorm.init(Width, use_bias=False))

    def __call__(self, x):
        return x + nn.relu(self.mix(self.norm(x)))


class Clicks(eqx.Module):
    table: nn.Embedding
    read: nn.Linear
    dense: nn.Linear
    layers: nn.Stacked
    head: nn.Linear

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 5)
        return Clicks(
            nn.Embedding.init(Buckets, Factors, key=keys[0]),
            nn.Linear.init((Slots, Factors), Width, key=keys[1]),
            nn.Linear.init(Dense, Width, key=keys[2]),
            nn.Stacked.init(Layers, Cross)(key=keys[3]),
            nn.Linear.init(Width, (), key=keys[4]),
        )

    def __call__(self, hashed, numbers):
        x = self.read(self.table(hashed)) + self.dense(numbers)
        return self.head(self.layers.fold(x))


optimizer = optax.adagrad(1e-2)
forward = mixed_precision(BF16, Clicks.__call__)


def loss(model, hashed, numbers, clicked):
    return nn.binary_cross_entropy_loss(forward(model, hashed, numbers), clicked)


def train(model, state, hashed, numbers, clicked):
    value, gradients = axn.value_and_grad(loss)(model, hashed, numbers, clicked)
    updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
    return value, eqx.apply_updates(model, updates), state


def arguments():
    model = abstract(Clicks.init, key=key_of())
    return model, state_of(optimizer, model), integers(Batch, Slots), floats(Batch, Dense), floats(Batch)
