"""`partitioned`: make an operation on any mesh from a function, a function of shards, and a partitioning rule.

| where                                          | what runs                                                         |
|------------------------------------------------|-------------------------------------------------------------------|
| Auto mesh axes, also under `vmap` and `scan`   | the function of shards; the partitioner decides the sharding      |
| the same, differentiated                       | the function of shards; the active mapping decides                |
| Explicit mesh axes                             | the function of shards; the types of the operands decide          |
| inside `shard_map` over some mesh axes         | the function of shards over the others, by types and mapping      |
| inside `shard_map` over all mesh axes          | the function itself, on the arrays as they are there              |
| one device                                     | the function itself                                               |
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from ..axis import Names
from ..core import errors
from ..core.function_cache import FunctionCache
from ..core.jax_versions import INLINE
from ..core.tree_spec import StaticLeaf, TreeSpec, flatten_arrays
from ..distribution import active_settings
from ..distribution.mesh_axes import (
    NO_MESH,
    AnyMesh,
    axes_of_type,
    current_mesh,
    explicit_mesh,
    has_explicit,
    sharded_over,
)
from ..manual._axis_environment import ArgumentAxis, activate, interned
from ..named_array import NamedArray, describe_array, raw, wrap
from ..ops._kernels import transpose_to
from ._lowerings import Arrays, PartitionedOperation, all_manual, by_partitioner, per_device
from .rule import (
    Infer,
    NamedShape,
    PartitioningRule,
    Shardings,
    by_names,
    by_string,
    derived_shardings,
    inferred_shardings,
    make_rule,
    parse,
    words,
)


@overload
def partitioned(
    fn: Callable[..., Any],
    /,
    *,
    reduced: str | Sequence[str] = (),
    replicated: str | Sequence[str] = (),
    permuted: str | Sequence[str] = (),
    **sizes: int,
) -> Partitioned: ...
@overload
def partitioned(
    fn: str | None = None,
    /,
    *,
    reduced: str | Sequence[str] = (),
    replicated: str | Sequence[str] = (),
    permuted: str | Sequence[str] = (),
    **sizes: int,
) -> Callable[[Callable[..., Any]], Partitioned]: ...
def partitioned(
    fn: Callable[..., Any] | str | None = None,
    /,
    *,
    reduced: str | Sequence[str] = (),
    replicated: str | Sequence[str] = (),
    permuted: str | Sequence[str] = (),
    **sizes: int,
) -> Any:
    """Make an operation on sharded arrays from a function and a second one that each device runs on its shards.

    The function defines the operation, on unsharded arrays. The second function is decorated with the `per_shard` of
    the first. It must work for every sharding of its operands, with collectives by axis: `axonym.psum(x, "vocab")` sums
    over the devices that `vocab` is sharded over, and does nothing if it is replicated. If one function does both,
    there is no need for a second.

    A rule says which axes may be sharded; it follows from their names. An axis of operands and results is passed
    through, and may be sharded. One that only operands have is replicated, unless it is listed in `reduced`: then it
    may be sharded, and the function combines the shards. One that only results have is replicated, and so are scalars
    and axes without names.

    Operands are the positional arguments: named arrays, raw arrays, numbers, and trees of these. Keyword arguments are
    passed on unchanged and must be hashable.

    Instead of a function, you can pass the rule as a string; then `partitioned` is a decorator. The string has a term
    for each operand and result, `"batch vocab, -> batch k"`, with words for the axes of named arrays by name, and of
    raw arrays in order. `...` stands for all other axes, `(row col)` for one axis of several factors, and an empty term
    for a scalar.

    Arguments:
        fn: the function of unsharded arrays, or the rule as a string. Without it, `partitioned` is a decorator.
        reduced: axes that only operands have and that may be sharded, since the per-shard function combines shards,
            as with `psum`. Without that, results are wrong on a mesh: `axonym.testing.check_shard_invariance` shows it.
        replicated: axes that must be replicated although operands and results have them.
        permuted: axes that may be sharded, and whose shards devices exchange, as in a shift or a reversal.
        **sizes: the sizes of factors in a string that do not follow from the arrays.

    >>> @axn.partitioned(reduced="vocab")
    ... def log_normalizer(logits, temperature):
    ...     return axn.logsumexp(logits / temperature, "vocab")
    >>> @log_normalizer.per_shard
    ... def _(logits, temperature):
    ...     logits = logits / temperature
    ...     highest = axn.pmax(axn.max(logits, "vocab"), "vocab")
    ...     return axn.log(axn.psum(axn.sum(axn.exp(logits - highest), "vocab"), "vocab")) + highest
    >>> mesh, logits = axn.make_mesh({"model": 4}), axn.zeros({"batch": 2, "vocab": 8})
    >>> log_normalizer(axn.shard(logits, {"vocab": "model"}, mesh), 1.0)
    NamedArray(float32[batch=2], [2.0794 2.0794])
    >>> print(log_normalizer.explain(logits, 1.0))
    batch vocab, -> batch
    passed through: batch=2
    reduced: vocab=8
    """
    kinds = [(kind,) if isinstance(kind, str) else tuple(kind) for kind in (reduced, replicated, permuted)]
    if fn is None or isinstance(fn, str):
        return lambda decorated: Partitioned(_checked_function(decorated), fn, kinds, sizes)
    if sizes:
        listed = ", ".join(sizes)
        raise TypeError(
            f"partitioned: sizes are for the factors of a string, and there is no string, but {listed} is given."
        )
    return Partitioned(_checked_function(fn), None, kinds, sizes)


def _checked_function(fn: Any) -> Callable[..., Any]:
    if not callable(fn):
        raise TypeError(f"partitioned: expected a function, got {type(fn).__name__}.")
    return fn


class Partitioned:
    """An operation on sharded arrays. Made by `partitioned`, and called like the function that it was made of.

    >>> double = axn.partitioned(lambda x: x * 2)
    >>> double(axn.arange(axn.Axis("x", 3)))
    NamedArray(int32[x=3], [0 2 4])
    """

    def __init__(
        self, fn: Callable[..., Any], text: str | None, kinds: Sequence[tuple[str, ...]], sizes: dict[str, int]
    ):
        functools.update_wrapper(self, fn, updated=())
        self._what = getattr(fn, "__qualname__", type(fn).__name__).rpartition("<locals>.")[2]
        self._kinds = kinds
        listed = [f for kind in kinds for f in kind]
        if twice := sorted({f for f in listed if listed.count(f) > 1}):
            raise ValueError(
                f"{self._what}: {errors.quoted(twice)} is listed more than once in `reduced`, `replicated` and "
                "`permuted`. Each axis is one of these, or passed through."
            )
        self._expression = None if text is None else parse(self._what, text, sizes)
        self._sizes = sizes
        self._fn = fn
        self._per_shard = fn
        self._infer: Infer | None = None
        self._plans = FunctionCache()  # is collected with the operation

    def per_shard(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Set the function that each device runs on its shards.

        Arguments:
            fn: the function. It takes and returns shards of the operands and results of the operation.

        >>> @axn.partitioned(reduced="x")
        ... def total(x):
        ...     return axn.sum(x, "x")
        >>> @total.per_shard
        ... def _(x):
        ...     return axn.psum(axn.sum(x, "x"), "x")
        >>> total(axn.shard(axn.arange(axn.Axis("x", 4)), {"x": "data"}, axn.make_mesh({"data": 2})))
        NamedArray(int32[], 6)
        """
        self._per_shard = _checked_function(fn)
        self._plans.clear()
        return fn

    def infer_sharding(self, fn: Infer) -> Infer:
        """Set the function that decides the sharding of the operation, if it does not follow from the rule.

        Without it, axes are sharded as in the operands, and where these disagree, as in the largest. With it, operands
        are resharded to what the function returns, and the results have that sharding.

        Arguments:
            fn: the function. It takes the derived mesh axes of each axis, the partition specs of the operands, and the
                sizes of the mesh axes. It returns the mesh axis, or several, of each axis that is sharded.

        >>> @axn.partitioned(reduced="x")
        ... def total(x):
        ...     return axn.psum(axn.sum(x, "x"), "x")
        >>> @total.infer_sharding
        ... def over_all(derived, operands, mesh):
        ...     return {"x": tuple(mesh)}
        >>> with axn.set_mesh(axn.make_mesh({"data": 2, "model": 2})):
        ...     jax.jit(total)(axn.shard(axn.arange(axn.Axis("x", 4)), {"x": "data"}))
        NamedArray(int32[], 6)
        """
        self._infer = _checked_function(fn)
        self._plans.clear()
        return fn

    def explain(self, *args: Any, **options: Any) -> PartitioningRule:
        """Return the partitioning rule for operands, abstract or not; printed, it reads like the string of a rule.

        >>> @axn.partitioned
        ... def scaled(x, by):
        ...     return x * by
        >>> print(scaled.explain(axn.ones({"batch": 2, "embed": 3}), 2.0))
        batch embed, -> batch embed
        passed through: batch=2, embed=3
        """
        return self._planned(args, options)[0].operation.rule

    def __call__(self, *args: Any, **options: Any) -> Any:
        plan, arrays = self._planned(args, options)
        return plan.results.spec.unflatten(_run_operation(plan, arrays))

    def _planned(self, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[_PlannedOperation, list[Any]]:
        try:
            arrays, spec = flatten_arrays(args, _ARRAYS)
        except ValueError as e:
            raise ValueError(f"{self._what}: {e}") from None
        for i, slot in enumerate(spec.slots):
            if isinstance(slot, StaticLeaf):
                value = raw(slot.value)
                raise TypeError(
                    f"{self._what}: operand {i} should be an array or a number, got {type(value).__name__}. Pass "
                    "arguments that are not operands by keyword."
                )
        arrays = _of_own_dtype(arrays)
        abstract = tuple([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays])
        handed_on = tuple(
            [(k, StaticLeaf(x).checked(f"{self._what}: `{k}` is handed on as it is; it")) for k, x in options.items()]
        )
        key = spec, abstract, handed_on
        return self._plans.find(key, (), lambda: self._plan(*key)), arrays

    def _plan(
        self, spec: TreeSpec, abstract: Sequence[jax.ShapeDtypeStruct], handed_on: tuple[tuple[str, StaticLeaf], ...]
    ) -> _PlannedOperation:
        what, options = self._what, {k: leaf.value for k, leaf in handed_on}
        results = _Results()

        def call(fn: Callable[..., Any], arrays: Sequence[Any]) -> tuple[list[Any], TreeSpec]:
            with active_settings.activate(None):  # the rule decides the sharding of axes
                return flatten_arrays(fn(*spec.unflatten(arrays), **options), _ARRAYS)

        def unsharded(*arrays: Any) -> Arrays:
            found, results.spec = call(self._fn, arrays)
            for leaf in results.spec.static_leaves:
                raise TypeError(f"{what}: results are arrays or numbers, got {type(leaf.value).__name__}.")
            return tuple(map(jnp.asarray, found))

        def per_shard(shapes: Sequence[tuple[int, ...]], *arrays: Any) -> Arrays:
            found, out = call(self._per_shard, arrays)
            if out.structure != results.spec.structure:
                raise ValueError(
                    f"{what}, per shard: the result is {out.structure}, but the function of unsharded arrays returns "
                    f"{results.spec.structure}."
                )
            expected = zip(found, out.names, results.spec.names, shapes, results.dtypes, strict=True)
            return tuple(
                _as_expected(f"{what}, per shard, result {i}", x if n is None else wrap(x, n), names, shape, dtype)
                for i, (x, n, names, shape, dtype) in enumerate(expected)
            )

        known = [n for names in spec.names for n in names or ()]
        shapes = _trace_result_types(
            what, unsharded, abstract, known + (words(self._expression) if self._expression else [])
        )
        results.dtypes = [x.dtype for x in shapes]
        described = [NamedShape(n, x.shape) for n, x in zip(spec.names, abstract, strict=True)]
        found = [NamedShape(n, tuple(x.shape)) for n, x in zip(results.spec.names, shapes, strict=True)]
        if self._expression is None:
            terms = by_names(what, described, found)
        else:
            terms = by_string(self._expression, self._sizes, described, found)
        reduced, replicated, permuted = self._kinds
        rule = make_rule(what, terms.operands, terms.results, terms.sizes, reduced, replicated, permuted, terms.groups)
        operation = PartitionedOperation(what, rule, unsharded, per_shard, self._infer)
        if self._per_shard is not self._fn:  # so its errors come earlier than from the compiler
            around = current_mesh()
            mesh = NO_MESH if around is None else all_manual(around)
            with suppress(NameError):  # it uses the axis of a mesh that is not active yet
                _trace_result_types(f"{what}, per shard", operation.make_per_shard(mesh, {}), abstract, (), mesh)
        by_partitioner = jax.jit(functools.partial(_left_to_partitioner, operation), inline=INLINE)
        return _PlannedOperation(operation, results, by_partitioner)


# --- planning ---


class _Results:
    """The structure and dtypes of the results, from tracing the function of unsharded arrays."""

    spec: TreeSpec
    dtypes: list[Any]


@dataclasses.dataclass(frozen=True)
class _PlannedOperation:
    """An operation for operands of certain names, shapes and types."""

    operation: PartitionedOperation
    results: _Results
    by_partitioner: Callable[..., Arrays]


def _trace_result_types(
    what: str, fn: Callable[..., Any], abstract: Sequence[Any], known: Sequence[str], mesh: AbstractMesh = NO_MESH
) -> Sequence[Any]:
    """Trace a function of unsharded arrays, and return the types of its results."""
    environment = interned(frozenset(ArgumentAxis(w, 1, 1, ()) for w in known), checked=False, any_sharding=True)

    def in_environment(*arrays: Any) -> Any:
        if not known:
            return fn(*arrays)
        with activate(environment):
            return fn(*arrays)

    with jax.sharding.use_abstract_mesh(mesh):
        program = jax.make_jaxpr(in_environment)(*abstract)
    if any(isinstance(c, Tracer) for c in program.consts):
        raise ValueError(
            f"{what}: the function uses an array of the traced function around it, whose sharding is not known. Make "
            "it an operand."
        )
    return program.out_avals


# --- running ---


def _run_operation(plan: _PlannedOperation, arrays: Sequence[Any]) -> Arrays:
    operation = plan.operation
    around = jax.sharding.get_abstract_mesh()
    if around.manual_axes and set(around.manual_axes) == set(around.axis_names):
        return operation.call_unsharded(*arrays)
    mesh: AnyMesh | None = around
    if around.empty:  # then the mesh in the types of the operands, with its devices if they are known
        mesh = explicit_mesh(arrays)
        if mesh is not None and not any(isinstance(x, Tracer) for x in arrays):
            meshes = (x.sharding.mesh for x in arrays if isinstance(x.sharding, NamedSharding))
            mesh = next(m for m in meshes if has_explicit(m))
    if mesh is None or not {AxisType.Explicit, AxisType.Manual} & set(mesh.axis_types):
        return plan.by_partitioner(*arrays)
    shardings = _known_shardings(operation, mesh, arrays)
    if around.manual_axes:
        call = jax.custom_jvp(functools.partial(per_device, operation, mesh, shardings))

        @call.defjvp
        def refused(primals: Arrays, tangents: Arrays) -> Any:  # JAX's own error is unreadable
            raise ValueError(
                f"{operation.what}: inside a shard_map over some mesh axes, the operation is a shard_map over the "
                "others, and JAX cannot differentiate one inside another. Let the outer one handle all mesh axes, or "
                "none."
            )

        return call(*arrays)
    # In a traced function, operands can be on a mesh that is not active.
    with (
        jax.sharding.use_abstract_mesh(mesh) if mesh is not around and isinstance(mesh, AbstractMesh) else nullcontext()
    ):
        return per_device(operation, mesh, shardings, *arrays)


def _left_to_partitioner(operation: PartitionedOperation, *arrays: Any) -> Arrays:
    settings, mesh = active_settings.active_settings(), current_mesh()
    call = jax.custom_jvp(functools.partial(by_partitioner, operation, mesh))

    @functools.partial(call.defjvp, symbolic_zeros=True)
    def differentiated(primals: Arrays, tangents: Arrays) -> tuple[Arrays, Arrays]:
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

        def of_moving(*xs: Any) -> Arrays:
            given = list(primals)
            for i, x in zip(moving, xs, strict=True):
                given[i] = x
            if mesh is None:  # there is none, or only the compiler knows it
                return operation.call_unsharded(*given)
            with active_settings.activate(settings):
                shardings = _known_shardings(operation, mesh, given)
            return per_device(operation, mesh, shardings, *given)

        values, slopes = jax.jvp(of_moving, tuple(primals[i] for i in moving), tuple(tangents[i] for i in moving))
        # In jit(vmap), JAX takes for granted that the mapped axis is where the operation has it, which is the first: as
        # `expand_dims` puts it.
        return tuple([jax.lax.squeeze(jnp.expand_dims(x, 0), (0,)) for x in values]), slopes

    return call(*arrays)


def _known_shardings(operation: PartitionedOperation, mesh: AnyMesh, arrays: Sequence[Any]) -> Shardings:
    """Return the sharding of each factor if it must be known: from types, and on Auto mesh axes from the mapping."""
    auto = axes_of_type(mesh, AxisType.Auto)
    unmapped = not active_settings.active_mapping()
    if unmapped and operation.infer is None and any(mesh.shape[a] > 1 for a in auto):
        over = ", ".join(f"{a}={mesh.shape[a]}" for a in auto)
        reason = (
            "the operation is differentiated"
            if len(auto) == len(mesh.axis_names)
            else "other mesh axes are Explicit, or manual"
        )
        raise ValueError(
            f"{operation.what}: how are operands sharded over mesh axes ({over})? As {reason}, this is not left to the "
            "partitioner, and no mapping is active. Activate one with `axonym.axis_mapping`; an axis that goes to "
            "None is replicated."
        )
    rule, found = operation.rule, {}
    for i in sorted(range(len(arrays)), key=lambda i: -np.prod(jnp.shape(arrays[i]), dtype=float)):
        axes = (next((n for n, factors in rule.groups.items() if factors == d), d[0]) for d in rule.operands[i])
        found[i] = sharded_over(operation.what, axes, arrays[i], mesh, AxisType.Auto)
    derived = derived_shardings(rule, mesh.shape, [(rule.operands[i], entries) for i, entries in found.items()])
    of_operands = [entries for _, entries in sorted(found.items())]
    return inferred_shardings(operation.what, rule, mesh.shape, operation.infer, derived, of_operands)


# --- operands and results ---


_ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex, jax.ShapeDtypeStruct)
_FAMILIES = (jnp.floating, jnp.integer, jnp.complexfloating)


