"""Llama and its relatives, written in names: the architectures of `transformers` that are in `families.py`.

The axes of the models:

| axis        | counts                                               |
|-------------|------------------------------------------------------|
| `batch`     | texts                                                |
| `pos`       | tokens of a text; `key_pos` where attended to        |
| `vocab`     | tokens of the vocabulary                             |
| `embed`     | features of the residual stream                      |
| `layers`    | blocks                                               |
| `kv_heads`  | heads of keys and values                             |
| `group`     | heads of queries that share those of keys and values |
| `head_size` | features of a head                                   |
| `mlp`       | hidden features of the multilayer perceptron         |
| `experts`   | perceptrons of a mixture; `scores` of its router     |

The models do not mention devices. A mapping from these names to mesh axes distributes them: see `mappings.py`, and
`train.py`, which trains the models under each mapping.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import axonym as axn
from axonym import Axis, NamedArray, nn
from axonym.nn.attention import Causal, KVCache, Rotary, apply_rotary, dot_product_attention, sliding_window_mask

REMAT: dict[str, bool | axn.ScanCheckpointPolicy] = {
    "full": True,
    "mlp": axn.ScanCheckpointPolicy(save_block_internals=["attention"]),
    "none": False,
    "offload": axn.ScanCheckpointPolicy(save_carries="offload"),
}
"""What the backward pass computes again in each block: everything, the perceptron, nothing, or everything from inputs
that are kept in the memory of the host."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The axes and settings of a model. `families.py` reads them from a `config.json` of the Hugging Face Hub."""

    Vocab: Axis
    Embed: Axis
    Layers: Axis
    KVHeads: Axis
    Group: Axis
    HeadSize: Axis
    Mlp: Axis
    rotary: Rotary = dataclasses.field(default_factory=Rotary)
    norm_eps: float = 1e-6
    tied: bool = False
    """Whether one table embeds tokens and predicts them."""
    bias: bool = False
    """Whether queries, keys and values have biases."""
    output_bias: bool = False
    """Whether the output projection of attention has a bias."""
    norm_heads: bool = False
    """Whether queries and keys are normalized."""
    norm_outputs: bool = False
    """Whether the outputs of attention and perceptrons are normalized, as well as their inputs."""
    window: int | None = None
    """How many positions a query attends to, including its own; all by default."""
    slides: tuple[bool, ...] | None = None
    """Which layers have the window; all by default."""
    local_rotary: Rotary | None = None
    """The rotary embedding of layers with the window, if it differs from that of the others."""
    scale: float | None = None
    """The factor of the attention scores; by default one over the square root of the head size."""
    score_cap: float | None = None
    """The soft cap of the attention scores, if any."""
    logit_cap: float | None = None
    """The soft cap of the logits, if any."""
    activation: Callable[[NamedArray], NamedArray] = nn.silu
    remat: bool | axn.ScanCheckpointPolicy = True
    """What the backward pass computes again in each block, by default everything; see `REMAT`."""
    Experts: Axis | None = None
    """The perceptrons of each block's mixture; None for one perceptron, without a mixture."""
    choices: int = 2
    """How many experts of a mixture each token goes to."""
    rescales: bool = True
    """Whether the weights of a token's experts are scaled to a sum of one."""
    norm: type[nn.RmsNorm] = nn.RmsNorm
    embedding_scale: float = 1.0
    """The factor of embedded tokens."""


