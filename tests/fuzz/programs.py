"""Draw random programs, print them as code, and shorten failing ones."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import axonym as axn
from tests.fuzz.operations import OPERATIONS, Names, Operation, Value

SIZES = {"a": 4, "b": 8, "c": 2, "d": 3, "one": 1, "none": 0}
DTYPES = ["float32"] * 6 + ["bfloat16", "float16", "int32", "int32", "int8", "uint32", "bool", "complex64"]
LARGEST = 8192
"""The largest number of elements of an array in a program."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation on earlier values."""

    kind: str
    operands: tuple[int, ...]
    options: Mapping[str, Any]

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.kind]

    def code(self) -> str:
        return self.operation.code.format(*(f"v{i}" for i in self.operands), **self.options)

    def by_position(self, xp: Any, values: Sequence[Value]) -> Value:
        operands = [values[i] for i in self.operands]
        array, names = self.operation.by_position(xp, *operands, **self.options)
        exact = all(v.exact for v in operands) and not (self.operation.rounds and _rounds(self.kind, array))
        return Value(array, tuple(names), exact)


def _rounds(kind: str, array: Any) -> bool:
    """Return whether an operation may round: sums and products of small numbers in float32 do not."""
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return False
    return array.dtype != np.float32 or kind not in ("add", "subtract", "sum", "cumsum", "diff", "maximum", "minimum")


@dataclasses.dataclass(frozen=True)
class Program:
    """Inputs and steps; the last step is the result."""

    inputs: tuple[Value, ...]
    steps: tuple[Step, ...]

    def function(self) -> Callable[..., Any]:
        """Compile the printed code of the program to a function of named arrays."""
        scope: dict[str, Any] = {"axn": axn, "jax": jax}
        exec(self.body(), scope)
        return scope["program"]

    def body(self) -> str:
        parameters = ", ".join(f"v{i}" for i in range(len(self.inputs)))
        first = len(self.inputs)
        lines = [f"    v{first + i} = {step.code()}" for i, step in enumerate(self.steps)]
        return "\n".join([f"def program({parameters}):", *lines, f"    return v{first + len(self.steps) - 1}", ""])

    def code(self) -> str:
        """Return the program and its inputs as a script."""
        inputs = []
        for i, v in enumerate(self.inputs):
            array = f"np.array({np.asarray(v.array).tolist()}).astype({str(v.array.dtype)!r}).reshape({v.array.shape})"
            if v.array.weak_type:
                array = f"jnp.full({v.array.shape}, {_python_zero(v.array)}).at[...].set({array})"
            inputs.append(f"v{i} = axn.named({array}, {v.names})")
        return "\n".join([self.body(), *inputs, f"program({', '.join(f'v{i}' for i in range(len(self.inputs)))})"])

    def named_inputs(self) -> list[axn.NamedArray]:
        return [axn.named(jnp.asarray(v.array), v.names) for v in self.inputs]

    def positional(self, arrays: Sequence[Any]) -> Any:
        """Run the program in positional JAX, and return its result."""
        values = [dataclasses.replace(v, array=x) for v, x in zip(self.inputs, arrays, strict=True)]
        for step in self.steps:
            values.append(step.by_position(jnp, values))
        return values[-1].array

    def coarsest(self) -> Any:
        """Return the floating-point dtype with the largest rounding errors among those that the program computes in."""
        values = list(self.inputs)
        for step in self.steps:
            values.append(step.by_position(jnp, values))
        dtypes = [v.array.dtype for v in values if jnp.issubdtype(v.array.dtype, jnp.inexact)]
        return max(dtypes, key=lambda dtype: jnp.finfo(dtype).eps, default=np.float32)

    def up_to(self, last: int) -> Program:
        """Return the program that ends with a step, without steps that it does not need."""
        needed: set[int] = set()
        queue = [len(self.inputs) + last]
        while queue:
            i = queue.pop()
            if i not in needed:
                needed.add(i)
                queue += [] if i < len(self.inputs) else self.steps[i - len(self.inputs)].operands
        kept = sorted(needed)
        place = {old: new for new, old in enumerate(kept)}
        steps = [self.steps[i - len(self.inputs)] for i in kept if i >= len(self.inputs)]
        return Program(
            tuple(self.inputs[i] for i in kept if i < len(self.inputs)),
            tuple(Step(s.kind, tuple(place[i] for i in s.operands), s.options) for s in steps),
        )


def draw_program(rng: random.Random) -> Program:
    """Draw a program of 5 to 30 steps."""
    inputs = [_draw_input(rng) for _ in range(rng.randint(1, 3))]
    values, steps = list(inputs), []
    attempts, wanted = 0, rng.randint(5, 30)
    while len(steps) < wanted and attempts < 300:
        attempts += 1
        kind = rng.choice(list(OPERATIONS))
        drawn = OPERATIONS[kind].draw(rng, values)
        if drawn is None:
            continue
        step = Step(kind, tuple(drawn[0]), drawn[1])
        if step.operation.jumps and not all(values[i].exact for i in step.operands):
            continue
        try:
            value = step.by_position(jnp, values)
        except (TypeError, ValueError):  # positional JAX has no such operation for these dtypes or sizes
            continue
        if value.array.size > LARGEST or len(value.names) > 6 or _is_extreme(value.array):
            continue
        steps.append(step)
        values.append(value)
    program = Program(tuple(inputs), tuple(steps)).up_to(len(steps) - 1) if steps else None
    return program if program is not None and len(program.steps) >= 5 else draw_program(rng)


def _is_extreme(array: Any) -> bool:
    """Return whether values are so large that rounding and overflow dominate."""
    if not jnp.issubdtype(array.dtype, jnp.inexact) or not array.size:
        return False
    return not bool(np.all(np.isfinite(array))) or float(np.max(np.abs(np.asarray(array, np.complex64)))) > 1e4


def _draw_input(rng: random.Random) -> Value:
    names: Names = tuple(rng.sample(list(SIZES), rng.randint(1, 3)))
    if rng.random() < 0.9:
        names = tuple(n for n in names if n != "none") or ("a",)
    shape, dtype = [SIZES[n] for n in names], rng.choice(DTYPES)
    numbers = np.random.default_rng(rng.getrandbits(32))
    if dtype == "bool":
        array = numbers.integers(0, 2, shape).astype(bool)
    elif dtype == "uint32":
        array = numbers.integers(0, 9, shape).astype(dtype)
    elif dtype in ("int32", "int8"):
        array = numbers.integers(-9, 10, shape).astype(dtype)
    else:
        array = (numbers.integers(-8, 9, shape) / 4).astype(jnp.dtype(dtype))
        if dtype == "complex64":
            array = array + 1j * (numbers.integers(-8, 9, shape) / 4).astype(np.float32)
    x = jnp.asarray(array)
    if str(x.dtype) in ("int32", "float32") and rng.random() < 0.2:
        x = jnp.full(shape, _python_zero(x)).at[...].set(x)
    return Value(x, names)


def _python_zero(x: Any) -> Any:
    """Return a Python number, which JAX converts to an array of a weak type."""
    return 0 if jnp.issubdtype(x.dtype, jnp.integer) else 0.0
