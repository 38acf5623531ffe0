"""`verify`: whether the compiler kept a step the same when it partitioned it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from .._mesh_axes import AnyMesh
from .._tree_spec import PROGRAM_ARRAYS
from ..sharding.meshes import current_mesh
from . import _compiling, _scopes
from ._arguments import step_name
from ._hlo import COLLECTIVES, HloProgram, HloShape, Instruction, UnknownForm, along, groups
from ._hlo_shardings import Tiling, parts, tiling
from ._hlo_values import IllFormed, Machine, value_dtype
from ._topologies import moved_to
from .collectives import Source, source
from .explaining import active, distributed, mesh_of

SCALES = 1.0, 1 / 16, 16.0
"""What the arguments are multiplied by: branches that one scale never takes, another does."""

CLOSE = 1e-7
"""How far values may be off, of the largest in their array. Orders of summation differ by much less in float64, but the
first step of Adam divides what should be 0 by nearly 0."""

NOTHING = 1e-12
"""How far values may be off that should be 0."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a partitioned program begins to be another one.

    >>> axn.insight.Difference("dot[batch, embed; embed, mlp -> batch, mlp]", None, "is 2 times the reference")
    Difference(operation='dot[batch, embed; embed, mlp -> batch, mlp]', source=None, what='is 2 times the reference')
    """

    operation: str
    """The named operation, or what JAX calls it."""
    source: Source | None
    """The user's line."""
    what: str
    """How its value differs."""

    def __str__(self) -> str:
        at = f" at {self.source}" if self.source else ""
        return f"{self.operation}{at} {self.what}"


@dataclasses.dataclass(frozen=True)
class Verification:
    """Whether a partitioned program computes the same as the program that was partitioned.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> print(axn.insight.verify(lambda x: x * 2, jnp.ones(4), mesh=mesh))
    <lambda>: the same at these sizes, inputs and mesh (1 device: nothing is partitioned)
    """

    step: str
    devices: int
    """The number of devices of the mesh, which may be simulated."""
    same: bool | None
    """Whether all results are the same; None if that is not known."""
    scales: tuple[float, ...] = ()
    """The scales of the arguments at which the results were compared, up to the first that differ."""
    different: tuple[str, ...] = ()
    """The results that differ."""
    difference: Difference | None = None
    """The first instruction whose value is another one, though those of its operands are the same."""
    unknown: tuple[str, ...] = ()
    """Why it is not known: what the programs have that cannot be evaluated here."""

    def __str__(self) -> str:
        if self.same is None:
            return f"{self.step}: not known, because of {'; '.join(self.unknown)}"
        if self.same:
            how = "1 device: nothing is partitioned" if self.devices == 1 else f"{self.devices} devices"
            return f"{self.step}: the same at these sizes, inputs and mesh ({how})"
        listed = ", ".join(self.different[:5]) + (", ..." if len(self.different) > 5 else "")
        where = f"\n  first: {self.difference}" if self.difference else ""
        return f"{self.step}: the compiler changed {len(self.different)} results: {listed}{where}"


