"""The training script under a plan, and the explanation of its step."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from axonym import insight
from tests.examples.runs import SMALL, Problem, losses, saved_steps, train, train_lm

plans, devices = train_lm.plans, train_lm.devices


class Planned(NamedTuple):
    """A run under a plan that was explained."""

    out: Path
    said: str
    """The output."""
    args: tuple[Any, ...]
    """The arguments of the single call of `insight.plan`: a search takes most of the time of these tests."""
    options: dict[str, Any]
    plan: insight.MappingPlan


@pytest.fixture(scope="module")
def planned(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Planned:
    out, make = tmp_path_factory.mktemp("planned") / "run", insight.plan
    said: list[str] = []
    calls: list[tuple[Any, Any, insight.MappingPlan]] = []

    def plan(*args: Any, **options: Any) -> insight.MappingPlan:
        calls.append((args, options, make(*args, **options | few)))
        return calls[-1][-1]

    few: Any = {"ask": 1, "choices": {"remat": ["full"], "accumulate": [1, 2]}}
    with pytest.MonkeyPatch.context() as p:
        p.setattr(train_lm.Reporter, "say", lambda self, text="": said.append(text))
        p.setattr(insight, "plan", plan)
        assert train(text, out, "--mapping", "plan", "--explain", "--samples", "0") == 0
    ((args, options, found),) = calls
    return Planned(out, "\n".join(said), args, options, found)


def kept(out: Path) -> dict[str, Any]:
    return json.loads((out / "plan.json").read_text())


def test_the_plan_is_of_the_step_that_trains(planned: Planned) -> None:
    config = train_lm.settings.parse(SMALL)
    start, step, _ = train_lm.steps.plain_functions(
        config.model, train_lm.steps.make_optimizer(config.optimizer), train_lm.Policy.parse("float32")
    )
    state = train_lm.jax.eval_shape(start, train_lm.jax.random.key(0))
    tokens = train_lm.steps.abstract_tokens(*train_lm.axn.make_axes(batch=8, pos=16))
    build, *arguments = planned.args
    assert jax.tree.structure(arguments) == jax.tree.structure([state, tokens])
    assert jax.tree.leaves(arguments) == jax.tree.leaves([state, tokens])
    of, arguments = build(remat="full", accumulate=1)
    assert str(jax.make_jaxpr(of)(*arguments)) == str(jax.make_jaxpr(step)(state, tokens))
    choices = {"remat": ["full", "mlp", "none", "offload"], "accumulate": [1, 2, 4]}
    assert planned.options == {"chips": 8, "chip": "v5e", "ask": 4, "choices": choices}
    assert {tuple(p.choices) for p in planned.plan.found} == {("remat", "accumulate")}


@pytest.mark.oldest
@pytest.mark.parametrize("remat", ["mlp", "offload"])
def test_microbatches_and_kept_values_change_no_loss(remat: str, text: Path, tmp_path: Path, finished: Path) -> None:
    """A file with a mapping may say them, as that of a plan does."""
    mapping = {"mapping": {"batch": "data"}, "parameter_mapping": {"embed": "data"}, "mesh": {"data": 2, "model": 4}}
    file = tmp_path / "mapping.json"
    file.write_text(json.dumps(mapping | {"remat": remat, "accumulate": 2}))
    assert train(text, tmp_path / "run", "--mapping", file, "--samples", "0") == 0
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(finished), rtol=1e-4)
    for change, message in (
        ({"remat": "some"}, r"remat must be one of full, mlp, none, offload, got 'some'"),
        ({"accumulate": 0}, r"accumulate must be a number from 1, got 0"),
    ):
        file.write_text(json.dumps(mapping | change))
        with pytest.raises(Problem, match=message):
            train_lm.strategies.read(file)
    strategy = train_lm.strategies.Strategy("own", {"data": 8}, {"batch": "data"}, {"batch": "data"}, accumulate=3)
    state, mesh = jax.eval_shape(lambda: None), train_lm.strategies.make_mesh(strategy)
    tokens = train_lm.steps.abstract_tokens(*train_lm.axn.make_axes(batch=8, pos=16))
    with pytest.raises(Problem, match="The 1 texts of a device cannot be cut into accumulate=3 microbatches"):
        train_lm.strategies.check(strategy, mesh, state, tokens)


def test_what_must_fit_fewer_hosts(tmp_path: Path) -> None:
    """A run that may lose hosts says so at the start."""
    mapping, file = {"mapping": {"batch": "data"}, "between": {"data": 1}}, tmp_path / "mapping.json"
    flags = [*SMALL, "--mapping", str(file), "--distributed", "--elastic", "--out", str(tmp_path / "run")]
    for size, message in ((8, "--mesh have -1 for one of the sizes"), (-1, "let between be names, data, not numbers")):
        file.write_text(json.dumps(mapping | {"mesh": {"data": size}}))
        with pytest.raises(Problem, match=message):
            train_lm.Prepared(train_lm.settings.parse(flags), None)


def test_the_winner_is_trained_under(planned: Planned, finished: Path) -> None:
    out, said, best = planned.out, planned.said, planned.plan.best
    stored = best.storage or best.compute
    assert kept(out) == json.loads(
        json.dumps({"mesh": best.mesh, "mapping": best.compute, "parameter_mapping": stored, **best.choices})
    )
    for line in best.code().splitlines():
        assert line in said and line in (out / "plan.md").read_text()
    np.testing.assert_allclose(losses(out), losses(finished), rtol=1e-4)
    for name in saved_steps(out):
        assert (out / "checkpoints" / name / "plan.json").read_text() == (out / "plan.json").read_text()
    strategy = train_lm.strategies.choose(str(out / "plan.json"), "auto", 2, 8)
    assert (dict(strategy.mesh), strategy.schedule()) == (kept(out)["mesh"], None)
    assert {"remat": strategy.remat, "accumulate": strategy.accumulate} == best.choices


@pytest.mark.oldest
def test_experts_are_planned(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mappings of experts, whose devices exchange tokens, are among those compared; the best one is trained under."""
    made, found = insight.plan, list[insight.MappingPlan]()

    def plan(*args: Any, **options: Any) -> insight.MappingPlan:
        few: Any = {"remat": ["full"], "accumulate": [1]}
        found.append(made(*args, **options | {"ask": 2, "memory": "700 KiB", "choices": few}))
        return found[-1]

    monkeypatch.setattr(insight, "plan", plan)
    more = "--experts 8 --mlp 64 --embed 32 --samples 0".split()
    assert train(text, tmp_path / "run", "--mapping", "plan", *more) == 0
    assert any(p.compute.get("experts") == "model" and p.by == "partitioner" for p in found[0].found)
    assert kept(tmp_path / "run")["mapping"] == json.loads(json.dumps(found[0].best.compute))
    first, *_, last = losses(tmp_path / "run")
    assert last < first


