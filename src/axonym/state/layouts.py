"""Layouts of weights: what another program calls the arrays of a model, and how it arranges them, as a table.

A table has a row for each key; `layout_rows` says how rows are written. It is checked against a tree as a whole before
anything is computed. The conversions consist of named operations, so they run on arrays that are sharded, traced, or
lazy: a model is loaded one shard at a time.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .. import tree as named_trees
from ..axis import Axis
from ..core import errors, parsing
from ..named_array import NamedArray, describe_array, is_jax_array_like, raw, wrap
from ..ops.indexing import index
from ..ops.joining import concatenate, pad, stack
from ..ops.rearranging import rearrange
from ..ops.shaping import flatten_axes, split, unbind, unflatten_axis
from ..sharding.moving import copied_to_host
from ..tree import LayerStack
from .layout_rows import JOINED, WHAT, RowArray, TableRow, merged_name, parse_row, parse_split
from .lazy_arrays import abstract, as_lazy, call_lazily, with_abstract_arrays
from .loading import active_context, all_equal, load_subtree
from .module import ModuleWithStateDictSerialization
from .naming import with_prefix

T = TypeVar("T")


class _FittedRow(NamedTuple):
    """A row that a tree has arrays for."""

    row: TableRow
    sizes: tuple[dict[str, int], ...]
    """The sizes of the axes of each array, some of them split."""
    padded: tuple[dict[str, int], ...]
    """The same in the entry, which can have zeros behind the array."""
    joined: tuple[int, ...]
    """The size along `_` of each array."""

    @property
    def whole(self) -> dict[str, int]:
        """Return the sizes of the axes of all entries together, none of them merged."""
        sizes = self.padded[0] | {JOINED: sum(self.joined)}
        return {name: sizes[name] for name in self.row.order}

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of an entry."""
        sizes = self.whole
        groups = ([e] if isinstance(e, parsing.Name) else e.members for e in self.row.elements)
        return tuple(math.prod(sizes[member.name] for member in members) for members in groups)

    @property
    def keys(self) -> list[str]:
        """Return the keys of the row, in the order of their elements."""
        sizes = self.whole
        return [self.row.key_of(i) for i in itertools.product(*(range(sizes[name]) for name in self.row.along))]


