"""Evaluate a program with all floating-point numbers widened to float64, whatever their dtypes are.

Tracing has already used the dtypes for constants, which are rounded to theirs, and for random bits, which become floats
of theirs. The arithmetic between them is done in float64.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, primitives
from jax.extend.source_info_util import summarize
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..core.jax_versions import axes_made_manual, scan_operands, x64_while_partitioning

# Equations that only call the program in the parameter named here. Rules for derivatives and the like are used before.
_CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    primitives.remat_p.name: "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
}
# XLA replicates the operands of a select_and_scatter in float64, and partitions it in smaller dtypes, in its own way.
_OWN_PRECISION = re.compile(
    "callback|pallas|ffi|custom_call|kernel_call|cudnn|dot_product_attention|debug_print|select_and_scatter"
)
_SAME_VALUES = re.compile(
    "broadcast_in_dim|convert_element_type|copy|optimization_barrier|pbroadcast|pcast|pvary|reduce_precision|reshape"
    "|reshard|sharding_constraint|squeeze|stop_gradient|transpose"
)
_MOST_ELEMENTS_RECORDED = 1 << 18
_FOLDERS = Path(__file__).parents[1], Path(str(jax.__file__)).parent
_LIBRARIES = re.compile("|".join(re.escape(f"{folder}/") for folder in _FOLDERS))


def wide_dtype(dtype: Any) -> Any:
    """Return the dtype in which values of a dtype are computed: float64, complex128, or the same."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(np.float64)
    return np.dtype(np.complex128) if jnp.issubdtype(dtype, jnp.complexfloating) else dtype


class Step(NamedTuple):
    """The origin of an intermediate value."""

    operation: str
    where: str
    """The file and the line of the operation, in the user's code."""
    operands: tuple[int, ...]
    """The positions of the values that it was computed from, as far as they are recorded."""
    over: tuple[str, ...]
    """The mesh axes that the operation communicates over."""
    devices: Mapping[str, int]
    """The manual mesh axes around it; the recorded value has an axis in front, over their devices."""


