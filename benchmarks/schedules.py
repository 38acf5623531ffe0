"""Measure pipelines, rings and the exchange of experts' rows, against what they replace or the minimum."""

from __future__ import annotations

import itertools
import math
from typing import Any

import equinox as eqx
import jax

import axonym as axn
from axonym import nn
from axonym.nn.attention import Causal, dot_product_attention
from axonym.schedules import GPipe, OneFOneB
from tests.executed import executed

from .harness import Row

STAGES, MICROBATCHES = 4, 16


def rows() -> list[Row]:
    return [*_pipelines(), *_idle(), *_attention(), *_experts()]


class _Block(eqx.Module):
    up: nn.Linear
    down: nn.Linear

    @staticmethod
    def init(Embed: axn.Axis, Mlp: axn.Axis, *, key: Any) -> _Block:
        up, down = jax.random.split(key)
        return _Block(nn.Linear.init(Embed, Mlp, key=up), nn.Linear.init(Mlp, Embed, key=down))

    def __call__(self, x: axn.NamedArray) -> axn.NamedArray:
        return x + self.down(nn.gelu(self.up(x)))


def _pipelines() -> list[Row]:
    """The work of a step, of all stages together, idle ones too."""
    Layers, Batch, Pos, Embed, Mlp = axn.make_axes(layers=8, batch=32, pos=32, embed=64, mlp=256)
    layers = nn.Stacked.init(Layers, _Block, gradient_checkpointing=True)(Embed, Mlp, key=jax.random.key(0))
    x = axn.random.normal(jax.random.key(1), (Batch, Pos, Embed))

    def work(schedule: Any = None) -> int:
        def loss(layers: Any, x: Any) -> jax.Array:
            return layers.fold(x, schedule=schedule, then=lambda y: axn.sum(y * y).scalar())

        return _flops(jax.make_jaxpr(jax.value_and_grad(loss))(layers, x).jaxpr)

    schedule, plain, mesh = (
        GPipe(MICROBATCHES, remat=False),
        work(),
        axn.make_mesh({"stage": STAGES}, devices=jax.devices()[:STAGES]),
    )
    with jax.set_mesh(mesh), axn.axis_mapping({"layers": "stage"}):
        staged = work(schedule)
    what = f"GPipe, {STAGES} stages: work of a step, against the plain fold on one device"
    shown = f"{staged / 1e6:.0f} MFLOP", f"{plain / 1e6:.0f} MFLOP"
    done = Row("schedules", what, *shown, staged / plain, schedule.ticks(STAGES) / MICROBATCHES)
    return [done, _derivatives_apart(nn.Stacked.init(Layers, _Block)(Embed, Mlp, key=jax.random.key(0)), x)]


def _derivatives_apart(stage: Any, x: Any) -> Row:
    """The derivatives of a stage that is computed again for them: for its input and its weights apart, or together.

    Zero-bubble schedules compute them apart.
    """

    def work(*wanted: int) -> int:
        def derivatives(stage: Any, x: Any, y: Any) -> Any:
            def run(*some: Any) -> Any:
                given = {0: stage, 1: x} | dict(zip(wanted, some, strict=True))
                return given[0].fold(given[1])

            return jax.vjp(run, *((stage, x)[i] for i in wanted))[1](y)

        return _flops(jax.make_jaxpr(derivatives)(stage, x, x).jaxpr)

    apart, together = work(0) + work(1), work(0, 1)
    what = "derivatives of a stage: apart, as zero-bubble schedules compute them, against together"
    return Row("schedules", what, f"{apart / 1e6:.0f} MFLOP", f"{together / 1e6:.0f} MFLOP", apart / together, 1.7)


class _Counted(eqx.Module):
    """A layer that counts how often it runs, on all devices together."""

    scale: axn.NamedArray

    def __call__(self, x: axn.NamedArray) -> axn.NamedArray:
        jax.debug.callback(_RUNS.append, 1)
        return x * self.scale


_RUNS: list[int] = []


def stage_runs(schedule: Any, stages: int) -> int:
    """Return how often a stage runs its layers of a round, on the way forward, and with `OneFOneB` on that back too.

    The way back of `GPipe` is its way forward, transposed: JAX does not call back from there.
    """
    Layers, Batch = axn.make_axes(layers=stages * schedule.rounds, batch=schedule.microbatches)
    layers = nn.Stacked(_Counted(axn.ones(Layers)), Layers)

    def loss(layers: Any, x: Any) -> jax.Array:
        return layers.fold(x, schedule=schedule, then=lambda y: axn.sum(y * y).scalar())

    _RUNS.clear()
    mesh = axn.make_mesh({"stage": stages}, devices=jax.devices()[:stages])
    with jax.set_mesh(mesh), axn.axis_mapping({"layers": "stage"}):
        counted = loss if isinstance(schedule, GPipe) else jax.value_and_grad(loss)
        jax.block_until_ready(jax.jit(counted)(*axn.shard((layers, axn.ones(Batch)))))
    jax.effects_barrier()
    assert len(_RUNS) % stages == 0
    return len(_RUNS) // stages


