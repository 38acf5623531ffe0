"""Per-device programs in plain JAX, each with the plain function that it stands for, and with bugs to plant in it.

`python -m tests.planted_bugs` tries them all, at two dtypes, with and without gradients.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec as P

from axonym.testing import check_shard_invariance


class PerDevice(NamedTuple):
    """A per-device function with its specs, the plain function, and arguments."""

    body: Callable[..., Any]
    in_specs: Any
    out_specs: Any
    plain: Callable[..., Any]
    args: tuple[Any, ...]

    def run(self, *args: Any) -> Any:
        mesh = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        return jax.shard_map(self.body, mesh=mesh, in_specs=self.in_specs, out_specs=self.out_specs, check_vma=False)(
            *args
        )


def normal(dtype: Any, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.RandomState(sum(shape)).randn(*shape), dtype)


def mlp(bug: str, dtype: Any) -> PerDevice:
    """Hidden units sharded over model."""

    def body(x: Any, w: Any, b: Any, v: Any, c: Any) -> Any:
        h = jax.nn.gelu(x @ w + (0 if bug == "forgotten bias" else b)) @ v
        if bug == "bias added by every device":
            return lax.psum(h + c, "model")
        total = {"missing": h, "mean": lax.pmean(h, "model"), "wrong axis": lax.psum(h, "data")}
        y = total.get(bug, lax.psum(h, "model"))
        return (lax.psum(y, "model") if bug == "double" else y) + c

    def plain(x: Any, w: Any, b: Any, v: Any, c: Any) -> Any:
        return jax.nn.gelu(x @ w + b) @ v + c

    args = normal(dtype, 4, 5), normal(dtype, 5, 6), jnp.zeros(6, dtype), normal(dtype, 6, 5), jnp.zeros(5, dtype)
    return PerDevice(body, (P("data"), P(None, "model"), P("model"), P("model"), P()), P("data"), plain, args)


def masked_loss(bug: str, dtype: Any) -> PerDevice:
    """The mean over the rows that count, of a batch sharded over data."""

    def body(x: Any, mask: Any, w: Any) -> Any:
        total, count = jnp.sum(jnp.where(mask, (x @ w) ** 2, 0)), jnp.sum(mask)
        if bug == "mean of means":
            return lax.pmean(total / count, "data")
        return lax.psum(total, "data") / (lax.psum(mask.size, "data") if bug == "all rows" else lax.psum(count, "data"))

    def plain(x: Any, mask: Any, w: Any) -> Any:
        return jnp.sum(jnp.where(mask, (x @ w) ** 2, 0)) / jnp.sum(mask)

    args = normal(dtype, 6, 5), jnp.array([True, True, True, True, False, False]), normal(dtype, 5)
    return PerDevice(body, (P("data"), P("data"), P()), P(), plain, args)


def training_step(bug: str, dtype: Any) -> PerDevice:
    """FSDP over data: weights are gathered; gradients are scattered, clipped by their norm, and given to Adam."""

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    def update(w: Any, g: Any, m: Any, v: Any, square: Any) -> Any:
        g = g * jnp.minimum(1, 0.01 * lax.rsqrt(square))
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return w - 0.1 * m / (jnp.sqrt(v) + 1e-8), m, v

    def body(w: Any, m: Any, v: Any, x: Any) -> Any:
        g = jax.grad(loss)(lax.all_gather(w, "data", tiled=True), x)
        g = lax.psum_scatter(g, "data", tiled=True) / (1 if bug == "factor hidden by clipping" else 2)
        square = jnp.sum(g * g)
        square = {"local norm": square, "mean of norms": lax.pmean(square, "data")}.get(bug, lax.psum(square, "data"))
        return update(w, g, m, v, square)

    def plain(w: Any, m: Any, v: Any, x: Any) -> Any:
        g = jax.grad(loss)(w, x)
        return update(w, g, m, v, jnp.sum(g * g))

    args = normal(dtype, 6, 5), jnp.zeros((6, 5), dtype), jnp.zeros((6, 5), dtype), normal(dtype, 4, 6)
    return PerDevice(body, P("data"), P("data"), plain, args)


def ring_attention(bug: str, dtype: Any) -> PerDevice:
    """Causal attention; keys and values go round the devices of model, which hold parts of the sequence."""

    def body(q: Any, k: Any, v: Any) -> Any:
        n, length = 3, q.shape[0]
        me = lax.axis_index("model")
        rows = me * length + jnp.arange(length)

        def step(carry: Any, i: Any) -> Any:
            k, v, most, total, y = carry
            held = (me + (1 if bug == "ring goes the other way" else -1) * i) % n
            columns = held * length + jnp.arange(length)
            scores = jnp.where(rows[:, None] >= columns, q @ k.T, -1e30)
            new = jnp.maximum(most, scores.max(1))
            weights, old = jnp.exp(scores - new[:, None]), jnp.exp(most - new)
            scale = 1 if bug == "not rescaled" else old[:, None]
            total, y = total * old + weights.sum(1), y * scale + weights @ v.astype(jnp.float32)
            k, v = lax.ppermute((k, v), "model", [(j, (j + 1) % n) for j in range(n)])
            return (k, v, new, total, y), None

        start = jnp.full(length, -jnp.inf), jnp.zeros(length), jnp.zeros(v.shape)
        steps = jnp.arange(n - 1 if bug == "one step too few" else n)
        (_, _, _, total, y), _ = lax.scan(step, (k, v, *start), steps)
        return y / total[:, None]

    def plain(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.where(jnp.tri(len(q)) > 0, q @ k.T, -1e30)
        return jax.nn.softmax(scores, 1) @ v.astype(jnp.float32)

    args = normal(dtype, 6, 5), normal(dtype, 6, 5)[::-1], normal(dtype, 6, 4)
    return PerDevice(body, P("model"), P("model"), plain, args)


def logsumexp(bug: str, dtype: Any) -> PerDevice:
    """Of logits sharded over model."""

    def body(x: Any) -> Any:
        local = jnp.max(lax.stop_gradient(x), 1)
        most = local if bug == "local maximum" else lax.pmax(local, "model")
        total = jnp.sum(jnp.exp(x - most[:, None]), 1)
        if bug == "sum of logarithms":
            return lax.psum(jnp.log(total), "model") + most
        return jnp.log(lax.pmean(total, "model") if bug == "mean" else lax.psum(total, "model")) + most

    return PerDevice(body, P("data", "model"), P("data"), lambda x: jax.nn.logsumexp(x, axis=1), (normal(dtype, 4, 9),))


def vocabulary_loss(bug: str, dtype: Any) -> PerDevice:
    """The cross-entropy of labels, with the vocabulary sharded over model."""

    def body(x: Any, labels: Any) -> Any:
        own = x.shape[1]
        local = labels - (0 if bug == "no offset" else lax.axis_index("model") * own)
        here = (local >= 0) & (local < own)
        picked = jnp.take_along_axis(x, jnp.clip(local, 0, own - 1)[:, None], 1)[:, 0]
        picked = lax.psum(picked if bug == "no mask" else jnp.where(here, picked, 0), "model")
        total = lax.psum(jnp.sum(jnp.exp(x), 1), "model")
        return jnp.log(total) - (lax.psum(picked, "model") if bug == "double" else picked)

    def plain(x: Any, labels: Any) -> Any:
        return jax.nn.logsumexp(x, axis=1) - jnp.take_along_axis(x, labels[:, None], 1)[:, 0]

    return PerDevice(
        body, (P("data", "model"), P("data")), P("data"), plain, (normal(dtype, 4, 9), jnp.array([0, 4, 8, 5]))
    )


def head_exchange(bug: str, dtype: Any) -> PerDevice:
    """Attention, with the sequence sharded over model outside and the heads inside."""

    def attend(q: Any) -> Any:
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, q) / 2, -1), q)

    def body(q: Any) -> Any:
        if bug == "no exchange":
            return attend(q)
        inside = lax.all_to_all(q, "model", 1, 0, tiled=True)
        if bug == "heads in another order":
            inside = lax.ppermute(inside, "model", [(0, 1), (1, 2), (2, 0)])
        return lax.all_to_all(attend(inside), "model", 0, 1, tiled=True)

    return PerDevice(body, P("model"), P("model"), attend, (normal(dtype, 6, 3, 4),))


def rms_norm(bug: str, dtype: Any) -> PerDevice:
    """Over an axis sharded over model."""

    def body(x: Any, scale: Any) -> Any:
        square, eps = jnp.sum(x * x, 1, keepdims=True) / 9, 1e-3
        if bug == "eps counted three times":
            return x * lax.rsqrt(lax.psum(square + eps, "model")) * scale
        return x * lax.rsqrt((3 * square if bug == "local" else lax.psum(square, "model")) + eps) * scale

    def plain(x: Any, scale: Any) -> Any:
        return x * lax.rsqrt(jnp.sum(x * x, 1, keepdims=True) / 9 + 1e-3) * scale

    return PerDevice(
        body, (P("data", "model"), P("model")), P("data", "model"), plain, (normal(dtype, 4, 9), jnp.ones(9, dtype))
    )


def layer_norm(bug: str, dtype: Any) -> PerDevice:
    """Over an axis sharded over model."""

    def body(x: Any) -> Any:
        mean = lax.pmean(jnp.mean(x, 1, keepdims=True), "model")
        centred = x - (jnp.mean(x, 1, keepdims=True) if bug == "mean of variances" else mean)
        return (x - mean) * lax.rsqrt(lax.pmean(jnp.mean(centred**2, 1, keepdims=True), "model") + 1e-5)

    def plain(x: Any) -> Any:
        centred = x - jnp.mean(x, 1, keepdims=True)
        return centred * lax.rsqrt(jnp.mean(centred**2, 1, keepdims=True) + 1e-5)

    return PerDevice(body, P("data", "model"), P("data", "model"), plain, (normal(dtype, 4, 9),))


def experts(bug: str, dtype: Any) -> PerDevice:
    """One expert on each device of model; each row goes to one of them."""

    def body(x: Any, router: Any, w: Any) -> Any:
        gates = jax.nn.softmax(x @ router, 1)
        mine = lax.axis_index("model")
        chosen = jnp.argmax(gates, 1) == (mine + 1 if bug == "another expert" else mine)
        y = jnp.where(chosen[:, None], x @ w[0], 0) * gates.max(1)[:, None]
        y = lax.psum(y, "model")
        return y * gates.max(1)[:, None] if bug == "gate applied twice" else y

    def plain(x: Any, router: Any, w: Any) -> Any:
        gates = jax.nn.softmax(x @ router, 1)
        return jnp.einsum(
            "re,reo->ro", jax.nn.one_hot(jnp.argmax(gates, 1), 3), jnp.einsum("ri,eio->reo", x, w)
        ).astype(x.dtype) * gates.max(1, keepdims=True)

    args = normal(dtype, 8, 5), normal(dtype, 5, 3), normal(dtype, 3, 5, 4)
    return PerDevice(body, (P("data"), P(), P("model")), P("data"), plain, args)


def dropout(bug: str, dtype: Any) -> PerDevice:
    """Each device draws for all rows and keeps its own."""

    def body(x: Any, key: Any) -> Any:
        rows = x.shape[0]
        kept = jax.random.uniform(key, (2 * rows, x.shape[1])) < 0.75
        start = 0 if bug == "the same on every device" else lax.axis_index("data") * rows
        return jnp.where(lax.dynamic_slice_in_dim(kept, start, rows), x / (1 if bug == "not scaled" else 0.75), 0)

    def plain(x: Any, key: Any) -> Any:
        return jnp.where(jax.random.uniform(key, x.shape) < 0.75, x / 0.75, 0)

    return PerDevice(body, (P("data"), P()), P("data"), plain, (normal(dtype, 4, 5), jax.random.key(3)))


def pipeline(bug: str, dtype: Any) -> PerDevice:
    """Three stages on the devices of model, four microbatches."""

    def body(x: Any, w: Any) -> Any:
        me = lax.axis_index("model")

        def tick(carry: Any, t: Any) -> Any:
            mine = jnp.where(me == 0, x[jnp.clip(t, 0, 3)], carry)
            y = jnp.tanh(mine @ w[0])
            return lax.ppermute(y, "model", [(0, 1), (1, 2), (2, 0)]), y

        _, ys = lax.scan(tick, jnp.zeros_like(x[0]), jnp.arange(6))
        last = 1 if bug == "output of another stage" else 2
        first = 1 if bug == "one tick early" else 2
        return lax.psum(jnp.where(me == last, ys[first : first + 4], 0), "model")

    def plain(x: Any, w: Any) -> Any:
        for stage in range(3):
            x = jnp.tanh(x @ w[stage])
        return x

    return PerDevice(body, (P(), P("model")), P(), plain, (normal(dtype, 4, 2, 5), normal(dtype, 3, 5, 5)))


def halo(bug: str, dtype: Any) -> PerDevice:
    """A convolution along an axis sharded over model, with zeros outside."""

    def body(x: Any, w: Any) -> Any:
        last = x[-2:-1] if bug == "off by one" else x[-1:]
        around = [(2, 0)] if bug == "wraps around" else []
        before = lax.ppermute(last, "model", [(0, 1), (1, 2), *around])
        after = lax.ppermute(x[:1], "model", [(1, 0), (2, 1)])
        x = jnp.concatenate([before, x, after])
        return w[0] * x[:-2] + w[1] * x[1:-1] + w[2] * x[2:]

    def plain(x: Any, w: Any) -> Any:
        x = jnp.pad(x, 1)
        return w[0] * x[:-2] + w[1] * x[1:-1] + w[2] * x[2:]

    return PerDevice(body, (P("model"), P()), P("model"), plain, (normal(dtype, 9), normal(dtype, 3)))


def prefix_sum(bug: str, dtype: Any) -> PerDevice:
    """Along an axis sharded over model."""

    def body(x: Any) -> Any:
        totals, me = lax.all_gather(jnp.sum(x), "model"), lax.axis_index("model")
        before = jnp.arange(3) <= me if bug == "counts its own total" else jnp.arange(3) < me
        return jnp.cumsum(x) + (0 if bug == "missing" else jnp.sum(jnp.where(before, totals, 0)))

    return PerDevice(body, P("model"), P("model"), lambda x: jnp.cumsum(x), (normal(dtype, 9),))


def embedding(bug: str, dtype: Any) -> PerDevice:
    """A look-up in a table sharded over model."""

    def body(table: Any, ids: Any) -> Any:
        local = ids - lax.axis_index("model") * (3 if bug == "shards of another size" else 4)
        rows = table[jnp.clip(local, 0, 3)]
        return lax.psum(
            rows if bug == "no mask" else jnp.where(((local >= 0) & (local < 4))[:, None], rows, 0), "model"
        )

    def plain(table: Any, ids: Any) -> Any:
        return table[ids]

    return PerDevice(body, (P("model"), P("data")), P("data"), plain, (normal(dtype, 12, 3), jnp.array([0, 5, 11, 7])))


def largest(bug: str, dtype: Any) -> PerDevice:
    """The two largest elements of an axis sharded over model, and where they are."""

    def body(x: Any) -> Any:
        values, where = lax.top_k(x, 2)
        where = where + (0 if bug == "local positions" else lax.axis_index("model") * x.shape[0])
        if bug == "largest of each device":
            return lax.pmax(lax.stop_gradient(values), "model"), where
        values, where = lax.all_gather((values, where), "model", tiled=True)
        values, order = lax.top_k(values, 2)
        return values, where[order]

    args = (jnp.asarray([0.5, -1, 0.25, 3, 0, 2.5, -2, 1.5, 0.125], dtype),)
    return PerDevice(body, P("model"), P(), lambda x: tuple(lax.top_k(x, 2)), args)


PROGRAMS: dict[Callable[[str, Any], PerDevice], tuple[str, ...]] = {
    mlp: ("missing", "double", "mean", "wrong axis", "bias added by every device", "forgotten bias"),
    masked_loss: ("mean of means", "all rows"),
    training_step: ("factor hidden by clipping", "local norm", "mean of norms"),
    ring_attention: ("ring goes the other way", "not rescaled", "one step too few"),
    logsumexp: ("local maximum", "sum of logarithms", "mean"),
    vocabulary_loss: ("no offset", "no mask", "double"),
    head_exchange: ("no exchange", "heads in another order"),
    rms_norm: ("eps counted three times", "local"),
    layer_norm: ("mean of variances",),
    experts: ("another expert", "gate applied twice"),
    dropout: ("the same on every device", "not scaled"),
    pipeline: ("output of another stage", "one tick early"),
    halo: ("off by one", "wraps around"),
    prefix_sum: ("counts its own total", "missing"),
    embedding: ("shards of another size", "no mask"),
    largest: ("local positions", "largest of each device"),
}
"""The programs, and the bugs of each; without a bug, they are correct."""


def find(program: Callable[[str, Any], PerDevice], bug: str, dtype: Any, gradients: bool = True) -> str | None:
    """Return the message about a bug, or about a program without one; None if it is found correct."""
    planted = program(bug, dtype)
    try:
        with jax.numpy_rank_promotion("allow"):  # as in most programs
            check_shard_invariance(planted.run, *planted.args, reference=planted.plain, gradients=gradients)
    except AssertionError as error:
        return str(error)
    return None


def main() -> int:
    """Try all, print what is wrong, and count."""
    cases = [(p, bug) for p, bugs in PROGRAMS.items() for bug in ("", *bugs)]
    wrong = 0
    for dtype, gradients in itertools.product((jnp.float32, jnp.bfloat16), (False, True)):
        found = {(p, bug): find(p, bug, dtype, gradients) for p, bug in cases}
        bugs = sum(found[p, bug] is not None for p, bug in cases if bug)
        refused = sum(found[p, ""] is not None for p in PROGRAMS)
        wrong += len(cases) - len(PROGRAMS) - bugs + refused
        what = "values and gradients" if gradients else "values"
        print(
            f"{dtype.__name__}, {what}: {bugs} of {len(cases) - len(PROGRAMS)} bugs found, "
            f"{refused} of {len(PROGRAMS)} correct programs refused",
            *(f"    {p.__name__}: {bug or m}" for (p, bug), m in found.items() if bool(bug) != (m is not None)),
            sep="\n",
            flush=True,
        )
    return wrong


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main())
