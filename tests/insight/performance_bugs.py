"""Twenty realistic bugs of performance, planted one at a time in a small language model.

They were written before the report had a verdict. `python -m tests.insight.performance_bugs` prints the reports in
another order, for somebody who has not read this file, and `--answers` what each of them has.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import axonym as axn
from axonym import nn

Batch, Pos, Embed, Heads, HeadSize, Mlp, Vocab = axn.make_axes(
    batch=32, pos=8, embed=32, heads=4, head_size=8, mlp=96, vocab=128
)
MESH = {"data": 4, "model": 2}
COMPUTE = {"batch": "data", "heads": "model", "mlp": "model", "vocab": "model"}
STORED = {"embed": "data", "heads": "model", "mlp": "model", "vocab": "model"}
FSDP = STORED, COMPUTE

Change = Callable[[Any], Any]


def as_it_is(x: Any) -> Any:
    return x


def parameters(dtype: Any = jnp.float32) -> Any:
    def layer() -> dict[str, axn.NamedArray]:
        shapes = {
            "norm": (Embed,),
            **dict.fromkeys("qkv", (Embed, Heads, HeadSize)),
            "o": (Heads, HeadSize, Embed),
            "up": (Embed, Mlp),
            "down": (Mlp, Embed),
        }
        return {name: axn.ones(axes, dtype=dtype) for name, axes in shapes.items()}

    table, head = axn.ones((Vocab, Embed), dtype=dtype), axn.ones((Embed, Vocab), dtype=dtype)
    return {"table": table, "layers": [layer(), layer()], "head": head}


def attention(w: Any, x: axn.NamedArray) -> axn.NamedArray:
    q, k, v = (axn.dot(x, w[name], axis="embed") for name in "qkv")
    k, v = (axn.rename(a, {"pos": "key_pos"}) for a in (k, v))
    scores = nn.softmax(axn.dot(q, k, axis="head_size") / 3, "key_pos")
    return axn.dot(axn.dot(scores, v, axis="key_pos"), w["o"], axis=("heads", "head_size"))


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a step that can be changed."""

    hidden: Change = as_it_is
    after: Change = as_it_is
    scores: Change = as_it_is
    weights: Change = as_it_is
    microbatches: int = 1
    inside: bool = False
    """Whether gradients are summed over devices in each microbatch."""


AS_IT_IS = Parts()


