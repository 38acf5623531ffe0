"""Layouts of weights: what another program calls the arrays of a model, and how it arranges them, as a table.

A table has a row for each key; `layout_rows` says how rows are written. It is checked against a tree as a whole before
anything is computed. The conversions consist of named operations, so they run on arrays that are sharded, traced, or
lazy: a model is loaded one shard at a time.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .. import tree as named_trees
from ..axis import Axis
from ..core import errors
from ..named_array import NamedArray, describe_array, is_jax_array_like, raw, wrap
from ..ops.contraction import dot
from ..ops.indexing import index
from ..ops.joining import concatenate, pad, stack
from ..ops.rearranging import rearrange
from ..ops.shaping import flatten_axes, split, unbind, unflatten_axis
from ..tree import LayerStack
from .layout_rows import JOINED, WHAT, Operand, TableRow, merged_name, parse_row, parse_split
from .lazy_arrays import abstract, as_lazy, call_lazily, with_abstract_arrays
from .loading import active_context, all_equal, load_subtree
from .module import ModuleWithStateDictSerialization
from .naming import with_prefix
from .small_numbers import rounded

T = TypeVar("T")


class _Fitted(NamedTuple):
    """A row that a tree has arrays for, with the sizes of the axes of each."""

    row: TableRow
    sizes: tuple[dict[str, int], ...]

    def padded(self, operand: int) -> dict[str, int]:
        """Return the sizes of an array's axes in the entry."""
        row = self.row
        return self.sizes[operand] | {v.name: v.size for v in row.mentioned(row.operands[operand]) if v.size}

    def joined(self) -> list[int]:
        """Return the size along `_` of each array."""
        sizes = [self.padded(i) for i in range(len(self.sizes))]
        return [math.prod(s[v.name] for v in operand.own) for s, operand in zip(sizes, self.row.operands, strict=True)]

    def entry(self) -> dict[str, int]:
        """Return the sizes of the axes of all entries of the row, before any are merged."""
        sizes = (self.padded(0) if self.sizes else {}) | {JOINED: sum(self.joined())}
        return {name: sizes[name] for name in self.row.order}

    def keys(self) -> list[str]:
        """Return the keys of the row, in the order of their elements."""
        sizes = self.entry()
        return [self.row.key_of(i) for i in itertools.product(*(range(sizes[name]) for name in self.row.along))]


