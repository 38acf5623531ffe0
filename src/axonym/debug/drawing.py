"""Draw named arrays as images and lines."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ..axis import AxisSelector, name_of
from ..named_array import NamedArray, describe_array
from ..ops._operands import require_named

__all__ = ["draw"]

_MOST_LINES = 10
"""With more lines there is no legend."""


def draw(array: NamedArray, along: AxisSelector | None = None, *, kind: str | None = None, ax: Any = None) -> Any:
    """Draw an array of one axis as a line, and one of two as an image, labelled with the names of the axes.

    Drawing needs Matplotlib: install `axonym[plot]`. An array with more axes is drawn one part at a time:
    `draw(x["head", 0])`.

    Arguments:
        array: a named array of one or two axes. Its values are fetched from the devices.
        along: the axis that runs from left to right; by default the last one.
        kind: "line" or "image". With "line", an array of two axes gives a line for each position of the other axis.
        ax: Matplotlib's axes to draw into; by default a new figure's.

    Returns Matplotlib's axes.

    >>> import matplotlib; matplotlib.use("agg")
    >>> weights = axn.random.uniform(jax.random.key(0), {"query_pos": 4, "key_pos": 6})
    >>> ax = axn.debug.draw(weights)
    >>> ax.get_xlabel(), ax.get_ylabel(), ax.get_title()
    ('key_pos', 'query_pos', 'float32[query_pos=4, key_pos=6]')
    """
    require_named("debug.draw", array)
    described = describe_array(array)
    if isinstance(array.array, Tracer):
        raise TypeError(f"debug.draw: {described} is being traced, so it has no values yet: draw it outside of jit.")
    if len(array.names) not in (1, 2):
        part = "".join(f", {n!r}, 0" for n in array.names[:-2])[2:]
        way_out = f"Draw a part of it, such as `x[{part}]`." if part else "Print it instead."
        raise ValueError(f"debug.draw: an array of one or two axes can be drawn, got {described}. {way_out}")
    name = array.names[-1] if along is None else array.resolve_axis(name_of(along)).name
    if kind is None:
        kind = "line" if len(array.names) == 1 else "image"
    if kind not in ("line", "image"):
        raise ValueError(f"debug.draw: `kind` must be 'line' or 'image', got {kind!r}.")
    values = _values_to_draw(array.rearrange((..., name)))
    if ax is None:
        ax = _pyplot().subplots(layout="constrained")[1]
    other = next((n for n in array.names if n != name), None)
    if kind == "line":
        for i, line in enumerate(values.reshape(-1, values.shape[-1])):
            ax.plot(line, label=None if other is None else f"{other}={i}")
        if other is not None and array.axis_size(other) <= _MOST_LINES:
            ax.legend()
    else:
        image = ax.imshow(values.reshape(-1, values.shape[-1]), aspect="auto", interpolation="nearest")
        ax.figure.colorbar(image, ax=ax)
        if other is None:
            ax.set_yticks([])
        else:
            ax.set_ylabel(other)
    ax.set_xlabel(name)
    ax.set_title(described)
    for side in (ax.xaxis, *([] if kind == "line" else [ax.yaxis])):  # positions are integers
        side.get_major_locator().set_params(integer=True)
    return ax


def _values_to_draw(array: NamedArray) -> np.ndarray:
    raw = array.array
    if isinstance(raw, jax.Array) and not (raw.is_fully_addressable or raw.is_fully_replicated):
        raise ValueError(
            f"debug.draw: other processes hold shards of {describe_array(array)}: every process calls "
            "`axonym.to_host(x)` first."
        )
    values = np.asarray(raw)
    if np.iscomplexobj(values):
        raise TypeError(f"debug.draw: {describe_array(array)} is complex: draw its `real` and `imag`, or `axonym.abs`.")
    return values.astype(np.float64)


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as e:
        raise ImportError("debug.draw needs Matplotlib, which is optional: install axonym[plot].") from e
    return plt
