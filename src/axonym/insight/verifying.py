"""`verify`: check that the compiler kept a step the same when it partitioned it, and else where they first differ."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh

from ..core.differences import (
    SCALES,
    Likeness,
    asymmetric,
    find_likeness,
    fingerprint,
    first_wrong,
    moved_by_rounding,
)  # fmt: skip
from ..core.operation_rules import equations
from ..core.source_lines import Source, source
from ..core.tree_spec import PROGRAM_ARRAYS, is_key
from ..distribution.mesh_axes import AnyMesh
from ..sharding.meshes import current_mesh
from . import _compiling, _scopes
from ._arguments import step_name
from ._hlo import COLLECTIVES, HloProgram, Instruction, OwnPartitioning, UnknownForm
from ._hlo_devices import NOTHING, PlacedArray, along, close, far_from, groups, placed
from ._hlo_elements import value_dtype
from ._hlo_values import IllFormed, Machine, listed
from .explaining import active, distributed, mesh_of, meshes_in, on_devices


@dataclasses.dataclass(frozen=True)
class FirstDifference:
    """The first operation that a partitioned program computes differently from the original program.

    >>> print(axn.insight.FirstDifference("pad", axn.insight.Source("model.py", 12, "loss"), "is wrong"))
    pad at model.py:12 is wrong
    """

    operation: str
    """The named operation, or JAX's name for it."""
    source: Source | None
    """The line of the user's code that the operation comes from."""
    what: str
    """The difference of its value in words, such as `is wrong`, to follow the operation in a sentence."""

    def __str__(self) -> str:
        return f"{self.operation}{f' at {self.source}' if self.source else ''} {self.what}"


@dataclasses.dataclass(frozen=True)
class Verification:
    """The answer of `verify`: whether a partitioned program computes the same as the original program.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> print(axn.insight.verify(jnp.cumsum, jnp.ones(4), mesh=mesh))
    cumsum: the same at these sizes, inputs and mesh, which has 1 device
    """

    step: str
    devices: int
    """The number of devices of the mesh, which need not exist."""
    same: bool | None
    """True if all results are the same; None if it is not known."""
    scales: tuple[float, ...] = ()
    """The scales of the arguments at which the results were compared, up to the first that differ."""
    different: tuple[str, ...] = ()
    """The results that differ."""
    first: FirstDifference | None = None
    """The first instruction whose value differs although its operands do not."""
    unknown: tuple[str, ...] = ()
    """The reasons if it is not known, such as instructions that cannot be evaluated here."""
    ill_conditioned: tuple[str, ...] = ()
    """The results of which elements differ, but no further than a rounding of the arguments moves them."""

    def __str__(self) -> str:
        if self.same is None:
            return f"{self.step}: not known, because of {'; '.join(self.unknown)}"
        on = f"{self.devices} device{'s' if self.devices > 1 else ''}"
        if self.same:
            but = ", but for elements that a rounding of the arguments moves as far: " if self.ill_conditioned else ""
            ill = ", ".join(self.ill_conditioned)
            return f"{self.step}: the same at these sizes, inputs and mesh, which has {on}{but}{ill}"
        listed = ", ".join(self.different[:3]) + (f" and {len(self.different) - 3} more" if self.different[3:] else "")
        where = f"\n  {self.first}" if self.first else ""
        return f"{self.step}: not kept by the compiler for {on}: {listed}{where}"


