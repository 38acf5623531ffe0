"""The packages of compatibility stand on what the library exports, and change nothing for code without them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import axonym as axn

ROOT = Path(axn.__file__).parent
LISTED = [line.split(": ") for line in (Path(__file__).parents[1] / "public_names.txt").read_text().splitlines()]
PUBLIC = {path for path, _ in LISTED} | {f"{path}.{name}" for path, names in LISTED for name in names.split()}
PUBLIC |= {"axonym.named_array.SHAPE_CHECKS"}  # a variable, which the list of functions and classes lacks
PUBLIC |= {"axonym.core.named_scope.named_call"}  # Haliax offers it, and the library only uses it


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
    lambda: jnp.arange(4) + axn.named(1, ()), lambda: axn.named(1, ()) == jnp.arange(4),
    lambda: bool(axn.ones({"a": 1})), lambda: bool(x), lambda: axn.NamedArray(None, "a"),
    lambda: axn.NamedArray(jnp.ones(3), axn.Axis("a", 2)), lambda: x["a", rows].names,
    lambda: x["a", jnp.array([0, 1, 1])].names, lambda: x["a", axn.ds(jnp.array(0), 1), "c", rows].names,
    lambda: x.at["a", jnp.array([0, 5])].get().tolist(), lambda: list(x.shape), lambda: x.at["a", 0].nosuch,
    lambda: x.rename({"z": "y"}), lambda: x.rearrange("a b c -> c b a", q=1), lambda: x.argsort(None),
    lambda: x.rearrange("{a} -> ... a ..."), lambda: axn.new_ref(x).nosuch, lambda: x.nosuch,
    lambda: x.slice("c", start=2, length=2), lambda: x.var("a", jnp.float32), lambda: x.take("a", rows).names,
    lambda: axn.take(x, "c", axn.named([0, 3, -4, -1], "z"))["a", 0, "b", 0].tolist(), lambda: axn.take(x, "c", 9),
    lambda: axn.take(rows, "c", 9), lambda: axn.current_mapping(),
    lambda: [n for n in dir(axn) if getattr(axn.NamedArray, n, None) is getattr(axn, n) and n != "updated_slice"],
    lambda: axn.zeros({"a": 2}), lambda: axn.nn.Linear.__call__, lambda: axn.nn.attention.causal_mask,
]
attributes = [
    lambda: x.product("a"), lambda: x.updated_slice({}, x), lambda: x.ravel("z"), lambda: x.at["a", 0].mul(2),
    lambda: x.conjugate(), lambda: x.tree_flatten(), lambda: axn.new_ref(x).named_shape,
]
def results(*handed):
    return [tried(f) for f in what]
def found():
    return [tried(f) for f in attributes]
"""


def test_importing_changes_no_value(tmp_path: Path) -> None:
    """Whatever the frames of native code hold: it gets the attributes that its arrays lacked, and nothing else."""
    (tmp_path / "native_code.py").write_text(NATIVE)
    code = (
        "import axonym as axn, native_code\n"
        "axn.nn.Linear, axn.nn.attention, axn.fft, axn.poly, axn.random, axn.state, axn.quantization\n"
        "classes = axn.NamedArray, axn.NamedRef, type(native_code.x.at['a', 0]), type(native_code.x.shape), axn.nn\n"
        "before, then, missing = native_code.results(), [dict(vars(c)) for c in classes], native_code.found()\n"
        "import axonym.haliax as hax, axonym.scalax\n"
        "handed = native_code.results(hax.take)\n"
        "native_code.used, native_code.hax = hax.rename, hax\n"
        "seen = native_code.results()\n"
        "print(before == handed == seen, [b for b, a in zip(before, seen) if a != b])\n"
        "print(all(vars(c)[n] is v for c, had in zip(classes, then) for n, v in had.items()))\n"
        "print({m.split(':')[0] for m in missing}, [f for f in native_code.found() if 'Error' in f])"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert shown.stdout == "True []\nTrue\n{'AttributeError'} []\n", shown.stderr


def test_no_code_asks_who_calls_it() -> None:
    """Frames give a message its line or its words, and a copy of a function the module that pickle finds it in."""
    words = {"core/errors.py", "haliax/_signatures.py", "haliax/ops.py"}
    words |= {"_methods.py", "core/jax_versions.py"}  # which function of JAX is refused
    words |= {"state/_orbax_output.py"}
    asks = re.compile(r"_getframe|currentframe|inspect\.stack")
    assert {str(p.relative_to(ROOT)) for p in ROOT.rglob("*.py") if asks.search(p.read_text())} <= words
