"""GPT-2, written in names: the architecture of `GPT2LMHeadModel` in Hugging Face's `transformers`.

The axes of the model:

| axis        | counts                                                |
|-------------|-------------------------------------------------------|
| `batch`     | texts                                                 |
| `pos`       | tokens of a text; `key_pos` where attended to         |
| `context`   | positions that the model knows; a text may be shorter |
| `vocab`     | tokens there are                                      |
| `embed`     | features of the residual stream                       |
| `layers`    | blocks                                                |
| `qkv`       | queries, keys and values, which are made as one       |
| `heads`     | heads of attention                                    |
| `head_size` | features of a head                                    |
| `mlp`       | hidden features of the multilayer perceptron          |

The model does not mention devices. A mapping from these names to mesh axes distributes it: see `mappings.py`, and
`train.py`, which trains the model under each mapping.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax

import axonym as axn
from axonym import Axis, NamedArray, nn
from axonym.nn.attention import Causal, dot_product_attention
from axonym.state import ModuleWithStateDictSerialization


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The axes of a model, and its few other numbers."""

    Vocab: Axis
    Context: Axis
    Embed: Axis
    Layers: Axis
    Heads: Axis
    HeadSize: Axis
    Mlp: Axis
    norm_eps: float = 1e-5

    @staticmethod
    def from_huggingface(config: Mapping[str, Any]) -> Config:
        """Read a `config.json`, as a dictionary."""
        if (activation := config["activation_function"]) != "gelu_new":
            raise ValueError(f"Gpt2: the configuration asks for {activation!r}; this model has 'gelu_new' only.")
        embed, heads = config["n_embd"], config["n_head"]
        return Config(
            Vocab=Axis("vocab", config["vocab_size"]),
            Context=Axis("context", config["n_positions"]),
            Embed=Axis("embed", embed),
            Layers=Axis("layers", config["n_layer"]),
            Heads=Axis("heads", heads),
            HeadSize=Axis("head_size", embed // heads),
            Mlp=Axis("mlp", config.get("n_inner") or 4 * embed),
            norm_eps=config["layer_norm_epsilon"],
        )


class Attention(eqx.Module):
    """Causal attention of several heads."""

    c_attn: nn.Linear
    c_proj: nn.Linear

    @staticmethod
    def init(config: Config, *, key: jax.Array) -> Attention:
        attn, proj = jax.random.split(key)
        # One product for queries, keys and values: the axis `qkv` tells them apart. The weights of GPT-2 have the axes
        # of the input first.
        heads = (config.Heads, config.HeadSize)
        return Attention(
            c_attn=nn.Linear.init(config.Embed, (Axis("qkv", 3), *heads), key=attn, out_first=False),
            c_proj=nn.Linear.init(heads, config.Embed, key=proj, out_first=False),
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        q, k, v = self.c_attn(x).unbind("qkv")
        # Every position attends to every other, so what is attended to needs a name of its own.
        k, v = k.rename({"pos": "key_pos"}), v.rename({"pos": "key_pos"})
        return self.c_proj(dot_product_attention(q, k, v, "key_pos", "head_size", mask=Causal("pos")))


class Mlp(eqx.Module):
    """A multilayer perceptron with one hidden layer."""

    c_fc: nn.Linear
    c_proj: nn.Linear

    @staticmethod
    def init(config: Config, *, key: jax.Array) -> Mlp:
        fc, proj = jax.random.split(key)
        return Mlp(
            c_fc=nn.Linear.init(config.Embed, config.Mlp, key=fc, out_first=False),
            c_proj=nn.Linear.init(config.Mlp, config.Embed, key=proj, out_first=False),
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        return self.c_proj(nn.gelu(self.c_fc(x)))


class Block(eqx.Module):
    """Attention and a perceptron, each of which adds to the residual stream."""

    ln_1: nn.LayerNorm
    attn: Attention
    ln_2: nn.LayerNorm
    mlp: Mlp

    @staticmethod
    def init(config: Config, *, key: jax.Array) -> Block:
        attn, mlp = jax.random.split(key)
        return Block(
            ln_1=nn.LayerNorm.init(config.Embed, config.norm_eps),
            attn=Attention.init(config, key=attn),
            ln_2=nn.LayerNorm.init(config.Embed, config.norm_eps),
            mlp=Mlp.init(config, key=mlp),
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt2(ModuleWithStateDictSerialization):
    """From tokens to the logits of the tokens that follow.

    Fields that `transformers` calls otherwise are listed in `_state_dict_key_map`; all others have its names.
    """

    table: nn.Embedding
    positions: nn.Embedding
    blocks: nn.Stacked[Block]
    norm: nn.LayerNorm

    @staticmethod
    def init(config: Config, *, key: jax.Array) -> Gpt2:
        table, positions, blocks = jax.random.split(key, 3)
        # All blocks are made as one, whose weights have the axis `layers`, and they run in a loop: so a model of 48
        # blocks compiles as fast as one of 2. With checkpointing, the backward pass computes each block again.
        stacked = nn.Stacked.init(config.Layers, Block, gradient_checkpointing=True)
        return Gpt2(
            table=nn.Embedding.init(config.Vocab, config.Embed, key=table),
            positions=nn.Embedding.init(config.Context, config.Embed, key=positions),
            blocks=stacked(config, key=blocks),
            norm=nn.LayerNorm.init(config.Embed, config.norm_eps),
        )

    def __call__(self, tokens: NamedArray) -> NamedArray:
        positions = axn.arange(tokens.resolve_axis("pos"))
        x = self.table(tokens) + self.positions(positions)
        # Tokens are predicted with the table that embeds them.
        return self.table.unembed(self.norm(self.blocks.fold(x)))

    def loss(self, tokens: NamedArray) -> jax.Array:
        """The mean surprise at each token but the first, given those before it."""
        Pos = tokens.resolve_axis("pos")
        targets = axn.roll(tokens, -1, Pos)
        followed = axn.arange(Pos) < Pos.size - 1  # the last token is followed by none
        return nn.cross_entropy_loss(self(tokens), "vocab", targets, where=followed).scalar()

    def _state_dict_key_map(self) -> dict[str, str | None]:
        return {
            "table": "transformer.wte",
            "positions": "transformer.wpe",
            "blocks": "transformer.h",
            "norm": "transformer.ln_f",
        }