class WeightLayout:
    """How another program names and arranges the arrays of a model, as a table.

    `to_torch_compatible_state_dict` and `from_torch_compatible_state_dict` take a layout. `pack` and `unpack` convert
    arrays where they are, also in jit. Two layouts of one model convert each into the other:
    `second.pack(first.unpack(entries, model))`.

    Arguments:
        table: by key, the paths of arrays in a tree and the axes of the entry, as in `"w -> vocab embed"`. A key can
            have axes, as in `"layers.{layers}.weight"`: there is an entry for each of their elements. Axes in
            parentheses are merged. Several arrays are joined along `_`, each with the axes that follow its path in
            parentheses. `axis=8` adds zeros up to that size, and `as bfloat16` casts. `"= key"` repeats an entry. Rows
            of which a tree has no array are left out.
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
        self.same = {key: text.strip()[1:].strip() for key, text in table.items() if text.strip().startswith("=")}
        """By key of an entry that is repeated, the other key."""
        self.rows = tuple(parse_row(key, text) for key, text in table.items() if key not in self.same)
        keys = [row.key for row in self.rows if not row.along]
        for key, other in self.same.items():
            if other not in keys:
                hint = errors.suggestion(other, keys)
                raise ValueError(f"{WHAT}: {key!r} is the same as {other!r}, which is not the key of one entry.{hint}")

    def pack(self, tree: Any) -> dict[str, NamedArray]:
        """Return the entries of the layout by key, with the axes of the table. Axes that are merged have one name.

        >>> layout = axn.state.WeightLayout({"{layers}.w": "weight -> (out in)"})
        >>> layout.pack({"weight": axn.ones({"layers": 2, "in": 3, "out": 2})})["1.w"]
        NamedArray(float32[(out in)=6], [1. 1. 1. 1. 1. 1.])
        """
        tensors = _tensors_by_path(_as_exported(tree))
        entries: dict[str, NamedArray] = {}
        for fitted in self._fitted(tensors):
            x, dtype = self._joined(fitted, tensors), fitted.row.dtype
            entries |= _laid_out(fitted, x if dtype is None else x.astype(dtype))
        return entries | {key: entries[other] for key, other in self.same.items()}

    def unpack(self, entries: Mapping[str, Any], like: T) -> T:
        """Return a tree with the values of entries: undo `pack`.

        Arguments:
            entries: arrays by key, with the names that `pack` gives them or without names.
            like: a tree with the axes and dtypes of the result, which can be abstract. Its values are not used.

        >>> layout = axn.state.WeightLayout({"w": "weight -> (out in)"})
        >>> layout.unpack({"w": jnp.ones(6)}, {"weight": axn.zeros({"in": 2, "out": 3})})["weight"].shape
        {'in': 2, 'out': 3}
        """
        _raise_problems(_describe_misfits(self.expected(like), entries, self.same))
        _raise_problems(
            [
                f"{key!r} differs from {other!r}, but in the layout they are the same."
                for key, other in self.same.items()
                if key in entries and not _are_equal(raw(entries[key]), raw(entries[other]))
            ]
        )
        template = _template_like(like)
        tensors = _tensors_by_path(template)
        found: dict[str, NamedArray] = {}
        for fitted in self._fitted(tensors):
            found |= self._parted(fitted, _gathered_entries(fitted, entries), tensors)
        leaves, structure = named_trees.flatten_with_path(template)
        return _as_exported(jax.tree.unflatten(structure, [found.get(_path_of(p), x) for p, x in leaves]), undo=True)

    def expected(self, like: Any) -> dict[str, NamedArray]:
        """Return the entries of the layout as abstract arrays, for a tree that can be abstract.

        >>> layout = axn.state.WeightLayout({"{layers}.w": "weight -> out in"})
        >>> layout.expected({"weight": axn.ones({"layers": 1, "in": 3, "out": 2})})
        {'0.w': NamedArray(float32[out=2, in=3], ShapeDtypeStruct)}
        """
        tensors = _tensors_by_path(_template_like(like))
        entries = {}
        for fitted in self._fitted(tensors):
            dtype = fitted.row.dtype or tensors[fitted.row.operands[0].path].dtype
            x = wrap(jax.ShapeDtypeStruct(fitted.shape, dtype), fitted.row.names)
            entries |= dict.fromkeys(fitted.keys, x)
        return entries | {key: entries[other] for key, other in self.same.items()}

    def check(self, like: Any, entries: Mapping[str, Any] | None = None) -> None:
        """Check the table against a tree and the arrays of the other program, without moving any.

        Shapes do not show whether two axes of one size are swapped. So it is an error if two axes of an entry have one
        size: make the trees from a configuration in which all sizes differ.

        Arguments:
            like: a tree, which can be abstract.
            entries: the other program's arrays by key, which can be abstract. If they have names, these must be those
                of the table.

        >>> layout = axn.state.WeightLayout({"w": "weight -> in out"})
        >>> layout.check({"weight": axn.ones({"out": 2, "in": 3})}, {"w": np.ones((3, 2))})
        """
        misfits = [] if entries is None else _describe_misfits(self.expected(like), entries, self.same)
        _raise_problems(
            [*itertools.chain(*map(_axes_alike, self._fitted(_tensors_by_path(_template_like(like))))), *misfits]
        )

    def probe(
        self,
        like: Any,
        forward: Callable[[Any], Any],
        other_forward: Callable[[dict[str, Any]], Any],
        *,
        key: jax.Array,
        rtol: float = 1e-4,
    ) -> float:
        """Compare the results of both programs with the same random weights, and return how far they differ.

        This finds what names and shapes cannot, such as a gate and the layer beside it that are swapped.

        Arguments:
            like: a tree, which can be abstract.
            forward: the model: from a tree with random weights to an array.
            other_forward: the other program: from arrays by key, without names, to the same array.
            key: a random key.
            rtol: the largest difference that is allowed, relative to the largest element.

        >>> layout = axn.state.WeightLayout({"w": "weight -> out in"})
        >>> like, x = {"weight": axn.ones({"in": 3, "out": 2})}, axn.ones({"in": 3})
        >>> def model(tree):
        ...     return axn.dot(tree["weight"], x, axis="in")
        >>> layout.probe(like, model, lambda entries: entries["w"] @ x.array, key=jax.random.key(0)) < 1e-6
        True
        """
        leaves, structure = jax.tree.flatten(like)
        drawn = jax.tree.unflatten(structure, map(_drawn_array, jax.random.split(key, len(leaves)), leaves))
        entries = {k: raw(x) for k, x in self.pack(drawn).items()}
        ours, others = (np.asarray(raw(y), np.float64) for y in (forward(drawn), other_forward(entries)))
        if not np.any(ours):
            raise ValueError(f"{WHAT}.probe: all results are zero, so they show nothing.")
        if ours.shape != others.shape:
            raise ValueError(f"{WHAT}.probe: the results have shapes {ours.shape} and {others.shape}.")
        difference = float(np.max(np.abs(ours - others), initial=0) / np.max(np.abs(ours), initial=1e-30))
        if not difference <= rtol:
            raise ValueError(
                f"{WHAT}.probe: with the same random weights, results differ by {difference:.2g} of the largest "
                f"element; {rtol:g} is allowed. Look for entries of one shape that are swapped, and at the order in "
                "which axes are merged and arrays are joined."
            )
        return difference

    # --- the table and a tree ---

    def _fitted(self, tensors: Mapping[str, Any]) -> list[_FittedRow]:
        """Return the rows that a tree has arrays for, or raise one error with everything that does not fit."""
        problems, fitted = [], []
        users: dict[str, list[str]] = {path: [] for path in tensors}
        for row in self.rows:
            if tensors.keys().isdisjoint(row.paths):
                continue
            for path in row.paths:
                if path in users:
                    users[path].append(row.key)
            unusable = [
                f"{row.key!r}: the tree has no {path}.{errors.suggestion(path, tensors)}"
                if path not in tensors
                else f"{row.key!r}: {path} is {describe_array(tensors[path])}, an array without names."
                for path in row.paths
                if not isinstance(tensors.get(path), NamedArray)
            ]
            problems += unusable
            if not unusable:
                fitted.append(self._fit(row, tensors))
                problems += self._wrong(fitted[-1], tensors)
        unknown = {path for row in self.rows for path in row.paths} - tensors.keys()
        for path, keys in users.items():
            if not keys:
                described = describe_array(tensors[path])
                problems.append(f"{path} is {described}, but no row has it.{errors.suggestion(path, unknown)}")
            elif len(keys) > 1:
                listed = " and ".join(map(repr, keys))
                problems.append(f"{path} is in {listed}. A row such as '= {keys[0]}' repeats another's entry.")
        if not problems:
            known = Counter([key for row in fitted for key in row.keys] + list(self.same))
            problems += [f"{key!r} is the key of {count} entries." for key, count in known.items() if count > 1]
            problems += [f"{k!r}: the tree has no {other!r}." for k, other in self.same.items() if other not in known]
        _raise_problems(problems)
        return fitted

    def _wrong(self, fitted: _FittedRow, tensors: Mapping[str, Any]) -> Iterator[str]:
        """Yield why a row does not fit the arrays of a tree."""
        row, seen = fitted.row, dict[str, tuple[int, str]]()
        for operand, sizes, padded in zip(row.operands, fitted.sizes, fitted.padded, strict=True):
            path, x, first = operand.path, tensors[operand.path], tensors[row.operands[0].path]
            if x.dtype != first.dtype:
                yield f"{row.key!r}: {row.operands[0].path} is {first.dtype}, but {path} is {x.dtype}."
            yield from self._misplaced(row, operand, x, sizes)
            for name, size in padded.items():
                other, owner = seen.setdefault(name, (size, path))
                if size != other and name in row.order:
                    yield f"{row.key!r}: axis {name!r} has size {other} in {owner}, but {size} in {path}."

    def _misplaced(self, row: TableRow, operand: RowArray, x: NamedArray, sizes: dict[str, int]) -> Iterator[str]:
        """Yield which axes of an array have no place in a row, or another size, and which it lacks."""
        path, places = operand.path, row.places(operand)
        for axis, factors in self._splits(row, x.names):
            size, product = x.axis_size(axis), math.prod(f.size or 1 for f in factors)
            if size % product or (all(f.size for f in factors) and size != product):
                described = errors.describe_axes([f.name for f in factors], [f.size or "?" for f in factors])
                yield f"{row.key!r}: axis {axis!r} of {path}, of size {size}, is not {described}."
        for name in [name for name in places if name not in sizes]:
            yield f"{row.key!r}: {path} is {describe_array(x)}, without {name!r}.{errors.suggestion(name, sizes)}"
        for name, size in sizes.items():
            if name not in places:
                yield f"{row.key!r}: axis {name!r} of {path}, of size {size}, has no place."
            if (wanted := places.get(name) or size) < size:
                yield f"{row.key!r}: axis {name!r} of {path} has size {size}, more than the {wanted} in the table."

    def _sizes(self, row: TableRow, x: NamedArray) -> dict[str, int]:
        """Return the sizes of the axes of an array, some of them split."""
        sizes = dict(x.shape)
        for axis, factors in self._splits(row, sizes):
            size, product = sizes.pop(axis), math.prod(f.size or 1 for f in factors)
            sizes |= {f.name: f.size or size // product for f in factors}
        return sizes

    def _splits(self, row: TableRow, names: Iterable[str]) -> list[tuple[str, tuple[parsing.Name, ...]]]:
        """Return the axes that a row splits, with their factors."""
        found = ((axis, factors) for axis, factors in self.split.items() if axis in names)
        written = {*row.order, *(v.name for operand in row.operands for v in operand.own)}
        return [(axis, factors) for axis, factors in found if any(f.name in written for f in factors)]

    def _fit(self, row: TableRow, tensors: Mapping[str, Any]) -> _FittedRow:
        sizes = [self._sizes(row, tensors[operand.path]) for operand in row.operands]
        each = [(operand, row.places(operand), own) for operand, own in zip(row.operands, sizes, strict=True)]
        padded = [{name: places.get(name) or size for name, size in own.items()} for _, places, own in each]
        joined = [
            math.prod(own.get(v.name, 1) for v in operand.own)
            for operand, own in zip(row.operands, padded, strict=True)
        ]
        return _FittedRow(row, tuple(sizes), tuple(padded), tuple(joined))

    # --- several arrays as one ---

    def _joined(self, fitted: _FittedRow, tensors: Mapping[str, Any]) -> NamedArray:
        """Return the arrays of a row as one that has all axes of its entries, none of them merged."""
        row, parts = fitted.row, []
        for operand, sizes, padded in zip(row.operands, fitted.sizes, fitted.padded, strict=True):
            x = tensors[operand.path]
            for axis, factors in self._splits(row, x.names):
                x = unflatten_axis(x, axis, tuple(Axis(f.name, sizes[f.name]) for f in factors))
            wider: dict[Any, int] = {name: padded[name] - size for name, size in sizes.items() if padded[name] > size}
            x = pad(x, {name: (0, more) for name, more in wider.items()}) if wider else x
            parts.append(flatten_axes(x, tuple(v.name for v in operand.own), JOINED) if len(row.operands) > 1 else x)
        return concatenate(parts, JOINED) if len(parts) > 1 else parts[0]

    def _parted(self, fitted: _FittedRow, x: NamedArray, tensors: Mapping[str, Any]) -> dict[str, NamedArray]:
        """Undo `_joined`."""
        row, found, several = fitted.row, {}, len(fitted.joined) > 1
        parts = split(x, JOINED, [Axis(JOINED, size) for size in fitted.joined]) if several else [x]
        for operand, part, sizes, padded in zip(row.operands, parts, fitted.sizes, fitted.padded, strict=True):
            like = tensors[operand.path]
            if several:
                own = tuple(Axis(v.name, padded[v.name]) for v in operand.own)
                part = unflatten_axis(part, JOINED, own) if own else unbind(part, JOINED)[0]
            for name, size in sizes.items():
                if padded[name] > size:
                    part = split(part, name, [Axis(name, size), Axis(name, padded[name] - size)])[0]
            for axis, factors in self._splits(row, like.names):
                part = flatten_axes(part, tuple(f.name for f in factors), axis)
            found[operand.path] = rearrange(part, like.names).astype(like.dtype)
        return found


def load_packed(layout: WeightLayout, like: T, entries: Mapping[str, Any], prefix: str | None) -> T:
    """Return a tree with lazy arrays, from the entries of an active load."""
    wanted, same = layout.expected(like), layout.same
    left_out = {key for key in same if with_prefix(prefix, key) not in entries}
    found = load_subtree({key: x for key, x in wanted.items() if key not in left_out}, entries, prefix)
    for key in same.keys() - left_out:
        if not all_equal([found[key], found[same[key]]]):
            active_context().misfits.append(f"{key!r} differs from {same[key]!r}, but in the layout they are the same.")
    return call_lazily(lambda entries: layout.unpack(entries, like), found)


# --- one array as entries ---


def _laid_out(fitted: _FittedRow, x: NamedArray) -> dict[str, NamedArray]:
    """Return the entries of a row, from one array with all of their axes."""
    x = rearrange(x, fitted.row.order)
    for group in fitted.row.groups:
        x = flatten_axes(x, tuple(member.name for member in group.members), merged_name(group))
    parts = [x]
    for name in fitted.row.along:
        parts = [each for part in parts for each in unbind(part, name)]
    return dict(zip(fitted.keys, parts, strict=True))


def _gathered_entries(fitted: _FittedRow, entries: Mapping[str, Any]) -> NamedArray:
    """Undo `_laid_out`."""
    row, sizes = fitted.row, fitted.whole
    parts = [wrap(raw(entries[key]), row.names) for key in fitted.keys]
    for name in reversed(row.along):
        parts = [stack(parts[i : i + sizes[name]], name) for i in range(0, len(parts), sizes[name])]
    (x,) = parts
    for group in row.groups:
        x = unflatten_axis(x, merged_name(group), tuple(Axis(m.name, sizes[m.name]) for m in group.members))
    return x


# --- mistakes ---


def _are_equal(x: Any, y: Any) -> bool:
    """Return whether two entries have the same values; while tracing, assume that they have."""
    if x is y or any(isinstance(v, (Tracer, jax.ShapeDtypeStruct)) for v in (x, y)):
        return True
    if all(getattr(v, "is_fully_addressable", True) for v in (x, y)):
        x, y = (copied_to_host(v) if isinstance(v, jax.Array) else v for v in (x, y))
    return bool(((x == y) | ((x != x) & (y != y))).all())


def _raise_problems(problems: Sequence[str]) -> None:
    if problems:
        count = "" if len(problems) == 1 else f", {len(problems)} problems"
        raise ValueError("\n  ".join([f"{WHAT}: the table does not fit{count}.", *problems]))


def _describe_misfits(expected: Mapping[str, NamedArray], entries: Mapping[str, Any], same: Iterable[str]) -> list[str]:
    """Say which entries have another shape or other axes than a layout gives them, are missing or are too many."""
    problems = [
        f"{key!r} is there, but no row has it.{errors.suggestion(key, expected)}"
        for key in entries
        if key not in expected
    ]
    for key, wanted in expected.items():
        if key not in entries:
            hint = errors.suggestion(key, entries)
            problems += [] if key in same else [f"{key!r} is missing, for {describe_array(wanted)}.{hint}"]
            continue
        has, shape = entries[key], tuple(raw(entries[key]).shape)
        if isinstance(has, NamedArray) and has.names != wanted.names:
            problems.append(f"{key!r} is {describe_array(has)}, but by the table {describe_array(wanted)}.")
        elif len(shape) != wanted.ndim:
            problems.append(f"{key!r} has shape {shape}, but by the table it is {describe_array(wanted)}.")
        else:
            sizes = zip(wanted.names, shape, raw(wanted).shape, strict=True)
            problems += [
                f"{key!r}: axis {name!r} has size {size}, but by the table {by_table}."
                for name, size, by_table in sizes
                if size != by_table
            ]
    return problems


def _axes_alike(fitted: _FittedRow) -> Iterator[str]:
    """Yield which axes of an entry could be swapped unseen."""
    row, sizes = fitted.row, fitted.whole
    members = ((e.name,) if isinstance(e, parsing.Name) else [m.name for m in e.members] for e in row.elements)
    # Which of the axes of an entry, or of the keys, each name belongs to. Within one of these, no swap shows in shapes.
    names = [(name, i, sizes[name]) for i, name in enumerate(row.along, -len(row.along))]
    names += [(name, i, sizes[name]) for i, of_axis in enumerate(members) for name in of_axis if name != JOINED]
    names += [
        (name, i, size) for i, (name, size) in enumerate(zip(row.names, fitted.shape, strict=True)) if name not in sizes
    ]
    for (a, i, size), (b, j, other) in itertools.combinations(names, 2):
        if i != j and size == other:
            yield (
                f"{row.key!r}: axes {a!r} and {b!r} both have size {size}, so shapes do not show whether they are "
                "swapped. Check with a configuration in which all sizes differ."
            )


# --- trees ---


def _path_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _tensors_by_path(tree: Any) -> dict[str, Any]:
    """Return the arrays of a tree by path, such as `blocks.stacked.mlp.up.weight`."""
    return {_path_of(path): x for path, x in named_trees.leaves_with_path(tree) if is_jax_array_like(x)}


def abstract_tree(tree: T) -> T:
    """Replace the arrays of a tree with abstract ones."""
    return jax.tree.map(lambda x: abstract(as_lazy(x)) if is_jax_array_like(x) else x, tree)


def _template_like(like: T) -> T:
    return with_abstract_arrays(call_lazily(_as_exported, abstract_tree(like)))


def _as_exported(node: Any, undo: bool = False) -> Any:
    """Return a tree with the factors that its layers declare, and without the added layers of stacks; or undo that."""
    if isinstance(node, NamedArray) or jax.tree_util.all_leaves([node]):
        return node
    if isinstance(node, ModuleWithStateDictSerialization):
        if type(node).flatten_for_export is not ModuleWithStateDictSerialization.flatten_for_export:
            what = f"{type(node).__name__} has its own `flatten_for_export`, which a table does not call"
            raise TypeError(f"{WHAT}: {what}. Convert the tree without a layout.")
        node = node._scaled({field: 1 / by if undo else by for field, by in node._state_dict_scales().items()})
    if isinstance(node, LayerStack) and (added := node.added_layers()):
        Layers, count = added

        def resized(x: Any) -> Any:
            if not isinstance(x, NamedArray) or Layers.name not in x.names or not is_jax_array_like(x):
                return x
            return pad(x, {Layers.name: (0, count)}) if undo else index(x, {Layers.name: slice(Layers.size)})

        node = named_trees.map(resized, node)
    found, structure = jax.tree.flatten(node, is_leaf=lambda x: x is not node)
    return jax.tree.unflatten(structure, [_as_exported(child, undo) for child in found])


def _drawn_array(key: jax.Array, x: Any) -> Any:
    """Draw random numbers in place of an array: such that sums over a layer's inputs are neither large nor small."""
    if not is_jax_array_like(x) or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return (jax.random.normal(key, x.shape) * max(x.size, 1) ** -0.25).astype(x.dtype)
