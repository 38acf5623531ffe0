"""Check the properties of every program, and search for a program that violates one."""

from __future__ import annotations

import dataclasses
import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import axonym as axn
from axonym.testing import check_shard_invariance
from tests.fuzz.comparing import expect, tolerance
from tests.fuzz.programs import Program, draw_program
from tests.fuzz.sharded_code import (
    check_code_on_shards,
    check_new_names,
    check_padded,
    check_threads,
    check_uneven_operations,
)

Check = Callable[[Program, int], None]
Fails = Callable[[Check, Program, int], str | None]


def check_steps(program: Program, seed: int) -> None:
    """Compare every eager step with the positional function in `jax.numpy` and in NumPy."""
    values = list(program.inputs)
    named = program.named_inputs()
    for step in program.steps:
        expected = step.by_position(jnp, values)
        scope = {"axn": axn, "jax": jax, **{f"v{i}": x for i, x in enumerate(named)}}
        found = eval(step.code(), scope)
        assert isinstance(found, axn.NamedArray), f"{step.code()} is a {type(found).__name__}"
        assert set(found.names) == set(expected.names), f"{step.code()}: axes {found.names} for {expected.names}"
        expect(step.code(), found.rearrange(expected.names).array, expected.array)
        _check_numpy(step, values, expected.array)
        values.append(expected)
        named.append(found)


def _check_numpy(step: Any, values: Any, expected: Any) -> None:
    low = any(values[i].array.dtype in (jnp.bfloat16, np.float16) for i in step.operands)
    if low or step.kind in ("astype",):
        return
    host = [type(v)(np.asarray(v.array), v.names) for v in values]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            array = step.by_position(np, host).array
        except (TypeError, ValueError, AttributeError):  # NumPy has no such operation for these dtypes or sizes
            return
    expect(f"NumPy, {step.code()}", jnp.asarray(np.asarray(array).astype(expected.dtype)), expected, weak=False)


def check_jit(program: Program, seed: int) -> None:
    """Compare the whole program in jit and in named_jit with the eager one."""
    # At the precision of the user: what jit does to rounding and dtypes is what is compared.
    function, inputs, rtol = program.function(), program.named_inputs(), tolerance(program.coarsest())
    expected = function(*inputs)
    for what, compiled in (("jit", jax.jit(function)), ("named_jit", axn.named_jit(function))):
        found = compiled(*inputs)
        assert found.names == expected.names, f"{what}: axes {found.names} for {expected.names}"
        expect(what, found.array, expected.array, rtol=rtol)


def check_transforms(program: Program, seed: int) -> None:
    """Compare the program under vmap, in a scan and inside shard_map, over many devices, with positional JAX's vmap."""
    function, plain, inputs = program.function(), by_position(program), program.named_inputs()
    in_names, out_names = [x.names for x in inputs], plain(*inputs).names

    def ways(*arrays: jax.Array) -> Any:
        xs = [axn.named(x, ("lane", *names)) for x, names in zip(arrays, in_names, strict=True)]
        with axn.axis_mapping({"lane": "data"}):
            found = {
                "vmap": axn.vmap(function, "lane")(*xs),
                "map": axn.map(lambda xs: function(*xs), "lane")(xs),
                "shard_map": axn.shard_map(axn.vmap(function, "lane"))(*xs),
            }
        return {what: x.rearrange(("lane", *out_names)).array for what, x in found.items()}

    def reference(*arrays: jax.Array) -> Any:
        y = jax.vmap(lambda *xs: plain(*map(axn.named, xs, in_names)).array)(*arrays)
        return dict.fromkeys(("vmap", "map", "shard_map"), y)

    with jax.set_mesh(axn.make_mesh({"data": 4, "model": 2})):
        stacked = [axn.shard(axn.broadcast_axis(x, axn.Axis("lane", 8)), {"lane": "data"}).array for x in inputs]
        check_shard_invariance(ways, *stacked, reference=reference, gradients=False)


def check_placements(program: Program, seed: int) -> None:
    """Compare values and gradients with those of positional JAX, on random meshes and under random mappings."""
    function, inputs, plain = program.function(), program.named_inputs(), by_position(program)
    names = plain(*inputs).names

    def same_layout(*inputs: axn.NamedArray) -> axn.NamedArray:
        return function(*inputs).rearrange(names)

    for gradients in (True, False):
        try:
            check_shard_invariance(same_layout, *inputs, reference=plain, draws=2, seed=seed, gradients=gradients)
        except ValueError as refusal:
            if gradients and re.search(r"the gradient\S* has elements that are NaN", str(refusal)):
                continue  # some operations have no derivative at 0
            if "every placement was refused" not in str(refusal):
                raise
        except AssertionError as failure:
            if "times the arguments" not in str(failure) or _stays_in_range(program):
                raise
        return


