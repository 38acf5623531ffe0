"""Draw the pictures of the pages: `python docs/pictures.py` writes them to `docs/assets/pictures`.

What they show is asked of the library: which device holds which shard, the axes of a result, the collectives of a
compiled program, the pages of `axonym.insight`. Each picture is written twice, for a light and for a dark page. The
tests compare the files with what this script draws.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

import axonym as axn
from axonym import NamedArray, insight
from axonym.core.errors import describe_bytes
from axonym.core.html import COLORS, cuts

FOLDER = Path(__file__).parent / "assets" / "pictures"

# Those of pages and notebooks: m1 to m5 are for mesh axes, and for nothing else.
LIGHT, DARK = ({name: both[i] for name, both in COLORS.items()} for i in (0, 1))


class Picture:
    """A drawing of rectangles, lines and words, with colors that a page's scheme fills in.

    Filled is what the first device holds. A cut between shards has the color of its mesh axis, and so has the name of a
    mesh axis in a text.
    """

    def __init__(self, title: str, width: int, height: int, mesh: Mapping[str, int] | None = None):
        self.title, self.width, self.height, self.mesh = title, width, height, dict(mesh or {})
        self.parts: list[str] = []

    def color(self, axis: str) -> int:
        """Return the number of the color of a mesh axis."""
        return [*self.mesh].index(axis) + 1

    def _words(self, text: str) -> str:
        names = "|".join(map(re.escape, self.mesh)) or "$^"
        colored = re.compile(rf"\b(?:{names})\b(?!-)")
        return colored.sub(lambda m: f'<tspan class="m{self.color(m[0])}">{m[0]}</tspan>', escape(text))

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        kind = f' class="{kind}"' if kind else ""
        place = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}"{kind}{place}>{self._words(text)}</text>')

    def upright(self, x: float, y: float, text: str) -> None:
        """A word that is read from below."""
        turn = f'transform="translate({x:g} {y:g}) rotate(-90)"'
        self.parts.append(f'<text class="small" text-anchor="middle" {turn}>{self._words(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>')

    def path(self, d: str, kind: str) -> None:
        self.parts.append(f'<path d="{d}" class="{kind}"/>')

    def arrow(self, x: float, y: float, length: float) -> None:
        self.path(f"M{x:g} {y:g}h{length:g}m-5 -4l5 4l-5 4", "line")

    def bar(self, x: float, y: float, length: float, axes: Sequence[str]) -> None:
        """A bar for bytes that are sent over mesh axes."""
        for i, axis in enumerate(axes):
            self.box(x + i * length / len(axes), y, length / len(axes), 10, f"m{self.color(axis)}")

    def cuts(self, left: float, top: float, width: float, height: float, over: Sequence[Sequence[str]]) -> None:
        """A rectangle whose rows and columns are sharded over mesh axes."""
        self.parts += cuts((left, top), (width, height), over, self.mesh)

    def svg(self, colors: dict[str, str]) -> str:
        c = colors
        axes = "".join(
            f".m{i}{{fill:{c[f'm{i}']}}}.cut{i}{{fill:none;stroke:{c[f'm{i}']};stroke-width:2}}"
            for i in range(1, len(self.mesh) + 1)
        )
        style = (
            f"text{{font:15px system-ui,sans-serif;fill:{c['text']}}}.code{{font:13px ui-monospace,monospace}}"
            f".small{{font-size:13px}}.soft{{font-size:13px;fill:{c['soft']}}}.on{{font-size:12px;fill:{c['bg']}}}"
            f".id{{font-size:12px}}.head{{font-size:17px}}.head,.strong,tspan{{font-weight:600}}"
            f".line{{fill:none;stroke:{c['mid']};stroke-width:1.5}}"
            f".summed{{fill:none;stroke:{c['fill']};stroke-width:4}}"
            f".held{{fill:{c['fill']}}}.mid{{fill:{c['mid']}}}.pale{{fill:{c['pale']}}}.empty{{fill:{c['empty']}}}"
            f"{axes}"
        )
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img">'
        return "\n".join([head, f"<title>{self.title}</title>", f"<style>{style}</style>", *self.parts, "</svg>\n"])


# --- arrays, as the library places them ---


def drawn(
    picture: Picture, x: NamedArray, left: float, top: float, width: float, height: float, over: bool = False
) -> None:
    """Draw an array of two axes with its cuts, and write the mesh axes beside the names of its axes if asked."""
    sharding = x.array.sharding
    sharded = [(e,) if isinstance(e, str) else tuple(e or ()) for e in (*sharding.spec, None, None)[:2]]
    shape = [
        size // math.prod(picture.mesh[a] for a in axes) for size, axes in zip(x.array.shape, sharded, strict=True)
    ]
    first = sharding.devices_indices_map(x.array.shape)[sharding.mesh.devices.flat[0]]
    assert [s.indices(n)[:2] for s, n in zip(first, x.array.shape, strict=True)] == [(0, n) for n in shape]
    rows, columns = ("/".join((a.name, *axes)) if over else a.name for a, axes in zip(x.axes, sharded, strict=True))
    picture.text(left + width / 2, top - 6, columns, "small", "middle")
    picture.upright(left - 6, top + height / 2, rows)
    picture.cuts(left, top, width, height, sharded)


def named() -> Picture:
    """An array, and the same sharded along one of its axes."""
    x = axn.ones(axn.make_axes(batch=8, embed=16))
    mesh, mapping = axn.make_mesh({"data": 4}, devices=jax.devices()[:4]), {"batch": "data"}
    picture = Picture("An array whose axes have names, whole and sharded over four devices", 520, 150, mesh.shape)
    for left, array in ((26, axn.shard(x, {"batch": None}, mesh)), (356, axn.shard(x, mapping, mesh))):
        drawn(picture, array, left, 28, 140, 84, over=True)
        shard = array.array.addressable_shards[0].data
        picture.text(left + 70, 138, f"{shard.nbytes} B of {array.array.nbytes} B each", "soft", "middle")
    picture.text(256, 62, _mapping(mapping), "code", "middle")
    picture.arrow(236, 76, 40)
    return picture


def hosts() -> Picture:
    """A mesh of the devices of two hosts."""
    mesh = axn.make_mesh({"data": 4, "model": 2})
    picture = Picture("A mesh of eight devices on two hosts, which have four each", 520, 164, mesh.shape)
    left, top, wide, high = 140, 56, 60, 36
    picture.text(left + 2 * wide, 16, "data=4", "small", "middle")
    picture.upright(left - 8, top + high, "model=2")
    picture.cuts(left, top, 4 * wide, 2 * high, [("model",), ("data",)])
    for (column, row), device in np.ndenumerate(mesh.devices):
        kind = "id" if device.id else "on"
        picture.text(left + wide * (column + 0.5), top + high * (row + 0.6), str(device.id), kind, "middle")
    for host in range(2):
        side = left + 2 * wide * host
        picture.path(f"M{side + 3} {top - 6}v-6h{2 * wide - 6}v6", "line")
        picture.text(side + wide, top - 18, f"host {host}", "small", "middle")
    picture.text(260, 156, "A host reads the rows of the batch whose shards its own devices hold.", "soft", "middle")
    return picture


def placement() -> Picture:
    """Two arrays that one mapping places on a mesh."""
    Batch, Embed, Mlp = axn.make_axes(batch=8, embed=16, mlp=32)
    mesh, mapping = axn.make_mesh({"data": 4, "model": 2}), {"batch": "data", "mlp": "model"}
    x, w = axn.shard((axn.ones((Batch, Embed)), axn.ones((Embed, Mlp))), mapping, mesh)
    title = "A mesh of eight devices, and two arrays of which the first device holds the filled shards"
    picture = Picture(title, 520, 220, mesh.shape)
    picture.text(72, 24, "the mesh", anchor="middle")
    picture.text(72, 58, "model=2", "small", "middle")
    picture.upright(26, 128, "data=4")
    picture.cuts(34, 66, 76, 122, [("data",), ("model",)])
    for (row, column), device in np.ndenumerate(mesh.devices):
        kind = "id" if device.id else "on"
        picture.text(53 + 38 * column, 86 + 30.5 * row, str(device.id), kind, "middle")
    for left, array, name in ((178, x, "x"), (358, w, "w")):
        picture.text(left + 70, 24, name, "code", "middle")
        drawn(picture, array, left, 66, 140, 122, over=True)
    picture.text(260, 214, _mapping(mapping), "code", "middle")
    return picture


def mappings() -> Picture:
    """One program under three mappings: where its arrays lie, and what it sends."""
    Batch, Embed, Mlp = axn.make_axes(batch=8, embed=16, mlp=32)
    x, up, down = axn.ones((Batch, Embed)), axn.ones((Embed, Mlp)), axn.ones((Mlp, Embed))

    def program(x: NamedArray, up: NamedArray, down: NamedArray) -> tuple[NamedArray, NamedArray]:
        h = axn.dot(x, up, axis="embed")
        return h, axn.dot(h, down, axis="mlp")

    mesh = axn.make_mesh({"data": 2, "model": 2}, devices=jax.devices()[:4])
    picture = Picture("One program under three mappings", 520, 486, mesh.shape)
    for y, line in ((18, 'h = axn.dot(x, up, axis="embed")'), (38, 'y = axn.dot(h, down, axis="mlp")')):
        picture.text(260, y, line, "code", "middle")
    top = 74
    for mapping in ({"batch": ("data", "model")}, {"mlp": ("data", "model")}, {"batch": "data", "mlp": "model"}):
        with jax.set_mesh(mesh):
            placed = axn.shard((x, up, down), mapping)
            compiled = axn.named_jit(program, mapping).lower(*placed).compile()
            h, y = jax.block_until_ready(compiled(*placed))
        sent = [kind for kind in ("all-reduce", "all-gather", "all-to-all") if f" {kind}(" in compiled.as_text()]
        picture.text(8, top, _mapping(mapping), "code")
        picture.text(512, top, f"sends: {', '.join(sent) or 'nothing'}", "soft", "end")
        for i, (name, array) in enumerate(
            zip(("x", "up", "h", "down", "y"), (*placed[:2], h, placed[2], y), strict=True)
        ):
            left = 26 + 102 * i
            drawn(picture, array, left, top + 32, 76, 60)
            picture.text(left + 38, top + 110, name, "code", "middle")
        top += 142
    return picture


# --- the layer of the home page ---

BOTH = ("data", "model")
HOME: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "home-data": ("Data parallel", {"batch": BOTH}, {}),
    "home-tensor": ("Data and tensor parallel", {"batch": "data", "mlp": "model"}, {}),
    "home-fsdp": ("Fully sharded (FSDP)", {"batch": BOTH}, {"embed": BOTH}),
}
"""The titles of three mappings, and each with what it stores otherwise."""


def layer(x: NamedArray, up: NamedArray, down: NamedArray) -> tuple[NamedArray, NamedArray]:
    """The layer of the home page, which returns its hidden features too."""
    h = axn.tanh(axn.dot(x, up, axis="embed"))
    return h, axn.dot(h, down, axis="mlp")


@functools.cache
def home_report(name: str, by: str = "names", batch: int = 4096) -> insight.Report:
    """The report of a training step of the layer under a mapping of the home page."""
    Batch, Embed, Mlp = axn.make_axes(batch=batch, embed=1024, mlp=4096)
    shapes = {"up": (Embed, Mlp), "down": (Mlp, Embed)}
    weights, x = jax.eval_shape(lambda: ({n: axn.ones(axes) for n, axes in shapes.items()}, axn.ones((Batch, Embed))))

    def step(weights: Any, x: NamedArray) -> Any:
        gradients = axn.grad(lambda w: axn.mean(layer(x, **w)[1] ** 2))(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    _, mapping, stored = HOME[name]
    mesh = axn.make_mesh({"data": 4, "model": 2})
    return insight.explain(step, weights, x, mesh=mesh, mapping=(stored, mapping) if stored else mapping, by=by)


def sent_at_home(report: insight.Report) -> dict[tuple[str, tuple[str, ...]], int]:
    """Return the bytes that each device sends in a step, by a description and its mesh axes."""
    found: dict[tuple[str, tuple[str, ...]], int] = {}
    for c in report.collectives:
        what = "weights" if c.kind == "all-gather" else "gradients" if c.phase == "backward" else "y"
        key = f"of {what} ({c.kind})", tuple(c.axes or ())
        found[key] = found.get(key, 0) + (c.total_sent or 0)
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def home(name: str) -> Picture:
    """Draw the layer of the home page under one mapping: where each array lies, and the bytes that a step sends."""
    head, mapping, stored = HOME[name]
    report = home_report(name)
    weights, sent = describe_bytes(report.arguments["weights"]), sent_at_home(report)
    said = [f"{describe_bytes(size)} {what} over {' and '.join(axes)}" for (what, axes), size in sent.items()]
    title = f"{head}: each of 8 devices holds {weights} of weights and sends {', '.join(said)}"

    mesh = axn.make_mesh({"data": 4, "model": 2})
    picture = Picture(title, 370, 322, mesh.shape)
    picture.text(0, 18, head, "head")
    picture.text(0, 40, _mapping(mapping), "code")
    if stored:
        picture.text(0, 59, f"stored: {_mapping(stored)}", "code")
    Batch, Embed, Mlp = axn.make_axes(batch=16, embed=16, mlp=16)  # the sizes do not decide where arrays lie
    with jax.set_mesh(mesh):
        x, up, down = axn.shard((axn.ones((Batch, Embed)), axn.ones((Embed, Mlp)), axn.ones((Mlp, Embed))), mapping)
        h, y = jax.block_until_ready(axn.named_jit(layer, mapping)(x, up, down))
        up, down = axn.shard((up, down), mapping | stored) if stored else (up, down)
    length, middle, left = {"batch": 84, "embed": 34, "mlp": 54}, 136, 18.0
    for label, array, after in (
        ("x", x, "\u00b7"),
        ("up", up, ">"),
        ("h", h, "\u00b7"),
        ("down", down, ">"),
        ("y", y, ""),
    ):
        height, width = (length[n] for n in array.names)
        drawn(picture, array, left, middle - height / 2, width, height)
        picture.text(left + width / 2, middle + height / 2 + 16, label, "code", "middle")
        left += width
        if after == ">":
            picture.arrow(left + 4, middle, 14)
        else:
            picture.text(left + 7, middle + 5, after)
        left += 37 if after == ">" else 31
    picture.text(0, 216, f"Each device holds {weights} of weights and sends", "soft")
    most = max(
        size for other in HOME for size in sent_at_home(home_report(other)).values()
    )  # pictures stand side by side
    for i, ((what, axes), size) in enumerate(sent.items()):
        picture.text(0, 241 + 46 * i, f"{describe_bytes(size)} {what}", "strong")
        length = 170 * size / most
        picture.bar(0, 251 + 46 * i, length, axes)
        picture.text(length + 8, 260 + 46 * i, f"over {' and '.join(axes)}", "small")
    return picture


def batches() -> Picture:
    """Draw the bytes that the layer of the home page sends under its mappings, for two sizes of the batch."""
    picture = Picture(
        "What three mappings send with few rows in a batch, and with many", 520, 196, {"data": 4, "model": 2}
    )
    sizes = (4096, 65536)
    most = max(sum(sent_at_home(home_report(name, batch=batch)).values()) for name in HOME for batch in sizes)
    for left, batch in zip((4, 264), sizes, strict=True):
        picture.text(left, 18, f"batch={batch}")
        for i, (name, (head, *_)) in enumerate(HOME.items()):
            top, at = 44 + 52 * i, float(left)
            sent: dict[tuple[str, ...], int] = {}
            for (_, axes), size in sent_at_home(home_report(name, batch=batch)).items():
                sent[axes] = sent.get(axes, 0) + size
            picture.text(left, top, head, "small")
            for axes, size in sent.items():
                picture.bar(at, top + 8, 220 * size / most, axes)
                at += 220 * size / most
            said = [f"{describe_bytes(size)} over {' and '.join(axes)}" for axes, size in sent.items()]
            picture.text(left, top + 33, ", ".join(said), "small")
    return picture


# --- a contraction: names meet, positions do not ---


def contraction() -> Picture:
    """Three arrays with a line for each axis; the axis that is summed over joins two of them."""
    Batch, Pos, Embed, Mlp = axn.make_axes(batch=4, pos=6, embed=8, mlp=16)
    x, w = axn.ones((Batch, Pos, Embed)), axn.ones((Embed, Mlp))
    query, key = x, x.rename({"pos": "key_pos"})
    picture = Picture("Two contractions: the axis that is summed over joins two arrays", 520, 330)
    for top, (first, second), (a, b) in ((30, ("x", "w"), (x, w)), (190, ("query", "key"), (query, key))):
        result = axn.dot(a, b, axis="embed")
        picture.text(8, top, f'axn.dot({first}, {second}, axis="embed")', "code")
        for side, array in ((-1, a), (1, b)):
            middle = 260 + 90 * side
            own = [n for n in array.names if n != "embed"]
            for i, axis in enumerate(own):
                y = top + 62 + 34 * (i - (len(own) - 1) / 2)
                end = middle + 76 * side
                picture.path(f"M{middle} {top + 62}L{end} {y:g}h{24 * side}", "line")
                picture.text(end + 30 * side, y + 5, axis, "small", "end" if side < 0 else "start")
        picture.path(f"M170 {top + 62}H350", "summed")
        picture.text(260, top + 52, "embed", "strong small", "middle")
        picture.text(260, top + 84, "summed over", "soft", "middle")
        for side, name in ((-1, first), (1, second)):
            picture.box(260 + 90 * side - 32, top + 44, 64, 36, "empty")
            picture.path(f"M{260 + 90 * side - 32} {top + 44}h64v36h-64z", "line")
            picture.text(260 + 90 * side, top + 67, name, "code", "middle")
        kept = ", ".join(f"{n}={size}" for n, size in result.shape.items())
        shared = [n for n in a.names if n in b.names and n in result.names]
        note = f"; both have {' and '.join(shared)}, which is matched" if shared else ""
        picture.text(260, top + 122, f"gives ({kept}){note}", "small", "middle")
    return picture


# --- a step of fully sharded data parallelism ---


def fsdp() -> Picture:
    """What each of four devices holds of a weight, from its storage to its update."""
    Batch, Embed, Mlp = axn.make_axes(batch=8, embed=16, mlp=32)
    x, params = axn.ones((Batch, Embed)), {"up": axn.ones((Embed, Mlp)), "down": axn.ones((Mlp, Embed))}

    def loss(params: Any, x: NamedArray) -> NamedArray:
        return axn.mean(axn.dot(axn.tanh(axn.dot(x, params["up"], axis="embed")), params["down"], axis="mlp") ** 2)

    def step(params: Any, x: NamedArray) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, axn.grad(loss)(params, x))

    mesh = axn.make_mesh({"data": 4}, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        compiled = axn.fsdp(step, {"embed": "data"}, {"batch": "data"}).lower(params, x).compile()
        stored = axn.shard(params, {"embed": "data"})["up"]
        rows = axn.shard(x, {"batch": "data"})
        report = insight.explain(step, params, x, mapping=({"embed": "data"}, {"batch": "data"}), by="names")
    text = compiled.as_text()
    assert " all-gather(" in text and " reduce-scatter(" in text and " all-reduce(" not in text
    sent = {c.kind: describe_bytes(c.sent or 0) for c in report.collectives}

    picture = Picture("What the first of four devices holds of a weight in a step of FSDP", 520, 194, mesh.shape)
    width, height, top = 72, 64, 58
    for left, head, below, array in (
        (26, "storage", "w", stored),
        (162, "compute", "w", params["up"]),
        (298, "compute", "gradient of w", params["up"]),
        (438, "storage", "w, updated", stored),
    ):
        picture.text(left + width / 2, 18, head, "", "middle")
        picture.text(left + width / 2, top + height + 18, below, "small", "middle")
        if array is stored:
            drawn(picture, array, left, top, width, height, over=True)
        else:
            picture.cuts(left, top, width, height, [(), ()])
    drawn(picture, rows, 264, top, 18, height, over=True)
    picture.text(273, top + height + 18, "x", "small", "middle")
    for left, name in ((102, "all-gather"), (374, "reduce-scatter")):
        picture.arrow(left + 4, top + height / 2, 38)
        picture.text(left + 22, top + height / 2 - 10, sent[name], "small", "middle")
        picture.text(left + 22, top + height + 38, name, "small", "middle")
    picture.text(260, 188, "Filled is what the first of four devices along data holds.", "soft", "middle")
    return picture


# --- times ---


def slow() -> Picture:
    """The least times of the step of the page about slow steps, with a median and with a mean."""
    names = definitions("slow_step", 1)
    step, mesh = names["step"], names["mesh"]
    args = names["weights"], names["x"]
    title = "The least times of a step: with a median it waits for sending over data, with a mean for computing"
    picture = Picture(title, 520, 258, mesh.shape)
    bounds = {}
    for center in ("median", "mean"):
        fn = functools.partial(step, center=getattr(axn, center))
        report = insight.explain(fn, *args, mapping=names["mapping"], mesh=mesh, chip="v5e")
        assert report.bounds is not None
        bounds[center] = report.bounds
    longest = max(each.longest for each in bounds.values())
    top = 18
    for center, each in bounds.items():
        picture.text(0, top, f"center=axn.{center}", "code")
        picture.text(512, top, f"at least {1e6 * each.longest:.0f} us: {each.bottleneck}", "strong", "end")
        rows = {("compute",): each.compute, ("memory",): each.memory}
        rows |= {axes: seconds for axes, seconds in each.links.items() if len(axes) == 1}
        for i, (what, seconds) in enumerate(rows.items()):
            y, length = top + 14 + 24 * i, round(320 * seconds / longest)
            over = [*what] if what[0] in mesh.shape else []
            picture.text(140, y + 10, f"sending over {what[0]}" if over else what[0], "small", "end")
            if over:
                picture.bar(148, y, length, over)
            else:
                picture.box(148, y, length, 10, "mid")
            picture.text(156 + length, y + 10, f"{1e6 * seconds:.0f} us", "small")
        top += 134
    return picture


# --- fields ---


def heat() -> Picture:
    """The heat equation of the page about fields: three of its states, and what a device sends for a step."""
    X, Y = axn.make_axes(x=32, y=16)
    mesh, mapping = axn.make_mesh({"cols": 4, "rows": 2}), {"x": "cols", "y": "rows"}

    def step(u: NamedArray) -> NamedArray:
        spread = axn.stencil(lambda u: u(x=-1) + u(x=1) + u(y=-1) + u(y=1) - 4 * u(), {"x": "periodic", "y": 0.0})
        return u + 0.2 * spread(u)

    hot = axn.zeros((X, Y)).at["x", 8:16, "y", 4:8].set(100.0)
    many = jax.jit(lambda u, n: jax.lax.fori_loop(0, n, lambda i, u: step(u), u))
    picture = Picture(
        "The temperature at three times, and what a device sends to its neighbors in a step", 520, 318, mesh.shape
    )
    cell = 5.0
    for i, steps in enumerate((0, 20, 100)):
        left, top = 6 + 174 * i, 28
        picture.text(left + 80, 18, f"{steps} steps", "small", "middle")
        picture.box(left, top, 32 * cell, 16 * cell, "empty")
        # Bands of gray: cells above a temperature, from thin to dense.
        values = np.asarray(many(hot, steps).rearrange(("y", "x")).array)
        for level, shade in ((2, "pale"), (10, "mid"), (40, "held")):
            for row, column in np.argwhere(values > level):
                start = column == 0 or values[row, column - 1] <= level
                if start:
                    rest = values[row, column:] <= level
                    length = int(np.argmax(rest)) if rest.any() else 32 - int(column)
                    picture.box(left + cell * column, top + cell * row, cell * length, cell, shade)
        for line in range(1, 4):
            picture.path(f"M{left + 40 * line} {top}v80", "cut1")
        picture.path(f"M{left} {top + 40}h160", "cut2")
        picture.path(f"M{left} {top}h160v80h-160z", "line")
    picture.text(
        260,
        126,
        "from inside to outside: above 40, 10 and 2 degrees; cut by cols and rows",
        "soft",
        "middle",
    )

    report = axn.insight.explain(step, hot, mesh=mesh, mapping=mapping, by="names")
    left, top, width, height = 160, 168, 200, 100
    picture.box(left, top, width, height, "empty")
    picture.path(f"M{left} {top}h{width}v{height}h{-width}z", "line")
    x, y = ([c for c in report.collectives if axis in (c.axes or ())] for axis in ("cols", "rows"))
    for c, (at, toward) in zip(x, ((left + width - 12, 1), (left, -1)), strict=True):
        picture.box(at, top, 12, height, "m1")
        middle, end = top + height / 2, left + width if toward > 0 else left
        picture.path(f"M{end} {middle}h{44 * toward}m{-5 * toward} -4l{5 * toward} 4l{-5 * toward} 4", "line")
        picture.text(end + 50 * toward, middle + 5, f"{c.sent} B over cols", "small", "start" if toward > 0 else "end")
    for c, (at, toward) in zip(y, ((top + height - 12, 1), (top, -1)), strict=True):
        picture.box(left, at, width, 12, "m2")
        middle, end = left + width / 2, top + height if toward > 0 else top
        picture.path(f"M{middle} {end}v{18 * toward}m-4 {-5 * toward}l4 {5 * toward}l4 {-5 * toward}", "line")
        picture.text(middle + 10, end + (16 if toward > 0 else -8), f"{c.sent} B over rows", "small")
    picture.text(left + width / 2, top + height / 2 + 5, "a shard: x=8, y=8", "small", "middle")
    picture.text(
        260, 312, "To each neighbor, a device sends the row or column of its shard beside it.", "soft", "middle"
    )
    return picture


def peers() -> Picture:
    """Draw what a training step costs with each library, relative to plain JAX, as `docs/peers.py` has measured."""
    recorded = json.loads((FOLDER.parent.parent / "peers.json").read_text())["figures"]
    shown = {
        "calling a step with small arrays": ("step", "call"),
        "tracing and lowering a step": ("step", "trace"),
        "bytes that a sharded step sends": ("sharded_step", "moved"),
    }
    picture = Picture("What a training step costs with each library, to plain JAX", 520, 12 + 158 * len(shown))
    for i, (title, (program, measure)) in enumerate(shown.items()):
        figures = {name: values[measure] for name, values in recorded[program].items()}
        ratios = {name: value / figures["plain JAX"] for name, value in figures.items()}
        top = 22 + 158 * i
        picture.text(8, top, title)
        for j, (name, ratio) in enumerate(ratios.items()):
            y, length = top + 10 + 22 * j, 330 * ratio / max(ratios.values())
            picture.text(88, y + 13, name, "strong small" if name == "Axonym" else "small", "end")
            picture.box(96, y, length, 17, "held" if name == "Axonym" else "mid")
            picture.text(102 + length, y + 13, f"{ratio:.2f}", "small")
    return picture


# --- schedules ---


def schedules() -> Picture:
    """Which stage works on which microbatch, under both schedules, forward and backward."""
    stages, width, left = 4, 31, 76
    picture = Picture("Four microbatches in four stages, under two schedules", 520, 340)
    gpipe, both = axn.schedules.GPipe(4), axn.schedules.OneFOneB(4)
    there = gpipe.table(stages)
    cells = [[(m, None) for m in row] + [(None, m) for m in row[::-1]] for row in there]
    for top, schedule, table in ((40, gpipe, cells), (212, both, both.table(stages))):
        picture.text(left, top - 12, type(schedule).__name__, "code")
        idle = f"a stage is idle in {schedule.idle(stages):.0%}"
        picture.text(left + 14 * width - 2, top - 12, idle, "soft", "end")
        for stage, row in enumerate(table):
            y = top + 29 * stage
            picture.text(left - 8, y + 18, f"stage {stage}", "small", "end")
            for tick, cell in enumerate(row):
                x, halves = left + width * tick, None not in cell
                picture.path(f"M{x} {y}h{width - 2}v27h{2 - width}z", "line")
                for way, microbatch in enumerate(cell):
                    if microbatch is not None:
                        height = 13 if halves else 27
                        place = y + 14 * way if halves else y
                        picture.box(x, place, width - 2, height, ("pale", "held")[way])
                        picture.text(
                            x + width / 2 - 1, place + height / 2 + 4, str(microbatch), ("id", "on")[way], "middle"
                        )
    picture.text(left, 174, "forward", "small")
    picture.text(left + 7 * width, 174, "and backward, filled", "small")
    return picture


# --- what pages and notebooks show ---


class Screen:
    """A part of a page of `axonym.insight`, or an output of a notebook, as a browser shows it."""

    def __init__(self, title: str, style: str, body: str, size: tuple[int, int]):
        self.title, self.size = title, size
        self.body = body.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ')
        # What is said of pictures is not for the one around.
        self.style = re.sub(r"^@media .*\n", "", re.sub(r"\bsvg\b", "main svg", style), flags=re.MULTILINE)

    def svg(self, colors: dict[str, str]) -> str:
        width, height = self.size
        scheme = "dark" if colors is DARK else "light"
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'style="color-scheme: {scheme}">',
            f"<title>{self.title}</title>",
            f"<style>\n{self.style}</style>",
            f'<foreignObject width="{width}" height="{height}"><body xmlns="http://www.w3.org/1999/xhtml" '
            f'data-jp-theme-light="{str(scheme == "light").lower()}"><main>',
            f"{self.body}</main></body></foreignObject>",
            "</svg>\n",
        ]
        return "\n".join(lines)


def screen(title: str, page: insight.Page, height: int, part: str, width: int = 900) -> Screen:
    """Return the part of a page that a regular expression matches."""
    text = page.to_html()
    (style,) = re.findall(r"<style>\n(.*?)</style>", text, flags=re.DOTALL)
    found = re.search(part, text.partition("<main>")[2].partition("</main>")[0], re.DOTALL)
    assert found is not None, "the page has no such part"
    return Screen(title, style, found[0], (width, height))


def definitions(page: str, count: int) -> dict[str, Any]:
    """Run the first blocks of a page, and return what they define."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (FOLDER.parent.parent / f"{page}.md").read_text(), re.M | re.S)
    defined: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile("\n".join(blocks[:count]), f"{page}.py", "exec"), defined)
    return defined


