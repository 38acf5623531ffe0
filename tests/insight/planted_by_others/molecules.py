"""Message passing on a large graph of contacts."""

import equinox as eqx
import jax
import optax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision
from blocks import BF16, abstract, floats, integers, key_of, state_of

Nodes, Edges, Features, Wide, Bonds = axn.make_axes(nodes=262_144, edges=2_097_152, features=256, wide=1024, bonds=16)
Layers, Kinds = axn.make_axes(layers=4, kinds=64)

MESH = {"data": 8}
MAPPING = {"nodes": "data", "edges": "data"}


class Passing(eqx.Module):
    norm: nn.RmsNorm
    widen: nn.Linear
    narrow: nn.Linear
    bond: nn.Linear
    update: nn.Linear

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 4)
        return Passing(
            nn.RmsNorm.init(Features, use_bias=False),
            nn.Linear.init(Features, Wide, key=keys[0]),
            nn.Linear.init(Wide, Features, key=keys[1]),
            nn.Linear.init(Bonds, Features, key=keys[2]),
            nn.Linear.init(Features, Features, key=keys[3]),
        )

    def __call__(self, h, bonds, senders, receivers):
        wide = nn.silu(self.widen(self.norm(h)))
        sent = self.narrow(wide["nodes", senders])
        messages = sent * nn.sigmoid(self.bond(bonds))
        return h + self.update(axn.segment_sum(messages, receivers, Nodes))


class Graph(eqx.Module):
    enter: nn.Embedding
    layers: nn.Stacked
    head: nn.Linear

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 3)
        return Graph(
            nn.Embedding.init(Kinds, Features, key=keys[0]),
            nn.Stacked.init(Layers, Passing, gradient_checkpointing=True)(key=keys[1]),
            nn.Linear.init(Features, (), key=keys[2]),
        )

    def __call__(self, kinds, bonds, senders, receivers):
        return self.head(self.layers.fold(self.enter(kinds), bonds, senders, receivers))


optimizer = optax.adamw(1e-3)
forward = mixed_precision(BF16, Graph.__call__)


def loss(model, kinds, bonds, senders, receivers, charges):
    return ((forward(model, kinds, bonds, senders, receivers) - charges) ** 2).mean()


def train(model, state, *data):
    value, gradients = axn.value_and_grad(loss)(model, *data)
    updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
    return value, eqx.apply_updates(model, updates), state


def arguments():
    model = abstract(Graph.init, key=key_of())
    data = integers(Nodes), floats(Edges, Bonds), integers(Edges), integers(Edges), floats(Nodes)
    return model, state_of(optimizer, model), *data