class WidenedProgram:
    """A program, to be called with the same arguments in float64 while `jax.enable_x64` is active."""

    def __init__(self, program: ClosedJaxpr, recording: bool = False, alone: bool = False, without_mesh: bool = False):
        """Arguments:
        alone: whether it runs on one device, whatever shardings the program asks for.
        without_mesh: whether the program was traced on another mesh, which is left out with all its shardings.
        """
        self._alone, self._without_mesh = alone, without_mesh
        self._program, self._x64 = program, bool(jax.config.read("jax_enable_x64"))
        self.own_precision: dict[str, Any] = {}
        """The operations that could only be evaluated at their own precision, and the coarsest dtype of each."""
        self.steps: list[Step] = []
        self.origins: list[int | None] = []
        """The positions of the steps that computed the results, as far as they are recorded."""
        self._recorded: dict[int, Any] | None = {} if recording else None
        self._origins: dict[int, tuple[int, Any]] = {}
        """By the `id` of a value: the position of its step, and the value itself, so that no other gets this `id`."""
        self._constants: dict[int, Any] = {}
        """The constants of the program, and the values that are chosen among constants, by `id`."""
        self._devices: dict[str, int] = {}
        self._has_rules = False
        self._jitted = jax.jit(self)
        self._place: str | None = None
        """The place in the user's code that called the library function being evaluated."""

    def __call__(self, arrays: Sequence[Any]) -> tuple[list[Any], dict[int, Any]]:
        """Return the results, and the recorded values by the positions of their steps."""
        for i, x in enumerate(arrays):
            self._record(x, Step(f"argument {i}", "", (), (), {}))
        results = self._evaluate(self._program, arrays)
        self.origins = [self._origins[id(x)][0] if id(x) in self._origins else None for x in results]
        return results, self._recorded or {}

    def run(self, arrays: Sequence[Any]) -> tuple[list[Any], dict[int, Any]]:
        """Compile the program for such arguments, and return its results and recorded values."""
        self._jitted.trace(arrays)  # which tells whether it has rules
        with x64_while_partitioning() if self._has_rules else contextlib.nullcontext():
            return jax.block_until_ready(self._jitted(arrays))

    def _evaluate(self, program: Any, arguments: Sequence[Any]) -> list[Any]:
        """Evaluate a `Jaxpr` or a `ClosedJaxpr`, which are one class in newer versions of JAX."""
        jaxpr: Jaxpr = getattr(program, "jaxpr", program)
        consts = [_converted_array(x, wide_dtype(x.dtype)) for x in getattr(program, "consts", ())]
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

        def read(atom: Any) -> Any:
            if not isinstance(atom, Literal):
                return values[atom]
            # A Python number is rounded to its dtype first, as it is without widening.
            dtype: Any = atom.aval.dtype  # pyright: ignore[reportAttributeAccessIssue]
            return np.asarray(atom.val, dtype).astype(wide_dtype(dtype))

        for equation in jaxpr.eqns:
            operands = [read(a) for a in equation.invars]
            with contextlib.nullcontext() if self._without_mesh else equation.ctx.manager:
                results = self._results(equation, operands)
            chosen = equation.primitive is primitives.select_n_p
            same = chosen or _SAME_VALUES.match(equation.primitive.name)
            if same and all(map(self._is_constant, operands[chosen:])):
                self._constants.update({id(x): x for x in results})
            if self._recorded is not None:
                self._record_equation(equation, operands, results)
            values.update(zip(equation.outvars, results, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def _is_constant(self, x: Any) -> bool:
        return isinstance(x, np.ndarray) or id(x) in self._constants

    def _results(self, equation: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        primitive, params = equation.primitive, equation.params
        if primitive.name in _CALLS:
            return self._call(equation, params[_CALLS[primitive.name]], operands)
        if primitive.name == "shard_map":
            return self._shard_map(equation, operands)
        if primitive is primitives.scan_p:
            return self._scan(params, operands)
        if primitive is primitives.while_p:
            n, m = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
            condition = self._unrecorded(params["cond_jaxpr"], operands[:n])
            body = self._unrecorded(params["body_jaxpr"], operands[n:m])
            return jax.lax.while_loop(lambda xs: condition(*xs)[0], lambda xs: body(*xs), operands[m:])
        if primitive is primitives.cond_p:
            return jax.lax.switch(operands[0], [self._unrecorded(b) for b in params["branches"]], *operands[1:])
        if primitive is primitives.linear_solve_p:
            lengths = params["const_lengths"]
            first = lengths.matvec + lengths.vecmat
            arguments = [*operands[first : first + lengths.solve], *operands[sum(lengths) :]]
            return self._evaluate(params["jaxprs"].solve, arguments)
        if primitive is primitives.reduce_precision_p or (self._alone and primitive.name == "sharding_constraint"):
            return operands
        if self._without_mesh and primitive.name in ("reshard", "mesh_cast"):
            return operands
        if primitive is primitives.bitcast_convert_type_p:  # such as random bits, which become floats of their dtype
            return self._at_own_precision(equation, operands)
        if primitive is primitives.convert_element_type_p and self._is_constant(operands[0]):
            return self._at_own_precision(equation, operands)  # such as a Python number, which is rounded to the dtype
        if not _OWN_PRECISION.search(primitive.name):
            try:
                params = {name: self._widen(value) for name, value in params.items()}
                if primitive.name == "custom_partitioning":
                    params["partition"] = self._partition(equation)
                return _bind(equation, operands, params)
            except (TypeError, ValueError, NotImplementedError):
                pass  # not made for float64
        if dtypes := [v.aval.dtype for v in equation.outvars if wide_dtype(v.aval.dtype) != v.aval.dtype]:  # pyright: ignore[reportAttributeAccessIssue]
            self.own_precision[primitive.name] = max(dtypes, key=lambda d: float(jnp.finfo(d).eps))
        return self._at_own_precision(equation, operands)

    def _at_own_precision(self, equation: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        kinds: list[Any] = [v.aval for v in equation.invars]
        narrow = [
            _converted_array(x, k.dtype) if hasattr(k, "dtype") else x for x, k in zip(operands, kinds, strict=True)
        ]
        return [_converted_array(x, wide_dtype(x.dtype)) for x in _bind(equation, narrow, equation.params)]

    def _widen(self, value: Any) -> Any:
        """Widen dtypes and programs in the parameters of an equation."""
        if isinstance(value, np.dtype):
            return wide_dtype(value)
        if isinstance(value, (jax.lax.DotAlgorithmPreset, jax.lax.DotAlgorithm)):
            return None
        if self._without_mesh and isinstance(value, NamedSharding):
            return None
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            kinds: Any = value.in_avals if hasattr(value, "in_avals") else [v.aval for v in value.invars]
            structs = [jax.ShapeDtypeStruct(k.shape, wide_dtype(k.dtype)) for k in kinds]
            wide = jax.make_jaxpr(self._unrecorded(value))(*structs)
            return wide if isinstance(value, ClosedJaxpr) else wide.jaxpr
        return tuple([self._widen(v) for v in value]) if type(value) is tuple else value

    def _unrecorded(self, program: Any, first: Sequence[Any] = ()) -> Callable[..., list[Any]]:
        """Make a function of a program whose values are not recorded, with its first arguments."""
        return lambda *rest: self._inside(program, [*first, *rest], recording=False)[0]

    def _call(self, equation: JaxprEqn, program: Any, operands: Sequence[Any]) -> Sequence[Any]:
        params, around = equation.params, self._place
        operands = self._constrained_arrays(operands, params.get("in_shardings", operands))
        if around is None and _LIBRARIES.search(str(program.debug_info.func_src_info)):
            self._place = _where_called(equation)  # the lines inside belong to the first call
        results = self._evaluate(program, operands)
        self._place = around
        return self._constrained_arrays(results, params.get("out_shardings", results))

    def _constrained_arrays(self, arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
        """Give arrays the shardings that a jit inside the program asks for, if any."""
        if self._alone:
            return [*arrays]
        return [_constrained_array(x, s) for x, s in zip(arrays, shardings, strict=True)]

    def _scan(self, params: Any, operands: Sequence[Any]) -> Sequence[Any]:
        consts, init, scanned = scan_operands(params, operands)

        def body(carry: Any, xs: Any) -> Any:
            self._continue([*consts, *scanned], [*consts, *xs])
            results, values = self._inside(params["jaxpr"], [*consts, *carry, *xs])
            return results[: len(carry)], (results[len(carry) :], values)

        loop = {k: params[k] for k in ("length", "reverse", "unroll")}
        carry, (stacked, values) = jax.lax.scan(body, init, scanned, **loop)
        # The axis over devices stays in front; it is added where a `shard_map` ends.
        moved = {i for i in values if self.steps[i].devices and not self._devices}
        self._keep({i: jnp.moveaxis(x, 0, 1) if i in moved else x for i, x in values.items()})
        return [*carry, *stacked]

    def _shard_map(self, equation: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
        if self._without_mesh:
            raise ValueError("per-device code needs its mesh")
        params, around, axes = equation.params, self._devices, axes_made_manual(equation)
        mesh = params["mesh"]
        manual = {a: mesh.shape[a] for a in mesh.axis_names if a in axes}
        inner: list[Any] = []

        def body(*arrays: Any) -> Any:
            self._continue(operands, arrays)
            self._devices = {**around, **manual}
            try:
                results, values = self._inside(params["jaxpr"], arrays)
            finally:
                self._devices = around
            inner[:] = results
            return tuple(results), {i: x[None] for i, x in values.items()}

        out_specs = (params["out_specs"], PartitionSpec(tuple(manual)))
        options = {k: params[k] for k in ("mesh", "in_specs", "check_vma")}
        mapped = jax.shard_map(body, out_specs=out_specs, axis_names=axes, **options)
        results, values = mapped(*operands)
        self._keep(values)
        self._continue(inner, results)
        return results

    def _partition(self, equation: JaxprEqn) -> Callable[..., Any]:
        """Widen the function that a `custom_partitioning` rule runs per device, which JAX traces when it compiles."""
        self._has_rules, partition = True, equation.params["partition"]
        dtypes = [v.aval.dtype for v in equation.invars]  # pyright: ignore[reportAttributeAccessIssue]
        out_dtypes = [v.aval.dtype for v in equation.outvars]  # pyright: ignore[reportAttributeAccessIssue]

        def narrow(tree: Any, dtypes: Sequence[Any]) -> Any:
            structs, spec = jax.tree.flatten(tree)
            placed = [s.sharding if isinstance(s, jax.ShapeDtypeStruct) else None for s in structs]
            own = zip(structs, dtypes, placed, strict=True)
            return spec.unflatten([jax.ShapeDtypeStruct(s.shape, d, sharding=at) for s, d, at in own])

        def widened(*arguments: Any) -> Any:
            *static, mesh, operands, results = arguments
            with jax.enable_x64(self._x64):
                mesh, lowered, out, into = partition(
                    *static, mesh, narrow(operands, dtypes), narrow(results, out_dtypes)
                )

            def wide(*arrays: Any) -> Any:
                with jax.enable_x64(self._x64):
                    program, shapes = jax.make_jaxpr(lowered, return_shape=True)(*narrow(arrays, dtypes))
                results = self._unrecorded(program)(*jax.tree.leaves(arrays))
                return jax.tree.unflatten(jax.tree.structure(shapes), results)

            return mesh, wide, out, into

        return widened

    def _inside(
        self, program: Any, arguments: Sequence[Any], recording: bool = True
    ) -> tuple[list[Any], dict[int, Any]]:
        """Evaluate the body of a loop or of a `shard_map`, and return the values recorded in it."""
        around, self._recorded = self._recorded, {} if recording and self._recorded is not None else None
        try:
            return self._evaluate(program, arguments), self._recorded or {}
        finally:
            self._recorded = around

    def _keep(self, values: Mapping[int, Any]) -> None:
        if self._recorded is not None:
            self._recorded.update(values)

    def _continue(self, outside: Sequence[Any], inside: Sequence[Any]) -> None:
        """Record that values inside a body are the values outside of it, or the other way round."""
        for a, b in zip(outside, inside, strict=True):
            if id(a) in self._origins:
                self._origins[id(b)] = self._origins[id(a)][0], b

    def _record_equation(self, equation: JaxprEqn, operands: Sequence[Any], results: Sequence[Any]) -> None:
        name = equation.primitive.name
        if name in _CALLS or name == "shard_map":
            return  # recorded inside
        origins = [self._origins[id(x)][0] for x in operands if id(x) in self._origins]
        if _SAME_VALUES.match(name):
            return self._continue(operands[:1], results[:1])
        axes = equation.params.get("axes", equation.params.get("axis_name", ()))
        over = tuple([a for a in (axes if isinstance(axes, tuple) else (axes,)) if isinstance(a, str)])
        for x in results:
            self._record(x, Step(name, self._place or _where_called(equation), tuple(origins), over, self._devices))

    def _record(self, x: Any, step: Step) -> None:
        if self._recorded is not None and jnp.issubdtype(x.dtype, jnp.floating) and x.size <= _MOST_ELEMENTS_RECORDED:
            self._origins[id(x)] = len(self.steps), x
            self._recorded[len(self.steps)] = x
            self.steps.append(step)


def _bind(equation: JaxprEqn, operands: Sequence[Any], params: Any) -> list[Any]:
    results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(params))
    return list(results) if equation.primitive.multiple_results else [results]


def _converted_array(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype or not jnp.issubdtype(x.dtype, jnp.inexact) else jax.lax.convert_element_type(x, dtype)


def _constrained_array(x: Any, sharding: Any) -> Any:
    """Constrain an array to a sharding on Auto mesh axes; leave it as it is otherwise."""
    if not isinstance(sharding, NamedSharding) or set(sharding.mesh.axis_types) != {AxisType.Auto}:
        return x
    return jax.lax.with_sharding_constraint(x, sharding)


def _where_called(equation: JaxprEqn) -> str:
    """Return the file and the line of the innermost call outside of the library."""
    frames = summarize(equation.source_info, num_frames=20).splitlines()[::-1]
    outside = [f for f in frames if not _LIBRARIES.match(f)] or [""]
    path, _, line = outside[0].partition(":")
    return f"{path.rpartition('/')[2]}:{line.partition(':')[0]}" if line else ""