def _of_own_dtype(operands: Sequence[Any]) -> list[Any]:
    """Convert the operands to arrays; numbers without a dtype of their own get the dtype of the others.

    Custom partitioning would lose their weak types.
    """
    kinds = [x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x) for x in operands]
    strong = [k.dtype for k in kinds if not k.weak_type]
    arrays = []
    for x, kind in zip(operands, kinds, strict=True):
        family = next((f for f in _FAMILIES if jnp.issubdtype(kind.dtype, f)), None)
        others = [d for d in strong if family is not None and jnp.issubdtype(d, family)] if kind.weak_type else []
        dtype = functools.reduce(jnp.promote_types, others) if others else kind.dtype
        if isinstance(x, jax.ShapeDtypeStruct):
            arrays.append(jax.ShapeDtypeStruct(x.shape, dtype))
        else:
            arrays.append(jnp.asarray(x, dtype) if kind.weak_type or not isinstance(x, jax.Array) else x)
    return arrays


def _as_expected(what: str, x: Any, names: Names | None, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Convert a result of the per-shard function to the layout and dtype of the unsharded result."""
    expected = f"{dtype}{list(shape) if names is None else errors.describe_axes(names, shape)}"
    if isinstance(x, NamedArray):
        got = f"the named array {describe_array(x)}"
    else:
        got = f"the raw array {jnp.result_type(x)}{list(jnp.shape(x))}"
    if isinstance(x, NamedArray) != (names is not None) or (names is not None and set(x.names) != set(names)):
        raise ValueError(f"{what}: expected {expected}, got {got}.")
    array = jnp.asarray(x) if names is None else transpose_to(jnp.asarray(x.array), x.names, names)
    if jnp.shape(array) != shape:
        hint = " A shard has the size of the axis in the operands, divided by the devices that it is sharded over."
        raise ValueError(f"{what}: expected {expected}, got {got}.{hint}")
    if array.dtype != dtype and not jax.typeof(array).weak_type:
        raise ValueError(f"{what}: expected {expected}, got {got}. Both functions must give one dtype.")
    return array.astype(dtype)
