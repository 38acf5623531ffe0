"""Draw the pictures of the pages: `python docs/pictures.py` writes them to `docs/assets/pictures`.

What they show is asked of the library: which device holds which shard, the axes of a result, the collectives of a
compiled program, the pages of `axonym.insight`. Each picture is written twice, for a light and for a dark page. The
tests compare the files with what this script draws.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

import axonym as axn
from axonym import NamedArray, insight

FOLDER = Path(__file__).parent / "assets" / "pictures"

# The devices of a row of the mesh have shades of one color.
LIGHT = {
    "text": "#1f2328",
    "muted": "#59636e",
    "line": "#818b98",
    "empty": "#eff2f5",
    "accent": "#4051b5",
    "devices": ["#a9cdff", "#6ea8f5", "#aee9bf", "#68cf8b", "#fbe08a", "#efb93a", "#f8c4e0", "#ee8cc0"],
}
DARK = {
    "text": "#e6e8ee",
    "muted": "#a5adba",
    "line": "#7d8590",
    "empty": "#2b2f3a",
    "accent": "#98a7ff",
    "devices": ["#1c4a8a", "#3a78c8", "#1b5f37", "#2f9457", "#755000", "#a97a10", "#852459", "#b94a87"],
}


class Picture:
    """A drawing of rectangles, lines and words, with colors that a page's scheme fills in."""

    def __init__(self, title: str, width: int, height: int):
        self.title, self.width, self.height = title, width, height
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        kind = f' class="{kind}"' if kind else ""
        place = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}"{kind}{place}>{escape(text)}</text>')

    def upright(self, x: float, y: float, text: str) -> None:
        """A word that is read from below."""
        turn = f'transform="translate({x:g} {y:g}) rotate(-90)"'
        self.parts.append(f'<text class="small" text-anchor="middle" {turn}>{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>')

    def path(self, d: str, kind: str) -> None:
        self.parts.append(f'<path d="{d}" class="{kind}"/>')

    def arrow(self, x: float, y: float, length: float) -> None:
        self.path(f"M{x:g} {y:g}h{length:g}m-5 -4l5 4l-5 4", "line")

    def svg(self, colors: dict[str, Any]) -> str:
        devices = "".join(f".d{i}{{fill:{color}}}" for i, color in enumerate(colors["devices"]))
        style = (
            f"text{{font:15px system-ui,sans-serif;fill:{colors['text']}}}"
            ".code{font:14px ui-monospace,monospace}.small{font-size:13px}.id{font-size:12px}"
            f".muted{{font-size:13px;fill:{colors['muted']}}}.accent{{font-weight:600;fill:{colors['accent']}}}"
            f".line{{fill:none;stroke:{colors['line']};stroke-width:1.5}}"
            f".summed{{fill:none;stroke:{colors['accent']};stroke-width:4}}"
            f".node{{fill:{colors['empty']};stroke:{colors['line']};stroke-width:1.5}}"
            f".empty{{fill:{colors['empty']}}}{devices}"
        )
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img">'
        return "\n".join([head, f"<title>{self.title}</title>", f"<style>{style}</style>", *self.parts, "</svg>\n"])


# --- arrays, as the library places them ---


def shards(picture: Picture, x: NamedArray, left: float, top: float, width: float, height: float) -> None:
    """Draw an array of two axes. A shard that several devices hold has a stripe for each of them."""
    rows, columns = x.axes
    picture.text(left + width / 2, top - 6, columns.name, "small", "middle")
    picture.upright(left - 6, top + height / 2, rows.name)
    owners: dict[tuple[float, ...], list[int]] = {}
    for device, indices in x.array.sharding.devices_indices_map(x.array.shape).items():
        (r0, r1, _), (c0, c1, _) = (s.indices(a.size) for s, a in zip(indices, x.axes, strict=True))
        place = (c0 / columns.size, r0 / rows.size, (c1 - c0) / columns.size, (r1 - r0) / rows.size)
        owners.setdefault(place, []).append(device.id)
    for place, devices in sorted(owners.items()):
        x0, y0, w, h = (share * side for share, side in zip(place, (width, height) * 2, strict=True))
        for i, device in enumerate(devices):
            stripe = w / len(devices)
            picture.box(left + x0 + i * stripe, top + y0, stripe, h, f"d{device}")
            picture.text(left + x0 + (i + 0.5) * stripe, top + y0 + h / 2 + 4, str(device), "id", "middle")
        picture.path(f"M{left + x0:g} {top + y0:g}h{w:g}v{h:g}h{-w:g}z", "line")


