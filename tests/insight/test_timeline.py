"""What a device holds in the course of a step: by the compiler's own figure, and by programs written by hand."""

from __future__ import annotations

import re
from typing import Any

import jax
import matplotlib
import pytest

import axonym as axn
from axonym.insight._hlo import HloProgram
from axonym.insight._lifetimes import Lifetimes
from tests.insight import cases

matplotlib.use("agg")

LOOP = """HloModule jit_f, is_scheduled=true, input_output_alias={ {}: (0, {}, may-alias) }

%body (p: (s32[], f32[256])) -> (s32[], f32[256]) {
  %p = (s32[], f32[256]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[256]{0} get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %large = f32[4,256]{1,0} broadcast(%x), dimensions={1}
  %y = f32[256]{0} slice(%large), slice={[0:1], [0:256]}
  ROOT %t = (s32[], f32[256]{0}) tuple(%next, %y)
}

%condition (p.1: (s32[], f32[256])) -> pred[] {
  %p.1 = (s32[], f32[256]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %end = s32[] constant(9)
  ROOT %less = pred[] compare(%i.1, %end), direction=LT
}

ENTRY %main (a: f32[256]) -> f32[256] {
  %a = f32[256]{0} parameter(0)
  %zero = s32[] constant(0)
  %start = s32[] copy(%zero)
  %negated = f32[256]{0} negate(%a)
  %given = (s32[], f32[256]{0}) tuple(%start, %negated)
  %loop = (s32[], f32[256]{0}) while(%given), condition=%condition, body=%body
  ROOT %result = f32[256]{0} get-tuple-element(%loop), index=1
}
"""


@pytest.mark.oldest
def test_the_state_of_a_loop_is_in_one_place() -> None:
    """The counter, the state, and what is four times as large; a donated argument gives its place to the state."""
    kept = re.sub(r", input_output_alias=.*", "", LOOP)
    for text, expected in ((LOOP, 4 + 1024 + 4096), (kept, 4 + 1024 + 4096 + 1024)):
        found = Lifetimes(HloProgram(text, 1))
        held = [m.held for m in found.moments()]
        assert max(held) == expected
        at = held.index(max(held))
        assert found.moments()[at].instruction.name == "large"
        assert sum(b.shape.bytes for b in found.held_at(at)) == expected


@pytest.mark.oldest
def test_what_is_used_again_keeps_its_place() -> None:
    text = """HloModule jit_f, is_scheduled=true

ENTRY %main (a: f32[256]) -> f32[256] {
  %a = f32[256]{0} parameter(0)
  %b = f32[256]{0} negate(%a)
  %c = f32[256]{0} exponential(%b)
  ROOT %d = f32[256]{0} add(%c, LAST)
}
"""
    for last, arrays in (("%c", 2), ("%b", 3)):
        moments = Lifetimes(HloProgram(text.replace("LAST", last), 1)).moments()
        assert max(m.held for m in moments) == 1024 * arrays, last


@pytest.mark.parametrize("case", ["llama fsdp", "llama mixed", "gpt2 sequence", "mixture experts", "classifier data"])
def test_the_peak_is_nearly_that_of_the_compiler(case: str) -> None:
    name, mapping = case.split()
    of = {"mixture": cases.mixture, "classifier": cases.classifier}
    mesh, step, args = of[name](mapping) if name in of else cases.language_model(name, mapping)
    reports = [axn.insight.explain(step, *args, mesh=mesh, by=by) for by in ("compiled", "partitioner")]
    memory = reports[0].memory
    assert memory is not None
    for report in reports:
        timeline = report.timeline
        assert timeline is not None and len(timeline.held) == len(timeline.phases)
        assert abs(timeline.peak - memory.total) < 0.1 * memory.temporaries
        assert sum(h.bytes for h in timeline.at_peak) == timeline.peak
        assert 0 < sum(h.bytes for h in timeline.kept_for_backward) < timeline.peak
        assert sum(report.arguments.values()) == memory.arguments
        assert sum(h.bytes for h in timeline.at_peak if h.kind == "argument") <= memory.arguments


def explained() -> axn.insight.Report:
    Batch, Embed, Mlp = axn.make_axes(batch=64, embed=256, mlp=1024)

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return axn.mean(axn.dot(axn.tanh(axn.dot(x, w, axis="embed")), w, axis="mlp") ** 2).scalar()

        return jax.value_and_grad(loss)(w)

    mesh = cases.mesh_of(data=4, model=2)
    args = jax.eval_shape(lambda: (axn.ones((Embed, Mlp)), axn.ones((Batch, Embed))))
    mapping = {"batch": "data", "mlp": "model"}
    return axn.insight.explain(step, *args, mapping=mapping, mesh=mesh, by="partitioner")


def test_arrays_at_the_peak_have_names_and_lines() -> None:
    report = explained()
    assert report.timeline is not None
    gradient = next(h for h in report.timeline.at_peak if h.kind == "temporary" and h.bytes >= 4 * 256 * 512)
    assert gradient.phase == "backward" and gradient.operation is not None and gradient.source is not None
    assert {"embed=256", "mlp=512"} <= set(re.findall(r"\w+=\d+", gradient.array))
    assert gradient.source.file == __file__
    row = rf"- {re.escape(gradient.array)} +\S.* backward +test_timeline.py:{gradient.source.line} +dot\["
    assert re.search(row, str(report)) and "### at the peak, in the backward pass: each" in str(report)
    assert report.to_dict()["timeline"]["held"] == report.timeline.held


def test_what_is_not_compiled_has_no_timeline() -> None:
    report = axn.insight.explain(
        lambda x: x * 2, axn.ones({"batch": 4}), mapping={}, mesh=cases.mesh_of(data=8), by="names"
    )
    assert report.timeline is None


@pytest.mark.oldest
def test_a_program_of_an_unknown_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported without a timeline, and the report says so."""
    made = Lifetimes._results
    monkeypatch.setattr(Lifetimes, "_results", lambda self, *args: made(self, *args) * 2)
    report = axn.insight.explain(lambda x: x * 2, axn.ones({"batch": 4}), by="partitioner")
    assert report.timeline is None and "the memory over the course of the step is not known: " in str(report)
