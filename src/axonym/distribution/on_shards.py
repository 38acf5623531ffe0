"""Run a program that was traced for complete axes on the shards of a device.

Python sees complete axes only: code is traced once, with the true sizes. Each of its operations is then run on shards
by its rule, see `axonym.core.operation_rules`. An operation that needs more than shards, or has no rule, is refused
with the line of the user, or gets complete operands. So a missing rule costs a refusal, never a value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend import core as jex
from jax.interpreters import batching

from ..core.jax_versions import evaluated, scan_operands, varying_axes
from ..core.operation_rules import OperationRule, rule_of
from ..core.source_lines import frames_of, source
from .mesh_axes import Axes
from .per_device import varying_over

Layout = tuple[Axes, ...]


class NeedsCompleteAxes(Exception):
    """Raised with the reason why code cannot be computed from shards, and the axis of which it needs more."""

    def __init__(self, reason: str, axis: str = ""):
        super().__init__(reason)
        self.axis = axis


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


ROWS, GROUPS, SIZES = "#rows", "#groups", "#sizes"
"""The axes of what `dispatch` gives its function: rows, experts, and numbers of rows. Devices do not have shards of
them in a row, so nothing can be exchanged along them; they are none of the mesh."""

_COLLECTIVES = frozenset(
    """psum psum_invariant pmax pmin ppermute pbroadcast pcollective all_reduce all_gather reduce_scatter all_to_all
    all_gather_invariant ragged_all_to_all axis_index""".split()
)
_CALLBACKS = frozenset(("pure_callback", "io_callback"))
_CHANGES_NOTHING = frozenset("pvary pcast reshard mesh_cast sharding_constraint layout_constraint".split())
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
    """

    def __init__(
        self,
        sizes: Mapping[str, int | Fraction],
        names: Mapping[Axes, str],
        context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        sums: bool = False,
        gathers: bool = False,
    ):
        self._sizes, self._names, self._context, self._sums, self._gathers = sizes, names, context, sums, gathers
        self._around: list[Any] = []
        """The operations whose functions run."""

    # --- layouts ---

    def count(self, over: Axes) -> Any:
        """Return the number of shards over some mesh axes."""
        return math.prod(self._sizes[a] for a in over)

    def cut_sizes(self, sizes: Sequence[int], over: Sequence[Axes]) -> tuple[int, ...]:
        return tuple([int(n // self.count(a)) for n, a in zip(sizes, over, strict=True)])

    def complete(self, x: Shard) -> jax.ShapeDtypeStruct:
        """Return the complete array of which this is a shard, for tracing."""
        shape = [int(n * self.count(a)) for n, a in zip(x.here.shape, x.over, strict=True)]
        return jax.ShapeDtypeStruct(shape, x.here.dtype)

    def moved(self, eqn: Any, x: Shard, to: Layout) -> Shard:
        """Return a value in another layout: complete dimensions are cut, others are gathered."""
        here, changed = x.here, [i for i, (own, new) in enumerate(zip(x.over, to, strict=True)) if own != new]
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
            self._refuse(eqn, new, False)
            at = jax.lax.axis_index(new) * size
            here = jax.lax.dynamic_slice_in_dim(_varying(here, {*new, *varying_axes(here)}), at, size, i)
        return x._replace(here=here, over=to, alike=frozenset(i for i in x.alike if not to[i]))

    def _refuse(self, eqn: Any, over: Axes, always: bool) -> None:
        """Refuse an operation that needs more than a shard, if shards over these axes cannot be gathered."""
        if always or any(a.startswith("#") for a in over):
            raise self.needs(eqn, over)

    def needs(self, eqn: Any, over: Axes) -> NeedsCompleteAxes:
        if ROWS in over:
            return NeedsCompleteAxes(f"{self._described(eqn)} is no function of each row alone.", ROWS)
        name = self._names.get(over) or next((n for a, n in self._names.items() if {*a} & {*over}), None)
        return NeedsCompleteAxes(f"{self._described(eqn)} needs all of {name or ', '.join(over)!r}.", name or "")

    def _described(self, eqn: Any) -> str:
        """Return the innermost scope of an operation, such as `mean`, its primitive, and the user's line."""
        if eqn is None:
            return "a result"
        scope = str(eqn.source_info.name_stack).split("/")[-1].partition("[")[0]
        lines = (source([*frames_of(x)]) for x in (eqn, *reversed(self._around)))
        line = next(filter(None, lines), None)
        at = "" if line is None else f" in {line}"
        return (f"{scope!r} ({eqn.primitive.name})" if scope else repr(eqn.primitive.name)) + at

    def summed(self, x: Shard) -> Shard:
        """Add up the partial sums of devices."""
        return x._replace(here=jax.lax.psum(x.here, tuple(sorted(x.sums))), sums=frozenset()) if x.sums else x

    # --- programs ---

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Shard]) -> list[Shard]:
        """Run a program that was traced for complete axes, and return its results in layouts that follow."""
        known: dict[Any, Shard] = dict(zip(jaxpr.invars, args, strict=True))
        known |= zip(jaxpr.constvars, map(_complete, consts), strict=True)

        def read(v: Any) -> Shard:
            return (
                _complete(jnp.asarray(v.val, getattr(v.aval, "dtype", None)))
                if isinstance(v, jex.Literal)
                else known[v]
            )

        for eqn in jaxpr.eqns:
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
            if name not in ("jit", "pjit", "closed_call", "core_call"):
                xs = [self.summed(x) for x in xs]
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
        rule = rule_of(eqn)
        if any(x.sums for x in xs):
            if rule is not None and _is_linear(eqn, rule, xs):
                found = self._by_rule(eqn, [x._replace(sums=frozenset()) for x in xs])
                return [x._replace(sums=x.sums.union(*(x.sums for x in xs))) for x in found]
            xs = [self.summed(x) for x in xs]
        cut = any(any(x.over) for x in xs)
        if cut and eqn.primitive.name in _AT_PLACES:
            return _AT_PLACES[eqn.primitive.name](self, eqn, xs)
        if rule is not None and (cut or eqn.primitive.name == "broadcast_in_dim" or any(x.alike for x in xs)):
            return self._by_factors(eqn, rule, xs)
        if not cut:
            return self._bound(eqn, xs, [((),) * len(v.aval.shape) for v in eqn.outvars])
        return self._by_complete(eqn, xs)

    def _by_complete(self, eqn: Any, xs: list[Shard]) -> list[Shard]:
        """Run an operation without a rule on complete operands."""
        if eqn.primitive.name in _CALLBACKS:
            raise NeedsCompleteAxes(f"{self._described(eqn)} calls Python, which has no shards.")
        complete = [self.moved(eqn, x, ((),) * len(x.over)) for x in xs]
        return self._bound(eqn, complete, [((),) * len(v.aval.shape) for v in eqn.outvars])

    def _by_factors(self, eqn: Any, rule: OperationRule, xs: list[Shard]) -> list[Shard]:
        """Run an operation on shards: of the factors that pass, and of those of which devices combine results."""
        parts = [(p.part, p.whole) for p in rule.parts]
        equal = {f: g for f, g in parts if rule.sizes[f] == rule.sizes[g] and g not in rule.uses}
        operands, results = (
            [[tuple([equal.get(f, f) for f in dim]) for dim in term] for term in terms]
            for terms in (rule.operands, rule.results)
        )
        passing = set.intersection(*({f for dim in term for f in dim} for term in results))
        # Some of an axis is cut only if it is the outermost factor, or shards would not be contiguous.
        complete = {f for term in (*operands, *results) for dim in term for f in dim[1:]}
        complete |= {f for f, how in rule.uses.items() if how not in ("sum", "max", "min")}
        complete |= {g for f, g in parts if f not in equal}
        combined = {f for f in rule.summed if f not in passing}
        layout: dict[int, Axes] = {}
        wanted = [(dim[0], a) for x, term in zip(xs, operands, strict=True) for dim, a in zip(term, x.over, strict=True)
                  if dim and a]  # fmt: skip
        for f, over in sorted(wanted, key=lambda pair: pair[0] in combined):
            taken = {a for own in layout.values() for a in own}  # a mesh axis cuts one dimension only
            if f not in layout and f not in complete and f in passing | combined and not taken & {*over}:
                if rule.sizes[f] % self.count(over) == 0:
                    layout[f] = over
        before, after = (
            [tuple([layout.get(dim[0], ()) if dim else () for dim in term]) for term in terms]
            for terms in (operands, results)
        )
        here = [self.moved(eqn, x, to) for x, to in zip(xs, before, strict=True)]
        changed = dict[str, Any]()
        for key, of_operand in _SIZES_OF.items():
            own = before[0] if of_operand else after[0]
            if isinstance(given := eqn.params.get(key), tuple) and len(given) == len(own):
                sizes = eqn.invars[0].aval.shape if of_operand else given
                # Of what a look-up takes one element, this is the number, not the size.
                changed[key] = self.cut_sizes(
                    given, [a if n == m else () for a, n, m in zip(own, given, sizes, strict=True)]
                )
        if eqn.primitive.name == "split" and len(given := eqn.params["sizes"]) == 1:
            changed["sizes"] = self.cut_sizes(given, (before[0][eqn.params["axis"]],))
        over = {how: tuple(a for f in combined & {*layout} if rule.uses[f] == how for a in layout[f])
                for how in ("sum", "max", "min")}  # fmt: skip
        self._refuse(eqn, (*(() if self._sums else over["sum"]), *over["max"], *over["min"]), False)
        if largest := over["max"] or over["min"]:
            return [Shard(_extreme(bool(over["max"]), tuple(eqn.params["axes"]), largest, here[0].here), after[0])]
        alike = _alike(eqn, rule.uses, operands, results, here)
        found = self._bound(eqn, here, after, **changed)
        found = [x._replace(alike=own, sums=frozenset(over["sum"])) for x, own in zip(found, alike, strict=True)]
        return found if self._sums else [self.summed(x) for x in found]

    def _bound(self, eqn: Any, xs: Sequence[Shard], to: Sequence[Layout], **changed: Any) -> list[Shard]:
        """Run an operation on what is here, and return results of known layouts."""
        params = {**eqn.params, **changed}
        params |= {n: None for n in ("sharding", "out_sharding") if n in params}
        over = frozenset[str]().union(*(varying_axes(x.here) for x in xs))
        found = evaluated(eqn, params, [_varying(x.here, over) for x in xs])
        return [Shard(x, own) for x, own in zip(found, to, strict=True)]

    def layouts(self, fn: Callable[..., list[Shard]], xs: Sequence[Shard]) -> tuple[list[Layout], list[frozenset[str]]]:
        """Return the layouts of the results of a function, and over which mesh axes they vary."""
        found: list[Layout] = []

        def traced(*here: Any) -> Any:
            results = [self.summed(x) for x in fn(*_with(xs, here))]
            found[:] = [x.over for x in results]
            return [x.here for x in results]

        out = jax.make_jaxpr(traced)(*(x.here for x in xs)).out_avals
        return found, [varying_axes(x) for x in out]


def _alike(eqn: Any, uses: Collection[int], operands: Any, results: Any, xs: Sequence[Shard]) -> list[frozenset[int]]:
    """Return the dimensions of results of which all positions are alike."""
    pairs = [(i in x.alike, dim) for x, term in zip(xs, operands, strict=True) for i, dim in enumerate(term)]
    differ = {f for same, dim in pairs for f in dim if not same or len(dim) > 1}.union(uses)
    alike = {f for same, dim in pairs if same for f in dim}
    if eqn.primitive.name == "broadcast_in_dim":
        alike |= {f for dim in results[0] for f in dim}
    return [
        frozenset(i for i, dim in enumerate(term) if len(dim) == 1 and dim[0] in alike - differ) for term in results
    ]


def _complete(x: Any) -> Shard:
    return Shard(x, ((),) * np.ndim(x))


def _with(xs: Sequence[Shard], here: Sequence[Any]) -> list[Shard]:
    return [x._replace(here=h) for x, h in zip(xs, here, strict=True)]


def _is_ref(x: Any) -> bool:
    return hasattr(jax.typeof(x), "inner_aval")


def _varying(x: Any, over: Collection[str]) -> Any:
    missing = {*over} - varying_axes(x)
    if not missing or _is_ref(x):
        return x
    return varying_over(x if isinstance(x, jax.Array) else jnp.asarray(x), sorted(missing))


def _is_linear(eqn: Any, rule: OperationRule, xs: Sequence[Shard]) -> bool:
    """Return whether an operation of partial sums, and of numbers that are the same everywhere, gives partial sums."""
    name, partial = eqn.primitive.name, [bool(x.sums) for x in xs]
    sums, cut = {x.sums for x in xs if x.sums}, {a for x in xs for own in x.over for a in own}
    if len(sums) > 1 or cut & sums.pop() or "sort" in rule.uses.values():
        return False
    if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):  # a conversion to integers rounds
        return False
    if name in ("mul", "div"):
        return partial[0] != partial[1] and (partial[0] or name == "mul")
    if rule.values not in ("moved", "linear", "sum") or rule.product:
        return False
    zeros = [isinstance(v, jex.Literal) and not np.any(v.val) for v in eqn.invars]
    return all(own or zero for own, zero in zip(partial, zeros, strict=True))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _extreme(largest: bool, axes: tuple[int, ...], over: Axes, x: jax.Array) -> jax.Array:
    """Return the largest or smallest elements along dimensions, and over devices; ties share the derivative."""
    return jax.lax.pmax(jnp.max(x, axes), over) if largest else jax.lax.pmin(jnp.min(x, axes), over)


