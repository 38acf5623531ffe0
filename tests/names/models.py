"""Models and whole steps in positional code: what the names of their axes are, and which of them a user gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

AXES = """batch pos embed mlp heads head_dim vocab layers kv group features hidden classes height width channels wide
nodes edges time experts capacity state kernel""".split()
EQUAL: Mapping[str, int] = dict.fromkeys(AXES, 4)
DISTINCT: Mapping[str, int] = dict(
    zip(AXES, [3, 5, 12, 14, 2, 6, 11, 7, 2, 3, 9, 10, 13, 8, 16, 20, 24, 15, 21, 17, 4, 19, 18, 3], strict=True)
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A function with its arguments, the names of all their axes, and the part of these that a user gives."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    given: Any
    """The names that the user gives: a tree prefix of the arguments."""
    truth: Any
    """For each argument, a rule that names its arrays by their path; None says nothing about them."""
    results: Any
    """The same for the results."""
    loss: Callable[..., jax.Array]
    """The loss of the step, a function of the parameters and a batch."""
    loss_args: tuple[Any, ...]
    loss_names: tuple[Any, ...]
    """The names of all axes of these."""
    unknown: float = 0.03
    """The share of axes that may stay unknown."""


def by_path(tree: Any, rules: Mapping[str, str | None]) -> Any:
    """Return a tree of names, by patterns of paths such as `*/kernel`."""

    def named(keys: Any, x: Any) -> Any:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        found = [names for pattern, names in rules.items() if fnmatch(path, pattern)]
        return found[0] if found else None

    return jax.tree_util.tree_map_with_path(named, tree)


def abstract(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def tokens(*shape: int) -> jax.ShapeDtypeStruct:
    return abstract(*shape, dtype=jnp.int32)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def train_step(loss: Callable[..., jax.Array], optimizer: Any = OPTIMIZER) -> Callable[..., Any]:
    """Return a step that updates parameters and the state of their optimizer."""

    def step(params: Any, state: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return value, optax.apply_updates(params, updates), state

    return step


def trained(
    loss: Callable[..., jax.Array],
    params: Any,
    rules: Mapping[str, str | None],
    given: Mapping[str, str | None],
    batch: tuple[Any, ...],
    names: tuple[str | None, ...],
    truth: tuple[str | None, ...] | None = None,
    optimizer: Any = OPTIMIZER,
    unknown: float = 0.03,
) -> Case:
    """Return the case of a whole training step; the state of the optimizer has no names."""
    state = jax.eval_shape(optimizer.init, params)
    state_rules = {f"*{key.removeprefix('*')}": value for key, value in rules.items()}
    known = (rules, state_rules, *({"": t} for t in truth or names))
    return Case(
        train_step(loss, optimizer),
        (params, state, *batch),
        (by_path(params, given), None, *names),
        known,
        ({}, rules, state_rules),
        loss,
        (params, *batch),
        (by_path(params, rules), *(truth or names)),
        unknown,
    )


# --- Flax NNX ---


class NNXMLP(nnx.Module):
    def __init__(self, a: Mapping[str, int], rngs: nnx.Rngs):
        self.up = nnx.Linear(a["features"], a["hidden"], rngs=rngs)
        self.norm = nnx.LayerNorm(a["hidden"], rngs=rngs)
        self.dropout = nnx.Dropout(0.1)
        self.down = nnx.Linear(a["hidden"], a["classes"], rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        return self.down(self.dropout(nnx.gelu(self.norm(self.up(x))), rngs=rngs))


def nnx_mlp(a: Mapping[str, int]) -> Case:
    model = nnx.eval_shape(lambda: NNXMLP(a, nnx.Rngs(0)))
    graph, params = nnx.split(model)

    def loss(params: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
        return cross_entropy(nnx.merge(graph, params)(x, nnx.Rngs(key)), y)

    rules = {
        "up/kernel*": "features hidden",
        "up/bias*": "hidden",
        "norm/*": "hidden",
        "down/kernel*": "hidden classes",
        "down/bias*": "classes",
    }
    key = jax.eval_shape(lambda: jax.random.key(0))
    batch = (abstract(a["batch"], a["features"]), tokens(a["batch"]), key)
    given = {"up/kernel*": "features hidden", "down/kernel*": "_ classes"}
    return trained(loss, params, rules, given, batch, ("batch _", None, None), ("batch features", "batch", ""))


class NNXBlock(nnx.Module):
    def __init__(self, a: Mapping[str, int], rngs: nnx.Rngs):
        self.attend = nnx.MultiHeadAttention(
            num_heads=a["heads"],
            in_features=a["embed"],
            qkv_features=a["heads"] * a["head_dim"],
            decode=False,
            rngs=rngs,
        )
        self.norm1 = nnx.LayerNorm(a["embed"], rngs=rngs)
        self.norm2 = nnx.RMSNorm(a["embed"], rngs=rngs)
        self.up = nnx.Linear(a["embed"], a["mlp"], rngs=rngs)
        self.down = nnx.Linear(a["mlp"], a["embed"], rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attend(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class NNXTransformer(nnx.Module):
    def __init__(self, a: Mapping[str, int], rngs: nnx.Rngs):
        self.embed = nnx.Embed(a["vocab"], a["embed"], rngs=rngs)
        self.position = nnx.Param(jnp.zeros((a["pos"], a["embed"])))
        self.blocks = nnx.List([NNXBlock(a, rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(a["embed"], rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x)
        h = self.embed(x) + self.position[...]
        for block in self.blocks:
            h = block(h, mask)
        return self.embed.attend(self.norm(h))


def nnx_transformer(a: Mapping[str, int]) -> Case:
    graph, params = nnx.split(nnx.eval_shape(lambda: NNXTransformer(a, nnx.Rngs(0))), nnx.Param)[:2]

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(nnx.merge(graph, params)(x), y)

    rules = {
        "embed/embedding*": "vocab embed",
        "position*": "pos embed",
        "*out/kernel*": "heads head_dim embed",
        "*out/bias*": "embed",
        "*attend/*kernel*": "embed heads head_dim",
        "*attend/*bias*": "heads head_dim",
        "*up/kernel*": "embed mlp",
        "*up/bias*": "mlp",
        "*down/kernel*": "mlp embed",
        "*down/bias*": "embed",
        "*norm*": "embed",
    }
    given = {"embed/embedding*": "vocab embed", "*query/kernel*": "_ heads head_dim", "*value/kernel*": "_ _ head_dim",
             "*up/kernel*": "_ mlp"}  # fmt: skip
    x = tokens(a["batch"], a["pos"])
    return trained(loss, params, rules, given, (x, x), ("batch pos", None), ("batch pos", "batch pos"))


# --- Flax Linen ---


class LinenBlock(nn.Module):
    a: Any

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        a = self.a
        h = nn.RMSNorm()(x)
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(a["heads"], qkv_features=a["heads"] * a["head_dim"])(h, mask=mask)
        h = nn.Dense(2 * a["mlp"], use_bias=False, name="up")(nn.RMSNorm()(x))
        gate, h = jnp.split(h, 2, -1)
        return x + nn.Dense(a["embed"], use_bias=False, name="down")(nn.silu(gate) * h), None


class Linen(nn.Module):
    a: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        embed = nn.Embed(self.a["vocab"], self.a["embed"], name="embed")
        layers = nn.scan(
            nn.remat(LinenBlock), variable_axes={"params": 0}, split_rngs={"params": True}, length=self.a["layers"]
        )
        h, _ = layers(self.a, name="blocks")(embed(x), None)
        return embed.attend(nn.RMSNorm(name="norm")(h))


def linen_scanned(a: Mapping[str, int]) -> Case:
    model = Linen(a)
    x = tokens(a["batch"], a["pos"])
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, x), y)  # pyright: ignore[reportArgumentType]

    rules = {
        "*embedding": "vocab embed",
        "*out/kernel": "layers heads head_dim embed",
        "*out/bias": "layers embed",
        "*Attention*/kernel": "layers embed heads head_dim",
        "*Attention*/bias": "layers heads head_dim",
        "*blocks/up/kernel": "layers embed two*mlp",
        "*blocks/down/kernel": "layers mlp embed",
        "*blocks/*scale": "layers embed",
        "*norm/scale": "embed",
    }
    given = {"*embedding": "vocab embed", "*query/kernel": "layers _ heads head_dim", "*value/kernel": "_ _ _ head_dim",
             "*up/kernel": "_ _ two*mlp",             "*down/kernel": "_ mlp _"}  # fmt: skip
    return trained(loss, params, rules, given, (x, x), ("batch pos", None), ("batch pos", "batch pos"),
                   optimizer=optax.adafactor(1e-3, min_dim_size_to_factor=10**6))  # fmt: skip


# --- Equinox ---


class EqxBlock(eqx.Module):
    attend: eqx.nn.MultiheadAttention
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, a: Mapping[str, int], key: jax.Array):
        keys = jax.random.split(key)
        size = a["embed"]
        self.attend = eqx.nn.MultiheadAttention(
            a["heads"], size, qk_size=a["head_dim"], vo_size=a["head_dim"], key=keys[0]
        )
        self.norm1, self.norm2 = eqx.nn.LayerNorm(size), eqx.nn.LayerNorm(size)
        self.mlp = eqx.nn.MLP(size, size, a["mlp"], 1, key=keys[1])

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jax.vmap(self.norm1)(x)
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        x = x + self.attend(h, h, h, mask=mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))


class EqxTransformer(eqx.Module):
    embed: eqx.nn.Embedding
    position: jax.Array
    blocks: list[EqxBlock]
    head: eqx.nn.Linear

    def __init__(self, a: Mapping[str, int], key: jax.Array):
        keys = jax.random.split(key, 4)
        self.embed = eqx.nn.Embedding(a["vocab"], a["embed"], key=keys[0])
        self.position = jnp.zeros((a["pos"], a["embed"]))
        self.blocks = [EqxBlock(a, k) for k in keys[1:3]]
        self.head = eqx.nn.Linear(a["embed"], a["vocab"], key=keys[3])

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jax.vmap(self.embed)(x) + self.position
        for block in self.blocks:
            h = block(h)
        return jax.vmap(self.head)(h)


def equinox_transformer(a: Mapping[str, int]) -> Case:
    model = eqx.filter_eval_shape(EqxTransformer, a, jax.random.key(0))
    params, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(jax.vmap(eqx.combine(params, static))(x), y)

    rules = {
        "embed/weight": "vocab embed",
        "position": "pos embed",
        "*output_proj/weight": "embed heads*head_dim",
        "*_proj/weight": "heads*head_dim embed",
        "*mlp/layers/0/weight": "mlp embed",
        "*mlp/layers/0/bias": "mlp",
        "*mlp/layers/1/weight": "embed mlp",
        "*mlp/layers/1/bias": "embed",
        "*norm*": "embed",
        "head/weight": "vocab embed",
        "head/bias": "vocab",
    }
    given = {"embed/weight": "vocab embed", "*query_proj/weight": "heads*head_dim _", "*0/weight": "mlp _",
             "head/weight": "vocab _",             "*value_proj/weight": "heads*head_dim _"}  # fmt: skip
    x = tokens(a["batch"], a["pos"])
    return trained(loss, params, rules, given, (x, x), ("batch pos", None), ("batch pos", "batch pos"))


# --- raw ---


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * scale + bias


def gpt2(a: Mapping[str, int]) -> Case:
    heads, size, wide = a["heads"], a["heads"] * a["head_dim"], a["mlp"]
    block = {
        "ln1": (abstract(size), abstract(size)),
        "qkv": (abstract(size, 3 * size), abstract(3 * size)),
        "out": (abstract(size, size), abstract(size)),
        "ln2": (abstract(size), abstract(size)),
        "up": (abstract(size, wide), abstract(wide)),
        "down": (abstract(wide, size), abstract(size)),
    }
    params = {
        "wte": abstract(a["vocab"], size),
        "wpe": abstract(2 * a["pos"], size),
        "blocks": [block, block],
        "ln": (abstract(size), abstract(size)),
    }

    def attend(p: Any, x: jax.Array) -> jax.Array:
        count = x.shape[0]
        q, k, v = jnp.split(x @ p["qkv"][0] + p["qkv"][1], 3, axis=-1)
        q, k, v = (y.reshape(count, heads, -1).transpose(1, 0, 2) for y in (q, k, v))
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
        mask = jnp.tril(jnp.ones((count, count), x.dtype))
        scores = scores * mask - 1e10 * (1 - mask)
        out = (jax.nn.softmax(scores, axis=-1) @ v).transpose(1, 0, 2).reshape(count, -1)
        return out @ p["out"][0] + p["out"][1]

    def logits(params: Any, x: jax.Array) -> jax.Array:
        h = params["wte"][x] + params["wpe"][jnp.arange(len(x))]
        for p in params["blocks"]:
            h = h + attend(p, layer_norm(h, *p["ln1"]))
            h = h + jax.nn.gelu(layer_norm(h, *p["ln2"]) @ p["up"][0] + p["up"][1]) @ p["down"][0] + p["down"][1]
        return layer_norm(h, *params["ln"]) @ params["wte"].T

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(jax.vmap(logits, (None, 0))(params, x), y)

    rules = {
        "wte": "vocab embed",
        "wpe": "max_pos embed",
        "*qkv/0": "embed three*heads*head_dim",
        "*qkv/1": "three*heads*head_dim",
        "*out/0": "heads*head_dim embed",
        "*up/0": "embed mlp",
        "*up/1": "mlp",
        "*down/0": "mlp embed",
        "*": "embed",
    }
    given = {
        "wte": "vocab embed",
        "wpe": "max_pos _",
        "*qkv/0": "_ three*heads*head_dim",
        "*out/0": "heads*head_dim _",
        "*up/0": "_ mlp",
    }
    x = tokens(a["batch"], a["pos"])
    return trained(loss, params, rules, given, (x, x), ("batch pos", None), ("batch pos", "batch pos"))


def rotate(x: jax.Array) -> jax.Array:
    """Rotate pairs of halves of the last axis, by positions along the second."""
    pos, size = x.shape[1], x.shape[-1]
    angles = jnp.arange(pos)[:, None] / 10000 ** (jnp.arange(0, size, 2) / size)
    angles = jnp.concatenate([angles, angles], -1)[None, :, None]
    turned = jnp.concatenate([-x[..., size // 2 :], x[..., : size // 2]], -1)
    return x * jnp.cos(angles) + turned * jnp.sin(angles)


def llama(a: Mapping[str, int]) -> Case:
    kv, group, dim = a["kv"], a["group"], a["head_dim"]
    embed, mlp = a["embed"], a["mlp"]
    block = {
        "norm1": abstract(embed),
        "wq": abstract(embed, kv * group * dim),
        "wk": abstract(embed, kv * dim),
        "wv": abstract(embed, kv * dim),
        "wo": abstract(kv * group * dim, embed),
        "norm2": abstract(embed),
        "gate": abstract(embed, mlp),
        "up": abstract(embed, mlp),
        "down": abstract(mlp, embed),
    }
    stacked = jax.tree.map(lambda x: abstract(a["layers"], *x.shape), block)
    params = {"embed": abstract(a["vocab"], embed), "blocks": stacked, "norm": abstract(embed),
              "head": abstract(embed, a["vocab"])}  # fmt: skip

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        batch, pos, _ = x.shape
        h = rms_norm(x, p["norm1"])
        q = rotate((h @ p["wq"]).reshape(batch, pos, kv * group, dim))
        k = rotate((h @ p["wk"]).reshape(batch, pos, kv, dim))
        v = (h @ p["wv"]).reshape(batch, pos, kv, dim)
        k, v = (jnp.repeat(y, group, axis=2) for y in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / dim**0.5
        scores = jnp.where(jnp.tril(jnp.ones((pos, pos), bool)), scores, -jnp.inf)
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(batch, pos, -1)
        x = x + out @ p["wo"]
        h = rms_norm(x, p["norm2"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(jax.checkpoint(layer), params["embed"][x], params["blocks"])
        return cross_entropy(rms_norm(h, params["norm"]) @ params["head"], y)

    rules = {
        "embed": "vocab embed",
        "*norm?": "layers embed",
        "*wq": "layers embed heads*head_dim",
        "*w[kv]": "layers embed kv*head_dim",
        "*wo": "layers heads*head_dim embed",
        "*gate": "layers embed mlp",
        "*up": "layers embed mlp",
        "*down": "layers mlp embed",
        "norm": "embed",
        "head": "embed vocab",
    }
    given = {
        "embed": "vocab embed",
        "*wq": "layers _ heads*head_dim",
        "*w[kv]": "_ _ kv*head_dim",
        "*up": "_ _ mlp",
        "head": "_ vocab",
    }
    x = tokens(a["batch"], a["pos"])
    return trained(loss, params, rules, given, (x, x), ("batch pos", None), ("batch pos", "batch pos"))


def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def batch_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale + bias


def resnet(a: Mapping[str, int]) -> Case:
    k, c, w = a["kernel"], a["channels"], a["wide"]
    params = {
        "stem": abstract(k, k, 3, c),
        "conv1": abstract(k, k, c, c),
        "norm1": (abstract(c), abstract(c)),
        "conv2": abstract(k, k, c, c),
        "norm2": (abstract(c), abstract(c)),
        "down": abstract(k, k, c, w),
        "skip": abstract(1, 1, c, w),
        "head": (abstract(w, a["classes"]), abstract(a["classes"])),
    }

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        x = jax.nn.relu(convolve(x, p["stem"]))
        h = jax.nn.relu(batch_norm(convolve(x, p["conv1"]), *p["norm1"]))
        x = jax.nn.relu(x + batch_norm(convolve(h, p["conv2"]), *p["norm2"]))
        x = jax.nn.relu(convolve(x, p["down"], 2) + convolve(x, p["skip"], 2))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return cross_entropy(x.mean((1, 2)) @ p["head"][0] + p["head"][1], y)

    rules = {
        "stem": "ky kx rgb channels",
        "conv?": "ky kx channels channels'",
        "norm*": "channels",
        "down": "ky kx channels wide",
        "skip": "_ _ channels wide",
        "head/0": "wide classes",
        "head/1": "classes",
    }
    given = {
        "stem": "ky kx rgb channels",
        "conv1": "ky kx _ channels",
        "conv2": "ky kx _ _",
        "down": "ky kx _ wide",
        "head/0": "_ classes",
    }
    batch = (abstract(a["batch"], a["height"], a["width"], 3), tokens(a["batch"]))
    return trained(loss, params, rules, given, batch, ("batch height width _", None),
                   ("batch height width rgb", "batch"))  # fmt: skip


def unet(a: Mapping[str, int]) -> Case:
    k, c, w = a["kernel"], a["channels"], a["wide"]
    params = {
        "in": abstract(k, k, 3, c),
        "down": abstract(k, k, c, w),
        "mid": abstract(k, k, w, w),
        "out": abstract(k, k, c + w, 3),
        "time": (abstract(8, w), abstract(w)),
    }

    def loss(p: Any, x: jax.Array, t: jax.Array, noise: jax.Array) -> jax.Array:
        skip = jax.nn.silu(convolve(x + noise, p["in"]))
        h = jax.nn.silu(convolve(skip, p["down"], 2))
        angles = t[:, None] * jnp.exp(jnp.arange(4.0))
        h = h + (jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1) @ p["time"][0] + p["time"][1])[:, None, None]
        h = jax.nn.silu(convolve(h, p["mid"]))
        h = jnp.repeat(jnp.repeat(h, 2, axis=1), 2, axis=2)
        return ((convolve(jnp.concatenate([skip, h], -1), p["out"]) - noise) ** 2).mean()

    rules = {
        "in": "ky kx rgb channels",
        "down": "ky kx channels wide",
        "mid": "ky kx wide wide'",
        "out": "ky kx joined rgb",
        "time/0": "frequencies wide",
        "time/1": "wide",
    }
    given = {"in": "ky kx rgb channels", "down": "ky kx _ wide", "mid": "ky kx _ wide", "out": "ky kx joined _",
             "time/0": "frequencies _"}  # fmt: skip
    image = abstract(a["batch"], a["height"], a["width"], 3)
    batch = (image, abstract(a["batch"]), image)
    return trained(loss, params, rules, given, batch, ("batch height width _", None, None),
                   ("batch height width rgb", "batch", "batch height width rgb"))  # fmt: skip


def gnn(a: Mapping[str, int]) -> Case:
    f, h = a["features"], a["hidden"]
    params = {
        "encode": abstract(f, h),
        "message": abstract(2 * h, h),
        "update": (abstract(h, h), abstract(h)),
        "head": abstract(h, a["classes"]),
    }

    def loss(p: Any, x: jax.Array, senders: jax.Array, receivers: jax.Array, y: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ p["encode"])
        for _ in range(2):
            messages = jnp.concatenate([h[senders], h[receivers]], -1) @ p["message"]
            summed = jax.ops.segment_sum(messages, receivers, num_segments=len(h))
            h = h + jax.nn.relu(summed @ p["update"][0] + p["update"][1])
        return cross_entropy(h @ p["head"], y)

    rules = {
        "encode": "features hidden",
        "message": "joined hidden",
        "update/0": "hidden hidden'",
        "update/1": "hidden",
        "head": "hidden classes",
    }
    given = {"encode": "features hidden", "message": "joined hidden", "head": "_ classes"}
    edges = tokens(a["edges"])
    batch = (abstract(a["nodes"], f), edges, edges, tokens(a["nodes"]))
    return trained(loss, params, rules, given, batch, ("nodes _", "edges", None, None),
                   ("nodes features", "edges", "edges", "nodes"))  # fmt: skip


def lstm(a: Mapping[str, int]) -> Case:
    f, h = a["features"], a["hidden"]
    params = {"x": abstract(f, 4 * h), "h": abstract(h, 4 * h), "b": abstract(4 * h), "head": abstract(h, a["classes"])}

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def cell(state: Any, x: jax.Array) -> Any:
            h, c = state
            i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"] + p["b"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((x.shape[0], h))
        _, hs = jax.lax.scan(cell, (start, start), x.swapaxes(0, 1))
        return cross_entropy(hs[-1] @ p["head"], y)

    rules = {"x": "features gates", "h": "hidden gates", "b": "gates", "head": "hidden classes"}
    given = {"x": "features gates", "head": "hidden classes"}
    batch = (abstract(a["batch"], a["time"], f), tokens(a["batch"]))
    return trained(loss, params, rules, given, batch, ("batch time _", None), ("batch time features", "batch"))


def moe(a: Mapping[str, int]) -> Case:
    e, m, n, c = a["embed"], a["mlp"], a["experts"], a["capacity"]
    params = {"router": abstract(e, n), "up": abstract(n, e, m), "down": abstract(n, m, e)}

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        batch, pos, _ = x.shape
        rows = x.reshape(batch * pos, -1)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(rows @ p["router"]), 2)
        one_hot = jax.nn.one_hot(chosen, n)
        place = (jnp.cumsum(one_hot.reshape(-1, n), 0) - 1).reshape(one_hot.shape).astype(int)
        dispatch = one_hot[..., None] * jax.nn.one_hot(place, c)
        given = jnp.einsum("tknc,te->nce", dispatch, rows)
        h = jax.nn.gelu(jnp.einsum("nce,nem->ncm", given, p["up"]))
        out = jnp.einsum("ncm,nme->nce", h, p["down"])
        back = jnp.einsum("tknc,nce,tk->te", dispatch, out, weights).reshape(x.shape)
        return ((x + back - y) ** 2).mean()

    rules = {"router": "embed experts", "up": "experts embed mlp", "down": "experts mlp embed"}
    given = {"router": "embed experts", "up": "_ _ mlp"}
    x = abstract(a["batch"], a["pos"], e)
    return trained(loss, params, rules, given, (x, x), ("batch pos _", None), ("batch pos embed", "batch pos embed"),
                   unknown=0.2)  # fmt: skip


def ode(a: Mapping[str, int]) -> Case:
    s, h = a["state"], a["hidden"]
    params = {"up": (abstract(s, h), abstract(h)), "down": (abstract(h, s), abstract(s))}

    def loss(p: Any, x: jax.Array, times: jax.Array, seen: jax.Array) -> jax.Array:
        def slope(x: jax.Array) -> jax.Array:
            return jnp.tanh(x @ p["up"][0] + p["up"][1]) @ p["down"][0] + p["down"][1]

        def step(x: jax.Array, dt: jax.Array) -> tuple[jax.Array, jax.Array]:
            k1 = slope(x)
            k2 = slope(x + dt / 2 * k1)
            k3 = slope(x + dt / 2 * k2)
            k4 = slope(x + dt * k3)
            x = x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            return x, x

        x, found = jax.lax.scan(step, x, jnp.diff(times))
        x = jax.lax.while_loop(lambda x: jnp.linalg.norm(x) > 1e3, lambda x: x / 2, jax.lax.stop_gradient(x))
        return ((found - seen[1:]) ** 2).mean() + x.mean()

    rules = {"up/0": "state hidden", "up/1": "hidden", "down/0": "hidden state", "down/1": "state"}
    batch = (abstract(a["batch"], s), abstract(a["time"]), abstract(a["time"], a["batch"], s))
    return trained(loss, params, rules, {"up/0": "_ hidden"}, batch, ("batch state", "time", "time _ _"),
                   ("batch state", "time", "time batch state"))  # fmt: skip


def solver(a: Mapping[str, int]) -> Case:
    """An adaptive solver with dense output: accepted steps are kept in buffers, between which it interpolates."""
    s, h, room = a["state"], a["hidden"], a["capacity"]
    params = {"up": (abstract(s, h), abstract(h)), "down": (abstract(h, s), abstract(s))}

    def loss(p: Any, x: jax.Array, times: jax.Array, seen: jax.Array) -> jax.Array:
        def slope(x: jax.Array) -> jax.Array:
            return jnp.tanh(x @ p["up"][0] + p["up"][1]) @ p["down"][0] + p["down"][1]

        def advance(state: Any) -> Any:
            t, x, dt, count, ts, xs = state
            k1 = slope(x)
            k2 = slope(x + dt / 2 * k1)
            k3 = slope(x + 3 * dt / 4 * k2)
            new = x + dt * (2 / 9 * k1 + 1 / 3 * k2 + 4 / 9 * k3)
            error = dt * (-5 / 72 * k1 + 1 / 12 * k2 + 1 / 9 * k3 - 1 / 8 * slope(new))
            size = jnp.sqrt(jnp.mean((error / (1e-6 + 1e-3 * jnp.maximum(jnp.abs(x), jnp.abs(new)))) ** 2))
            kept = size < 1
            t, x, count = jnp.where(kept, t + dt, t), jnp.where(kept, new, x), count + kept
            dt = dt * jnp.clip(0.9 * size ** (-1 / 3), 0.2, 5.0)
            return t, x, dt, count, ts.at[count].set(t), xs.at[count].set(x)

        def step(state: Any, _: None) -> Any:
            return jax.lax.cond(state[0] < times[-1], advance, lambda state: state, state), None

        ts = jnp.full(room, jnp.inf).at[0].set(times[0])
        xs = jnp.zeros((room, *x.shape)).at[0].set(x)
        (*_, ts, xs), _ = jax.lax.scan(step, (times[0], x, jnp.float32(0.1), 0, ts, xs), None, length=50)
        at = jnp.searchsorted(ts, times, side="right") - 1
        part = (times - ts[at]) / (ts[at + 1] - ts[at])
        found = xs[at] + part[:, None, None] * (xs[at + 1] - xs[at])
        return ((found - seen) ** 2).mean()

    rules = {"up/0": "state hidden", "up/1": "hidden", "down/0": "hidden state", "down/1": "state"}
    batch = (abstract(a["batch"], s), abstract(a["time"]), abstract(a["time"], a["batch"], s))
    return trained(loss, params, rules, {"up/0": "_ hidden"}, batch, ("batch state", "time", "time _ _"),
                   ("batch state", "time", "time batch state"), unknown=0.3)  # fmt: skip


def muon(a: Mapping[str, int]) -> Case:
    """A step with Muon, which makes the gradients of matrices orthogonal, and of others with Adam."""
    e, m = a["embed"], a["mlp"]
    params = {"up": abstract(e, m), "bias": abstract(m), "down": abstract(m, e)}

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return ((jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"] - y) ** 2).mean()

    rules = {"up": "embed mlp", "bias": "mlp", "down": "mlp embed"}
    x = abstract(a["batch"], e)
    return trained(loss, params, rules, {"up": "_ mlp"}, (x, x), ("batch embed", "batch embed"),
                   optimizer=optax.contrib.muon(1e-3))  # fmt: skip


MODELS: dict[str, Callable[[Mapping[str, int]], Case]] = {
    f.__name__: f
    for f in (
        nnx_mlp,
        nnx_transformer,
        linen_scanned,
        equinox_transformer,
        gpt2,
        llama,
        resnet,
        unet,
        gnn,
        lstm,
        moe,
        ode,
        solver,
        muon,
    )
}
