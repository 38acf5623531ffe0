"""Advise what to write instead of names that users know from NumPy, JAX and PyTorch, which `foreign_names.toml` lists.

Loaded only when a program asks for a name that does not exist, to end its error with one sentence.
"""

from __future__ import annotations

import inspect
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def _advice_of(*tables: str) -> dict[str, str]:
    """Return the advice for each of the names that the keys of tables list."""
    rows = (row for table in tables for row in _TABLES[table].items())
    return {name: advice.replace("{name}", name) for names, advice in rows for name in names.split()}


ARRAY, PACKAGE, NETWORKS = _advice_of("both", "array"), _advice_of("both", "package"), _advice_of("nn")
LOSSES: dict[str, str] = _TABLES["losses"]
"""By function that a loss of Optax calls first, the loss to use; `both` has those that the package lacks."""
CALLS, KEYWORDS, _ARGUMENTS = _advice_of("calls"), _advice_of("keywords"), _advice_of("arguments")


def in_call(f: Callable[..., Any], error: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the message for a call with wrong arguments, followed by a correct call."""
    name, arguments = f.__qualname__.removesuffix(".__init__"), (*args, *kwargs.values())
    parameters = list(inspect.signature(f).parameters)
    if parameters[0] == "cls":  # the class that was called, which inherits the method
        name = f"{args[0].__name__}.{f.__name__}"
        error = error.replace(f.__qualname__, name)
    keyword = error.partition("unexpected keyword argument ")[2].strip("'")
    asked = kwargs[keyword] if keyword in ("dim", "dims") else None
    flat = [x for a in arguments for x in (a if isinstance(a, (list, tuple)) else [a])]
    names = next((n for x in flat if isinstance(n := getattr(x, "names", ()), tuple) and n), ("batch", "embed"))
    if f.__qualname__ in CALLS:
        call = CALLS[f.__qualname__]
    elif f.__qualname__.endswith(".__init__"):  # a layer is made by its `init`
        call = _example_call(type(arguments[0]).init, f"{name}.init")
    else:
        call = _example_call(f, name, along=asked is not None)
    call = call.replace("{new}", repr(asked) if isinstance(asked, str) and asked not in names else "'new'")
    if parameters[0] == "key" and arguments and not hasattr(arguments[0], "dtype"):
        return f"{error}. The first argument is a random key: write `{call}`."
    known = keyword != "skipna" or hasattr(sys.modules[f.__module__], f"nan{name}")
    advice = (KEYWORDS.get(keyword) if known else None) or "Write `{call}`."
    advice = advice.replace("{call}", call)
    if asked is not None:
        one = "AxisSelector" in str(inspect.signature(f).parameters.get("axis"))
        advice = advice.replace("{last}", _by_name(asked, names, one))
    return f"{error}. {_filled_advice(advice, tuple(map(repr, names)))}"


def _by_name(asked: Any, names: Sequence[str], one: bool) -> str:
    """Return the axes that were asked for, by name or by position, as they are written; or one of them."""
    each = asked if isinstance(asked, (list, tuple)) else [asked]
    at = range(-len(names), len(names))
    found = [names[x] if isinstance(x, int) and x in at else x for x in each if isinstance(x, (str, int))]
    if not found or len(found) < len(each):
        return "{last}"
    if one or len(found) == 1:
        return repr(found[-1])
    return f"({', '.join(map(repr, found))})"


def _example_call(f: Callable[..., Any], name: str, *, along: bool = False) -> str:
    """Return an example call with every required argument and the axis, if it is positional or `along` asks for it."""
    words = []
    for p in inspect.signature(f).parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or p.name == "cls":
            continue
        if p.default is not p.empty and (p.name != "axis" or (p.kind is p.KEYWORD_ONLY and not along)):
            continue
        word = ("Embed" if p.name == "axis" else p.name) if name.endswith(".init") else _ARGUMENTS.get(p.name, p.name)
        words.append(f"{p.name}={word}" if p.kind is p.KEYWORD_ONLY else word)
    return f"{name}({', '.join(words)})"


def in_package(package: str, name: str) -> str:
    """Return one sentence for a name that a package lacks, or an empty string."""
    if package.endswith(".random") and hasattr(jax.random, name):
        return f" It is `jax.random.{name}`."
    known = NETWORKS if package.endswith(".nn") else PACKAGE
    return sentence(known.get(name), ("'batch'", "'embed'"))


def of_array(name: str, names: Sequence[str]) -> str:
    """Return one sentence for an attribute that named arrays lack, or an empty string."""
    return sentence(ARRAY.get(name), tuple(map(repr, names)) or ("'axis'",))


def sentence(advice: str | None, axes: Sequence[str]) -> str:
    """Return advice as a sentence that names the axes of an array."""
    if advice is None:
        return ""
    advice = _filled_advice(advice, axes)
    return f" {advice[0].upper()}{advice[1:]}."


def _filled_advice(advice: str, axes: Sequence[str]) -> str:
    end = "," if len(axes) == 1 else ""
    words = {
        "{axes}": ", ".join(axes) + end,
        "{pair}": ", ".join(axes[-2:]) + end,
        "{reversed}": ", ".join(reversed(axes)) + end,
        "{first}": axes[0],
        "{last}": axes[-1],
    }
    for place, word in words.items():
        advice = advice.replace(place, word)
    return advice
