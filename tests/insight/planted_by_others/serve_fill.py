"""Completes forms: some tokens for each of many prompts."""

import jax
import jax.numpy as jnp

import axonym as axn
from blocks import Decoder, abstract, integers, key_of

Batch, Pos, Vocab = axn.make_axes(batch=64, pos=1024, vocab=32768)
Embed, Heads, HeadSize, Mlp, Layers = axn.make_axes(embed=4096, heads=32, head_size=128, mlp=11008, layers=16)
New = axn.Axis("new", 64)

MESH = {"data": 2, "model": 4}
MAPPING = {"batch": "data", "heads": "model", "mlp": "model", "vocab": "model"}


def complete(model, tokens):
    """Fill the last positions of the prompts, one after the other."""
    first = Pos.size - New.size

    def one(tokens, step):
        at = first + step
        logits = model(tokens)["pos", at - 1]
        following = axn.argmax(logits, "vocab").astype(tokens.dtype)
        return tokens.at["pos", at].set(following)

    return axn.fold(one, New)(tokens, axn.arange(New))["pos", first:]


def arguments():
    model = abstract(Decoder.init, Vocab, Layers, Embed, Heads, HeadSize, Mlp, key=key_of())
    model = abstract(lambda m: jax.tree.map(lambda x: x.astype(jnp.bfloat16), m), model)
    return model, integers(Batch, Pos)
