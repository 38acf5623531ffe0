"""Compare what names say of random steps with the program: `python -m tests.insight.fuzzed_bounds --steps 200`.

The steps are not those of the examples: bfloat16, layers without bias, heads that do not divide, vmapped losses, loops,
branches, segment sums and scans. What is said must be within its own error, and a bound must be below what is compiled.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import axonym as axn
from axonym import nn
from axonym.insight import Report, _compiling, explain
from tests.insight.counted import counted

MESH = {"data": 4, "model": 2}
SIZES = {"batch": 16, "pos": 8, "embed": 32, "mlp": 48, "heads": 6, "head_size": 16, "segments": 8}
Change = Callable[[Any, axn.NamedArray], axn.NamedArray]


def axes(*names: str) -> tuple[axn.Axis, ...]:
    return tuple(axn.Axis(n, SIZES[n]) for n in names)


def ones(*names: str, dtype: Any) -> axn.NamedArray:
    return axn.ones(axes(*names), dtype=dtype)


def linear(w: Any, x: axn.NamedArray) -> axn.NamedArray:
    return w["down"](axn.tanh(w["up"](x)))


def attention(w: Any, x: axn.NamedArray) -> axn.NamedArray:
    q = axn.dot(x, w["q"], axis="embed")
    k = axn.rename(q, {"pos": "key_pos"})
    scores = nn.softmax(axn.dot(q, k, axis="head_size"), "key_pos")
    return axn.dot(axn.dot(scores, k, axis="key_pos"), w["q"], axis=("heads", "head_size"))


def heads(w: Any, x: axn.NamedArray) -> axn.NamedArray:
    """Split features into heads, whose number the devices may not divide."""
    parts = axn.unflatten_axis(w["up"](x), "mlp", {"parts": 3, "size": 16})
    return w["down"](axn.flatten_axes(nn.standardize(parts, "size"), ("parts", "size"), "mlp"))


def each(w: Any, x: axn.NamedArray) -> axn.NamedArray:
    return axn.vmap(lambda x: x * axn.mean(linear(w, x)), "batch")(x)


def each_raw(w: Any, x: axn.NamedArray) -> axn.NamedArray:
    names = [a.name for a in x.axes]
    return axn.named(jax.vmap(lambda x: linear(w, axn.named(x, names[1:])).array)(x.array), names)


def repeated(w: Any, x: axn.NamedArray) -> axn.NamedArray:
    return axn.fori_loop(0, 3, lambda i, x: axn.tanh(x + linear(w, x)).astype(x.dtype), x)


def until(w: Any, x: axn.NamedArray) -> axn.NamedArray:
    return axn.while_loop(lambda x: axn.max(x) < 2, lambda x: (x + axn.mean(x, "embed")).astype(x.dtype), x)


def segments(w: Any, x: axn.NamedArray) -> axn.NamedArray:
    numbers = axn.arange(axes("pos")[0]) // 2
    sums = axn.segment_sum(x, numbers, axes("segments")[0])
    return x + axn.mean(sums, "segments")


def scanned(w: Any, x: axn.NamedArray) -> axn.NamedArray:
    return axn.associative_scan(axn.add, x, "pos") * 0.1


def raw_scan(w: Any, x: axn.NamedArray) -> axn.NamedArray:
    place = [a.name for a in x.axes].index("pos")
    return axn.named(jax.lax.associative_scan(jnp.add, x.array, axis=place), [a.name for a in x.axes])


def chosen(w: Any, x: axn.NamedArray) -> axn.NamedArray:
    return axn.cond(axn.sum(x) > 0, lambda x: linear(w, x).astype(x.dtype), lambda x: x, x)


def again(w: Any, x: axn.NamedArray) -> axn.NamedArray:
    return jax.checkpoint(linear)(w, x)


PARTS: tuple[Change, ...] = (
    linear, attention, heads, each, each_raw, repeated, until, segments, scanned, raw_scan, chosen, again,
)  # fmt: skip
MAPPINGS: tuple[Any, ...] = (
    {"batch": "data"},
    {"batch": ("data", "model")},
    {"batch": "data", "mlp": "model"},
    {"batch": "data", "heads": "model"},
    {"batch": "data", "embed": "model"},
    {"pos": "data", "mlp": "model"},
    ({"embed": "data"}, {"batch": "data"}),
    ({"embed": "data", "mlp": "model"}, {"batch": "data", "mlp": "model"}),
)


def drawn(seed: int) -> tuple[Callable[..., Any], tuple[Any, ...], Any, str]:
    """Draw a step, its arguments and a mapping; and the names of its parts."""
    draw = random.Random(seed)
    parts, mapping = draw.sample(PARTS, draw.choice([1, 2, 2])), draw.choice(MAPPINGS)
    dtype, bias = draw.choice([jnp.float32, jnp.float32, jnp.bfloat16]), draw.random() < 0.5
    trained, vmapped = draw.random() < 0.7, draw.random() < 0.3 and not {each, each_raw, until}.intersection(parts)

    def apply(w: Any, x: axn.NamedArray) -> axn.NamedArray:
        for part in parts:
            x = (x + part(w, x)).astype(dtype)
        return x

    def loss(w: Any, x: axn.NamedArray) -> jax.Array:
        if vmapped:
            each = axn.vmap(lambda x: axn.mean(axn.square(apply(w, x))), "batch")(x)
            return axn.mean(each).scalar().astype(jnp.float32)
        return axn.mean(axn.square(apply(w, x))).scalar().astype(jnp.float32)

    def step(w: Any, x: axn.NamedArray) -> Any:
        if not trained or until in parts:  # a loop of unknown length has no gradient
            return loss(w, x)
        value, gradients = jax.value_and_grad(loss)(w, x)
        return value, jax.tree.map(lambda w, g: w - (0.1 * g).astype(w.dtype), w, gradients)

    def arguments() -> tuple[Any, ...]:
        Embed, Mlp = axes("embed", "mlp")
        layer = lambda a, b: jax.tree.map(
            lambda x: x.astype(dtype), nn.Linear.init(a, b, key=jax.random.key(0), use_bias=bias)
        )
        w = {"up": layer(Embed, Mlp), "down": layer(Mlp, Embed), "q": ones("embed", "heads", "head_size", dtype=dtype)}
        return w, ones("batch", "pos", "embed", dtype=dtype)

    words = [p.__name__ for p in parts] + [jnp.dtype(dtype).name] + ["bias"] * bias + ["vmapped loss"] * vmapped
    return step, jax.eval_shape(arguments), mapping, f"{', '.join(words)} under {mapping}"


def sent(report: Report, least: bool = False, widened: bool = False) -> int:
    """Return the bytes that a device sends; if asked, as the compiler for CPUs does, which sends float32."""
    doubled = sum(c.mean_sent or 0 for c in report.collectives if c.array.startswith("bf16")) if widened else 0
    return (report.total_sent(least=least) or 0) + doubled


def wrong(seed: int) -> str | None:
    """Return what a report says wrongly of a random step; None if nothing."""
    step, args, mapping, what = drawn(seed)
    mesh = axn.make_mesh(MESH)
    true = explain(step, *args, mapping=mapping, mesh=mesh, by="partitioner", chip="v5e")
    found = []
    with jax.set_mesh(mesh):
        text = _compiling.partitioned(_distributed(step, mapping).lower(*args))
    runs = {k: n for k, n in counted(text, mesh).items() if k != "runs"}
    own: dict[Any, int] = {}
    for c in true.collectives:
        own[c.kind, c.axes] = own.get((c.kind, c.axes), 0) + c.size * (c.times or 1)
    if {k: n for k, n in own.items() if n} != runs:
        found.append(f"the partitioner's report has {own}, and the program {runs}")
    if (least := true.total_sent(least=True)) is not None and least > sent(true):
        found.append("the least is more than the mean")
    try:
        early = explain(step, *args, mapping=mapping, mesh=mesh, by="names", chip="v5e")
    except ValueError as e:
        early = None
        if "by='names' cannot know" not in str(e):
            raise
    if early is not None:
        if (early.total_sent() is None) != (true.total_sent() is None):
            found.append(f"names: {early.total_sent()} bytes, and the program {true.total_sent()}")
        off = min(abs(sent(early, widened=w) - sent(true)) for w in (False, True))
        if true.total_sent() is not None and off > early.uncertain:
            found.append(f"names: {sent(early)} bytes, may be off by {early.uncertain}; the program {sent(true)}")
        if early.least_flops is not None and true.flops is not None:
            saved = sum(int(n.split(" of the")[0].split()[-1].replace(",", "")) for n in early.notes if "may save" in n)
            if early.least_flops - saved > true.flops:
                found.append(f"names: at least {early.least_flops} flops, and the program {true.flops}")
    return f"seed {seed}: {what}: {'; '.join(found)}" if found else None


def _distributed(step: Any, mapping: Any) -> Any:
    return (
        axn.fsdp(step, *mapping) if isinstance(mapping, tuple) else axn.named_jit(step, mapping, in_placement=mapping)
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.insight.fuzzed_bounds")
    parser.add_argument("--steps", type=int, default=100, help="how many steps to draw")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    failed = 0
    for seed in range(arguments.seed, arguments.seed + arguments.steps):
        try:
            said = wrong(seed)
        except Exception as e:
            said = f"seed {seed}: {drawn(seed)[3]}: {type(e).__name__}: {str(e)[:500]}"
        if said is not None:
            failed += 1
            print(said, flush=True)
    print(f"{arguments.steps} steps, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    raise SystemExit(main())
