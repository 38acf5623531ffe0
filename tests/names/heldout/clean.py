"""Correct programs, in which no names are mixed up, with the names of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, nn

from .cases import Program

PROGRAMS: list[Program] = []


def clean(*arguments: Any, returns: Any, square_only: bool = False) -> Callable[[Callable[..., Any]], Program]:
    def add(fn: Callable[..., Any]) -> Program:
        PROGRAMS.append(Program(fn, arguments, returns, square_only))
        return PROGRAMS[-1]

    return add


# --- linear algebra ---


@clean("sample feature", returns="feature feature'")
def covariance(x):
    x = x - x.mean(axis=0, keepdims=True)
    return x.T @ x / (x.shape[0] - 1)


@clean("sample feature", returns="feature feature'")
def correlation(x):
    x = (x - x.mean(0)) / x.std(0)
    return jnp.einsum("ni,nj->ij", x, x) / x.shape[0]


@clean("state state", "batch state", returns="batch state")
def matrix_square(A, x):
    A2 = A @ A
    return x @ A2.T + x @ (A2 @ A)


@clean("state state", returns="state state'")
def symmetrize(A):
    A = 0.5 * (A + A.T)
    return A - jnp.trace(A) / A.shape[0] * jnp.eye(A.shape[0])


@clean("feature feature", "sample feature", returns="sample")
def mahalanobis(cov, x):
    L = jnp.linalg.cholesky(cov + 1e-6 * jnp.eye(cov.shape[0]))
    z = jax.scipy.linalg.solve_triangular(L, x.T, lower=True)
    return (z**2).sum(0)


@clean("feature feature", "feature", "sample feature", returns="sample")
def gaussian_log_density(cov, mean, x):
    L = jnp.linalg.cholesky(cov)
    d = x - mean
    z = lax.linalg.triangular_solve(L, d.T, left_side=True, lower=True)
    log_det = 2 * jnp.log(jnp.diagonal(L)).sum()
    return -0.5 * ((z**2).sum(0) + log_det + x.shape[1] * jnp.log(2 * jnp.pi))


@clean("sample feature", "sample", returns="feature")
def ridge_regression(X, y):
    gram = X.T @ X + 0.1 * jnp.eye(X.shape[1])
    return jnp.linalg.solve(gram, X.T @ y)


@clean("sample feature", returns="sample ?")
def principal_components(x):
    x = x - x.mean(0)
    _, v = jnp.linalg.eigh(x.T @ x)
    return x @ v[:, ::-1][:, :2]


@clean("sample feature", returns="sample feature")
def low_rank(x):
    u, s, vt = jnp.linalg.svd(x, full_matrices=False)
    return (u[:, :2] * s[:2]) @ vt[:2]


@clean("state", "state state", "state state", "state state", "obs state", "obs obs", "time obs", returns="time state")
def kalman_filter(m, P, F, Q, H, R, ys):
    def step(carry, y):
        m, P = carry
        m, P = F @ m, F @ P @ F.T + Q
        S = H @ P @ H.T + R
        K = P @ H.T @ jnp.linalg.inv(S)
        m = m + K @ (y - H @ m)
        P = (jnp.eye(m.shape[0]) - K @ H) @ P
        return (m, P), m

    return lax.scan(step, (m, P), ys)[1]


@clean("page page", "page", returns="page")
def page_rank(links, start):
    transition = links / links.sum(axis=1, keepdims=True)

    def step(_, rank):
        return 0.85 * transition.T @ rank + 0.15 / rank.shape[0]

    return lax.fori_loop(0, 20, step, start)


@clean("node node", "node feature", "feature hidden", returns="node hidden")
def graph_convolution(A, x, w):
    A = A + jnp.eye(A.shape[0])
    d = A.sum(1) ** -0.5
    A = d[:, None] * A * d[None, :]
    return nn.relu(A @ x @ w)


@clean("row col", "", returns="row col")
def sinkhorn(cost, epsilon):
    K = jnp.exp(-cost / epsilon)
    u, v = jnp.ones(cost.shape[0]), jnp.ones(cost.shape[1])
    for _ in range(3):
        u = 1 / (K @ v)
        v = 1 / (K.T @ u)
    return u[:, None] * K * v[None, :]


@clean("rows cols", returns="rows cols")
def orthogonalize(g):
    x = g / (jnp.linalg.norm(g) + 1e-7)
    for _ in range(3):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


# --- pairs of elements ---


@clean("point dim", returns="point point'")
def pairwise_distances(x):
    return jnp.sqrt(((x[:, None, :] - x[None, :, :]) ** 2).sum(-1) + 1e-12)


@clean("a dim", "b dim", returns="a b")
def squared_distances(x, y):
    xx, yy = (x * x).sum(1), (y * y).sum(1)
    return xx[:, None] - 2 * x @ y.T + yy


@clean("particle dim", "particle", returns="particle dim")
def n_body(x, mass):
    delta = x[None, :] - x[:, None]
    inv_r3 = ((delta**2).sum(-1) + 1e-3) ** -1.5
    return (delta * (mass * inv_r3)[..., None]).sum(axis=1)


@clean("point dim", "point embed", returns="")
def tsne_loss(x, y):
    def affinity(z, kernel):
        d = ((z[:, None] - z) ** 2).sum(-1)
        k = kernel(d) * (1 - jnp.eye(z.shape[0]))
        return k

    p = affinity(x, lambda d: jnp.exp(-d / 2))
    p = p / p.sum(1, keepdims=True)
    p = (p + p.T) / (2 * x.shape[0])
    q = affinity(y, lambda d: 1 / (1 + d))
    q = q / q.sum()
    return (p * (jnp.log(p + 1e-9) - jnp.log(q + 1e-9))).sum()


@clean("train feature", "train", "test feature", returns="test")
def kernel_regression(x, y, x_new):
    weights = jax.vmap(lambda q: jnp.exp(-((x - q) ** 2).sum(-1)))(x_new)
    return weights @ y / weights.sum(-1)


@clean("batch embed", "batch embed", returns="")
def contrastive(a, b):
    a = a / jnp.linalg.norm(a, axis=-1, keepdims=True)
    b = b / jnp.linalg.norm(b, axis=-1, keepdims=True)
    logits = a @ b.T / 0.07
    labels = jnp.arange(a.shape[0])
    one = -jnp.take_along_axis(nn.log_softmax(logits, axis=1), labels[:, None], 1).mean()
    other = -jnp.take_along_axis(nn.log_softmax(logits.T, axis=1), labels[:, None], 1).mean()
    return (one + other) / 2


@clean("sample channel", "center channel", returns="center channel")
def k_means_step(x, centers):
    distance = ((x[:, None] - centers[None]) ** 2).sum(-1)
    member = nn.one_hot(distance.argmin(-1), centers.shape[0])
    return (member.T @ x) / member.sum(0)[:, None]


# --- attention and transformers ---


@clean("batch pos embed", "embed inner=6", "embed inner=6", "embed inner=6", "inner=6 embed", returns="batch pos embed")
def causal_self_attention(x, wq, wk, wv, wo):
    B, T, _ = x.shape
    q, k, v = (jnp.swapaxes((x @ w).reshape(B, T, 3, 2), 1, 2) for w in (wq, wk, wv))
    att = jnp.einsum("bhqd,bhkd->bhqk", q, k) / jnp.sqrt(2)
    att = jnp.where(jnp.tril(jnp.ones((T, T), bool)), att, -jnp.inf)
    y = jax.nn.softmax(att, axis=-1) @ v
    return y.transpose(0, 2, 1, 3).reshape(B, T, -1) @ wo


@clean("batch heads pos head_dim", "batch heads pos head_dim", returns="batch heads pos pos'")
def sliding_window_scores(q, k):
    i = jnp.arange(q.shape[-2])
    near = (i[:, None] >= i) & (i[:, None] - i < 3)
    return nn.softmax(jnp.where(near, jnp.einsum("...qd,...kd->...qk", q, k), -1e9))


@clean(
    "batch pos kv group head_dim",
    "batch pos kv head_dim",
    "batch pos kv head_dim",
    returns="batch pos kv group head_dim",
)
def grouped_query_attention(q, k, v):
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k)
    mask = jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])[None, :]
    scores = scores + jnp.where(mask, 0.0, -1e30)
    return jnp.einsum("bkgts,bskd->btkgd", nn.softmax(scores), v)


@clean("batch pos heads head_dim=8", "int: batch pos", returns="batch pos heads head_dim")
def rotate_half(x, positions):
    inv_freq = 1.0 / (10000 ** (jnp.arange(0, 8, 2) / 8))
    angle = positions[..., None] * inv_freq
    angle = jnp.concatenate([angle, angle], axis=-1)[:, :, None, :]
    a, b = x[..., :4], x[..., 4:]
    return x * jnp.cos(angle) + jnp.concatenate([-b, a], axis=-1) * jnp.sin(angle)


@clean("batch pos heads head_dim=8", returns="batch pos heads head_dim")
def rotate_interleaved(x):
    pos = jnp.arange(x.shape[1], dtype=jnp.float32)
    theta = jnp.outer(pos, 1e4 ** (-jnp.arange(4) / 4))
    pairs = x.reshape(*x.shape[:-1], 4, 2)
    c, s = jnp.cos(theta)[:, None], jnp.sin(theta)[:, None]
    out = jnp.stack([pairs[..., 0] * c - pairs[..., 1] * s, pairs[..., 1] * c + pairs[..., 0] * s], axis=-1)
    return out.reshape(x.shape)


@clean("batch heads pos head_dim", "batch heads pos head_dim", "heads", returns="batch heads pos pos'")
def alibi(q, k, slopes):
    pos = jnp.arange(q.shape[2])
    distance = -jnp.abs(pos[None, :] - pos[:, None])
    return nn.softmax(q @ k.mT + slopes[:, None, None] * distance, axis=-1)


@clean("heads pos head_dim", "heads pos head_dim", "heads pos head_dim", returns="heads pos head_dim")
def linear_attention(q, k, v):
    def step(state, inputs):
        q, k, v = inputs
        state = state + k[:, :, None] * v[:, None, :]
        return state, jnp.einsum("hk,hkv->hv", q, state)

    q, k, v = (jnp.moveaxis(x, 1, 0) for x in (q, k, v))
    start = jnp.zeros((q.shape[1], q.shape[2], v.shape[2]))
    return jnp.moveaxis(lax.scan(step, start, (q, k, v))[1], 0, 1)


@clean("batch pos", "batch pos embed", returns="batch embed")
def attention_pooling(scores, x):
    weights = jnp.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return (x * weights[:, :, None]).sum(axis=1)


@clean("int: batch pos", "vocab embed", "embed hidden", "hidden embed", returns="batch pos vocab")
def tied_language_model(tokens, table, w1, w2):
    x = table[tokens]
    x = x + nn.gelu(x @ w1) @ w2
    return jnp.einsum("bpe,ve->bpv", x, table)


# --- losses ---


@clean("batch pos vocab", "int: batch pos", returns="batch pos")
def next_token_loss(logits, tokens):
    logp = nn.log_softmax(logits[:, :-1])
    target = nn.one_hot(tokens[:, 1:], logits.shape[-1])
    return -(logp * target).sum(-1)


@clean("batch classes", "int: batch", returns="")
def label_smoothing(logits, labels):
    n = logits.shape[-1]
    target = 0.9 * jnp.eye(n)[labels] + 0.1 / n
    return -jnp.mean(jnp.sum(target * nn.log_softmax(logits, axis=-1), axis=-1))


@clean("batch classes", "int: batch", returns="batch classes")
def gradient_of_logits(logits, labels):
    def loss(logits):
        return -jnp.take_along_axis(nn.log_softmax(logits), labels[:, None], axis=1).mean()

    return jax.grad(loss)(logits)


@clean("int: batch", "int: batch", returns="? ?")
def confusion_matrix(predicted, actual):
    return jnp.zeros((5, 5), jnp.int32).at[actual, predicted].add(1)


@clean("batch quantile", "batch", "quantile", returns="batch quantile")
def quantile_loss(prediction, target, levels):
    error = target[:, None] - prediction
    return jnp.maximum(levels * error, (levels - 1) * error)


@clean("batch boxes=4 corner=4", "batch boxes=4 corner=4", returns="batch boxes")
def box_overlap(a, b):
    low = jnp.maximum(a[..., :2], b[..., :2])
    high = jnp.minimum(a[..., 2:], b[..., 2:])
    inter = jnp.prod(jnp.clip(high - low, 0), axis=-1)

    def area(x):
        return (x[..., 2] - x[..., 0]) * (x[..., 3] - x[..., 1])

    return inter / (area(a) + area(b) - inter)


# --- selecting and sorting ---


@clean("batch pos vocab", returns=["batch pos ?", "batch pos ?"])
def top_k(logits):
    values, ids = lax.top_k(logits, 3)
    return nn.softmax(values), ids


@clean("batch vocab", returns="batch vocab")
def nucleus(logits):
    ordered = jnp.sort(logits, axis=-1)[:, ::-1]
    kept = jnp.cumsum(nn.softmax(ordered), axis=-1) < 0.9
    cutoff = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < cutoff, -jnp.inf, logits)


@clean("user item", "user item", returns="user")
def ndcg(scores, relevance):
    order = jnp.argsort(-scores, axis=1)
    gains = jnp.take_along_axis(relevance, order, axis=1)
    discount = 1 / jnp.log2(jnp.arange(2, scores.shape[1] + 2))
    ideal = -jnp.sort(-relevance, axis=1) @ discount
    return gains @ discount / ideal


@clean("state action", "int: batch", "int: batch", "batch", "int: batch", returns="state action")
def q_learning(q, states, actions, rewards, next_states):
    target = rewards + 0.9 * q[next_states].max(axis=1)
    return q.at[states, actions].add(0.1 * (target - q[states, actions]))


@clean("edge feature", "int: edge", returns="edge feature")
def edge_softmax(scores, receivers):
    n = 6
    top = jax.ops.segment_max(scores, receivers, n)[receivers]
    e = jnp.exp(scores - top)
    return e / jax.ops.segment_sum(e, receivers, n)[receivers]


# --- normalization ---


@clean("batch height width channels=8", "channels=8", "channels=8", returns="batch height width channels")
def group_norm(x, scale, bias):
    g = x.reshape(*x.shape[:-1], 2, 4)
    mean, var = g.mean((1, 2, 4), keepdims=True), g.var((1, 2, 4), keepdims=True)
    return ((g - mean) / jnp.sqrt(var + 1e-5)).reshape(x.shape) * scale + bias


@clean("batch pos embed", "embed", returns="batch pos embed")
def rms_norm(x, scale):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * (1 + scale)


@clean("batch channels height width", "channels", "channels", returns=["batch channels height width", "channels"])
def batch_norm_training(x, running_mean, gamma):
    mean = jnp.mean(x, axis=(0, 2, 3))
    var = jnp.mean(x**2, axis=(0, 2, 3)) - mean**2
    y = (x - mean.reshape(1, -1, 1, 1)) * (gamma / jnp.sqrt(var + 1e-5)).reshape(1, -1, 1, 1)
    return y, 0.9 * running_mean + 0.1 * mean


@clean("cout cin kh kw", "cout", returns="cout cin kh kw")
def weight_standardization(kernel, gain):
    flat = kernel.reshape(kernel.shape[0], -1)
    flat = (flat - flat.mean(1, keepdims=True)) / (flat.std(1, keepdims=True) + 1e-4)
    return flat.reshape(kernel.shape) * gain[:, None, None, None]


# --- signals and grids ---


@clean("batch time", returns="batch time?")
def moving_average(x):
    total = jnp.cumsum(jnp.pad(x, ((0, 0), (1, 0))), axis=1)
    return (total[:, 3:] - total[:, :-3]) / 3


@clean("batch time=16", "window", returns="batch time")
def causal_filter(x, taps):
    padded = jnp.pad(x, [(0, 0), (taps.shape[0] - 1, 0)])
    index = jnp.arange(x.shape[1])[:, None] + jnp.arange(taps.shape[0])[None, :]
    return padded[:, index] @ taps[::-1]


@clean("batch height=8 width=8 channels", "patch features", returns="batch height? width? features", square_only=True)
def im2col(x, w):
    columns = jnp.stack([x[:, i : i + 7, j : j + 7] for i in range(2) for j in range(2)], axis=-2)
    columns = columns.mean(-1)
    return jnp.einsum("bhwp,pf->bhwf", columns, w)


@clean("batch length=10 channels", "kernel channels filters", returns="batch length filters")
def conv1d(x, w):
    return nn.relu(lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")))


@clean("y=6 x=6", returns="y x")
def heat_step(u):
    laplacian = -4 * u
    for axis in (0, 1):
        for shift in (1, -1):
            laplacian += jnp.roll(u, shift, axis)
    return u + 0.1 * laplacian


@clean("y=6 x=8", returns="y x")
def spectral_derivative(u):
    ky = 2j * jnp.pi * jnp.fft.fftfreq(u.shape[0])
    kx = 2j * jnp.pi * jnp.fft.fftfreq(u.shape[1])
    spectrum = jnp.fft.fft2(u)
    return jnp.fft.ifft2(spectrum * (kx[None, :] ** 2 + ky[:, None] ** 2)).real


@clean("x=9", returns="x")
def upwind(u):
    flux = u**2 / 2
    inner = u[1:-1] - 0.1 * (flux[2:] - flux[:-2])
    return u.at[1:-1].set(inner)


@clean("batch time hidden", "hidden", returns="batch time hidden")
def exponential_scan(x, decay):
    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    gates = jnp.broadcast_to(nn.sigmoid(decay), x.shape)
    return lax.associative_scan(combine, (gates, x), axis=1)[1]


@clean("batch height=8 width=8 channels", returns="batch height? width? channels")
def average_pool(x):
    b, h, w, c = x.shape
    return x.reshape(b, h // 2, 2, w // 2, 2, c).mean(axis=(2, 4))


@clean("batch channels time=12", "channels window=3", returns="batch channels time?")
def depthwise_conv(x, w):
    return lax.conv_general_dilated(
        x, w[:, None, :], (1,), "VALID", dimension_numbers=("NCH", "OIH", "NCH"), feature_group_count=x.shape[1]
    )


# --- derivatives ---


@clean("input", "hidden input", "output hidden", returns="output input")
def jacobian(x, w1, w2):
    return jax.jacrev(lambda x: w2 @ jnp.tanh(w1 @ x))(x)


@clean("dim", "dim dim", returns="dim dim'")
def hessian(x, A):
    return jax.hessian(lambda x: x @ A @ x + jnp.sin(x).sum())(x)


@clean("batch dim", "dim dim", returns="batch dim")
def langevin(x, precision):
    score = jax.vmap(jax.grad(lambda x: -0.5 * x @ precision @ x))
    for _ in range(2):
        x = x + 0.01 * score(x)
    return x
