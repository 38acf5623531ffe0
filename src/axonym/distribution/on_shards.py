"""Run a program that was traced for complete axes on the shards of a device.

Python sees complete axes only: code is traced once, with the true sizes. Each of its operations is then run on shards
by its rule, see `axonym.core.operation_rules`. An operation that needs more than shards, or has no rule, is refused
with the line of the user, or gets complete operands. So a missing rule costs a refusal, never a value.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend import core as jex

from ..core.jax_versions import evaluated, program_of, scan_operands, traced_operation, varying_axes
from ..core.operation_rules import OperationRule, rule_of
from ..core.source_lines import frames_of, source
from .mesh_axes import Axes
from .per_device import varying_over

Layout = tuple[Axes, ...]


class NeedsCompleteAxes(ValueError):
    """Raised with the reason why code cannot be computed from shards, the axis of which it needs more, and the mesh
    axes that this axis is cut over."""

    def __init__(self, reason: str, axis: str = "", over: Axes = ()):
        super().__init__(reason)
        self.axis, self.over = axis, over


class Shard(NamedTuple):
    """An array of which this device has a shard: each dimension is cut over some mesh axes, or complete."""

    here: Any
    over: Layout
    own: frozenset[str] = frozenset()
    """The mesh axes along which devices have other examples: it is complete here, and not equal there."""
    alike: frozenset[int] = frozenset()
    """The complete dimensions of which all positions are alike, since broadcasting added them."""
    sums: frozenset[str] = frozenset()
    """The mesh axes over which its values are still to be added up."""


ROWS, GROUPS, SIZES, MICROBATCHES = "#rows", "#groups", "#sizes", "#microbatches"
"""The axes of what `dispatch` gives its function: rows, experts, and numbers of rows. Devices do not have shards of
them in a row. And the microbatches of a pipeline, which a device has one after the other. They are none of the mesh, so
nothing can be exchanged along them."""

_COLLECTIVES = frozenset(
    """psum psum_invariant pmax pmin ppermute pbroadcast pcollective all_reduce all_gather reduce_scatter all_to_all
    all_gather_invariant ragged_all_to_all axis_index""".split()
)
_CALLBACKS = frozenset(("pure_callback", "io_callback"))
_CHANGES_NOTHING = frozenset("pvary pcast reshard mesh_cast sharding_constraint layout_constraint".split())
_PASSES_SUMS = frozenset("jit pjit closed_call core_call checkpoint remat remat2 scan while cond".split())
_SIZES_OF = {"shape": False, "new_sizes": False, "limit_indices": True, "slice_sizes": True}
"""The parameters that are sizes: whether of the operand, or of the result."""


class OnShards:
    """Runs programs on shards.

    Arguments:
        sizes: the number of shards over each mesh axis.
        names: the axis that is cut over some mesh axes, for messages.
        context: what a derivative is traced in.
        sums: whether sums over cut axes stay partial for as long as they can: see `Shard.sums`.
        gathers: whether an operation that needs complete axes gets them; it is refused otherwise.
        places: the number of the shard that is here, along axes that are none of the mesh.
        rows: the number of all rows. Those here are no neighbours of each other, so they cannot be divided further.
    """

    def __init__(
        self,
        sizes: Mapping[str, int | Fraction],
        names: Mapping[Axes, str],
        context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        sums: bool = False,
        gathers: bool = False,
        places: Mapping[str, Any] = MappingProxyType({}),
        rows: int = 1,
    ):
        self.sizes, self._names, self._context, self._sums, self._gathers = sizes, names, context, sums, gathers
        self.places, self._rows = places, rows
        self._around: list[Any] = []
        """The operations whose functions run."""

    # --- layouts ---

    def count(self, over: Axes) -> Any:
        """Return the number of shards over some mesh axes."""
        return math.prod(self.sizes[a] for a in over)

    def _without_single_devices(self, over: Layout) -> Layout:
        """Leave out mesh axes of size 1, which divide nothing."""
        return tuple([tuple([a for a in own if a.startswith("#") or self.sizes[a] != 1]) for own in over])

    def cut_sizes(self, sizes: Sequence[int], over: Sequence[Axes]) -> tuple[int, ...]:
        return tuple([int(n // self.count(a)) for n, a in zip(sizes, over, strict=True)])

    def complete(self, x: Shard) -> jax.ShapeDtypeStruct:
        """Return the complete array of which this is a shard, for tracing."""
        shape = [int(n * self.count(a)) for n, a in zip(x.here.shape, x.over, strict=True)]
        return jax.ShapeDtypeStruct(shape, x.here.dtype)

    def moved(self, eqn: Any, x: Shard, to: Layout, sums: frozenset[str] = frozenset()) -> Shard:
        """Return a value in another layout: complete dimensions are cut, others are gathered.

        Partial sums are added up, except over the mesh axes `sums`; over these, the first device has a complete value,
        and others have zeros.
        """
        to = self._without_single_devices(to)
        here, changed = x.here, [i for i, (own, new) in enumerate(zip(x.over, to, strict=True)) if own != new]
        if total := tuple(sorted(x.sums - sums)):
            self._refuse(eqn, total, False)
            here = jax.lax.psum(here, total)
        for i in changed:
            if own := x.over[i]:
                self._refuse(eqn, own, not self._gathers)
                here = jax.lax.all_gather(here, own, axis=i, tiled=True)
        for i in changed:  # after all gathers, since a mesh axis may go from one dimension to another
            if not (new := to[i]):
                continue
            size = int(here.shape[i] // self.count(new))
            if i in x.alike:
                here = jax.lax.slice_in_dim(here, 0, size, axis=i)
                continue
            self._refuse(eqn, tuple(a for a in new if a not in self.places), False)
            at = self._place_of_shard(new) * size
            here = jax.lax.dynamic_slice_in_dim(
                _device_varying(here, varying_axes(here) | varying_axes(at)), at, size, i
            )
        if first := sums - x.sums:
            self._refuse(eqn, tuple(a for a in first if a not in self.places), False)
            here = jnp.where(self._place_of_shard(tuple(sorted(first))) == 0, here, jnp.zeros_like(here))
        return Shard(here, to, x.own, frozenset(i for i in x.alike if not to[i]), sums)

    def _place_of_shard(self, over: Axes) -> jax.Array:
        """Return the number of the shard that is here, along some mesh axes."""
        at = jnp.int32(0)
        for a in over:
            here = jnp.asarray(self.places[a], jnp.int32) if a in self.places else jax.lax.axis_index(a)
            at = at * self.sizes[a] + here
        return at

    def _refuse(self, eqn: Any, over: Axes, always: bool) -> None:
        """Refuse an operation that needs more than a shard, if shards over these axes cannot be gathered."""
        if always or any(a.startswith("#") for a in over):
            raise self.needs(eqn, over)

    def needs(self, eqn: Any, over: Axes) -> NeedsCompleteAxes:
        if ROWS in over:
            return NeedsCompleteAxes(f"{self._described(eqn)} is no function of each row alone.", ROWS)
        name = self._names.get(over) or next((n for a, n in self._names.items() if {*a} & {*over}), None)
        return NeedsCompleteAxes(f"{self._described(eqn)} needs all of {name or ', '.join(over)!r}.", name or "", over)

    def _described(self, eqn: Any) -> str:
        """Return the innermost scope of an operation, such as `mean`, its primitive, and the user's line."""
        if eqn is None:
            return "a result"
        scope = str(eqn.source_info.name_stack).split("/")[-1].partition("[")[0]
        lines = (source([*frames_of(x)]) for x in (eqn, *reversed(self._around)))
        line = next(filter(None, lines), None)
        at = "" if line is None else f" in {line}"
        return (f"{scope!r} ({eqn.primitive.name})" if scope else repr(eqn.primitive.name)) + at

    # --- programs ---

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Shard]) -> list[Shard]:
        """Run a program that was traced for complete axes, and return its results in layouts that follow."""
        known = {
            v: x._replace(over=self._without_single_devices(x.over)) for v, x in zip(jaxpr.invars, args, strict=True)
        }
        known |= zip(jaxpr.constvars, map(_complete_value, consts), strict=True)

        def read(v: Any) -> Shard:
            return (
                _complete_value(jnp.asarray(v.val, getattr(v.aval, "dtype", None)))
                if isinstance(v, jex.Literal)
                else known[v]
            )

        for eqn in _needed_operations(jaxpr):
            for v, x in zip(eqn.outvars, self._step(eqn, [*map(read, eqn.invars)]), strict=True):
                shape, cut = getattr(v.aval, "shape", ()), [a for own in x.over for a in own]
                # Not an `assert`: these are what a wrong rule would break first, and `-O` must not let that pass.
                if len(cut) != len({*cut}) or {*cut} & x.sums or np.shape(x.here) != self.cut_sizes(shape, x.over):
                    raise AssertionError(f"{eqn.primitive}: {shape} over {x.over} has {np.shape(x.here)} here")
                known[v] = x
        return [read(v) for v in jaxpr.outvars]

    def _step(self, eqn: Any, xs: list[Shard]) -> list[Shard]:
        name, own = eqn.primitive.name, frozenset[str]().union(*(x.own for x in xs))
        if name in _CHANGES_NOTHING:
            return xs
        if name in _COLLECTIVES:
            raise NeedsCompleteAxes(f"{self._described(eqn)} communicates by itself.")
        if (call := _CALLS.get(name)) is not None:
            if name not in _PASSES_SUMS:
                xs = [self.moved(eqn, x, x.over) for x in xs]
            self._around.append(eqn)
            found = call(self, eqn, xs)
            self._around.pop()
        else:
            if own:
                xs = [self.moved(eqn, x, tuple(() if own & {*a} else a for a in x.over)) for x in xs]
            if name.startswith("debug_") and any(a.startswith("#") for x in xs for own in x.over for a in own):
                return self._bound(eqn, xs, [])  # it shows what is here, and no value depends on it
            if name != "ragged_dot_general" and any((SIZES,) in x.over for x in xs):
                raise NeedsCompleteAxes(f"{self._described(eqn)} uses the numbers of rows.")
            found = self._by_rule(eqn, xs)
        return [x._replace(own=x.own | own) for x in found]

    def _by_rule(self, eqn: Any, xs: list[Shard]) -> list[Shard]:
        rule, name = rule_of(eqn), eqn.primitive.name
        if rule is not None and eqn.outvars[0].aval.dtype == bool:  # any is a maximum, and all a minimum
            uses = {f: {"or": "max", "and": "min"}.get(how, how) for f, how in rule.uses.items()}
            rule = rule._replace(uses=uses)
        kept = _sums_kept(eqn, rule, xs)
        xs = [self.moved(eqn, x, x.over, own)._replace(sums=frozenset()) for x, own in zip(xs, kept, strict=True)]
        cut = any(any(x.over) for x in xs)
        factors = [] if rule is None else [f for term in rule.operands for dim in term for f in dim]
        if cut and name in _AT_PLACES:
            found = _AT_PLACES[name](self, eqn, xs)
        elif rule is not None and len(xs) > 1 and rule.results == rule.operands and len({*factors}) == len(factors):
            found = self._bound(eqn, xs, [x.over for x in xs])  # no operand has to do with another
        elif rule is not None and (cut or name in _MAKES_ALIKE or any(x.alike for x in xs)):
            found = self._by_factors(eqn, rule, xs)
        elif name in _CALLBACKS and cut:
            raise NeedsCompleteAxes(f"{self._described(eqn)} calls Python, which has no shards.")
        else:  # on complete operands
            complete = [self.moved(eqn, x, ((),) * len(x.over)) for x in xs]
            found = self._bound(eqn, complete, [((),) * len(v.aval.shape) for v in eqn.outvars])
        return [x._replace(sums=x.sums.union(*kept)) for x in found]

    def _by_factors(self, eqn: Any, rule: OperationRule, xs: list[Shard]) -> list[Shard]:
        """Run an operation on shards: of the factors that pass, and of those of which devices combine results."""
        rule = _with_equal_parts(rule)
        layout = self._cut_factors(rule, xs)
        before, after = (
            [tuple([layout.get(dim[0], ()) if dim else () for dim in term]) for term in terms]
            for terms in (rule.operands, rule.results)
        )
        here = [self.moved(eqn, x, to) for x, to in zip(xs, before, strict=True)]
        combined = [(how, layout[f]) for f, how in rule.summed.items() if f in layout.keys() - _passing_factors(rule)]
        sums, largest, smallest = (
            tuple([a for how, over in combined if how == wanted for a in over]) for wanted in _COMBINED
        )
        self._refuse(eqn, (*(() if self._sums else sums), *largest, *smallest), False)
        if largest or smallest:
            axes = tuple(eqn.params["axes"])
            return [Shard(_extreme_elements(bool(largest), axes, largest or smallest, here[0].here), after[0])]
        found = self._bound(eqn, here, after, **self._sizes_here(eqn, before[0] if before else (), after[0]))
        alike = _alike_dimensions(eqn, rule, here)
        found = [x._replace(alike=own, sums=frozenset(sums)) for x, own in zip(found, alike, strict=True)]
        return found if self._sums else [self.moved(eqn, x, x.over) for x in found]

    def _cut_factors(self, rule: OperationRule, xs: Sequence[Shard]) -> dict[int, Axes]:
        """Return which factors are cut: as operands are, where the rule and other factors allow it."""
        passing = _passing_factors(rule)
        combined = rule.summed.keys() - passing
        # Some of an axis is cut only if it is the outermost factor, or shards would not be contiguous.
        complete = {f for term in (*rule.operands, *rule.results) for dim in term for f in dim[1:]}
        complete |= {f for f, how in rule.uses.items() if how not in _COMBINED} | {p.whole for p in rule.parts}
        pairs = (pair for x, term in zip(xs, rule.operands, strict=True) for pair in zip(term, x.over, strict=True))
        wanted = [(dim[0], over) for dim, over in pairs if dim and over and dim[0] in (passing | combined) - complete]
        layout: dict[int, Axes] = {}
        for f, over in sorted(wanted, key=lambda pair: pair[0] in combined):
            taken = {a for own in layout.values() for a in own}  # a mesh axis cuts one dimension only
            unit = self._rows if ROWS in over else self.count(over)
            if f not in layout and not taken & {*over} and rule.sizes[f] % unit == 0:
                layout[f] = over
        return layout

    def _sizes_here(self, eqn: Any, before: Layout, after: Layout) -> dict[str, Any]:
        """Return the parameters that are sizes, for shards of the first operand and of the first result."""
        changed = dict[str, Any]()
        for key, of_operand in _SIZES_OF.items():
            own = before if of_operand else after
            if isinstance(given := eqn.params.get(key), tuple) and len(given) == len(own):
                sizes = eqn.invars[0].aval.shape if of_operand else given
                # Of what a look-up takes one element, this is the number, not the size.
                changed[key] = self.cut_sizes(
                    given, [a if n == m else () for a, n, m in zip(own, given, sizes, strict=True)]
                )
        if eqn.primitive.name == "split" and len(given := eqn.params["sizes"]) == 1:
            changed["sizes"] = self.cut_sizes(given, (before[eqn.params["axis"]],))
        return changed

    def _bound(self, eqn: Any, xs: Sequence[Shard], to: Sequence[Layout], **changed: Any) -> list[Shard]:
        """Run an operation on what is here, and return results of known layouts."""
        params = {**eqn.params, **changed}
        params |= {n: None for n in ("sharding", "out_sharding") if n in params}
        over = frozenset[str]().union(*(varying_axes(x.here) for x in xs))
        found = evaluated(eqn, params, [_device_varying(x.here, over) for x in xs])
        return [Shard(x, own) for x, own in zip(found, to, strict=True)]

    def traced(self, fn: Callable[..., list[Shard]], xs: Sequence[Shard]) -> list[Shard]:
        """Return the results of a function, with types in place of arrays."""
        found: list[Shard] = []

        def arrays(*here: Any) -> Any:
            found[:] = fn(*_with_arrays(xs, here))
            return [x.here for x in found]

        types = jax.make_jaxpr(arrays)(*(x.here for x in xs)).out_avals
        return _with_arrays(found, types)