def model() -> Screen:
    """The model of the tutorial, as a notebook shows it."""
    names = definitions("tutorial", 4)
    mesh = axn.make_mesh({"data": 4, "model": 2})
    shown = axn.debug.show(axn.shard(names["model"], {"batch": "data", "heads": "model", "mlp": "model"}, mesh))
    around = "body { margin: 0; font: 14px/1.5 system-ui, sans-serif; color: light-dark(#1b1f24, #e6e9ee) }"
    title = "A model as a tree: each array with its bytes on a device, its axes and the mesh axes that shard them"
    return Screen(title, around, shown._repr_html_(), (900, 700))


def memory() -> Screen:
    """The memory of the step of the page about memory."""
    names = definitions("out_of_memory", 1)
    step, *args = (names[name] for name in ("step", "model", "state", "x"))
    report = insight.explain(step, *args, mapping=names["compute"], mesh=names["mesh"])
    title = "The memory over the course of a step, and the arrays that are held at its peak"
    return screen(title, report, 760, r'<section id="memory">.*?</section>', width=960)


def transfer() -> Screen:
    """A transfer of a report, opened."""
    picture = screen(
        "A transfer of a report, opened: why, which array, how many bytes, and where", comparison().reports["heads"],
        330, r'<section id="transfers">.*?</details>',
    )  # fmt: skip
    picture.body = picture.body.replace("<details>", '<details open="open">', 1) + "</div></section>"
    return picture


