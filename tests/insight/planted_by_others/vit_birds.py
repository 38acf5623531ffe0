"""A vision transformer that tells birds apart."""

import equinox as eqx
import jax
import optax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision
from blocks import BF16, Encoder, abstract, floats, integers, key_of, state_of

Batch, Height, Width, Color, Species = axn.make_axes(batch=512, height=224, width=224, color=3, species=10000)
Rows, Columns, Down, Right = axn.make_axes(rows=14, columns=14, down=16, right=16)
Embed, Heads, HeadSize, Mlp, Layers = axn.make_axes(embed=1024, heads=16, head_size=64, mlp=2816, layers=24)

MESH = {"data": 8}
STORED = {"embed": "data"}
COMPUTE = {"batch": "data"}


class Vision(eqx.Module):
    patches: nn.Linear
    places: axn.NamedArray
    encoder: Encoder
    head: nn.Linear

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 4)
        return Vision(
            nn.Linear.init((Color, Down, Right), Embed, key=keys[0]),
            0.02 * axn.random.normal(keys[1], (Rows, Columns, Embed)),
            Encoder.init(Layers, Embed, Heads, HeadSize, Mlp, key=keys[2]),
            nn.Linear.init(Embed, Species, key=keys[3]),
        )

    def __call__(self, images):
        x = images.unflatten_axis("height", (Rows, Down)).unflatten_axis("width", (Columns, Right))
        x = self.patches(x) + self.places
        x = axn.flatten_axes(x, ("rows", "columns"), "pos")
        x = self.encoder(x)
        return self.head(x.mean("pos"))


optimizer = optax.adamw(1e-3, weight_decay=0.05)
forward = mixed_precision(BF16, Vision.__call__)


def loss(model, images, labels):
    return nn.cross_entropy_loss(forward(model, images), "species", labels)


def train(model, state, images, labels):
    value, gradients = axn.value_and_grad(loss)(model, images, labels)
    updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
    return value, eqx.apply_updates(model, updates), state


def arguments():
    model = abstract(Vision.init, key=key_of())
    return model, state_of(optimizer, model), floats(Batch, Color, Height, Width), integers(Batch)