class WeightLayout:
    """How another program names and arranges the arrays of a model, as a table.

    `to_torch_compatible_state_dict` and `from_torch_compatible_state_dict` take a layout; `pack` and `unpack` convert
    arrays on their devices, also in jit. Two layouts of the same model convert each into the other:
    `second.pack(first.unpack(entries, model))`.

    Arguments:
        table: by key, the paths of arrays in a tree and the axes of the entry, as in `"w -> vocab embed"`. A key can
            have axes, as in `"layers.{layers}.weight"`: there is an entry for each of their elements. Axes in
            parentheses are merged. Several arrays are joined along `_`, each with the axes that follow its path in
            parentheses. `axis=8` adds zeros up to that size, and `as bfloat16` casts. An entry in few bits has its
            scales in another, `as scale`, with the axes that have scales. `"a + 2 b c"` adds a multiple of a product.
            `"= key"` repeats an entry. Rows of which a tree has no array are left out.
        split: by axis, two or more axes that it consists of, with all sizes but one, as in `{"size": "two=2 half"}`.
            Rows can have these axes in its place, in any order.

    >>> Heads, Group, Size, Embed = axn.make_axes(heads=2, group=2, size=4, embed=3)
    >>> model = {"q": axn.ones((Heads, Group, Size, Embed)), "k": axn.zeros((Heads, Size, Embed))}
    >>> fused = axn.state.WeightLayout({"qk.weight": "q (group), k -> (heads _ size) embed"})
    >>> entries = fused.pack(model)
    >>> entries["qk.weight"].shape
    {'(heads _ size)': 24, 'embed': 3}
    >>> fused.unpack(entries, model)["q"].shape
    {'heads': 2, 'group': 2, 'size': 4, 'embed': 3}
    """

    def __init__(self, table: Mapping[str, str], *, split: Mapping[str, str] | None = None):
        self.split = parse_split(split or {})
        self.ties = {key: text.strip()[1:].strip() for key, text in table.items() if text.strip().startswith("=")}
        """By key, the key of the same entry."""
        self.rows = tuple(parse_row(key, text) for key, text in table.items() if key not in self.ties)
        self._scales = {self._values_of(row).key: row for row in self.rows if row.is_scale}
        """By key of an entry in few bits, the row of its scales."""
        for row in self.rows:
            if row.dtype is not None and jnp.issubdtype(row.dtype, jnp.integer) and row.key not in self._scales:
                raise ValueError(f"{WHAT}: {row.key!r} is cast to {row.dtype}, but no row has its scales, `as scale`.")
        keys = {row.key for row in self.rows}
        for key, same in self.ties.items():
            if same not in keys or "{" in same:
                hint = errors.suggestion(same, keys)
                raise ValueError(f"{WHAT}: {key!r} is the same as {same!r}, which is not the key of one entry.{hint}")

    def _values_of(self, scale: TableRow) -> TableRow:
        """Return the row of the entry that has some scales."""
        for row in self.rows:
            if row.dtype is not None and row.operands == scale.operands and row.along == scale.along:
                sized = {(v.name, v.size) for v in row.variables}
                if extra := [v.name for v in scale.variables if (v.name, v.size) not in sized]:
                    raise ValueError(f"{WHAT}: {scale.key!r} has axes that {row.key!r} lacks: {errors.quoted(extra)}.")
                return row
        raise ValueError(f"{WHAT}: {scale.key!r} has scales, but no row stores the same arrays in few bits.")

    def pack(self, tree: Any) -> dict[str, Any]:
        """Return the entries of the layout, as named arrays by key: traced, sharded or abstract, as the tree's are.

        >>> layout = axn.state.WeightLayout({"{layers}.w": "weight -> (out in)"})
        >>> layout.pack({"weight": axn.ones({"layers": 2, "in": 3, "out": 4})})["1.w"]
        NamedArray(float32[(out in)=12], [1. 1. 1. 1. 1. 1. 1. 1. 1. 1. 1. 1.])
        """
        return with_abstract_arrays(call_lazily(self.entries_of, tree)) if _is_abstract(tree) else self.entries_of(tree)

    def unpack(self, entries: Mapping[str, Any], like: T) -> T:
        """Return a tree with the entries of the layout: undo `pack`.

        Arguments:
            entries: arrays by key, named as `pack` names them or raw.
            like: a tree with the axes and dtypes of the result, which can be abstract. Its arrays are not used.

        >>> layout = axn.state.WeightLayout({"w": "weight -> (out in)"})
        >>> layout.unpack({"w": jnp.ones(6)}, {"weight": jax.ShapeDtypeStruct((), "float32")})
        Traceback (most recent call last):
        ValueError: WeightLayout: the table does not fit the tree.
          'w': weight is an array without names, float32[]: write its path alone.
        """
        template = abstract_tree(like)
        for key, same in self.ties.items():
            pair = [raw(entries[k]) for k in (key, same) if k in entries]
            if len(pair) == 2 and not any(isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct)) for x in pair):
                if pair[0].shape == pair[1].shape and not bool((pair[0] == pair[1]).all()):
                    raise ValueError(f"{WHAT}.unpack: {key!r} differs from {same!r}, but the layout has them equal.")
        if _is_abstract(dict(entries)):
            return with_abstract_arrays(call_lazily(lambda found: self._unpack(found, template), dict(entries)))
        return self._unpack(entries, template)

    def check(self, like: Any, entries: Mapping[str, Any] | None = None) -> None:
        """Check the table against a tree and the entries of the other program, before an array is moved.

        An axis that is swapped with another of its size cannot be seen in shapes. So it is an error if two axes of an
        entry have one size: make the trees from a configuration in which all sizes differ.

        Arguments:
            like: a tree, which can be abstract.
            entries: the other program's arrays by key, which can be abstract. Names are compared where arrays have
                them.

        >>> layout = axn.state.WeightLayout({"w": "weight -> in out"})
        >>> layout.check({"weight": axn.ones({"out": 2, "in": 3})}, {"w": np.ones((3, 2))})
        """
        like = abstract_tree(like)
        tensors = _tensors(with_abstract_arrays(call_lazily(_exported, like)))
        problems = [p for fitted in self._fitted(tensors) for p in _alike(fitted)]
        expected = self.pack(like)
        _raise(problems + _misfits(expected, expected if entries is None else entries, self.ties))

    def probe(
        self,
        like: Any,
        forward: Callable[[Any], Any],
        other_forward: Callable[[dict[str, Any]], Any],
        *,
        key: jax.Array,
        rtol: float = 1e-4,
    ) -> float:
        """Compare the results of both programs for the same random weights, and return how far they differ.

        This finds what shapes and names cannot, such as two norms that are swapped, or a gate with the layer beside it.

        Arguments:
            like: the tree of the model, which can be abstract.
            forward: the model, from a tree with random weights to an array.
            other_forward: the other program, from the entries, as raw arrays by key, to the same array.
            key: the random key of the weights.
            rtol: the largest difference that is no error, relative to the largest element.

        >>> layout = axn.state.WeightLayout({"w": "weight -> out in"})
        >>> like, x = {"weight": axn.ones({"in": 3, "out": 2})}, jnp.ones(3)
        >>> difference = layout.probe(
        ...     like, lambda tree: axn.dot(tree["weight"], axn.named(x, "in"), axis="in"), lambda w: w["w"] @ x,
        ...     key=jax.random.key(0),
        ... )
        """
        leaves, structure = jax.tree.flatten(like)
        keys = jax.random.split(key, len(leaves))
        drawn = jax.tree.unflatten(structure, list(map(_drawn, keys, leaves)))
        entries = {k: raw(x) for k, x in self.pack(drawn).items()}
        own, other = (np.asarray(raw(y), np.float64) for y in (forward(drawn), other_forward(entries)))
        if own.shape != other.shape:
            raise ValueError(f"{WHAT}.probe: the results have shapes {own.shape} and {other.shape}.")
        difference = float(np.max(np.abs(own - other), initial=0) / max(np.max(np.abs(own), initial=0), 1e-30))
        if not difference <= rtol:
            raise ValueError(
                f"{WHAT}.probe: with the same random weights, the results differ by {difference:.2g} of the largest "
                f"element, more than rtol={rtol:g}: an entry has the right shape, but other values than the other "
                "program expects. Look at entries of one shape that are swapped, and at the order within merged axes."
            )
        return difference

    # --- against a tree ---

    def _fitted(self, tensors: Mapping[str, Any]) -> list[_Fitted]:
        """Return the rows that a tree has arrays for, or raise one error with everything that does not fit."""
        problems: list[str] = []
        fitted = []
        users: dict[str, list[str]] = {}
        for row in self.rows:
            paths = [path for operand in row.operands for path in operand.paths]
            absent = [path for path in paths if path not in tensors]
            if len(absent) == len(paths):
                continue
            for path in () if row.is_scale else paths:
                users.setdefault(path, []).append(row.key)
            if absent:
                problems += [f"{row.key!r}: the tree has no {p}.{errors.suggestion(p, tensors)}" for p in absent]
                continue
            sizes = tuple(self._sizes(row, operand, tensors, problems) for operand in row.operands)
            if all(sizes) or row.elements is None:
                fitted.append(_Fitted(row, tuple(s or {} for s in sizes)))
        absent = {p for row in self.rows for operand in row.operands for p in operand.paths} - tensors.keys()
        for path, x in tensors.items():
            if path not in users:
                problems.append(f"{path} is {describe_array(x)}, but no row has it.{errors.suggestion(path, absent)}")
            elif len(users[path]) > 1:
                problems.append(
                    f"{path} is in {' and '.join(map(repr, users[path]))}. If both have the same values, write "
                    f'`"= {users[path][0]}"` in the other.'
                )
        problems += [p for f in fitted if f.row.elements is not None for p in _unequal(f, tensors)]
        if not problems:
            keys = Counter([key for f in fitted for key in f.keys()] + list(self.ties))
            problems += [f"{key!r} is the key of {count} entries." for key, count in keys.items() if count > 1]
            problems += [
                f"{k!r}: the tree has no array of {same!r}." for k, same in self.ties.items() if same not in keys
            ]
        _raise(problems)
        return fitted

    def _sizes(
        self, row: TableRow, operand: Operand, tensors: Mapping[str, Any], problems: list[str]
    ) -> dict[str, int] | None:
        """Return the sizes of the axes of an array as a row has them, or note why it does not fit."""
        x, path = tensors[operand.path], operand.path
        is_named = isinstance(x, NamedArray)
        if not is_named or row.elements is None:
            if is_named:
                problems.append(f"{row.key!r}: {path} is {describe_array(x)}: write its axes, `{path} -> axes`.")
            elif row.elements is not None or row.along:
                problems.append(
                    f"{row.key!r}: {path} is an array without names, {describe_array(x)}: write its path alone."
                )
            return None
        sizes = dict(zip(x.names, x.array.shape, strict=True))
        mentioned = {v.name: v.size for v in row.mentioned(operand)}
        for axis, factors in self._splits(row, sizes):
            known = math.prod(f.size or 1 for f in factors)
            if sizes[axis] % known or (all(f.size for f in factors) and sizes[axis] != known):
                described = errors.describe_axes([f.name for f in factors], [f.size or "?" for f in factors])
                problems.append(f"{row.key!r}: axis {axis!r} of {path}, of size {sizes[axis]}, is not {described}.")
            size = sizes.pop(axis)
            sizes |= {f.name: f.size or size // known for f in factors}
        asked = [*row.along, *mentioned]
        has = errors.describe_shape(sizes)
        problems += [
            f"{row.key!r}: {path} has no axis {n!r}, but {has}.{errors.suggestion(n, sizes)}"
            for n in asked
            if n not in sizes
        ]
        problems += [
            f"{row.key!r}: axis {n!r} of {path}, of size {size}, has no place."
            for n, size in sizes.items()
            if n not in asked
        ]
        problems += [
            f"{row.key!r}: axis {n!r} of {path} has size {sizes[n]}, more than the {size} of the table."
            for n, size in mentioned.items()
            if size is not None and sizes.get(n, 0) > size
        ]
        if operand.added:
            factors = [set(tensors[p].names) for p in operand.added.paths]
            lacking = set(x.names) - (factors[0] | factors[1])
            if lacking or (factors[0] ^ factors[1]) - set(x.names):
                problems.append(
                    f"{row.key!r}: the product of {' and '.join(operand.added.paths)} does not have the axes of {path}, "
                    f"{errors.describe_axes(x.names)}."
                )
        return sizes if set(asked) == sizes.keys() else None

    def _splits(self, row: TableRow, names: Any) -> Iterator[tuple[str, Any]]:
        """Yield the axes that a row splits, with their factors."""
        for axis, factors in self.split.items():
            if axis in names and not {f.name for f in factors}.isdisjoint(row.order):
                yield axis, factors

    # --- tensors to entries ---

    def entries_of(self, tree: Any) -> dict[str, Any]:
        """Return what `pack` does, of arrays that are concrete, traced or lazy."""
        tensors = _tensors(_exported(tree))
        entries: dict[str, Any] = {}
        for fitted in self._fitted(tensors):
            row = fitted.row
            if row.elements is None:
                entries[row.key] = tensors[row.operands[0].path]
            elif not row.is_scale:
                x = self._joined(fitted, tensors)
                if scale := self._scales.get(row.key):
                    x, scales = rounded(x, [n for n in row.order if n not in scale.order], row.dtype)
                    entries |= _laid_out(scale, scales)
                entries |= _laid_out(row, x if row.dtype is None else x.astype(row.dtype))
        return entries | {key: entries[same] for key, same in self.ties.items()}

    def _joined(self, fitted: _Fitted, tensors: Mapping[str, Any]) -> NamedArray:
        """Return the arrays of a row as one, with all axes of its entries, none of them merged."""
        row, parts = fitted.row, []
        for i, operand in enumerate(row.operands):
            x = tensors[operand.path]
            if operand.added:
                left, right = (tensors[p] for p in operand.added.paths)
                summed = tuple(n for n in left.names if n in right.names and n not in x.names)
                x = x + (dot(left, right, axis=summed) * operand.added.factor).astype(x.dtype)
            for axis, factors in self._splits(row, x.names):
                x = unflatten_axis(x, axis, tuple(Axis(f.name, fitted.sizes[i][f.name]) for f in factors))
            padded = fitted.padded(i)
            wider = {n: (0, padded[n] - size) for n, size in fitted.sizes[i].items() if padded[n] > size}
            x = pad(x, wider) if wider else x
            parts.append(flatten_axes(x, tuple(v.name for v in operand.own), JOINED) if len(row.operands) > 1 else x)
        return parts[0] if len(parts) == 1 else concatenate(parts, JOINED)

    # --- entries to tensors ---

    def load(self, like: Any, entries: Mapping[str, Any], prefix: str | None) -> Any:
        """Return a tree with lazy arrays, from the entries of an active load."""
        flat = self.pack(like)
        repeated = {key for key in self.ties if with_prefix(prefix, key) not in entries}
        found = load_subtree({key: x for key, x in flat.items() if key not in repeated}, entries, prefix)
        for key, same in self.ties.items():
            if key not in repeated and not all_equal([found[key], found[same]]):
                misfit = (
                    f"{with_prefix(prefix, key)!r} differs from {with_prefix(prefix, same)!r}, but should be the same."
                )
                active_context().misfits.append(misfit)
        return call_lazily(lambda found: self._unpack(found, like), found)

    def _unpack(self, entries: Mapping[str, Any], like: T) -> T:
        template = with_abstract_arrays(call_lazily(_exported, like))
        tensors = _tensors(template)
        rows = self._fitted(tensors)
        expected = self.pack(like)
        _raise(_misfits(expected, entries, self.ties))
        found: dict[str, Any] = {}
        for fitted in rows:
            row = fitted.row
            if row.elements is None:
                found[row.operands[0].path] = raw(entries[row.key])
            elif not row.is_scale:
                if added := [operand for operand in row.operands if operand.added]:
                    raise ValueError(
                        f"{WHAT}.unpack: {row.key!r} cannot be undone: a product was added to {added[0].path}. Load the "
                        "entry into a tree without it, with another layout."
                    )
                x = _gathered(fitted, entries)
                if scale := self._scales.get(row.key):
                    x = x.astype(jnp.float32) * _gathered(_Fitted(scale, fitted.sizes), entries).astype(jnp.float32)
                found |= self._parted(fitted, x, tensors)
        leaves, structure = named_trees.flatten_with_path(template)
        return _imported(jax.tree.unflatten(structure, [found.get(_path(p), x) for p, x in leaves]))

    def _parted(self, fitted: _Fitted, x: NamedArray, tensors: Mapping[str, Any]) -> dict[str, NamedArray]:
        """Return the arrays of a row from all axes of its entries, none of them merged."""
        row = fitted.row
        joined = len(row.operands) > 1
        parts = split(x, JOINED, [Axis(JOINED, size) for size in fitted.joined()]) if joined else [x]
        found = {}
        for i, (operand, part) in enumerate(zip(row.operands, parts, strict=True)):
            like, padded = tensors[operand.path], fitted.padded(i)
            if joined:
                own = tuple(Axis(v.name, padded[v.name]) for v in operand.own)
                part = unflatten_axis(part, JOINED, own) if own else unbind(part, JOINED)[0]
            for n, size in fitted.sizes[i].items():
                if padded[n] > size:
                    part = split(part, n, [Axis(n, size), Axis(n, padded[n] - size)])[0]
            for axis, factors in self._splits(row, like.names):
                part = flatten_axes(part, tuple(f.name for f in factors), axis)
            found[operand.path] = rearrange(part, like.names).astype(like.dtype)
        return found


# --- one row ---


def _laid_out(row: TableRow, x: NamedArray) -> dict[str, NamedArray]:
    """Return the entries of a row, from an array with all of its axes."""
    x = rearrange(x, row.order)
    for group in row.groups:
        x = flatten_axes(x, tuple(member.name for member in group.members), merged_name(group))
    counts, parts = [range(x.axis_size(name)) for name in row.along], [x]
    for name in row.along:
        parts = [each for part in parts for each in unbind(part, name)]
    return {row.key_of(i): part for i, part in zip(itertools.product(*counts), parts, strict=True)}


def _gathered(fitted: _Fitted, entries: Mapping[str, Any]) -> NamedArray:
    """Return the entries of a row as one array, with all of its axes."""
    row, sizes = fitted.row, fitted.entry()
    parts = [wrap(raw(entries[key]), row.names) for key in fitted.keys()]
    for name in reversed(row.along):
        parts = [stack(parts[i : i + sizes[name]], name) for i in range(0, len(parts), sizes[name])]
    (x,) = parts
    for group in row.groups:
        x = unflatten_axis(x, merged_name(group), tuple(Axis(m.name, sizes[m.name]) for m in group.members))
    return x


# --- mistakes ---


def _raise(problems: Sequence[str]) -> None:
    if problems:
        count = "" if len(problems) == 1 else f", {len(problems)} problems"
        raise ValueError("\n  ".join([f"{WHAT}: the table does not fit{count}.", *problems]))


def _unequal(fitted: _Fitted, tensors: Mapping[str, Any]) -> list[str]:
    """Say which arrays of a row cannot be joined, since their axes have other sizes or their dtypes differ."""
    row, problems = fitted.row, []
    first, dtype = fitted.padded(0), tensors[row.operands[0].path].dtype
    for i, operand in enumerate(row.operands[1:], 1):
        sizes = fitted.padded(i)
        problems += [
            f"{row.key!r}: axis {n!r} has size {first[n]} in {row.operands[0].path} and {sizes[n]} in {operand.path}."
            for n in row.order
            if n != JOINED and first[n] != sizes[n]
        ]
        if tensors[operand.path].dtype != dtype:
            found = tensors[operand.path].dtype
            problems.append(f"{row.key!r}: {row.operands[0].path} is {dtype}, but {operand.path} is {found}.")
    return problems


def _alike(fitted: _Fitted) -> list[str]:
    """Say which axes of an entry could be swapped unseen."""
    sizes = fitted.entry()
    merged = {merged_name(g): math.prod(sizes[m.name] for m in g.members) for g in fitted.row.groups}
    problems = []
    for a, b in itertools.combinations({**sizes, **merged}.items(), 2):
        if a[1] == b[1] and a[0] not in b[0] and JOINED not in (a[0], b[0]):
            problems.append(
                f"{fitted.row.key!r}: axes {a[0]!r} and {b[0]!r} both have size {a[1]}, so shapes do not show whether "
                "the other program has them swapped. Check with a configuration in which all sizes differ."
            )
    return problems


def _misfits(expected: Mapping[str, Any], entries: Mapping[str, Any], ties: Mapping[str, str]) -> list[str]:
    """Say which entries have another shape or other axes than a layout gives them, are missing or are too many."""
    problems = []
    for key, wanted in expected.items():
        if key not in entries:
            if key not in ties:
                problems.append(f"{key!r} is missing, for {describe_array(wanted)}.{errors.suggestion(key, entries)}")
            continue
        entry, shape = (
            entries[key],
            tuple(entries[key].array.shape if isinstance(entries[key], NamedArray) else entries[key].shape),
        )
        names = getattr(wanted, "names", None)
        if isinstance(entry, NamedArray) and names is not None and entry.names != names:
            problems.append(f"{key!r} is {describe_array(entry)}, but by the table it is {describe_array(wanted)}.")
        elif shape != raw(wanted).shape:
            differ = [
                f"axis {n!r} has size {a} by the table and {b} there"
                for n, a, b in zip(names or (), raw(wanted).shape, shape, strict=False)
                if a != b
            ]
            where = f": {', '.join(differ)}" if differ else ""
            problems.append(f"{key!r} has shape {shape}, but by the table it is {describe_array(wanted)}{where}.")
    problems += [
        f"{key!r} is there, but no row has it.{errors.suggestion(key, expected)}"
        for key in entries
        if key not in expected
    ]
    return problems


# --- trees ---


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _tensors(tree: Any) -> dict[str, Any]:
    """Return the arrays of a tree by path, such as `blocks.stacked.mlp.up.weight`."""
    return {_path(path): x for path, x in named_trees.leaves_with_path(tree) if is_jax_array_like(x)}


def _is_abstract(tree: Any) -> bool:
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))