def _stays_in_range(program: Program) -> bool:
    """Return whether all values are finite for arguments as large as `check_shard_invariance` makes them.

    Beyond the range of the dtype, differences of two values are differences of how they were rounded.
    """
    values = [
        dataclasses.replace(v, array=v.array * 16) if jnp.issubdtype(v.array.dtype, jnp.inexact) else v
        for v in program.inputs
    ]
    for step in program.steps:
        values.append(step.by_position(jnp, values))
    return all(bool(jnp.all(jnp.isfinite(v.array))) for v in values)


def by_position(program: Program) -> Callable[..., axn.NamedArray]:
    """Return a function of named arrays that runs the program in positional JAX."""

    def plain(*inputs: axn.NamedArray) -> axn.NamedArray:
        values = [dataclasses.replace(v, array=x.array) for v, x in zip(program.inputs, inputs, strict=True)]
        for step in program.steps:
            values.append(step.by_position(jnp, values))
        return axn.named(values[-1].array, values[-1].names)

    return plain


def check_eager_placements(program: Program, seed: int) -> None:
    """Run the program eagerly on sharded arrays; compare values, dtypes and, on Explicit axes, shardings with jit."""
    # Both run on the same devices, at the precision of the user: eager dispatch is what is compared.
    function, inputs, rng = program.function(), program.named_inputs(), random.Random(seed)
    explicit = rng.choice([True, False, ["data"]])
    mapping = rng.choice([{"a": "data", "b": "model"}, {"b": "data", "c": "model"}, {"a": "model", "b": "data"}])
    with jax.set_mesh(axn.make_mesh({"data": 4, "model": 2}, explicit=explicit)), axn.axis_mapping(mapping):
        placed = axn.shard(inputs)
        try:
            found = function(*placed)
        except ValueError as refusal:
            if "mesh ax" not in str(refusal):
                raise
            return
        compiled = jax.jit(function)(*placed)
    what = f"eager, explicit={explicit}, {mapping}"
    expect(what, found.array, compiled.array, rtol=tolerance(program.coarsest()))
    here, there = found.array.sharding, compiled.array.sharding
    assert explicit is not True or here.is_equivalent_to(there, found.ndim), f"{what}: {here} for {there} in jit"


def check_donated(program: Program, seed: int) -> None:
    """Run the program in named_jit with donated arguments, under different mappings."""
    # At the precision of the user: what runs is what is compared.
    function, inputs = program.function(), program.named_inputs()
    expected = function(*inputs)
    donating = axn.named_jit(function, donate_args=(True,) * len(inputs))
    with warnings.catch_warnings(), jax.set_mesh(axn.make_mesh({"data": 4, "model": 2}, explicit=False)):
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        for name in "ab":
            try:
                with axn.axis_mapping({name: "data"}):
                    found = jax.block_until_ready(donating(*jax.tree.map(jnp.copy, axn.shard(inputs))))
            except ValueError as refusal:
                if "cannot be sharded" not in str(refusal):
                    raise
                return
            expect("donated", found.array, expected.array, rtol=tolerance(program.coarsest()))


def check_plain(program: Program, seed: int) -> None:
    """Run the program in positional JAX, compiled and sharded as in `check_placements`."""

    def plain(*inputs: axn.NamedArray) -> Any:
        return program.positional([x.array for x in inputs])

    check_shard_invariance(plain, *program.named_inputs(), draws=2, seed=seed)


CHECKS: tuple[Check, ...] = (
    check_steps,
    check_jit,
    check_transforms,
    check_placements,
    check_eager_placements,
    check_donated,
    check_code_on_shards,
    check_padded,
    check_uneven_operations,
    check_new_names,
    check_threads,
)


@dataclasses.dataclass(frozen=True)
class Failure:
    """A program, the check that it fails, and how."""

    program: Program
    seed: int
    check: Check
    words: str

    def __str__(self) -> str:
        return (
            f"{self.check.__name__}, seed {self.seed}: {self.words}\n\n"
            "import jax\nimport jax.numpy as jnp\nimport numpy as np\n\nimport axonym as axn\n\n"
            f"{self.program.code()}\n"
        )


def fails(check: Check, program: Program, seed: int) -> str | None:
    """Describe how a program fails a check; return None if it does not."""
    try:
        check(program, seed)
    except Exception as problem:  # no program that positional JAX computes should raise any error
        return f"{type(problem).__name__}: {problem}"
    return None


def failure(program: Program, seed: int, fails: Fails = fails) -> Failure | None:
    """Return the first check that a program fails, with the shortest part of the program that fails it too."""
    for check in CHECKS:
        if (words := fails(check, program, seed)) is not None:
            for last in range(len(program.steps) - 1):
                shorter = program.up_to(last)
                if (found := fails(check, shorter, seed)) is not None:
                    return Failure(shorter, seed, check, found)
            return Failure(program, seed, check, words)
    return None


def try_seed(seed: int, fails: Fails = fails) -> Failure | None:
    """Return the failure of the program of a seed; None if there is none.

    Arguments:
        fails: runs a check, by default in this process.
    """
    return failure(draw_program(random.Random(seed)), seed, fails)
