"""Operations on shape and layout: rearranging, broadcasting, splitting, merging, joining, padding, rolling."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import axonym as axn
from axonym import Axis
from tests.ops.case import Case, f, of


def _rearrange(label, operand, call, reference, names, **options):
    return Case("rearrange", (operand,), call, reference, label=label, names=names, **options)


REARRANGE = [
    _rearrange(
        "order",
        f("batch", "pos", "embed"),
        lambda x: axn.rearrange(x, ("embed", "batch", "pos")),
        lambda x: np.transpose(x, (2, 0, 1)),
        ("embed", "batch", "pos"),
    ),
    _rearrange(
        "order-ellipsis",
        f("batch", "pos", "embed"),
        lambda x: axn.rearrange(x, ("embed", ..., "batch")),
        lambda x: np.transpose(x, (2, 1, 0)),
        ("embed", "pos", "batch"),
    ),
    _rearrange(
        "one-by-one",
        f("batch", "embed"),
        lambda x: axn.rearrange(x, "embed", ...),
        np.transpose,
        ("embed", "batch"),
    ),
    _rearrange(
        "ordered",
        f("batch", "pos", "embed"),
        lambda x: axn.rearrange(x, "b p e -> e b p"),
        lambda x: np.transpose(x, (2, 0, 1)),
        ("embed", "batch", "pos"),
        layout=False,
    ),
    _rearrange(
        "nothing-to-do",
        f("batch", "embed"),
        lambda x: axn.rearrange(x, "{batch embed} -> batch embed"),
        lambda x: x,
        ("batch", "embed"),
    ),
    _rearrange(
        "split",
        f("batch", "embed"),
        lambda x: axn.rearrange(x, "{(batch: step row) ...} -> row ... step", step=2),
        lambda x: np.transpose(x.reshape(2, 4, 8), (1, 2, 0)),
        ("row", "embed", "step"),
    ),
    _rearrange(
        "merge",
        f("batch", "pos", "embed"),
        lambda x: axn.rearrange(x, "{pos batch embed} -> (tokens: batch pos) embed"),
        lambda x: x.reshape(32, 8),
        ("tokens", "embed"),
    ),
    _rearrange(
        "merge-transposed",
        f("batch", "pos", "embed"),
        lambda x: axn.rearrange(x, "{pos batch} -> ... (tokens: pos batch)"),
        lambda x: np.transpose(x, (2, 1, 0)).reshape(8, 32),
        ("embed", "tokens"),
    ),
    _rearrange(
        "patches",
        f("batch", "row", "col"),
        lambda x: axn.rearrange(x, "b (nr r) (nc c) -> b (patch: nr nc) (pixel: r c)", r=2, c=Axis("c", 2)),
        lambda x: np.transpose(x.reshape(8, 2, 2, 2, 2), (0, 1, 3, 2, 4)).reshape(8, 4, 4),
        ("batch", "patch", "pixel"),
        layout=False,
    ),
    _rearrange(
        "split-and-merge-in-place",
        f("batch", "embed"),
        lambda x: axn.rearrange(x, "{(batch: step row) embed} -> step (flat: row embed)", step=4),
        lambda x: x.reshape(4, 16),
        ("step", "flat"),
    ),
]

BROADCASTING = [
    Case(
        "broadcast_to",
        (f("embed", "batch"),),
        lambda x: axn.broadcast_to(x, axn.make_axes(batch=8, pos=4, embed=8)),
        lambda x: np.broadcast_to(x.T[:, None], (8, 4, 8)),
        names=("batch", "pos", "embed"),
    ),
    Case(
        "broadcast_to",
        (f("embed", "batch"),),
        lambda x: axn.broadcast_to(x, {"batch": 8, "pos": 4, "embed": 8}, ensure_order=False),
        lambda x: np.broadcast_to(x, (4, 8, 8)),
        label="any-order",
        names=("pos", "embed", "batch"),
    ),
    Case(
        "broadcast_to",
        (f("embed", "batch"),),
        lambda x: axn.broadcast_to(x, (Axis("pos", 4), Axis("batch", 8)), enforce_no_extra_axes=False),
        lambda x: np.broadcast_to(x, (4, 8, 8)),
        label="extra-axes",
        names=("pos", "embed", "batch"),
    ),
    Case(
        "broadcast_axis",
        (f("batch", "embed"),),
        lambda x: axn.broadcast_axis(x, axn.make_axes(embed=8, pos=4)),
        lambda x: np.broadcast_to(x, (4, 8, 8)),
        names=("pos", "batch", "embed"),
    ),
    Case(
        "broadcast_arrays",
        (f("embed"), f("batch", "pos", "embed"), f("pos", "batch")),
        axn.broadcast_arrays,
        lambda x, y, z: (np.broadcast_to(x, y.shape), y, np.broadcast_to(z.T[..., None], y.shape)),
        names=(("batch", "pos", "embed"),) * 3,
    ),
    Case(
        "broadcast_arrays",
        (f("batch"), f("embed")),
        lambda x, y: axn.broadcast_arrays(x, y, require_subset=False),
        lambda x, y: (np.broadcast_to(x, (8, 8)), np.broadcast_to(y[:, None], (8, 8))),
        label="outer",
        names=(("embed", "batch"),) * 2,
    ),
    Case(
        "broadcast_arrays",
        (f("embed", "batch"), f("batch", "pos", "embed")),
        lambda x, y: axn.broadcast_arrays(x, None, y, ensure_order=False)[::2],
        lambda x, y: (np.broadcast_to(x, (4, 8, 8)), y),
        label="any-order",
        names=(("pos", "embed", "batch"), ("batch", "pos", "embed")),
    ),
]

SHAPING = [
    Case(
        "rename",
        (f("batch", "embed"),),
        lambda x: axn.rename(x, {"batch": "row", "embed": Axis("col", 8)}),
        lambda x: x,
        names=("row", "col"),
    ),
    Case(
        "flatten_axes",
        (f("pos", "batch", "embed"),),
        lambda x: axn.flatten_axes(x, ("batch", "embed"), "flat"),
        lambda x: x.reshape(4, 64),
        names=("pos", "flat"),
    ),
    Case(
        "flatten_axes",
        (f("pos", "batch", "embed"),),
        lambda x: axn.flatten_axes(x, ("embed", "pos"), Axis("flat", 32)),
        lambda x: np.transpose(x, (2, 0, 1)).reshape(32, 8),
        label="transposed",
        names=("flat", "batch"),
    ),
    Case(
        "flatten",
        (f("batch", "embed"),),
        lambda x: axn.flatten(x, "flat"),
        lambda x: x.reshape(64),
        names=("flat",),
        layout=False,
    ),
    Case(
        "unflatten_axis",
        (f("pos", "batch", "embed"),),
        lambda x: axn.unflatten_axis(x, "batch", ("batch", Axis("inner", 2))),
        lambda x: x.reshape(4, 4, 2, 8),
        names=("pos", "batch", "inner", "embed"),
    ),
    Case(
        "unbind",
        (f("batch", "pos", "embed"),),
        lambda x: axn.unbind(x, "pos"),
        lambda x: tuple(x[:, i] for i in range(4)),
        names=(("batch", "embed"),) * 4,
    ),
    Case(
        "unbind",
        (f("batch", "embed"),),
        lambda x: axn.unbind(x, "batch"),
        tuple,
        label="sharded-axis",
        names=(("embed",),) * 8,
    ),
    Case(
        "split",
        (f("batch", "embed"),),
        lambda x: axn.split(x, "batch", (Axis("batch", 4), Axis("rest", 3), Axis("last", 1))),
        lambda x: (x[:4], x[4:7], x[7:]),
        names=(("batch", "embed"), ("rest", "embed"), ("last", "embed")),
    ),
]

JOINING = [
    Case(
        "stack",
        (f("batch", "embed"), f("embed", "batch")),
        lambda x, y: axn.stack([x, y], "pair"),
        lambda x, y: np.stack([x, y.T]),
        names=("pair", "batch", "embed"),
    ),
    Case(
        "concatenate",
        (f("batch", "embed"), f("embed", "batch")),
        lambda x, y: axn.concatenate([x, y], "batch"),
        lambda x, y: np.concatenate([x, y.T]),
        names=("batch", "embed"),
    ),
    Case(
        "pad",
        (f("batch", "embed"),),
        lambda x: axn.pad(x, {"batch": (1, 3), "embed": 2}, constant_values=0.5),
        lambda x: np.pad(x, ((1, 3), (2, 2)), constant_values=0.5),
        names=("batch", "embed"),
    ),
    Case(
        "pad",
        (f("batch", "embed"),),
        lambda x: axn.pad(x, {"embed": (1, 2)}, constant_values=(1, 2)),
        lambda x: np.pad(x, ((0, 0), (1, 2)), constant_values=(1, 2)),
        label="two-values",
        names=("batch", "embed"),
    ),
    Case(
        "pad",
        (f("batch", "embed"),),
        lambda x: axn.pad(x, {"embed": (3, 1)}, mode="reflect", reflect_type="odd"),
        lambda x: np.pad(x, ((0, 0), (3, 1)), mode="reflect", reflect_type="odd"),
        label="reflect",
        names=("batch", "embed"),
    ),
    Case(
        "pad_left",
        (f("batch", "embed"),),
        lambda x: axn.pad_left(x, "batch", Axis("longer", 12), value=2.0),
        lambda x: np.pad(x, ((4, 0), (0, 0)), constant_values=2.0),
        names=("longer", "embed"),
    ),
    Case(
        "repeat",
        (f("batch", "embed"),),
        lambda x: axn.repeat(x, 3, "batch"),
        lambda x: np.repeat(x, 3, axis=0),
        names=("batch", "embed"),
    ),
    Case(
        "repeat",
        (f("batch", "pos"), of("index", "pos")),
        lambda x, n: axn.repeat(x, n, "pos", total_repeat_length=8),
        lambda x, n: np.concatenate([r := np.repeat(x, n, axis=1), np.repeat(r[:, -1:], 8 - r.shape[1], axis=1)], 1),
        label="array",
        names=("batch", "pos"),
    ),
    Case(
        "tile",
        (f("batch", "embed"),),
        lambda x: axn.tile(x, {"embed": 2, "copy": 3}),
        lambda x: np.tile(x, (3, 1, 2)),
        names=("copy", "batch", "embed"),
    ),
    Case(
        "roll",
        (f("batch", "embed"),),
        lambda x: axn.roll(x, 3, "batch"),
        lambda x: np.roll(x, 3, 0),
        names=("batch", "embed"),
    ),
    Case(
        "roll",
        (f("batch", "embed"),),
        lambda x: axn.roll(x, (1, -2), ("embed", "batch")),
        lambda x: np.roll(x, (1, -2), (1, 0)),
        label="several",
        names=("batch", "embed"),
    ),
    Case(
        "roll",
        (f("batch", "embed"), of("index")),
        lambda x, n: axn.roll(x, (n, 1), ("batch", "embed")),
        lambda x, n: np.roll(x, (int(n), 1), (0, 1)),
        label="traced",
        names=("batch", "embed"),
        grad=False,
    ),
    Case(
        "flip",
        (f("batch", "embed"),),
        lambda x: axn.flip(x, "batch"),
        lambda x: x[::-1],
        names=("batch", "embed"),
    ),
    Case("flip", (f("batch", "embed"),), axn.flip, jnp.flip, label="all", names=("batch", "embed")),
]

CASES = [*REARRANGE, *BROADCASTING, *SHAPING, *JOINING]
