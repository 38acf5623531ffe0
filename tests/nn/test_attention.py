"""Attention by name, compared with positional attention."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym.nn.attention import (
    Causal,
    alibi_attention_bias,
    causal_mask,
    dot_product_attention,
    dot_product_attention_weights,
)
from tests.helpers import assert_named

CLOSE: Any = {"rtol": 1e-5, "atol": 1e-6}

Batch, Pos, KPos, Heads, Group, Size = axn.make_axes(batch=2, pos=4, key_pos=5, heads=2, group=3, head_size=8)


def draw(*axes: axn.Axis) -> axn.NamedArray:
    seed = sum(map(ord, "".join(a.name for a in axes)))
    return axn.named(np.random.default_rng(seed).normal(size=[a.size for a in axes]).astype(np.float32), axes)


@jax.jit
def attend(q: Any, k: Any, v: Any, mask: Any = None, bias: Any = None) -> axn.NamedArray:
    return dot_product_attention(q, k, v, "key_pos", "head_size", mask, bias)


Q, K, V = draw(Batch, Pos, Heads, Size), draw(Batch, KPos, Heads, Size), draw(Heads, KPos, Batch, Size)
GROUPED = draw(Batch, Pos, Heads, Group, Size)
PADDING = axn.named(np.arange(5) < np.array([[5], [2]]), (Batch, KPos))
BIAS = draw(Heads, KPos)


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def written_out(q: Any, k: Any, v: Any, mask: Any = True, bias: Any = 0.0) -> tuple[Any, Any]:
    """Compute grouped attention in NumPy, with arrays in the layout of the names above; mask, bias as b, h, g, p, k."""
    scores = np.einsum("bphgd,bkhd->bhgpk", q, k) / np.sqrt(q.shape[-1]) + bias
    weights = softmax(np.where(mask, scores, np.float32(-1e30)))
    return np.einsum("bhgpk,hkbd->bphgd", weights, v), weights


def raw(*arrays: axn.NamedArray) -> list[Any]:
    return [np.asarray(x.array) for x in arrays]


def expected(query: axn.NamedArray, *, mask: Any = True, bias: Any = 0.0) -> axn.NamedArray:
    q, k, v = raw(query, K, V)
    grouped = query.has_axis(Group)
    result, _ = written_out(q if grouped else q[:, :, :, None], k, v, mask, bias)
    return axn.named(jnp.asarray(result if grouped else result[:, :, :, 0]), query.axes)


CAUSAL = np.tril(np.ones((4, 5), bool))[None, None, None]
PADDED = np.asarray(PADDING.array)[:, None, None, None]


@pytest.mark.parametrize(
    ("query", "mask", "bias", "by_position"),
    [
        (Q, None, None, {}),
        (GROUPED, causal_mask(Pos, KPos), BIAS, {"mask": CAUSAL, "bias": np.asarray(BIAS.array)[None, :, None, None]}),
        (Q, Causal(Pos), None, {"mask": CAUSAL}),
        (GROUPED, Causal(Pos, 2, PADDING), None, {"mask": CAUSAL & PADDED & ~np.tril(np.ones((4, 5), bool), -2)}),
        (GROUPED, PADDING.astype(jnp.int32), None, {"mask": PADDED}),
    ],
    ids=["plain", "mask and bias", "causal", "window and padding", "numbers as a mask"],
)
def test_values(query: axn.NamedArray, mask: Any, bias: Any, by_position: dict[str, Any]) -> None:
    assert_named(attend(query, K, V, mask, bias), expected(query, **by_position), **CLOSE)


def test_weights_have_the_layout_of_the_query() -> None:
    weigh = functools.partial(dot_product_attention_weights, KPos=KPos, Key=Size, scaling_factor=2.0)
    found = jax.jit(weigh)(GROUPED, K, mask=Causal("pos"))
    k, v = raw(K, V)
    _, weights = written_out(np.asarray(GROUPED.array) * 2.0 * np.sqrt(8), k, v, CAUSAL)
    wanted = axn.named(jnp.asarray(weights.transpose(0, 3, 1, 2, 4)), (Batch, Pos, Heads, Group, KPos))
    assert_named(found, wanted, **CLOSE)


def test_keys_of_two_axes_and_values_with_their_own_axis() -> None:
    Row, Col, Out = axn.make_axes(row=2, col=3, out=5)
    q, k, v = draw(Pos, Size), draw(Row, Size, Col), draw(Col, Out, Row)
    weights = softmax(np.asarray(q.array) @ np.asarray(k.array).swapaxes(1, 2).reshape(6, 8).T / np.sqrt(8))
    wanted = weights @ np.asarray(v.array).transpose(2, 0, 1).reshape(6, 5)
    found = jax.jit(functools.partial(dot_product_attention, KPos=(Row, Col), Key=Size))(q, k, v)
    assert_named(found, axn.named(jnp.asarray(wanted), (Pos, Out)), **CLOSE)


def test_all_heads_can_share_keys_and_values() -> None:
    q, k, v = raw(Q, K, V)
    k, v = k[:, :, :1], v[:1]
    found = attend(Q, axn.named(k[:, :, 0], (Batch, KPos, Size)), axn.named(v[0], (KPos, Batch, Size)))
    wanted, _ = written_out(q[:, :, :, None], k.repeat(2, 2), v.repeat(2, 0))
    assert_named(found, axn.named(jnp.asarray(wanted[:, :, :, 0]), Q.axes), **CLOSE)


# --- numerics ---


def test_scores_can_be_wider_than_queries() -> None:
    """Products of half-precision numbers are exact in float32, so only the weights and the result are rounded."""
    q, k = (axn.named(x.array.astype(jnp.bfloat16), x.names) for x in (Q, K))

    def weights(**options: Any) -> Any:
        weigh = functools.partial(dot_product_attention_weights, KPos=KPos, Key=Size, scaling_factor=8.0, **options)
        program = jax.jit(weigh).lower(q, k)
        found = program.compile()(q, k).array
        assert found.dtype == jnp.bfloat16
        return np.asarray(found, np.float32), program.as_text()

    scores = np.einsum("bphd,bkhd->bphk", *(x.array.astype(np.float32) for x in (q, k)))
    found, program = weights(attention_dtype=jnp.float32)
    np.testing.assert_allclose(found, softmax(scores * 8), rtol=2**-8, atol=1e-6)
    assert not np.allclose(weights()[0], softmax(scores * 8), rtol=2**-5)
    assert "(tensor<2x4x2x8xbf16>, tensor<2x5x2x8xbf16>) -> tensor<2x2x4x5xf32>" in program


def test_scores_can_be_narrower_than_queries() -> None:
    weigh = functools.partial(dot_product_attention_weights, KPos=KPos, Key=Size, attention_dtype=jnp.float16)
    found = np.asarray(jax.jit(weigh)(Q, K).array)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, found.astype(np.float16))


@pytest.mark.parametrize(("dtype", "implementation"), [(jnp.float32, None), (jnp.float16, None), (jnp.float32, "xla")])
def test_a_query_without_keys_gets_the_mean(dtype: Any, implementation: Any) -> None:
    q, k, v = (x.astype(dtype) for x in (Q, K, V))
    nothing = axn.zeros((Batch, KPos), dtype=bool)

    def attend(q: Any) -> Any:
        return dot_product_attention(q, k, v, KPos, Size, nothing, implementation=implementation)

    wanted = np.asarray(v.array, np.float32).mean(1)[:, None].transpose(2, 1, 0, 3).repeat(4, 1)
    np.testing.assert_allclose(jax.jit(attend)(q).array.astype(jnp.float32), wanted, rtol=0.02, atol=0.02)
    assert np.isfinite(jax.jit(jax.grad(lambda q: attend(q).sum().scalar()))(q).array.astype(jnp.float32)).all()


def test_precision_is_handed_on() -> None:
    program = (
        jax.jit(lambda *x: dot_product_attention(*x, KPos=KPos, Key=Size, precision="highest")).lower(Q, K, V).as_text()
    )
    assert program.count("precision = [HIGHEST, HIGHEST]") == 2


# --- dropout ---


def test_dropout() -> None:
    key, long = jax.random.key(0), axn.Axis("key_pos", 2000)
    q, v = (axn.named(np.ones((a.size, 8), np.float32), (a, Size)) for a in (Pos, long))
    found = jax.jit(functools.partial(dot_product_attention, KPos=long, Key=Size, pdrop=0.25, prng=key))(q, v, v)
    np.testing.assert_allclose(found.array, 1.0, atol=0.1)  # as many as are dropped, the others make up for
    assert np.std(found.array[:, 0]) > 0
    for dropout, inference in ((0.25, True), (0.0, False)):
        program = jax.make_jaxpr(
            lambda *x, d=dropout, i=inference: dot_product_attention(*x, KPos=KPos, Key=Size, pdrop=d, inference=i)
        )(Q, K, V)
        assert "random" not in str(program)
    with pytest.raises(ValueError, match=r"dropout of 0\.25 needs a random key: pass `prng`, or `inference=True`"):
        dot_product_attention(Q, K, V, KPos, Size, pdrop=0.25)


# --- ALiBi ---


@pytest.mark.parametrize(("heads", "exponents"), [(6, [2, 4, 6, 8, 1, 3]), (1, [8])])
def test_alibi(heads: int, exponents: list[int]) -> None:
    found = alibi_attention_bias(axn.Axis("heads", heads), KPos, dtype=jnp.bfloat16)
    wanted = 2.0 ** -np.array(exponents)[:, None] * np.arange(5)
    assert_named(found, axn.named(jnp.asarray(wanted, jnp.bfloat16), (axn.Axis("heads", heads), KPos)))


def test_alibi_is_a_matter_of_distance() -> None:
    bias = alibi_attention_bias(Heads, KPos)
    distance = np.arange(4)[:, None] - np.arange(5)
    slopes = 2.0 ** -np.array([4, 8])
    wanted = expected(Q, mask=CAUSAL, bias=-slopes[None, :, None, None, None] * distance)
    assert_named(attend(Q, K, V, Causal(Pos), bias), wanted, **CLOSE)


# --- errors ---


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: dot_product_attention(Q, Q, Q, "pos", Size),
            r"\(pos\) of KPos is an axis of the query, too: \(batch=2, pos=4, .* `key.rename\({'pos': 'key_pos'}\)`",
        ),
        (lambda: dot_product_attention(Q, K, V, "keypos", Size), "key: no axis 'keypos' in .* Did you mean 'key_pos'"),
        (lambda: dot_product_attention(Q, K, V, KPos, "size"), "query: no axis 'size' in .*heads=2, head_size=8"),
        (lambda: dot_product_attention(Q, K, V, KPos.resize(7), Size), "'key_pos' has conflicting sizes: 5 in the arr"),
        (lambda: dot_product_attention(Q, K, V["key_pos", 0], KPos, Size), "value: no axis 'key_pos' in"),
        (lambda: dot_product_attention(Q.array, K, V, KPos, Size), "expected a NamedArray for `query`, got "),  # pyright: ignore[reportArgumentType]
        (
            lambda: dot_product_attention(Q, K, V, KPos, Size, Causal("pos", None, draw(Pos, KPos))),
            r"a mask must be boolean, true where attention is allowed, got float32\[pos=4, key_pos=5\]. .* pass `bias`",
        ),
        (
            lambda: dot_product_attention(Q, K, V, KPos, Size, axn.ones((axn.Axis("head", 2), KPos), dtype=bool)),
            r"`mask` has axes \(head\) that the array \(batch, heads, pos, key_pos\) lacks",
        ),
        (lambda: dot_product_attention(Q, K, V, KPos, Size, None, draw(Group)), r"`bias` has axes \(group\)"),
        (lambda: dot_product_attention(Q, K, V, KPos, Size, Causal("time")), "no axis 'time' in"),
        (
            lambda: dot_product_attention(Q["heads", 0], K, V, ("key_pos", "heads"), Size, Causal("pos")),
            r"a Causal mask needs one axis of key positions, got \(key_pos, heads\)",
        ),
    ],
)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()
