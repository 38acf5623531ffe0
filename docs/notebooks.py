"""Write pages as notebooks: `python docs/notebooks.py` runs them, and writes `docs/notebooks` with their outputs.

The text exists once, in the page. A block becomes a cell; where it ends by printing something that
notebooks show, the cell ends with that instead. The tests run the pages, and compare the notebooks with the outputs.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
SITE = "https://axonym.readthedocs.io"
SOURCE = "https://github.com/axonym/axonym"
NEEDS = {"tutorial": " optax", "keep_your_flax_model": " optax flax", "fields": ""}
"""The pages, and the packages that each needs beside Axonym."""

_END, _SHOWN, _PLAIN, _HTML = (f"=== {what} ===" for what in ("the end of a block", "shown", "plain", "in HTML"))
# In one line, so that outputs that have numbers of lines stay the same.
_SHOW = f"""
def shown(x):
    if hasattr(x, '_repr_html_'):
        print({_SHOWN!r}, x, {_PLAIN!r}, repr(x), {_HTML!r}, x._repr_html_(), sep='\\n')
    else:
        print(x)
"""


@dataclasses.dataclass(frozen=True)
class Output:
    """The output of a block: what it prints, and what it shows at its end: printed, as text and in HTML."""

    printed: str
    shown: str = ""
    plain: str = ""
    html: str = ""


def blocks(text: str) -> list[tuple[str, str]]:
    """Return the parts of a page, each after its kind: `python`, `output`, or an empty string for text."""
    parts = re.split(r"^```(python|output)\n(.*?)^```\n", text, flags=re.MULTILINE | re.DOTALL)
    found = [("", parts[0])]
    for kind, code, after in zip(*(parts[i::3] for i in (1, 2, 3)), strict=True):
        found += [(kind, code), ("", after)]
    return [(kind, part) for kind, part in found if part.strip()]


def program(codes: list[str], show: bool = False) -> str:
    """Return one program of all blocks, which marks their outputs; with `show`, they end by showing what they print."""
    ends = [_ending(code) if show else code for code in codes]
    return (f"exec({_SHOW!r}); " if show else "") + "".join(f"{code}\nprint({_END!r})\n" for code in ends)


def outputs(printed: str) -> list[Output]:
    """Return the outputs of the blocks of a program."""
    found = []
    for text in printed.split(f"{_END}\n")[:-1]:
        before, _, shown = text.partition(f"{_SHOWN}\n")
        shown, _, rest = shown.partition(f"{_PLAIN}\n")
        plain, _, html = rest.partition(f"{_HTML}\n")
        found.append(Output(before, shown, plain.removesuffix("\n"), html.removesuffix("\n")))
    return found


def _last(code: str) -> tuple[int, str] | None:
    """Return the line at which a block begins to print one thing at its end, and what it prints."""
    match ast.parse(code).body[-1]:
        case ast.Expr(ast.Call(ast.Name("print"), [value], []), lineno=line) if not isinstance(value, ast.Starred):
            source = ast.get_source_segment(code, value)
            return (line, source) if source else None
    return None


def _ending(code: str, call: str = "shown") -> str:
    """Return a block that calls something else, or nothing, instead of `print` at its end."""
    if (last := _last(code)) is None:
        return code
    line, source = last
    before = "".join(code.splitlines(keepends=True)[: line - 1])
    return before + (f"{call}({source})" if call else source)


def notebook(name: str, found: list[Output]) -> dict[str, Any]:
    """Return the notebook of a page."""
    results = iter(found)
    link = f"{SITE}/{name}.html"
    before = f"This is [a page of Axonym's documentation]({link}). On Colab, install what it needs first:"
    cells = [_text(before), _code(f"# %pip install git+{SOURCE}{NEEDS[name]}", None, 0)]
    count = 0
    for kind, part in blocks((DOCS / f"{name}.md").read_text()):
        if kind == "python":
            count += 1
            cells.append(_code(part.rstrip(), next(results), count))
        elif not kind and (cell := _text(part))["source"]:
            cells.append(cell)
    for i, cell in enumerate(cells):
        cell["id"] = f"cell-{i}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _text(part: str) -> dict[str, Any]:
    """Return a cell of text, whose links lead to the site; what only the page has is left out."""
    part = re.sub(r"^(?:.*(?:gh-dark-mode-only|md-button).*|</?div.*>)\n", "", part, flags=re.MULTILINE)
    part = part.replace("#gh-light-mode-only", "")
    part = re.sub(r"\]\((?!https?:|#)([^)\s]+?)\.md(#[^)]*)?\)", rf"]({SITE}/\1.html\2)", part)
    part = re.sub(r"\]\((assets/[^)]+)\)", rf"]({SITE}/\1)", part)
    return {"cell_type": "markdown", "metadata": {}, "source": part.strip().splitlines(keepends=True)}


def _code(code: str, output: Output | None, count: int) -> dict[str, Any]:
    cell = {"cell_type": "code", "execution_count": count or None, "metadata": {}, "outputs": list[Any]()}
    if output is not None and output.printed:
        text = output.printed.splitlines(keepends=True)
        cell["outputs"].append({"name": "stdout", "output_type": "stream", "text": text})
    if output is not None and output.html:
        code = _ending(code, "")
        data = {
            "text/html": output.html.splitlines(keepends=True),
            "text/plain": output.plain.splitlines(keepends=True),
        }
        cell["outputs"].append(
            {"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"}
        )
    return cell | {"source": code.splitlines(keepends=True)}


def written(name: str, found: list[Output]) -> str:
    """Return the text of the file of a notebook."""
    return json.dumps(notebook(name, found), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    (DOCS / "notebooks").mkdir(exist_ok=True)
    for name in sys.argv[1:] or NEEDS:
        codes = [part for kind, part in blocks((DOCS / f"{name}.md").read_text()) if kind == "python"]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "page.py").write_text(program(codes, show=True))
            environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUMPY_RANK_PROMOTION": "raise"}
            command = [sys.executable, str(Path(folder) / "page.py")]
            done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        text = written(name, outputs(done.stdout))
        (DOCS / "notebooks" / f"{name}.ipynb").write_text(text)
        print(name, len(text), "bytes")
