"""Which names the page on versions promises, what the others say, and the warning of deprecated names."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

import axonym as axn
from axonym.core import stability

PAGE = Path(__file__).parents[2] / "docs" / "versions.md"
PUBLIC = {name for name in dir(axn) if not name.startswith("_")}


def test_the_page_lists_the_names_that_will_not_change() -> None:
    """Each name is on the page, or may change. A new name is one that may: add it to `stability.MAY_CHANGE`."""
    (block,) = re.findall(r"```text\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    promised = block.split()
    assert promised == sorted(PUBLIC - stability.MAY_CHANGE)
    assert len(promised) <= 200
    assert stability.MAY_CHANGE <= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_help_says_what_may_change(name: str) -> None:
    assert (stability.NOTE in (getattr(axn, name).__doc__ or "")) == (name in stability.MAY_CHANGE)


def test_a_deprecated_name_says_what_to_write() -> None:
    """The warning points at the user's line, and says which version has the name no more."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        stability.deprecated("axn.old", "axn.new", since="0.2")
    (warning,) = found
    assert warning.category is DeprecationWarning
    assert warning.filename == __file__
    assert str(warning.message) == ("axn.old is deprecated since Axonym 0.2, and 0.4 will not have it. Write axn.new.")
