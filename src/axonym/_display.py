"""Arrays and trees in HTML, for notebooks: names, sizes, bytes on each device, and a picture with cuts.

Nothing is computed for it, and nothing is waited for. Notebooks that are not trusted drop styles and pictures, so the
text says everything.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from .core.errors import counted, describe_bytes
from .core.html import (
    COLORS,
    STYLE,
    Html,
    Words,
    bar,
    code,
    cuts,
    element,
    folded,
    joined,
    light_dark,
)
from .distribution.mesh_axes import AnyMesh, current_mesh, mesh_axes, padded, shard_count
from .named_array import NamedArray, describe_array, raw, small_values
from .sharding.leaves import Leaf, leaves_of
from .sharding.mapping import is_resource_mapping, normalize_mapping
from .sharding.placement import ParameterOrComputeMapping, Placement, examine, present_sharding
from .sharding.queries import lint_mapping

_VALUES = 1000
"""Values of arrays with up to this many elements are in the output, folded."""
_LARGE, _SMALL = (92, 46), (46, 22)
"""The width and the height of a picture, for an array and in a tree."""

# `!important` is against the styles that notebooks have for outputs.
_STYLE = f"""{STYLE}
.tree {{ padding: 0 !important; margin: 0 }} .tree ul {{ padding-left: 18px !important }} .tree li {{ margin: 0 }}
.tree, .tree ul {{ list-style: none !important }} code {{ background: none !important; padding: 0 !important }}
thead, tr {{ background: none !important }} code, pre, table {{ font-size: 13px !important }}
pre {{ overflow-x: auto }} summary {{ cursor: pointer }}
p {{ margin: 4px 0 !important }} th, td {{ text-align: left !important }}
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
        picture = array_picture(self.sizes, self.over, self.mesh, size, self.copies > 0)
        return joined([picture, described, element("span", words.said(said), class_="soft")], " ")


def array_picture(
    sizes: Sequence[int],
    over: Sequence[Sequence[str]],
    mesh: Mapping[str, int],
    size: tuple[int, int] = _SMALL,
    held: bool = True,
) -> Html:
    """Draw an array: the columns are its last sharded axis, or its last axis, and the rows are the others."""
    sharded = [i for i, axes in enumerate(over) if axes]
    columns = sharded[-1] if len(sharded) > 1 or sharded == [len(sizes) - 1] else len(sizes) - 1
    rows = tuple(a for i, axes in enumerate(over) for a in axes if i != columns)
    height = 18 if len(sizes) < 2 else size[1]
    width = size[0] if sizes else height
    drawn = cuts((1, 1), (width - 2, height - 2), (rows, over[columns] if over else ()), mesh)
    drawn = [part for part in drawn if held or 'class="held"' not in part]
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
    where, known = describe_where(held_by, "each of ") + memory_of(sharding), not isinstance(held_by, range)
    devices = frozenset(held_by) if known else frozenset[Any]()
    return ShownArray(leaf.path, str(array.dtype), names, shape, over, mesh, total, held, copies, where, devices)


def array_html(x: NamedArray) -> str:
    """Return a named array of any kind in HTML; its values are folded, and only there if they are at hand."""
    array, shape = x.array, getattr(x.array, "shape", None)
    if shape is None or isinstance(array, NamedArray) or not hasattr(array, "dtype") or len(shape) != len(x.names):
        return styled(code(describe_array(x)))
    shown, values = shown_array(Leaf((), x, x.names, tuple(shape))), None
    is_there = isinstance(array, jax.Array) and not isinstance(array, Tracer) and not array.is_deleted()
    if not is_there or getattr(array, "is_ready", lambda: True)():  # which arrays of keys lack
        values = small_values(array, _VALUES)
    folded_values = None if values is None else folded("values", element("pre", values))
    line = shown.line(Words(shown.mesh), shown.lies(), _LARGE)
    return styled(element("div", line, class_="leaf"), folded_values)


def styled(*parts: str | None) -> str:
    """Return HTML for a notebook, with its style."""
    return element("div", element("style", _notebook_style()), *parts, class_="axn")


@functools.lru_cache(maxsize=1)
def _notebook_style() -> Html:
    used = sorted({name for name in re.findall(r"var\(--(\w+)\)", _STYLE) if name in COLORS})
    style = f".axn {{ color-scheme: light; {light_dark(*used)} }} {_SCHEMES} .axn {{ {_STYLE} }}"
    return Html(" ".join(style.split()))


# --- trees ---

_OPEN = 2
"""The depth to which parts are shown open."""
_MOST = 600
"""The largest number of arrays that are written."""
_LARGEST_OPEN = 12
"""The largest number of children of a part that is shown open."""