def verify(
    step: Callable[..., Any], /, *args: Any, mapping: Any = None, mesh: AnyMesh | None = None, **kwargs: Any
) -> Verification:
    """Check whether the compiler keeps a step the same when it partitions it over the devices of a mesh.

    The step is compiled until it is partitioned, and not run. The program before and the program after partitioning are
    both evaluated in NumPy, with 64-bit numbers and all devices simulated, and their results compared. So use small
    sizes. The answer holds for these sizes, inputs and mesh.

    Arguments:
        step: a function, or one compiled by `named_jit`, `fsdp` or `jax.jit`.
        *args: its arguments, as for `explain`: they may be abstract, and placed. Numbers are drawn for arrays without
            values; of the others, magnitudes are varied, and signs, integers and keys are kept.
        mapping: how to distribute a plain function, as for `explain`.
        mesh: the mesh; by default the active one, or the arguments' mesh. It may have more devices than there are.

    >>> axn.insight.verify(lambda x: x * 2, jnp.ones(4), mesh=jax.make_mesh((1,), ("data",))).same
    True
    """
    name, arguments = step_name(step), jax.tree.leaves((args, kwargs))
    known = next((m for m in (mesh, current_mesh(), *meshes_in(arguments)) if m is not None), None)
    with active(known if isinstance(known, AbstractMesh) else mesh, repeated=True):
        args, kwargs = on_devices((args, kwargs))
        compiled = distributed(step, mapping)
        lowered = compiled.lower(*args, **kwargs)
        devices = _compiling.device_count(lowered)
        if devices == 1:
            return Verification(name, 1, True)  # nothing is partitioned
        try:
            before, after = (HloProgram(text, devices) for text in _compiling.around_partitioning(lowered))
            if "CustomSPMDPartitioning" in before.text and hasattr(compiled, "trace"):
                before.bodies += _bodies(compiled.trace(*args, **kwargs).jaxpr, devices)
        except UnknownForm as e:
            return Verification(name, devices, None, unknown=(str(e),))
        paths = jax.tree_util.tree_leaves_with_path(lowered.out_info)
        names = ["result" + jax.tree_util.keystr(path) for path, _ in paths]
        return compare_programs(name, before, after, arguments, names, mesh_of(args, kwargs, devices) or {})


def compare_programs(
    step: str,
    before: HloProgram,
    after: HloProgram,
    arguments: Sequence[Any] = (),
    names: Sequence[str] = (),
    mesh: Mapping[str, int] | None = None,
) -> Verification:
    """Evaluate a program before and after it is partitioned, and compare the results."""
    devices, partitioned = before.devices, Machine(after)
    if unknown := dict.fromkeys((*Machine(before).unknown, *partitioned.unknown)):
        return Verification(step, devices, None, unknown=tuple(unknown))
    scales, ill = list[float](), dict[str, None]()
    try:
        parameters = [place for i in before.parameters() for place in placed(i, devices)]
        results, inputs = placed(before.root(before.entry), devices), _Inputs(before, arguments)
        names = names if len(names) == len(results) else [f"result[{n}]" for n in range(len(results))]
        for scale in SCALES:
            trace = inputs.at(scale)
            if trace is None and scale == SCALES[0]:
                return Verification(step, devices, None, unknown=("results that are NaN, at all inputs tried",))
            if trace is None:
                continue
            scales.append(scale)
            shards = [place.on_devices(x) for place, x in zip(parameters, trace.args, strict=True)]
            triples = [*zip(results, trace.results, listed(partitioned.run(shards)), strict=True)]
            different = [n for n, (place, x, y) in enumerate(triples) if not place.agree(x, y)]
            if different:
                moved = moved_by_rounding(trace.args, trace.results, lambda args: listed(Machine(before).run(args)))
                ill |= dict.fromkeys(names[n] for n in different)
                different = [n for n in different if not triples[n][0].agree(*triples[n][1:], moved[n])]
            if different:
                where = None
                with contextlib.suppress(UnknownForm):  # a sharding on the way
                    where = first_difference(trace, Trace(after, shards), different, mesh or {})
                return Verification(step, devices, False, tuple(scales), tuple(names[n] for n in different), where)
    except UnknownForm as e:
        return Verification(step, devices, None, unknown=(str(e),))
    except IllFormed as e:
        where = FirstDifference(*described(e.instruction, after), f"is ill-formed: in the partitioned program, it {e}")
        return Verification(step, devices, False, tuple(scales), ("all results",), where)
    return Verification(step, devices, True, tuple(scales), ill_conditioned=tuple(ill))


def _bodies(program: Any, devices: int) -> Iterator[OwnPartitioning]:
    """Yield the functions that are partitioned in their own ways, which the text of a program does not have."""
    for equation in equations(program):
        if equation.primitive.name == "custom_partitioning":
            call, scope = equation.params["call"], str(equation.source_info.name_stack)
            structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in call.jaxpr.invars]
            text = jax.jit(jaxpr_as_fun(call), keep_unused=True).lower(*structs).as_text("hlo")
            inside = f"{scope and f'/{scope}'}/custom_partitioning"
            yield OwnPartitioning(inside, str(call), HloProgram(text, devices))


# --- inputs ---


