"""Operations for the tests, each with a function of unsharded arrays and one of shards, and ways to inspect them."""

import re

import jax
import jax.numpy as jnp
import numpy as np

import axonym as axn
from axonym.custom_partitioning import partitioned

Batch, Vocab, Embed = axn.make_axes(batch=8, vocab=16, embed=4)


def draw(*axes: axn.Axis, seed: int = 0) -> axn.NamedArray:
    values = np.random.default_rng(seed).normal(size=[a.size for a in axes])
    return axn.named(values.astype(np.float32), axes)


def scalar_loss(y: axn.NamedArray) -> jax.Array:
    return axn.sum(y * y).scalar()


@partitioned(reduced="vocab")
def log_normalizer(logits, temperature):
    return axn.logsumexp(logits / temperature, "vocab")


@log_normalizer.per_shard
def _log_normalizer(logits, temperature):
    logits = logits / temperature
    highest = axn.pmax(axn.max(jax.lax.stop_gradient(logits), "vocab"), "vocab")
    return axn.log(axn.psum(axn.sum(axn.exp(logits - highest), "vocab"), "vocab")) + highest


@partitioned(reduced="vocab")
def top(logits, *, k):
    values, indices = jax.lax.top_k(axn.rearrange(logits, ("batch", "vocab")).array, k)
    return axn.named(values, ("batch", "k")), axn.named(indices, ("batch", "k"))


@top.per_shard
def _top(logits, *, k):
    logits = axn.rearrange(logits, ("batch", "vocab"))
    values, indices = jax.lax.top_k(logits.array, min(k, logits.axis_size("vocab")))
    indices = indices + axn.axis_offset("vocab", x=logits)
    values = axn.all_gather(axn.named(values, ("batch", "vocab")), "vocab")
    indices = axn.all_gather(axn.named(indices, ("batch", "vocab")), "vocab")
    best, among = jax.lax.top_k(values.array, k)
    return axn.named(best, ("batch", "k")), axn.named(jnp.take_along_axis(indices.array, among, 1), ("batch", "k"))


@partitioned("b v, -> b", reduced="v")
def raw_total(x, scale):
    return axn.psum(jnp.sum(x, -1), "v") * scale


def check(got, expected):
    got, expected = (jax.tree.map(np.asarray, jax.block_until_ready(tree)) for tree in (got, expected))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def collectives(fn, *args):
    """Return the collectives of the compiled program, each with the number of elements of its result."""
    text = jax.jit(fn).lower(*args).compile().as_text() or ""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    found = re.findall(rf"= (\w+)\[([\d,]*)\]\S* ({kinds})\(", text)
    return [(kind, int(np.prod([int(n) for n in shape.split(",") if n]))) for _, shape, kind in found]
