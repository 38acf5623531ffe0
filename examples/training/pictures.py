"""Draw the loss curve and the placement of the model, as text and as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import axonym as axn
from axonym import NamedArray

from . import table

Curve = Sequence[tuple[int, float]]

_LABEL = 12
_SIZE = (60, 12)
"""Columns and rows of a curve as text."""


# --- the loss ---


def curve_as_text(training: Curve, held_out: Curve) -> list[str]:
    """The lines of a plot: dots for losses of training, circles for those on held-out text."""
    if not training:
        return []
    width, height = _SIZE
    everything = [*training, *held_out]
    first, last = min(s for s, _ in everything), max(s for s, _ in everything)
    low, high = min(v for _, v in everything), max(v for _, v in everything)
    grid = [[" "] * width for _ in range(height)]

    def column(step: int) -> int:
        return (step - first) * (width - 1) // max(last - first, 1)

    def put(x: int, value: float, sign: str) -> None:
        grid[round((high - value) / ((high - low) or 1) * (height - 1))][x] = sign

    by_column: dict[int, list[float]] = {}
    for step, value in training:
        by_column.setdefault(column(step), []).append(value)
    for x, values in by_column.items():
        put(x, sum(values) / len(values), "·")
    for step, value in held_out:
        put(column(step), value, "o")
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    margin = max(map(len, labels.values()))
    lines = [f"{labels.get(i, ''):>{margin}} │{''.join(row)}".rstrip() for i, row in enumerate(grid)]
    steps = f"{first}{f'step {last}':>{max(width - len(str(first)), 1)}}"
    return [*lines, f"{'':{margin}} └{'─' * width}", f"{'':{margin}}  {steps}"]


def save_curve(path: Path, training: Curve, held_out: Curve) -> None:
    """The same as a file."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per byte)")
    axes.plot(*_columns(training), linewidth=0.8, label="training")
    axes.plot(*_columns(held_out), marker="o", markersize=4, label="held-out text")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def _columns(curve: Curve) -> tuple[list[int], list[float]]:
    return [s for s, _ in curve], [v for _, v in curve]


# --- the placement ---


def placement_as_text(model: Any, tokens: NamedArray) -> str:
    """Draw the shards of the batch, and of one parameter for each sharding."""
    kinds: dict[Any, tuple[str, NamedArray]] = {}
    for path, x in table.named_leaves(model):
        kinds.setdefault(frozenset(table.split_axes(x).items()), (path, x))
    return axn.debug.describe_shardings({"tokens of a batch": tokens} | dict(kinds.values()))


def save_placement(path: Path, model: Any, tokens: NamedArray) -> None:
    """A picture of which part of each parameter is on which devices."""
    arrays = [("tokens of a batch", tokens), *table.named_leaves(model)]
    columns = 3
    rows = -(-len(arrays) // columns)
    figure = Figure(figsize=(5 * columns, 2.2 * rows), layout="constrained")
    for i, (name, x) in enumerate(arrays):
        axes = figure.add_subplot(rows, columns, i + 1)
        _draw(axes, x)
        axes.set_title(f"{name}\n{' '.join(f'{n}={s}' for n, s in x.shape.items())}", fontsize=8)
    figure.savefig(path, dpi=110)


def _draw(axes: Any, x: NamedArray) -> None:
    """A rectangle for each part of an array, in the color of the first device that has it."""
    across = list(table.split_axes(x))[-2:]
    down_axis, right_axis = (None, *across)[-2:] if across else (None, None)
    parts: dict[tuple[float, float, float, float], list[Any]] = {}
    indices = x.array.sharding.devices_indices_map(x.array.shape)
    for device, index in indices.items():
        bounds = {n: s.indices(size)[:2] for (n, size), s in zip(x.shape.items(), index, strict=True)}
        sides = [
            (bounds[n][0] / x.shape[n], bounds[n][1] / x.shape[n]) if n is not None else (0.0, 1.0)
            for n in (right_axis, down_axis)
        ]
        (left, right), (top, bottom) = sides
        parts.setdefault((left, top, right - left, bottom - top), []).append(device)
    order = list(indices)
    for (left, top, width, height), devices in parts.items():
        color = f"C{min(map(order.index, devices)) % 10}" if len(parts) > 1 else "0.6"
        axes.add_patch(Rectangle((left, top), width, height, facecolor=color, alpha=0.5, edgecolor="black"))
        numbers = _shortened(axn.debug.describe_devices(devices))
        axes.text(left + width / 2, top + height / 2, numbers, ha="center", va="center", fontsize=7)
    axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[], xlabel=right_axis or "", ylabel=down_axis or "")


def _shortened(text: str) -> str:
    return text if len(text) <= _LABEL else f"{text[:_LABEL]}…"
