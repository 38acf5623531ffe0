"""The packages of compatibility stand on what the library exports, and change nothing for code without them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import axonym as axn

ROOT = Path(axn.__file__).parent
LISTED = [line.split(": ") for line in (Path(__file__).parents[1] / "public_names.txt").read_text().splitlines()]
PUBLIC = {path for path, _ in LISTED} | {f"{path}.{name}" for path, names in LISTED for name in names.split()}


def test_an_import_starts_no_backend() -> None:
    """Or `jax.distributed.initialize` would come too late."""
    code = "import axonym.haliax, axonym.scalax, jax; jax.config.update('jax_num_cpu_devices', 3); jax.devices()[2]"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("package", ["haliax", "scalax"])
def test_imports_are_public(package: str) -> None:
    private = set()
    for path in sorted((ROOT / package).rglob("*.py")):
        inside = ("axonym", *path.relative_to(ROOT).parent.parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                source = ".".join([*inside[: len(inside) - node.level + 1], *([node.module] if node.module else [])])
                if source.split(".")[1:2] not in (["haliax"], ["scalax"]):
                    names = [source if a.name == "*" else f"{source}.{a.name}" for a in node.names]
                    private |= {f"{path.name}: {name}" for name in names if name not in PUBLIC}
    assert not private


NATIVE = """
import jax.numpy as jnp, axonym as axn

def tried(f):
    try:
        return repr(f())
    except Exception as error:
        return f"{type(error).__name__}: {error}"

x, rows = axn.ones({"a": 2, "b": 1, "c": 3}), axn.named([0, 1, 1], "c")
what = [
    lambda: sorted(set(dir(axn.NamedArray)) | set(dir(x))),
    lambda: x.product("a"), lambda: x.updated_slice({}, x), lambda: x.ravel("z"), lambda: x.at["a", 0].mul(2),
    lambda: axn.new_ref(x).named_shape,
    lambda: jnp.arange(4) + axn.named(1, ()), lambda: bool(axn.ones({"a": 1})), lambda: axn.NamedArray(None, "a"),
    lambda: x["a", rows].names, lambda: x["a", jnp.array([0, 1, 1])].names, lambda: list(x.shape),
    lambda: x.rename({"z": "y"}), lambda: x.rearrange("a b c -> c b a", q=1), lambda: x.argsort(None),
    lambda: x.slice("c", start=2, length=2), lambda: x.var("a", jnp.float32), lambda: x.take("a", rows).names,
    lambda: [n for n in dir(axn) if getattr(axn.NamedArray, n, None) is getattr(axn, n)],
    lambda: axn.current_mapping(),
    lambda: axn.zeros({"a": 2}), lambda: axn.nn.Linear.__call__, lambda: axn.nn.attention.causal_mask,
]
def results():
    return [tried(f) for f in what]
"""


def test_importing_changes_nothing_for_others(tmp_path: Path) -> None:
    """What native code in the same process sees, before and after."""
    (tmp_path / "native_code.py").write_text(NATIVE)
    code = (
        "import axonym as axn, native_code\n"
        "state = lambda: (sorted(vars(axn.NamedArray)), sorted(vars(axn.NamedRef)), sorted(vars(axn.nn)))\n"
        "axn.nn.Linear, axn.nn.attention, axn.fft, axn.poly, axn.random, axn.state, axn.quantization\n"
        "before, then = native_code.results(), state()\n"
        "import axonym.haliax as hax, axonym.scalax\n"
        "after = native_code.results()\n"
        "print(before == after, then == state(), [b for b, a in zip(before, after) if a != b])\n"
        "print(native_code.x.product('a').names, 'TypeError' in str(before))"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert shown.stdout == "True True []\n('b', 'c') True\n", shown.stderr
