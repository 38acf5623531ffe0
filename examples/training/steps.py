"""The training state, and the functions compiled for it. None of them mentions devices."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import optax
from models import llama

import axonym as axn
from axonym import Axis, NamedArray
from axonym.precision import Policy, get_policy, mixed_precision

from . import config as settings, data
from .strategies import Strategy

Metrics = dict[str, jax.Array]


class State(eqx.Module):
    """All that training changes on the devices."""

    model: llama.Llama
    optimizer: Any
    key: jax.Array
    """What random numbers are drawn with, after those of the parameters; each step makes its own key of it."""


@dataclasses.dataclass(frozen=True)
class Functions:
    """The functions of a run, compiled when they are first called."""

    start: Any
    """The state that training begins with, of a random key."""
    train: Any
    """The state after a step and its metrics, of the state before and a batch."""
    evaluate: Callable[[llama.Llama, NamedArray], jax.Array]
    abstract: State
    """The state without values, for what must know it before it is made."""


def model_config(sizes: settings.ModelSizes) -> llama.Config:
    """The axes of a model."""
    Vocab, Embed, Layers, KVHeads, Group, HeadSize, Mlp = axn.make_axes(
        vocab=data.VOCAB,
        embed=sizes.embed,
        layers=sizes.layers,
        kv_heads=sizes.kv_heads,
        group=sizes.group,
        head_size=sizes.head_size,
        mlp=sizes.mlp,
    )
    return llama.Config(
        Vocab=Vocab,
        Embed=Embed,
        Layers=Layers,
        KVHeads=KVHeads,
        Group=Group,
        HeadSize=HeadSize,
        Mlp=Mlp,
        Experts=Axis("experts", sizes.experts) if sizes.experts else None,
        tied=sizes.tied,
    )


def abstract_tokens(Batch: Axis, Pos: Axis) -> NamedArray:
    """A batch without values."""
    return jax.eval_shape(lambda: axn.zeros((Batch, Pos), dtype=int))


def make_functions(
    sizes: settings.ModelSizes, optimizer_settings: settings.Optimizer, policy: Policy, strategy: Strategy
) -> Functions:
    """The functions of a run under a strategy."""
    optimizer = make_optimizer(optimizer_settings)
    start, train, evaluate = plain_functions(
        sizes, optimizer, policy, strategy.schedule(), strategy.remat, strategy.accumulate
    )
    # Each device makes its own shards, so none ever holds more. This runs once, so it need not be fast; on a
    # CPU, most of the time would go into compiling how random numbers are drawn.
    on_cpu = jax.default_backend() == "cpu"
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True} if on_cpu else None
    return Functions(
        start=axn.named_jit(start, strategy.storage, compiler_options=quick),
        train=distributed(train, strategy, donate_args=(True, False)),
        evaluate=distributed(evaluate, strategy),
        abstract=jax.eval_shape(start, jax.random.key(0)),
    )


def plain_functions(
    sizes: settings.ModelSizes,
    optimizer: optax.GradientTransformation,
    policy: Policy,
    schedule: Any = None,
    remat: str = "full",
    accumulate: int = 1,
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """What starts, trains and evaluates, not yet compiled.

    `remat` is one of `llama.REMAT`; with `accumulate`, the gradients of so many microbatches are added up.
    """
    axes = dataclasses.replace(model_config(sizes), remat=llama.REMAT[remat])
    of_policy = functools.partial(loss, policy=policy, schedule=schedule)

    def start(key: jax.Array) -> State:
        for_model, rest = jax.random.split(key)
        model = policy.cast_to_param(llama.Llama.init(axes, key=for_model))
        return State(model, optimizer.init(model), rest)  # pyright: ignore[reportArgumentType]

    def train(state: State, tokens: NamedArray) -> tuple[State, Metrics]:
        of_training = functools.partial(of_policy, penalties=True)
        value, gradients = accumulated(jax.value_and_grad(of_training), state.model, tokens, accumulate)
        with jax.named_scope("optimizer"):  # a phase of the report
            updates, kept = optimizer.update(gradients, state.optimizer, state.model)  # pyright: ignore[reportArgumentType]
            model: Any = optax.apply_updates(state.model, updates)  # pyright: ignore[reportArgumentType]
        metrics = {"loss": value, "gradient_norm": optax.tree.norm(gradients)}
        return State(model, kept, state.key), metrics

    return start, train, of_policy


def accumulated(of: Callable[..., Any], model: llama.Llama, tokens: NamedArray, count: int) -> Any:
    """The mean of what a function returns for each of some microbatches, one after another."""
    if count == 1:
        return of(model, tokens)
    # Texts of a device go to microbatches in turn, so each has its share of every one.
    Batch, Micro = axn.make_axes(batch=tokens.axis_size("batch") // count, micro=count)

    def add(total: Any, texts: NamedArray) -> tuple[Any, None]:
        return jax.tree.map(operator.add, total, of(model, texts)), None

    nothing = jax.tree.map(lambda x: x * 0, (jax.numpy.zeros(()), model))  # distributed as the model is
    total, _ = axn.scan(add, Micro)(nothing, tokens.unflatten_axis("batch", (Batch, Micro)))
    return jax.tree.map(lambda x: x / count, total)


def distributed(fn: Callable[..., Any], strategy: Strategy, **options: Any) -> Callable[..., Any]:
    """A function of parameters and batches, compiled under a strategy."""
    if strategy.storage == strategy.compute:
        return axn.named_jit(fn, strategy.compute, in_placement=strategy.compute, **options)
    return axn.fsdp(fn, strategy.storage, strategy.compute, **options)


def loss(
    model: llama.Llama, tokens: NamedArray, policy: Policy, schedule: Any = None, penalties: bool = False
) -> jax.Array:
    """The mean surprise at the next token, with penalties of mixtures if these are wanted.

    The model computes as the policy says, the loss in float32.
    """
    of_model = functools.partial(llama.Llama.loss, schedule=schedule, penalties=penalties)
    return mixed_precision(get_policy(policy, output="float32"), of_model)(model, tokens)


def make_optimizer(config: settings.Optimizer) -> optax.GradientTransformation:
    """AdamW, or Muon for matrices, with clipping. What it keeps has the names of the parameters, and is placed alike.

    Muon shares out whole matrices over all devices.
    """
    highest = config.learning_rate
    rate = optax.warmup_cosine_decay_schedule(0.0, highest, config.warmup_steps, config.steps, end_value=highest / 10)
    adam = optax.adamw(rate, b2=0.95, weight_decay=config.weight_decay, mask=_is_matrix)
    if config.optimizer == "muon":
        batch = ("kv_heads", "group")  # one matrix for each head
        adam = axn.optim.muon(rate, adam=adam, weight_decay=config.weight_decay, over=None, batch=batch)
    return optax.chain(optax.clip_by_global_norm(config.clip), adam)


def _is_matrix(model: Any) -> Any:
    """Which parameters are weights of products; the others are scales of norms."""
    return jax.tree.map(lambda x: len(set(x.names) - {"layers"}) > 1, model, is_leaf=axn.is_named_array)
