"""Editors show how an operation is called, and what it does: a language server is asked as they ask it, and Jedi."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REDUCED, COMPUTED = "Reduce axes of an array", "Compute each element of a named array"
SHOWN = {
    "x.sum": ("axis: AxisSelection", REDUCED),
    "axn.sum": ("axis: AxisSelection", REDUCED),
    "axn.std": ("axis: AxisSelection", "Compute how far elements spread"),
    "axn.exp": ("a: A", COMPUTED),
    "axn.nn.relu": ("a: A", COMPUTED),
    "axn.dot": ("axis: AxisSelection", "Multiply arrays and sum over some axes."),
    "axn.where": ("condition: ", "where"),
    "x.rename": ("renames: ", "Rename"),
}
"""For a name: a parameter of its signature, and words of its docstring."""
SOURCE = "\n".join(["import axonym as axn", 'x = axn.ones({"batch": 2})', *SHOWN, ""])


def place(text: str) -> tuple[int, int]:
    """The line and the column of a name in the source, counted from 0."""
    return SOURCE.splitlines().index(text), text.rindex(".") + 1


class LanguageServer:
    """A language server of Pyright, asked one question at a time."""

    def __init__(self, command: Path, folder: Path):
        self.process = subprocess.Popen([command, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        capabilities = {"workspace": {"configuration": True}}
        root = {"rootUri": folder.as_uri(), "workspaceFolders": [{"uri": folder.as_uri(), "name": "folder"}]}
        self.ask("initialize", {"processId": os.getpid(), "capabilities": capabilities, **root})
        self.send(method="initialized", params={})

    def send(self, **message: Any) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self.process.stdin is not None
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.process.stdin.flush()

    def ask(self, method: str, params: Any) -> Any:
        """Return the server's answer; what it asks meanwhile is answered as an editor does, which knows the Python."""
        self.send(id=method, method=method, params=params)
        pipe = self.process.stdout
        assert pipe is not None
        while True:
            size = 0
            while line := pipe.readline().strip():
                size = int(line.split(b":")[1]) if line.startswith(b"Content-Length") else size
            assert size, "the language server has ended"
            message = json.loads(pipe.read(size))
            if message.get("id") == method and "method" not in message:
                return message["result"]
            if "id" in message:
                items = message.get("params", {}).get("items", [])
                settings = [{"pythonPath": sys.executable} if x.get("section") == "python" else {} for x in items]
                self.send(id=message["id"], result=settings or None)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LanguageServer]:
    command = Path(sys.executable).with_name("basedpyright-langserver")
    if not command.exists():
        pytest.skip("basedpyright is not installed here: it is in the extra `dev`")
    server = LanguageServer(command, tmp_path)
    yield server
    server.process.kill()
    server.process.communicate()


def test_pyright(server: LanguageServer, tmp_path: Path) -> None:
    uri = (tmp_path / "hovered.py").as_uri()
    document = {"uri": uri, "languageId": "python", "version": 1, "text": SOURCE}
    server.send(method="textDocument/didOpen", params={"textDocument": document})
    shown = dict[str, str]()
    for text in SHOWN:
        line, column = place(text)
        where = {"textDocument": {"uri": uri}, "position": {"line": line, "character": column}}
        shown[text] = server.ask("textDocument/hover", where)["contents"]["value"]
    check(shown)


def test_jedi() -> None:
    jedi = pytest.importorskip("jedi", reason="Jedi is not installed here: it is in the extra `dev`")
    shown = dict[str, str]()
    for text in SHOWN:
        line, column = place(text)
        shown[text] = "\n".join(name.docstring() for name in jedi.Script(SOURCE).infer(line + 1, column))
        called = jedi.Script(f"{SOURCE}{text}(").get_signatures()
        assert SHOWN[text][0].partition(":")[0] in [p.name for signature in called for p in signature.params], called
    check(shown)


def check(shown: dict[str, str]) -> None:
    """Each name has its signature, and after it the docstring."""
    for text, (parameter, words) in SHOWN.items():
        signature, _, docstring = shown[text].partition("\n\n")
        assert parameter in signature and words in docstring, f"{text}: {shown[text]}"
