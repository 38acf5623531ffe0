"""Models and training steps as users of JAX write them, with the names of arguments and of results.

`build` makes a function and its arguments. Names are tree prefixes of arguments and results: strings, or dictionaries
from patterns of paths to strings. Where a model permits, it has sizes that are all different, and all equal.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn, nnx
from jax import lax

MODELS: list[Model] = []


class Model(NamedTuple):
    """A program: what builds it, sizes, the names of its arguments, and the names an author would give its results."""

    build: Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]]]
    names: tuple[Any, ...]
    returns: Any
    distinct: dict[str, int]
    square: dict[str, int] | None

    @property
    def name(self) -> str:
        return self.build.__name__


def model(names: tuple[Any, ...], returns: Any, square: int | dict[str, int] | None = None, **sizes: int) -> Any:
    def add(build: Any) -> Any:
        squares = dict.fromkeys(sizes, square) if isinstance(square, int) else square
        MODELS.append(Model(build, names, returns, sizes, squares))
        return build

    return add


def f32(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape) * 0.1, jnp.float32)


def ids(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.int32)


def built(example: Callable[[], Any]) -> Any:
    """Return the parameters of a Linen module as zeros, without computing them."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(example))


# --- Flax NNX ---

ATTENTION = {
    "(query|key|value)/kernel": "embed heads head_dim",
    "(query|key|value)/bias": "heads head_dim",
    "out/kernel": "heads head_dim embed",
    "out/bias": "embed",
}


