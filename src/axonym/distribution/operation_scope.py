"""Describe an operation by its axes, in profiles and compiled programs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..axis import Names
from .active_settings import active_mapping, active_parameter_mapping
from .mesh_axes import mapped_axes, storage_axes

_PLAIN = re.compile(r"[^\w.\- ]")
"""Matches characters that a name must not have in a scope."""

_NUMBER = re.compile(r"#\d")
"""Matches a number that stands for a name: see `shared` in `axonym.ops._kernels`."""


def operation_scope(what: str, in_names: Sequence[Names], out_names: Any, arrays: Sequence[Any]) -> str:
    """Return the scope of an operation, which describes it in profiles and compiled programs.

    An example is `dot[batch=16|data,embed=64~data;embed,mlp=128->batch,mlp]`: the axes of each operand and each result.
    Where an axis is first named, its size follows, then the mesh axes that the active mapping shards it over (`|`), and
    the mesh axes of the parameter mapping (`~`), if they differ. `axonym.insight` reads it. There is no `@`, since XLA
    drops everything after one.
    """
    layouts = names_of_results(out_names)
    if any(_NUMBER.match(n) for names in (*in_names, *layouts) for n in names):
        return _PLAIN.sub("_", what)  # the kernel is for any names
    mapping, stored_by = active_mapping(), active_parameter_mapping()
    seen: dict[str, int | None] = {}

    def term(names: Names, shape: Sequence[int | None]) -> str:
        return ",".join(map(axis, names, shape))

    def axis(name: str, size: int | None) -> str:
        name = unmarked(name)
        text = _PLAIN.sub("_", name)
        if name in seen and size in (None, seen[name]):
            return text
        seen[name] = size
        over, stored = map("+".join, (mapped_axes(name, mapping), storage_axes(name, stored_by, mapping)))
        if size is not None:
            text += f"={size}"
        return text + (f"|{over}" if over else "") + (f"~{stored}" if stored and stored != over else "")

    inputs = [term(names, jnp.shape(x)) for names, x in zip(in_names, arrays, strict=True)]
    results = [term(names, (None,) * len(names)) for names in layouts]
    return f"{_PLAIN.sub('_', what)}[{';'.join(inputs)}->{';'.join(results)}]"


def names_of_results(out_names: Any) -> Sequence[Names]:
    """Return the axes of each result."""
    return out_names if out_names and not isinstance(out_names[0], str) else (out_names or (),)


def unmarked(name: str) -> str:
    """Return the name of an axis without the mark that indexed axes have."""
    return name.partition(" (")[0]
