"""A vision transformer that names what a photo shows."""

import equinox as eqx
import jax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision

from blocks import Block


class Vision(eqx.Module):
    patches: nn.Linear
    places: axn.NamedArray
    blocks: nn.Stacked
    norm: nn.RmsNorm
    head: nn.Linear

    @staticmethod
    def init(Pos, Pixels, Embed, Layers, Heads, HeadSize, Mlp, Label, *, key):
        keys = jax.random.split(key, 4)
        return Vision(
            patches=nn.Linear.init(Pixels, Embed, key=keys[0]),
            places=0.02 * axn.random.normal(keys[1], (Pos, Embed)),
            blocks=nn.Stacked.init(Layers, Block, gradient_checkpointing=True)(
                Embed, Heads, HeadSize, Mlp, False, False, key=keys[2]
            ),
            norm=nn.RmsNorm.init(Embed, use_bias=False),
            head=nn.Linear.init(Embed, Label, key=keys[3]),
        )

    def __call__(self, pixels):
        x = self.patches(pixels) + self.places
        return self.head(self.norm(self.blocks.fold(x)).mean("pos"))


forward = mixed_precision("params=float32,compute=bfloat16,output=float32", Vision.__call__)


def loss(model, pixels, labels):
    return nn.cross_entropy_loss(forward(model, pixels), "label", labels).scalar()
