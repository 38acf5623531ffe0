"""Programs that mix up axes, beside programs that do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import axonym as axn
from tests.names.models import abstract, tokens

N = 4
X = abstract(2, N, 8)
PAIRS = abstract(N, N)
W = abstract(8, 8)

pytestmark = pytest.mark.usefixtures("promotes_ranks")


def kinds(fn: Callable[..., Any], *args: Any, names: Any) -> list[str]:
    """Return the kinds of the mix-ups that are found in a function, and in its gradient."""
    found = axn.names.infer(fn, *args, names=names).mix_ups
    with_gradient = axn.names.infer(jax.grad(lambda *xs: fn(*xs).sum(), allow_int=True), *args, names=names).mix_ups
    assert [(m.kind, set(m.names)) for m in found] == [(m.kind, set(m.names)) for m in with_gradient]
    return [m.kind for m in found]


# --- two names that meet ---


@pytest.mark.parametrize(
    ("fn", "names"),
    [
        (lambda x, y: x + y.T, ("a b", "a b")),
        (lambda x, y: x @ y, ("a b", "a b")),
        (lambda x, y: jnp.concatenate([x, y.T]), ("a b", "a b")),
        (lambda x, y: jnp.where(x > 0, x, y.T), ("a b", "a b")),
        (lambda x, y: x * y.sum(0)[:, None], ("a b", "a b")),
        (lambda x, y: x - y.mean(1), ("a b", "a b")),
        (lambda x, y: jnp.einsum("ij,jk->ik", x, y), ("a b", "a b")),
        (lambda x, y: x.reshape(2, 2, N) @ y, ("a b", "a b")),
        (lambda x, y: x.at[1].set(y[:, 0]), ("a b", "a b")),
        (lambda x, y: jax.lax.scan(lambda c, r: (c + r, c), x[0], y.T)[0], ("a b", "a b")),
        (lambda x, y: jax.lax.cond(x.sum() > 0, lambda: x, lambda: y.T), ("a b", "a b")),
    ],
)
def test_two_names(fn: Callable[..., Any], names: Any) -> None:
    """The clean program has the array the other way round."""
    assert kinds(fn, PAIRS, PAIRS, names=names) == ["names"]
    assert kinds(fn, PAIRS, PAIRS, names=(names[0], "b a")) == []


def test_indices() -> None:
    def look_up(ids: jax.Array, table: jax.Array, logits: jax.Array) -> jax.Array:
        return table[ids].sum() + jnp.take_along_axis(logits, ids[:, None], 1).sum()

    args = tokens(3), abstract(N, 8), abstract(3, N)
    assert kinds(look_up, *args, names=("batch", "vocab embed", "batch vocab")) == []
    assert kinds(look_up, *args, names=("batch", "vocab embed", "batch classes")) == ["names"]


def test_what_indexes_no_axis() -> None:
    """Axes of one size stay apart, though a value that comes from one of them meets the other."""

    def by_distance(x: jax.Array, table: jax.Array) -> jax.Array:
        positions = jnp.arange(N)
        return x @ table[jnp.clip(positions[:, None] - positions[None, :], 0, N - 1)]

    def in_order_of_experts(x: jax.Array, w: jax.Array) -> jax.Array:
        experts = jnp.argmax(x @ w, -1)
        return x[jnp.argsort(experts)] * w.T[experts]

    def as_long(length: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        kept = [jnp.where(jnp.arange(N) < length[:, None], z, 0.0) for z in (x, y)]
        return kept[0].sum(1) + kept[1].sum(1)

    assert kinds(by_distance, PAIRS, abstract(N), names=("batch pos", "buckets")) == []
    assert kinds(in_order_of_experts, PAIRS, PAIRS, names=("tokens embed", "embed experts")) == []
    arrays = abstract(3, N), abstract(3, N)
    assert kinds(as_long, tokens(3), *arrays, names=("batch", "batch source", "batch target")) == []


def test_a_block_of_a_cache_is_no_mix_up() -> None:
    """The sizes of a block and a cache may be the same, but axes that are written as a whole are the same."""

    def write(cache: jax.Array, x: jax.Array, at: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(cache, x, (at, 0))

    for n in (N, 2):
        args = PAIRS, abstract(n, N), abstract(dtype=jnp.int32)
        assert kinds(write, *args, names=("length embed", "pos embed", None)) == []
        assert kinds(write, *args, names=("length embed", "pos mlp", None)) == ["names"]
        assert axn.names.infer(write, *args, names=("_ embed", "pos embed", None)).results == ("pos", "embed")


def test_another_axis_is_no_role_by_contraction() -> None:
    project = lambda h, p: h.T @ p
    assert kinds(project, PAIRS, PAIRS, names=("obs state", "state state'")) == ["names"]
    assert kinds(project, PAIRS, PAIRS, names=("state obs", "state state'")) == []


def test_a_split_axis_that_is_whole_again() -> None:
    halves = lambda x, w: x.reshape(2, 2, N).sum(2).reshape(N) @ w
    assert kinds(halves, PAIRS, PAIRS, names=("height width", "place embed")) == ["names"]
    assert kinds(halves, PAIRS, PAIRS, names=("height width", "height embed")) == []


def heads_of_two_sizes(x: jax.Array, w: jax.Array, scale: jax.Array, out: jax.Array) -> jax.Array:
    q, k, v = jnp.split(x @ w, 3, -1)
    return jnp.tanh(x + jax.nn.softmax((q * scale) @ k.T) @ v @ out)


def test_equal_parts_of_an_axis_may_have_names_of_their_own() -> None:
    args = PAIRS, abstract(N, 3 * N), abstract(N), PAIRS
    names = "pos embed", "embed _", "qk_dim", "v_dim embed"
    assert kinds(heads_of_two_sizes, *args, names=names) == []
    program = axn.names.infer(jax.grad(lambda *xs: heads_of_two_sizes(*xs).sum(), (1, 2, 3)), *args, names=names)
    assert program.results == (("embed", None), ("qk_dim",), ("v_dim", "embed"))
    # Queries and keys are multiplied, so they are one axis; and a declared factor is the same in all parts.
    keys_too = lambda x, w, scale, out, other: heads_of_two_sizes(x * other, w, scale, out)
    assert kinds(keys_too, *args, abstract(N), names=(*names, "embed")) == []
    assert kinds(keys_too, *args, abstract(N), names=(*names, "pos")) == ["names"]
    assert kinds(heads_of_two_sizes, *args, names=(names[0], "embed three*qk_dim", *names[2:])) == ["names"]


def test_equal_parts_that_meet() -> None:
    def gated(x: jax.Array, w: jax.Array, bias: jax.Array, out: jax.Array) -> jax.Array:
        gate, up = jnp.split(x @ w, 2, -1)
        return (jax.nn.silu(gate + bias) * up) @ out

    args = PAIRS, abstract(N, 2 * N), abstract(N), PAIRS
    assert kinds(gated, *args, names=("batch embed", "embed _", "mlp", "mlp embed")) == []
    assert kinds(gated, *args, names=("batch embed", "embed _", "mlp", "embed mlp")) == ["names"]


def test_a_mix_up_says_everything() -> None:
    program = axn.names.infer(lambda x, w: x @ w.T, PAIRS, PAIRS, names=("batch embed", "embed mlp"))
    (found,) = program.mix_ups
    assert found.names == ("embed", "mlp")
    assert "test_mix_ups.py" in str(found)
    assert str(found).startswith("'embed' (") and "meets 'mlp'" in str(found)
    assert "names=" in found.said_by[0]


# --- attention ---


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: Callable[[jax.Array], jax.Array], axis: int = -1) -> Any:
    scores = jnp.einsum("bqd,bkd->bqk", q, k)
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(mask(scores), axis), v)


def self_attention(mask: Callable[..., jax.Array], axis: int = -1) -> Callable[..., jax.Array]:
    return lambda x, w, *m: x + attention(x @ w, x, x, lambda scores: mask(scores, *m), axis)


HIDDEN = -1e9

APPLIED = {
    "where": lambda s, m: jnp.where(m, s, HIDDEN),
    "where not": lambda s, m: jnp.where(~m, HIDDEN, s),
    "added": lambda s, m: s + jnp.where(m, 0.0, HIDDEN),
    "one less": lambda s, m: s + (1.0 - m.astype(s.dtype)) * jnp.finfo(s.dtype).min,
    "penalty": lambda s, m: s - 1e10 * (1 - m.astype(s.dtype)),
    "product": lambda s, m: s * m.astype(s.dtype) - 1e10 * (1 - m.astype(s.dtype)),
}


@pytest.mark.parametrize("how", APPLIED)
def test_declared_mask(how: str) -> None:
    """The mask says which axis is that of keys."""
    clean = self_attention(APPLIED[how])
    transposed = self_attention(lambda s, m: APPLIED[how](s, m.T))
    args = X, W, abstract(N, N, dtype=bool)
    for names in ("pos key_pos", "pos pos'"):
        assert kinds(clean, *args, names=("batch pos embed", None, names)) == []
        (found,) = kinds(transposed, *args, names=("batch pos embed", None, names))
        assert found in ("names", "side")


def test_declared_bias() -> None:
    clean, transposed = self_attention(lambda s, m: s + m), self_attention(lambda s, m: s + m.T)
    assert kinds(clean, X, W, PAIRS, names=("batch pos embed", None, "pos key_pos")) == []
    assert kinds(transposed, X, W, PAIRS, names=("batch pos embed", None, "pos key_pos")) == ["names"]


def test_key_padding() -> None:
    clean = self_attention(lambda s, m: jnp.where(m[:, None, :], s, HIDDEN))
    wrong = self_attention(lambda s, m: jnp.where(m[:, :, None], s, HIDDEN))
    both = self_attention(lambda s, m: jnp.where(m[:, :, None] & m[:, None, :], s, HIDDEN))
    mask = abstract(2, N, dtype=bool)
    assert kinds(clean, X, W, mask, names=("batch pos embed", None, "batch pos")) == []
    assert kinds(both, X, W, mask, names=("batch pos embed", None, "batch pos")) == []
    assert kinds(wrong, X, W, mask, names=("batch pos embed", None, "batch pos")) == ["mask"]
    assert kinds(wrong, X, W, mask, names=("batch pos embed", None, "batch key_pos")) != []


CAUSAL = {
    "tril": lambda: jnp.tril(jnp.ones((N, N), bool)),
    "iotas": lambda: jnp.arange(N)[:, None] >= jnp.arange(N)[None, :],
    "less": lambda: ~(jnp.arange(N)[:, None] < jnp.arange(N)[None, :]),
    "difference": lambda: jnp.arange(N)[:, None] - jnp.arange(N)[None, :] >= 0,
    "no triu": lambda: jnp.triu(jnp.ones((N, N)), 1) == 0,
    "window": lambda: jnp.triu(jnp.tril(jnp.ones((N, N), bool)), -2),
}


@pytest.mark.parametrize("how", ["where", "one less"])
@pytest.mark.parametrize("mask", CAUSAL)
def test_causal(mask: str, how: str) -> None:
    clean = self_attention(lambda s: APPLIED[how](s, CAUSAL[mask]()))
    wrong = self_attention(lambda s: APPLIED[how](s, CAUSAL[mask]().T))
    assert kinds(clean, X, W, names=("batch pos embed", None)) == []
    assert kinds(wrong, X, W, names=("batch pos embed", None)) == ["future"]
    assert not axn.names.infer(wrong, X, W, names=("batch pos embed", None), allow=["future"]).mix_ups
    with pytest.raises(ValueError, match="'futur' is no kind of mix-up"):
        axn.names.infer(wrong, X, W, names=("batch pos embed", None), allow=["futur"])


def test_softmax_over_the_queries() -> None:
    assert kinds(self_attention(lambda s: s, -1), X, W, names=("batch pos embed", None)) == []
    assert kinds(self_attention(lambda s: s, -2), X, W, names=("batch pos embed", None)) == ["softmax"]


def test_masks_in_loops() -> None:
    def layers(turn: bool) -> Callable[..., Any]:
        def run(x: jax.Array, ws: jax.Array, m: jax.Array) -> jax.Array:
            layer = jax.checkpoint(self_attention(lambda s, m: jnp.where(m.T if turn else m, s, HIDDEN)))
            return jax.lax.scan(lambda x, w: (layer(x, w, m), None), x, ws)[0]

        return run

    args = X, abstract(3, 8, 8), abstract(N, N, dtype=bool)
    names = ("batch pos embed", None, "pos key_pos")
    assert kinds(layers(False), *args, names=names) == []
    assert kinds(layers(True), *args, names=names) == ["names"]


class FusedAttention(linen.Module):
    """Attention as the Flax models of transformers build it: a causal buffer, masks combined, and a bias selected."""

    turned: bool = False
    padded: tuple[int, int] = (-3, -2)

    @linen.compact
    def __call__(self, x: jax.Array, padding: jax.Array) -> jax.Array:
        batch, count, size = x.shape
        q, k, v = (y.reshape(batch, count, 2, -1) for y in jnp.split(linen.Dense(3 * size)(x), 3, axis=2))
        seen = linen.make_causal_mask(jnp.ones((1, 2 * count), bool), dtype=bool)[:, :, :count, :count]
        seen = jnp.broadcast_to(seen.mT if self.turned else seen, (batch, 1, count, count))
        mask = linen.combine_masks(jnp.broadcast_to(jnp.expand_dims(padding, self.padded), seen.shape), seen)
        hidden = jnp.full(seen.shape, jnp.finfo(x.dtype).min)
        bias = jax.lax.select(mask > 0, jnp.zeros(seen.shape, x.dtype), hidden)  # pyright: ignore[reportOptionalOperand]
        weights = linen.dot_product_attention_weights(q, k, bias=bias)
        attended = jnp.einsum("...hqk,...khd->...qhd", weights, v).reshape(x.shape)
        return x + linen.Dense(size)(attended)


def test_masks_as_in_flax_models_of_transformers() -> None:
    padding = tokens(2, N)
    clean = FusedAttention()
    params = jax.eval_shape(clean.init, jax.random.key(0), X, padding)

    def found(module: FusedAttention, names: str) -> list[str]:
        apply: Any = module.apply
        return kinds(lambda x, mask, params: apply(params, x, mask), X, padding, params,
                     names=("batch pos embed", names, None))  # fmt: skip

    for names in ("batch pos", "batch key_pos"):
        assert found(clean, names) == []
        assert found(FusedAttention(turned=True), names) == ["future"]
    assert "names" in found(FusedAttention(padded=(-3, -1)), "batch key_pos")
    assert found(FusedAttention(padded=(-3, -1)), "batch pos") == ["mask"]


# --- what is no mix-up ---


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x @ x.T + (x @ x.T).T,
        lambda x: jnp.cov(x),
        lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(N)),
        lambda x: (x[:, None] - x[None, :]) ** 2,
        lambda x: jnp.matmul(x @ x.T, x @ x.T),
        lambda x: jnp.concatenate([x, x + 1], 0)[::2],
        lambda x: jnp.roll(x, 1, 0) + x,
        lambda x: x[1:] - x[:-1],
        lambda x: jnp.sort(x, 0) + x[jnp.argsort(x[:, 0])],
        lambda x: jax.nn.softmax(x @ x.T) @ jax.nn.softmax(x @ x.T) @ x,
        lambda x: jnp.kron(x[:, 0], x[:, 0]) + jnp.outer(x[:, 0], x[:, 0]).ravel(),
        lambda x: jnp.vander(x[:, 0]) @ x,
        lambda x: jnp.cumsum(x, 0) / jnp.arange(1, N + 1)[:, None],
    ],
)
def test_clean(fn: Callable[..., Any]) -> None:
    assert kinds(fn, abstract(N, 8), names=("pos embed",)) == []


def test_promoted_ranks() -> None:
    args = abstract(N, 1), abstract(N)
    names = ("batch _", "batch")
    assert kinds(lambda p, y: ((p - y) ** 2).mean(), *args, names=names) == ["outer"]
    assert kinds(lambda p, y: ((p[:, 0] - y) ** 2).mean(), *args, names=names) == []
    assert kinds(lambda p, y: ((p[:, 0][:, None] - y[None, :]) ** 2).mean(), *args, names=names) == []
    assert kinds(lambda p, y: ((y[:, None] - y) ** 2).mean(), *args, names=names) == []
    pairwise = jax.vmap(lambda a, b: jax.vmap(lambda b: a - b)(b), (0, None))
    assert kinds(lambda p, y: pairwise(y, y), *args, names=names) == []


def test_a_reshape_in_place_of_a_transpose() -> None:
    assert kinds(lambda x: x.reshape(8, 3), abstract(3, 8), names=("batch embed",)) == ["torn"]
    merge = lambda x: x.reshape(2, 8, 8)  # heads and positions, not transposed
    assert kinds(merge, abstract(2, 2, 8, 4), names=("batch heads pos dim",)) == ["torn"]
    assert kinds(lambda x: merge(x.swapaxes(1, 2)), abstract(2, 2, 8, 4), names=("batch heads pos dim",)) == []
    assert kinds(lambda x: x.reshape(3, 4, 2).reshape(12, 2), abstract(3, 8), names=("batch embed",)) == []


@pytest.mark.parametrize(
    ("before", "after", "names", "exchanged"),
    [
        ((2, 3, 4, 5), (2, 5, 4, 3), "batch height width chan", ("height", "chan")),
        ((2, 4, 3, 7), (2, 3, 4, 7), "batch height width chan", ("height", "width")),
        ((2, 6, 12), (2, 3, 6, 4), "batch pos heads*head_dim", ("pos", "heads*head_dim")),
        ((2, 5, 12), (2, 3, 5, 4), "batch pos heads*head_dim", ("pos", "heads*head_dim")),
    ],
)
def test_a_torn_axis_is_named(before: Any, after: Any, names: str, exchanged: tuple[str, str]) -> None:
    """Axes that stay where they are, or are only split, are not the ones whose elements are mixed."""
    found = axn.names.infer(lambda x: x.reshape(after), abstract(*before), names=(names,)).mix_ups
    assert [(m.kind, m.names) for m in found] == [("torn", exchanged)]


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ((2, 8, 4), (2, 4, 8), "batch time chan"),  # two steps of time are stacked
        ((8, 4, 2), (4, 16), "time heads dim"),
        ((2, 6, 12), (2, 6, 3, 4), "batch pos hidden"),
        ((2, 6, 12), (12, 3, 4), "batch pos hidden"),
        ((64, 128), (256, 32), "rows columns"),  # blocks of numbers that are quantized together
        ((2, 8, 8, 3), (2, 4, 2, 4, 2, 3), "batch height width chan"),
    ],
)
def test_reshapes_that_exchange_nothing(before: Any, after: Any, names: str) -> None:
    assert kinds(lambda x: x.reshape(after), abstract(*before), names=(names,)) == []


@pytest.mark.parametrize("sizes", [(3, 4, 5), (4, 4, 4)])
def test_what_is_flattened_keeps_the_order_of_its_parts(sizes: tuple[int, int, int]) -> None:
    chan, height, width = sizes
    image, flat = abstract(2, chan, height, width), abstract(2, math.prod(sizes))
    named, joined = "batch chan height width", "batch height*width*chan"
    turned = lambda x, y: x + y.reshape(2, height, width, chan).transpose(0, 3, 1, 2)
    assert kinds(turned, image, flat, names=(named, joined)) == []
    assert kinds(lambda x, y: x + y.reshape(x.shape), image, flat, names=(named, joined)) != []
    project = lambda x, w: x.reshape(2, -1) @ w
    weight = abstract(math.prod(sizes), 6)
    assert kinds(project, image, weight, names=(named, "chan*height*width out")) == []
    assert kinds(project, image, weight, names=(named, "height*width*chan out")) == ["names"]


@pytest.mark.parametrize("heads", [3, 6])
def test_heads_are_split_before_they_are_transposed(heads: int) -> None:
    def split(turn: bool) -> Callable[..., jax.Array]:
        def run(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
            q = x @ w
            q = q.reshape(2, 6, heads, 4).swapaxes(1, 2) if turn else q.reshape(2, heads, 6, 4)
            return q + bias[:, None]

        return run

    args = abstract(2, 6, 8), abstract(8, heads * 4), abstract(heads, 4)
    for names in ("heads*head_dim", "hidden"):
        given = "batch pos embed", f"embed {names}", "heads head_dim"
        assert kinds(split(True), *args, names=given) == []
        assert kinds(split(False), *args, names=given) != []


def test_a_name_that_is_given_is_never_replaced() -> None:
    recurrent = lambda h, r, o: h @ r + h @ o
    args, names = (abstract(2, N), PAIRS, PAIRS), ("batch hidden", "hidden hidden", "hidden classes")
    program = axn.names.infer(recurrent, *args, names=names)
    assert [m.names for m in program.mix_ups] == [("hidden'", "classes")]
    assert program.arguments[0][2] == ("hidden", "classes")
    assert kinds(recurrent, *args, names=(*names[:2], "hidden hidden")) == []


def test_one_name_with_two_sizes() -> None:
    f = lambda x, y: (x.sum(), y.sum())
    (found,) = axn.names.infer(f, abstract(3), abstract(5), names=("batch", "batch")).mix_ups
    assert (found.kind, found.names, found.source) == ("sizes", ("batch", "batch"), None)
    assert str(found) == "'batch' (size 3 by names= at 'x') and 'batch' (size 5 by names= at 'y') have two sizes"
    # Kernels of one model may have several widths.
    params = {"a": abstract(3), "b": abstract(5)}
    assert axn.names.infer(lambda p: p["a"].sum(), params, names=({"a": "width", "b": "width"},)).mix_ups == ()


def test_a_bias_that_is_made_symmetric() -> None:
    clean = self_attention(lambda s, z: s + (z + z.T) / 2)
    also = self_attention(lambda s, z: s + z + z.T)
    wrong = self_attention(lambda s, z: s + z.T)
    names = "batch pos embed", None, "pos pos'"
    assert kinds(clean, X, W, PAIRS, names=names) == kinds(also, X, W, PAIRS, names=names) == []
    assert kinds(wrong, X, W, PAIRS, names=names) == ["side"]


MADE_OUTSIDE: dict[str, Callable[[Any], Callable[[jax.Array], jax.Array]]] = {
    "booleans": lambda m: lambda s: jnp.where(m, s, HIDDEN),
    "numbers": lambda m: (lambda one: lambda s: s - 1e9 * (1 - one))(jnp.asarray(m, jnp.float32)),
    "bias": lambda m: (lambda bias: lambda s: s + bias)(jnp.where(m, 0, -jnp.inf).astype(jnp.bfloat16)),
    "penalty": lambda m: (lambda penalty: lambda s: s - penalty)(jnp.where(m, 0.0, 1e9)),
    "on the device": lambda m: (lambda m, low: lambda s: jnp.where(m, s, low))(jnp.asarray(m), jnp.float32(-1e9)),
    "of all positions": lambda m: lambda s: jnp.where(np.pad(m, (0, 2), "edge")[:N, :N], s, HIDDEN),
}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("how", MADE_OUTSIDE)
def test_masks_made_outside_the_function(how: str, wrap: Any) -> None:
    causal = np.tril(np.ones((N, N), bool))
    names = "batch pos embed", None
    assert kinds(wrap(self_attention(MADE_OUTSIDE[how](causal))), X, W, names=names) == []
    assert kinds(wrap(self_attention(MADE_OUTSIDE[how](causal.T))), X, W, names=names) == ["future"]
    nothing = np.arange(N)[:, None] > np.zeros(N)  # queries, not keys
    assert kinds(wrap(self_attention(MADE_OUTSIDE[how](nothing))), X, W, names=names) == ["mask"]
    random = np.random.default_rng(0).random((N, N)) > 0.5
    for kept in (random | np.eye(N, dtype=bool), np.eye(N, dtype=bool), np.ones((N, N), bool)):
        assert kinds(wrap(self_attention(MADE_OUTSIDE[how](kept))), X, W, names=names) == []


def test_positions_made_outside_the_function() -> None:
    positions = np.arange(N)
    order = lambda p: p[:, None] >= p[None, :]
    clean = self_attention(lambda s: jnp.where(order(jnp.asarray(positions)), s, HIDDEN))
    wrong = self_attention(lambda s: jnp.where(order(jnp.asarray(positions)).T, s, HIDDEN))
    assert kinds(clean, X, W, names=("batch pos embed", None)) == []
    assert kinds(wrong, X, W, names=("batch pos embed", None)) == ["future"]
