"""Compare the cost model of `axonym.insight` with published training runs: `python -m benchmarks published`.

A transformer's products and exchanges have closed forms, from which the model works out a bound and an estimate for
each run in `published_runs.toml`. What `axonym.insight.plan` counts in a transformer is compared with these forms.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

import axonym as axn
from axonym.insight import CHIPS, Chip, Islands, cost_model, explain, plan
from axonym.insight.chips import Rate
from axonym.insight.cost_model import Multiplication, Part, Sent
from examples.models import llama

from .harness import Row
from .llama import step

Run = Mapping[str, Any]

KEPT: dict[str, set[str]] = {
    "none": {"q", "k", "v", "out", "up", "core"},
    "minimal_with_context": {"q", "k", "v", "out", "up", "core"},
    "selective": {"q", "k", "v", "out", "up"},
    "minimal": {"q", "k", "v", "out", "up"},
    "save_dot_with_context_except_mlp": {"q", "k", "v", "out", "core"},
    "save_dot_except_mlpwi": {"q", "k", "v", "out"},
    "selective-op": {"q", "v", "out", "core"},
    "qkv_proj_offloaded": {"q", "k", "v"},
    "full": set(),
    "custom": set(),
}
"""The results that a layer keeps for the backward pass, by policy. `selective-op` is torchtitan's: every second one."""

NAMES = {"query_proj": "q", "key_proj": "k", "value_proj": "v", "out_proj": "out", "context": "core"}
"""MaxText's names of what is kept or offloaded."""

CHIP = {"h100-500w": "h100", "h100-a3": "h100"}
NETWORK = {"h100-a3": 25e9}
"""Where a cluster has another network than is usual for its chips, or its chips other rates: from the runs' notes."""
SLOWER: dict[str, Any] = {"h100-500w": {"memory_bandwidth": 2400e9}}


LOGITS = 20
"""Bytes read and written for each logit: in float32 by the product, twice by the softmax, and as a gradient."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """What is known of the code of a run's stack."""

    overlaps: bool = True
    """Whether it computes while it exchanges activations."""
    gradients: int = 2
    """Bytes of an element of a gradient when it is exchanged."""
    arrays: int = 1
    """How many exchanges it makes for the parameters of a layer."""


STACKS = {
    "maxtext": Stack(),
    # Its README: "--tp-comm-overlap", "--overlap-grad-reduce", "--overlap-param-gather".
    "megatron": Stack(gradients=4),
    # benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md: these are the runs without asynchronous tensor parallelism.
    "torchtitan": Stack(overlaps=False, gradients=4),
    # scripts/scaling_benchmarks.py: tp_linear_async_communication, ACCUMULATE_GRAD_IN_FP32. optim/zero.py gathers and
    # scatters each parameter by itself.
    "nanotron": Stack(gradients=4, arrays=6),
}


def read() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The models and the runs."""
    found = tomllib.loads((Path(__file__).parent / "published_runs.toml").read_text())
    return found["model"], found["run"]


def stack(run: Run) -> str:
    """The stack of a run, and its chips: what one calibration is for."""
    return f"{run['id'].split('-')[0]} {run['chip']}"


def chip_of(run: Run) -> Chip:
    """The chip of a run, with what its stack does."""
    name: str = run["chip"]
    chip = dataclasses.replace(CHIPS[CHIP.get(name, name)], **SLOWER.get(name, {}))
    if STACKS[run["id"].split("-")[0]].overlaps:
        return chip
    return dataclasses.replace(chip, reached=dataclasses.replace(chip.reached, waited=0.0))


def placed(run: Run) -> tuple[Islands, dict[str, int]]:
    """The chips of a run, and its mesh."""
    mesh = {a: run[short] for a, short in (("stage", "pp"), ("data", "dp"), ("fsdp", "fsdp"), ("tensor", "tp"))}
    chip, chips = chip_of(run), run["chips"]
    size = chips // run["slices"] if chip.torus else min(chips, 8)
    return Islands(chip, chips, size, NETWORK.get(run["chip"])), mesh


class Transformer:
    """The closed forms of a transformer."""

    def __init__(self, model: Mapping[str, Any]):
        self.layers, self.embed, self.mlp, self.vocab = (model[n] for n in ("layers", "embed", "mlp", "vocab"))
        self.queries, self.keys = (model[n] * model["head_size"] for n in ("heads", "kv_heads"))
        self.gates = 2 if model["gated"] else 1
        self.tables = 1 if model["tied"] else 2
        self.layer = self.embed * (2 * self.queries + 2 * self.keys + (self.gates + 1) * self.mlp)
        """The parameters of a layer, without norms."""

    def parameters(self) -> int:
        """All parameters, without norms."""
        return self.layers * self.layer + self.tables * self.vocab * self.embed

    def flops(self, tokens: int, seq: int) -> int:
        """The flops of a step by the usual count: attention as if it were not causal, nothing computed again."""
        per_token = 6 * (self.layers * self.layer + self.vocab * self.embed)
        return tokens * (per_token + 12 * self.layers * self.queries * seq)

    def products(self, rows: float, tensor: int) -> dict[str, Multiplication]:
        """The products of a layer's forward pass, for some tokens, without the core of attention."""

        def one(columns: float, summed: float, of: str = "columns", times: int = 1) -> Multiplication:
            columns, summed = (columns / tensor, summed) if of == "columns" else (columns, summed / tensor)
            return Multiplication(2 * rows * columns * summed * times, min(rows, columns, summed))

        return {
            "q": one(self.queries, self.embed),
            "k": one(self.keys, self.embed),
            "v": one(self.keys, self.embed),
            "out": one(self.embed, self.queries, "summed"),
            "up": one(self.mlp, self.embed, times=self.gates),
            "down": one(self.embed, self.mlp, "summed"),
        }


