"""Trace a step once, without a mesh or mapping, and record by name what devices would exchange under a mapping.

Every axis of every array in the trace gets the name that it has in the model. Names come with the arguments, and are
followed through the operations; the scopes of named operations (see `distribution/operation_scope`) name new axes.
The cost of sums, look-ups and gathers of parameters is then computed from these names: see `_by_names`.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

try:
    from jax.interpreters.partial_eval import dce_jaxpr
except ImportError:  # then unused operations are counted, too
    dce_jaxpr = None

from ..core.tree_spec import PROGRAM_ARRAYS, flatten_arrays
from ..distribution.active_settings import activate
from ..distribution.mesh_axes import NO_MESH
from ..names.distributing import DistributedFunction
from ..sharding.leaves import leaves_of
from . import _scopes
from ._arguments import step_name
from ._name_walk import Around, NameWalk, shape_of
from ._named_dims import by_scope, joined_axes, moved, moved_rows, with_names
from ._named_events import (
    Dims,
    Lookup,
    NamedTrace,
    NotKnown,
    Occurrence,
    Open,
    PerDevice,
    Renamed,
    Sum,
    Together,
    Use,
    Value,
)

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn


def named_trace(step: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> NamedTrace:
    """Trace a step with abstract arguments."""
    given, static = flatten_arrays((args, dict(kwargs)), PROGRAM_ARRAYS, named=False)
    returned: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        args, kwargs = static.unflatten(arrays)
        leaves = leaves_of(step(*args, **kwargs))[0]
        found = [(getattr(x.value, "array", x.value), x.names) for x in leaves]
        found = [(x, names) for x, names in found if isinstance(x, PROGRAM_ARRAYS)]
        returned[:] = [names for _, names in found]
        return [x for x, _ in found]

    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given]
    try:
        with activate(None), jax.sharding.use_abstract_mesh(NO_MESH), warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*(nothing was placed|no mesh is active)")
            # They compute all the same.
            warnings.filterwarnings("ignore", message=r"(named_jit|distribute)\(.*no mesh is active")
            closed = jax.make_jaxpr(flat)(*abstract)
            named = step.named(args, kwargs) if isinstance(step, DistributedFunction) else (args, dict(kwargs))
            # Operations that no result needs are not compiled, such as a loss if only its gradients are returned.
            jaxpr = closed.jaxpr
            if dce_jaxpr is not None:
                jaxpr, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    except (RuntimeError, UserWarning) as e:
        if "mesh" not in str(e):
            raise
        raise NotKnown(f"explain: by='names' traces a step without a mesh, which it asks for: {e}") from e
    walk = _Walk()
    arguments = _arguments(walk, jaxpr, named)
    whole = _Walk()
    walk.given = whole.given = {n for x in arguments for n, _ in x.dims if n is not None}
    for own, x in zip(returned, whole.run(closed.jaxpr, arguments, Around()), strict=True):
        if own is not None:
            whole.differ(whole.place(Around()), x.dims, tuple(zip(own, (n for _, n in x.dims), strict=True)))
    # No result may need the operation that renames an axis, but its gradient.
    walk.events += [event for event in whole.events if isinstance(event, Renamed)]
    results = walk.run(jaxpr, arguments, Around())
    exchanged = walk.close_dispatches()
    kept = tuple(walk.kept)
    events = tuple(dict.fromkeys(walk.events))
    return NamedTrace(
        step_name(step), events, tuple(arguments), tuple(results), kept, walk.unnamed, tuple(walk.uncounted),
        walk.grouped, frozenset(exchanged), walk.joined,
    )  # fmt: skip


def _arguments(walk: _Walk, jaxpr: Jaxpr, named: Any) -> list[Value]:
    """Return the arguments of a program, with the names in a tree of them."""
    names = []
    for leaf in leaves_of(named)[0]:
        if leaf.shape is None:
            continue
        spec = getattr(getattr(leaf.value, "sharding", None), "spec", ())
        if leaf.names is None and any(entry is not None for entry in spec):
            raise NotKnown(f"explain: by='names' cannot follow an array without names that is sharded by {spec}.")
        names.append(tuple(None if n == "_" else n for n in leaf.names or (None,) * len(leaf.shape)))
    return [
        walk.value(var.aval, tuple(zip(own, shape_of(var), strict=True)))
        for var, own in zip(jaxpr.invars, names, strict=True)
    ]


class _Equation(NamedTuple):
    """An equation whose operands have the names that its named operation uses."""

    eqn: JaxprEqn
    operands: list[Value]
    place: Occurrence

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params

    @property
    def operation(self) -> _scopes.ScopedOperation | None:
        return self.place.operation

    @property
    def aval(self) -> Any:
        return self.eqn.outvars[0].aval

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.eqn.outvars[0])


_LAYOUT = {"convert_element_type", "copy", "reduce_precision", "stop_gradient", "optimization_barrier", "name"}
_LAYOUT |= {"transpose", "broadcast_in_dim", "reshape", "squeeze", "expand_dims"}
"""Primitives whose result is their operand in another layout."""
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"}
_UNCOUNTED = {"conv_general_dilated", "shard_map", "pallas_call", "custom_partitioning"}
"""Primitives that may multiply, and whose flops are not known."""
_ALONG = {"concatenate": "dimension", "split": "axis", "cumsum": "axis", "cumprod": "axis", "cummax": "axis"}
_ALONG |= {"cummin": "axis", "cumlogsumexp": "axis", "sort": "dimension", "rev": "dimensions"}


_ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
    cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow is_finite le
    lgamma log log1p logistic lt max min mul ne neg nextafter not one_minus_square or polygamma population_count pow
    real regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign
    sin sinh sqrt square sub tan tanh xor zeta""".split()
)