@dataclasses.dataclass
class _TreePart:
    """A part of a tree: an array, or parts by their names."""

    path: str
    children: dict[str, _TreePart] = dataclasses.field(default_factory=dict)
    array: Any = None

    def arrays(self) -> Iterator[Any]:
        if self.array is not None:
            yield self.array
        for child in self.children.values():
            yield from child.arrays()

    def kind(self) -> tuple[object, ...]:
        """Return a value that is equal for parts that are sharded alike."""
        start = len(self.path)
        return tuple((x.path[start:], x.axes, x.sizes, x.over, x.copies) for x in self.arrays())


def array_tree(placed: Iterable[Any], described: Callable[[Any], Html], more: str) -> Html:
    """Write arrays as a tree, as the model is, with the bytes of each part. A part that is sharded as another says so.

    They are a `ShownArray` each, or have the same fields; `described` writes the end of a line, and `more` says where
    the arrays are that are not written, if there are too many.
    """
    root, known, written, left = _TreePart(""), dict[object, str](), 0, 0
    for x in placed:
        part = root
        for name in x.path.split("/"):
            path = f"{part.path}/{name}" if part.path else name
            part = part.children.setdefault(name, _TreePart(path))
        part.array = x
    whole = max((sum(x.bytes for x in part.arrays()) for part in root.children.values()), default=0) or 1

    def items(part: _TreePart, depth: int) -> Iterator[Html]:
        """Yield the children of a part; layers that are alike are one."""
        nonlocal left
        waiting = list(part.children.items())
        while waiting:
            (name, child), *waiting = waiting
            alike = [name]
            while name.isdigit() and waiting and waiting[0][0].isdigit() and waiting[0][1].kind() == child.kind():
                alike.append(waiting.pop(0)[0])
            if written < _MOST:
                yield item(name if len(alike) == 1 else f"{name} to {alike[-1]}", child, depth, len(alike))
            else:
                left += len(alike) * len(child.kind())

    def item(title: str, part: _TreePart, depth: int, count: int) -> Html:
        nonlocal written
        while part.array is None and len(part.children) == 1:
            ((below, part),) = part.children.items()
            title = f"{title}/{below}"
        size, kind = count * sum(x.bytes for x in part.arrays()), part.kind()
        name, number = element("span", code(title), class_="name"), element("span", describe_bytes(size), class_="num")
        line = [name, number, bar(size / whole)]  # with spaces between, for notebooks that drop every style
        same = known.setdefault(kind, part.path) if len(kind) > 1 else part.path
        if same != part.path:
            line.append(element("span", "sharded as ", code(same), class_="soft"))
        elif part.array is not None:
            written += 1
            line.append(described(part.array))
        if same != part.path or not part.children:
            return element("li", element("div", joined(line, " "), class_="leaf"))
        is_open = depth < _OPEN and len(part.children) <= _LARGEST_OPEN
        below = element("ul", *items(part, depth + 1), style=f"--depth:{depth + 1}")
        return element("li", folded(element("span", joined(line, " "), class_="node"), below, open=is_open))

    listed = [*items(root, 0)]
    if left:
        listed.append(element("li", f"and {left} more: {more}", class_="small"))
    return element("ul", *listed, class_="tree")


# --- trees, as `axonym.debug.show` has them ---


def show(tree: Any, mapping: Placement = None, mesh: AnyMesh | None = None) -> Shown:
    """Show the arrays of a model, an optimizer state or any other tree, with the bytes and the shards of each.

    In a notebook, a cell that ends with it shows a tree that opens and closes, with a picture of each array: filled is
    what the first device holds, and a cut has the color of its mesh axis. Elsewhere it is text. Nothing is computed or
    moved.

    Arguments:
        tree: the tree; its arrays may be abstract, as `jax.eval_shape` gives them.
        mapping: a mapping, or another placement, to show where it puts the arrays, and after them what
            `axonym.lint_mapping` finds. For FSDP, the two mappings of `axonym.fsdp`: `(parameter_mapping,
            compute_mapping)`; two mappings always mean that, also for a tree that is a pair. By default, the arrays are
            shown where they lie.
        mesh: the mesh of the mapping; the active one by default.

    >>> mesh = axn.make_mesh({"data": 2, "model": 4})
    >>> model = {"up": axn.ones({"embed": 8, "mlp": 32}), "norm": axn.ones({"embed": 8})}
    >>> axn.debug.show(model, {"mlp": "model", "heads": "model"}, mesh)
    dict: 2 arrays, 1 KiB; 288 B on each of 8 CPU devices
    norm: float32[embed=8], 32 B, 8 copies along data and model
    up: float32[embed=8, mlp=32/model], 256 B, 2 copies along data
    unused: axis 'heads' is in the mapping but not in the tree.
    """
    title = type(tree).__name__
    if mapping is None:
        return Shown(title, tuple(shown_array(leaf) for leaf in leaves_of(tree)[0] if leaf.shape is not None), ())
    mesh = current_mesh() if mesh is None else mesh
    if mesh is None:
        raise ValueError("debug.show: a mapping is shown on a mesh, and none is active: pass `mesh`.")
    given = mapping if isinstance(mapping, tuple) and len(mapping) == 2 else (mapping,)
    mappings = [normalize_mapping(m, "debug.show") for m in given if is_resource_mapping(m)]
    placement = ParameterOrComputeMapping(*mappings) if len(mappings) == 2 else mapping
    examined = examine(tree, placement, mesh, "debug.show")
    wrong = {path for path, _ in examined.problems}
    arrays = tuple(
        shown_array(leaf)
        if leaf.spec is None or leaf.path in wrong
        else placed_array(leaf, NamedSharding(leaf.mesh or mesh, leaf.spec), "")  # pyright: ignore  # any mesh
        for leaf in examined.leaves
        if leaf.shape is not None
    )
    findings = (f"{found.kind}: {found.message}" for found in lint_mapping(tree, placement, mesh))
    return Shown(title, arrays, tuple(dict.fromkeys(findings)))