_COMBINED = "sum", "max", "min"
"""The uses of a factor that is cut, and along which devices combine their results."""
_MAKES_ALIKE = "broadcast_in_dim", "iota"


def _with_equal_parts(rule: OperationRule) -> OperationRule:
    """Return a rule in which a part that is all of a factor is that factor."""
    sizes, uses = rule.sizes, rule.uses
    equal = {p.part: p.whole for p in rule.parts if sizes[p.part] == sizes[p.whole] and p.whole not in uses}
    operands, results = (
        tuple([tuple([tuple([equal.get(f, f) for f in dim]) for dim in term]) for term in terms])
        for terms in (rule.operands, rule.results)
    )
    return rule._replace(operands=operands, results=results, parts=[p for p in rule.parts if p.part not in equal])


def _passing_factors(rule: OperationRule) -> set[int]:
    """Return the factors that all results have."""
    return set.intersection(*({f for dim in term for f in dim} for term in rule.results))


def _alike_dimensions(eqn: Any, rule: OperationRule, xs: Sequence[Shard]) -> list[frozenset[int]]:
    """Return the dimensions of results of which all positions are alike."""
    pairs = [(i in x.alike, dim) for x, term in zip(xs, rule.operands, strict=True) for i, dim in enumerate(term)]
    differ = {f for same, dim in pairs for f in dim if not same or len(dim) > 1}.union(rule.uses)
    alike = {f for same, dim in pairs if same for f in dim}
    if eqn.primitive.name in _MAKES_ALIKE:
        alike |= {f for dim in rule.results[0] for f in dim}
    return [
        frozenset(i for i, dim in enumerate(term) if len(dim) == 1 and dim[0] in alike - differ)
        for term in rule.results
    ]