def placement() -> Picture:
    """Two arrays that one mapping places on a mesh."""
    Batch, Embed, Mlp = axn.make_axes(batch=8, embed=16, mlp=32)
    mesh, mapping = axn.make_mesh({"data": 4, "model": 2}), {"batch": "data", "mlp": "model"}
    x, w = axn.shard((axn.ones((Batch, Embed)), axn.ones((Embed, Mlp))), mapping, mesh)
    picture = Picture("A mesh of eight devices, and two arrays whose shards lie on it", 520, 220)
    picture.text(72, 24, "the mesh", anchor="middle")
    picture.text(72, 58, "model=2", "small", "middle")
    picture.upright(24, 128, "data=4")
    for (row, column), device in np.ndenumerate(mesh.devices):
        picture.box(34 + 39 * column, 66 + 31 * row, 36, 28, f"d{device.id}")
        picture.text(52 + 39 * column, 85 + 31 * row, str(device.id), "id", "middle")
    for left, array, name in ((178, x, "x"), (358, w, "w")):
        picture.text(left + 70, 24, f"{name}: {_spec(array)}", "code", "middle")
        shards(picture, array, left, 64, 140, 122)
    picture.text(260, 212, _mapping(mapping), "code accent", "middle")
    return picture


def mappings() -> Picture:
    """One program under three mappings: where its arrays lie, and what it sends."""
    Batch, Embed, Mlp = axn.make_axes(batch=8, embed=16, mlp=32)
    x, up, down = axn.ones((Batch, Embed)), axn.ones((Embed, Mlp)), axn.ones((Mlp, Embed))

    def program(x: NamedArray, up: NamedArray, down: NamedArray) -> tuple[NamedArray, NamedArray]:
        h = axn.dot(x, up, axis="embed")
        return h, axn.dot(h, down, axis="mlp")

    picture = Picture("One program under three mappings", 520, 486)
    for y, line in ((18, 'h = axn.dot(x, up, axis="embed")'), (38, 'y = axn.dot(h, down, axis="mlp")')):
        picture.text(260, y, line, "code", "middle")
    mesh = axn.make_mesh({"data": 2, "model": 2}, devices=jax.devices()[:4])
    top = 74
    for mapping in ({"batch": ("data", "model")}, {"mlp": ("data", "model")}, {"batch": "data", "mlp": "model"}):
        with jax.set_mesh(mesh):
            placed = axn.shard((x, up, down), mapping)
            compiled = axn.named_jit(program, mapping).lower(*placed).compile()
            h, y = jax.block_until_ready(compiled(*placed))
        sent = [kind for kind in ("all-reduce", "all-gather", "all-to-all") if f" {kind}(" in compiled.as_text()]
        picture.text(8, top, _mapping(mapping), "code accent")
        picture.text(512, top, f"sends: {', '.join(sent) or 'nothing'}", "muted", "end")
        for i, (name, array) in enumerate(
            zip(("x", "up", "h", "down", "y"), (*placed[:2], h, placed[2], y), strict=True)
        ):
            left = 26 + 102 * i
            shards(picture, array, left, top + 32, 76, 60)
            picture.text(left + 38, top + 110, name, "code", "middle")
        top += 142
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
        picture.text(260, top + 52, "embed", "accent small", "middle")
        picture.text(260, top + 84, "summed over", "muted", "middle")
        for side, name in ((-1, first), (1, second)):
            picture.box(260 + 90 * side - 32, top + 44, 64, 36, "node")
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
    text = compiled.as_text()
    assert " all-gather(" in text and " reduce-scatter(" in text and " all-reduce(" not in text

    picture = Picture("A step of fully sharded data parallelism on four devices", 520, 356)
    lefts, size = (66, 192, 318, 444), 60
    heads = (
        ("storage", "a shard of w"),
        ("compute", "all of w"),
        ("its rows of x", "gradient of w"),
        ("storage", "w, updated"),
    )
    for left, (head, below) in zip(lefts, heads, strict=True):
        picture.text(left + size / 2, 18, head, "", "middle")
        picture.text(left + size / 2, 36, below, "muted", "middle")
    for device in range(4):
        top = 50 + 64 * device
        picture.text(4, top + 30, f"device {device}", "small")
        own = {id(a): _rows_of(a, device) for a in (stored, rows)}
        for column in range(4):
            left = lefts[column]
            picture.box(left, top, size, 48, "empty")
            if column == 1:
                for other in range(4):
                    first, share = _rows_of(stored, other)
                    picture.box(left, top + 48 * first, size, 48 * share, f"d{2 * other}")
            elif column == 2:
                # The rows of the batch beside the gradient that they give: of all of the weight.
                first, share = own[id(rows)]
                picture.box(left, top + 48 * first, 16, 48 * share, f"d{2 * device}")
                picture.box(left + 22, top, size - 22, 48, f"d{2 * device}")
                picture.path(f"M{left} {top}h16v48h-16zM{left + 22} {top}h{size - 22}v48h{22 - size}z", "line")
                continue
            else:
                first, share = own[id(stored)]
                picture.box(left, top + 48 * first, size, 48 * share, f"d{2 * device}")
            picture.path(f"M{left} {top}h{size}v48h{-size}z", "line")
        for left in lefts[:-1]:
            picture.arrow(left + size + 12, top + 24, 40)
    for left, name in zip(lefts, ("all-gather", "", "reduce-scatter"), strict=False):
        picture.text(left + size + 32, 322, name, "accent small", "middle")
    picture.text(lefts[1] + size + 32, 322, "gradients", "small", "middle")
    picture.text(260, 346, "In storage and in the update, a device has a fourth of every parameter.", "muted", "middle")
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
    picture = Picture("The temperature at three times, and what a device sends to its neighbors in a step", 520, 318)
    cell = 5.0
    for i, steps in enumerate((0, 20, 100)):
        left, top = 6 + 174 * i, 28
        picture.text(left + 80, 18, f"{steps} steps", "small", "middle")
        picture.box(left, top, 32 * cell, 16 * cell, "empty")
        # Bands of one color: cells above a temperature, from thin to dense.
        values = np.asarray(many(hot, steps).rearrange(("y", "x")).array)
        for level, shade in ((2, 4), (10, 5), (40, 7)):
            for row, column in np.argwhere(values > level):
                start = column == 0 or values[row, column - 1] <= level
                if start:
                    rest = values[row, column:] <= level
                    length = int(np.argmax(rest)) if rest.any() else 32 - int(column)
                    picture.box(left + cell * column, top + cell * row, cell * length, cell, f"d{shade}")
        for line in range(1, 4):
            picture.path(f"M{left + 40 * line} {top}v80", "line")
        picture.path(f"M{left} {top + 40}h160M{left} {top}h160v80h-160z", "line")
    picture.text(260, 126, "from inside to outside: above 40, 10 and 2 degrees", "muted", "middle")

    report = axn.insight.explain(step, hot, mesh=mesh, mapping=mapping, by="names")
    left, top, width, height = 160, 168, 200, 100
    picture.box(left, top, width, height, "empty")
    picture.path(f"M{left} {top}h{width}v{height}h{-width}z", "line")
    x, y = ([c for c in report.collectives if axis in (c.axes or ())] for axis in ("cols", "rows"))
    for c, (at, toward) in zip(x, ((left + width - 12, 1), (left, -1)), strict=True):
        picture.box(at, top, 12, height, "d1")
        middle, end = top + height / 2, left + width if toward > 0 else left
        picture.path(f"M{end} {middle}h{44 * toward}m{-5 * toward} -4l{5 * toward} 4l{-5 * toward} 4", "line")
        picture.text(end + 50 * toward, middle + 5, f"{c.sent} B", "small", "start" if toward > 0 else "end")
    for c, (at, toward) in zip(y, ((top + height - 12, 1), (top, -1)), strict=True):
        picture.box(left, at, width, 12, "d2")
        middle, end = left + width / 2, top + height if toward > 0 else top
        picture.path(f"M{middle} {end}v{18 * toward}m-4 {-5 * toward}l4 {5 * toward}l4 {-5 * toward}", "line")
        picture.text(middle + 10, end + (16 if toward > 0 else -8), f"{c.sent} B", "small")
    picture.text(left + width / 2, top + height / 2 + 5, "a shard: x=8, y=8", "small", "middle")
    picture.text(
        260, 312, "To each neighbor, a device sends the row or column of its shard beside it.", "muted", "middle"
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
            picture.text(88, y + 13, name, "accent" if name == "Axonym" else "small", "end")
            picture.box(96, y, length, 17, "d1" if name == "Axonym" else "d0")
            picture.text(102 + length, y + 13, f"{ratio:.2f}", "small")
    return picture


def _rows_of(x: NamedArray, device: int) -> tuple[float, float]:
    """Where the shard of a device starts along the first axis, and how long it is, as shares of the axis."""
    indices = {d.id: i for d, i in x.array.sharding.devices_indices_map(x.array.shape).items()}
    start, stop, _ = indices[device][0].indices(x.axes[0].size)
    return start / x.axes[0].size, (stop - start) / x.axes[0].size


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
        picture.text(left + 14 * width - 2, top - 12, idle, "muted", "end")
        for stage, row in enumerate(table):
            y = top + 29 * stage
            picture.text(left - 8, y + 18, f"stage {stage}", "small", "end")
            for tick, cell in enumerate(row):
                x, halves = left + width * tick, None not in cell
                picture.box(x, y, width - 2, 27, "empty")
                for way, microbatch in enumerate(cell):
                    if microbatch is not None:
                        height = 13 if halves else 27
                        place = y + 14 * way if halves else y
                        picture.box(x, place, width - 2, height, f"d{2 * microbatch + way}")
                        picture.text(x + width / 2 - 1, place + height / 2 + 4, str(microbatch), "id", "middle")
    picture.text(left, 174, "forward", "small")
    picture.text(left + 7 * width, 174, "and backward, in deeper colors", "small")
    return picture


# --- pages of insight ---


class Screen:
    """The beginning of a page of `axonym.insight`, as a browser shows it."""

    def __init__(self, title: str, page: insight.Page, height: int, until: str, width: int = 900):
        self.title, self.size = title, (width, height)
        text = page.to_html()
        (style,) = re.findall(r"<style>\n(.*?)</style>", text, flags=re.DOTALL)
        self.style = re.sub(r"^svg .*\n|^@media .*\n", "", style, flags=re.MULTILINE)
        self.body = text.partition("<main>")[2].partition(until)[0]

    def svg(self, colors: dict[str, Any]) -> str:
        width, height = self.size
        scheme = "dark" if colors is DARK else "light"
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'style="color-scheme: {scheme}">',
            f"<title>{self.title}</title>",
            f"<style>\n{self.style}</style>",
            f'<foreignObject width="{width}" height="{height}"><body xmlns="http://www.w3.org/1999/xhtml"><main>',
            f"{self.body}</main></body></foreignObject>",
            "</svg>\n",
        ]
        return "\n".join(lines)


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
    return Screen(title, comparison().reports["heads"], 896, "<nav")