class DecoderBlock(nnx.Module):
    def __init__(self, s: Any, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(s.embed, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            s.heads, s.embed, qkv_features=s.heads * s.head_dim, decode=True, rngs=rngs
        )
        self.norm2 = nnx.RMSNorm(s.embed, rngs=rngs)
        self.up = nnx.Linear(s.embed, s.hidden, rngs=rngs)
        self.down = nnx.Linear(s.hidden, s.embed, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Decoder(nnx.Module):
    def __init__(self, s: Any, rngs: nnx.Rngs):
        self.embed = nnx.Embed(s.vocab, s.embed, rngs=rngs)
        self.positions = nnx.Param(f32(s.length, s.embed))
        self.blocks = nnx.List([DecoderBlock(s, rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(s.embed, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        attention: Any = self.blocks[0].attention
        index = attention.cache_index[...]
        x = self.embed(tokens) + lax.dynamic_slice_in_dim(self.positions[...], index, 1)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


CACHE = {"cached_(key|value)": "batch length heads head_dim", "cache_index": ""}


@model(
    (
        ATTENTION
        | {
            "norm": "embed",
            "embed/embedding": "vocab embed",
            "positions": "length embed",
            "up/kernel": "embed hidden",
            "up/bias": "hidden",
            "down/kernel": "hidden embed",
            "down/bias": "embed",
        },
        CACHE,
        "batch pos",
    ),
    ("batch pos vocab", CACHE),
    batch=2,
    embed=12,
    heads=4,
    head_dim=3,
    hidden=20,
    vocab=15,
    length=7,
)
def nnx_decoder_with_cache(s):
    decoder = Decoder(s, nnx.Rngs(0))
    for block in decoder.blocks:
        block.attention.init_cache((s.batch, s.length, s.embed))
    graph, params, cache = nnx.split(decoder, nnx.Param, nnx.Cache)

    def decode(params, cache, tokens):
        decoder = nnx.merge(graph, params, cache)
        logits = decoder(tokens)
        return logits, nnx.state(decoder, nnx.Cache)

    return decode, (params, cache, ids(s.batch, 1))


class UNetBlock(nnx.Module):
    def __init__(self, s: Any, rngs: nnx.Rngs):
        c = s.channels
        self.time_in = nnx.Linear(s.time, s.hidden, rngs=rngs)
        self.time_out = nnx.Linear(s.hidden, c, rngs=rngs)
        self.conv_in = nnx.Conv(s.colours, c, (3, 3), rngs=rngs)
        self.norm1 = nnx.GroupNorm(c, num_groups=2, rngs=rngs)
        self.down = nnx.Conv(c, c, (3, 3), strides=2, rngs=rngs)
        self.up = nnx.ConvTranspose(c, c, (2, 2), strides=(2, 2), rngs=rngs)
        self.norm2 = nnx.GroupNorm(2 * c, num_groups=2, rngs=rngs)
        self.conv_out = nnx.Conv(2 * c, s.colours, (1, 1), rngs=rngs)
        self.size = s.time

    def __call__(self, x: Any, t: Any) -> Any:
        half = self.size // 2
        angle = t[:, None] * jnp.exp(-jnp.log(1e4) * jnp.arange(half) / half)
        embedding = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
        embedding = self.time_out(nnx.silu(self.time_in(embedding)))
        h = self.conv_in(x)
        h = nnx.silu(self.norm1(h)) + embedding[:, None, None, :]
        deep = self.up(nnx.silu(self.down(h)))
        h = self.norm2(jnp.concatenate([h, deep], axis=-1))
        return self.conv_out(nnx.silu(h))


UNET = {
    "time_in/kernel": "time hidden",
    "time_in/bias": "hidden",
    "time_out/kernel": "hidden channels",
    "time_out/bias": "channels",
    "conv_in/kernel": "kh kw colours channels",
    "conv_in/bias": "channels",
    "norm1": "channels",
    "(down|up)/kernel": "kh kw channels channels'",
    "(down|up)/bias": "channels",
    "norm2": "merged",
    "conv_out/kernel": "kh kw merged colours",
    "conv_out/bias": "colours",
}


@model(
    (UNET, "step", "batch height width colours", "batch", "batch height width colours"),
    ("", UNET),
    batch=3,
    height=4,
    width=6,
    colours=5,
    channels=8,
    time=10,
    hidden=7,
    steps=9,
    square=4,
)
def nnx_diffusion_loss(s):
    net = UNetBlock(s, nnx.Rngs(0))
    graph, params = nnx.split(net)

    def loss(params, alphas, x, t, eps):
        a = alphas[t][:, None, None, None]
        noisy = jnp.sqrt(a) * x + jnp.sqrt(1 - a) * eps
        predicted = nnx.merge(graph, params)(noisy, t.astype(jnp.float32))
        return jnp.mean(jnp.square(predicted - eps))

    image = f32(s.batch, s.height, s.width, s.colours)
    return jax.value_and_grad(loss), (params, f32(s.steps), image, ids(s.batch), image)


class VAE(nnx.Module):
    def __init__(self, s: Any, rngs: nnx.Rngs):
        self.encode = nnx.Linear(s.pixels, s.hidden, rngs=rngs)
        self.mean = nnx.Linear(s.hidden, s.latent, rngs=rngs)
        self.log_var = nnx.Linear(s.hidden, s.latent, rngs=rngs)
        self.decode = nnx.Linear(s.latent, s.hidden, rngs=rngs)
        self.out = nnx.Linear(s.hidden, s.pixels, rngs=rngs)

    def __call__(self, x: Any, key: Any) -> Any:
        h = nnx.relu(self.encode(x))
        mean, log_var = self.mean(h), self.log_var(h)
        z = mean + jnp.exp(0.5 * log_var) * jax.random.normal(key, mean.shape)
        return self.out(nnx.relu(self.decode(z))), mean, log_var


@model(
    (
        {
            "encode/kernel": "pixels hidden",
            "(encode|decode)/bias": "hidden",
            "(mean|log_var)/kernel": "hidden latent",
            "(mean|log_var)/bias": "latent",
            "decode/kernel": "latent hidden",
            "out/kernel": "hidden pixels",
            "out/bias": "pixels",
        },
        "batch pixels",
        None,
    ),
    ("batch", "batch pixels", "batch latent"),
    batch=3,
    pixels=10,
    hidden=7,
    latent=2,
    square=4,
)
def nnx_vae(s):
    vae = VAE(s, nnx.Rngs(0))

    def elbo(vae, x, key):
        logits, mean, log_var = vae(x, key)
        kl = 0.5 * jnp.sum(jnp.exp(log_var) + mean**2 - 1 - log_var, axis=-1)
        likelihood = -optax.sigmoid_binary_cross_entropy(logits, x).sum(-1)
        return likelihood - kl, nnx.sigmoid(logits), mean

    return elbo, (vae, f32(s.batch, s.pixels), jax.random.key(0))


# --- Flax Linen ---


class Tagger(nn.Module):
    vocab: int
    embed: int
    hidden: int
    tags: int

    @nn.compact
    def __call__(self, tokens: Any, lengths: Any) -> Any:
        x = nn.Embed(self.vocab, self.embed)(tokens)
        x: Any = nn.RNN(nn.OptimizedLSTMCell(self.hidden))(x, seq_lengths=lengths)
        x = nn.RNN(nn.GRUCell(self.hidden), reverse=True, keep_order=True)(x)
        return nn.Dense(self.tags)(x)


@model(
    (
        {
            "embedding": "vocab embed",
            "LSTM.*/i./kernel": "embed hidden",
            "(LSTM.*/h.|GRU.*/[ih].)/kernel": "hidden hidden'",
            "(LSTM|GRU).*/bias": "hidden",
            "Dense_0/kernel": "hidden tags",
            "Dense_0/bias": "tags",
        },
        "batch pos",
        "batch",
    ),
    "batch pos tags",
    batch=2,
    pos=6,
    vocab=11,
    embed=5,
    hidden=7,
    tags=3,
    square=4,
)
def linen_tagger(s):
    tagger = Tagger(s.vocab, s.embed, s.hidden, s.tags)
    arguments = (ids(s.batch, s.pos), ids(s.batch))
    params = built(lambda: tagger.init(jax.random.key(0), *arguments))
    return tagger.apply, (params, *arguments)


class MixtureDensity(nn.Module):
    hidden: int
    mixtures: int
    out: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.tanh(nn.Dense(self.hidden, name="hidden")(x))
        logits = nn.Dense(self.mixtures, name="logits")(x)
        mean = nn.DenseGeneral((self.mixtures, self.out), name="mean")(x)
        scale = nn.softplus(nn.DenseGeneral((self.mixtures, self.out), name="scale")(x)) + 1e-3
        return logits, mean, scale


MIXTURE = {
    "hidden/kernel": "features hidden",
    "hidden/bias": "hidden",
    "logits/kernel": "hidden mixture",
    "logits/bias": "mixture",
    "(mean|scale)/kernel": "hidden mixture out",
    "(mean|scale)/bias": "mixture out",
}


@model(
    (MIXTURE, "batch features", "batch out"),
    (("", {"responsibility": "batch mixture", "mean": "batch out"}), MIXTURE),
    batch=3,
    features=4,
    hidden=8,
    mixtures=5,
    out=2,
    square=4,
)
def linen_mixture_density(s):
    net = MixtureDensity(s.hidden, s.mixtures, s.out)
    x, y = f32(s.batch, s.features), f32(s.batch, s.out)

    def loss(params, x, y):
        logits, mean, scale = net.apply(params, x)  # pyright: ignore[reportAssignmentType]
        z = (y[:, None, :] - mean) / scale
        log_prob = jnp.sum(-0.5 * z**2 - jnp.log(scale) - 0.5 * jnp.log(2 * jnp.pi), axis=-1)
        joint = nn.log_softmax(logits) + log_prob
        total = jax.nn.logsumexp(joint, axis=-1)
        expected = jnp.einsum("bm,bmo->bo", nn.softmax(logits), mean)
        return -total.mean(), {"responsibility": jnp.exp(joint - total[:, None]), "mean": expected}

    params = built(lambda: net.init(jax.random.key(0), x))
    return jax.value_and_grad(loss, has_aux=True), (params, x, y)


class Bert(nn.Module):
    s: Any

    @nn.compact
    def __call__(self, tokens: Any, segments: Any, valid: Any) -> Any:
        s = self.s
        table = nn.Embed(s.vocab, s.embed, name="words")
        positions = self.param("positions", nn.initializers.normal(), (1, s.length, s.embed))
        x = table(tokens) + nn.Embed(2, s.embed, name="segments")(segments) + positions[:, : tokens.shape[1]]
        x = nn.LayerNorm()(x)
        mask = nn.make_attention_mask(valid, valid)
        for _ in range(2):
            y = nn.MultiHeadDotProductAttention(s.heads, qkv_features=s.heads * s.head_dim)(x, x, mask=mask)
            x = nn.LayerNorm()(x + y)
            y = nn.Dense(s.embed)(nn.gelu(nn.Dense(s.hidden, name=None)(x)))
            x = nn.LayerNorm()(x + y)
        pooled = jnp.tanh(nn.Dense(s.pooled, name="pooler")(x[:, 0]))
        bias = self.param("output_bias", nn.initializers.zeros, (s.vocab,))
        return table.attend(x) + bias, nn.Dense(s.labels, name="classifier")(pooled)


@model(
    (
        ATTENTION
        | {
            "words/embedding": "vocab embed",
            "segments/embedding": "_ embed",
            "positions": "_ length embed",
            "LayerNorm": "embed",
            "Dense_[13]/kernel": "embed hidden",
            "Dense_[13]/bias": "hidden",
            "Dense_[02]/kernel": "hidden embed",
            "Dense_[02]/bias": "embed",
            "pooler/kernel": "embed pooled",
            "pooler/bias": "pooled",
            "classifier/kernel": "pooled labels",
            "classifier/bias": "labels",
            "output_bias": "vocab",
        },
        "batch pos",
        "batch pos",
        "batch pos",
    ),
    ("batch pos vocab", "batch labels"),
    batch=3,
    pos=5,
    length=9,
    vocab=17,
    embed=12,
    heads=4,
    head_dim=3,
    hidden=20,
    pooled=7,
    labels=2,
)
def linen_bert(s):
    net = Bert(s)
    arguments = (ids(s.batch, s.pos), ids(s.batch, s.pos), jnp.ones((s.batch, s.pos), bool))
    return net.apply, (built(lambda: net.init(jax.random.key(0), *arguments)), *arguments)


class ResNet(nn.Module):
    channels: int
    classes: int

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        x = nn.Conv(self.channels, (3, 3), use_bias=False, name="stem")(x)
        y = nn.BatchNorm(use_running_average=not train)(x)
        y = nn.Conv(self.channels, (3, 3), use_bias=False, name="block")(nn.relu(y))
        x = nn.avg_pool(x + y, (2, 2), strides=(2, 2))
        return nn.Dense(self.classes, name="head")(x.mean(axis=(1, 2)))


RESNET = {
    "stem/kernel": "kh kw colours channels",
    "block/kernel": "kh kw channels channels'",
    "BatchNorm": "channels",
    "head/kernel": "channels classes",
    "head/bias": "classes",
}


@model(
    ({"params": RESNET, "batch_stats": "channels"}, "batch height width colours", "batch"),
    ("", "batch classes", {"batch_stats": "channels"}),
    batch=3,
    height=6,
    width=8,
    colours=5,
    channels=7,
    classes=10,
    square=4,
)
def linen_resnet_with_batch_stats(s):
    net = ResNet(s.channels, s.classes)
    x = f32(s.batch, s.height, s.width, s.colours)

    def loss(variables, x, labels):
        logits, updates = net.apply(variables, x, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits, updates

    return loss, (built(lambda: net.init(jax.random.key(0), x)), x, ids(s.batch))


# --- Equinox ---


class ConvNet(eqx.Module):
    conv1: eqx.nn.Conv2d
    conv2: eqx.nn.Conv2d
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, s: Any, key: Any):
        a, b, c = jax.random.split(key, 3)
        self.conv1 = eqx.nn.Conv2d(s.colours, s.mid, 3, padding=1, key=a)
        self.conv2 = eqx.nn.Conv2d(s.mid, s.channels, 3, key=b)
        self.norm = eqx.nn.LayerNorm(s.channels)
        self.head = eqx.nn.Linear(s.channels, s.classes, key=c)

    def __call__(self, x: Any) -> Any:
        x = jax.nn.relu(self.conv1(x))
        x = eqx.nn.MaxPool2d(2, 2)(x)
        x = jax.nn.relu(self.conv2(x))
        return self.head(self.norm(x.mean(axis=(1, 2))))


@model(
    (
        {
            "conv1/weight": "mid colours kh kw",
            "conv1/bias": "mid _ _",
            "conv2/weight": "channels mid kh kw",
            "conv2/bias": "channels _ _",
            "norm": "channels",
            "head/weight": "classes channels",
            "head/bias": "classes",
        },
        "batch colours height width",
        "batch",
    ),
    ("batch classes", ""),
    batch=2,
    colours=5,
    height=12,
    width=14,
    mid=6,
    channels=7,
    classes=10,
    square=8,
)
def equinox_conv_net(s):
    net = ConvNet(s, jax.random.key(0))

    def loss(net, images, labels):
        logits = jax.vmap(net)(images)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
        return logits, -jnp.mean(chosen)

    return loss, (net, f32(s.batch, s.colours, s.height, s.width), ids(s.batch))


@model(
    (
        {
            "layers/0/weight": "width state",
            "layers/0/bias": "width",
            "layers/1/weight": "width width'",
            "layers/1/bias": "width",
            "layers/2/weight": "state width",
            "layers/2/bias": "state",
        },
        "batch state",
        "time",
    ),
    "batch time state",
    batch=3,
    state=2,
    width=8,
    time=5,
    square=4,
)
def equinox_neural_ode(s):
    field = eqx.nn.MLP(s.state, s.state, s.width, 2, activation=jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(field, eqx.is_array)

    def solve(params, y0, ts):
        f = eqx.combine(params, static)

        def step(y, dt):
            k1 = f(y)
            k2 = f(y + dt / 2 * k1)
            k3 = f(y + dt / 2 * k2)
            k4 = f(y + dt * k3)
            y = y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            return y, y

        return jax.vmap(lambda y: lax.scan(step, y, ts)[1])(y0)

    return solve, (params, f32(s.batch, s.state), f32(s.time))


class Mamba(eqx.Module):
    w_in: jax.Array
    conv: jax.Array
    w_delta: jax.Array
    w_b: jax.Array
    w_c: jax.Array
    log_a: jax.Array
    skip: jax.Array
    w_out: jax.Array

    def __call__(self, x: Any) -> Any:  # [pos, embed]
        u, gate = jnp.split(x @ self.w_in, 2, axis=-1)
        k = self.conv.shape[0]
        padded = jnp.pad(u, ((k - 1, 0), (0, 0)))
        u = jax.nn.silu(sum(padded[i : i + u.shape[0]] * self.conv[i] for i in range(k)))
        delta = jax.nn.softplus(u @ self.w_delta)
        b, c = u @ self.w_b, u @ self.w_c
        a = jnp.exp(delta[..., None] * -jnp.exp(self.log_a))
        bu = (delta * u)[..., None] * b[:, None, :]
        _, h = lax.associative_scan(lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1]), (a, bu))
        y = jnp.einsum("lds,ls->ld", h, c) + self.skip * u
        return (y * jax.nn.silu(gate)) @ self.w_out


@model(
    (
        {
            "w_in": "embed _",
            "conv": "window inner",
            "w_delta": "inner inner'",
            "w_[bc]": "inner state",
            "log_a": "inner state",
            "skip": "inner",
            "w_out": "inner embed",
        },
        "batch pos embed",
    ),
    "batch pos embed",
    batch=2,
    pos=9,
    embed=5,
    inner=6,
    state=3,
    window=4,
    square=4,
)
def equinox_mamba(s):
    block = Mamba(
        f32(s.embed, 2 * s.inner),
        f32(s.window, s.inner),
        f32(s.inner, s.inner),
        f32(s.inner, s.state),
        f32(s.inner, s.state),
        f32(s.inner, s.state),
        f32(s.inner),
        f32(s.inner, s.embed),
    )
    return lambda block, x: jax.vmap(block)(x), (block, f32(s.batch, s.pos, s.embed))


@model(
    ({"w1": "side hidden", "w2": "hidden side"}, "batch dim"),
    ("batch dim", "batch"),
    batch=3,
    dim=8,
    side=4,
    hidden=5,
)
def equinox_coupling_flow(s):
    class Coupling(eqx.Module):
        w1: jax.Array
        w2: jax.Array

        def __call__(self, x: Any) -> Any:
            return jnp.tanh(jax.nn.relu(x @ self.w1) @ self.w2)

    net = Coupling(f32(s.side, s.hidden), f32(s.hidden, s.side))

    def forward(net, x):
        log_det = jnp.zeros(x.shape[0])
        for flip in (False, True, False):
            a, b = jnp.split(x, 2, axis=-1)
            a, b = (b, a) if flip else (a, b)
            scale = net(a)
            b = b * jnp.exp(scale) + net(-a)
            log_det = log_det + scale.sum(-1)
            x = jnp.concatenate([b, a] if flip else [a, b], axis=-1)
        return x, log_det - 0.5 * (x**2).sum(-1)

    return forward, (net, f32(s.batch, s.dim))


# --- plain JAX ---

VIT = {
    "patch": {"w": "patch_dim embed", "b": "embed"},
    "cls": "_ _ embed",
    "pos": "_ tokens embed",
    "layers": [
        {
            "ln": "embed",
            "qkv": "embed _ heads head_dim",
            "out": "heads head_dim embed",
            "up": "embed hidden",
            "down": "hidden embed",
        }
    ]
    * 2,
    "head": "embed classes",
}


@model(
    (VIT, "batch height width channels", "batch"),
    ("", VIT),
    batch=3,
    grid_h=2,
    grid_w=5,
    patch=3,
    channels=4,
    embed=12,
    heads=6,
    head_dim=2,
    hidden=20,
    classes=7,
    square={
        "batch": 4,
        "grid_h": 2,
        "grid_w": 2,
        "patch": 2,
        "channels": 4,
        "embed": 4,
        "heads": 4,
        "head_dim": 4,
        "hidden": 4,
        "classes": 4,
    },
)
def vit(s):
    p, tokens = s.patch, s.grid_h * s.grid_w + 1

    def layer_norm(x, scale):
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    def forward(params, images):
        b, h, w, c = images.shape
        x = images.reshape(b, h // p, p, w // p, p, c)
        x = jnp.transpose(x, (0, 1, 3, 2, 4, 5)).reshape(b, -1, p * p * c)
        x = x @ params["patch"]["w"] + params["patch"]["b"]
        cls = jnp.broadcast_to(params["cls"], (b, 1, x.shape[-1]))
        x = jnp.concatenate([cls, x], axis=1) + params["pos"]
        for layer in params["layers"]:
            qkv = jnp.einsum("bse,ethd->tbshd", layer_norm(x, layer["ln"]), layer["qkv"])
            q, k, v = qkv
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
            attended = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
            x = x + jnp.einsum("bqhd,hde->bqe", attended, layer["out"])
            x = x + jax.nn.gelu(layer_norm(x, layer["ln"]) @ layer["up"]) @ layer["down"]
        return x[:, 0] @ params["head"]

    def loss(params, images, labels):
        logits = forward(params, images)
        return -(jax.nn.one_hot(labels, logits.shape[-1]) * jax.nn.log_softmax(logits)).sum(-1).mean()

    layer = {
        "ln": f32(s.embed),
        "qkv": f32(s.embed, 3, s.heads, s.head_dim),
        "out": f32(s.heads, s.head_dim, s.embed),
        "up": f32(s.embed, s.hidden),
        "down": f32(s.hidden, s.embed),
    }
    params = {
        "patch": {"w": f32(p * p * s.channels, s.embed), "b": f32(s.embed)},
        "cls": f32(1, 1, s.embed),
        "pos": f32(1, tokens, s.embed),
        "layers": [layer, layer],
        "head": f32(s.embed, s.classes),
    }
    return jax.value_and_grad(loss), (params, f32(s.batch, s.grid_h * p, s.grid_w * p, s.channels), ids(s.batch))


LLAMA = {
    "embed": "vocab embed",
    "layers": {
        "norm1": "layers embed",
        "norm2": "layers embed",
        "q": "layers embed kv group head_dim",
        "k": "layers embed kv head_dim",
        "v": "layers embed kv head_dim",
        "o": "layers kv group head_dim embed",
        "gate": "layers embed hidden",
        "up": "layers embed hidden",
        "down": "layers hidden embed",
    },
    "norm": "embed",
}


@model(
    (LLAMA, "batch pos"),
    ("batch pos vocab", {"k": "layers batch pos kv head_dim", "v": "layers batch pos kv head_dim"}, LLAMA),
    batch=2,
    pos=7,
    layers=3,
    embed=10,
    kv=5,
    group=9,
    head_dim=4,
    hidden=11,
    vocab=13,
    square=4,
)
def llama(s):
    def rms_norm(x, scale):
        return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale

    def rope(x, positions):
        freqs = 1e4 ** (-jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
        angles = positions[:, None] * freqs
        angles = jnp.expand_dims(angles, tuple(range(1, x.ndim - 2)))
        x1, x2 = jnp.split(x, 2, axis=-1)
        return jnp.concatenate(
            [x1 * jnp.cos(angles) - x2 * jnp.sin(angles), x2 * jnp.cos(angles) + x1 * jnp.sin(angles)], axis=-1
        )

    @jax.checkpoint
    def block(x, p):
        positions = jnp.arange(x.shape[1])
        h = rms_norm(x, p["norm1"])
        q = rope(jnp.einsum("bte,ekgd->btkgd", h, p["q"]), positions)
        k = rope(jnp.einsum("bte,ekd->btkd", h, p["k"]), positions)
        v = jnp.einsum("bte,ekd->btkd", h, p["v"])
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k) / jnp.sqrt(k.shape[-1])
        scores = jnp.where(positions[:, None] >= positions, scores, jnp.finfo(scores.dtype).min)
        a = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores, -1), v)
        x = x + jnp.einsum("btkgd,kgde->bte", a, p["o"])
        h = rms_norm(x, p["norm2"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], {"k": k, "v": v}

    def forward(params, tokens):
        x, cache = lax.scan(block, params["embed"][tokens], params["layers"])
        return rms_norm(x, params["norm"]) @ params["embed"].T, cache

    def both(params, tokens):
        logits, cache = forward(params, tokens)

        def loss(params):
            logits = forward(params, tokens)[0]
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

        return logits, cache, jax.grad(loss)(params)

    sizes = {"layers": s.layers, "embed": s.embed, "kv": s.kv, "group": s.group, "head_dim": s.head_dim}
    sizes |= {"hidden": s.hidden, "vocab": s.vocab}
    params = jax.tree.map(lambda names: f32(*(sizes[n] for n in names.split())), LLAMA)
    return both, (params, ids(s.batch, s.pos))


GRAPH = {
    "edge": {"w1": "edge_in hidden", "b1": "hidden", "w2": "hidden message"},
    "node": {"w1": "node_in hidden", "b1": "hidden", "w2": "hidden feature"},
    "readout": "feature target",
}


@model(
    (GRAPH, "node feature", "edge edge_feature", "edge", "edge", "node"),
    ("node feature", "edge message", "graph? target"),
    nodes=9,
    edges=14,
    feature=3,
    edge_feature=5,
    message=4,
    hidden=7,
    target=2,
    graphs=6,
    square=4,
)
def graph_network(s):
    def mlp(p, x):
        return jax.nn.relu(x @ p["w1"] + p["b1"]) @ p["w2"]

    def network(params, nodes, edges, senders, receivers, graph_ids):
        messages = mlp(params["edge"], jnp.concatenate([nodes[senders], nodes[receivers], edges], axis=-1))
        pooled = jax.ops.segment_sum(messages, receivers, num_segments=nodes.shape[0])
        nodes = nodes + mlp(params["node"], jnp.concatenate([nodes, pooled], axis=-1))
        totals = jax.ops.segment_sum(nodes, graph_ids, num_segments=s.graphs)
        counts = jax.ops.segment_sum(jnp.ones(nodes.shape[0]), graph_ids, num_segments=s.graphs)
        return nodes, messages, (totals / jnp.maximum(counts, 1)[:, None]) @ params["readout"]

    params = {
        "edge": {
            "w1": f32(2 * s.feature + s.edge_feature, s.hidden),
            "b1": f32(s.hidden),
            "w2": f32(s.hidden, s.message),
        },
        "node": {"w1": f32(s.feature + s.message, s.hidden), "b1": f32(s.hidden), "w2": f32(s.hidden, s.feature)},
        "readout": f32(s.feature, s.target),
    }
    arguments = f32(s.nodes, s.feature), f32(s.edges, s.edge_feature), ids(s.edges), ids(s.edges), ids(s.nodes)
    return network, (params, *arguments)


@model(
    ({"lengthscale": "feature", "amplitude": "", "noise": ""}, "train feature", "train", "test feature"),
    ("test", "test test'", {"lengthscale": "feature", "amplitude": "", "noise": ""}),
    train=8,
    test=5,
    feature=3,
    square=4,
)
def gaussian_process(s):
    def kernel(p, a, b):
        def one(x, y):
            return p["amplitude"] * jnp.exp(-0.5 * jnp.sum(((x - y) / p["lengthscale"]) ** 2))

        return jax.vmap(lambda x: jax.vmap(lambda y: one(x, y))(b))(a)

    def factor(p, x):
        return jnp.linalg.cholesky(kernel(p, x, x) + (p["noise"] + 1e-6) * jnp.eye(x.shape[0]))

    def negative_likelihood(p, x, y):
        L = factor(p, x)
        alpha = jax.scipy.linalg.cho_solve((L, True), y)
        return 0.5 * y @ alpha + jnp.log(jnp.diag(L)).sum()

    def posterior(p, x, y, x_new):
        L = factor(p, x)
        cross = kernel(p, x, x_new)
        mean = cross.T @ jax.scipy.linalg.cho_solve((L, True), y)
        v = jax.scipy.linalg.solve_triangular(L, cross, lower=True)
        return mean, kernel(p, x_new, x_new) - v.T @ v, jax.grad(negative_likelihood)(p, x, y)

    p = {"lengthscale": jnp.ones(s.feature), "amplitude": jnp.ones(()), "noise": jnp.ones(())}
    return posterior, (p, f32(s.train, s.feature), f32(s.train), f32(s.test, s.feature))


@model(
    (
        {"F": "state state'", "Q": "state state'", "H": "obs state", "R": "obs obs'"},
        "state",
        "state state'",
        "time obs",
    ),
    ("time state", "time state state'", ""),
    time=7,
    state=4,
    obs=3,
    square=4,
)
def kalman_smoother(s):
    def smoother(p, m0, P0, ys):
        F, Q, H, R = p["F"], p["Q"], p["H"], p["R"]

        def filter_step(carry, y):
            m, P = carry
            m_pred, P_pred = F @ m, F @ P @ F.T + Q
            S = H @ P_pred @ H.T + R
            K = jax.scipy.linalg.solve(S, H @ P_pred, assume_a="pos").T
            v = y - H @ m_pred
            m, P = m_pred + K @ v, P_pred - K @ S @ K.T
            ll = -0.5 * (v @ jnp.linalg.solve(S, v) + jnp.linalg.slogdet(S)[1])
            return (m, P), (m, P, m_pred, P_pred, ll)

        (m, P), (ms, Ps, m_preds, P_preds, lls) = lax.scan(filter_step, (m0, P0), ys)

        def smooth_step(carry, inputs):
            m_s, P_s = carry
            m, P, m_pred, P_pred = inputs
            G = jnp.linalg.solve(P_pred, F @ P).T
            m_s, P_s = m + G @ (m_s - m_pred), P + G @ (P_s - P_pred) @ G.T
            return (m_s, P_s), (m_s, P_s)

        inputs = ms[:-1], Ps[:-1], m_preds[1:], P_preds[1:]
        _, (means, covariances) = lax.scan(smooth_step, (m, P), inputs, reverse=True)
        return jnp.concatenate([means, m[None]]), jnp.concatenate([covariances, P[None]]), lls.sum()

    square = f32(s.state, s.state)
    p = {"F": square, "Q": square, "H": f32(s.obs, s.state), "R": f32(s.obs, s.obs)}
    return smoother, (p, f32(s.state), square, f32(s.time, s.obs))


CLIP = {
    "image": {"w1": "pixels hidden", "w2": "hidden embed"},
    "text": {"table": "vocab text_embed", "w": "text_embed embed"},
    "temperature": "",
}


@model(
    (CLIP, "batch pixels", "batch pos", "batch pos"),
    ("", ("batch batch'", "batch embed"), CLIP),
    batch=6,
    pixels=10,
    hidden=7,
    embed=4,
    vocab=11,
    text_embed=5,
    pos=3,
    square=4,
)
def clip(s):
    def normalize(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def loss(p, images, tokens, mask):
        image = normalize(jax.nn.relu(images @ p["image"]["w1"]) @ p["image"]["w2"])
        words = p["text"]["table"][tokens] * mask[..., None]
        text = normalize((words.sum(1) / mask.sum(1, keepdims=True)) @ p["text"]["w"])
        logits = jnp.exp(p["temperature"]) * image @ text.T
        labels = jnp.arange(logits.shape[0])
        by_image = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        by_text = optax.softmax_cross_entropy_with_integer_labels(logits.T, labels)
        return (by_image.mean() + by_text.mean()) / 2, (logits, text)

    def step(p, *batch):
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(p, *batch)
        return value, aux, grads

    p = {
        "image": {"w1": f32(s.pixels, s.hidden), "w2": f32(s.hidden, s.embed)},
        "text": {"table": f32(s.vocab, s.text_embed), "w": f32(s.text_embed, s.embed)},
        "temperature": jnp.zeros(()),
    }
    return step, (p, f32(s.batch, s.pixels), ids(s.batch, s.pos), jnp.ones((s.batch, s.pos)))


PPO = {
    "torso": {"w": "obs hidden", "b": "hidden"},
    "policy": {"w": "hidden action", "b": "action"},
    "value": {"w": "hidden _", "b": "_"},
}


@model(
    (PPO, "time env obs", "time env", "time env", "time env", "time env", "env obs"),
    (PPO, {"advantages": "time env", "entropy": "time env", "kl": ""}),
    time=7,
    env=3,
    obs=5,
    hidden=8,
    actions=4,
    square=4,
)
def ppo(s):
    def network(p, obs):
        h = jnp.tanh(obs @ p["torso"]["w"] + p["torso"]["b"])
        return h @ p["policy"]["w"] + p["policy"]["b"], (h @ p["value"]["w"] + p["value"]["b"]).squeeze(-1)

    def gae(rewards, dones, values, last):
        def step(carry, x):
            advantage, following = carry
            reward, done, value = x
            delta = reward + 0.99 * following * (1 - done) - value
            advantage = delta + 0.99 * 0.95 * (1 - done) * advantage
            return (advantage, value), advantage

        return lax.scan(step, (jnp.zeros_like(last), last), (rewards, dones, values), reverse=True)[1]

    def loss(p, obs, actions, old_log_probs, rewards, dones, last_obs):
        logits, values = network(p, obs)
        advantages = lax.stop_gradient(gae(rewards, dones, values, network(p, last_obs)[1]))
        targets = advantages + lax.stop_gradient(values)
        log_probs = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(log_probs, actions[..., None], axis=-1)[..., 0]
        ratio = jnp.exp(chosen - old_log_probs)
        normal = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy = -jnp.minimum(ratio * normal, jnp.clip(ratio, 0.8, 1.2) * normal).mean()
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
        total = policy + 0.5 * ((values - targets) ** 2).mean() - 0.01 * entropy.mean()
        return total, {"advantages": advantages, "entropy": entropy, "kl": (old_log_probs - chosen).mean()}

    p = {
        "torso": {"w": f32(s.obs, s.hidden), "b": f32(s.hidden)},
        "policy": {"w": f32(s.hidden, s.actions), "b": f32(s.actions)},
        "value": {"w": f32(s.hidden, 1), "b": f32(1)},
    }
    each = f32(s.time, s.env)
    arguments = f32(s.time, s.env, s.obs), ids(s.time, s.env), each, each, each, f32(s.env, s.obs)
    return jax.grad(loss, has_aux=True), (p, *arguments)


@model(
    ({"router": "embed expert", "up": "expert embed hidden", "down": "expert hidden embed"}, "batch pos embed"),
    ("batch pos embed", ""),
    batch=2,
    pos=6,
    embed=7,
    experts=3,
    hidden=5,
    square=4,
)
def mixture_of_experts(s):
    capacity = 8

    def moe(p, x):
        b, t, e = x.shape
        tokens = x.reshape(b * t, e)
        probs = jax.nn.softmax(tokens @ p["router"])
        expert = jnp.argmax(probs, axis=-1)
        onehot = jax.nn.one_hot(expert, probs.shape[-1])
        slot = (jnp.cumsum(onehot, axis=0) - 1) * onehot
        kept = onehot * (slot < capacity)
        dispatch = kept[..., None] * jax.nn.one_hot(slot.astype(jnp.int32), capacity)
        combine = dispatch * jnp.max(probs, axis=-1)[:, None, None]
        inputs = jnp.einsum("tec,td->ecd", dispatch, tokens)
        h = jax.nn.relu(jnp.einsum("ecd,edh->ech", inputs, p["up"]))
        outputs = jnp.einsum("ech,ehd->ecd", h, p["down"])
        balance = probs.shape[-1] * jnp.sum(onehot.mean(0) * probs.mean(0))
        return jnp.einsum("tec,ecd->td", combine, outputs).reshape(b, t, e), balance

    p = {
        "router": f32(s.embed, s.experts),
        "up": f32(s.experts, s.embed, s.hidden),
        "down": f32(s.experts, s.hidden, s.embed),
    }
    return moe, (p, f32(s.batch, s.pos, s.embed))


@model(
    (
        {
            "layers": [
                {"w": "window channels channels'", "gate": "window channels channels'", "skip": "channels skips"}
            ]
            * 3,
            "in": "channels",
            "out": "skips bins",
        },
        "batch time",
    ),
    "batch time bins",
    batch=2,
    time=12,
    channels=5,
    skips=7,
    bins=9,
    window=3,
    square=4,
)
def wavenet(s):
    def causal(x, w, dilation):
        x = jnp.pad(x, ((0, 0), (dilation * (w.shape[0] - 1), 0), (0, 0)))
        return lax.conv_general_dilated(
            x, w, (1,), "VALID", rhs_dilation=(dilation,), dimension_numbers=("NWC", "WIO", "NWC")
        )

    def forward(p, audio):
        x = audio[:, :, None] * p["in"]
        total = 0.0
        for i, layer in enumerate(p["layers"]):
            h = jnp.tanh(causal(x, layer["w"], 2**i)) * jax.nn.sigmoid(causal(x, layer["gate"], 2**i))
            total = total + h @ layer["skip"]
            x = x + h
        return jax.nn.relu(total) @ p["out"]

    kernel = f32(s.window, s.channels, s.channels)
    layer = {"w": kernel, "gate": kernel, "skip": f32(s.channels, s.skips)}
    p = {"layers": [layer] * 3, "in": f32(s.channels), "out": f32(s.skips, s.bins)}
    return forward, (p, f32(s.batch, s.time))


PINN = {"w1": "coordinate hidden", "b1": "hidden", "w2": "hidden hidden'", "w3": "hidden"}


@model(
    (PINN, "point coordinate"),
    ("point", PINN),
    points=6,
    coordinates=2,
    hidden=5,
)
def physics_informed(s):
    def u(p, x):
        return jnp.sin(jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"]) @ p["w3"]

    def residual(p, x):
        gradient = jax.grad(u, argnums=1)(p, x)
        hessian = jax.jacfwd(jax.grad(u, argnums=1), argnums=1)(p, x)
        return gradient[0] + u(p, x) * gradient[1] - 0.01 * hessian[1, 1]

    def step(p, xs):
        residuals = jax.vmap(residual, (None, 0))(p, xs)
        grads = jax.grad(lambda p: (jax.vmap(residual, (None, 0))(p, xs) ** 2).mean())(p)
        return residuals, grads

    p = {
        "w1": f32(s.coordinates, s.hidden),
        "b1": f32(s.hidden),
        "w2": f32(s.hidden, s.hidden),
        "w3": f32(s.hidden),
    }
    return step, (p, f32(s.points, s.coordinates))


# --- training steps ---

MLP = {"w1": "features hidden", "b1": "hidden", "w2": "hidden out", "b2": "out"}
ADAM = {"count": "", **{f"(mu|nu)/{name}": axes for name, axes in MLP.items()}}


def mlp_loss(p, x, y):
    h = jax.nn.gelu(x @ p["w1"] + p["b1"])
    return jnp.mean((h @ p["w2"] + p["b2"] - y) ** 2)


def mlp_params(s):
    return {"w1": f32(s.features, s.hidden), "b1": f32(s.hidden), "w2": f32(s.hidden, s.out), "b2": f32(s.out)}


@model(
    (MLP, ADAM, "batch features", "batch out"),
    (MLP, ADAM, ""),
    batch=3,
    features=5,
    hidden=7,
    out=2,
    square=4,
)
def adamw_step(s):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 100)))

    def step(p, state, x, y):
        loss, grads = jax.value_and_grad(mlp_loss)(p, x, y)
        updates, state = optimizer.update(grads, state, p)
        return optax.apply_updates(p, updates), state, loss

    p = mlp_params(s)
    return step, (p, optimizer.init(p), f32(s.batch, s.features), f32(s.batch, s.out))


ADAFACTOR = {
    "count": "",
    "v_row/w1": "features",
    "v_col/w1": "hidden",
    "v_row/w2": "out",
    "v_col/w2": "hidden",
    "(v_row|v_col)/b.": "_",
    "v/w.": "_",
    "v/b1": "hidden",
    "v/b2": "out",
}


@model(
    (MLP, ADAFACTOR, "batch features", "batch out"),
    (MLP, ADAFACTOR),
    batch=3,
    features=5,
    hidden=7,
    out=2,
)
def adafactor_step(s):
    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=2)

    def step(p, state, x, y):
        grads = jax.grad(mlp_loss)(p, x, y)
        updates, state = optimizer.update(grads, state, p)
        return optax.apply_updates(p, updates), state

    p = mlp_params(s)
    return step, (p, optimizer.init(p), f32(s.batch, s.features), f32(s.batch, s.out))


@model(
    (MLP, MLP, "batch features", "batch out"),
    (MLP, "micro? batch?"),
    batch=6,
    features=5,
    hidden=7,
    out=3,
)
def accumulated_gradients_with_momentum(s):
    def step(p, momentum, x, y):
        xs, ys = (a.reshape(2, a.shape[0] // 2, *a.shape[1:]) for a in (x, y))

        def micro(total, batch):
            loss, grads = jax.value_and_grad(mlp_loss)(p, *batch)
            return jax.tree.map(jnp.add, total, grads), jnp.abs(batch[1]).sum(-1) * loss

        total, losses = lax.scan(micro, jax.tree.map(jnp.zeros_like, p), (xs, ys))
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g / 2, momentum, total)
        return jax.tree.map(lambda p, m: p - 0.1 * m, p, momentum), losses

    p = mlp_params(s)
    return step, (p, p, f32(s.batch, s.features), f32(s.batch, s.out))


def sizes(program: Model, square: bool) -> Any:
    """Return the sizes of a program, or None where it cannot be square."""
    chosen = program.square if square else program.distinct
    return None if chosen is None else SimpleNamespace(**chosen)