def scaled(products: Iterator[Multiplication] | list[Multiplication], by: float) -> tuple[Multiplication, ...]:
    return tuple(dataclasses.replace(p, flops=p.flops * by) for p in products)


def parts_of(run: Run, model: Transformer) -> list[Part]:
    """The parts of a run's step."""
    own, seq, tensor, fsdp, data, stages = (run[n] for n in ("id", "seq", "tp", "fsdp", "dp", "pp"))
    setting, zero = STACKS[own.split("-")[0]], run["zero"]
    rows = run["batch"] / (fsdp * data)
    micro = rows / min(run.get("microbatch") or (1 if stages > 1 else rows), rows)
    tokens = rows / micro * seq
    products = model.products(tokens, tensor)
    core = Multiplication(4 * tokens * seq * model.queries / tensor / 2, 1, core=True)
    results = 2.0 * tokens * (2 * model.embed + model.queries + 2 * model.keys + model.gates * model.mlp) / tensor
    touched = cost_model.TOUCHED * results
    kept = KEPT[run["remat"]] | {NAMES.get(n, n) for n in run.get("offload", ())}
    again = [p for name, p in products.items() if name not in {*kept, "down"}]
    again += [core] if "core" not in kept else []

    weights, layers = 2.0 * model.layer / tensor, model.layers / stages
    activations = 2.0 * tokens * model.embed

    def tensors(count: int) -> tuple[Sent, ...]:
        gather, scatter = (Sent(kind, ("tensor",), count * activations, "exchanging activations", count=count)
                           for kind in ("all-gather", "reduce-scatter"))  # fmt: skip
        return (gather, scatter) if tensor > 1 else ()

    def parameters(kind: str, size: float, what: str, axis: str = "fsdp", count: int = 1) -> tuple[Sent, ...]:
        return (
            (Sent(kind, (axis,), size, what, ahead=True, count=count),)
            if run[{"fsdp": "fsdp", "data": "dp"}[axis]] > 1
            else ()
        )

    gathered = parameters("all-gather", weights, "gathering parameters") if zero == 3 else ()
    scattered = parameters("reduce-scatter", weights * setting.gradients / 2, "summing gradients") if zero == 3 else ()
    sizes = {"decoder_layer_input": model.embed, "query_proj": model.queries / tensor, "key_proj": model.keys / tensor,
             "value_proj": model.keys / tensor, "out_proj": model.embed, "context": model.queries / tensor,
             "mlpwo": model.embed}  # fmt: skip
    offloaded = 2 * tokens * sum(sizes[n] for n in run.get("offload", ()))
    forward = Part(layers * micro, (*products.values(), core), (*tensors(2), *gathered), touched, offloaded)
    recomputed = bool(again) and run["remat"] != "selective"
    backward = Part(
        layers * micro,
        (*scaled(list(products.values()), 2), *scaled([core], 2.5), *again),
        (*tensors(2), *(tensors(1) if len(again) > 2 else ()), *gathered, *scattered),
        touched * (3 if recomputed else 2),
        offloaded,
    )
    head = Multiplication(6 * tokens * model.vocab * model.embed / tensor, min(tokens, model.vocab / tensor))
    waiting = [dataclasses.replace(p, times=(stages - 1) / run["vp"] * layers, waits=True) for p in (forward, backward)]
    parts = [forward, backward, Part(micro / stages, (head,), touched=LOGITS * tokens * model.vocab / tensor)]
    # The gradients of replicas are summed after the last microbatch, and parameters gathered before the first.
    once = (layers * model.layer + model.vocab * model.embed) / tensor / fsdp / layers
    size, count = once * (setting.gradients if zero < 3 else 2), setting.arrays if zero == 1 else 1
    summed = parameters("all-reduce" if zero != 1 else "reduce-scatter", size, "summing gradients", "data", count)
    renewed = parameters("all-gather", 2 * once, "gathering parameters", "data", count) if zero == 1 else ()
    if summed:
        first, last = (dataclasses.replace(p, times=layers, sent=(*p.sent, *more))
                       for p, more in ((forward, renewed), (backward, summed)))  # fmt: skip
        rest = [dataclasses.replace(p, times=layers * (micro - 1)) for p in (forward, backward)]
        parts = [*rest, first, last, parts[-1]]
    stored = (layers * model.layer + model.vocab * model.embed) / tensor / fsdp / (data if zero == 1 else 1)
    parts.append(Part(1, touched=30 * stored))
    return [*parts, *waiting]


