"""Steps of models that somebody wrote who had not read the library: each with one planted fault, or healthy.

The models in `planted_by_others/` are as they were written. Somebody else saw the first eight lines of each report,
with 100 columns, and nothing else. Of 20 faults he found five with their places, and three without; of the six healthy
steps he took none for faulty. Since then six more faults are told with a line, and one without. Not found are:

- padding: images of 196 patches as sequences of 512 (`vit_plants`)
- gradients that are gathered before the optimizer (`lm_code`)
- positions in float32 that widen what follows them (`lm_music`)
- a loop over tokens without a cache of keys and values (`serve_fill`)
- a text encoder in each turn of a loop that does not change the text (`sampler`)
- gradients of a recurrent weight that are summed in each turn (`speech`)
- gradients of weights that are never updated (`reviews`)
- logits that the loss gathers, told by the line before the one that asks for it (`lm_languages`)
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
    "ads": r"look: 99% of the bytes of arguments are held in 8 copies, over data: model/table/weight",
    "molecules": r"look: nodes is gathered at molecules.py:39, 38% of the bytes sent",
    "lm_story": r"look: head_size is moved at blocks.py:32",
    "unet_faces": r"look: channels is gathered at unet_faces.py:38",
    "experts": r"fix: The mapping shards expert over model, but no array has an axis of that name. Did you mean 'ex",
    "vit_scans": r"fix: \d+% of the compute is repeated, first at vit_scans.py:41",
    "shop": r"fix: \d+% of the compute is repeated, first at shop.py:51",
    "flow": r"look: Why 93% of the bytes are sent is not known, first at flow.py:38",
    "latents": r"look: Why \d+% of the bytes are sent is not known, first at latents.py:63",
    "serve_summaries": r"look: The same parameters are sent again in each turn of a loop at \w+.py:\d+, 32 to 512 time",
    "tabular": r"look: 21% of the compute is a forward pass that runs a second time, called at tabular.py:66",
    "lm_legal": r"look: The backward pass computes the forward pass again 1.8 times, \d+% of the compute",
}
HEALTHY = ["lm_news", "vit_birds", "lm_wiki", "serve_chat", "towers", "unet_satellite"]


def report(name: str, **more: Any) -> Report:
    """Explain the step of a module."""
    module = importlib.import_module(name)
    step = module.generate if name.startswith("serve") else module.train
    step = axn.names.distribute(step, names=module.NAMES) if hasattr(module, "NAMES") else step
    mapping = module.MAPPING if hasattr(module, "MAPPING") else (module.STORED, module.COMPUTE)
    given: dict[str, Any] = {"mapping": mapping, "mesh": axn.make_mesh(module.MESH), "chip": "v5e", **more}
    return insight.explain(step, *module.arguments(), **given)


@pytest.fixture(autouse=True)
def _models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "planted_by_others"))


@pytest.mark.parametrize("name", FOUND)
def test_the_first_lines_tell_the_fault(name: str) -> None:
    lines = [line[:100] for line in str(report(name)).splitlines()[:8]]
    assert re.search(FOUND[name], "\n".join(lines)), "\n".join(lines)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_step_has_nothing_to_fix(name: str) -> None:
    assert str(report(name)).splitlines()[2] == "Nothing to fix or to look at was found."


def test_experts_on_shards_are_no_look_ups() -> None:
    """On CPUs, a product of groups of rows masks those of other groups, which is not a one-hot array."""
    mapping = {"tokens": ("data", "model"), "experts": "model"}
    assert str(report("experts", mapping=mapping)).splitlines()[2] == "Nothing to fix or to look at was found."
