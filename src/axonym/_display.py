"""Arrays in HTML, for notebooks: names, sizes, bytes on each device, and a picture with cuts.

Nothing is computed for it, and nothing is waited for. Notebooks that are not trusted drop styles and pictures, so the
text says everything.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from .core.errors import describe_bytes
from .core.html import COLORS, STYLE, Html, Words, code, cuts, element, joined, light_dark
from .core.html_tree import array_tree
from .distribution.mesh_axes import mesh_axes, padded, shard_count
from .named_array import NamedArray, describe_array, raw, small_values
from .sharding.leaves import Leaf
from .sharding.placement import present_sharding

_VALUES = 1000
"""Values of arrays with up to this many elements are in the output, folded."""
_LARGE, _SMALL = (92, 46), (46, 22)
"""The width and the height of a picture, for an array and in a tree."""

# `!important` is against the styles that notebooks have for outputs.
_STYLE = f"""{STYLE}
svg {{ flex: none }} .held {{ fill: var(--fill) }} .empty {{ fill: var(--empty) }}
.line {{ fill: none; stroke: var(--mid) }} {" ".join(f".cut{i} {{ stroke: var(--m{i}) }}" for i in range(6))}
.tree {{ padding: 0 !important; margin: 0 }} .tree ul {{ padding-left: 18px !important }} .tree li {{ margin: 0 }}
.tree, .tree ul {{ list-style: none !important }} code {{ background: none !important; padding: 0 !important }}
thead, tr {{ background: none !important }} code, pre, table {{ font-size: 13px !important }}
pre {{ overflow-x: auto }} summary {{ cursor: pointer }}
p {{ margin: 4px 0 !important }} th, td {{ text-align: left !important }} [class^=cut] {{ stroke-width: 2 }}
.tree .name {{ flex: 0 1 calc(220px - 24px * var(--depth, 0)) }}"""
_SCHEMES = (
    "[data-jp-theme-light=false] .axn, .vscode-dark .axn, "
    ".vscode-high-contrast:not(.vscode-high-contrast-light) .axn, html[theme=dark] .axn { color-scheme: dark }"
)


@dataclasses.dataclass(frozen=True)
class ShownArray:
    """An array of any kind, and where it lies."""

    path: str
    kind: str
    """Its dtype."""
    axes: tuple[str | None, ...]
    sizes: tuple[int, ...]
    over: tuple[tuple[str, ...], ...]
    """The mesh axes that each axis is sharded over."""
    mesh: Mapping[str, int]
    total: int
    """The bytes of the whole array."""
    bytes: int
    """The bytes on each device."""
    copies: int
    """The number of devices with the same shard; 0 if it is on none."""
    where: str
    """The devices, or why there are none."""
    devices: frozenset[Any] = frozenset()
    """The devices; none if they are not known."""

    def __str__(self) -> str:
        cells = [
            f"{'' if n is None else f'{n}='}{size}{'/' if over else ''}{'+'.join(over)}"
            for n, size, over in zip(self.axes, self.sizes, self.over, strict=True)
        ]
        return f"{self.kind}[{', '.join(cells)}]"

    def lies(self) -> str:
        """Say how many bytes are where: `16 KiB of 128 KiB on each of 8 CPU devices, 2 copies along model`."""
        if not self.copies:
            return f"{describe_bytes(self.total)}, {self.where}"
        return ", ".join(filter(None, (self.held(), self.replicated())))

    def held(self) -> str:
        """Say how many bytes each device holds: `16 KiB of 128 KiB on each of 8 CPU devices`."""
        size = describe_bytes(self.bytes) + (f" of {describe_bytes(self.total)}" if self.bytes != self.total else "")
        return f"{size} on {self.where}"

    def replicated(self) -> str:
        """Say how many devices have the same shard, or why no device has one: `2 copies along model`."""
        if self.copies < 2:
            return "" if self.copies else self.where
        along = [a for a, n in self.mesh.items() if n > 1 and not any(a in over for over in self.over)]
        return f"{self.copies} copies{' along ' if along else ''}{' and '.join(along)}"

    def line(self, words: Words, said: str, size: tuple[int, int]) -> Html:
        """Write the picture, the axes, and the description of the array."""
        described = words.placed(self.axes, self.sizes, self.over, self.kind)
        return joined([self._picture(*size), described, element("span", words.said(said), class_="soft")], " ")

    def _picture(self, width: int, height: int) -> Html:
        """Draw the array: the columns are the last sharded axis, or the last axis, and the rows are the others."""
        sharded = [i for i, axes in enumerate(self.over) if axes]
        columns = sharded[-1] if len(sharded) > 1 or sharded == [len(self.sizes) - 1] else len(self.sizes) - 1
        rows = tuple(a for i, axes in enumerate(self.over) for a in axes if i != columns)
        height = {0: 18, 1: 18}.get(len(self.sizes), height)
        width = width if self.sizes else height
        over = (rows, self.over[columns] if self.over else ())
        drawn = cuts((1, 1), (width - 2, height - 2), over, self.mesh)
        if not self.copies:  # no device holds anything of it
            drawn = [part for part in drawn if 'class="held"' not in part]
        return element("svg", *drawn, width=width, height=height, aria_hidden="true")


def shown_array(leaf: Leaf) -> ShownArray:
    """Describe an array without looking at its values."""
    sharding = present_sharding(leaf.value)
    array = raw(leaf.value)
    if isinstance(array, Tracer):
        return placed_array(leaf, None, "being traced")
    if isinstance(array, jax.Array) and array.is_deleted():
        return placed_array(leaf, None, "deleted, or donated to a function")
    kinds = {np.ndarray: "on the host", jax.ShapeDtypeStruct: "abstract"}
    return placed_array(leaf, sharding, kinds.get(type(array), "not on a device"))


def placed_array(leaf: Leaf, sharding: Sharding | None, otherwise: str) -> ShownArray:
    """Describe how an array lies by a sharding, or say `otherwise` in its place."""
    array, shape = raw(leaf.value), leaf.shape or ()
    names = leaf.names if leaf.names is not None and len(leaf.names) == len(shape) else (None,) * len(shape)
    itemsize = getattr(array.dtype, "itemsize", 0)
    nowhere: tuple[tuple[str, ...], ...] = ((),) * len(shape)
    total = math.prod(shape) * itemsize
    if sharding is None:
        return ShownArray(leaf.path, str(array.dtype), names, shape, nowhere, {}, total, total, 0, otherwise)
    if isinstance(sharding, NamedSharding):
        mesh = dict(sharding.mesh.shape)
        over = tuple(mesh_axes(entry) for entry in padded(sharding.spec, len(shape)))
        shards = [shard_count(sharding.mesh, axes) for axes in over]
        held = math.prod(-(-size // n) for size, n in zip(shape, shards, strict=True)) * itemsize
        count, of_them = math.prod(mesh.values()), math.prod(shards)
    else:
        mesh, over, count = {}, nowhere, len(sharding.device_set)
        held = math.prod(sharding.shard_shape(shape)) * itemsize
        of_them = total // (held or 1)
    copies, held_by = max(1, count // max(1, of_them)), devices_of(sharding)
    where, known = describe_each_of(held_by) + _memory_of(sharding), not isinstance(held_by, range)
    devices = frozenset(held_by) if known else frozenset[Any]()
    return ShownArray(leaf.path, str(array.dtype), names, shape, over, mesh, total, held, copies, where, devices)


def array_html(x: NamedArray) -> str:
    """Return a named array of any kind in HTML; its values are folded, and only there if they are at hand."""
    shape = getattr(x.array, "shape", None)
    if shape is None or isinstance(x.array, NamedArray) or not hasattr(x.array, "dtype") or len(shape) != len(x.names):
        return styled(code(describe_array(x)))
    shown = shown_array(Leaf((), x, x.names, tuple(shape)))
    return styled(element("div", shown.line(Words(shown.mesh), shown.lies(), _LARGE), class_="leaf"), _values(x.array))


def tree_html(arrays: Sequence[ShownArray], words: Words) -> Html:
    """Write arrays as a tree, with the bytes and the shards of each."""
    return array_tree(
        arrays, lambda x: x.line(words, x.replicated(), _SMALL), "axonym.debug.describe_shardings has them"
    )


def styled(*parts: str | None) -> str:
    """Return HTML for a notebook, with its style."""
    return element("div", element("style", _notebook_style()), *parts, class_="axn")


@functools.lru_cache(maxsize=1)
def _notebook_style() -> Html:
    used = sorted({name for name in re.findall(r"var\(--(\w+)\)", _STYLE) if name in COLORS})
    style = f".axn {{ color-scheme: light; {light_dark(*used)} }} {_SCHEMES} .axn {{ {_STYLE} }}"
    return Html(" ".join(style.split()))


def _values(array: Any) -> Html | None:
    is_there = isinstance(array, jax.Array) and not isinstance(array, Tracer) and not array.is_deleted()
    if is_there and not getattr(array, "is_ready", lambda: True)():  # which arrays of keys lack
        return None
    values = small_values(array, _VALUES)
    return None if values is None else element("details", element("summary", "values"), element("pre", values))


# --- devices ---


def describe_devices(devices: Iterable[Any]) -> str:
    """Return the numbers of devices, such as `0-3,6`.

    With several hosts, a number counts the devices of a host, and follows the number of the host: `0:0-3 1:0-3`. On an
    `AbstractMesh`, a device is its position in the mesh, a plain number.

    >>> axn.debug.describe_devices(jax.devices()[:3])
    '0-2'
    """
    devices = list(devices)
    if jax.process_count() == 1 or any(isinstance(device, int) for device in devices):
        return _runs(device if isinstance(device, int) else device.id for device in devices)
    by_host: dict[int, list[int]] = {}
    for device in devices:
        ids = sorted(d.id for d in jax.local_devices(device.process_index, device.platform))
        by_host.setdefault(device.process_index, []).append(ids.index(device.id))
    return " ".join(f"{host}:{_runs(numbers)}" for host, numbers in sorted(by_host.items()))


def _runs(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for i in sorted(numbers):
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def describe_device(device: Any) -> str:
    """Return the platform and the number of a device: `CPU 0`."""
    return f"{_kind(device)} {describe_devices([device])}"


def _kind(device: Any) -> str:
    return "device" if isinstance(device, int) else device.platform.upper()


def devices_of(sharding: Sharding) -> Collection[Any]:
    """Return the devices of a sharding; on an `AbstractMesh`, their positions."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return range(sharding.mesh.size)
    return sharding.device_set


def describe_devices_of(sharding: Sharding) -> str:
    """Describe the devices of a sharding: `8 CPU devices`, or `CPU 0` for a single one."""
    return _counted_devices(devices_of(sharding)) + _memory_of(sharding)


def describe_each_of(devices: Collection[Any]) -> str:
    """Describe where each of some devices holds as much: `each of 8 CPU devices`, or `CPU 0` for a single one."""
    return ("each of " if len(devices) > 1 else "") + _counted_devices(devices)


def _counted_devices(devices: Collection[Any]) -> str:
    if len(devices) == 1:
        return describe_device(*devices)
    kinds = sorted({*map(_kind, devices)} - {"device"})
    return " ".join([str(len(devices)), *([" and ".join(kinds)] if kinds else []), "devices"])


def _memory_of(sharding: Sharding) -> str:
    return ", in pinned host memory" if sharding.memory_kind == "pinned_host" else ""