def abstract_tree(tree: T) -> T:
    """Return a tree with the shapes and dtypes of its arrays in their place."""
    return jax.tree.map(lambda x: abstract(as_lazy(x)) if is_jax_array_like(x) else x, tree)


def _exported(tree: T) -> T:
    """Return a tree with what layers declare for state dicts: their factors, and without the added layers of a stack."""

    def at(node: Any) -> Any:
        if isinstance(node, ModuleWithStateDictSerialization):
            if type(node).flatten_for_export is not ModuleWithStateDictSerialization.flatten_for_export:
                raise TypeError(
                    f"{WHAT}: {type(node).__name__} has its own `flatten_for_export`, which a table does not replace. "
                    "Export the tree without a layout."
                )
            node = node._scaled(node._state_dict_scales())
        if isinstance(node, LayerStack) and (added := node.added_layers()):
            layers, _ = added
            node = _with_layers(node, layers, lambda x: index(x, {layers.name: slice(layers.size)}))
        return node

    return _each_node(at, tree)


def _imported(tree: T) -> T:
    """Undo `_exported`."""

    def at(node: Any) -> Any:
        if isinstance(node, ModuleWithStateDictSerialization):
            node = node._scaled({field: 1 / by for field, by in node._state_dict_scales().items()})
        if isinstance(node, LayerStack) and (added := node.added_layers()):
            layers, count = added
            node = _with_layers(node, layers, lambda x: pad(x, {layers.name: (0, count)}))
        return node

    return _each_node(at, tree)


def _with_layers(stacked: Any, layers: Axis, change: Callable[[NamedArray], NamedArray]) -> Any:
    def at(x: Any) -> Any:
        return change(x) if isinstance(x, NamedArray) and is_jax_array_like(x) and layers.name in x.names else x

    return named_trees.map(at, stacked)


def _each_node(change: Callable[[Any], Any], node: Any) -> Any:
    """Apply a function to every node of a tree, from the outside in."""
    if isinstance(node, NamedArray) or jax.tree_util.all_leaves([node]):
        return node
    node = change(node)
    found, structure = jax.tree.flatten(node, is_leaf=lambda x: x is not node)
    return jax.tree.unflatten(structure, [_each_node(change, child) for child in found])


def _drawn(key: jax.Array, x: Any) -> Any:
    """Draw random numbers for a probe that are neither too large nor too small for sums over a layer's inputs."""
    if not is_jax_array_like(x) or not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x
    return (jax.random.normal(key, x.shape) * max(x.size, 1) ** -0.25).astype(x.dtype)