def verify(
    step: Callable[..., Any], /, *args: Any, mapping: Any = None, mesh: AnyMesh | None = None, **kwargs: Any
) -> Verification:
    """Check whether the compiler keeps a step the same when it partitions it over the devices of a mesh.

    The step is compiled until it is partitioned, and not run. The program before and the program after partitioning are
    evaluated in NumPy, with numbers of 64 bits and all devices simulated, and their results compared. So use small
    sizes. The answer holds for these sizes, inputs and mesh.

    Arguments:
        step: a function, or one compiled by `named_jit`, `fsdp` or `jax.jit`.
        *args: its arguments, as for `explain`, which may be abstract, and placed. Numbers are drawn for those without
            values; of the others, magnitudes are varied, and signs, integers and keys are kept.
        mapping: how to distribute a plain function, as for `explain`.
        mesh: the mesh; by default the active one. It may have more devices than there are.

    >>> x = jax.ShapeDtypeStruct((8, 4), "float32", sharding=jax.NamedSharding(jax.make_mesh((1,), ("data",)), jax.P()))
    >>> axn.insight.verify(lambda x: jnp.cumsum(x), x).same
    True
    """
    name, arguments = step_name(step), jax.tree.leaves((args, kwargs))
    meshes = [x.sharding.mesh for x in arguments if isinstance(getattr(x, "sharding", None), NamedSharding)]
    abstract = next((m for m in (mesh, current_mesh(), *meshes) if m is not None), None)
    if isinstance(abstract, AbstractMesh):
        mesh = abstract
    with active(mesh, repeated=True):
        if any(isinstance(m, AbstractMesh) for m in meshes):
            args, kwargs = moved_to(current_mesh(), (args, kwargs))
        lowered = distributed(step, mapping).lower(*args, **kwargs)
        devices = _compiling.device_count(lowered)
        if devices == 1:
            return Verification(name, 1, True)
        try:
            before, after = (HloProgram(text, devices) for text in _compiling.around_partitioning(lowered))
            paths = jax.tree_util.tree_leaves_with_path(lowered.out_info)
            names = ["result" + jax.tree_util.keystr(path) for path, _ in paths]
            sizes = mesh_of(args, kwargs, devices) or {}
            return compare_programs(name, before, after, arguments, names, sizes)
        except UnknownForm as e:
            return Verification(name, devices, None, unknown=(str(e),))


def compare_programs(
    step: str,
    before: HloProgram,
    after: HloProgram,
    arguments: Sequence[Any] = (),
    names: Sequence[str] = (),
    mesh: Mapping[str, int] | None = None,
) -> Verification:
    """Evaluate a program before and after it is partitioned, and compare the results."""
    devices, reference, partitioned = before.devices, Machine(before), Machine(after)
    if unknown := dict.fromkeys((*reference.unknown, *partitioned.unknown)):
        return Verification(step, devices, None, unknown=tuple(unknown))
    inputs, results = _parameters(before), _results(before)
    if len(names) != len(results):
        names = [f"result[{i}]" for i in range(len(results))]
    scales = []
    for number, scale in enumerate(SCALES):
        for positive, below in itertools.product((False, True), (32 >> 2 * number, 4, 2)):
            draw = _Draw(arguments, scale, positive, below)
            given = [draw(p.shape) for p in inputs]
            expected = _listed(reference.run(given))
            bad = [n for n, x in zip(names, expected, strict=True) if np.isnan(x).any()]
            if not bad:
                break
        else:
            if scale == 1:
                reason = f"NaN in {', '.join(bad)} at the inputs that were tried, signed and positive"
                return Verification(step, devices, None, unknown=(reason,))
            continue
        scales.append(scale)
        shards = [p.on_devices(x) for p, x in zip(inputs, given, strict=True)]
        try:
            found = _listed(partitioned.run(shards))
        except IllFormed as e:
            where = Difference(*_said(e.instruction, after), f"is ill-formed: in the partitioned program, {e}")
            return Verification(step, devices, False, tuple(scales), tuple(names), where)
        triples = zip(names, results, expected, found, strict=True)
        different = tuple(n for n, place, x, y in triples if not place.agree(x, y))
        if different:
            where = _first(before, after, given, shards, [names.index(n) for n in different], mesh or {})
            return Verification(step, devices, False, tuple(scales), different, where)
    return Verification(step, devices, True, tuple(scales))


# --- arrays and their shards ---