@functools.cache
def llama_of_70b() -> tuple[Any, ...]:
    """A training step, and its abstract arguments."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from examples.models import llama

    sizes = {
        "Vocab": 128256, "Embed": 8192, "Layers": 80, "KVHeads": 8, "Group": 8, "HeadSize": 128, "Mlp": 28672
    }  # fmt: skip
    names = {"KVHeads": "kv_heads", "HeadSize": "head_size"}
    config = llama.Config(**{name: axn.Axis(names.get(name, name.lower()), size) for name, size in sizes.items()})

    def step(model: Any, tokens: NamedArray) -> Any:
        value, gradients = jax.value_and_grad(llama.Llama.loss)(model, tokens)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, model, gradients)

    def start(key: jax.Array) -> Any:
        return jax.tree.map(lambda p: p.astype("bfloat16"), llama.Llama.init(config, key=key))

    model = jax.eval_shape(start, jax.random.key(0))
    return step, model, jax.eval_shape(lambda: axn.zeros({"batch": 512, "pos": 4096}, dtype=int))


@functools.cache
def comparison() -> insight.Comparison:
    """The step on 512 chips, whose mapping has the heads of another model, and its own."""

    def mapping(*axes: str) -> Any:
        over = dict.fromkeys(axes, "model")
        return {"embed": "data", **over}, {"batch": "data", **over}

    step, *args = llama_of_70b()
    mesh = AbstractMesh((64, 8), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    mappings = {"heads": mapping("heads", "mlp", "vocab"), "kv_heads": mapping("kv_heads", "mlp", "vocab")}
    return insight.compare(step, args, mappings, mesh=mesh, by="names", chip="v5p")


def report() -> Screen:
    title = "The page of a report: what binds, the costliest transfers, and what is suspicious"
    return screen(title, comparison().reports["heads"], 896, ".*?(?=<nav)")


def compared() -> Screen:
    """The report's mapping beside a better one."""
    title = "The page of a comparison: the times and the memory of two mappings"
    return screen(title, comparison(), 700, '.*?(?=<section id="changes-0")')


