"""The report begins with a verdict, which shows planted bugs of performance at first glance."""

from __future__ import annotations

import io
import re
from typing import Any

import equinox as eqx
import jax
import pytest
from rich.console import Console

import axonym as axn
from axonym.insight import Report
from tests.insight import cases
from tests.insight.performance_bugs import BUGS, FSDP, MESH, NOT_FOUND, Bug
from tests.insight.test_explain import FSDP_AND_TENSOR, batch, step, weights

ON_ALL_VERSIONS = {"a cumulative sum", "a positional product", "the state of the optimizer is replicated"}


def glance(report: Report) -> str:
    """Return what the report says before its tables."""
    return str(report).split("\n\nover ")[0]


@pytest.mark.parametrize(
    "name",
    [
        name if bug.by == "names" or name in ON_ALL_VERSIONS else pytest.param(name, marks=pytest.mark.further)
        for name, bug in BUGS.items()
        if name not in NOT_FOUND
    ],
)
def test_a_planted_bug_is_said_at_first_glance(name: str) -> None:
    said = glance(BUGS[name].report())
    for expected in BUGS[name].said:
        assert re.search(expected, said), f"{expected!r} is not in:\n{said}"


def test_at_least_18_of_20_are_found() -> None:
    assert len(BUGS) == 20 and len(NOT_FOUND) <= 2 and NOT_FOUND < BUGS.keys()


def test_a_clean_step_is_fine() -> None:
    verdict = Bug(FSDP, ()).report().verdict
    assert verdict.suspicious == () and len(verdict.costliest) == 3
    assert {"no work is repeated", "each mesh axis is used", "no large argument is held in copies"} <= {*verdict.fine}


def test_all_forms_say_the_same_words() -> None:
    report = BUGS["the heads of another model"].report()
    text, markdown, shown = str(report), report.to_markdown(), io.StringIO()
    Console(width=1000, file=shown, color_system=None).print(report)
    words = [report.verdict.binds, report.verdict.explanation]
    words += [line for _, lines in report.verdict.sections() for line in lines]
    assert len(words) >= 7
    for word in words:
        assert all(word in form for form in (text, markdown, shown.getvalue())), word


@pytest.mark.parametrize(
    "mapping", [{"batch": "data"}, {"mlp": "model"}, FSDP_AND_TENSOR, ({"embed": "model"}, {"batch": "data"})]
)
def test_all_ways_find_the_same_repeated_work(mapping: Any) -> None:
    found = {}
    for by in ("partitioner", "shardy", "names"):
        try:
            report = axn.insight.explain(step, weights(), batch(), mapping=mapping, mesh=axn.make_mesh(MESH), by=by)
        except ValueError as e:
            assert by == "names" and "devices that do not share its mesh axes" in str(e)
            continue
        work = {(w.operation, w.phase, w.source, w.flops, w.copies, w.axes) for w in report.repeated}
        found[by] = work, tuple((x.path, x.bytes, x.copies, x.replicated_over) for x in report.placed)
    assert len(found) >= 2 and len(set(map(repr, map(sorted_parts, found.values())))) == 1, found


def sorted_parts(found: Any) -> Any:
    work, placed = found
    return sorted(map(str, work)), placed


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            ("classifier", "height"), marks=pytest.mark.further
        ),  # convolutions repeat a little at their edges
        ("mixture", "experts"),
        pytest.param(("llama", "mixed"), marks=pytest.mark.further),
    ],
)
def test_no_work_is_said_to_be_repeated_where_none_is(case: tuple[str, str]) -> None:
    of = {"mixture": cases.mixture, "classifier": cases.classifier}
    mesh, compiled, args = of[case[0]](case[1]) if case[0] in of else cases.language_model(*case)
    with jax.set_mesh(mesh):
        report = axn.insight.explain(compiled, *args, by="partitioner")
    assert "no work is repeated" in report.verdict.fine


def test_transfers_have_the_path_of_their_parameter() -> None:
    report = axn.insight.explain(
        step, weights(), batch(), mapping=FSDP_AND_TENSOR, mesh=axn.make_mesh(MESH), by="shardy"
    )
    paths = {(c.kind, c.phase, c.parameters) for c in report.collectives}
    gathered = {("all-gather", "forward", (f"w/{name}",)) for name in ("up", "down")}
    scattered = {("reduce-scatter", "backward", (f"w/{name}",)) for name in ("up", "down")}
    assert paths == gathered | scattered | {("all-reduce", "forward", ())}


def test_arrays_without_names_have_the_path_of_their_parameter() -> None:
    mesh, compiled, args = cases.plain_jax()
    report = axn.insight.explain(compiled, *args, mesh=mesh, by="partitioner")
    found = {c.parameters for c in report.collectives if c.phase == "backward" and c.axes == ("data",)}
    assert found == {("weights/up",), ("weights/down",)}


def test_a_lifted_module_has_the_paths_of_its_parameters() -> None:
    """Also in a step of `eqx.filter_jit`, with abstract arguments."""

    class Model(eqx.Module):
        mlp: eqx.nn.MLP

    @eqx.filter_jit
    def gradients(model: Any, x: axn.NamedArray) -> Any:
        return eqx.filter_grad(lambda model: axn.mean(axn.lift(model.mlp, "embed -> out")(x) ** 2).scalar())(model)

    model = eqx.filter_eval_shape(lambda: Model(eqx.nn.MLP(32, 16, 64, 1, key=jax.random.key(0))))
    x = jax.eval_shape(lambda: axn.ones({"batch": 16, "embed": 32}))
    report = axn.insight.explain(
        gradients, model, x, mapping={"batch": "data"}, mesh=axn.make_mesh({"data": 8}), by="partitioner"
    )
    found = {c.parameters for c in report.collectives}
    assert {("model/mlp/layers/0/weight",), ("model/mlp/layers/1/weight",)} <= found
    assert not any("held array" in f"{c.array} {c.reason}" for c in report.collectives)
    assert all(c.reason is not None for c in report.collectives if c.parameters)


def test_small_rows_are_one() -> None:
    report = BUGS["parameters are not stored sharded"].report()
    total, small = report.total_sent() or 0, [c for c in report.collectives if "f32[]" in c.array]
    assert small and sum(c.total_sent or 0 for c in small) < 0.01 * total
    assert "smaller ones" in str(report) and not re.search(r"x 6 B .*f32\[\]", str(report))
    assert "2 x " in str(report)  # the layers


def test_a_report_without_a_chip() -> None:
    report = axn.insight.explain(
        step, weights(), batch(), mapping={"batch": "data"}, mesh=axn.make_mesh(MESH), by="names"
    )
    assert report.verdict.binds == "No chip was given, so times are not known; 50% of the compute is repeated."
    assert report.verdict.explanation.startswith("Most bytes go over data: each device sends ")


def test_blame_says_that_an_axis_is_sharded_nowhere() -> None:
    mesh, mapping = axn.make_mesh(MESH), {"bacth": "data", "mlp": "model"}
    found = axn.insight.blame(step, weights(), batch(), axis="batch", mapping=mapping, mesh=mesh)
    assert str(found) == "nothing gathers or moves batch: no mapping shards it, but 'bacth', which no array has."
    found = axn.insight.blame(step, weights(), batch(), axis="bacth", mapping=mapping, mesh=mesh)
    assert str(found) == "nothing gathers or moves bacth: no array of the step has it. Did you mean 'batch'?"
