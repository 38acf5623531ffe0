"""DiLoCo, `examples/diloco.py`: the same as a plain loop over replicas, and what it sends over the slices."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import axonym as axn
from axonym import insight
from examples import diloco
from tests.executed import executed
from tests.helpers import spec

ROUNDS, STEPS, REPLICAS = 3, 4, 2


def mesh(explicit: bool, slices: int = 2, data: int = 4) -> jax.sharding.Mesh:
    return axn.make_mesh({"slice": slices, "data": data}, explicit=explicit, devices=jax.devices()[: slices * data])


def batches(count: int) -> list[axn.NamedArray]:
    return [diloco.texts(key, REPLICAS) for key in jax.random.split(jax.random.key(1), count)]


def in_a_loop() -> Any:
    """Return the anchor of plain code, in which each replica is a model of its own."""
    model: Any = diloco.make_model(jax.random.key(0))
    momentum, states = diloco.NESTEROV.init(model), [diloco.ADAM.init(model)] * REPLICAS
    step, given = jax.jit(diloco.step), iter(batches(ROUNDS * STEPS))
    for _ in range(ROUNDS):
        models = [model] * REPLICAS
        for _ in range(STEPS):
            x = next(given)
            models, states = map(
                list,
                zip(
                    *[step(m, s, x["replica", i]) for i, (m, s) in enumerate(zip(models, states, strict=True))],
                    strict=True,
                ),
            )
        change = jax.tree.map(lambda a, *m: a - sum(m) / REPLICAS, model, *models)
        updates, momentum = diloco.NESTEROV.update(change, momentum, model)
        model = optax.apply_updates(model, updates)
    return model


def largest_difference(found: Any, expected: Any) -> float:
    found, expected = jax.device_get((found, expected))
    return max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True))


def trained(outer: Any, start: Any, rounds: int, texts: Any) -> Any:
    anchor, momentum, models, states = start
    for _ in range(rounds):
        for _ in range(STEPS):
            models, states = jax.block_until_ready(diloco.inner_step(models, states, next(texts)))
        anchor, momentum, models = jax.block_until_ready(outer(anchor, momentum, models))
    return anchor, momentum, models, states


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_replicas_are_as_in_a_loop(explicit: bool) -> None:
    with jax.set_mesh(mesh(explicit)):
        start = diloco.start(REPLICAS)
        anchor, _, models, _ = trained(diloco.outer_step, start, ROUNDS, iter(batches(ROUNDS * STEPS)))
        assert spec(models.stacked.up.weight) == ("slice", None, None, "data")
        assert spec(anchor.stacked.up.weight) == (None, None, "data")
    assert largest_difference(anchor, in_a_loop()) < 1e-6


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_what_is_sent_over_the_slices(explicit: bool) -> None:
    """Nothing by an inner step; by an outer one the parameters of a device, or an eighth of the bytes each way."""
    with jax.set_mesh(mesh(explicit)):
        anchor, momentum, models, states = diloco.start(REPLICAS)
        insight.contract(max_sent={"slice": 0}).check(diloco.inner_step, models, states, batches(1)[0])
        stored = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(anchor))
        sent = {}
        for name, outer in {
            "whole": diloco.agree,
            "int8": functools.partial(diloco.agree, int8=True),
            "fragment": lambda *args: diloco.agree_on(1, *args),
        }.items():
            outer = axn.fsdp(outer, diloco.STORAGE, diloco.COMPUTE)
            sent[name] = insight.explain(outer, anchor, momentum, models).total_sent("slice") or 0
    scales = 4 * 4 * diloco.Layers.size  # of four parameters
    assert sent == {"whole": stored, "int8": stored // 4 + scales // 4 * 4, "fragment": stored // 2}


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_an_array_of_small_numbers_is_sent_as_it_is(explicit: bool) -> None:
    def exchange(x: axn.NamedArray) -> axn.NamedArray:
        return axn.shard((x * 100).astype("int8"), {"batch": None}).astype("float32") * 2

    with jax.set_mesh(mesh(explicit)):
        x = axn.shard(axn.ones({"batch": 8, "embed": 64}), {"batch": "data"})
        found = executed(jax.jit(exchange).lower(x).compile())
    assert found == {"all-gather": (1, 8 * 64)}


def test_a_fragment_of_the_layers() -> None:
    """Agreeing on each layer once is agreeing on all."""
    with jax.set_mesh(mesh(False)):
        anchor, momentum, models, states = diloco.start(REPLICAS)
        models, _ = jax.block_until_ready(diloco.inner_step(models, states, batches(1)[0]))
        whole = jax.block_until_ready(diloco.outer_step(anchor, momentum, models))
        part = axn.fsdp(diloco.agree_on, diloco.STORAGE, diloco.COMPUTE)
        first = jax.block_until_ready(part(0, anchor, momentum, models))
        assert (
            largest_difference(
                axn.tree.map(lambda x: x["layers", 2:], first),
                axn.tree.map(lambda x: x["layers", 2:], (anchor, momentum, models)),
            )
            == 0
        )
        assert largest_difference(part(2, *first), whole) < 1e-6


def test_resume_and_other_numbers_of_replicas(tmp_path: Path) -> None:
    given = batches(2 * STEPS)
    with jax.set_mesh(mesh(False)):
        kept = trained(diloco.outer_step, diloco.start(REPLICAS), 1, iter(given[:STEPS]))
        expected = trained(diloco.outer_step, kept, 1, iter(given[STEPS:]))[0]
        axn.state.save_checkpoint(tmp_path / "kept", kept)
    for slices, data, most in ((2, 4, 0.0), (2, 2, 1e-6)):
        with jax.set_mesh(mesh(False, slices, data)):
            again = axn.state.restore_checkpoint(
                tmp_path / "kept", jax.eval_shape(lambda: diloco.start(REPLICAS)), diloco.STORAGE
            )
            assert largest_difference(trained(diloco.outer_step, again, 1, iter(given[STEPS:]))[0], expected) <= most
    anchor, momentum, _, states = jax.device_get(kept)
    with jax.set_mesh(mesh(False, 4, 2)):
        wider = axn.shard((diloco.replicate(anchor, 4), diloco.resized(states, 4)), diloco.STORAGE)
        models, states = jax.block_until_ready(diloco.inner_step(*wider, diloco.texts(jax.random.key(2), 4)))
        outer = diloco.outer_step(*axn.shard((anchor, momentum), diloco.STORAGE), models)
        anchor, momentum, models = jax.block_until_ready(outer)
        assert spec(models.stacked.up.weight) == ("slice", None, None, "data")
        kept = jax.device_get((anchor, momentum, diloco.resized(states, 2)))
    with jax.set_mesh(mesh(False)):
        anchor, momentum, states = axn.shard(kept, diloco.STORAGE)
        models = axn.shard(diloco.replicate(anchor, 2), diloco.STORAGE)
        anchor = trained(diloco.outer_step, (anchor, momentum, models, states), 1, iter(given[:STEPS]))[0]
    assert np.isfinite(diloco.loss(anchor, given[0]["replica", 0]).item())