def test_what_is_explained_is_the_step_that_trains(planned: Planned) -> None:
    out, said = planned.out, planned.said
    explanation = (out / "explanation.md").read_text()
    mesh = ", ".join(f"{name}={size}" for name, size in kept(out)["mesh"].items())
    for text in (said, explanation):
        assert f"train on the mesh {mesh} (cpu, by='compiled')" in text
        assert "memory of each device: " in text and "least times on v5e: compute " in text
        assert re.search(r"sums over \w+, which is sharded over (data|model)", text)
    assert (out / "explanation.html").read_text("utf-8").startswith("<!DOCTYPE html>")
    verdict = re.search(r"^.* binds.* A step takes at least \S+ \w+ on v5e", said, re.MULTILINE)
    assert verdict is not None and said.index(verdict[0]) < said.index("### checked, and fine")
    assert said.index("memory of each device") < said.index("Training from step 0 to 6")


def test_a_run_goes_on_under_its_plan(
    planned: Planned, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under one that a new plan would not be; and what is not asked for again is not explained again."""
    out = tmp_path / "run"
    shutil.copytree(planned.out, out)
    shutil.rmtree(out / "checkpoints" / "step-000006")
    (out / "explanation.md").unlink()
    other = {"mesh": {"data": 4, "model": 2}, "mapping": {"batch": "data", "mlp": "model"}, "accumulate": 2}
    (out / "plan.json").write_text(json.dumps(other))
    monkeypatch.setattr(insight, "plan", None)
    assert train_lm.main(["--resume", "--out", str(out)]) == 0
    np.testing.assert_allclose(losses(out), losses(finished), rtol=1e-4)
    assert kept(out) == other | {"parameter_mapping": other["mapping"], "remat": "full"}
    assert (out / "checkpoints" / "step-000006" / "plan.json").read_text() == (out / "plan.json").read_text()
    assert not (out / "explanation.md").exists()


def test_other_devices_have_another_plan(planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = train_lm.settings.parse([*SMALL, "--mapping", "plan"])
    tokens = train_lm.steps.abstract_tokens(*train_lm.axn.make_axes(batch=8, pos=16))
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"mesh": {"data": 4}, "mapping": {"batch": "data"}}))
    monkeypatch.setattr(insight, "plan", lambda *args, **options: planned.plan)
    found = plans.choose(config, tokens, file)
    assert (
        f"The plan in {file} is for 4 devices. There are 8 now, so this is a new one.\ntrain on 8 x v5e" in found.said
    )
    assert np.prod(list(found.strategy.mesh.values())) == 8 and found.table is not None
    found.keep(file)
    again = plans.choose(config, tokens, file)
    assert again.strategy == found.strategy and again.table is None


@pytest.mark.oldest
def test_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        platform, device_kind = "tpu", "TPU v6 lite"

    assert devices.chip("auto") == "v5e"
    monkeypatch.setattr(train_lm.jax, "devices", lambda: [Device] * 8)
    assert devices.chip("auto") == "v6e" and devices.chip("h100") == "h100"
    assert {devices.chip(name) for name in devices._CHIPS.values()} <= set(insight.CHIPS)
    Device.device_kind = "TPU v99"
    assert devices.chip("auto") is None
    config = train_lm.settings.parse([*SMALL, "--mapping", "plan"])
    with pytest.raises(
        Problem, match="--mapping plan has no figures of 8 TPU v99 devices: let --chip be one of v4, v5e, "
    ):
        plans.choose(config, None, None)
