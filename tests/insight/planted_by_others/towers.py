"""Two towers: one embeds users, one items. A user's item should score above the other items of the batch."""

import equinox as eqx
import jax
import optax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision
from blocks import BF16, abstract, integers, key_of, state_of

Batch, Users, Items = axn.make_axes(batch=32768, users=1_048_576, items=524_288)
Code, Wide, Inner, Out, Hidden = axn.make_axes(code=128, wide=2048, inner=4096, out=128, hidden=3)

MESH = {"data": 8}
STORED = {"code": "data", "inner": "data"}
COMPUTE = {"batch": "data"}


class Residual(eqx.Module):
    up: nn.Linear
    down: nn.Linear

    @staticmethod
    def init(*, key):
        first, second = jax.random.split(key)
        return Residual(nn.Linear.init(Wide, Inner, key=first), nn.Linear.init(Inner, Wide, key=second))

    def __call__(self, x):
        return x + self.down(nn.gelu(self.up(x)))


class Tower(eqx.Module):
    table: nn.Embedding
    first: nn.Linear
    middle: nn.Stacked
    last: nn.Linear

    @staticmethod
    def init(rows, *, key):
        keys = jax.random.split(key, 4)
        return Tower(
            nn.Embedding.init(rows, Code, key=keys[0]),
            nn.Linear.init(Code, Wide, key=keys[1]),
            nn.Stacked.init(Hidden, Residual)(key=keys[2]),
            nn.Linear.init(Wide, Out, key=keys[3]),
        )

    def __call__(self, numbers):
        x = self.table(numbers)
        y = self.last(self.middle.fold(nn.gelu(self.first(x))))
        return y / axn.sqrt((y * y).sum("out") + 1e-6)


class Towers(eqx.Module):
    user: Tower
    item: Tower

    @staticmethod
    def init(*, key):
        first, second = jax.random.split(key)
        return Towers(Tower.init(Users, key=first), Tower.init(Items, key=second))

    def __call__(self, users, items):
        user = self.user(users)
        item = self.item(items).rename({"batch": "candidates"})
        return axn.dot(user, item, axis="out") / 0.05


optimizer = optax.adagrad(1e-2)
forward = mixed_precision(BF16, Towers.__call__)


def loss(model, users, items):
    return nn.cross_entropy_loss(forward(model, users, items), "candidates", axn.arange(Batch))


def train(model, state, users, items):
    value, gradients = axn.value_and_grad(loss)(model, users, items)
    updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
    return value, eqx.apply_updates(model, updates), state


def arguments():
    model = abstract(Towers.init, key=key_of())
    return model, state_of(optimizer, model), integers(Batch), integers(Batch)
