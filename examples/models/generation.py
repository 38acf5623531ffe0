"""Generate text with a model, token by token, with a cache of keys and values.

The tokens do not depend on the sharding, and a sharded vocabulary is never all-gathered.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import axonym as axn
from axonym import Axis, NamedArray
from axonym.nn.attention import KVCache
from axonym.random import categorical


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen: see `axonym.random.categorical`."""

    temperature: float = 1.0
    """How even the choice is; 0 takes the likeliest token."""
    top_k: int | None = None
    """Among how many tokens to choose."""
    top_p: float | None = None
    """Among the likeliest tokens that have this share of the probability."""
    min_p: float | None = None
    """Among tokens at least this many times as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """How much smaller the logits of tokens that are in the text already become: above 1, text repeats itself less."""

    def choose(self, key: jax.Array, logits: NamedArray, seen: NamedArray | None) -> NamedArray:
        """Choose a token for each text."""
        logits = logits.astype("float32")
        if seen is not None:
            weaker = axn.where(logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty)
            logits = axn.where(seen, weaker, logits)
        if self.temperature == 0:
            return logits.argmax("vocab")
        top_k = None if self.top_k is None else min(self.top_k, logits.axis_size("vocab"))
        options = {"temperature": self.temperature, "top_k": top_k, "top_p": self.top_p, "min_p": self.min_p}
        return categorical(key, logits, "vocab", **options)


class Text(eqx.Module):
    """Texts that are being written."""

    token: NamedArray
    """The token of each text that was chosen last, which is not in the cache yet."""
    cache: KVCache
    """The keys and values of all tokens before."""
    seen: NamedArray | None
    """Which tokens of the vocabulary are in each text; None where that does not matter."""
    written: jax.Array
    """How many tokens were chosen."""


def start(
    model: Any, prompts: NamedArray, key: jax.Array, sampling: Sampling, room: int, count: NamedArray | None = None
) -> Text:
    """Read prompts, and choose the first token after each.

    Arguments:
        model: a `Llama`.
        prompts: the tokens of each prompt, along `pos`.
        key: the random key of the whole text.
        sampling: how tokens are chosen.
        room: how many tokens there may be in all.
        count: how many tokens of each prompt are valid, all by default; the rest, at the end, is padding.
    """
    KPos = axn.sharding.round_axis_for_partitioning(Axis("key_pos", room))
    cache = model.empty_cache(prompts.resolve_axis("batch"), KPos)
    logits, cache = model.extend(prompts, cache, count)
    seen = None
    if sampling.repetition_penalty != 1:
        valid = prompts
        if count is not None:  # padding is given the number of no token
            Pos, Vocab = prompts.resolve_axis("pos"), logits.resolve_axis("vocab")
            valid = axn.where(axn.arange(Pos) < count.broadcast_axis(Pos), prompts, Vocab.size)
        seen = axn.zeros_like(logits, bool).at["vocab", valid].set(True, mode="drop")
    return _followed(sampling, key, logits, cache, seen, jnp.zeros((), jnp.int32))


def step(model: Any, text: Text, key: jax.Array, sampling: Sampling) -> Text:
    """Choose one token more for each text. All positions run the same program, in which the cache is updated."""
    logits, cache = model.extend(text.token.broadcast_axis(Axis("pos", 1)), text.cache)
    return _followed(sampling, key, logits, cache, text.seen, text.written)


def _followed(
    sampling: Sampling, key: jax.Array, logits: NamedArray, cache: KVCache, seen: NamedArray | None, written: jax.Array
) -> Text:
    token = sampling.choose(jax.random.fold_in(key, written), logits, seen)
    return Text(token, cache, None if seen is None else seen.at["vocab", token].set(True), written + 1)


def generate(
    model: Any, prompts: NamedArray, length: int, key: jax.Array, sampling: Sampling, count: NamedArray | None = None
) -> NamedArray:
    """Write `length` tokens after each prompt, in one program; see `start` for the arguments."""

    text = start(model, prompts, key, sampling, prompts.axis_size("pos") + length, count)
    return axn.scan(lambda text: (step(model, text, key, sampling), text.token), Axis("pos", length))(text)[1]
