"""Run one operation, which was traced for complete axes, on the shards of a device by its rule.

The rules are in `axonym.core.operation_rules`. An operation that needs more than shards, or has no rule, is
refused with the line of the user, or gets complete operands. So a missing rule costs a refusal, never a value.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from ..core.jax_versions import evaluated, varying_axes
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

_CALLBACKS = frozenset(("pure_callback", "io_callback"))
_SIZES_OF = {"shape": False, "new_sizes": False, "limit_indices": True, "slice_sizes": True}
"""The parameters that are sizes: whether of the operand, or of the result."""


class OperationsOnShards:
    """Runs operations on shards.

    Arguments:
        sizes: the number of shards over each mesh axis.
        names: the axis that is cut over some mesh axes, for messages.
        context: makes the context in which a derivative is traced.
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
        self.sizes, self.names, self.context, self.sums, self._gathers = sizes, names, context, sums, gathers
        self.places, self._rows = places, rows
        self.around: list[Any] = []
        """The operations whose functions run."""

    # --- layouts ---

    def count(self, over: Axes) -> Any:
        """Return the number of shards over some mesh axes."""
        return math.prod(self.sizes[a] for a in over)

    def without_single_devices(self, over: Layout) -> Layout:
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
        to = self.without_single_devices(to)
        here, changed = x.here, [i for i, (own, new) in enumerate(zip(x.over, to, strict=True)) if own != new]
        if total := tuple(sorted(x.sums - sums)):
            self._refuse_gathers(eqn, total, False)
            here = jax.lax.psum(here, total)
        for i in changed:
            if own := x.over[i]:
                self._refuse_gathers(eqn, own, not self._gathers)
                here = jax.lax.all_gather(here, own, axis=i, tiled=True)
        for i in changed:  # after all gathers, since a mesh axis may go from one dimension to another
            if not (new := to[i]):
                continue
            size = int(here.shape[i] // self.count(new))
            if i in x.alike:
                here = jax.lax.slice_in_dim(here, 0, size, axis=i)
                continue
            self._refuse_gathers(eqn, tuple(a for a in new if a not in self.places), False)
            at = self._place_of_shard(new) * size
            here = jax.lax.dynamic_slice_in_dim(
                device_varying(here, varying_axes(here) | varying_axes(at)), at, size, i
            )
        if first := sums - x.sums:
            self._refuse_gathers(eqn, tuple(a for a in first if a not in self.places), False)
            here = jnp.where(self._place_of_shard(tuple(sorted(first))) == 0, here, jnp.zeros_like(here))
        return Shard(here, to, x.own, frozenset(i for i in x.alike if not to[i]), sums)

    def _place_of_shard(self, over: Axes) -> jax.Array:
        """Return the number of the shard that is here, along some mesh axes."""
        at = jnp.int32(0)
        for a in over:
            here = jnp.asarray(self.places[a], jnp.int32) if a in self.places else jax.lax.axis_index(a)
            at = at * self.sizes[a] + here
        return at

    def _refuse_gathers(self, eqn: Any, over: Axes, always: bool) -> None:
        """Refuse an operation that needs more than a shard, if shards over these axes cannot be gathered."""
        if always or any(a.startswith("#") for a in over):
            raise self.needs(eqn, over)

    def needs(self, eqn: Any, over: Axes) -> NeedsCompleteAxes:
        if ROWS in over:
            return NeedsCompleteAxes(f"{self.described(eqn)} is no function of each row alone.", ROWS)
        name = self.names.get(over) or next((n for a, n in self.names.items() if {*a} & {*over}), None)
        return NeedsCompleteAxes(f"{self.described(eqn)} needs all of {name or ', '.join(over)!r}.", name or "", over)

    def described(self, eqn: Any) -> str:
        """Return the innermost scope of an operation, such as `mean`, its primitive, and the user's line."""
        if eqn is None:
            return "a result"
        scope = str(eqn.source_info.name_stack).split("/")[-1].partition("[")[0]
        lines = (source([*frames_of(x)]) for x in (eqn, *reversed(self.around)))
        line = next(filter(None, lines), None)
        at = "" if line is None else f" in {line}"
        return (f"{scope!r} ({eqn.primitive.name})" if scope else repr(eqn.primitive.name)) + at

    # --- operations ---

    def by_rule(self, eqn: Any, xs: list[Shard]) -> list[Shard]:
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
            found = self.bound(eqn, xs, [x.over for x in xs])  # no operand has to do with another
        elif rule is not None and (cut or name in _MAKES_ALIKE or any(x.alike for x in xs)):
            found = self.by_factors(eqn, rule, xs)
        elif name in _CALLBACKS and cut:
            raise NeedsCompleteAxes(f"{self.described(eqn)} calls Python, which has no shards.")
        else:  # on complete operands
            complete = [self.moved(eqn, x, ((),) * len(x.over)) for x in xs]
            found = self.bound(eqn, complete, [((),) * len(v.aval.shape) for v in eqn.outvars])
        return [x._replace(sums=x.sums.union(*kept)) for x in found]

    def by_factors(self, eqn: Any, rule: OperationRule, xs: list[Shard]) -> list[Shard]:
        """Run an operation on shards, cut along factors that results have, or along which devices combine results."""
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
        self._refuse_gathers(eqn, (*(() if self.sums else sums), *largest, *smallest), False)
        if largest or smallest:
            axes = tuple(eqn.params["axes"])
            return [Shard(_extreme_elements(bool(largest), axes, largest or smallest, here[0].here), after[0])]
        found = self.bound(eqn, here, after, **self._sizes_here(eqn, before[0] if before else (), after[0]))
        alike = _alike_dimensions(eqn, rule, here)
        found = [x._replace(alike=own, sums=frozenset(sums)) for x, own in zip(found, alike, strict=True)]
        return found if self.sums else [self.moved(eqn, x, x.over) for x in found]

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
                # Along an axis from which a look-up takes one element, the parameter is 1, not the size of the axis.
                changed[key] = self.cut_sizes(
                    given, [a if n == m else () for a, n, m in zip(own, given, sizes, strict=True)]
                )
        if eqn.primitive.name == "split" and len(given := eqn.params["sizes"]) == 1:
            changed["sizes"] = self.cut_sizes(given, (before[eqn.params["axis"]],))
        return changed

    def bound(self, eqn: Any, xs: Sequence[Shard], to: Sequence[Layout], **changed: Any) -> list[Shard]:
        """Run an operation on the shards of this device, and return results of known layouts."""
        params = {**eqn.params, **changed}
        params |= {n: None for n in ("sharding", "out_sharding") if n in params}
        over = frozenset[str]().union(*(varying_axes(x.here) for x in xs))
        found = evaluated(eqn, params, [device_varying(x.here, over) for x in xs])
        return [Shard(x, own) for x, own in zip(found, to, strict=True)]

    def any_element(self, eqn: Any, x: Shard) -> jax.Array:
        """Return whether any element of an array is true, on any device."""
        x = self.moved(eqn, x, x.over)
        cut = tuple([a for own in x.over for a in own if not a.startswith("#")])
        return _extreme_elements(True, tuple(range(len(x.over))), cut, x.here.astype(jnp.int32)) > 0


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


def device_varying(x: Any, over: Collection[str]) -> Any:
    """Return an array that is device-varying over these mesh axes, too."""
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


def _scatter_add(self: OperationsOnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
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
        return self.by_factors(eqn, rule._replace(uses={**rule.uses, **dict.fromkeys(rows, "whole")}), xs)
    (found,) = self.by_factors(eqn, rule, [table._replace(here=jnp.zeros_like(table.here)), indices, updates])
    return [found._replace(here=self.moved(eqn, table, found.over, found.sums).here + found.here)]


def _run_ragged_product(self: OperationsOnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    """Multiply the rows of a device by the matrices of the groups that the device has."""
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
                return self.bound(eqn, [rows, matrices, sizes], [out])
    if (SIZES,) in sizes.over:
        raise self.needs(eqn, (ROWS,)) if not cut[0] else self.needs(eqn, (GROUPS,))
    rule = rule_of(eqn)
    assert rule is not None
    return self.by_factors(eqn, rule, xs)


def _run_reference(self: OperationsOnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    """Make, read or write a reference: a complete array, or the whole shard of a device."""
    if len(eqn.invars) > (1 if eqn.primitive.name in ("get", "new_ref", "core_ref", "ref", "freeze") else 2):
        raise NeedsCompleteAxes(f"{self.described(eqn)} reads or writes some of a reference.")
    ref, *values = xs
    return self.bound(eqn, [ref, *(self.moved(eqn, x, ref.over) for x in values)], [ref.over] * len(eqn.outvars))


_AT_PLACES: dict[str, Callable[[OperationsOnShards, Any, list[Shard]], list[Shard]]] = {
    **dict.fromkeys(("scatter-add", "scatter_add"), _scatter_add),
    "ragged_dot_general": _run_ragged_product,
    **dict.fromkeys("get swap addupdate new_ref core_ref ref freeze".split(), _run_reference),
}