class _Inputs:
    """Finds inputs for which no result is NaN.

    At first, numbers without values have any sign, and integers are below 32. Where a root or a logarithm gives NaN,
    the inputs from which it was computed elementwise become positive; where an index leads out of an array, integers
    become smaller. Inputs found at one scale are tried first at the next.
    """

    def __init__(self, program: HloProgram, arguments: Sequence[Any]):
        self._program, self._arguments = program, arguments
        self._shapes = [shape for i in program.parameters() for shape in i.shapes]
        self._positive, self._below = set[int](), 32

    def at(self, scale: float) -> Trace | None:
        """Evaluate the program at inputs of some scale; return None if all that are tried give NaN."""
        for _ in range(8):
            trace = Trace(self._program, [*self._drawn(scale)])
            if not any(np.isnan(x).any() for x in trace.results):
                return trace
            causes = trace.causes_of_nan() - self._positive
            self._positive |= causes or ({*range(len(self._shapes))} if self._below == 2 else set())
            self._below = self._below if causes else max(self._below // 4, 2)
        return None

    def _drawn(self, scale: float) -> Iterator[np.ndarray]:
        """Draw values for parameters. Each is like the first argument of the same sizes that no earlier one took."""
        left, rng = [_host(x) for x in self._arguments if isinstance(x, PROGRAM_ARRAYS)], np.random.default_rng(0)
        for n, shape in enumerate(self._shapes):
            dtype, sizes = value_dtype(shape.dtype), shape.sizes
            place = next((i for i, x in enumerate(left) if x.shape == sizes and x.dtype.kind == dtype.kind), -1)
            value = left.pop(place) if place >= 0 else None
            value = None if isinstance(value, jax.ShapeDtypeStruct) else value
            if value is None and dtype.kind in "fc":  # not too large for weights, whose products add up
                value = (np.abs(rng.normal(size=sizes)) + 0.1) / math.sqrt(max(sizes[1:], default=1))
                signs = [1, -1] if dtype.kind == "f" else [1, -1j]
                value = value if n in self._positive else value * rng.choice(signs, sizes)
            elif value is None:
                limit = {"b": 2, "u": 2**32 if shape.dtype == "u32" else 100}.get(dtype.kind, self._below)
                value = rng.integers(0, min(limit, 2 ** (shape.bits - 1)), sizes)
            found = asymmetric(value) * scale if dtype.kind in "fc" else value
            yield np.asarray(found).astype(dtype)[None]


def _host(x: Any) -> np.ndarray | jax.ShapeDtypeStruct:
    """Return the value of an argument, or its sizes and dtype, as a machine has them."""
    abstract = isinstance(x, jax.ShapeDtypeStruct) or (isinstance(x, jax.Array) and not x.is_fully_addressable)
    x = x if abstract else jnp.asarray(x)
    if is_key(x):
        x = jax.eval_shape(jax.random.key_data, x) if abstract else jax.random.key_data(x)
    dtype = np.dtype(np.float64) if jnp.issubdtype(x.dtype, np.floating) else np.dtype(x.dtype)
    return jax.ShapeDtypeStruct(x.shape, dtype) if abstract else np.asarray(x).astype(dtype)


# --- the first difference ---


class Made(NamedTuple):
    """An array, with the instruction that computed it, its place among the results, and the operands."""

    value: np.ndarray
    by: Instruction | None
    """None for an argument."""
    place: int
    operands: tuple[int, ...]
    """The positions of the arrays that it was computed from."""


class Trace:
    """The arrays that a program computes, in order, and the operands of each."""

    def __init__(self, program: HloProgram, args: Sequence[np.ndarray]):
        self.program, self.args = program, args
        self.made = [Made(x, None, n, ()) for n, x in enumerate(args)]
        self._positions = {id(x): n for n, x in enumerate(args)}
        self.results = listed(Machine(program, self._watch).run(args))

    def positions(self, arrays: Sequence[np.ndarray]) -> tuple[int, ...]:
        return tuple(self._positions[id(x)] for x in arrays if id(x) in self._positions)

    def _watch(self, i: Instruction, operands: Sequence[Any], result: Any) -> None:
        inputs = self.positions(listed(tuple(operands)))
        for place, x in enumerate(listed(result)):
            if id(x) not in self._positions:
                self._positions[id(x)] = len(self.made)
                self.made.append(Made(x, i, place, inputs))

    def causes_of_nan(self) -> set[int]:
        """Return the arguments, by number, from which elementwise operations led to NaN, such as the root of -1."""
        bad = [bool(np.isnan(m.value).any()) for m in self.made]
        first = [m for m, nan in zip(self.made, bad, strict=True) if nan and not any(bad[o] for o in m.operands)]
        waiting, seen = {o for m in first for o in m.operands}, set[int]()
        while waiting:
            seen.add(position := waiting.pop())
            made = self.made[position]
            if made.by is not None and made.by.opcode in _LIKE_THEIR_OPERANDS:
                waiting |= {*made.operands} - seen
        return {self.made[n].place for n in seen if self.made[n].by is None}


_LIKE_THEIR_OPERANDS = "add", "convert", "copy", "divide", "multiply", "reshape"


class Fingerprints:
    """Fingerprints of the arrays that a partitioned program computes, to find equal arrays."""

    def __init__(self, trace: Trace, devices: int):
        self._devices = devices
        self._arrays: dict[Any, list[np.ndarray]] = {}
        for made in trace.made:
            self._arrays.setdefault(self._kind(made.value), []).append(made.value)
        self._found = {kind: np.array([*map(self._print, xs)]) for kind, xs in self._arrays.items()}

    def has(self, x: np.ndarray, placed: PlacedArray | None = None) -> bool:
        """Return whether the program computes an array, or, with its placement, the shards of the array."""
        if placed is not None and any(n % count for n, count in zip(x.shape[1:], placed.tiling.counts, strict=True)):
            shards = self._arrays.get((placed.shard(), x.dtype.kind in "fc"), ())
            return any(placed.agree(x, y) for y in shards)  # elements beyond the array may differ
        x = x if placed is None else placed.on_devices(x)
        known = self._found.get(self._kind(x))
        if known is None:
            return False
        value, size = self._print(x)
        return bool((np.abs(known[:, 0] - value) <= 1e-9 * size + NOTHING).any())

    def _kind(self, x: np.ndarray) -> Any:
        return x.shape[1:], x.dtype.kind in "fc"

    def _print(self, x: np.ndarray) -> tuple[float, float]:
        shape = (self._devices, *x.shape[1:])
        x = np.real(x) + np.pi * np.imag(x)
        x = np.clip(np.nan_to_num(np.broadcast_to(x, shape).astype(float)), -1e30, 1e30)
        return float((x * _weights(shape)).sum()), float(np.linalg.norm(x.ravel()))


@functools.lru_cache(maxsize=256)
def _weights(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape)


def first_difference(
    before: Trace, after: Trace, results: Sequence[int], mesh: Mapping[str, int]
) -> FirstDifference | None:
    """Find the first instruction whose value the partitioned program lacks, although it computes the operands."""
    devices = before.program.devices
    prints = Fingerprints(after, devices)

    @functools.cache
    def has(position: int) -> bool:
        made = before.made[position]
        if made.by is None or made.by.opcode in ("constant", "iota"):
            return True
        if prints.has(made.value, placed(made.by, devices)[made.place]) or prints.has(made.value):
            return True
        return made.by.opcode in ("broadcast", "reshape") and all(map(has, made.operands))

    ends = before.positions([before.results[n] for n in results])
    position = first_wrong(ends, lambda p: before.made[p].operands, has)
    if position is None or (made := before.made[position]).by is None:
        return None
    return FirstDifference(*described(made.by, before.program), _how(made, made.by, after, mesh))


def described(i: Instruction, program: HloProgram) -> tuple[str, Source | None]:
    """Return the operation that an instruction belongs to, and the line of the user's code."""
    operation = _scopes.operation(i.scope)
    return str(operation) if operation else i.scope.rpartition("/")[2] or i.opcode, source(program.frames(i))


def _how(made: Made, by: Instruction, other: Trace, mesh: Mapping[str, int]) -> str:
    """Say how the value of an instruction differs in the partitioned program."""
    devices = other.program.devices
    right, wrong = placed(by, devices)[made.place].on_devices(made.value), None
    for m in other.made:
        if m.by is not None and m.by.metadata == by.metadata and m.value.shape[1:] == right.shape[1:]:
            wrong = m
    if wrong is None or wrong.by is None:
        return "is wrong: the partitioned program never computes its value"
    kind, value = wrong.by.opcode, np.broadcast_to(wrong.value, right.shape)
    if kind in COLLECTIVES and mesh:
        axes, _ = along(groups(wrong.by, devices), mesh, kind == "collective-permute")
        kind += f" over {' and '.join(axes)}" if axes else ""
    like = find_likeness(value, mesh, mesh, {fingerprint(right, mesh)}) if mesh else None
    if like not in (None, Likeness()):
        return f"is wrong: in the partitioned program, {kind} {like.words(mesh)}"
    off = sum(not close(w, r, far_from(right)) for w, r in zip(value, right, strict=True))
    return f"is wrong: in the partitioned program, {kind} differs from the reference on {off} of {devices} devices"
