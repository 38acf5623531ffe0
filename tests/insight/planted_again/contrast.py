"""Search for products: a tower for queries and one for products, trained on pairs that belong together."""

import equinox as eqx
import jax

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision

from blocks import Block


class Search(eqx.Module):
    table: nn.Embedding
    blocks: nn.Stacked
    norm: nn.RmsNorm
    query: nn.Linear
    product: nn.MLP
    sharpness: axn.NamedArray

    @staticmethod
    def init(Vocab, Embed, Layers, Heads, HeadSize, Mlp, Features, Width, Shared, *, key):
        keys = jax.random.split(key, 4)
        return Search(
            table=nn.Embedding.init(Vocab, Embed, key=keys[0]),
            blocks=nn.Stacked.init(Layers, Block, gradient_checkpointing=True)(
                Embed, Heads, HeadSize, Mlp, False, key=keys[1]
            ),
            norm=nn.RmsNorm.init(Embed, use_bias=False),
            query=nn.Linear.init(Embed, Shared, key=keys[2]),
            product=nn.MLP.init(Features, Shared, width=Width, depth=2, key=keys[3]),
            sharpness=axn.zeros(()),
        )

    def __call__(self, words, features):
        q = self.query(self.norm(self.blocks.fold(self.table(words))).mean("pos"))
        p = self.product(features)
        return [x / axn.sqrt((x * x).sum("shared") + 1e-6) for x in (q, p)]


forward = mixed_precision("params=float32,compute=bfloat16,output=float32", Search.__call__)


def loss(model, words, features):
    q, p = axn.unshard(forward(model, words, features))
    scores = axn.dot(q, p.rename({"batch": "other"}), axis="shared") * axn.exp(model.sharpness)
    own = axn.arange(q.resolve_axis("batch"))
    to_products = nn.cross_entropy_loss(scores, "other", own)
    to_queries = nn.cross_entropy_loss(scores, "batch", own.rename({"batch": "other"}))
    return (to_products + to_queries).scalar() / 2