class _Walk(NameWalk):
    """Records what devices exchange for each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.uncounted: dict[str, None] = {}
        self.grouped = False
        self._dispatches: dict[_scopes.ScopedOperation, tuple[Occurrence, set[str]]] = {}
        """Each dispatch of rows to experts, with the names of the groups in its products."""

    # --- operations ---

    def _operation(self, eqn: JaxprEqn, operands: list[Value], around: Around) -> list[Value]:
        dispatch = _scopes.dispatch(around.scope)
        if dispatch is None:
            return self._usual(eqn, operands, around)
        self._dispatches.setdefault(dispatch, (self.place(around, dispatch), set()))
        found = self._among_rows(dispatch, eqn, operands) or self._usual(eqn, operands, around)
        return [self._joined_rows(dispatch, x) for x in found]

    def _usual(self, eqn: JaxprEqn, operands: list[Value], around: Around) -> list[Value]:
        operation = _scopes.operation(around.scope)
        place = dataclasses.replace(self.place(around, operation), avoidable=self._avoidable)
        step = _Equation(eqn, self._renamed(operands, operation, place), place)
        rule = _RULES.get(step.name)
        found = None if rule is None else rule(self, step)
        if found is None:
            self._open(place, step.name, [d for x in step.operands for d in x.dims])
            return self._all_alike(step, step.operands)
        return found

    # --- rules for primitives: each returns the results, or None if it does not know the names ---

    def _dot_general(self, step: _Equation) -> list[Value]:
        return [self._product(step.place, step.params["dimension_numbers"], step.operands, step.aval)]

    def _ragged_dot_general(self, step: _Equation) -> list[Value]:
        return [
            self._grouped_product(step.place, step.params["ragged_dot_dimension_numbers"], step.operands, step.aval)
        ]

    def _reduction(self, step: _Equation) -> list[Value]:
        (x,), axes = step.operands, step.params["axes"]
        # The compiler does not sum an array along an axis that broadcasting added.
        gone = tuple(d for d in (x.dims[i] for i in axes) if d in x.base)
        result = self.value(step.aval, tuple(d for i, d in enumerate(x.dims) if i not in axes))
        self.events.append(Sum(step.place, result, self._summed(step.place, gone), x.dims, False))
        return [result]

    def _extreme_position(self, step: _Equation) -> list[Value]:
        (at,), (x,) = step.params["axes"], step.operands
        self._open(step.place, step.name, x.dims[at : at + 1])
        return [self.value(step.aval, (*x.dims[:at], *x.dims[at + 1 :]))]

    def _top_k(self, step: _Equation) -> list[Value]:
        at, dims = step.params.get("axis", len(step.shape) - 1), [*step.operands[0].dims]
        self._open(step.place, step.name, dims[at : at + 1])
        dims[at] = None, step.shape[at]
        return [self.value(v.aval, by_scope(tuple(dims), step.operation)) for v in step.eqn.outvars]

    def _gather(self, step: _Equation) -> list[Value] | None:
        looked = self._look_up(step.place, step.params, step.operands, step.aval)
        return self._batched(step, step.operands[0]) if looked is None else [looked]

    def _scatter_add(self, step: _Equation) -> list[Value] | None:
        updated = self._update(step.place, step.params, step.operands)
        if updated is not None:
            return [updated]
        found = self._batched(step)
        if found is not None and step.operation is not None and step.operation.name == "top_k":
            self.events.append(PerDevice(step.place, found[0]))
        return found

    def _batched(self, step: _Equation, along: Value | None = None) -> list[Value] | None:
        """Trace a gather or scatter with batch axes, which needs the other axes of the array, or else of the result."""
        batch = step.params["dimension_numbers"].operand_batching_dims
        if not batch:
            return None
        result = self._alike(step.aval, [], step.operation)
        self._open(step.place, step.name, [d for i, d in enumerate((along or result).dims) if i not in batch])
        return [result]

    def _relaid(self, step: _Equation) -> list[Value] | None:
        if len(step.eqn.outvars) != 1:
            return None
        x = step.operands[0]
        dims = moved(step.name, step.params, x.dims, step.shape)
        if dims is None:
            self._open(step.place, step.name, x.dims)
            return self._all_alike(step, step.operands)
        dims = by_scope(dims, step.operation)
        found = self.value(step.aval, dims, x)
        return [found if found.names else self.value(step.aval, dims)]  # if not, the operand has none either

    def _new(self, step: _Equation) -> list[Value]:
        return [self.value(v.aval, by_scope(self.value(v.aval).dims, step.operation)) for v in step.eqn.outvars]

    def _along(self, step: _Equation) -> list[Value]:
        along = step.params[_ALONG[step.name]]
        for i in along if isinstance(along, tuple) else (along,):
            self._open(step.place, step.name, step.operands[0].dims[i : i + 1])
        return self._all_alike(step, step.operands)

    def _unstack(self, step: _Equation) -> list[Value]:
        (x,), at = step.operands, step.params["axis"]
        self._open(step.place, step.name, x.dims[at : at + 1])
        left = (*x.dims[:at], *x.dims[at + 1 :])
        return [self.value(v.aval, by_scope(left, step.operation)) for v in step.eqn.outvars]

    def _stack(self, step: _Equation) -> list[Value]:
        at, named = step.params["axis"], self._alike(step.eqn.invars[0].aval, step.operands, step.operation).dims
        dims = (*named[:at], (None, len(step.operands)), *named[at:])
        return [self.value(step.aval, by_scope(dims, step.operation))]

    def _sliced(self, step: _Equation) -> list[Value]:
        x = step.operands[0]
        new = [n for _, n in step.operands[1].dims] if step.name == "dynamic_update_slice" else step.shape
        self._open(step.place, step.name, [d for d, n in zip(x.dims, new, strict=True) if d[1] != n])
        return self._all_alike(step, [x])

    def _elementwise(self, step: _Equation) -> list[Value]:
        results = self._all_alike(step, step.operands)
        for x, r in itertools.product(step.operands, results):
            if len(x.dims) == len(r.dims):
                pairs = zip(x.dims, r.dims, strict=True)
                self.differ(step.place, x.dims, tuple((n if m == size else None, m) for (_, m), (n, size) in pairs))
        return [self._noted(step.place, step.operands, r) for r in results]

    def _not_counted(self, step: _Equation) -> None:
        self.uncounted.setdefault(step.name)

    def _open(self, place: Occurrence, what: str, dims: Sequence[tuple[str | None, int]]) -> None:
        names = frozenset(n for n, size in dims if n is not None and size > 1 and n not in self.joined)
        if (dispatch := _scopes.dispatch(place.scope)) is not None:
            names -= {a.name for a in dispatch.operands[0]}
        if names:
            self.events.append(Open(place, what, names))

    def _noted(self, place: Occurrence, operands: Sequence[Value], result: Value, product: bool = False) -> Value:
        """Record the operands that an operation uses, and return its result."""
        for x in operands:
            # In a product, a broadcast operand counts with all its axes.
            dims = [d for other in operands if other is not x for d in (other.dims if product else other.base)]
            others = frozenset(n for n, _ in dims if n is not None)
            if x.names and not others.issubset(x.names):
                constant = x.origin in self._constants
                self.events.append(Use(dataclasses.replace(place, avoidable=place.avoidable or constant), x, others))
        names = tuple(dict.fromkeys(n for n, _ in result.dims if n is not None))
        if len(names) > 1:
            self.events.append(Together(place, names))
        return result

    def _product(self, place: Occurrence, numbers: Any, operands: Sequence[Value], aval: Any) -> Value:
        (left_summed, right_summed), (left_batch, right_batch) = numbers
        left, right = operands
        free = [d for i, d in enumerate(left.dims) if i not in (*left_summed, *left_batch)]
        free += [d for i, d in enumerate(right.dims) if i not in (*right_summed, *right_batch)]

        def either(a: Sequence[int], b: Sequence[int]) -> Dims:
            pairs = [(left.dims[i], right.dims[j]) for i, j in zip(a, b, strict=True)]
            self.differ(place, tuple(x for x, _ in pairs), tuple(y for _, y in pairs))
            return tuple(x if x[0] is not None else y for x, y in pairs)

        batch, summed = either(left_batch, right_batch), either(left_summed, right_summed)
        if any(n is None and size > 1 for n, size in (*batch, *summed, *free)):
            self.unnamed += 1
        result = self._noted(place, operands, self.value(aval, (*batch, *free)), product=True)
        self.events.append(Sum(place, result, self._summed(place, summed), (*batch, *free, *summed), True))
        return result

    # --- experts ---

    def _grouped_product(self, place: Occurrence, numbers: Any, operands: list[Value], aval: Any) -> Value:
        """Trace a product of groups of rows, each with the matrix of its group."""
        self.grouped = True
        ((left_summed, right_summed), (left_batch, right_batch)) = numbers.dot_dimension_numbers
        left, right = operands[:2]
        ragged, groups = numbers.lhs_ragged_dimensions, tuple(numbers.rhs_group_dimensions)
        batch, summed = (
            tuple(
                x if x[0] is not None else y
                for x, y in ((left.dims[i], right.dims[j]) for i, j in zip(*pair, strict=True))
            )
            for pair in ((left_batch, right_batch), (left_summed, right_summed))
        )
        free = [d for i, d in enumerate(left.dims) if i not in (*left_summed, *left_batch)]
        free += [d for i, d in enumerate(right.dims) if i not in (*right_summed, *right_batch, *groups)]
        made = [] if groups else [(None, aval.shape[0])]
        dims = by_scope((*made, *batch, *free), place.operation)
        of_groups = [right.dims[i] for i in groups] or list(dims[: len(made)])
        dispatch = _scopes.dispatch(place.scope)
        if dispatch is None:  # the compiler or per-device code decides how rows in groups are sharded
            self._open(place, "a grouped product", [*(left.dims[i] for i in ragged), *of_groups])
        else:
            self._dispatches[dispatch][1].update(n for n, _ in of_groups if n is not None)
        result = self._noted(place, [left, right], self.value(aval, dims), product=True)
        if dispatch is not None and made:
            # The dtype in which gradients of experts are summed.
            result = dataclasses.replace(result, dtype=np.promote_types(np.float32, result.dtype))
        self.events.append(Sum(place, result, self._summed(place, summed), (*batch, *free, *summed), True))
        return result

    def _among_rows(
        self, dispatch: _scopes.ScopedOperation, eqn: JaxprEqn, operands: list[Value]
    ) -> list[Value] | None:
        """Trace an operation that moves rows to or from experts; return None for others."""
        name = eqn.primitive.name
        counts = name == "scatter-add" and operands[0].dtype.kind in "iu"
        found = None
        if name in ("reshape", "gather", "scatter", "scatter-add"):
            found = moved_rows(dispatch, operands[0].dims, shape_of(eqn.outvars[0]))
        if found is None:
            return [self.value(eqn.outvars[0].aval)] if counts else None
        dims, joined = found
        self.joined |= joined
        return [self.value(eqn.outvars[0].aval, dims)]

    def _joined_rows(self, dispatch: _scopes.ScopedOperation, x: Value) -> Value:
        """Name the first axis of an array if it contains all rows."""
        name, rows = joined_axes(dispatch.operands[0])
        if not x.dims or x.dims[0] != (None, rows):
            return x
        self.joined[name] = tuple(a.name for a in dispatch.operands[0])
        return with_names(x, ((name, rows), *x.dims[1:]))

    def _summed(self, place: Occurrence, dims: Dims) -> Dims:
        """Leave out rows from the axes that an operation sums over, if each device sums its own."""
        if place.phase == "backward" or (dispatch := _scopes.dispatch(place.scope)) is None:
            return dims
        rows = {a.name for a in dispatch.operands[0]}
        return tuple(d for d in dims if d[0] not in self.joined and d[0] not in rows)

    def close_dispatches(self) -> set[str]:
        """Record the axes over which rows are exchanged between experts, and return them."""
        found: set[str] = set()
        for dispatch, (place, groups) in self._dispatches.items():
            of_x = {a.name for term in dispatch.operands[:2] for a in term}
            own = {a.name for term in dispatch.operands[2:] for a in term}
            along = frozenset(groups or own - of_x)
            found |= along
            self.events.append(Open(place, "an exchange of rows", along))
        return found

    def _look_up(self, place: Occurrence, params: Any, operands: Sequence[Value], aval: Any) -> Value | None:
        """Trace a look-up of complete rows of a table, along one axis."""
        numbers, (table, indices) = params["dimension_numbers"], operands
        if len(numbers.start_index_map) != 1 or numbers.collapsed_slice_dims != numbers.start_index_map:
            return None
        (at,) = numbers.start_index_map
        wholes = [n == size for i, (n, (_, size)) in enumerate(zip(params["slice_sizes"], table.dims, strict=True))
                  if i != at]  # fmt: skip
        if numbers.operand_batching_dims or not all(wholes) or indices.dims[-1][1] != 1:
            return None
        columns = iter(d for i, d in enumerate(table.dims) if i != at)
        rows = iter(indices.dims[:-1])
        dims = tuple(next(columns) if i in numbers.offset_dims else next(rows) for i in range(len(aval.shape)))
        result = self.value(aval, dims)
        self.events.append(Lookup(place, table, indices, result, table.dims[at], False))
        return result

    def _update(self, place: Occurrence, params: Any, operands: Sequence[Value]) -> Value | None:
        """Trace the gradient of a look-up."""
        numbers, (table, indices, updates) = params["dimension_numbers"], operands
        if len(numbers.scatter_dims_to_operand_dims) != 1 or numbers.operand_batching_dims:
            return None
        (at,) = numbers.scatter_dims_to_operand_dims
        if numbers.inserted_window_dims != (at,) or indices.dims[-1][1] != 1:
            return None
        columns = iter(updates.dims[i] for i in numbers.update_window_dims)
        dims = tuple(d if i == at else next(columns) for i, d in enumerate(table.dims))
        dims = by_scope(dims, place.operation)
        result = Value(dims, table.dtype, next(self._numbers), dims)
        self.events.append(Lookup(place, result, indices, updates, dims[at], True))
        return result

    def _all_alike(self, step: _Equation, operands: Sequence[Value]) -> list[Value]:
        return [self._alike(v.aval, operands, step.operation) for v in step.eqn.outvars]

    def _alike(self, aval: Any, operands: Sequence[Value], operation: _scopes.ScopedOperation | None) -> Value:
        """Return a result that has the axes of the operands."""
        names: list[str | None] = [None] * len(aval.shape)
        for x in operands:
            if len(x.dims) == len(names):
                names = [a if a is not None or size != n else b
                         for a, (b, size), n in zip(names, x.dims, aval.shape, strict=True)]  # fmt: skip
        return self.value(aval, by_scope(tuple(zip(names, aval.shape, strict=True)), operation))


_RULES: dict[str, Callable[[_Walk, _Equation], list[Value] | None]] = {
    "dot_general": _Walk._dot_general,
    "ragged_dot_general": _Walk._ragged_dot_general,
    **dict.fromkeys(_REDUCTIONS, _Walk._reduction),
    **dict.fromkeys(("argmax", "argmin"), _Walk._extreme_position),
    "top_k": _Walk._top_k,
    "gather": _Walk._gather,
    "scatter-add": _Walk._scatter_add,
    **dict.fromkeys(_LAYOUT, _Walk._relaid),
    **dict.fromkeys(("iota", "random_bits", "random_wrap", "random_unwrap", "random_seed"), _Walk._new),
    **dict.fromkeys(_ALONG, _Walk._along),
    "unstack": _Walk._unstack,
    "stack": _Walk._stack,
    **dict.fromkeys(("slice", "pad", "dynamic_slice", "dynamic_update_slice"), _Walk._sliced),
    **dict.fromkeys(_ELEMENTWISE, _Walk._elementwise),
    **dict.fromkeys(_UNCOUNTED, _Walk._not_counted),
}
"""For each primitive, the rule that names its results after its operands, and records what devices exchange for it."""
