"""Tags sounds: what is heard in ten seconds of audio?"""

import equinox as eqx
import jax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision

from blocks import OPTIMIZER, Block


class Tagger(eqx.Module):
    inward: nn.Conv
    blocks: nn.Stacked
    norm: nn.RmsNorm
    head: nn.Linear

    @staticmethod
    def init(Time, Mel, Embed, Layers, Heads, HeadSize, Mlp, Tag, *, key):
        keys = jax.random.split(key, 3)
        return Tagger(
            inward=nn.Conv.init(Time, Mel, Embed, kernel_size=4, stride=4, key=keys[0]),
            blocks=nn.Stacked.init(Layers, Block, gradient_checkpointing=True)(
                Embed, Heads, HeadSize, Mlp, False, key=keys[1]
            ),
            norm=nn.RmsNorm.init(Embed, use_bias=False),
            head=nn.Linear.init(Embed, Tag, key=keys[2]),
        )

    def __call__(self, spectrum):
        x = self.inward(spectrum).rename({"time": "pos"})
        return self.head(self.norm(self.blocks.fold(x)).mean("pos"))


forward = mixed_precision("params=float32,compute=bfloat16,output=float32", Tagger.__call__)


def loss(model, spectrum, tags):
    return nn.binary_cross_entropy_loss(forward(model, spectrum), tags).mean().scalar()


def quality(model, spectrum, tags):
    """The share of tags that are found, and of found ones that are right."""
    found, there = forward(model, spectrum) > 0, tags > 0.5
    right = (found & there).sum()
    return right / there.sum(), right / axn.maximum(found.sum(), 1)


def step(model, state, spectrum, tags):
    value, gradients = axn.value_and_grad(loss)(model, spectrum, tags)
    updates, state = OPTIMIZER.update(gradients, state, model)
    model = eqx.apply_updates(model, updates)
    recall, precision = quality(model, spectrum, tags)
    return model, state, {"loss": value, "recall": recall, "precision": precision}