def _idle() -> list[Row]:
    """The idle share of a stage by counted runs, against the formula, for S stages, M microbatches, and R rounds."""
    found = []
    sizes = (4, 16, 1), (4, 16, 2), (4, 16, 4), (8, 16, 1), (8, 16, 2), (8, 64, 1)
    for (S, M, R), (name, runs) in itertools.product(sizes, (("OneFOneB", 2), ("GPipe", 1))):
        schedule = OneFOneB(M, rounds=R) if runs == 2 else GPipe(M, rounds=R)
        idle, formula = 1 - runs * M * R / stage_runs(schedule, S), (S - 1) / (M * R + S - 1)
        what = f"{name}, S={S}, M={M}, R={R}: idle share of a stage, against the formula"
        found.append(Row("schedules", what, f"{idle:.1%}", f"{formula:.1%}", idle / formula, 1.01))
    return found


def _attention() -> list[Row]:
    """Value and gradient of causal attention over 8 devices."""
    axes = {"pos": 4096, "heads": 8, "head_size": 64}
    measured: dict[str, tuple[int, int]] = {}
    for context in ("ring", "all_gather"):

        def loss(q: Any, k: Any, v: Any, context: Any = context) -> jax.Array:
            y = dot_product_attention(q, k, v, "key_pos", "head_size", mask=Causal("pos"), context=context)
            return axn.sum(y * y).scalar()

        with jax.set_mesh(axn.make_mesh({"ring": 8})), axn.axis_mapping({"pos": "ring", "key_pos": "ring"}):
            q = axn.shard(axn.zeros(axes))
            k = q.rename({"pos": "key_pos"})
            compiled = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(q, k, k).compile()
        memory: Any = compiled.memory_analysis()
        measured[context] = _delivered(compiled, 8), memory.temp_size_in_bytes
    return [
        Row("schedules", f"ring against all_gather: {what}", _mb(ours), _mb(theirs), ours / theirs, limit)
        for what, ours, theirs, limit in zip(
            ("bytes moved", "temporaries"), measured["ring"], measured["all_gather"], (1.7, 0.5), strict=True
        )
    ]


def _experts() -> list[Row]:
    """A round sends rows, the numbers of their experts, and results."""
    Experts, Tokens, Embed, Mlp = axn.make_axes(experts=16, tokens=1024, embed=64, mlp=128)
    size, devices = Tokens.size // 8, 8
    layer = nn.MoELinear.init(Experts, Embed, Mlp, key=jax.random.key(0), use_bias=False)

    def mixture(layer: Any, x: Any, expert: Any) -> Any:
        return nn.dispatch(lambda layer, x, n: layer(x, n), layer, x, expert, Experts, round_size=size)

    with jax.set_mesh(axn.make_mesh({"expert": devices})), axn.axis_mapping({"tokens": "expert", "experts": "expert"}):
        arguments = axn.shard((layer, axn.zeros((Tokens, Embed)), axn.zeros(Tokens, dtype=int)))
        moved = _delivered(jax.jit(mixture).lower(*arguments).compile(), devices)
    least = (devices - 1) * size * 4 * (Embed.size + Mlp.size + 1)
    return [Row("schedules", "dispatch: bytes moved, against the formula", _mb(moved), _mb(least), moved / least, 1.0)]


def _flops(jaxpr: Any) -> int:
    """The operations of all matrix products on all devices, in loops as often as these turn."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (summed, _), _ = eqn.params["dimension_numbers"]
            total += 2 * eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[i] for i in summed)
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        times *= eqn.params["mesh"].size if eqn.primitive.name == "shard_map" else 1
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            total += times * _flops(inner) if hasattr(inner, "eqns") else 0
    return total


def _delivered(compiled: Any, devices: int) -> int:
    """The bytes that each device gets from others."""
    share = {"collective-permute": 1, "reduce-scatter": devices - 1}
    others = (devices - 1) / devices
    return round(sum(size * share.get(kind, others) for kind, (_, size) in executed(compiled).items()))


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
