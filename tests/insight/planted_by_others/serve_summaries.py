"""Generates summaries of documents, many at once."""

import jax
import jax.numpy as jnp

import axonym as axn
from blocks import integers
from serving import empty_cache, weights

Batch, Steps = axn.make_axes(batch=64, steps=32)

MESH = {"data": 8}
MAPPING = ({"embed": "data"}, {"batch": "data"})


def generate(model, cache, token):
    def one(carry, step):
        token, cache = carry
        logits, cache = model(token, cache)
        token = axn.argmax(logits, "vocab").astype(jnp.int32)
        return (token, cache), token

    (_, cache), tokens = axn.scan(one, Steps)((token, cache), axn.arange(Steps))
    return tokens, cache


def arguments():
    return weights(), empty_cache(Batch, 4096), integers(Batch)