def _needed_operations(jaxpr: Any) -> list[Any]:
    """Return the operations that a result needs, or that have effects."""
    needed, found = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}, list[Any]()
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            needed.update(v for v in eqn.invars if not isinstance(v, jex.Literal))
            found.append(eqn)
    return found[::-1]


def _complete_value(x: Any) -> Shard:
    return Shard(x, ((),) * np.ndim(x))


def _with_arrays(xs: Sequence[Shard], here: Sequence[Any]) -> list[Shard]:
    return [x._replace(here=h) for x, h in zip(xs, here, strict=True)]


def _device_varying(x: Any, over: Collection[str]) -> Any:
    missing = {*over} - varying_axes(x)
    if not missing or hasattr(jax.typeof(x), "inner_aval"):  # a reference
        return x
    return varying_over(x if isinstance(x, jax.Array) else jnp.asarray(x), sorted(missing))


def _sums_kept(eqn: Any, rule: OperationRule | None, xs: Sequence[Shard]) -> list[frozenset[str]]:
    """Return over which mesh axes each operand may be a partial sum, so that the results are: if that is linear."""
    name, sums = eqn.primitive.name, frozenset[str]().union(*(x.sums for x in xs))
    own, none = [x.sums for x in xs], [frozenset[str]()] * len(xs)
    if (
        not sums
        or rule is None
        or "sort" in rule.uses.values()
        or sums & {a for x in xs for cut in x.over for a in cut}
    ):
        return none
    if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):  # a conversion to integers rounds
        return none
    if name == "broadcast_in_dim" and not any(a.startswith("#") for a in sums):  # summed while it is small
        return own if eqn.invars[0].aval.size == eqn.outvars[0].aval.size else none
    if name in ("mul", "div", "dot_general"):
        one = sum(map(bool, own)) == 1 and (bool(own[0]) or name != "div")
        return own if one else none
    if rule.values == "linear":
        return [sums] * len(xs)
    zeros = [isinstance(v, jex.Literal) and not np.any(v.val) for v in eqn.invars]
    if rule.values not in ("moved", "sum") or rule.product or not all(map(operator.or_, map(bool, own), zeros)):
        return none
    return [sums if partial else partial for partial in own]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _extreme_elements(largest: bool, axes: tuple[int, ...], over: Axes, x: jax.Array) -> jax.Array:
    """Return the largest or smallest elements along dimensions, and over devices; ties share the derivative."""
    own, combined = (jnp.max(x, axes), jax.lax.pmax) if largest else (jnp.min(x, axes), jax.lax.pmin)
    return combined(own, over) if over else own


