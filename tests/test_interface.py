"""The interface: names, signatures, and one function behind each method."""

from __future__ import annotations

import importlib
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import axonym as axn
from tests.helpers import examples, exports, modules, public_name

OPERATIONS: dict[str, dict[str, Callable[..., Any]]] = {}  # by the module that defines them
for module in modules(native=True):
    for name, fn in exports(module).items():
        if inspect.isfunction(fn):
            OPERATIONS.setdefault(fn.__module__, {})[name] = fn


# --- identity ---


@pytest.mark.parametrize("module", OPERATIONS)
def test_functions_keep_their_identity(module: str) -> None:
    """Also those that a factory made: they can be found, pickled, and shown in tracebacks and `help`."""
    for name, fn in OPERATIONS[module].items():
        assert name == fn.__name__ == fn.__qualname__
        assert getattr(importlib.import_module(module), name) is fn
        assert pickle.loads(pickle.dumps(fn)) is fn
        assert list(inspect.signature(fn).parameters) != ["args", "kwargs"], name


SIGNATURES: dict[str, str] = {
    "exp": "(a)",
    "add": "(a, b)",
    "round": "(a, decimals=0)",
    "divmod": "(a, b)",
    "astype": "(a, dtype)",
    "max": "(array, axis=None, *, where=None)",
    "all": "(array, axis=None, *, where=None)",
    "sum": "(array, axis=None, *, where=None, dtype=None)",
    "mean": "(array, axis=None, *, where=None, dtype=None)",
    "var": "(array, axis=None, *, where=None, ddof=0, dtype=None)",
    "nanstd": "(array, axis=None, *, where=None, ddof=0, dtype=None)",
    "argmax": "(array, axis=None)",
    "cumsum": "(a, axis, dtype=None)",
    "logsumexp": "(array, axis=None, *, where=None)",
    "named": "(a, axis)",
    "make_axes": "(*names, **sizes)",
    "axis.replace_axis": "(axis_spec, old, new)",
}


@pytest.mark.parametrize(("name", "expected"), SIGNATURES.items())
def test_signatures(name: str, expected: str) -> None:
    signature = inspect.signature(public_name(name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)) == expected


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_exports_exist_once(module: Any) -> None:
    names = list(getattr(module, "__all__", ()))
    assert len(names) == len(set(names))
    assert exports(module).keys() >= set(names)


def test_properties() -> None:
    x = axn.named([1 + 2j], "a")
    assert x.real.tolist() == [1.0] and x.imag.tolist() == [2.0]


def test_annotations_can_be_read() -> None:
    for functions in OPERATIONS.values():
        for fn in functions.values():
            inspect.signature(fn)
            assert examples(fn), fn


def test_functions_are_not_hidden_by_modules() -> None:
    """`import axonym.poly.poly` leaves `axonym.poly.poly` the function that it is."""
    names = [m.__name__ for m in modules() if m.__name__.count(".") == 1]
    code = f"import axonym\nbefore = dict(vars(axonym))\nfor name in {names!r}: __import__(name)\n"
    code += "assert all(vars(axonym)[name] is value for name, value in before.items() if not name.startswith('_'))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_heavy_is_imported() -> None:
    """What only some users need is imported by what needs it."""
    code = "import sys, axonym; print([m for m in ('treescope', 'optax', 'scipy', 'matplotlib') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    plain = subprocess.run(
        [sys.executable, "-c", code.replace("axonym", "jax")], check=True, capture_output=True, text=True
    ).stdout
    assert loaded == plain
