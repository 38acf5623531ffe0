"""Flatten a tree into arrays and a `TreeSpec`, which describes everything else, and unflatten it.

JAX traces arrays only; everything else is static, part of the program. A `TreeSpec` holds this static part: the
structure, the names of the axes, and the leaves that are not arrays. It is hashable, so programs are cached by it.

Static values are also compared by type and sign: 1, 1.0 and True make three programs, and 0.0 and -0.0 two, although
they are equal in Python. This holds inside tuples and dataclasses, and for static fields of modules, which are part of
the structure.
"""

from __future__ import annotations

import dataclasses
import operator
import types
import weakref
from collections.abc import Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..axis import Names
from ..named_array import NamedArray, is_named_array, wrap
from . import errors

ARRAYS: tuple[type, ...] = (jax.Array, np.ndarray)
"""The types of raw arrays, which have axes."""
NUMBERS: tuple[type, ...] = (bool, int, float, complex, np.generic)
"""The types of numbers, which can count as arrays."""
ARRAYS_AND_NUMBERS = ARRAYS + NUMBERS
PROGRAM_ARRAYS: tuple[type, ...] = (*ARRAYS, np.generic, jax.ShapeDtypeStruct)
"""The types of leaves that are arrays of a compiled program, abstract ones too; other leaves are static."""


def is_key(array: Any) -> bool:
    """Return whether an array holds random keys."""
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


class StaticLeaf:
    """A leaf that is not an array, compared by value, type and sign."""

    __slots__ = ("_hash", "_key", "value")

    def __init__(self, value: Any):
        self.value = value
        self._key: Any = None
        self._hash: int | None = None

    def checked(self, what: str) -> StaticLeaf:
        """Return the same leaf, which must be hashable; the message starts with `what`."""
        if not is_hashable(self):
            raise TypeError(
                f"{what} is static, so it must be hashable, but this {type(self.value).__name__} is not. Pass changing "
                "numbers as arrays, and a list as a tuple."
            )
        return self

    def _typed(self) -> Any:
        if self._key is None:
            self._key = _typed_value(self.value)
        return self._key

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self._typed())
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StaticLeaf) or isinstance(other, WeakLeaf):
            return False
        return self.value is other.value or bool(self._typed() == other._typed())

    def __repr__(self) -> str:
        return f"StaticLeaf({self.value!r})"