def measured(run: Run, model: Transformer) -> float:
    """The published seconds of a step."""
    tokens, found = run["batch"] * run["seq"], run["measured"]
    if "seconds" in found:
        return found["seconds"]
    if "tokens_per_chip" in found:
        return tokens / run["chips"] / found["tokens_per_chip"]
    rate = found["tflops"] * 1e12 if "tflops" in found else found["mfu_percent"] / 100 * chip_of(run).flops
    return model.flops(tokens, run["seq"]) / run["chips"] / rate


def times(run: Run, model: Transformer) -> tuple[float, float]:
    """The bound and the estimate of a run."""
    islands, mesh = placed(run)
    parts = parts_of(run, model)
    rates = functools.cache(functools.partial(islands.rate, mesh))
    least = cost_model.bound(parts, rates, islands.chip)
    return float(least), float(cost_model.estimate(parts, rates, islands.chip).seconds)


# --- sweeps ---


def kept(run: Run, model: Transformer) -> float:
    """About the bytes that a GPU keeps: parameters, gradients, state, activations of stages in flight, and logits."""
    tensor, stages, data = run["tp"], run["pp"], run["dp"]
    own = model.parameters() / tensor / stages
    state = own * (2 + 4 + 12 / (data if run["zero"] else 1))
    tokens, micro = run["microbatch"] * run["seq"], run["batch"] / data / run["microbatch"]
    of_layer = 2 * (10 * model.embed + 2 * model.queries + 2 * model.keys + 3 * model.mlp) / tensor
    in_flight = min(stages, micro) * model.layers / stages
    return state + tokens * (of_layer * in_flight + 10 * model.vocab / tensor)


def sweep(run: Run, model: Transformer) -> Iterator[dict[str, Any]]:
    """The settings of a sweep that fit into memory."""
    powers = [2**i for i in range(10)]
    for tensor, stages, microbatch, zero in itertools.product(powers[:6], powers[:5], powers, (0, 1)):
        data, rest = divmod(run["chips"], tensor * stages)
        if rest or stages > model.layers or run["batch"] % (data * microbatch or 1) or not data:
            continue
        other = {**run, "dp": data, "tp": tensor, "pp": stages, "microbatch": microbatch, "zero": zero}
        if kept(other, model) <= CHIPS["h100"].memory:
            yield other


def regret(run: Run, model: Transformer) -> float:
    """How much longer the published best of a sweep takes than the shortest of the sweep, by the estimates."""
    own = times(run, model)[1]
    return own / min(own, *(times(other, model)[1] for other in sweep(run, model))) - 1


# --- what `plan` counts ---

PLANNED = "v5p:8x8x8", "v5p:16x16x16"
"""The topologies for which a step is planned."""
COUNTED = "llama3.1-8b", "llama2-70b", "llama3.1-70b", "llama3.1-405b"


