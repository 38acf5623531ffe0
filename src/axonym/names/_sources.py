"""Where the names of arguments come from: `names=`, and what the code says already.

The code says names in named arrays, in the metadata of Flax (`with_partitioning`), in `axonym.field(axis_names=...)`,
and in annotations: axonym's, and jaxtyping's such as `Float[Array, "batch embed"]`, of a function's parameters and of
the fields of dataclasses, Equinox modules and named tuples. `names=` adds to them. An axis that both name must get the
same name.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.tree_util import GetAttrKey, SequenceKey

from ..axis import Axis, name_of
from ..core import errors, parsing
from ..core.tree_spec import NUMBERS
from ..named_array import NamedArray
from ..sharding.leaves import Leaf, child_of, is_placed_whole, leaves_of
from ..sharding.rules import is_axis_names
from ..typing.matching import Annotation

Keys: TypeAlias = tuple[Any, ...]
"""A path in a tree."""

AxisNames: TypeAlias = tuple[str | None, ...]
"""The name of each axis of an array, in order; None is an axis without a name."""


class LeafNames(NamedTuple):
    """The names of one leaf, and where they come from."""

    names: AxisNames | None
    """A name or None for each axis; None for a leaf that nothing names."""
    source: str
    """A phrase for messages, such as "names= at 'params/kernel'"; empty if nothing names the leaf."""


class Root(NamedTuple):
    """A part of the arguments that names are given for: one argument, or a tree."""

    path: str
    """How messages call it: the name of a parameter; empty for a tree."""
    keys: Keys
    value: Any
    annotation: Any = None


_UNNAMED = LeafNames(None, "")


def names_of_leaves(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], names: Any = None
) -> list[LeafNames]:
    """Return the names of each leaf of `jax.tree.leaves((args, kwargs))`, for a call of a function; see `infer`.

    A dictionary in `names` that has exactly the keys of the argument, or of a part of it, is a tree. Others go from
    patterns to names: each array is named by the first regular expression that is found in its path, as in
    `TreePathShardingRule`; one that is the whole path of an array names no other, and `*/` at the beginning stands for
    any parts before. If it is the whole of `names`, and its keys are no parameters, paths start with parameters.
    """
    roots = list(roots_of(fn, args, kwargs))
    given = dict(_given_to_call(names, roots, len(args)))
    return named_leaves((tuple(args), dict(kwargs)), roots, given)


def named_leaves(tree: Any, roots: Sequence[Root], given: Mapping[Keys, LeafNames]) -> list[LeafNames]:
    """Return the names of each leaf of a tree, given the names for some of its paths."""
    found: list[LeafNames] = []
    for leaf in leaves_of(tree)[0]:
        root = next(r for r in roots if leaf.keys[: len(r.keys)] == r.keys)
        says, asked = _said_by_code(leaf, root), given.get(leaf.keys, _UNNAMED)
        if leaf.shape == () or isinstance(leaf.value, NUMBERS):
            says = LeafNames((), "a scalar")
        both = says if asked.names is None else asked
        if says.names is not None and asked.names is not None:
            for i, (a, b) in enumerate(zip(says.names, asked.names, strict=True)):
                if a != b and a is not None and b is not None:
                    raise ValueError(
                        f"names=: axis {i} of {_path_of_leaf(root, leaf.keys)} is {b!r} by {asked.source}, but {a!r} "
                        f"by {says.source}. Rename it in one of them, or leave the axis to the code, with `_` in "
                        "`names`."
                    )
            names = tuple(b if a is None else a for a, b in zip(says.names, asked.names, strict=True))
            both = LeafNames(names, says.source if names == says.names else asked.source)
        found += [both] * len(jax.tree.leaves(leaf.value))
    return found


# --- `names=` ---


def _given_to_call(names: Any, roots: Sequence[Root], positional: int) -> Iterator[tuple[Keys, LeafNames]]:
    """Yield the names that `names=` gives leaves of the arguments of a call."""
    parameters = {r.path.partition("/")[0] for r in roots}
    if isinstance(names, Mapping) and parameters.issuperset(names):
        for root in roots:
            parameter, _, index = root.path.partition("/")
            entry = names.get(parameter)
            if index and not (entry is None or isinstance(entry, str)):  # one of `*xs`
                count = sum(r.path.partition("/")[0] == parameter for r in roots)
                if not isinstance(entry, (tuple, list)) or len(entry) != count:
                    raise ValueError(
                        f"names=: {parameter!r} has {errors.counted(count, 'argument')}, and its names are {entry!r}. "
                        "Give a tuple with an entry for each, or one string for all."
                    )
                entry = entry[int(index)]
            yield from given_to_tree(entry, root)
    elif isinstance(names, (tuple, list)):
        if len(names) != positional:
            counts = f"{errors.counted(len(names), 'entry', 'entries')} for {positional} positional"
            raise ValueError(
                f"names=: {names!r} has {counts} {'argument' if positional == 1 else 'arguments'}. Give an entry for "
                "each, None for one without names, or a dictionary from parameters to entries."
            )
        for entry, root in zip(names, roots, strict=False):
            yield from given_to_tree(entry, root)
    else:
        whole = Root("", (), {r.path: r.value for r in roots})  # patterns are found in `params/kernel`
        keys = {r.path: r.keys for r in roots}
        for path, found in given_to_tree(names, whole):
            yield (*keys[path[0].key], *path[1:]), found


def given_to_tree(names: Any, root: Root) -> Iterator[tuple[Keys, LeafNames]]:
    """Yield the names that a tree prefix of names gives the leaves of a tree, by their paths."""
    if names is None:
        return
    below = jax.tree_util.tree_flatten_with_path(root.value, is_leaf=is_placed_whole)[0]
    is_leaf = [keys for keys, _ in below] == [()]
    if isinstance(names, str) or (is_leaf and is_axis_names(names)):
        for keys, value in below:
            path = root.keys + keys
            where = _path_of_leaf(root, path)
            yield from _checked_names(names, value, path, where, f"names= at {where!r}")
        return
    children = _children_of(root.value)
    by_key = {_written_key(key): key for key, child in children.items() if jax.tree.leaves(child)}
    if isinstance(names, Mapping):
        if is_leaf or not set(by_key) <= set(map(str, names)) <= set(map(_written_key, children)):
            yield from _by_patterns(names, root, below)
            return
        entries = {by_key[str(key)]: entry for key, entry in names.items() if str(key) in by_key}
    else:
        parts = None if is_leaf else list(_children_of(names).values())
        if parts is None or len(parts) != len(children):
            axes = [n.name for n in names if isinstance(n, Axis)] if isinstance(names, (tuple, list)) else []
            has = f"has {errors.counted(len(by_key), 'part')} ({', '.join(by_key)})" if children else "is an array"
            raise ValueError(
                f"names=: {root.path or 'the tree'} {has}, and its names are {names!r}. Names are a tree prefix of "
                f"strings such as {' '.join(axes) or 'batch pos'!r}, or a dictionary from patterns of paths to such "
                "strings."
            )
        entries = dict(zip(children, parts, strict=True))
    for key, entry in entries.items():
        path = f"{root.path}/{_written_key(key)}" if root.path else _written_key(key)
        yield from given_to_tree(entry, Root(path, (*root.keys, key), children[key]))


def _by_patterns(
    patterns: Mapping[Any, Any], root: Root, below: Sequence[tuple[Any, Any]]
) -> Iterator[tuple[Keys, LeafNames]]:
    """Yield the names of leaves, each by the first pattern that is found in its path. A whole path is no pattern."""
    paths = {keys: jax.tree_util.keystr(keys, simple=True, separator="/") for keys, _ in below}
    compiled = dict[str, re.Pattern[str]]()
    for pattern, names in patterns.items():
        if not isinstance(pattern, str):
            raise TypeError(
                f"names=: {pattern!r} is no pattern of paths, which is a string. A dictionary from the keys of the "
                "argument has an entry for each, which may be None."
            )
        if not (names is None or isinstance(names, str) or is_axis_names(names)):
            raise TypeError(
                f"names=: {pattern!r} is no key of the argument, so it is a pattern of paths, which goes to names such "
                f"as 'batch pos', and not to an object of type {type(names).__name__}."
            )
        try:
            compiled[pattern] = re.compile(re.sub(r"^\*/", "(^|/)", pattern))  # `*/` begins no regular expression
        except re.error as e:
            plain = re.sub(r"(\\\*)+", ".*", re.escape(pattern))
            raise ValueError(f"names=: {pattern!r} is no regular expression ({e}). Write {plain!r}.") from None
    for pattern, regex in compiled.items():
        if not any(regex.search(path) for path in paths.values()):
            known = list(dict.fromkeys([*map(_written_key, _children_of(root.value)), *paths.values()]))
            near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3) or known[:3]
            raise ValueError(
                f"names=: {pattern!r} is no key of {root.path or 'the tree'}, and as a pattern it is found in "
                f"none of its {errors.counted(len(paths), 'path')}. The nearest: {errors.quoted(near)}."
            )
    # A name that is a path means this leaf alone, although `w` is also found in `w_out`.
    whole = set(paths.values())
    for keys, value in below:
        at = paths[keys]
        first = next((p for p, regex in compiled.items() if p == at or (p not in whole and regex.search(at))), None)
        if first is not None:
            path = root.keys + keys
            yield from _checked_names(
                patterns[first], value, path, _path_of_leaf(root, path), f"pattern {first!r} of names="
            )


def _checked_names(names: Any, value: Any, keys: Keys, where: str, source: str) -> Iterator[tuple[Keys, LeafNames]]:
    """Yield the names of one leaf, if it is an array."""
    array = value.array if isinstance(value, NamedArray) else value
    shape = getattr(array, "shape", () if isinstance(array, NUMBERS) else None)
    if names is None or shape is None:
        return
    read = read_names(names)
    if len(read) != len(shape):
        shown, many = errors.describe_axes(n or "_" for n in read), errors.counted(len(read), "name")
        raise ValueError(
            f"{source}: {shown} has {many}, but {where} has shape {tuple(shape)}. An axis without a name is `_`."
        )
    yield keys, LeafNames(read, source)


_WORD = re.compile(r"[^\W\d]\w*'*(\*[^\W\d]\w*'*)*")
"""Matches a name, with primes for roles of an axis, or the names of the axes that one is made of, as in `heads*dim`."""


def read_names(names: str | Sequence[str | None]) -> AxisNames:
    """Return the names of axes: `_` becomes None, and the second of two axes with one name gets a prime, `pos'`."""
    if isinstance(names, str):
        for word in re.finditer(r"[^\s,]+", names):
            if not _WORD.fullmatch(word[0]):
                place = parsing.Place(word.start(), word.end())
                parsing.fail(
                    "names=", names, place, f"{word[0]!r} is no name. Names are made of letters, digits and `_`."
                )
        names = names.replace(",", " ").split()
    read: list[str | None] = []
    for name in names:
        while name in read and name != "_" and name is not None:
            name += "'"
        read.append(None if name == "_" else name)
    return tuple(read)


def written(names: AxisNames) -> str | AxisNames:
    """Return names as `names=` takes them: in a string, if it can hold them."""
    fits = all(n is None or _WORD.fullmatch(n) for n in names)
    return " ".join(n or "_" for n in names) if fits else names


# --- what the code says ---


def _said_by_code(leaf: Leaf, root: Root) -> LeafNames:
    """Return the names of a leaf that its tree or an annotation has, if they fit its rank."""
    if leaf.shape is None:
        return _UNNAMED
    annotation, field, box, node = root.annotation, root.path, "", root.value
    for key in leaf.keys[len(root.keys) :]:
        if hasattr(type(node), "get_metadata") or hasattr(type(node), "get_partition_spec"):
            box = type(node).__name__  # which has the annotation of its array
            break
        if isinstance(key, GetAttrKey):
            annotation, field = _annotations_of_class(type(node)).get(key.name), f"{type(node).__name__}.{key.name}"
        else:  # an element of `tuple[...]`, `list[...]` or `dict[...]`
            of, origin = typing.get_args(annotation), typing.get_origin(annotation)
            if not of or origin in (typing.Annotated, typing.Union, types.UnionType):
                annotation = None
            elif origin is tuple and isinstance(key, SequenceKey) and of[-1] is not ...:
                annotation = of[key.idx] if key.idx < len(of) else None
            else:
                annotation = of[0] if of[-1] is ... else of[-1]
        node = child_of(node, key)
    if leaf.names is not None and len(leaf.names) == len(leaf.shape):
        metadata = f"metadata of Flax's {box}" if box else f"axis_names of `{field}`"
        source = "a named array" if isinstance(leaf.value, NamedArray) else metadata
        return LeafNames(read_names(leaf.names), source)
    # A stack of modules has an axis in front, which dots of an annotation must not take for one of theirs.
    names = _names_in(annotation, len(leaf.shape), dots=field == root.path)
    return _UNNAMED if names is None else LeafNames(names, f"the annotation of `{field}`")


def _names_in(annotation: Any, rank: int, dots: bool) -> AxisNames | None:
    """Return the names that an annotation has for an array, if only one of its alternatives fits the rank.

    `dots` says whether it may have dots, which fit any rank.
    """
    if isinstance(annotation, Annotation):
        asked = annotation.asked
        before: list[str | None] = [name_of(s) for s in asked.before] if asked.ordered else []
        after: list[str | None] = [name_of(s) for s in asked.after]
        more = asked.subset or not asked.ordered
    elif hasattr(annotation, "dim_str") and hasattr(annotation, "array_type"):  # an annotation of jaxtyping
        words = annotation.dim_str.split()
        at = next((i for i, word in enumerate(words) if re.match(r"\W*\*|\.\.\.", word)), len(words))
        more = at < len(words)
        before, after = [*map(_name_by_jaxtyping, words[:at])], [*map(_name_by_jaxtyping, words[at + 1 :])]
    else:
        origin, of = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is typing.Annotated:
            return _names_in(of[0], rank, dots)
        found = [_names_in(a, rank, dots) for a in of] if origin in (typing.Union, types.UnionType) else []
        fitting = {names for names in found if names is not None}
        return fitting.pop() if len(fitting) == 1 else None
    # The rest are the axes that dots stand for; they have no names.
    left = rank - len(before) - len(after)
    if left < 0 or (left and not more) or (more and not dots):
        return None
    return read_names([*before, *[None] * left, *after])


def _name_by_jaxtyping(word: str) -> str | None:
    """Return the name in a dimension of jaxtyping. Sizes, sums, `_`, `?name` and `#name`, which may be 1, have none."""
    found = re.fullmatch(r"([^\W\d_]\w*)(=.*)?", word)
    return found[1] if found else None


def _annotations_of(owner: Any) -> Mapping[str, Any]:
    """Return the annotations of a class or a function, except those that cannot be evaluated here."""
    try:
        return typing.get_type_hints(owner, include_extras=True)
    except Exception:  # for example, a name that is imported for type checkers only
        found: dict[str, Any] = {}
        for part in reversed(getattr(owner, "__mro__", (owner,))):
            scope = getattr(part, "__globals__", None) or vars(sys.modules.get(part.__module__, typing))
            for name, annotation in inspect.get_annotations(part).items():
                try:
                    found[name] = eval(annotation, dict(scope)) if isinstance(annotation, str) else annotation
                except Exception:  # the user's code, which may raise anything
                    found.pop(name, None)
        return found


_annotations_of_class = functools.lru_cache(maxsize=256)(_annotations_of)  # which many leaves share


def roots_of(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Root]:
    """Yield the arguments of a call, with the names and annotations of their parameters."""
    plain: Any = inspect.unwrap(fn)
    while isinstance(plain, functools.partial):
        plain = inspect.unwrap(plain.func)
    if not (inspect.isfunction(plain) or inspect.ismethod(plain)):
        plain = inspect.unwrap(type(plain).__call__)  # an object that is called, or a jitted function
    annotations = _annotations_of(getattr(plain, "__func__", plain))
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # a function without a signature
        parameters = []
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    for i, value in enumerate(args):
        name = positional[i].name if i < len(positional) else rest
        path = name if i < len(positional) else f"{rest}/{i - len(positional)}"
        yield Root(path, (SequenceKey(0), SequenceKey(i)), value, annotations.get(name))
    keyword = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), "")
    named = {p.name for p in parameters}
    for name, value in kwargs.items():
        annotation = annotations.get(name if name in named else keyword)
        yield Root(name, (SequenceKey(1), jax.tree_util.DictKey(name)), value, annotation)


# --- paths ---


def _path_of_leaf(root: Root, keys: Keys) -> str:
    """Return the path of a leaf as messages write it, from the name of the parameter."""
    below = jax.tree_util.keystr(keys[len(root.keys) :], simple=True, separator="/")
    return "/".join(part for part in (root.path, below) if part) or "the array"


def _children_of(node: Any) -> dict[Any, Any]:
    """Return the children of a node of a tree, by key."""
    found = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    return {keys[0]: child for keys, child in found if keys}


def _written_key(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)