@_extreme.defjvp
def _(largest: bool, axes: tuple[int, ...], over: Axes, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    y = _extreme(largest, axes, over, x)
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
    return [found._replace(here=self.moved(eqn, table, found.over).here + self.summed(found).here, sums=frozenset())]


def _ragged(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
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


def _ref(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    """Make, read or write a reference: complete, or all of what is here."""
    if len(eqn.invars) > (1 if eqn.primitive.name in ("get", "new_ref", "core_ref", "ref", "freeze") else 2):
        raise NeedsCompleteAxes(f"{self._described(eqn)} reads or writes some of a reference.")
    ref, *values = xs
    return self._bound(eqn, [ref, *(self.moved(eqn, x, ref.over) for x in values)], [ref.over] * len(eqn.outvars))


_AT_PLACES: dict[str, Callable[[OnShards, Any, list[Shard]], list[Shard]]] = {
    **dict.fromkeys(("scatter-add", "scatter_add"), _scatter_add),
    "ragged_dot_general": _ragged,
    **dict.fromkeys("get swap addupdate new_ref core_ref ref freeze".split(), _ref),
}


# --- functions inside of an operation ---


def _within(eqn: Any) -> contextlib.AbstractContextManager[Any]:
    scope = str(eqn.source_info.name_stack)
    return jax.named_scope(scope) if scope else contextlib.nullcontext()


def _call(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    inner = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
    with _within(eqn):
        return self.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), xs)


def _checkpoint(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    found: list[Shard] = []

    def fn(*here: Any) -> Any:
        results = [self.summed(x) for x in self.run(eqn.params["jaxpr"], (), _with(xs, here))]
        found[:] = [x._replace(here=None) for x in results]
        return [x.here for x in results]

    with _within(eqn):
        remat = jax.checkpoint(fn, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
        return _with(found, remat(*(x.here for x in xs)))


def _settled(
    self: OnShards,
    eqn: Any,
    body: Callable[..., list[Shard]],
    fixed: list[Shard],
    carry: list[Shard],
    rest: list[Shard],
) -> tuple[list[Shard], list[Layout]]:
    """Choose the layouts of a carry, which may have more cut dimensions than before the loop, and never fewer."""
    own = frozenset[str]().union(*(x.own for x in (*fixed, *carry, *rest)))
    carry = [x._replace(own=own, alike=frozenset()) for x in carry]
    while True:
        over, vary = self.layouts(body, [*fixed, *carry, *rest])
        new = list[Shard]()
        for x, found, axes in zip(carry, over, vary, strict=False):
            taken = {a for cut in x.over for a in cut}
            to = tuple([a or (b if not taken & {*b} else ()) for a, b in zip(x.over, found, strict=True)])
            x = self.moved(eqn, x, to)
            new.append(x._replace(here=_varying(x.here, axes)))
        if all(
            a.over == b.over and varying_axes(a.here) == varying_axes(b.here) for a, b in zip(carry, new, strict=True)
        ):
            return new, over
        carry = new


def _as_carry(self: OnShards, eqn: Any, found: Sequence[Shard], carry: Sequence[Shard]) -> list[Any]:
    pairs = zip(found, carry, strict=True)
    return [_varying(self.moved(eqn, self.summed(x), c.over).here, varying_axes(c.here)) for x, c in pairs]


def _scan(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    p = eqn.params
    fixed, carry, each = map(list, scan_operands(p, xs))
    each = [self.moved(eqn, x, ((), *x.over[1:])) for x in each]
    rows = [Shard(x.here[0], x.over[1:], x.own) for x in each]
    with _within(eqn):

        def body(*values: Shard) -> list[Shard]:
            return self.run(p["jaxpr"].jaxpr, p["jaxpr"].consts, values)

        carry, over = _settled(self, eqn, body, fixed, carry, rows)

        def step(here: Any, row: Any) -> Any:
            found = body(*fixed, *_with(carry, here), *_with(rows, row))
            return _as_carry(self, eqn, found[: len(carry)], carry), [self.summed(x).here for x in found[len(carry) :]]

        last, every = jax.lax.scan(
            step, [x.here for x in carry], [x.here for x in each], p["length"], p["reverse"], p["unroll"]
        )
    return [*_with(carry, last), *(Shard(y, ((), *own)) for y, own in zip(every, over[len(carry) :], strict=True))]


def _while(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    p = eqn.params
    n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    with _within(eqn):

        def body(*values: Shard) -> list[Shard]:
            return self.run(p["body_jaxpr"].jaxpr, p["body_jaxpr"].consts, values)

        carry, _ = _settled(self, eqn, body, xs[n:m], xs[m:], [])

        def goes_on(here: Any) -> Any:
            (found,) = self.run(p["cond_jaxpr"].jaxpr, p["cond_jaxpr"].consts, [*xs[:n], *_with(carry, here)])
            return self.summed(found).here

        def step(here: Any) -> Any:
            return _as_carry(self, eqn, body(*xs[n:m], *_with(carry, here)), carry)

        return _with(carry, jax.lax.while_loop(goes_on, step, [x.here for x in carry]))


def _cond(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    index, *args = xs

    def run(branch: Any, *values: Shard) -> list[Shard]:
        return self.run(branch.jaxpr, branch.consts, values)

    with _within(eqn):
        branches = [functools.partial(run, branch) for branch in eqn.params["branches"]]
        each = [self.layouts(branch, args) for branch in branches]
        to = list[Layout]()
        for layouts in zip(*(over for over, _ in each), strict=True):
            met: list[Axes] = []
            for options in zip(*layouts, strict=True):
                taken = {a for own in met for a in own}
                met.append(next((own for own in options if own and not taken & {*own}), ()))
            to.append(tuple(met))
        vary = [frozenset().union(*v, *o) for v, o in zip(zip(*(v for _, v in each), strict=True), to, strict=True)]

        def taken_branch(branch: Callable[..., list[Shard]], *here: Any) -> Any:
            found = zip(branch(*_with(args, here)), to, vary, strict=True)
            return [_varying(self.moved(eqn, self.summed(x), own).here, v) for x, own, v in found]

        out = jax.lax.switch(
            index.here, [functools.partial(taken_branch, branch) for branch in branches], *(x.here for x in args)
        )
    return [Shard(x, own) for x, own in zip(out, to, strict=True)]


def _smooth_part(eqn: Any) -> tuple[Callable[..., Any], list[int]]:
    """Return an operation as a function of its differentiable operands and of all, with the places of the former."""
    places = [i for i, v in enumerate(eqn.invars) if jnp.issubdtype(v.aval.dtype, jnp.inexact)]

    def fn(smooth: Sequence[Any], operands: Sequence[Any]) -> Any:
        given = list(operands)
        for i, x in zip(places, smooth, strict=True):
            given[i] = x
        return evaluated(eqn, eqn.params, given)

    return fn, places


def _abstract(atoms: Sequence[Any]) -> list[Any]:
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in atoms]


def _custom_jvp(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    """Run a function with its own derivative, and the derivative, which is traced for complete axes, too."""
    inner, found = eqn.params["call_jaxpr"], list[Layout]()
    fn, places = _smooth_part(eqn)

    @jax.custom_jvp
    def on_shards(*here: Any) -> Any:
        out = [self.summed(x) for x in self.run(inner.jaxpr, inner.consts, _with(xs, here))]
        found[:] = [x.over for x in out]
        return [x.here for x in out]

    @on_shards.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        avals = _abstract(eqn.invars)

        def both(primals: Any, tangents: Any) -> Any:
            return jax.jvp(lambda *smooth: fn(smooth, primals), [primals[i] for i in places], tangents)

        with self._context():
            program = jax.make_jaxpr(both)(avals, [avals[i] for i in places])
        given = [*_with(xs, primals), *(xs[i]._replace(here=tangents[i]) for i in places)]
        out = self.run(program.jaxpr, program.consts, given)
        found[:] = found or [x.over for x in out[: len(out) // 2]]  # unless the function itself has run before
        here = [self.moved(eqn, self.summed(x), own).here for x, own in zip(out, found * 2, strict=True)]
        values, slopes = here[: len(found)], here[len(found) :]
        pairs = [*zip(values, slopes, strict=True)]
        return (
            [_varying(x, varying_axes(y)) for x, y in pairs],
            [_varying(y, varying_axes(x)) for x, y in pairs],
        )

    vary = frozenset[str]().union(*(varying_axes(x.here) for x in xs))
    with _within(eqn):
        out = on_shards(*(_varying(x.here, vary) for x in xs))
    return [Shard(y, own) for y, own in zip(out, found, strict=True)]


def _custom_vjp(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    """Run a function with its own derivative, and the derivative, which is traced for complete axes, too.

    A cotangent of a value that all devices have is summed first, and divided by their number after.
    """
    inner, outs = eqn.params["call_jaxpr"], list[Layout]()
    fn, places = _smooth_part(eqn)
    own = frozenset[str]().union(*(x.own for x in xs))
    axes = {a for over in self._names for a in over if not a.startswith("#")}

    def alike_over(x: Any, over: Layout) -> Axes:
        """Return the mesh axes over which devices have the same value, of which each has part of the cotangent."""
        return tuple(sorted(a for a in axes & varying_axes(x) if a not in own and not any(a in cut for cut in over)))

    @jax.custom_vjp
    def on_shards(*here: Any) -> Any:
        out = [self.summed(x) for x in self.run(inner.jaxpr, inner.consts, _with(xs, here))]
        outs[:] = [x.over for x in out]
        return [x.here for x in out]

    def backward(here: Any, cotangents: Any) -> Any:
        def complete(operands: Any, cotangents: Any) -> Any:
            return jax.vjp(lambda *smooth: fn(smooth, operands), *(operands[i] for i in places))[1](cotangents)

        with self._context():
            program = jax.make_jaxpr(complete)(_abstract(eqn.invars), _abstract(eqn.outvars))
        total = [
            Shard(jax.lax.psum(x, over) if (over := alike_over(x, cut)) else x, cut, own)
            for x, cut in zip(cotangents, outs, strict=True)
        ]
        found = self.run(program.jaxpr, program.consts, [*_with(xs, here), *total])
        result: list[Any] = [None] * len(xs)
        for i, x in zip(places, found, strict=True):
            y = self.moved(eqn, self.summed(x), xs[i].over).here
            devices = self.count(alike_over(here[i], xs[i].over))
            result[i] = _varying(y / devices if devices > 1 else y, varying_axes(here[i]))
        return tuple(result)

    on_shards.defvjp(lambda *here: (on_shards(*here), here), backward)
    vary = frozenset[str]().union(*(varying_axes(x.here) for x in xs))
    with _within(eqn):
        out = on_shards(*(_varying(x.here, vary) for x in xs))
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


def _exchange(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    exchange: ShardExchange = eqn.params["exchange"]
    if any(a.startswith("#") for x in xs for own in x.over for a in own):
        raise self.needs(eqn, (ROWS,))
    with _within(eqn):
        here = [self.moved(eqn, x, to).here for x, to in zip(xs, exchange.before, strict=True)]
        return [Shard(x, to) for x, to in zip(exchange.of_shards(here), exchange.after, strict=True)]


_CALLS: dict[str, Callable[[OnShards, Any, list[Shard]], list[Shard]]] = {
    **dict.fromkeys("jit pjit closed_call core_call custom_lin".split(), _call),
    **dict.fromkeys("checkpoint remat remat2".split(), _checkpoint),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "exchange": _exchange,
}

exchange_p = jex.Primitive("exchange")
exchange_p.multiple_results = True
exchange_p.def_abstract_eval(lambda *xs, avals, exchange: list(avals))


def _mapped_exchange(xs: Sequence[Any], dims: Sequence[int | None], *, avals: Any, exchange: ShardExchange) -> Any:
    size = next(x.shape[d] for x, d in zip(xs, dims, strict=True) if d is not None)
    first = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(xs, dims, strict=True)]
    more = tuple(ShapedArray((size, *a.shape), a.dtype) for a in avals)
    return exchange_p.bind(*first, avals=more, exchange=exchange.of_mapped(dims)), [0] * len(avals)


batching.primitive_batchers[exchange_p] = _mapped_exchange