class WeakLeaf(StaticLeaf):
    """A leaf, such as a function, that is compared by identity and not kept alive.

    So it can be part of a cache key whose value does not outlive the leaf.
    """

    __slots__ = ("_reference",)

    def __init__(self, value: Any):
        self._reference = weakref.ref(value)
        self._hash = hash(self._reference)

    @property
    def value(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the leaf, which the caller must keep alive while using it."""
        value = self._reference()
        assert value is not None, "the caller holds its arguments while they are used"
        return value

    def __hash__(self) -> int:
        return self._hash  # pyright: ignore[reportReturnType]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeakLeaf) and self._reference == other._reference


def is_known_by_identity(value: Any) -> bool:
    """Return whether a value is equal only to itself, so that it does not have to be kept alive."""
    return type(value).__eq__ is object.__eq__ and type(value).__weakrefoffset__ != 0


Slot: TypeAlias = Names | StaticLeaf | None
"""A leaf in a spec: the names of a named array, None for a raw array, or the leaf itself if it is static."""


class TreeSpec:
    """A tree without its arrays."""

    __slots__ = ("_compared", "_hash", "_static_fields", "slots", "structure")

    def __init__(self, structure: Any, slots: Iterable[Slot]):
        self.structure = structure
        self.slots = tuple(slots)
        self._static_fields: tuple[Any, ...] | None = None
        self._compared: tuple[list[int], list[Any]] | None = None
        self._hash: int | None = None

    @property
    def static_fields(self) -> tuple[Any, ...]:
        """Return the static values in the structure that Python may consider equal to others; most trees have none."""
        if self._static_fields is None:
            self._static_fields = _static_fields(self.structure)
        return self._static_fields

    @property
    def compared(self) -> tuple[list[int], list[Any]]:
        """Return which nodes have such values, and their data, with `_CHANGES` in place of data that may change."""
        if self._compared is None:
            nodes = _data_of_nodes(self.structure)
            numbers = [i for i, data in enumerate(nodes) if not all(map(_is_plain, _fields_of_nodes([data])))]
            fields = _fields_of_nodes([nodes[i] for i in numbers])
            self._compared = numbers, [_CHANGES if _is_mutable(data) else data for data in fields]
        return self._compared

    @property
    def names(self) -> list[Names | None]:
        """Return the names of each array; None for a raw one."""
        return [slot for slot in self.slots if not isinstance(slot, StaticLeaf)]

    @property
    def static_leaves(self) -> list[StaticLeaf]:
        """Return the leaves that are not arrays."""
        return [slot for slot in self.slots if isinstance(slot, StaticLeaf)]

    def with_names(self, names: Iterable[Names | None]) -> TreeSpec:
        """Return the same spec with other axes."""
        new = iter(names)
        return TreeSpec(self.structure, [s if isinstance(s, StaticLeaf) else next(new) for s in self.slots])

    def weak(self, *lenders: TreeSpec) -> TreeSpec:
        """Return the same spec, with weak references to leaves that are compared by identity.

        If `lenders` are given, only leaves that are weak in these specs become weak.
        """
        if all(not isinstance(s, StaticLeaf) or isinstance(s, WeakLeaf) for s in self.slots):
            return self
        known = {id(leaf.value) for spec in lenders for leaf in spec.static_leaves if isinstance(leaf, WeakLeaf)}
        return TreeSpec(
            self.structure,
            [
                WeakLeaf(s.value)
                if isinstance(s, StaticLeaf)
                and not isinstance(s, WeakLeaf)
                and (id(s.value) in known if lenders else is_known_by_identity(s.value))
                else s
                for s in self.slots
            ],
        )

    def unflatten(self, arrays: Iterable[Any] = ()) -> Any:
        """Return the tree with these arrays."""
        left = iter(arrays)
        leaves = [
            s.value if isinstance(s, StaticLeaf) else next(left) if s is None else wrap(next(left), s)
            for s in self.slots
        ]
        return jax.tree.unflatten(self.structure, leaves)

    def paths(self) -> list[str]:
        """Return the path of each leaf, as in `['h'].weight`. Slow: for messages."""
        numbered = jax.tree.unflatten(self.structure, range(len(self.slots)))
        return [jax.tree_util.keystr(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(numbered)[0]]

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.structure, self.slots, self.static_fields))
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, TreeSpec)
            and self.slots == other.slots
            and self.structure == other.structure
            and self.static_fields == other.static_fields
        )

    def __repr__(self) -> str:
        return f"TreeSpec({self.structure}, {self.slots})"


class FlatTree:
    """Arrays and their spec as one tree: the return value of a compiled function."""

    __slots__ = ("arrays", "spec")

    def __init__(self, arrays: list[Any], spec: TreeSpec):
        self.arrays = arrays
        self.spec = spec

    def tree(self) -> Any:
        """Return the tree."""
        return self.spec.unflatten(self.arrays)


jax.tree_util.register_dataclass(FlatTree, data_fields=["arrays"], meta_fields=["spec"])


def flatten_arrays(tree: Any, arrays: tuple[type, ...] = ARRAYS, *, named: bool = True) -> tuple[list[Any], TreeSpec]:
    """Return the raw arrays of a tree, and its spec.

    Arguments:
        arrays: the types that count as raw arrays, alone or in a named array. All other leaves are static.
        named: store the names of named arrays in slots of the spec, rather than in its structure.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_named_array if named else None)
    found: list[Any] = []
    slots: list[Slot] = []
    for leaf in leaves:
        if isinstance(leaf, arrays):
            found.append(leaf)
            slots.append(None)
        elif isinstance(leaf, NamedArray) and isinstance(leaf.array, arrays):
            if getattr(leaf.array, "ndim", 0) != len(leaf.names):
                raise ValueError(errors.wrong_rank(leaf.names, np.shape(leaf.array)))
            found.append(leaf.array)
            slots.append(leaf.names)
        else:
            slots.append(StaticLeaf(leaf))
    return found, TreeSpec(structure, slots)


