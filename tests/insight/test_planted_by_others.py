"""Steps of models that somebody wrote who had not read the library: each with one planted fault, or healthy.

The models in `planted_by_others/` are as they were written. Somebody else saw the first eight lines of each report,
with 100 columns, and nothing else. Of 20 faults he found five with their places, and three without; of the six healthy
steps he took none for faulty. Since then all are told with a line.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import axonym as axn
from axonym import insight
from axonym.insight import Report

FOUND = {
    "ads": r"look: \d+% of the bytes of arguments are held in 8 copies, over data: model/table/weight",
    "molecules": r"look: nodes is gathered at molecules.py:39, \d+% of the bytes sent",
    "lm_story": r"look: head_size is moved at blocks.py:32",
    "unet_faces": r"look: channels is gathered at unet_faces.py:38",
    "experts": r"fix: The mapping shards expert over model, but no array has an axis of that name. Did you mean 'ex",
    "vit_scans": r"fix: \d+% of the compute is repeated, first at vit_scans.py:41",
    "shop": r"fix: \d+% of the compute is repeated, first at shop.py:51",
    "vit_plants": r"62% of the compute is of padding: pos grows from 196 to 512 at vit_plants.py:42",
    "lm_code": r"3.8 GiB of gradients are gathered by a placement at lm_code.py:31, of parameters",
    "lm_music": r"bfloat16 becomes float32 at lm_music.py:69: 100% of the flops of the forward pass",
    "serve_fill": r"96% of the compute is for all 1,024 of pos in each turn of a loop at serve_fill.py:23",
    "sampler": r"47% of the compute is the same in each turn of a loop at sampler.py:51: it has 2 values in 40 turns",
    "speech": r"The same gradients are sent again in each turn of a loop at speech.py:37, 200 times, 99%",
    "reviews": r"74% of the compute is for gradients at reviews.py:56 of parameters that the step leaves as they are",
    "lm_languages": r"vocab is gathered at lm_languages.py:25, 26% of the bytes sent: a placement replicates vocab",
    "flow": r"look: Why \d+% of the bytes are sent is not known, first at flow.py:38",
    "latents": r"look: \d+ arrays are joined to a vector of 2.6 GiB at latents.py:63",
    "serve_summaries": r"look: The same parameters are sent again in each turn of a loop at \w+.py:\d+, 32 to 512 time",
    "tabular": r"look: \d+% of the compute is a forward pass that runs a second time, called at tabular.py:66",
    "lm_legal": r"look: 16% of the compute is computed again twice: gradient checkpointing at lm_legal.py:29",
}
HEALTHY = ["lm_news", "vit_birds", "lm_wiki", "serve_chat", "towers", "unet_satellite"]


def report(name: str, **more: Any) -> Report:
    """Explain the step of a module."""
    module = importlib.import_module(name)
    step = next(getattr(module, name) for name in ("train", "generate", "complete", "sample") if hasattr(module, name))
    step = axn.names.distribute(step, names=module.NAMES) if hasattr(module, "NAMES") else step
    mapping = module.MAPPING if hasattr(module, "MAPPING") else (module.STORED, module.COMPUTE)
    given: dict[str, Any] = {"mapping": mapping, "mesh": axn.make_mesh(module.MESH), "chip": "v5e", **more}
    return insight.explain(step, *module.arguments(), **given)


@pytest.fixture(autouse=True)
def _models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "planted_by_others"))


@pytest.mark.parametrize("name", FOUND)
def test_the_first_lines_tell_the_fault(name: str) -> None:
    lines = [line[:100].strip() for line in str(report(name)).splitlines()[:8]]
    assert re.search(FOUND[name], " ".join(lines)), "\n".join(lines)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_step_has_nothing_to_fix(name: str) -> None:
    assert str(report(name)).splitlines()[2] == "Nothing to fix or to look at was found."


def test_experts_on_shards_are_no_look_ups() -> None:
    """On CPUs, a product of groups of rows masks those of other groups, which is not a one-hot array."""
    mapping = {"tokens": ("data", "model"), "experts": "model"}
    assert str(report("experts", mapping=mapping)).splitlines()[2] == "Nothing to fix or to look at was found."
