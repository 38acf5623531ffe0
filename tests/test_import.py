"""The names and submodules that `import axonym` provides, when they load, and the list of public names."""

from __future__ import annotations

import ast
import doctest
import inspect
import pickle
import pkgutil
import pydoc
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import axonym as axn
from axonym import _late_names
from tests.helpers import definitions, exports

LIST = Path(__file__).parent / "public_names.txt"
APART = {"haliax", "scalax"}
INTERNAL = {"core", "distribution"}
"""Packages that users do not import from."""
SUBMODULES = sorted({m.name for m in pkgutil.iter_modules(axn.__path__) if m.name[0] != "_"} - APART - INTERNAL)
ORDINARY = ["axis", "named_array", "ops"]
"""Submodules that are loaded with the package."""


def fresh(code: str) -> str:
    """Run a program in a separate process, and return its output."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


# --- the list of public names ---


def public_modules(package: ModuleType) -> list[ModuleType]:
    """Return the modules that are public attributes of a package, and theirs."""
    names = SUBMODULES if package is axn else exports(package)
    found = [getattr(package, name) for name in names if isinstance(getattr(package, name), ModuleType)]
    return [package, *(m for module in found for m in public_modules(module))]


def listing() -> str:
    """Return the modules that users import from, and the public names of each."""
    names = {m.__name__: sorted({*exports(m), *definitions(m)}) for m in public_modules(axn)}
    names = {path: public for path, public in names.items() if public}
    return "".join(f"{path}: {' '.join(public)}\n" for path, public in sorted(names.items()))


def test_public_names() -> None:
    """A name came or went: if that was meant, `python -m tests.test_import` writes the list anew."""
    then = dict(line.split(": ") for line in LIST.read_text().splitlines())
    now = dict(line.split(": ") for line in listing().splitlines())
    changed = {
        module: f"came: {sorted(new - old)}, went: {sorted(old - new)}"
        for module in sorted({*then, *now})
        if (old := set(then.get(module, "").split())) != (new := set(now.get(module, "").split()))
    }
    assert not changed, f"{test_public_names.__doc__}\n{changed}"


def test_type_checkers_see_what_is_there() -> None:
    """The submodules that load on use stand once more where type checkers look."""
    (block,) = [n for n in ast.parse(inspect.getsource(axn)).body if isinstance(n, ast.If)]
    imported = [n for n in block.body if isinstance(n, ast.ImportFrom)]
    seen = [alias.name for n in imported if n.module is None for alias in n.names]
    assert seen == SUBMODULES
    assert [n.module for n in imported if n.module is not None] == [_late_names.__name__.rpartition(".")[2]]


# --- loading on use ---


def test_what_is_loaded() -> None:
    code = "import axonym, sys; print(*sorted(m for m in sys.modules if m.startswith('axonym.') and m.count('.') == 1))"
    loaded = set(fresh(code).replace("axonym.", "").split())
    assert not loaded & {"nn", "state", "sharding", "transforms", "random", "_late_names", *APART}
    assert loaded >= set(ORDINARY)


@pytest.mark.oldest
def test_loading_a_module_keeps_what_is_compiled() -> None:
    """A module that changed the key of JAX's caches would make everything compile again when it is first used."""
    code = """
import equinox, jax, axonym  # Equinox itself makes the newest JAX compile again
from tests.helpers import compilations, modules
f = jax.jit(lambda x: x + 1)
f(1.0)
modules()
with compilations() as compiled:
    f(1.0)
print(len(compiled))
"""
    assert fresh(code) == "0"


def test_equinox_loads_where_it_is_used() -> None:
    code = """
import sys, axonym as axn, jax
x = axn.ones({"a": 8, "b": 2})
mesh = jax.make_mesh((1,), ("data",))
with axn.set_mesh(mesh), axn.axis_mapping({"a": "data"}):
    axn.named_jit(lambda x: axn.vmap(axn.sum, "a")(x))(axn.shard(x))
print("equinox" in sys.modules, "jaxtyping" in sys.modules)
axn.nn
print("equinox" in sys.modules)
"""
    assert fresh(code).split() == ["False", "False", "True"]


@pytest.mark.oldest
@pytest.mark.parametrize("name", ["named_jit", "vmap", "NamedRef", "psum", "field"])
def test_names_load_on_use(name: str) -> None:
    """And are then what a plain import would have made of them."""
    assert fresh(f"import axonym; axonym.{name}; print({name!r} in vars(axonym))") == "True"
    assert getattr(axn, name) is getattr(_late_names, name)