class Attention(eqx.Module):
    """Causal attention, in which a group of queries shares keys and values."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    q_norm: nn.RmsNorm | None
    k_norm: nn.RmsNorm | None
    rotary: Rotary = eqx.field(static=True)
    local_rotary: Rotary | None = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    scale: float | None = eqx.field(static=True)
    score_cap: float | None = eqx.field(static=True)

    @staticmethod
    def init(config: Config, *, key: jax.Array) -> Attention:
        c, keys = config, jax.random.split(key, 4)
        heads = (c.KVHeads, c.Group, c.HeadSize)
        return Attention(
            q_proj=nn.Linear.init(c.Embed, heads, key=keys[0], use_bias=c.bias),
            k_proj=nn.Linear.init(c.Embed, (c.KVHeads, c.HeadSize), key=keys[1], use_bias=c.bias),
            v_proj=nn.Linear.init(c.Embed, (c.KVHeads, c.HeadSize), key=keys[2], use_bias=c.bias),
            o_proj=nn.Linear.init(heads, c.Embed, key=keys[3], use_bias=c.output_bias),
            q_norm=c.norm.init(c.HeadSize, c.norm_eps, use_bias=False) if c.norm_heads else None,
            k_norm=c.norm.init(c.HeadSize, c.norm_eps, use_bias=False) if c.norm_heads else None,
            rotary=c.rotary,
            local_rotary=c.local_rotary,
            window=c.window,
            scale=c.scale,
            score_cap=c.score_cap,
        )

    def __call__(self, x: NamedArray, slides: NamedArray | None = None) -> NamedArray:
        """Let each token attend to itself and all tokens before it, or to those in the window if this layer has one."""
        q, k, v = self._projected(x, "pos", slides)
        mask = Causal("pos", self.window)
        if self.window is not None and slides is not None:
            near = sliding_window_mask(q.resolve_axis("pos"), k.resolve_axis("key_pos"), self.window)
            mask = Causal("pos", also=near | ~slides)
        return self.o_proj(axn.tree_checkpoint_name(self._attended(q, k, v, mask), "attention"))

    def extend(
        self,
        x: NamedArray,
        cache: KVCache,
        layer: NamedArray,
        slides: NamedArray | None = None,
        count: NamedArray | None = None,
    ) -> tuple[NamedArray, KVCache]:
        """Do the same for tokens that follow those in a cache of all layers, and return the cache with them.

        `count` of the tokens are valid.
        """
        positions = cache["layers", layer].positions(x.resolve_axis("pos"))
        q, k, v = self._projected(x, positions, slides)
        cache = cache.update(k, v, count, at={"layers": layer})
        own = cache["layers", layer]
        mask = own.mask(positions)
        if self.window is not None:
            keys = axn.arange(own.keys.resolve_axis("key_pos")).broadcast_axis(positions.axes)
            near = keys > positions - self.window
            mask &= near if slides is None else near | ~slides
        return self.o_proj(self._attended(q, own.keys, own.values, mask)), cache

    def _projected(
        self, x: NamedArray, positions: str | NamedArray, slides: NamedArray | None
    ) -> tuple[NamedArray, NamedArray, NamedArray]:
        """Return queries, keys and values."""
        q, k, v = axn.tree_checkpoint_name((self.q_proj(x), self.k_proj(x), self.v_proj(x)), "attention")
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (self._rotated(x, positions, slides) for x in (q, k))
        # Every position attends to every other, so what is attended to needs a name of its own. The queries have the
        # axis `group` and the keys do not, which is all there is to grouped-query attention.
        return q, k.rename({"pos": "key_pos"}), v.rename({"pos": "key_pos"})

    def _rotated(self, x: NamedArray, positions: str | NamedArray, slides: NamedArray | None) -> NamedArray:
        rotated = apply_rotary(x, "head_size", positions, self.rotary)
        if self.local_rotary is None or slides is None:
            return rotated
        return axn.where(slides, apply_rotary(x, "head_size", positions, self.local_rotary), rotated)

    def _attended(self, q: NamedArray, k: NamedArray, v: NamedArray, mask: NamedArray | Causal) -> NamedArray:
        """Return the mean of the values for each query, weighted by how well their keys match it."""
        if self.score_cap is None:
            return dot_product_attention(q, k, v, "key_pos", "head_size", mask=mask, scaling_factor=self.scale)
        scores = axn.dot(q, k, axis="head_size") * (
            q.axis_size("head_size") ** -0.5 if self.scale is None else self.scale
        )
        if isinstance(mask, Causal):
            mask = mask.written_out(q.resolve_axis("pos"), k.resolve_axis("key_pos"))
        scores = axn.where(mask, capped(scores, self.score_cap), float(jnp.finfo(scores.dtype).min))
        return axn.dot(nn.softmax(scores, "key_pos"), v, axis="key_pos")


def capped(x: NamedArray, cap: float | None) -> NamedArray:
    """Apply a soft cap, if there is one: small numbers hardly change, and none exceeds the cap."""
    return x if cap is None else cap * axn.tanh(x / cap)


class Mlp(eqx.Module):
    """A multilayer perceptron with a gate."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear
    activation: Callable[[NamedArray], NamedArray] = eqx.field(static=True)

    @staticmethod
    def init(config: Config, *, key: jax.Array) -> Mlp:
        gate, up, down = jax.random.split(key, 3)
        return Mlp(
            gate_proj=nn.Linear.init(config.Embed, config.Mlp, key=gate, use_bias=False),
            up_proj=nn.Linear.init(config.Embed, config.Mlp, key=up, use_bias=False),
            down_proj=nn.Linear.init(config.Mlp, config.Embed, key=down, use_bias=False),
            activation=config.activation,
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


BALANCE, SMALL_LOGITS = 1e-2, 1e-3
"""The weights in the loss of an uneven load of the experts and of large logits of their router, for each block."""


class Mixture(eqx.Module):
    """A mixture of perceptrons with gates: each token goes to a few, those that a router scores highest."""

    router: nn.Linear
    gate_proj: nn.MoELinear
    up_proj: nn.MoELinear
    down_proj: nn.MoELinear
    choices: int = eqx.field(static=True)
    rescales: bool = eqx.field(static=True)
    activation: Callable[[NamedArray], NamedArray] = eqx.field(static=True)

    @staticmethod
    def init(config: Config, Experts: Axis, *, key: jax.Array) -> Mixture:
        router, gate, up, down = jax.random.split(key, 4)
        # Every token has scores for all experts, which can be sharded as tokens are: so scores have their own axis.
        return Mixture(
            router=nn.Linear.init(config.Embed, Experts.alias("scores"), key=router, use_bias=False),
            gate_proj=nn.MoELinear.init(Experts, config.Embed, config.Mlp, key=gate, use_bias=False),
            up_proj=nn.MoELinear.init(Experts, config.Embed, config.Mlp, key=up, use_bias=False),
            down_proj=nn.MoELinear.init(Experts, config.Mlp, config.Embed, key=down, use_bias=False),
            choices=config.choices,
            rescales=config.rescales,
            activation=config.activation,
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        return self._routed(x)[0]

    def with_penalty(self, x: NamedArray) -> tuple[NamedArray, NamedArray]:
        """Return the output, and for each text a penalty on an uneven load and on large logits of the router.

        The load is computed for each text on its own, so it does not depend on how texts are distributed.
        """

        def penalty(logits: NamedArray, scores: NamedArray, chosen: NamedArray) -> NamedArray:
            uneven = nn.load_balancing_loss(scores, chosen, scores.resolve_axis("scores"))
            return BALANCE * uneven + SMALL_LOGITS * nn.router_z_loss(logits, "scores")

        y, *routing = self._routed(x)
        return y, axn.vmap(penalty, "batch")(*routing)

    def _routed(self, x: NamedArray) -> tuple[NamedArray, NamedArray, NamedArray, NamedArray]:
        """Return the output, the router's logits and scores, and the chosen experts."""

        def of_experts(layers: Any, rows: NamedArray, sizes: NamedArray) -> NamedArray:
            gate, up, down = layers
            return down(self.activation(gate(rows, sizes)) * up(rows, sizes), sizes)

        logits = self.router(x).astype("float32")
        scores = nn.softmax(logits, "scores")
        weights, chosen = axn.top_k(scores, "scores", self.choices, "choice")
        layers = self.gate_proj, self.up_proj, self.down_proj
        found = nn.dispatch(of_experts, layers, x, chosen, self.gate_proj.Experts)
        weights = weights / weights.sum("choice") if self.rescales else weights
        mixed = axn.dot(found, weights.astype(x.dtype), axis="choice")
        return mixed, logits, scores, chosen


def normalized(x: NamedArray, norm: nn.RmsNorm | None) -> NamedArray:
    """Normalize an array, if there is a layer for it."""
    return x if norm is None else norm(x)


class Block(eqx.Module):
    """Attention and a perceptron, or a mixture of them, each of which adds to the residual stream."""

    attention_norm: nn.RmsNorm
    attention: Attention
    attention_output_norm: nn.RmsNorm | None
    mlp_norm: nn.RmsNorm
    mlp: Mlp | Mixture
    mlp_output_norm: nn.RmsNorm | None

    @staticmethod
    def init(config: Config, *, key: jax.Array) -> Block:
        attention, mlp = jax.random.split(key)
        norm = functools.partial(config.norm.init, config.Embed, config.norm_eps, use_bias=False)
        return Block(
            attention_norm=norm(),
            attention=Attention.init(config, key=attention),
            attention_output_norm=norm() if config.norm_outputs else None,
            mlp_norm=norm(),
            mlp=Mlp.init(config, key=mlp) if config.Experts is None else Mixture.init(config, config.Experts, key=mlp),
            mlp_output_norm=norm() if config.norm_outputs else None,
        )

    def __call__(self, x: NamedArray, slides: NamedArray | None = None) -> NamedArray:
        x = x + normalized(self.attention(self.attention_norm(x), slides), self.attention_output_norm)
        return x + normalized(self.mlp(self.mlp_norm(x)), self.mlp_output_norm)

    def with_penalty(
        self, carry: tuple[NamedArray, NamedArray], slides: NamedArray | None = None
    ) -> tuple[NamedArray, NamedArray]:
        """Do the same with a mixture, and add its penalty for each text to those of other blocks."""
        assert isinstance(self.mlp, Mixture)
        x, penalties = carry
        x = x + normalized(self.attention(self.attention_norm(x), slides), self.attention_output_norm)
        y, penalty = self.mlp.with_penalty(self.mlp_norm(x))
        return x + normalized(y, self.mlp_output_norm), penalties + penalty

    def extend(
        self,
        x: NamedArray,
        cache: KVCache,
        layer: NamedArray,
        slides: NamedArray | None = None,
        count: NamedArray | None = None,
    ) -> tuple[NamedArray, KVCache]:
        """Do the same for tokens that follow those in a cache of all layers, and return the cache with them."""
        attended, cache = self.attention.extend(self.attention_norm(x), cache, layer, slides, count)
        x = x + normalized(attended, self.attention_output_norm)
        return x + normalized(self.mlp(self.mlp_norm(x)), self.mlp_output_norm), cache


class Llama(eqx.Module):
    """From tokens to the logits of the tokens that follow. `layouts.py` has the names that other programs know."""

    table: nn.Embedding
    blocks: nn.Stacked[Block]
    norm: nn.RmsNorm
    head: nn.Linear | None
    """None if the table that embeds tokens also predicts them."""
    embedding_scale: float = eqx.field(static=True)
    logit_cap: float | None = eqx.field(static=True)
    sliding: tuple[bool, ...] | None = eqx.field(static=True)
    """Which blocks have the window, if not all."""

    @staticmethod
    def init(config: Config, *, key: jax.Array) -> Llama:
        table, blocks, head = jax.random.split(key, 3)
        # All blocks are made as one, whose weights have the axis `layers`, and they run in a loop: so a model of 80
        # blocks compiles as fast as one of 2. With checkpointing, the backward pass computes each block again.
        stacked = nn.Stacked.init(config.Layers, Block, gradient_checkpointing=config.remat)
        return Llama(
            table=nn.Embedding.init(config.Vocab, config.Embed, key=table),
            blocks=stacked(config, key=blocks),
            norm=config.norm.init(config.Embed, config.norm_eps, use_bias=False),
            head=None if config.tied else nn.Linear.init(config.Embed, config.Vocab, key=head, use_bias=False),
            embedding_scale=config.embedding_scale,
            logit_cap=config.logit_cap,
            sliding=config.slides,
        )

    def __call__(self, tokens: NamedArray) -> NamedArray:
        return self._logits(self.blocks.fold(self._embedded(tokens), self._slides()))

    def loss(self, tokens: NamedArray, schedule: Any = None, penalties: bool = False) -> jax.Array:
        """Return the mean loss of each token but the first, given those before it.

        Arguments:
            tokens: the texts.
            schedule: the pipeline schedule for blocks that are sharded over stages, one of `axonym.schedules`.
            penalties: whether to add the penalties of mixtures of experts, for training.
        """
        x, then_args = self._embedded(tokens), (dataclasses.replace(self, blocks=None), tokens)
        if penalties and isinstance(self.blocks.stacked.mlp, Mixture):
            carry = x, axn.zeros(tokens.resolve_axis("batch"))
            then: Any = _total_loss_and_penalties
            penalized = self.blocks.fold_via(Block.with_penalty, schedule=schedule, then=then, then_args=then_args)
            total = penalized(carry, self._slides())
        else:
            total = self.blocks.fold(x, self._slides(), schedule=schedule, then=_total_loss, then_args=then_args)
        return total / (tokens.size - tokens.size // tokens.axis_size("pos"))

    def empty_cache(self, Batch: Axis, KPos: Axis, dtype: Any = None) -> KVCache:
        """Make a cache for texts of up to `KPos.size` tokens, for all blocks along the axis `layers`."""
        keys = self.blocks.stacked.attention.k_proj
        KVHeads, HeadSize = (keys.weight.resolve_axis(name) for name in ("kv_heads", "head_size"))
        dtype = dtype or self.norm.weight.dtype  # weights can be stored small
        return KVCache.init((Batch, self.blocks.Block), KVHeads, KPos, HeadSize, dtype)

    def extend(self, tokens: NamedArray, cache: KVCache, count: NamedArray | None = None) -> tuple[NamedArray, KVCache]:
        """Return the logits of the next token after some that follow those in a cache, and the cache with them.

        Arguments:
            tokens: the tokens, along `pos`.
            cache: the keys and values of the tokens before them.
            count: how many of the tokens of each text are valid, all by default; the rest are padding.
        """

        def extend(
            block: Block, carry: tuple[NamedArray, KVCache], layer: NamedArray, slides: NamedArray | None
        ) -> Any:
            # The cache of all blocks is carried through the loop rather than scanned, so that it can stay where it is.
            x, cache = carry
            return block.extend(x, cache, layer, slides, count)

        cache = cache.require_room(tokens.axis_size("pos"))  # in the loop over the blocks, lengths are not known
        layers = axn.arange(self.blocks.Block)
        x, cache = self.blocks.fold_via(extend)((self._embedded(tokens), cache), layers, self._slides())
        return self._logits(x["pos", -1] if count is None else x["pos", count - 1]), cache

    def _slides(self) -> NamedArray | None:
        """Return whether each block has the window; None if all are alike."""
        return None if self.sliding is None else axn.named(np.array(self.sliding), self.blocks.Block)

    def _embedded(self, tokens: NamedArray) -> NamedArray:
        x = self.table(tokens)
        return x if self.embedding_scale == 1 else x * jnp.asarray(self.embedding_scale, x.dtype)

    def _logits(self, x: NamedArray) -> NamedArray:
        x = self.norm(x)
        return capped(self.table.unembed(x) if self.head is None else self.head(x), self.logit_cap)


def _total_loss(x: NamedArray, model: Llama, tokens: NamedArray) -> jax.Array:
    """Return the sum of the losses, from the output of the last block and the rest of the model."""
    return next_token_loss(model._logits(x), tokens, axn.sum)


def _total_loss_and_penalties(carry: tuple[NamedArray, NamedArray], model: Llama, tokens: NamedArray) -> jax.Array:
    """Add the penalties, each times the number of predicted tokens of a text."""
    x, penalties = carry
    return _total_loss(x, model, tokens) + (tokens.axis_size("pos") - 1) * axn.sum(penalties).scalar()


def next_token_loss(logits: NamedArray, tokens: NamedArray, reduction: Any = axn.mean) -> jax.Array:
    """Return the mean loss of each token but the first, from the logits at the one before it; in float32."""
    Pos = tokens.resolve_axis("pos")
    targets = axn.roll(tokens, -1, Pos)
    followed = axn.arange(Pos) < Pos.size - 1  # the last token is followed by none
    return nn.cross_entropy_loss(logits, "vocab", targets, reduction, where=followed, dtype="float32").scalar()