@_extreme_elements.defjvp
def _(largest: bool, axes: tuple[int, ...], over: Axes, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    y = _extreme_elements(largest, axes, over, x)
    at = (x == jnp.expand_dims(y, axes)).astype(x.dtype)
    return y, jax.lax.psum(jnp.sum(at * t, axes), over) / jax.lax.psum(jnp.sum(at, axes), over)


# --- look-ups and updates, where the rule is not all ---


def _scatter_add(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    """Add rows to a table: if devices have other rows, each adds its own to zeros."""
    rule = rule_of(eqn)
    assert rule is not None
    table, indices, updates = xs
    rows = {f for f, how in rule.uses.items() if how == "sum"}
    over = tuple(dict.fromkeys(
        a for x, term in zip((indices, updates), rule.operands[1:], strict=True)
        for dim, own in zip(term, x.over, strict=True) if rows.intersection(dim) for a in own
    ))  # fmt: skip
    if not over:
        return self._by_factors(eqn, rule._replace(uses={**rule.uses, **dict.fromkeys(rows, "whole")}), xs)
    (found,) = self._by_factors(eqn, rule, [table._replace(here=jnp.zeros_like(table.here)), indices, updates])
    return [found._replace(here=self.moved(eqn, table, found.over, found.sums).here + found.here)]


def _run_ragged_product(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    """Multiply rows by the matrices of their groups: those of a device by the groups of the device."""
    numbers, (rows, matrices, sizes) = eqn.params["ragged_dot_dimension_numbers"], xs
    at, groups = {*numbers.lhs_ragged_dimensions}, {*numbers.rhs_group_dimensions}
    if (SIZES,) in sizes.over and not any(rows.over):
        rows = self.moved(eqn, rows, tuple([(ROWS,) if i in at else () for i in range(len(rows.over))]))
    cut = [{i for i, own in enumerate(x.over) if own} for x in (rows, matrices, sizes)]
    if cut[0] == at and (SIZES,) in sizes.over and cut[2] == {0} and cut[1] in (groups, set()):
        if (GROUPS,) in matrices.over or self.count((GROUPS,)) == 1:
            rank = len(eqn.outvars[0].aval.shape)
            out = tuple([rows.over[min(at)] if i == 0 else () for i in range(rank)])
            if rank == len(rows.over) and min(at) == 0:
                return self._bound(eqn, [rows, matrices, sizes], [out])
    if (SIZES,) in sizes.over:
        raise self.needs(eqn, (ROWS,)) if not cut[0] else self.needs(eqn, (GROUPS,))
    rule = rule_of(eqn)
    assert rule is not None
    return self._by_factors(eqn, rule, xs)


def _run_reference(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    """Make, read or write a reference: complete, or all of what is here."""
    if len(eqn.invars) > (1 if eqn.primitive.name in ("get", "new_ref", "core_ref", "ref", "freeze") else 2):
        raise NeedsCompleteAxes(f"{self._described(eqn)} reads or writes some of a reference.")
    ref, *values = xs
    return self._bound(eqn, [ref, *(self.moved(eqn, x, ref.over) for x in values)], [ref.over] * len(eqn.outvars))


_AT_PLACES: dict[str, Callable[[OnShards, Any, list[Shard]], list[Shard]]] = {
    **dict.fromkeys(("scatter-add", "scatter_add"), _scatter_add),
    "ragged_dot_general": _run_ragged_product,
    **dict.fromkeys("get swap addupdate new_ref core_ref ref freeze".split(), _run_reference),
}


# --- functions inside of an operation ---


def _scope_within(eqn: Any) -> contextlib.AbstractContextManager[Any]:
    scope = str(eqn.source_info.name_stack)
    return jax.named_scope(scope) if scope else contextlib.nullcontext()


def _run_call(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr") or program_of(eqn.params, eqn.invars)
    with _scope_within(eqn):
        return self.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), xs)


def _run_hi_primitive(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    """Run the program of an operation, unless it may have a derivative of its own."""
    smooth = any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)
    return self._by_rule(eqn, xs) if smooth else _run_call(self, eqn, xs)


def _run_checkpoint(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    found: list[Shard] = []

    def fn(*here: Any) -> Any:
        found[:] = self.run(eqn.params["jaxpr"], (), _with_arrays(xs, here))
        return [x.here for x in found]

    with _scope_within(eqn):
        remat = jax.checkpoint(fn, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
        return _with_arrays(found, remat(*(x.here for x in xs)))


def _common_layout(first: Shard, *others: Shard) -> Shard:
    """Return the first of some values, with what others have more: cut dimensions, and partial sums."""
    over = list(first.over)
    for x in others:
        for i, own in enumerate(x.over):
            if not over[i] and not {*own} & ({a for cut in over for a in cut} | first.sums):
                over[i] = own
    sums = first.sums.union(*(x.sums for x in others)) - {a for cut in over for a in cut}
    return first._replace(over=tuple(over), alike=frozenset(), sums=sums)


def _arrays_like(self: OnShards, eqn: Any, xs: Sequence[Shard], wanted: Sequence[Shard]) -> list[Any]:
    """Return the arrays of values, brought into the layouts and types of others."""
    pairs = zip(xs, wanted, strict=True)
    return [_device_varying(self.moved(eqn, x, y.over, y.sums).here, varying_axes(y.here)) for x, y in pairs]


def _settled_carry(
    self: OnShards,
    eqn: Any,
    body: Callable[..., list[Shard]],
    fixed: list[Shard],
    carry: list[Shard],
    rest: list[Shard],
) -> tuple[list[Shard], list[Shard]]:
    """Choose the layouts of a carry, which may have more cut dimensions and sums than before the loop, never fewer.

    Returned are the carry and the results of a step, with types in place of arrays.
    """
    own = frozenset[str]().union(*(x.own for x in (*fixed, *carry, *rest)))
    carry = [x._replace(own=own) for x in carry]
    while True:
        found = self.traced(body, [*fixed, *carry, *rest])
        wanted = [_common_layout(x, y)._replace(here=y.here) for x, y in zip(carry, found, strict=False)]
        new = _with_arrays(wanted, _arrays_like(self, eqn, carry, wanted))
        alike = [{i for i in x.alike & y.alike if not to.over[i]} for x, y, to in zip(carry, found, new, strict=False)]
        new = [x._replace(alike=frozenset(own)) for x, own in zip(new, alike, strict=True)]
        if all(
            a.over == b.over
            and a.sums == b.sums
            and a.alike == b.alike
            and varying_axes(a.here) == varying_axes(b.here)
            for a, b in zip(carry, new, strict=True)
        ):
            return new, found
        carry = new


def _run_scan(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    p = eqn.params
    fixed, carry, each = map(list, scan_operands(p, xs))
    if not p["length"]:
        return [*carry, *(_complete_value(jnp.zeros(v.aval.shape, v.aval.dtype)) for v in eqn.outvars[len(carry) :])]
    each = [self.moved(eqn, x, ((), *x.over[1:]), x.sums) for x in each]
    rows = [Shard(x.here[0], x.over[1:], x.own, sums=x.sums) for x in each]
    with _scope_within(eqn):

        def body(*values: Shard) -> list[Shard]:
            return self.run(p["jaxpr"].jaxpr, p["jaxpr"].consts, values)

        carry, found = _settled_carry(self, eqn, body, fixed, carry, rows)

        def step(here: Any, row: Any) -> Any:
            found = body(*fixed, *_with_arrays(carry, here), *_with_arrays(rows, row))
            return _arrays_like(self, eqn, found[: len(carry)], carry), [x.here for x in found[len(carry) :]]

        last, every = jax.lax.scan(
            step, [x.here for x in carry], [x.here for x in each], p["length"], p["reverse"], p["unroll"]
        )
    stacked = [Shard(y, ((), *x.over), sums=x.sums) for y, x in zip(every, found[len(carry) :], strict=True)]
    return [*_with_arrays(carry, last), *stacked]


def _body_of_while(eqn: Any) -> Any:
    """Return the body of a loop as a function of all operands; what goes on for some elements keeps the others."""
    p = eqn.params
    n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]

    def body(*values: Any) -> list[Any]:
        (goes_on,) = jex.jaxpr_as_fun(p["cond_jaxpr"])(*values[:n], *values[m:])
        new = jex.jaxpr_as_fun(p["body_jaxpr"])(*values[n:])
        if not goes_on.ndim:
            return new
        at = range(goes_on.ndim)
        return [
            jax.lax.select(jax.lax.broadcast_in_dim(goes_on, y.shape, at), y, x)
            for x, y in zip(values[m:], new, strict=True)
        ]

    return jax.make_jaxpr(body)(*_abstract_values(eqn.invars))


def _run_while(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    p = eqn.params
    n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    with self._context():
        program = _body_of_while(eqn)
    with _scope_within(eqn):

        def body(*values: Shard) -> list[Shard]:
            return self.run(program.jaxpr, program.consts, values)

        carry, _ = _settled_carry(self, eqn, body, xs[:m], xs[m:], [])

        def goes_on(here: Any) -> Any:
            (found,) = self.run(p["cond_jaxpr"].jaxpr, p["cond_jaxpr"].consts, [*xs[:n], *_with_arrays(carry, here)])
            found = self.moved(eqn, found, found.over)  # `vmap` leaves an answer for each element
            cut = tuple([a for own in found.over for a in own if not a.startswith("#")])
            return _extreme_elements(True, tuple(range(len(found.over))), cut, found.here.astype(jnp.int32)) > 0

        def step(here: Any) -> Any:
            return _arrays_like(self, eqn, body(*xs[:m], *_with_arrays(carry, here)), carry)

        return _with_arrays(carry, jax.lax.while_loop(goes_on, step, [x.here for x in carry]))


def _run_linear_solve(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    """Solve a linear system, whose derivative follows from its product, on shards."""
    programs, counts = eqn.params["jaxprs"], eqn.params["const_lengths"]
    vary = frozenset[str]().union(*(varying_axes(x.here) for x in xs))
    xs = _with_arrays(xs, [_device_varying(x.here, vary) for x in xs])  # as JAX evaluates the programs again with more
    ends, rights = [*itertools.accumulate(counts)], xs[sum(counts) :]

    def of(i: int, *values: Shard) -> list[Shard]:
        return self.run(programs[i].jaxpr, programs[i].consts, [*xs[ends[i] - counts[i] : ends[i]], *values])

    def here_of(i: int) -> Callable[..., list[Any]]:
        return lambda here: _arrays_like(self, eqn, of(i, *_with_arrays(rights, here)), rights)

    with _scope_within(eqn):
        solved = self.traced(functools.partial(of, 2), rights)
        if len(solved) != len(rights):
            raise NeedsCompleteAxes(f"{self._described(eqn)} has auxiliary results.")
        rights = [self.moved(eqn, x, _common_layout(x, y).over) for x, y in zip(rights, solved, strict=True)]
        product, solve, backward = here_of(0), here_of(2), here_of(3) if programs[3] is not None else None
        found = jax.lax.custom_linear_solve(
            product, [x.here for x in rights], lambda _, b: solve(b), backward and (lambda _, b: backward(b))
        )
    return _with_arrays(rights, found)


def _run_cond(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    index, *args = xs

    def run(branch: Any, *values: Shard) -> list[Shard]:
        return self.run(branch.jaxpr, branch.consts, values)

    with _scope_within(eqn):
        branches = [functools.partial(run, branch) for branch in eqn.params["branches"]]
        each = [self.traced(branch, args) for branch in branches]
        wanted = [_common_layout(*options) for options in zip(*each, strict=True)]
        vary = [
            frozenset(a for a in {*met.sums}.union(*met.over) if not a.startswith("#")).union(
                *(varying_axes(x.here) for x in options)
            )
            for met, options in zip(wanted, zip(*each, strict=True), strict=True)
        ]

        def taken_branch(branch: Callable[..., list[Shard]], *here: Any) -> Any:
            found = zip(branch(*_with_arrays(args, here)), wanted, vary, strict=True)
            return [_device_varying(self.moved(eqn, x, to.over, to.sums).here, v) for x, to, v in found]

        out = jax.lax.switch(
            self.moved(eqn, index, ()).here,
            [functools.partial(taken_branch, branch) for branch in branches],
            *(x.here for x in args),
        )
    return _with_arrays(wanted, out)


def _smooth_part(eqn: Any) -> tuple[Callable[..., Any], list[int]]:
    """Return an operation as a function of its differentiable operands and of all, with the places of the former."""
    places = [i for i, v in enumerate(eqn.invars) if jnp.issubdtype(v.aval.dtype, jnp.inexact)]

    def fn(smooth: Sequence[Any], operands: Sequence[Any]) -> Any:
        given = list(operands)
        for i, x in zip(places, smooth, strict=True):
            given[i] = x
        return evaluated(eqn, eqn.params, given)

    return fn, places


def _abstract_values(atoms: Sequence[Any]) -> list[Any]:
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in atoms]


def _run_custom_jvp(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    """Run a function with its own derivative, and the derivative, which is traced for complete axes, too."""
    inner, found = eqn.params["call_jaxpr"], list[Layout]()
    fn, places = _smooth_part(eqn)

    @jax.custom_jvp
    def on_shards(*here: Any) -> Any:
        out = [self.moved(eqn, x, x.over) for x in self.run(inner.jaxpr, inner.consts, _with_arrays(xs, here))]
        found[:] = [x.over for x in out]
        return [x.here for x in out]

    @on_shards.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        avals = _abstract_values(eqn.invars)

        def both(primals: Any, tangents: Any) -> Any:
            return jax.jvp(lambda *smooth: fn(smooth, primals), [primals[i] for i in places], tangents)

        with self._context():
            program = jax.make_jaxpr(both)(avals, [avals[i] for i in places])
        given = [*_with_arrays(xs, primals), *(xs[i]._replace(here=tangents[i]) for i in places)]
        out = self.run(program.jaxpr, program.consts, given)
        found[:] = found or [x.over for x in out[: len(out) // 2]]  # unless the function itself has run before
        here = [self.moved(eqn, x, own).here for x, own in zip(out, found * 2, strict=True)]
        values, slopes = here[: len(found)], here[len(found) :]
        pairs = [*zip(values, slopes, strict=True)]
        return (
            [_device_varying(x, varying_axes(y)) for x, y in pairs],
            [_device_varying(y, varying_axes(x)) for x, y in pairs],
        )

    vary = frozenset[str]().union(*(varying_axes(x.here) for x in xs))
    with _scope_within(eqn):
        out = on_shards(*(_device_varying(x.here, vary) for x in xs))
    return [Shard(y, own) for y, own in zip(out, found, strict=True)]


def _run_custom_vjp(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    """Run a function with its own derivative, and the derivative, which is traced for complete axes, too.

    A cotangent of a value that all devices have is summed first, and divided by their number after. Along axes that are
    none of the mesh, it stays a partial sum.
    """
    inner, outs = eqn.params["call_jaxpr"], list[Layout]()
    fn, places = _smooth_part(eqn)
    own = frozenset[str]().union(*(x.own for x in xs))
    axes = {a for over in self._names for a in over if not a.startswith("#")}

    def alike_over(x: Any, over: Layout) -> Axes:
        """Return the mesh axes over which devices have the same value, of which each has part of the cotangent."""
        return tuple(sorted(a for a in axes & varying_axes(x) if a not in own and not any(a in cut for cut in over)))

    def partial_over(over: Layout) -> frozenset[str]:
        apart = [*self.places, *({ROWS} & self.sizes.keys())]
        return frozenset(a for a in apart if not any(a in cut for cut in over))

    @jax.custom_vjp
    def on_shards(*here: Any) -> Any:
        out = [self.moved(eqn, x, x.over) for x in self.run(inner.jaxpr, inner.consts, _with_arrays(xs, here))]
        outs[:] = [x.over for x in out]
        return [x.here for x in out]

    def backward(here: Any, cotangents: Any) -> Any:
        def complete(operands: Any, cotangents: Any) -> Any:
            return jax.vjp(lambda *smooth: fn(smooth, operands), *(operands[i] for i in places))[1](cotangents)

        with self._context():
            program = jax.make_jaxpr(complete)(_abstract_values(eqn.invars), _abstract_values(eqn.outvars))
        total = [
            Shard(jax.lax.psum(x, over) if (over := alike_over(x, cut)) else x, cut, own, sums=partial_over(cut))
            for x, cut in zip(cotangents, outs, strict=True)
        ]
        runner = copy.copy(self)
        runner._sums = True
        found = runner.run(program.jaxpr, program.consts, [*_with_arrays(xs, here), *total])
        result: list[Any] = [None] * len(xs)
        for i, x in zip(places, found, strict=True):
            y = self.moved(eqn, x, xs[i].over, partial_over(xs[i].over)).here
            devices = self.count(alike_over(here[i], xs[i].over))
            result[i] = _device_varying(y / devices if devices > 1 else y, varying_axes(here[i]))
        return tuple(result)

    on_shards.defvjp(lambda *here: (on_shards(*here), here), backward)
    vary = frozenset[str]().union(*(varying_axes(x.here) for x in xs))
    with _scope_within(eqn):
        out = on_shards(*(_device_varying(x.here, vary) for x in xs))
    return [Shard(y, cut) for y, cut in zip(out, outs, strict=True)]


# --- operations with their own way to exchange shards ---


@dataclasses.dataclass(frozen=True, eq=False)
class ShardExchange:
    """An operation that exchanges shards by itself."""

    what: str
    of_shards: Callable[[Sequence[Any]], Sequence[Any]]
    before: Sequence[Layout]
    """The layouts of its operands."""
    after: Sequence[Layout]

    def of_mapped(self, dims: Sequence[int | None]) -> ShardExchange:
        """Return the operation for operands of which some have a first axis more."""
        fn = self.of_shards
        each = [None if d is None else 0 for d in dims]
        before = [own if d is None else ((), *own) for own, d in zip(self.before, dims, strict=True)]
        return ShardExchange(
            self.what,
            lambda xs: jax.vmap(lambda *ys: fn(list(ys)), each)(*xs),
            before,
            [((), *own) for own in self.after],
        )


def _run_exchange(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    exchange: ShardExchange = eqn.params["exchange"]
    if any(a.startswith("#") for x in xs for own in x.over for a in own):
        raise self.needs(eqn, (ROWS,))
    with _scope_within(eqn):
        here = [self.moved(eqn, x, to).here for x, to in zip(xs, exchange.before, strict=True)]
        return [Shard(x, to) for x, to in zip(exchange.of_shards(here), exchange.after, strict=True)]


_CALLS: dict[str, Callable[[OnShards, Any, list[Shard]], list[Shard]]] = {
    **dict.fromkeys("jit pjit closed_call core_call custom_lin".split(), _run_call),
    **dict.fromkeys("checkpoint remat remat2".split(), _run_checkpoint),
    "call_hi_primitive": _run_hi_primitive,
    "scan": _run_scan,
    "while": _run_while,
    "cond": _run_cond,
    "custom_linear_solve": _run_linear_solve,
    "custom_jvp_call": _run_custom_jvp,
    "custom_vjp_call": _run_custom_vjp,
    "exchange": _run_exchange,
}


def _mapped_exchange(xs: Sequence[Any], dims: Sequence[int | None], *, avals: Any, exchange: ShardExchange) -> Any:
    size = next(x.shape[d] for x, d in zip(xs, dims, strict=True) if d is not None)
    first = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(xs, dims, strict=True)]
    more = tuple(ShapedArray((size, *a.shape), a.dtype) for a in avals)
    return exchange_p.bind(*first, avals=more, exchange=exchange.of_mapped(dims)), [0] * len(avals)


exchange_p = traced_operation("exchange", lambda *xs, avals, exchange: list(avals), _mapped_exchange)