def compared() -> Screen:
    """The report's mapping beside a better one."""
    title = "The page of a comparison: the times and the memory of two mappings"
    return Screen(title, comparison(), 700, '<section id="changes-0"')


def planned() -> Screen:
    """The best mappings of the same step."""
    step, *args = llama_of_70b()
    plan = insight.plan(step, *args, chips=512, ask=0, verify=0)
    plan = dataclasses.replace(plan, found=plan.found[:14])
    return Screen("The page of a plan: the candidates, and why the first is first", plan, 690, "</main>")


# --- words and files ---


def _spec(x: NamedArray) -> str:
    return str(x.array.sharding.spec).replace("PartitionSpec", "P")


def _mapping(mapping: dict[str, Any]) -> str:
    return str(mapping).replace("'", '"')


PICTURES: dict[str, Callable[[], Picture | Screen]] = {
    "placement": placement,
    "mappings": mappings,
    "contraction": contraction,
    "fsdp": fsdp,
    "schedules": schedules,
    "heat": heat,
    "peers": peers,
    "page-report": report,
    "page-compared": compared,
    "page-planned": planned,
}


def files() -> dict[str, str]:
    """The name and the text of every file."""
    drawn = {name: draw() for name, draw in PICTURES.items()}
    schemes = {"light": LIGHT, "dark": DARK}
    return {f"{name}-{s}.svg": picture.svg(c) for name, picture in drawn.items() for s, c in schemes.items()}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text)
        print(name, len(text), "bytes")