@dataclasses.dataclass(frozen=True)
class _Placed:
    """An array of the program before it is partitioned, and its tiles."""

    shape: HloShape
    tiling: Tiling

    def shard(self) -> tuple[int, ...]:
        return tuple(-(-n // count) for n, count in zip(self.shape.sizes, self.tiling.counts, strict=True))

    def on_devices(self, x: np.ndarray) -> np.ndarray:
        """Return what each device has. Where a shard reaches beyond the array, it is filled with zeros."""
        found = np.zeros((len(self.tiling.index), *self.shard()), x.dtype)
        for p in range(len(found)):
            piece = x[p % len(x)][self._piece(p)]
            found[(p, *(slice(n) for n in piece.shape))] = piece
        return found

    def agree(self, x: np.ndarray, y: np.ndarray) -> bool:
        """Return whether each device has its shard of an array."""
        if y.shape[1:] != self.shard():
            raise UnknownForm(f"a result of the sizes {y.shape[1:]}, which should be {self.shard()}")
        far = _far(x)
        for p in range(len(self.tiling.index)):
            piece = x[p % len(x)][self._piece(p)]
            if not _close(piece, y[p % len(y)][tuple(slice(n) for n in piece.shape)], far):
                return False
        return True

    def _piece(self, device: int) -> Any:
        return self.tiling.piece(device, self.shape.sizes, self.shard())


def _far(x: np.ndarray) -> float:
    """Return how far a value may be from one in an array."""
    if x.dtype.kind not in "fc" or not x.size:
        return 0.0
    return NOTHING + CLOSE * float(np.abs(x[np.isfinite(x)]).max(initial=0))


def _close(x: np.ndarray, y: np.ndarray, far: float) -> bool:
    if x.dtype.kind not in "fc":
        return bool((x == y).all())
    with np.errstate(invalid="ignore"):
        return bool(((x == y) | (np.abs(x - y) <= far)).all())


def _parameters(program: HloProgram) -> list[_Placed]:
    found = [i for i in program.computations[program.entry].values() if i.opcode == "parameter"]
    return [place for i in sorted(found, key=lambda i: int(i.value)) for place in _placed(i, program.devices)]


def _results(program: HloProgram) -> list[_Placed]:
    return _placed(program.root(program.entry), program.devices)


def _placed(i: Instruction, devices: int) -> list[_Placed]:
    texts = parts(i.attribute("sharding") or "{replicated}")
    texts = texts if len(texts) == len(i.shapes) else texts[:1] * len(i.shapes)
    return [_Placed(s, tiling(t, len(s.sizes), devices)) for s, t in zip(i.shapes, texts, strict=True)]


def _listed(value: Any) -> list[np.ndarray]:
    return [x for part in value for x in _listed(part)] if isinstance(value, tuple) else [value]


# --- inputs ---


class _Draw:
    """Draws values for parameters, which come in the order of the arguments; an argument that is not used has none."""

    def __init__(self, arguments: Sequence[Any], scale: float, positive: bool, below: int):
        self.scale, self.positive, self.below = scale, positive, below
        self._rng = np.random.default_rng(0)
        self._arguments = iter([x for x in map(_host, arguments) if x is not None])

    def __call__(self, shape: HloShape) -> np.ndarray:
        dtype, sizes, rng = value_dtype(shape.dtype), shape.sizes, self._rng
        value = next((x for x, kind, of in self._arguments if (kind, of) == (dtype.kind, sizes)), None)
        if dtype.kind in "fc":
            size = np.abs(rng.normal(size=sizes)) + 0.1
            if value is None:
                found = size * (1 if self.positive else rng.choice([-1, 1], sizes))
            else:
                found = np.where(value == 0, size / 8, value * (1 + size / 8))
            found = found * self.scale
        elif value is not None:
            found = value
        elif dtype.kind == "b":
            found = rng.random(sizes) < 0.5
        else:
            found = rng.integers(0, 2**32 if shape.dtype == "u32" else self.below, sizes)
        return np.asarray(found).astype(dtype)[None]


def _host(x: Any) -> tuple[np.ndarray | None, str, tuple[int, ...]] | None:
    """Return the value of an argument, if it has one, its kind, and its sizes; None for what is not an array."""
    if not isinstance(x, PROGRAM_ARRAYS):
        return None
    if isinstance(x, jax.ShapeDtypeStruct) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        data = jax.eval_shape(jax.random.key_data, x) if key else x
        kind = "f" if jax.numpy.issubdtype(data.dtype, np.floating) else np.dtype(data.dtype).kind
        return None, kind, tuple(data.shape)
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    value = np.asarray(jax.numpy.asarray(x))
    value = value.astype(np.float64) if jax.numpy.issubdtype(value.dtype, np.floating) else value
    return value, value.dtype.kind, value.shape


# --- where they begin to differ ---


class _Trace:
    """The arrays that a program computes, in order, and what each was computed from."""

    def __init__(self, program: HloProgram, args: Sequence[np.ndarray]):
        self.program, self.made = program, dict[int, _Made]()
        self._known: list[Any] = [*args]
        for x in args:
            self.made[id(x)] = _Made(x, None, 0, ())
        self.results = _listed(Machine(program, self._watch).run(args))

    def _watch(self, i: Instruction, operands: Sequence[Any], result: Any) -> None:
        inputs = _listed(tuple(operands))
        ids = {id(x) for x in inputs}
        for place, x in enumerate(_listed(result)):
            if id(x) not in ids and id(x) not in self.made:
                self.made[id(x)] = _Made(x, i, place, tuple(id(o) for o in inputs))


@dataclasses.dataclass(frozen=True)
class _Made:
    """An array, the instruction that computed it, which of its results it is, and the operands."""

    value: np.ndarray
    by: Instruction | None
    place: int
    operands: tuple[int, ...]


class _Prints:
    """Fingerprints of the arrays that a partitioned program computes, to find those that are equal."""

    def __init__(self, trace: _Trace, devices: int):
        self._devices = devices
        self._arrays: dict[Any, list[np.ndarray]] = {}
        for made in trace.made.values():
            self._arrays.setdefault(self._kind(made.value), []).append(made.value)
        self._found = {kind: np.array([*map(self._print, xs)]) for kind, xs in self._arrays.items()}

    def has(self, x: np.ndarray, placed: _Placed | None = None) -> bool:
        """Return whether an array was computed, or the shards of one."""
        if placed is not None and any(n % count for n, count in zip(x.shape[1:], placed.tiling.counts, strict=True)):
            shards = self._arrays.get((placed.shard(), x.dtype.kind in "fc"), ())
            return any(placed.agree(x, y) for y in shards)  # whatever lies beyond the array
        x = x if placed is None else placed.on_devices(x)
        known = self._found.get(self._kind(x))
        if known is None:
            return False
        value, size = self._print(x)
        return bool((np.abs(known[:, 0] - value) <= 1e-6 * size + NOTHING).any())

    def _kind(self, x: np.ndarray) -> Any:
        return x.shape[1:], x.dtype.kind in "fc"

    def _print(self, x: np.ndarray) -> tuple[complex, float]:
        shape = (self._devices, *x.shape[1:])
        weights = _weights(shape)
        x = np.nan_to_num(np.broadcast_to(x, shape).astype(complex if x.dtype.kind == "c" else float))
        x = np.clip(x, -1e30, 1e30) if x.dtype.kind == "f" else x
        return complex((x * weights).sum()), float(np.sqrt((np.abs(x) ** 2).sum()))


@functools.cache
def _weights(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape)


def _first(
    before: HloProgram,
    after: HloProgram,
    given: Sequence[np.ndarray],
    shards: Sequence[np.ndarray],
    results: Sequence[int],
    mesh: Mapping[str, int],
) -> Difference | None:
    """Find the first instruction whose value the partitioned program does not compute, though it has its operands."""
    trace, other = _Trace(before, given), _Trace(after, shards)
    prints, found = _Prints(other, before.devices), dict[int, bool]()

    def has(key: int) -> bool:
        if key not in found:
            made = trace.made[key]
            if made.by is None or made.by.opcode in ("constant", "iota"):
                found[key] = True
            else:
                placed = _placed(made.by, before.devices)[made.place]
                found[key] = prints.has(made.value, placed) or prints.has(made.value)
                if not found[key] and made.by.opcode in ("broadcast", "reshape"):
                    found[key] = all(has(o) for o in made.operands if o in trace.made)
        return found[key]

    order = {key: n for n, key in enumerate(trace.made)}
    waiting = [id(trace.results[i]) for i in results if id(trace.results[i]) in trace.made]
    ends, seen = list[int](), set[int]()
    while waiting:
        key = waiting.pop()
        if key in seen:
            continue
        seen.add(key)
        missing = [o for o in trace.made[key].operands if o in trace.made and not has(o)]
        waiting += missing
        if not missing:
            ends.append(key)
    if not ends:
        return None
    made = trace.made[min(ends, key=order.__getitem__)]
    if made.by is None:
        return None
    return Difference(*_said(made.by, before), _described(made, other, before.devices, mesh))


def _said(i: Instruction, program: HloProgram) -> tuple[str, Source | None]:
    """Return the operation that an instruction belongs to, and the user's line."""
    operation = _scopes.operation(i.scope)
    return str(operation) if operation else i.scope.rpartition("/")[2] or i.opcode, source(program.frames(i))


def _described(made: _Made, other: _Trace, devices: int, mesh: Mapping[str, int]) -> str:
    """Say how the value of an instruction in the partitioned program differs from the reference."""
    assert made.by is not None
    placed = _placed(made.by, devices)[made.place]
    right = placed.on_devices(made.value)
    wrong = None
    for m in other.made.values():
        if m.by is not None and m.by.metadata == made.by.metadata and m.value.shape[1:] == right.shape[1:]:
            wrong = m
    if wrong is None or wrong.by is None:
        return "has a value that the partitioned program does not compute"
    value = np.broadcast_to(wrong.value, right.shape)
    kind = wrong.by.opcode
    if kind in COLLECTIVES:
        axes, _ = along(groups(wrong.by, devices), mesh, kind == "collective-permute") if mesh else ((), True)
        kind += f" over {' and '.join(axes)}" if axes else ""
    return f"is wrong: in the partitioned program, {kind} {_relation(value, right, mesh)}"


def _relation(wrong: np.ndarray, right: np.ndarray, mesh: Mapping[str, int]) -> str:
    far = _far(right)
    if right.dtype.kind in "fc" and right.size and np.abs(right).max():
        at = np.unravel_index(np.abs(right).argmax(), right.shape)
        ratio = float(np.real(wrong[at])) / float(np.real(right[at]))
        if math.isfinite(ratio) and _close(wrong, ratio * right, far):
            return f"gives {_times(ratio, mesh)} the reference"
    for count in range(1, len(mesh) + 1):
        for axes in itertools.combinations(mesh, count):
            said = " and ".join(axes)
            if right.dtype.kind in "fc" and _close(_sums(wrong, axes, mesh), right, far):
                return f"gives a partial sum: the sum over {said} is missing"
            if right.dtype.kind in "fc" and _close(wrong, _sums(right, axes, mesh), far):
                return f"adds up shards along {said} that belong apart"
    off = sum(not _close(w, r, far) for w, r in zip(wrong, right, strict=True))
    share = "all" if off == len(wrong) else f"{off} of {len(wrong)}"
    return f"differs from the reference on {share} devices"


def _times(ratio: float, mesh: Mapping[str, int]) -> str:
    for count in range(1, len(mesh) + 1):
        for axes in itertools.combinations(mesh, count):
            size = math.prod(mesh[a] for a in axes)
            for number, text in ((size, f"{size} times"), (1 / size, f"1/{size} of")):
                if size > 1 and abs(ratio - number) < 1e-6:
                    return f"{text} (the size of {' and '.join(axes)})"
    return f"{ratio:.6g} times" if ratio else "0 in place of"


def _sums(x: np.ndarray, axes: Sequence[str], mesh: Mapping[str, int]) -> np.ndarray:
    """Sum what devices along some mesh axes have."""
    grid = x.reshape(*mesh.values(), *x.shape[1:])
    over = tuple([*mesh].index(a) for a in axes)
    return np.broadcast_to(grid.sum(over, keepdims=True), grid.shape).reshape(x.shape)
