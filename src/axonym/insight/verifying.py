"""`verify`: check that the compiler kept a step the same when it partitioned it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh

from ..core.differences import SCALES, asymmetric, moved_by_rounding
from ..core.jax_versions import programs_in
from ..core.tree_spec import PROGRAM_ARRAYS, is_key
from ..distribution.mesh_axes import AnyMesh
from ..sharding.meshes import current_mesh
from . import _compiling
from ._arguments import step_name
from ._hlo import HloProgram, OwnPartitioning, UnknownForm
from ._hlo_devices import placed
from ._hlo_elements import value_dtype
from ._hlo_values import IllFormed, Machine, listed
from .differing import FirstDifference, Trace, described, first_difference
from .explaining import active, distributed, mesh_of, meshes_in, on_devices


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
    for equation in program.eqns:
        for inner in programs_in(equation):
            yield from _bodies(getattr(inner, "jaxpr", inner), devices)
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
