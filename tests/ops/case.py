"""One row of the table that tests every operation.

A case has a call of an operation by name, and a positional reference in NumPy or JAX. The suite in `test_operations.py`
runs each case eagerly, in jit, under grad and vmap, and on Auto and Explicit meshes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

SIZES = {"batch": 8, "pos": 4, "embed": 8, "heads": 2, "row": 4, "col": 4, "x": 8, "y": 4, "xyz": 3}
"""The size of every axis the cases use; each is divisible by the mesh axis it is sharded over."""


@dataclasses.dataclass(frozen=True)
class Operand:
    """An argument: its axes, and how its values are drawn."""

    names: tuple[str, ...]
    kind: str = "float"
    """'float', 'positive', 'unit' (in (0, 1)), 'int', 'index' (small non-negative), 'bool', 'complex', 'nan', 'special'
    (NaN and both infinities), 'bits'."""

    def draw(self, rng: np.random.Generator, sizes: dict[str, int] = SIZES) -> np.ndarray:
        """Draw values for the operand, in the layout of its names."""
        shape = tuple(sizes[n] for n in self.names)
        match self.kind:
            case "float":
                return rng.normal(size=shape).astype(np.float32)
            case "positive":
                return rng.uniform(0.5, 2.0, size=shape).astype(np.float32)
            case "unit":
                return rng.uniform(0.05, 0.95, size=shape).astype(np.float32)
            case "int":
                return rng.integers(-5, 6, size=shape).astype(np.int32)
            case "index":
                return rng.integers(0, 2, size=shape).astype(np.int32)
            case "bits":
                return rng.integers(0, 256, size=shape).astype(np.uint8)
            case "bool":
                return rng.integers(0, 2, size=shape).astype(bool)
            case "complex":
                return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(np.complex64)
            case "nan":
                values = rng.normal(size=shape).astype(np.float32)
                values[rng.uniform(size=shape) < 0.2] = np.nan
                return values
            case "special":
                values = rng.normal(size=shape).astype(np.float32)
                draw = rng.uniform(size=shape)
                for special, low in ((np.nan, 0.0), (np.inf, 0.2), (-np.inf, 0.4)):
                    values[(draw >= low) & (draw < low + 0.2)] = special
                return values
        raise ValueError(f"unknown kind {self.kind!r}")


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of an operation.

    `call` gets named arrays and returns a named array, a tuple of them, or a host value; `reference` gets the NumPy
    arrays in the layout of the operands and returns the same positionally, in the layout of the result.
    """

    name: str
    """The public name, as in 'sum' or 'linalg.inv'. It must exist in axonym, and appears in the coverage test."""
    operands: tuple[Operand, ...]
    call: Callable[..., Any]
    reference: Callable[..., Any]
    label: str = ""
    """Distinguishes several cases of one operation."""
    grad: bool = True
    """Whether to compare gradients; needs float operands and one float result, or a tuple of float results."""
    jit: bool = True
    """Whether the operation can be traced; False for those whose result shape or type depends on values."""
    sharded: bool = True
    """Whether to run it on sharded operands."""
    vmap: bool = True
    """Whether to map it over another axis; not possible for operations that cannot be traced."""
    rtol: float = 1e-5
    atol: float = 1e-5
    names: tuple[str, ...] | tuple[tuple[str, ...] | None, ...] | None = None
    """The axes of the result in order, or of each result of a tuple; None is not checked."""
    layout: bool = True
    """Whether the result is the same, up to the order of its axes, for operands with axes in another order."""

    @property
    def id(self) -> str:
        return f"{self.name}-{self.label}" if self.label else self.name


def f(*names: str) -> Operand:
    """Make a float operand."""
    return Operand(names)


def of(kind: str, *names: str) -> Operand:
    """Make an operand of another kind."""
    return Operand(names, kind)