def same_static_fields(structure: Any, spec: TreeSpec) -> bool:
    """Return whether a structure that JAX considers equal to a spec's is also equal by type and sign."""
    if not spec.static_fields:
        return True
    # This runs in every call of a compiled function: data without such values are not looked at, and identical objects
    # need no conversion.
    numbers, known = spec.compared
    nodes = _data_of_nodes(structure)
    data = _fields_of_nodes([nodes[i] for i in numbers])
    if all(map(operator.is_, data, known)):
        return True
    others = [(a, b) for a, b in zip(data, known, strict=True) if a is not b]
    if any(b is _CHANGES for _, b in others):
        return _static_fields(structure) == spec.static_fields
    return all(_typed_value(a) == _typed_value(b) for a, b in others)


def check_rank(x: NamedArray) -> None:
    """Raise an error unless an array has as many axes as names; if not, a positional transform was applied."""
    if isinstance(x.array, ARRAYS) and x.array.ndim != len(x.names):
        raise ValueError(errors.wrong_rank(x.names, x.array.shape))


# --- values by type and sign ---

_PLAIN = {type(None), str, types.FunctionType, types.BuiltinFunctionType}
"""The types of values that are identical if they are equal."""


def _static_fields(structure: Any) -> tuple[Any, ...]:
    """Return the data of nodes that Python may consider equal to different data."""
    return tuple(
        [
            _typed_value(data, mutable=True)
            for data in _fields_of_nodes(_data_of_nodes(structure))
            if not _is_plain(data)
        ]
    )


def _data_of_nodes(structure: Any) -> list[Any]:
    """Return the static data of each node of a structure, without its children."""
    found: list[Any] = []
    add = found.append
    structure.walk(lambda _, data: add(data), id, range(structure.num_leaves))
    return found


def _fields_of_nodes(nodes: Iterable[Any]) -> list[Any]:
    """Return the elements of the data of nodes: the fields of modules, the keys of dictionaries."""
    found: list[Any] = []
    for data in nodes:
        if type(data) is tuple or type(data) is list:
            found.extend(data)
        else:
            found.append(data)
    return found


def _is_plain(value: Any) -> bool:
    kind = type(value)
    return all(map(_is_plain, value)) if kind is tuple else kind in _PLAIN or kind.__eq__ is object.__eq__


def _is_mutable(value: Any) -> bool:
    return any(map(_is_mutable, value)) if type(value) is tuple else isinstance(value, (list, dict, set))


_CHANGES = object()


def is_hashable(value: Any) -> bool:
    """Return whether a value has a hash; for a tuple this depends on its elements."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _typed_value(value: Any, *, mutable: bool = False) -> Any:
    """Convert a value so that it equals only values of the same type and sign; it keeps its hash if it has one.

    If `mutable`, lists and dictionaries are compared by their current elements.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, (float, complex, np.inexact)):
        return kind, repr(value)  # distinguishes 0.0 from -0.0, and makes NaN equal to itself
    if isinstance(value, tuple) or (mutable and kind is list):
        return kind, tuple([_typed_value(v, mutable=mutable) for v in value])
    if kind is slice:  # hashable from Python 3.12 on
        return kind, tuple([_typed_value(v, mutable=mutable) for v in (value.start, value.stop, value.step)])
    if mutable and kind is dict:
        return kind, tuple([(_typed_value(k), _typed_value(v, mutable=True)) for k, v in value.items()])
    if isinstance(value, frozenset):
        return kind, frozenset(map(_typed_value, value))
    if isinstance(value, NamedArray):  # a placeholder, such as None, for an array
        return kind, value.names, _typed_value(value.array)
    if dataclasses.is_dataclass(value) and kind.__eq__ is not object.__eq__:
        fields = [_typed_value(getattr(value, f.name), mutable=mutable) for f in dataclasses.fields(value) if f.compare]
        return kind, value, tuple([field for field in fields if is_hashable(field)])
    return kind, value