@pytest.mark.parametrize("name", SUBMODULES)
def test_submodules_are_attributes(name: str) -> None:
    module = getattr(axn, name)
    assert isinstance(module, ModuleType) and module.__name__ == f"axonym.{name}"


@pytest.mark.oldest
def test_any_way_of_importing() -> None:
    code = """
import axonym.nn as nn, axonym.sharding
from axonym import state, vmap, Axis
from axonym.named_array import NamedArray
import axonym, axonym.linalg
assert nn is axonym.nn and state is axonym.state and vmap is axonym.vmap
assert hasattr(NamedArray, "sum") and hasattr(NamedArray, "__add__")
"""
    fresh(code)


def test_everything_at_once() -> None:
    """Functions and classes, as they are listed; not submodules, which hide names such as `random`."""
    names: dict[str, object] = {}
    exec("from axonym import *", names)
    names.pop("__builtins__")
    assert sorted(names) == sorted(axn.__all__) == sorted(exports(axn))  # pyright: ignore


@pytest.mark.oldest
@pytest.mark.parametrize(
    "path", ["axonym.named_array", "axonym.ops.reductions", "axonym.nn.linear", "axonym.sharding.jit"]
)
def test_arrays_have_methods_whatever_is_imported_first(path: str) -> None:
    code = f"import {path}, axonym; A = axonym.NamedArray; print(A.sum.__name__, A.__add__.__name__)"
    assert fresh(code).startswith("sum")


@pytest.mark.oldest
def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match=r"^module 'axonym' has no attribute 'vmpa'\. Did you mean 'vmap'\?$"):
        axn.vmpa  # pyright: ignore
    with pytest.raises(AttributeError, match=r"no attribute 'sharing'\. Did you mean 'sharding'\?$"):
        axn.sharing  # pyright: ignore
    with pytest.raises(ImportError, match="cannot import name 'vmpa'"):
        exec("from axonym import vmpa")
    code = "import axonym, sys; [hasattr(axonym, n) for n in ('__wrapped__', '_repr_html_', '_ipython_display_')]"
    assert fresh(f"{code}; print('axonym._late_names' in sys.modules)") == "False"


@pytest.mark.oldest
def test_dir_and_help() -> None:
    found = fresh("import axonym; print(*(name for name in dir(axonym) if not name.startswith('_')))")
    assert {*exports(axn), *SUBMODULES} == set(found.split())
    text = pydoc.render_doc(axn)
    assert "named_jit" in text and "Axonym: named-axis arrays" in text
    assert [test.name for test in doctest.DocTestFinder(recurse=False).find(axn)] == ["axonym"]


@pytest.mark.oldest
def test_pickling() -> None:
    for thing in (axn.named_jit, axn.vmap, axn.NamedRef, axn.nn.Linear, axn.MeshAxis):
        assert pickle.loads(pickle.dumps(thing)) is thing
    data = pickle.dumps((axn.nn.Linear, axn.vmap, axn.named([1.0], "x")))
    fresh(f"import pickle; linear, vmap, x = pickle.loads({data!r}); assert x.sum() == 1.0 and linear.init")


def test_threads_can_load_at_once() -> None:
    code = """
import concurrent.futures, threading, axonym as axn
names = ["nn", "state", "vmap", "named_jit", "random", "sharding", "psum", "quantization"] * 2
barrier = threading.Barrier(len(names))
def load(name):
    barrier.wait()
    return getattr(axn, name)
with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
    found = list(pool.map(load, names))
assert all(a is getattr(axn, name) for a, name in zip(found, names))
"""
    fresh(code)


def test_loading_while_tracing_keeps_no_tracer() -> None:
    """What a module makes on import belongs to no trace, wherever the import happens."""
    code = """
import jax, sys, axonym as axn
@jax.jit
def f(x):
    for name in dir(axn):
        getattr(axn, name)
    return x
f(1.0)
for path, module in list(sys.modules.items()):
    if path.startswith("axonym"):
        assert not any(isinstance(value, (jax.core.Tracer, axn.NamedArray)) for value in vars(module).values()), path
print(axn.nn.relu(axn.random.normal(jax.random.key(0), {"a": 2})).names)
"""
    assert fresh(code) == "('a',)"


if __name__ == "__main__":
    LIST.write_text(listing())
