"""Modules of Haliax are attributes of the package, and their contents can be imported from their paths."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import axonym.haliax as hax

# The modules that `import haliax as hax` makes attributes; `fft`, `field` and `poly` are functions there, as here.
MODULES = """
axis core debug haxtyping hof jax_utils nn ops partitioning quantization random ref specialized_fns state_dict tree
tree_util types util wrap testing
"""


def test_modules_are_attributes() -> None:
    """Of the package, before anything else imports them."""
    code = "import types, axonym.haliax as hax\n"
    code += f"print(all(type(getattr(hax, n)) is type(types) for n in {MODULES.split()}))"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert shown == "True\n"


def test_unknown_names_stay_unknown() -> None:
    assert hax.axis.ds is hax.ds
    with pytest.raises(AttributeError, match=r"module 'axonym\.haliax\.axis' has no attribute 'slices'"):
        hax.axis.slices  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("merged", "lost", "won", "expected"),
    [
        (("b", "d"), "a", "", "bcd"),
        (("c", "a"), "", "", "abcd"),
        (("b",), "c", "e", "abed"),
        ((hax.Axis("a", 2), "b"), "d", "e", "abce"),
    ],
)
@pytest.mark.parametrize("front", [False, True])
def test_flatten_all_axes_but(merged: Any, lost: str, won: str, expected: str, front: bool) -> None:
    """What comes back has the order of the original, and new axes where the lost ones were."""
    x = hax.arange({"a": 2, "b": 3, "c": 4, "d": 5})
    flat, restore = hax.core.flatten_all_axes_but(x, "rows", merged, reorder_to_front=front)
    assert set(flat.names) == {"rows", *x.names} - set(hax.axis_name(merged))
    assert flat.names[0] == "rows" or not front
    found = restore(hax.sum(flat, tuple(lost)).broadcast_axis(dict.fromkeys(won, 6)))
    assert found.names == tuple(expected)
    assert hax.array_equal(found, hax.sum(x, tuple(lost)).broadcast_axis(dict.fromkeys(won, 6)))
