"""Reads long questions, and returns the scores of the first word of each answer."""

import axonym as axn

from server import Writer, empty

__all__ = ["Writer", "empty", "read"]


def read(model, cache, prompts, count):
    """Read prompts of `count` tokens each; those after them are padding."""
    x, cache = model(prompts, cache)
    logits = model.logits(x).astype("float32")
    first = logits["pos", count - 1]
    return axn.nn.log_softmax(first, "vocab"), cache
