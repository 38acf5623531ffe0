"""Contracts catch planted bugs and accept clean steps; reports have the line; comparisons show the differences."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import pytest

import axonym as axn
from axonym.insight import BrokenContract, Comparison, compare, contract, explain
from tests.insight import cases

Batch, Embed, Mlp, Vocab = axn.make_axes(batch=16, embed=32, mlp=48, vocab=80)
COMPUTE = {"batch": "data", "mlp": "model", "vocab": "model"}
STORED = {"embed": "data", "mlp": "model", "vocab": "model"}
FSDP = STORED, COMPUTE


def arguments() -> Any:
    def made() -> Any:
        w = {"up": axn.ones((Embed, Mlp)), "down": axn.ones((Mlp, Embed)), "head": axn.ones((Embed, Vocab))}
        return w, axn.ones((Batch, Embed)), axn.zeros(Batch, dtype=int)

    return jax.eval_shape(made)


def logits(w: Any, x: Any) -> Any:
    hidden = axn.tanh(axn.dot(x, w["up"], axis="embed"))
    return axn.dot(axn.dot(hidden, w["down"], axis="mlp"), w["head"], axis="embed")


def trained(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(w: Any, x: Any, labels: Any) -> Any:
        return jax.value_and_grad(lambda w: loss(w, x, labels).scalar())(w)

    return step


@trained
def clean(w: Any, x: Any, labels: Any) -> Any:
    return axn.nn.cross_entropy_loss(logits(w, x), "vocab", labels)


@trained
def gathers_vocab(w: Any, x: Any, labels: Any) -> Any:
    scores = axn.sort(axn.sum(logits(w, x), "batch"), "vocab")  # the culprit
    return axn.mean(scores["vocab", 0])


@trained
def gathers_batch(w: Any, x: Any, labels: Any) -> Any:
    ranked = axn.sort(axn.sum(logits(w, x), "vocab"), "batch")  # the culprit
    return axn.mean(ranked)


@trained
def replicates_batch(w: Any, x: Any, labels: Any) -> Any:
    everywhere = axn.shard(x, {"batch": None})  # the culprit
    return axn.mean(axn.exp(logits(w, everywhere)))


@trained
def moves_batch(w: Any, x: Any, labels: Any) -> Any:
    ranked = axn.sort(logits(w, x), "batch")  # the culprit
    return axn.mean(ranked)


STRICT: dict[str, Any] = {"never_gathers": ["vocab", "batch", "mlp"], "scatters_gradients": True}
LIMIT: dict[str, Any] = {"max_sent": {"data": "48 KiB", "model": "10 KiB"}}


def test_a_clean_step_keeps_its_contract(mesh: jax.sharding.Mesh) -> None:
    with jax.set_mesh(mesh):
        report = contract(**STRICT, **LIMIT, mapping=FSDP).check(clean, *arguments())
    assert report.total_sent("data") and report.total_sent("model")


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        (gathers_vocab, STRICT, r"gathers vocab: all-gather over model .*test_contracts.py.*map vocab to None"),
        (gathers_batch, STRICT, r"gathers batch: all-gather over data .*needs all of batch"),
        (replicates_batch, STRICT, r"gathers batch: all-gather over data .*a placement replicates batch"),
        (clean, {"max_sent": {"data": "4 KiB"}}, r"sends .* over data, but may send 4 KiB.*stored sharded over data"),
        (clean, {"max_memory": "8 KiB"}, r"a device holds .*, but may hold 8 KiB: .* of arguments"),
    ],
)  # fmt: skip
def test_planted_bugs_break_it(step: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    with jax.set_mesh(cases.mesh_of(data=4, model=2)), pytest.raises(BrokenContract, match=message):
        contract(**options, mapping=FSDP).check(step, *arguments())


def test_gradients_of_stored_parameters_are_scattered() -> None:
    with jax.set_mesh(cases.mesh_of(data=4, model=2)):
        report = contract(**STRICT, mapping=FSDP).check(clean, *arguments())
    scattered = [c for c in report.collectives if c.kind == "reduce-scatter"]
    assert {c.stored for c in scattered} == {("embed",)} and len(scattered) == 3
    summed = [dataclasses.replace(c, kind=c.kind.replace("reduce-scatter", "all-reduce")) for c in report.collectives]
    broken = contract(scatters_gradients=True).broken(dataclasses.replace(report, collectives=tuple(summed)))
    assert len(broken) == 3 and "although embed is stored sharded: all-reduce over data" in broken[0]


def test_mesh_axes_and_options_of_contracts_are_checked() -> None:
    with jax.set_mesh(cases.mesh_of(data=8)), pytest.raises(ValueError, match=r"no axis 'dat'.*Did you mean 'data'"):
        contract(max_sent={"dat": 1}).check(lambda x: x, axn.ones({"batch": 8}))
    with pytest.raises(TypeError, match="a list of names"):
        contract(never_gathers="vocab")
    with pytest.raises(ValueError, match="a number of bytes such as 2048"):
        contract(max_memory="8 gigs")


# --- where an axis stops being sharded ---


CULPRITS = [(gathers_vocab, "vocab"), (gathers_batch, "batch"), (moves_batch, "batch")]


@pytest.mark.parametrize(("step", "axis"), CULPRITS)
def test_a_report_has_the_line(step: Callable[..., Any], axis: str) -> None:
    with jax.set_mesh(cases.mesh_of(data=4, model=2)):
        culprit = cases.first_lost(axis, step, *arguments(), mapping=FSDP)
        assert cases.first_lost("batch", clean, *arguments(), mapping=FSDP) is None
    assert culprit is not None and culprit.source is not None
    lines, first = inspect.getsourcelines(inspect.unwrap(step).__closure__[0].cell_contents)  # type: ignore  # the function that the step wraps
    assert "# the culprit" in lines[culprit.source.line - first]


# --- compare ---


def test_a_comparison_says_what_differs() -> None:
    with jax.set_mesh(cases.mesh_of(data=4, model=2)):
        found = compare(clean, arguments(), {"replicated": COMPUTE, "fsdp": FSDP}, by="partitioner", chip="v5e")
    less, more = found.reports.values()
    assert less.count("all-gather") == 0 and more.count("all-gather") == 3
    lines = found.differences("replicated", "fsdp")
    assert any(
        line.startswith("+ 1 x") and "embed is stored sharded over data, and all-gathered where it is used" in line
        for line in lines
    )
    assert any(line.startswith("- 1 x") and "all-reduce over data, backward" in line for line in lines)
    text = str(found)
    assert "fsdp, compared with replicated:" in text and "sent over data" in text
    columns = ["", "sent over data", "sent over model", "collectives", "flops", "at least", "bottleneck"]
    assert [cell.strip() for cell in text.splitlines()[0].split("|")[1:-1]] == columns


def test_what_is_compared() -> None:
    x = axn.ones({"batch": 8})
    compiled = axn.named_jit(lambda x: x * 2)
    found = Comparison({"compiled": explain(compiled, x, by="partitioner")})
    assert "| compiled | 0           | 0     |" in str(found)
    with pytest.raises(ValueError, match="nothing to compare"):
        compare(compiled, [x], {})


def test_each_broken_rule_says_two_ways_to_mend_it() -> None:
    mesh = cases.mesh_of(data=4, model=2)
    strict = contract(max_sent={"data": 0, "model": 0}, max_memory=1, mapping=FSDP, mesh=mesh)
    with pytest.raises(BrokenContract) as caught:
        strict.check(clean, *arguments())
    lines = str(caught.value).splitlines()
    assert len(lines) == 3 and all(re.search(r"\. Either .*; or .*\.$", line) for line in lines)
    for line in lines[:2]:  # which line of code, which array, how many bytes
        assert "test_contracts.py:" in line and re.search(r"f32\[\w+=\d+", line) and re.search(r"[\d.]+ KiB", line)


@pytest.mark.parametrize("by", ["names", "partitioner"])
def test_what_crosses_slices(by: str) -> None:
    """Of parameters stored within a slice, only gradients cross; stored over all slices, they do at each use."""
    weights = 4 * (32 * 48 + 48 * 32 + 32 * 80)
    hybrid: Any = {"mesh": axn.make_mesh({"replica": 2, "data": 4}), "between": "replica"}
    hybrid["mapping"] = {"embed": "data"}, {"batch": ("replica", "data")}
    flat: Any = {"mesh": axn.make_mesh({"data": 8}), "between": {"data": 2}}
    flat["mapping"] = {"embed": "data"}, {"batch": "data"}
    report = explain(clean, *arguments(), by=by, **hybrid)
    assert report.total_sent("slices", "all-gather") == 0 and report.between == {"replica": 2}
    sent = report.total_sent("slices", phase="backward")
    assert sent == weights / 4 == report.total_sent("replica", phase="backward")
    said = "across slices (replica), from each device: 1 B of other arrays (forward), 1 time; 5.5 KiB of gradients"
    assert f"{said} (backward), 3 times; within slices: 33 KiB" in str(report)
    assert "no parameter is gathered across slices" in str(report.verdict)
    report = explain(clean, *arguments(), by=by, **flat)
    assert report.total_sent("slices", phase="backward") == weights / 8
    assert report.total_sent("slices", "all-gather", "forward") == weights / 8
    (found,) = (s for s in report.verdict.suspicious if "across slices" in s.cause)
    assert found.cause == "Parameters are gathered across slices (data) at each use, 2.8 KiB: w/head, w/up, w/down."
    assert explain(clean, *arguments(), by=by, **flat | {"between": None}).total_sent("slices") == 0
    with pytest.raises(ValueError, match="between has pod; the mesh axes are data"):
        explain(clean, *arguments(), by=by, **flat | {"between": "pod"})


def test_what_may_never_cross() -> None:
    mesh, mapping = axn.make_mesh({"replica": 2, "data": 4}), ({"embed": "data"}, {"batch": ("replica", "data")})
    none: Any = {"max_sent": {"slices": 0}, "mapping": mapping, "mesh": mesh, "between": "replica"}
    contract(**none, phase="recomputed").check(clean, *arguments())
    contract(max_sent={"data": 0}, phase="recomputed", mapping=mapping, mesh=mesh).check(clean, *arguments())
    flat: Any = {"mapping": ({"embed": "data"}, {"batch": "data"}), "mesh": axn.make_mesh({"data": 8})}
    said = r"sends .* over slices \(data\) in the forward pass, but may send 0 B.* all-gather over data"
    with pytest.raises(BrokenContract, match=said):
        contract(max_sent={"slices": 0}, phase="forward", between={"data": 2}, **flat).check(clean, *arguments())
    with pytest.raises(ValueError, match="contract: the mesh has no axis 'slice', but"):
        contract(max_sent={"slice": 0}, **flat).check(clean, *arguments())
