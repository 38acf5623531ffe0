"""Pairs of a program and a twin with a mistake of positions, on the line that says `# bug`.

All sizes are equal, so JAX runs both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, nn

from .cases import Pair, Program

PAIRS: list[Pair] = []


def clean(*arguments: Any) -> Callable[[Callable[..., Any]], Program]:
    return lambda fn: Program(fn, arguments, square_only=True)


def buggy(program: Program) -> Callable[[Callable[..., Any]], Program]:
    def add(fn: Callable[..., Any]) -> Program:
        twin = program._replace(fn=fn)
        PAIRS.append(Pair(program, twin))
        return twin

    return add


# --- products ---


@clean("batch embed", "hidden embed", "hidden")
def linear(x, w, b):
    return nn.relu(x @ w.T + b)


@buggy(linear)
def linear_without_transposing(x, w, b):
    return nn.relu(x @ w + b)  # bug


@clean("batch tgt dim", "batch src dim", "batch src dim")
def cross_attention(q, k, v):
    weights = nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) / jnp.sqrt(q.shape[-1]))
    return jnp.einsum("bqk,bkd->bqd", weights, v)


@buggy(cross_attention)
def cross_attention_with_swapped_letters(q, k, v):
    weights = nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) / jnp.sqrt(q.shape[-1]))
    return jnp.einsum("bqk,bqd->bkd", weights, v)  # bug


@clean("batch left", "left right", "batch right")
def bilinear(x, w, y):
    return jnp.einsum("bi,ij,bj->b", x, w, y)


@buggy(bilinear)
def bilinear_swapped(x, w, y):
    return jnp.einsum("bj,ij,bi->b", x, w, y)  # bug


@clean("batch pos embed", "embed hidden", "hidden")
def tensordot(x, w, b):
    return jnp.tanh(jnp.tensordot(x, w, axes=1) + b)


@buggy(tensordot)
def tensordot_over_positions(x, w, b):
    return jnp.tanh(jnp.tensordot(x, w, axes=((1,), (0,))) + b)  # bug


@clean("batch embed", "batch hidden", {"wx": "embed gates", "wh": "hidden gates", "b": "gates"})
def rnn_cell(x, h, p):
    gates = x @ p["wx"] + h @ p["wh"] + p["b"]
    return jnp.tanh(gates)


@buggy(rnn_cell)
def rnn_cell_with_swapped_weights(x, h, p):
    gates = x @ p["wh"] + h @ p["wx"] + p["b"]  # bug
    return jnp.tanh(gates)


@clean("state", "state state", "state state", "state state", "obs state", "obs obs", "obs")
def kalman_update(m, P, F, Q, H, R, y):
    m, P = F @ m, F @ P @ F.T + Q
    S = H @ P @ H.T + R
    K = jnp.linalg.solve(S, H @ P).T
    return m + K @ (y - H @ m), P - K @ S @ K.T


@buggy(kalman_update)
def kalman_update_with_transposed_observation(m, P, F, Q, H, R, y):
    m, P = F @ m, F @ P @ F.T + Q
    S = H.T @ P @ H + R  # bug
    K = jnp.linalg.solve(S, H @ P).T
    return m + K @ (y - H @ m), P - K @ S @ K.T


@clean("train feature", "test feature", "train")
def gp_mean(x, x_test, y):
    def kernel(a, b):
        return jnp.exp(-0.5 * ((a[:, None] - b[None]) ** 2).sum(-1))

    alpha = jnp.linalg.solve(kernel(x, x) + 1e-3 * jnp.eye(x.shape[0]), y)
    return kernel(x_test, x) @ alpha


@buggy(gp_mean)
def gp_mean_with_swapped_kernel(x, x_test, y):
    def kernel(a, b):
        return jnp.exp(-0.5 * ((a[:, None] - b[None]) ** 2).sum(-1))

    alpha = jnp.linalg.solve(kernel(x, x) + 1e-3 * jnp.eye(x.shape[0]), y)
    return kernel(x, x_test) @ alpha  # bug


@clean("user item", "item dim", "user dim")
def propagate_ratings(ratings, items, users):
    degree = ratings.sum(1, keepdims=True)
    return users + ratings @ items / degree


@buggy(propagate_ratings)
def propagate_ratings_transposed(ratings, items, users):
    degree = ratings.sum(1, keepdims=True)
    return users + ratings.T @ items / degree  # bug


@clean("user factor", "item factor", "user item", "bool: user item")
def factorization_loss(u, v, ratings, seen):
    return jnp.where(seen, (ratings - u @ v.T) ** 2, 0).sum() / seen.sum()


@buggy(factorization_loss)
def factorization_loss_the_wrong_way_round(u, v, ratings, seen):
    return jnp.where(seen, (ratings - v @ u.T) ** 2, 0).sum() / seen.sum()  # bug


@clean("day asset", "asset")
def portfolio_risk(returns, weights):
    centred = returns - returns.mean(0)
    covariance = centred.T @ centred / (len(returns) - 1)
    return jnp.sqrt(weights @ covariance @ weights)


@buggy(portfolio_risk)
def portfolio_risk_of_days(returns, weights):
    centred = returns - returns.mean(0)
    covariance = centred @ centred.T / (len(returns) - 1)
    return jnp.sqrt(weights @ covariance @ weights)  # bug


@clean("token expert", "expert token dim")
def combine_experts(gates, outputs):
    return jnp.einsum("te,etd->td", nn.softmax(gates), outputs)


@buggy(combine_experts)
def combine_experts_with_swapped_letters(gates, outputs):
    return jnp.einsum("te,ted->td", nn.softmax(gates), outputs)  # bug


# --- attention ---


@clean("batch tgt dim", "batch src dim", "batch src dim", "bool: tgt src")
def masked_attention(q, k, v, mask):
    scores = q @ k.swapaxes(-1, -2)
    return nn.softmax(jnp.where(mask, scores, -1e9)) @ v


@buggy(masked_attention)
def masked_attention_with_transposed_mask(q, k, v, mask):
    scores = q @ k.swapaxes(-1, -2)
    return nn.softmax(jnp.where(mask.T, scores, -1e9)) @ v  # bug


@clean("batch heads tgt dim", "batch heads src dim", "batch heads src dim", "bool: batch src")
def padded_attention(q, k, v, valid):
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    scores = jnp.where(valid[:, None, None, :], scores, jnp.finfo(scores.dtype).min)
    return nn.softmax(scores, axis=-1) @ v


@buggy(padded_attention)
def padded_attention_masking_queries(q, k, v, valid):
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    scores = jnp.where(valid[:, None, :, None], scores, jnp.finfo(scores.dtype).min)  # bug
    return nn.softmax(scores, axis=-1) @ v


@clean("batch tgt dim", "batch src dim", "batch src dim")
def normalized_attention(q, k, v):
    scores = jnp.einsum("bqd,bkd->bqk", q, k)
    return jnp.einsum("bqk,bkd->bqd", nn.softmax(scores, axis=-1), v)


@buggy(normalized_attention)
def attention_normalized_over_queries(q, k, v):
    scores = jnp.einsum("bqd,bkd->bqk", q, k)
    return jnp.einsum("bqk,bkd->bqd", nn.softmax(scores, axis=1), v)  # bug


@clean("batch pos heads=2 dim=2", "inner embed", "batch pos embed")
def merge_heads(values, w_out, residual):
    v = values.swapaxes(1, 2)
    v = nn.softmax(v @ v.swapaxes(-1, -2)) @ v
    b, h, s, d = v.shape
    return residual + v.transpose(0, 2, 1, 3).reshape(b, s, h * d) @ w_out


@buggy(merge_heads)
def merge_heads_without_transposing(values, w_out, residual):
    v = values.swapaxes(1, 2)
    v = nn.softmax(v @ v.swapaxes(-1, -2)) @ v
    b, h, s, d = v.shape
    return residual + v.reshape(b, s, h * d) @ w_out  # bug


@clean("batch pos heads dim", "batch pos heads dim", "batch pos heads dim")
def split_attention(q, k, v):
    q, k, v = q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2)
    out = nn.softmax(q @ k.swapaxes(-1, -2) / 2.0) @ v
    return out.swapaxes(1, 2)


@buggy(split_attention)
def split_attention_with_wrong_swapaxes(q, k, v):
    q, k, v = q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(2, 3)
    out = nn.softmax(q @ k.swapaxes(-1, -2) / 2.0) @ v  # bug
    return out.swapaxes(1, 2)


@clean("batch pos heads dim=4", "pos")
def rotary(x, positions):
    frequencies = 1e4 ** (-jnp.arange(2) / 2)
    angles = positions[:, None] * frequencies
    cos, sin = jnp.cos(angles)[None, :, None, :], jnp.sin(angles)[None, :, None, :]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


@buggy(rotary)
def rotary_by_heads(x, positions):
    frequencies = 1e4 ** (-jnp.arange(2) / 2)
    angles = positions[:, None] * frequencies
    cos, sin = jnp.cos(angles)[None, None], jnp.sin(angles)[None, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)  # bug


@clean("batch length heads dim", "batch pos heads dim", "int:")
def update_cache(cache, k, index):
    return lax.dynamic_update_slice(cache, k, (0, index, 0, 0))


@buggy(update_cache)
def update_cache_heads_first(cache, k, index):
    k = k.transpose(0, 2, 1, 3)
    return lax.dynamic_update_slice(cache, k, (0, index, 0, 0))  # bug


# --- positions and concatenations ---


@clean("batch pos embed", "pos embed")
def add_positions(x, table):
    return x + table[jnp.arange(x.shape[1])]


@buggy(add_positions)
def add_positions_by_batch(x, table):
    return x + table[jnp.arange(x.shape[0])][:, None]  # bug


@clean("batch pos embed", "pos embed")
def add_learned_positions(x, table):
    return x * jnp.sqrt(x.shape[-1]) + table[None]


@buggy(add_learned_positions)
def add_learned_positions_to_batch(x, table):
    return x * jnp.sqrt(x.shape[-1]) + table[:, None]  # bug


@clean("batch prompt embed", "batch pos embed", "embed vocab")
def prefix_tuning(prompt, x, w):
    return nn.log_softmax(jnp.concatenate([prompt, x], axis=1) @ w)


@buggy(prefix_tuning)
def prefix_tuning_along_batch(prompt, x, w):
    return nn.log_softmax(jnp.concatenate([prompt, x], axis=0) @ w)  # bug


@clean("batch height=4 width=4 channels=3", "patch_dim=12 embed", "patch embed")
def patchify(x, w, table):
    b, h, wd, c = x.shape
    x = x.reshape(b, h // 2, 2, wd // 2, 2, c).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(b, -1, 4 * c) @ w + table


@buggy(patchify)
def patchify_without_transposing(x, w, table):
    b, h, wd, c = x.shape
    x = x.reshape(b, h // 2, 2, wd // 2, 2, c)
    return x.reshape(b, -1, 4 * c) @ w + table  # bug


# --- reductions and broadcasting ---


@clean("batch classes")
def normalize(p):
    return p / p.sum(-1, keepdims=True)


@buggy(normalize)
def normalize_without_keepdims(p):
    return p / p.sum(-1)  # bug


@clean("sample feature")
def standardize(x):
    return (x - x.mean(0)) / (x.std(0) + 1e-6)


@buggy(standardize)
def standardize_by_means_of_samples(x):
    return (x - x.mean(1)) / (x.std(0) + 1e-6)  # bug


@clean("batch channels height width", "channels")
def add_bias(x, b):
    return nn.relu(x + b[:, None, None])


@buggy(add_bias)
def add_bias_to_columns(x, b):
    return nn.relu(x + b)  # bug


@clean("batch pos embed", "embed", "embed")
def layer_norm(x, scale, bias):
    mean, var = x.mean(-1), x.var(-1)
    return (x - mean[..., None]) * lax.rsqrt(var + 1e-5)[..., None] * scale + bias


@buggy(layer_norm)
def layer_norm_with_wrong_broadcast(x, scale, bias):
    mean, var = x.mean(-1), x.var(-1)
    return (x - mean[:, None]) * lax.rsqrt(var + 1e-5)[..., None] * scale + bias  # bug


@clean("batch height width channels", "channels", "channels")
def batch_norm(x, gamma, beta):
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) / jnp.sqrt(var + 1e-5) * gamma + beta


@buggy(batch_norm)
def batch_norm_channels_first(x, gamma, beta):
    x = jnp.moveaxis(x, -1, 1)
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) / jnp.sqrt(var + 1e-5) * gamma + beta  # bug


@clean("sample", "sample feature")
def weighted_mean(w, x):
    return (w[:, None] * x).sum(0) / w.sum()


@buggy(weighted_mean)
def weighted_mean_of_features(w, x):
    return (w * x).sum(0) / w.sum()  # bug


@clean("step", "int: batch", "batch dim", "batch dim")
def noise(alphas, t, x, eps):
    a = jnp.cumprod(alphas)[t]
    return jnp.sqrt(a)[:, None] * x + jnp.sqrt(1 - a)[:, None] * eps


@buggy(noise)
def noise_along_features(alphas, t, x, eps):
    a = jnp.cumprod(alphas)[t]
    return jnp.sqrt(a) * x + jnp.sqrt(1 - a) * eps  # bug


@clean("batch height width channels", "batch cond", "cond channels")
def film(x, cond, w):
    scale = nn.silu(cond) @ w
    return x * (1 + scale[:, None, None, :])


@buggy(film)
def film_along_height(x, cond, w):
    scale = nn.silu(cond) @ w
    return x * (1 + scale[:, :, None, None])  # bug


@clean("member batch out", "batch out")
def ensemble_error(predictions, target):
    return ((predictions.mean(0) - target) ** 2).mean()


@buggy(ensemble_error)
def ensemble_error_over_batch(predictions, target):
    return ((predictions.mean(1) - target) ** 2).mean()  # bug


@clean("time env", "time env")
def baseline(returns, log_probs):
    advantage = returns - returns.mean(1)[:, None]
    return -(lax.stop_gradient(advantage) * log_probs).mean()


@buggy(baseline)
def baseline_without_axis(returns, log_probs):
    advantage = returns - returns.mean(1)  # bug
    return -(lax.stop_gradient(advantage) * log_probs).mean()


@clean("node feature", "int: edge", "int: edge")
def mean_aggregation(x, senders, receivers):
    total = jax.ops.segment_sum(x[senders], receivers, num_segments=x.shape[0])
    degree = jax.ops.segment_sum(jnp.ones(len(senders)), receivers, num_segments=x.shape[0])
    return x + total / jnp.maximum(degree, 1)[:, None]


@buggy(mean_aggregation)
def mean_aggregation_by_feature(x, senders, receivers):
    total = jax.ops.segment_sum(x[senders], receivers, num_segments=x.shape[0])
    degree = jax.ops.segment_sum(jnp.ones(len(senders)), receivers, num_segments=x.shape[0])
    return x + total / jnp.maximum(degree, 1)  # bug


# --- indices ---


@clean("node feature", "int: edge", "int: edge")
def sum_aggregation(x, senders, receivers):
    return jax.ops.segment_sum(nn.relu(x[senders]), receivers, num_segments=x.shape[0])


@buggy(sum_aggregation)
def sum_aggregation_of_nodes(x, senders, receivers):
    return jax.ops.segment_sum(nn.relu(x), receivers, num_segments=x.shape[0])  # bug


@clean("batch pos embed", "int: batch")
def last_state(x, lengths):
    return x[jnp.arange(x.shape[0]), lengths - 1]


@buggy(last_state)
def last_state_with_swapped_indices(x, lengths):
    return x[lengths - 1, jnp.arange(x.shape[0])]  # bug


@clean("int: batch beam pos", "int: batch beam")
def select_beams(tokens, parents):
    return jnp.take_along_axis(tokens, parents[:, :, None], axis=1)


@buggy(select_beams)
def select_beams_along_positions(tokens, parents):
    return jnp.take_along_axis(tokens, parents[:, None, :], axis=1)  # bug


@clean("vocab embed", "int: token", "token embed")
def scatter_gradient(table, ids, updates):
    return table.at[ids].add(-0.1 * updates)


@buggy(scatter_gradient)
def scatter_gradient_to_columns(table, ids, updates):
    return table.at[:, ids].add(-0.1 * updates)  # bug


@clean("batch classes", "int: batch")
def one_hot_loss(logits, labels):
    targets = nn.one_hot(labels, logits.shape[-1])
    return -(targets * nn.log_softmax(logits)).sum(-1).mean()


@buggy(one_hot_loss)
def one_hot_loss_with_wrong_axis(logits, labels):
    targets = nn.one_hot(labels, logits.shape[-1], axis=0)
    return -(targets * nn.log_softmax(logits)).sum(-1).mean()  # bug


@clean("batch classes", "int: batch", "classes")
def weighted_loss(logits, labels, class_weights):
    nll = -jnp.take_along_axis(nn.log_softmax(logits), labels[:, None], axis=-1)[:, 0]
    return (nll * class_weights[labels]).mean()


@buggy(weighted_loss)
def weighted_loss_without_lookup(logits, labels, class_weights):
    nll = -jnp.take_along_axis(nn.log_softmax(logits), labels[:, None], axis=-1)[:, 0]
    return (nll * class_weights).mean()  # bug


@clean("batch classes", "int: batch")
def accuracy(logits, labels):
    return (logits.argmax(-1) == labels).mean()


@buggy(accuracy)
def accuracy_over_batch(logits, labels):
    return (logits.argmax(0) == labels).mean()  # bug


# --- losses ---


@clean("batch horizon", "horizon batch", "batch")
def forecast_loss(prediction, target, weight):
    error = jnp.abs(prediction - target.T)
    return (error * weight[:, None]).mean()


@buggy(forecast_loss)
def forecast_loss_misaligned(prediction, target, weight):
    error = jnp.abs(prediction - target)  # bug
    return (error * weight[:, None]).mean()


@clean("batch embed", "embed _=1", "batch")
def regression_loss(x, w, y):
    prediction = (x @ w)[:, 0]
    return jnp.mean((prediction - y) ** 2)


@buggy(regression_loss)
def regression_loss_of_all_pairs(x, w, y):
    prediction = x @ w
    return jnp.mean((prediction - y) ** 2)  # bug


@clean("batch mix", "batch mix dim", "batch dim")
def mixture_loss(logits, mu, y):
    log_prob = -0.5 * ((y[:, None, :] - mu) ** 2).sum(-1)
    return -jax.scipy.special.logsumexp(nn.log_softmax(logits) + log_prob, axis=-1).mean()


@buggy(mixture_loss)
def mixture_loss_summed_over_components(logits, mu, y):
    log_prob = -0.5 * ((y[:, None, :] - mu) ** 2).sum(1)
    return -jax.scipy.special.logsumexp(nn.log_softmax(logits) + log_prob, axis=-1).mean()  # bug


@clean("batch pos vocab", "int: batch pos", "bool: pos batch")
def token_loss(logits, tokens, mask):
    logp = jnp.take_along_axis(nn.log_softmax(logits), tokens[..., None], -1).squeeze(-1)
    mask = mask.T
    return -(logp * mask).sum() / mask.sum()


@buggy(token_loss)
def token_loss_with_time_major_mask(logits, tokens, mask):
    logp = jnp.take_along_axis(nn.log_softmax(logits), tokens[..., None], -1).squeeze(-1)
    return -(logp * mask).sum() / mask.sum()  # bug


# --- convolution, loops, vmap ---


@clean("batch height width cin", "kh kw cin cout", "cout")
def conv(x, kernel, bias):
    y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return nn.relu(y + bias)


@buggy(conv)
def conv_with_channels_first(x, kernel, bias):
    y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "OIHW", "NHWC"))  # bug
    return nn.relu(y + bias)


@clean("batch pos embed", "batch hidden", "embed hidden", "hidden hidden")
def rnn(xs, h, wx, wh):
    def step(h, x):
        h = jnp.tanh(x @ wx + h @ wh)
        return h, h

    _, hs = lax.scan(step, h, xs.swapaxes(0, 1))
    return hs.swapaxes(0, 1)


@buggy(rnn)
def rnn_over_batch(xs, h, wx, wh):
    def step(h, x):
        h = jnp.tanh(x @ wx + h @ wh)  # bug
        return h, h

    _, hs = lax.scan(step, h, xs)
    return hs.swapaxes(0, 1)


@clean("batch pos hidden", "batch hidden", "hidden hidden")
def residual_rnn(xs, h, w):
    def step(h, x):
        h = nn.tanh(x + h @ w)
        return h, h

    _, hs = lax.scan(step, h, jnp.moveaxis(xs, 1, 0))
    return xs + jnp.moveaxis(hs, 0, 1)


@buggy(residual_rnn)
def residual_rnn_time_major(xs, h, w):
    def step(h, x):
        h = nn.tanh(x + h @ w)
        return h, h

    _, hs = lax.scan(step, h, jnp.moveaxis(xs, 1, 0))
    return xs + hs  # bug


@clean("env time", "env time", "env")
def discounted_advantages(rewards, values, last_value):
    def step(carry, inputs):
        advantage, next_value = carry
        reward, value = inputs
        advantage = reward + 0.99 * next_value - value + 0.95 * 0.99 * advantage
        return (advantage, value), advantage

    inputs = (rewards.T, values.T)
    _, advantages = lax.scan(step, (jnp.zeros_like(last_value), last_value), inputs, reverse=True)
    return advantages.T


@buggy(discounted_advantages)
def discounted_advantages_over_envs(rewards, values, last_value):
    def step(carry, inputs):
        advantage, next_value = carry
        reward, value = inputs
        advantage = reward + 0.99 * next_value - value + 0.95 * 0.99 * advantage  # bug
        return (advantage, value), advantage

    inputs = (rewards, values)
    _, advantages = lax.scan(step, (jnp.zeros_like(last_value), last_value), inputs, reverse=True)
    return advantages.T


@clean("pos batch feature", "batch hidden", "feature hidden")
def vmapped(x, h, w):
    def one(x, h):
        return jnp.tanh(x @ w).mean(0) + h

    return jax.vmap(one, in_axes=(1, 0))(x, h)


@buggy(vmapped)
def vmapped_over_positions(x, h, w):
    def one(x, h):
        return jnp.tanh(x @ w).mean(0) + h

    return jax.vmap(one)(x, h)  # bug


@clean("batch embed", "embed hidden", "batch hidden")
def vmapped_residual(x, w, residual):
    def one(row):
        return nn.gelu(row @ w)

    return residual + jax.vmap(one)(x)


@buggy(vmapped_residual)
def vmapped_residual_with_wrong_out_axes(x, w, residual):
    def one(row):
        return nn.gelu(row @ w)

    return residual + jax.vmap(one, out_axes=1)(x)  # bug
