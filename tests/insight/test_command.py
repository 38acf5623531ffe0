"""`python -m axonym.insight`, in a separate process, since the number of simulated devices is chosen at its start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CASE = f"{Path(__file__).parents[2] / 'examples' / 'explain.py'}:case"
MESH = ["--mesh", "data=16,model=2"]

REFUSED = {
    "there is no file 'x.py'": ["x.py:case", *MESH],
    "that returns a tuple: the step, then its arguments": [CASE + "s", *MESH],
    "--mesh is the size of each mesh axis": [CASE, "--mesh", "data=0"],
    "neither the name of a mapping in the file nor JSON": [CASE, *MESH, "--mapping", "fdsp"],
    "between has pod; the mesh axes are data, model": [CASE, *MESH, "--mapping", "fsdp", "--between", "pod"],
}


def run(arguments: list[list[str]]) -> subprocess.CompletedProcess[str]:
    """Call the command for each list of arguments, in one process."""
    code = f"from axonym.insight.__main__ import main\nfor a in {arguments!r}: print('status', main(a))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_explains_on_more_devices_than_there_are() -> None:
    done = run([[CASE, *MESH, "--mapping", "fsdp", "--chip", "v5p", "--between", "model", "--json"]])
    text, _, status = done.stdout.rpartition("status ")
    assert status.strip() == "0", done.stderr
    report = json.loads(text)
    assert report["mesh"] == {"data": 16, "model": 2} and report["bounds"]["chip"] == "v5p"
    assert report["between"] == {"model": 2}
    kinds = [c["kind"] for c in report["collectives"] if c["axes"] == ["data"]]
    assert sorted(kinds) == ["all-gather"] * 2 + ["all-reduce"] + ["reduce-scatter"] * 2


def test_what_is_wrong_is_one_line_and_several_mappings_are_compared() -> None:
    mappings = ["--mapping", "data", "--mapping", '{"mlp": "model"}']
    done = run([*REFUSED.values(), [CASE, *MESH, *mappings]])
    lines = [line for line in done.stderr.splitlines() if not line.startswith("Explaining")]
    assert len(lines) == len(REFUSED), done.stderr
    assert all(words in line for words, line in zip(REFUSED, lines, strict=True)), lines
    assert done.stdout.count("status 2") == len(REFUSED) and done.stdout.count("status 0") == 1
    assert '{"mlp": "model"}, compared with data:' in done.stdout