@dataclasses.dataclass(frozen=True, repr=False)
class Shown:
    """Show a tree, in HTML in a notebook and as text elsewhere; `axonym.debug.show` returns it.

    >>> print(axn.debug.show({"w": axn.ones({"embed": 8})}))
    dict: 1 array, 32 B; 32 B on CPU 0
    w: float32[embed=8], 32 B
    """

    title: str
    """The kind of tree."""
    arrays: tuple[ShownArray, ...]
    findings: tuple[str, ...]
    """The findings of `axonym.lint_mapping`, as texts; empty without a mapping."""

    def __str__(self) -> str:
        lines = (
            ", ".join(filter(None, (f"{x.path}: {x}", describe_bytes(x.bytes), x.replicated()))) for x in self.arrays
        )
        return "\n".join([f"{self.title}: {self._sum()}", *lines, *self.findings])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        words = Words(dict.fromkeys(axis for x in self.arrays for axis in x.mesh))
        more = "axonym.debug.describe_shardings has them"
        tree = array_tree(self.arrays, lambda x: x.line(words, x.replicated(), _SMALL), more)
        findings = [element("p", words.said(found)) for found in self.findings]
        return styled(element("p", element("b", self.title), " ", self._sum()), tree, *findings)

    def _sum(self) -> str:
        total, held = sum(x.total for x in self.arrays), sum(x.bytes for x in self.arrays if x.copies)
        places = {(x.where, x.devices) for x in self.arrays}
        at_one = len(places) == 1 and self.arrays[0].copies
        each = f"; {describe_bytes(held)} on {self.arrays[0].where}" if at_one else ""
        return f"{counted(len(self.arrays), 'array')}, {describe_bytes(total)}{each}"


# --- devices ---


def describe_devices(devices: Iterable[Any]) -> str:
    """Return the numbers of devices, such as `0-3,6`.

    With several hosts, a number counts the devices of a host, and follows the number of the host: `0:0-3 1:0-3`. On an
    `AbstractMesh`, a device is its position in the mesh, a plain number.

    >>> axn.debug.describe_devices(jax.devices()[:3])
    '0-2'
    """
    devices, by_host = list(devices), dict[int, list[int]]()
    for device in devices:
        number, host = device, 0
        if not isinstance(device, int):
            number = device.id
            if jax.process_count() > 1:
                host = device.process_index
                number = sorted(d.id for d in jax.local_devices(host, device.platform)).index(number)
        by_host.setdefault(host, []).append(number)
    written = dict[int, str]()
    for host, numbers in sorted(by_host.items()):
        runs: list[list[int]] = []
        for i in sorted(numbers):
            if runs and i == runs[-1][-1] + 1:
                runs[-1].append(i)
            else:
                runs.append([i])
        written[host] = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    if jax.process_count() == 1 or any(isinstance(device, int) for device in devices):
        return "".join(written.values())
    return " ".join(f"{host}:{text}" for host, text in written.items())


def devices_of(sharding: Sharding) -> Collection[Any]:
    """Return the devices of a sharding; on an `AbstractMesh`, their positions."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return range(sharding.mesh.size)
    return sharding.device_set


def describe_where(devices: Collection[Any], each: str = "") -> str:
    """Describe some devices, after `each` if there are several: `8 CPU devices`, or `CPU 0` for a single one."""
    kinds = sorted({"device" if isinstance(x, int) else x.platform.upper() for x in devices})
    if len(devices) == 1:
        return f"{kinds[0]} {describe_devices(devices)}"
    return each + " ".join([str(len(devices)), *([] if kinds == ["device"] else [" and ".join(kinds)]), "devices"])


def memory_of(sharding: Sharding) -> str:
    """Say where the arrays of a sharding are, if they are not in the memory of devices."""
    return ", in pinned host memory" if sharding.memory_kind == "pinned_host" else ""
