"""The example programs: each agrees with the result on one device, and communicates as stated."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

import axonym as axn
from benchmarks.communication import bytes_moved
from examples.per_device import PROGRAMS, Program, product_ring, run


def name(program: Program) -> str:
    return program.fn.__name__


@pytest.mark.parametrize("program", PROGRAMS, ids=name)
def test_program(program: Program) -> None:
    error, collectives = run(program)
    assert error < 1e-5
    assert collectives == program.collectives


def compiled(program: Program) -> jax.stages.Compiled:
    with jax.set_mesh(axn.make_mesh(program.mesh)):
        return jax.jit(axn.shard_map(program.fn, **program.options)).lower(*program.arguments()).compile()


def test_a_ring_does_not_wait_for_its_products() -> None:
    """What is sent on is what came in: an argument, passed on by nothing but other sends."""
    program = next(p for p in PROGRAMS if p.fn is product_ring)
    found = re.findall(r"%([\w.-]+) = (?:\([^)]*\)|\S+) ([\w-]+)\(%?([\w.-]*)", str(compiled(program).as_text()))
    instruction = {name: (kind, operand) for name, kind, operand in found}
    sends = [n for n, (kind, _) in instruction.items() if kind in ("collective-permute", "collective-permute-start")]
    assert len(sends) == 7
    for send in sends:
        kinds = []
        while send in instruction:
            kind, send = instruction[send]
            kinds.append(kind)
        assert kinds.pop() == "parameter"
        assert all(k.startswith(("collective-permute", "copy", "bitcast")) for k in kinds), kinds


def test_what_the_forms_of_a_product_move() -> None:
    """A reduce-scatter leaves each device with its rows only; a ring delivers the other seven eighths of `x`."""
    moved = {p.fn.__name__: bytes_moved(compiled(p)) for p in PROGRAMS[:3]}
    whole = 8 * 32 * 4
    assert moved["product_all_reduce"]["all-reduce"].bytes == whole
    assert moved["product_reduce_scatter"]["reduce-scatter"].bytes == whole // 8
    assert moved["product_ring"]["collective-permute"].bytes == 8 * 16 * 4 // 8 * 7


@pytest.mark.parametrize("program", PROGRAMS, ids=name)
def test_program_on_explicit_axes_and_its_gradient(program: Program) -> None:
    arguments = program.arguments()

    def loss(fn):
        return lambda *args: sum(
            axn.sum(a * a).array for a in jax.tree.leaves(fn(*args), is_leaf=axn.is_named_array)[-1:]
        )

    expected = jax.jit(jax.value_and_grad(loss(program.reference)))(*arguments)
    with jax.set_mesh(axn.make_mesh(program.mesh, explicit=True)):
        step = axn.shard_map(program.fn, **program.options)
        found = jax.block_until_ready(jax.jit(jax.value_and_grad(loss(step)))(*arguments))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)
