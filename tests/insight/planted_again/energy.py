"""Forecasts the load of power grids from patches of their history."""

import equinox as eqx
import jax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision

from blocks import Block


class Load(eqx.Module):
    inward: nn.Linear
    blocks: nn.Stacked
    norm: nn.RmsNorm
    head: nn.Linear

    @staticmethod
    def init(Patch, Embed, Layers, Heads, HeadSize, Mlp, Horizon, *, key):
        keys = jax.random.split(key, 3)
        return Load(
            inward=nn.Linear.init(Patch, Embed, key=keys[0]),
            blocks=nn.Stacked.init(Layers, Block, gradient_checkpointing=True)(
                Embed, Heads, HeadSize, Mlp, key=keys[1]
            ),
            norm=nn.RmsNorm.init(Embed, use_bias=False),
            head=nn.Linear.init(Embed, Horizon, key=keys[2]),
        )

    def __call__(self, patches):
        return self.head(self.norm(self.blocks.fold(self.inward(patches))))


forward = mixed_precision("params=float32,compute=bfloat16,output=float32", Load.__call__)


def loss(model, patches, future):
    error = abs(forward(model, patches) - future)
    return axn.where(error < 1, 0.5 * error * error, error - 0.5).mean().scalar()