def llama_of(model: Mapping[str, Any]) -> llama.Config:
    """The configuration of the Llama of the examples with a model's sizes."""
    axes = {"Vocab": "vocab", "Embed": "embed", "Layers": "layers", "Mlp": "mlp", "KVHeads": "kv_heads",
            "HeadSize": "head_size"}  # fmt: skip
    given = {field: axn.Axis(name, model[name]) for field, name in axes.items()}
    group = axn.Axis("group", model["heads"] // model["kv_heads"])
    return llama.Config(**given, Group=group)  # pyright: ignore[reportArgumentType]


def counted(model: Mapping[str, Any], devices: int = 64, seq: int = 2048) -> tuple[float, float]:
    """What names tell of the flops and the bytes of a step of the Llama of the examples, over its closed forms.

    Parameters are in float32 and stored sharded; each device has one text, and computes each layer again.
    """
    config = llama_of(model)
    state = jax.eval_shape(lambda key: llama.Llama.init(config, key=key), jax.random.key(0))
    tokens = jax.eval_shape(lambda: axn.zeros({"batch": devices, "pos": seq}, "int32"))
    mesh = AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    report = explain(step, state, tokens, mapping=({"embed": "data"}, {"batch": "data"}), mesh=mesh, by="names")
    form = Transformer(model)
    again = 2 * (form.layer - form.embed * form.mlp) + 4 * form.queries * seq
    flops = form.flops(seq, seq) + seq * form.layers * again
    # Twice gathered and once scattered in the layers; then the head, and the rows of the table that are looked up.
    sent = 4 * (3 * form.layers * form.layer + 2 * form.vocab * form.embed + 2 * seq * form.embed)
    assert report.flops is not None
    return report.flops / flops, (report.total_sent() or 0) / (sent * (devices - 1) / devices)


# --- attention along a sequence ---

CONTEXT = {
    ("all-gather", 64): (1.31, 4.03, 14.33),
    ("ring", 64): (1.68, 4.63, 15.35),
    ("ring and heads", 16): (1.31, 4.02, 13.92),
    ("ring and heads", 8): (1.44, 4.05, 13.65),
}
"""Seconds of a step of Llama 3 8B for 64, 128 and 256 Ki positions over 64 chips of v5p, by ways and devices of a ring:
https://github.com/AI-Hypercomputer/maxtext/pull/4836, without balancing the causal mask."""


def of_context(way: str, ring: int, seq: int, model: Transformer) -> float:
    """The estimate for one text, with a balanced mask, and a layer's products computed again."""
    tokens, over, heads = seq / 64, ("ring", "heads"), 64 // ring
    keys, others = 4 * tokens * model.keys, 4 * tokens * model.queries

    def sent(backward: bool) -> tuple[Sent, ...]:
        ways = 2 if backward else 1
        if way == "all-gather":
            kinds = ("all-gather", "reduce-scatter")[:ways]
            return tuple(Sent(kind, ("ring",), 64 * keys, "exchanging keys", count=2) for kind in kinds)
        hops = (ring - 1) * ways
        exchanged = Sent("all-to-all", ("heads",), heads * (keys + others) * ways, "exchanging heads", count=4 * ways)
        travels = Sent("collective-permute", ("ring",), hops * keys, "exchanging keys", count=hops)
        return (exchanged, travels) if heads > 1 else (travels,)

    products = list(model.products(tokens, 1).values())
    core = Multiplication(2 * tokens * seq * model.queries, 1, core=True)
    gather = Sent("all-gather", over, 2 * model.layer, "gathering parameters", ahead=True)
    scatter = Sent("reduce-scatter", over, 2 * model.layer, "summing gradients", ahead=True)
    touched = cost_model.TOUCHED * 2 * tokens * (2 * model.embed + model.queries + 2 * model.keys + 2 * model.mlp)
    forward = Part(model.layers, (*products, core), (gather, *sent(False)), touched)
    again = (*scaled(products, 3), *scaled([core], 2.5))
    backward = Part(model.layers, again, (gather, scatter, *sent(True)), 3 * touched)
    islands = Islands("v5p", 64, 64)
    rates = functools.cache(functools.partial(islands.rate, {"ring": ring, "heads": heads}))
    return float(cost_model.estimate([forward, backward], rates, islands.chip).seconds)


# --- the bars ---


def within(ratios: Iterable[float], share: float) -> float:
    """The share of ratios that are within a share of 1."""
    found = list(ratios)
    return sum(abs(q - 1) <= share for q in found) / len(found)


def in_order(families: Iterable[Sequence[tuple[float, float]]]) -> float:
    """The share of pairs of runs, of flops per chip and second that differ by 3%, that estimates order as measured."""
    pairs = [p for runs in families for p in itertools.combinations(runs, 2)]
    right = [(a > c) == (b > d) for (a, b), (c, d) in pairs if max(b, d) > 1.03 * min(b, d)]
    return sum(right) / len(right) if right else 1.0


# --- a family left out ---

GUESSED = {
    "products": (0.5, 0.9),
    "cores": (0.3, 0.7),
    "ahead": (0.3, 1.0),
    "ahead_network": (0.2, 1.0),
    "waited": (0.0, 0.8),
}
"""The shares without a source, and where to look for them."""
SETS, BEST = 400, 10
"""How many random sets of them are tried, and how many of these, the best on the other families, are averaged."""


def anywhere(islands: Islands, mesh: Mapping[str, int], kind: str, axes: Sequence[str]) -> Rate:
    """What an exchange would take if all chips were one island, and any mesh axes had all links of a chip."""
    one = dataclasses.replace(islands.chip, torus=0, island=0)
    return Islands(one, islands.chips, islands.chips).rate(mesh, kind, axes)


def estimates(runs: Sequence[Run], models: Mapping[str, Any], linked: bool, sets: Sequence[Mapping[str, float]]) -> Any:
    """The estimate of each run by each set of shares, with slices and islands or as if there were none."""
    found = []
    for run in runs:
        (islands, mesh), parts = placed(run), parts_of(run, Transformer(models[run["model"]]))
        waited = {} if STACKS[run["id"].split("-")[0]].overlaps else {"waited": 0.0}
        for shares in sets:
            reached = dataclasses.replace(islands.chip.reached, **{**shares, **waited})
            other = dataclasses.replace(islands, chip=dataclasses.replace(islands.chip, reached=reached))
            rates = functools.partial(other.rate if linked else functools.partial(anywhere, other), mesh)
            found.append(float(cost_model.estimate(parts, functools.cache(rates), other.chip).seconds))
    return np.array(found).reshape(len(runs), len(sets))


def families_left_out() -> Iterator[Row]:
    """How estimates rank the runs of each family by shares that are fitted to others, of its kind or all."""
    models, runs = read()
    draws = np.random.default_rng(0).uniform(*zip(*GUESSED.values(), strict=True), size=(SETS, len(GUESSED)))
    sets = [dict(zip(GUESSED, map(float, draw), strict=True)) for draw in draws]
    true = np.array([measured(run, Transformer(models[run["model"]])) for run in runs])
    flops = [Transformer(models[run["model"]]).flops(run["batch"] * run["seq"], run["seq"]) for run in runs]
    work = np.array(flops) / np.array([run["chips"] for run in runs])
    family: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        family.setdefault(stack(run), []).append(i)
    is_tpu = {name: chip_of(runs[own[0]]).torus > 0 for name, own in family.items()}
    for linked in (True, False):
        seconds = estimates(runs, models, linked, sets)
        off = np.log(seconds / true[:, None])

        def pairs(own: list[int], column: int, seconds: Any = seconds) -> list[tuple[float, float]]:
            return [*zip(work[own] / seconds[own, column], work[own] / true[own], strict=True)]

        losses = {
            "the error": {name: np.abs(off[own]).mean(0) for name, own in family.items()},
            "the error beside one number a stack": {
                name: np.abs(off[own] - np.median(off[own], 0)).mean(0) for name, own in family.items()
            },
            "the rank": {
                name: np.array([1 - in_order([pairs(own, i)]) for i in range(SETS)]) for name, own in family.items()
            },
        }
        for by, loss in losses.items():
            for kinds in (True, False):
                found: list[list[tuple[float, float]]] = []
                for name, own in family.items():
                    others = [n for n in family if n != name and (not kinds or is_tpu[n] == is_tpu[name])]
                    best = np.argsort(sum(loss[n] for n in others), kind="stable")[:BEST]
                    found += [pairs(own, int(i)) for i in best]
                rank = in_order(found)
                what = f"rank of families left out, {'with' if linked else 'without'} linked chips, "
                what += f"shares by {by} of {'families of the kind' if kinds else 'all families'}"
                yield Row("published", what, f"{rank:.1%}", "no bar", 0, 1)


def rows() -> list[Row]:
    """How far the cost model is off; all limits are bars that it has to hold."""
    models, runs = read()
    ratios: dict[str, list[float]] = {}
    rates: dict[str, list[tuple[float, float]]] = {}
    bounds, ours, regrets = [], [], []
    for run in runs:
        model = Transformer(models[run["model"]])
        (least, seconds), true = times(run, model), measured(run, model)
        bounds.append(least / true)
        ratios.setdefault(stack(run), []).append(seconds / true)
        rate = model.flops(run["batch"] * run["seq"], run["seq"]) / run["chips"]
        rates.setdefault(stack(run), []).append((rate / seconds, rate / true))
        if chip_of(run).torus:
            ours.append(seconds / true)
        if run["id"].startswith("nanotron"):
            regrets.append(regret(run, model))
    ordered = in_order(rates.values())
    # One number for a stack, from its other runs.
    left_out = [
        q / statistics.median(found[:i] + found[i + 1 :])
        for found in ratios.values()
        if len(found) > 1
        for i, q in enumerate(found)
    ]

    def row(what: str, shown: str, bar: str, value: float, limit: float) -> Row:
        return Row("published", what, shown, bar, value, limit)

    def far(what: str, found: list[float], share: float, most: float) -> Row:
        own = within(found, share)
        return row(f"{what}: within {share:.0%}", f"{own:.1%} of {len(found)}", f"bar: {most:.0%}", 1 - own, 1 - most)

    below, median = sum(b <= 1 for b in bounds), statistics.median(regrets)
    what = f"regret of the published best of {len(regrets)} sweeps, median"
    rows = [
        row("bounds below the measured times", f"{below} of {len(bounds)}", "bar: all", max(bounds), 1),
        row("pairs of runs of a stack in the order measured", f"{ordered:.1%}", "bar: 75%", 1 - ordered, 0.25),
        far("estimates for TPUs, uncalibrated", ours, 0.10, 0.50),
        far("estimates for TPUs, uncalibrated", ours, 0.25, 0.90),
        far("estimates by one number a stack, from its other runs", left_out, 0.10, 0.75),
        far("estimates by one number a stack, from its other runs", left_out, 0.20, 0.92),
        row(what, f"{median:.1%}, at most {max(regrets):.0%}", "bar: 8%", median, 0.08),
    ]
    for name, found in ratios.items():
        middle = statistics.median(found)
        shown = f"{middle:.2f}, from {min(found):.2f} to {max(found):.2f}"
        rows.append(row(f"estimate over measured, {name}: median of {len(found)}", shown, "no bar", 0, 1))
    for name in COUNTED:
        flops, sent = counted(models[name])
        for what, ratio, bar in (("flops", flops, 0.01), ("bytes", sent, 0.05)):
            what = f"{what} of {name} by names, over the closed form"
            rows.append(row(what, f"{ratio:.4f}", f"bar: {bar:.0%}", abs(ratio - 1), bar))
    for (way, ring), true in CONTEXT.items():
        found = [of_context(way, ring, 1024 * size, Transformer(models["llama3.1-8b"])) for size in (64, 128, 256)]
        shown = ", ".join(f"{seconds:.2f} for {t:.2f} s" for seconds, t in zip(found, true, strict=True))
        rows.append(row(f"attention by {way}, {ring} in a ring: estimate for measured", shown, "no bar", 0, 1))
    return [*rows, *families_left_out(), *map(_planning, PLANNED)]


def _planning(chips: str) -> Row:
    """How long it takes to plan a step of 70 billion parameters, in seconds of the CPU."""
    config, seq = llama_of(read()[0]["llama3.1-70b"]), 4096
    tokens = jax.eval_shape(lambda: axn.zeros({"batch": 4096, "pos": seq}, "int32"))

    def build(remat: str, stages: int, microbatches: int) -> Any:
        schedule = axn.schedules.OneFOneB(microbatches, axis="batch") if stages > 1 else None
        own = dataclasses.replace(config, remat=llama.REMAT[remat])
        state = jax.eval_shape(lambda key: llama.Llama.init(own, key=key), jax.random.key(0))

        def train(model: llama.Llama, tokens: axn.NamedArray) -> Any:
            value, gradients = jax.value_and_grad(lambda m: m.loss(tokens, schedule))(model)
            return value, jax.tree.map(lambda p, g: p - 0.1 * g, model, gradients)

        return train, (state, tokens)

    start = time.process_time()
    choices = {"remat": list(llama.REMAT), "stages": [1, 2], "microbatches": [8, 16]}
    found = plan(build, None, tokens, chips=chips, choices=choices, ask=0)
    seconds = time.process_time() - start
    what = f"plan of 70B on {chips}, {found.considered} combinations with {len(choices)} choices: seconds of CPU"
    return Row("published", what, f"{seconds:.1f} s", "bar: 60 s", seconds, 60)
