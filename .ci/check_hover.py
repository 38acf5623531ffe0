"""Check what editors show for operations: how each is called, and what it does.

`python .ci/check_hover.py` asks the language server of basedpyright, and Jedi.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jedi

SOURCE = """\
import axonym as axn

x = axn.ones({"batch": 2})
x.sum
axn.sum
axn.exp
axn.add
axn.std
axn.cumsum
axn.argmax
axn.nn.relu
axn.dot
axn.where
x.rename
"""
WANTED = re.compile(r"\(.*(axis|array|arrays|a|axes|condition|renames)\b.*[A-Z][a-z]+ [a-z]", re.DOTALL)
"""A parameter, and later a sentence."""


class Server:
    """The language server, asked one question at a time."""

    def __init__(self, folder: Path):
        command = [str(Path(sys.executable).with_name("basedpyright-langserver")), "--stdio"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.ask("initialize", {"processId": None, "rootUri": folder.as_uri(), "capabilities": {}})
        self.send(method="initialized", params={})

    def send(self, **message: Any) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self.process.stdin is not None
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.process.stdin.flush()

    def ask(self, method: str, params: Any) -> Any:
        """Return the server's answer, and answer nothing to what it asks meanwhile."""
        self.send(id=method, method=method, params=params)
        pipe = self.process.stdout
        assert pipe is not None
        while True:
            size = 0
            while line := pipe.readline().strip():
                size = int(line.split(b":")[1]) if line.startswith(b"Content-Length") else size
            message = json.loads(pipe.read(size))
            if message.get("id") == method and "method" not in message:
                return message["result"]
            if "id" in message:
                self.send(id=message["id"], result=None)


def main() -> int:
    root = Path(__file__).parent.parent.resolve()
    uri, server = (root / "hovered.py").as_uri(), Server(root)
    document = {"uri": uri, "languageId": "python", "version": 1, "text": SOURCE}
    server.send(method="textDocument/didOpen", params={"textDocument": document})
    script, silent = jedi.Script(SOURCE), []
    for line, text in enumerate(SOURCE.splitlines()):
        if line > 2:
            column = text.rindex(".") + 1
            where = {"textDocument": {"uri": uri}, "position": {"line": line, "character": column}}
            contents = (server.ask("textDocument/hover", where) or {}).get("contents", "")
            shown = {
                "Pyright": contents["value"] if isinstance(contents, dict) else str(contents),
                "Jedi": "\n".join(name.docstring() for name in script.infer(line + 1, column)),
            }
            silent += [f"{text}, {editor}: {found!r}" for editor, found in shown.items() if not WANTED.search(found)]
    server.process.kill()
    print(*silent or ["hover: each operation has a signature and a docstring"], sep="\n")
    return bool(silent)


if __name__ == "__main__":
    sys.exit(main())