def planned() -> Screen:
    """The best mappings of the same step."""
    step, *args = llama_of_70b()
    plan = insight.plan(step, *args, chips=512, ask=0)
    plan = dataclasses.replace(plan, found=plan.found[:14])
    return screen("The page of a plan: the candidates, and why the first is first", plan, 690, ".*")


# --- words and files ---


def _mapping(mapping: dict[str, Any]) -> str:
    return str(mapping).replace("'", '"')


PICTURES: dict[str, Callable[[], Picture | Screen]] = {
    "named": named,
    "placement": placement,
    "hosts": hosts,
    "batches": batches,
    "mappings": mappings,
    **{name: functools.partial(home, name) for name in HOME},
    "contraction": contraction,
    "fsdp": fsdp,
    "schedules": schedules,
    "slow": slow,
    "heat": heat,
    "peers": peers,
    "page-report": report,
    "page-compared": compared,
    "page-planned": planned,
    "page-transfer": transfer,
    "page-memory": memory,
    "page-model": model,
}


def files() -> dict[str, str]:
    """The name and the text of every file."""
    found = {name: draw() for name, draw in PICTURES.items()}
    schemes = {"light": LIGHT, "dark": DARK}
    return {f"{name}-{s}.svg": picture.svg(c) for name, picture in found.items() for s, c in schemes.items()}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text)
        print(name, len(text), "bytes")