def step(parts: Parts = AS_IT_IS) -> Callable[..., Any]:
    """Make a training step."""

    def loss(w: Any, tokens: axn.NamedArray) -> jax.Array:
        w = parts.weights(w)
        x = w["table"]["vocab", tokens]
        for layer in w["layers"]:
            normed = nn.standardize(x, "embed") * layer["norm"]
            x = x + attention(layer, normed)
            x = x + axn.dot(parts.hidden(axn.tanh(axn.dot(x, layer["up"], axis="embed"))), layer["down"], axis="mlp")
            x = parts.after(x)
        scores = parts.scores(axn.dot(x, w["head"], axis="embed"))
        return axn.mean(nn.cross_entropy_loss(scores, "vocab", tokens)).scalar().astype(jnp.float32)

    def train(w: Any, tokens: axn.NamedArray) -> Any:
        if parts.microbatches == 1:
            value, gradients = jax.value_and_grad(loss)(w, tokens)
        else:
            n = parts.microbatches
            many = axn.unflatten_axis(tokens, "batch", {"batch": Batch.size // n, "part": n})

            def turn(total: Any, part: axn.NamedArray) -> Any:
                value, gradients = jax.value_and_grad(loss)(w, part)
                if parts.inside:
                    gradients = axn.shard(gradients, {"heads": "model", "mlp": "model", "vocab": "model"})
                return jax.tree.map(jnp.add, total, (value, gradients)), None

            start = jnp.zeros(()), jax.tree.map(jnp.zeros_like, w)
            (value, gradients), _ = axn.scan(turn, "part")(start, many)
        return value, jax.tree.map(lambda w, g: (w - 0.1 * g).astype(w.dtype), w, gradients)

    return train


def with_state(w: Any, state: Any, tokens: axn.NamedArray) -> Any:
    """Train with moments, which an optimizer keeps."""
    value, updated = step()(w, tokens)
    state = jax.tree.map(lambda w, m, n: 0.9 * m + w - n, w, state, updated)
    return value, updated, state


def positional(fn: Callable[[jax.Array], jax.Array]) -> Change:
    return lambda x: axn.named(fn(x.array), x.names)


@dataclasses.dataclass(frozen=True)
class Bug:
    """A step with a bug, and what a report must say of it at first glance."""

    mapping: Any
    said: tuple[str, ...]
    """Regular expressions that the parts before the details must match."""
    parts: Parts = Parts()
    by: str = "names"
    arguments: Callable[[], tuple[Any, ...]] = lambda: (parameters(), axn.zeros((Batch, Pos), dtype=int))
    step: Callable[..., Any] | None = None
    chip: Any = "v5e"

    def report(self) -> axn.insight.Report:
        fn = self.step or step(self.parts)
        mesh, args = axn.make_mesh(MESH), jax.eval_shape(self.arguments)
        return axn.insight.explain(fn, *args, mapping=self.mapping, mesh=mesh, by=self.by, chip=self.chip)


SMALL = axn.insight.Chip("small", 1e12, 2**14, 1e12, 1e12, "")
PARTITIONED = "partitioner"
BUGS: dict[str, Bug] = {
    # the mapping
    "a misspelt batch": Bug(
        {**COMPUTE, "batch": None, "bacth": "data"},
        ("bacth", "Did you mean 'batch'", "% of the compute is repeated, first .*: 4 devices along data"),
    ),
    "the heads of another model": Bug(
        {"batch": "data", "kv_heads": "model", "mlp": "model", "vocab": "model"},
        ("kv_heads", "Did you mean 'heads'", "repeated, first .* in dot.*: 2 devices along model"),
    ),
    "mlp is forgotten": Bug(
        {"batch": "data", "heads": "model", "vocab": "model"},
        ("of the compute is repeated, first .*: 2 devices along model", "Try: shard mlp"),
    ),
    "no axis for the mesh axis model": Bug(
        {"batch": "data"}, ("Nothing uses the mesh axis model", "50% of the compute")
    ),
    "no batch": Bug(
        {"heads": "model", "mlp": "model", "vocab": "model"},
        ("Nothing uses the mesh axis data", "75% of the compute", "Try: shard .*batch"),
    ),
    "a misspelt axis of parameters": Bug(
        ({**STORED, "embed": None, "embde": "data"}, COMPUTE), ("embde", "Did you mean 'embed'")
    ),
    "parameters are not stored sharded": Bug(
        COMPUTE,
        ("of the bytes of arguments are held in 4 copies, over data: .*w/table.*gradients are all-reduced",),
    ),
    "only the table is stored sharded": Bug(
        ({"vocab": ("data", "model")}, COMPUTE),
        ("held in 4 copies, over data: .*w/layers/\\*/up.*Sharded over data: only w/head, w/table",),
        by=PARTITIONED,
    ),
    "the state of the optimizer is replicated": Bug(
        None,
        ("held in 8 copies, over data and model: .*state/",),
        by=PARTITIONED,
        arguments=lambda: (parameters(), parameters(), axn.zeros((Batch, Pos), dtype=int)),
        step=axn.named_jit(
            with_state,
            COMPUTE,
            in_placement={"w": COMPUTE, "tokens": COMPUTE, "state": jax.P()},
        ),
    ),
    # the step
    "a placement without batch": Bug(
        COMPUTE,
        (
            "batch is gathered at performance_bugs.py",
            "a placement replicates batch",
            "Try: add batch to the placement.*, or leave",
        ),
        Parts(hidden=lambda x: axn.shard(x, {"mlp": "model"})),
        by=PARTITIONED,
    ),
    "a cumulative sum": Bug(
        COMPUTE,
        ("mlp is gathered at performance_bugs.py.*code without names needs all of mlp",),
        Parts(hidden=positional(lambda x: jnp.cumsum(x, -1))),
        by=PARTITIONED,
    ),
    "a positional product": Bug(
        COMPUTE,
        ("mlp is gathered.*code without names needs all of mlp", "Try: write it with names"),
        Parts(hidden=positional(lambda x: x @ jnp.ones((96, 96)))),
        by=PARTITIONED,
    ),
    "a median over the batch": Bug(
        COMPUTE, ("in median|median", "batch"), Parts(after=lambda x: x - axn.median(x, "batch")), by=PARTITIONED
    ),
    "replicated scores": Bug(
        COMPUTE, ("(batch|vocab).* is gathered.*a placement replicates",), Parts(scores=axn.unshard), by=PARTITIONED
    ),
    "sorted scores": Bug(COMPUTE, ("in sort", "vocab"), Parts(scores=lambda x: axn.sort(x, "vocab")), by=PARTITIONED),
    "a loop over examples": Bug(
        COMPUTE,
        ("batch is (gathered|moved).*", "performance_bugs.py"),
        Parts(hidden=positional(lambda x: jax.lax.map(jnp.sin, x))),
        by=PARTITIONED,
    ),
    "many microbatches": Bug(  # the compiler gathers parameters once, but not the gradients
        FSDP,
        ("The same .*gradients are sent again in each turn of a loop at .*, 8 times",),
        Parts(microbatches=8),
        by=PARTITIONED,
    ),
    "gradients are summed in each microbatch": Bug(
        COMPUTE,
        ("The same .*gradients are sent again in each turn of a loop at .*, 8 times",),
        Parts(microbatches=8, inside=True),
        by=PARTITIONED,
    ),
    "parameters are converted after they are gathered": Bug(
        FSDP,
        ("Parameters are gathered as f32 at performance_bugs.py.*converted to bf16: .*w/", "Try: convert them to bf16"),
        Parts(weights=lambda w: axn.tree.map(lambda x: x.astype(jnp.bfloat16), axn.shard(w, COMPUTE))),
        by=PARTITIONED,
    ),
    "it does not fit": Bug(FSDP, ("This does not fit", "Try: "), chip=SMALL),
}


def main() -> None:
    names = list(BUGS)
    random.Random(7).shuffle(names)
    for i, name in enumerate(names):
        print(f"=== report {i + 1} ===" + (f" {name}" if "--answers" in sys.argv else ""))
        print(f"{BUGS[name].report()}\n")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
