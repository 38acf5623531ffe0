"""Run a program that was traced for complete axes on the shards of a device.

Python sees complete axes only: code is traced once, with the true sizes. Each of its operations is then run on shards
by its rule, see `operations_on_shards`; the functions inside of an operation, which `inside` of
`axonym.core.operation_rules` lists, are run like the program.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend import core as jex

from ..core.jax_versions import evaluated, scan_operands, traced_operation, varying_axes
from ..core.operation_rules import Inside, inside
from .mesh_axes import Axes
from .operations_on_shards import ROWS, SIZES, Layout, NeedsCompleteAxes, OperationsOnShards, Shard, device_varying

_COLLECTIVES = frozenset(
    """psum psum_invariant pmax pmin ppermute pbroadcast pcollective all_reduce all_gather reduce_scatter all_to_all
    all_gather_invariant ragged_all_to_all axis_index""".split()
)
_CHANGES_NOTHING = frozenset("pvary pcast reshard mesh_cast sharding_constraint layout_constraint".split())
_PASSES_SUMS = frozenset("jit pjit closed_call core_call checkpoint remat remat2 scan while cond".split())

_ShardFunction = Callable[[Sequence[Shard]], list[Shard]]


class OnShards(OperationsOnShards):
    """Runs programs on shards."""

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Shard]) -> list[Shard]:
        """Run a program that was traced for complete axes, and return its results in layouts that follow."""
        known = {
            v: x._replace(over=self.without_single_devices(x.over)) for v, x in zip(jaxpr.invars, args, strict=True)
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
            raise NeedsCompleteAxes(f"{self.described(eqn)} communicates by itself.")
        if (call := _CALLS.get(name)) is not None and not (name == "call_hi_primitive" and _is_smooth(eqn)):
            if name not in _PASSES_SUMS:
                xs = [self.moved(eqn, x, x.over) for x in xs]
            scope = str(eqn.source_info.name_stack)
            self.around.append(eqn)
            with jax.named_scope(scope) if scope else contextlib.nullcontext():
                found = call(self, eqn, xs)
            self.around.pop()
        else:
            if own:
                xs = [self.moved(eqn, x, tuple(() if own & {*a} else a for a in x.over)) for x in xs]
            if name.startswith("debug_") and any(a.startswith("#") for x in xs for own in x.over for a in own):
                return self.bound(eqn, xs, [])  # a print shows the shard, and no value depends on a print
            if name != "ragged_dot_general" and any((SIZES,) in x.over for x in xs):
                raise NeedsCompleteAxes(f"{self.described(eqn)} uses the numbers of rows.")
            found = self.by_rule(eqn, xs)
        return [x._replace(own=x.own | own) for x in found]

    def function_on_shards(self, inner: Inside) -> _ShardFunction:
        """Return a function inside of an operation as one of shards."""
        return functools.partial(self.run, inner.jaxpr, inner.constants)


def _is_smooth(eqn: Any) -> bool:
    """Return whether an operation may have a derivative, which its program does not have if it is its own."""
    return any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)


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


def _arrays_here(xs: Sequence[Shard]) -> list[Any]:
    return [x.here for x in xs]


def _all_varying(xs: Sequence[Shard]) -> list[Any]:
    """Return arrays that are device-varying over the mesh axes over which any of them is."""
    over = frozenset[str]().union(*(varying_axes(x.here) for x in xs))
    return [device_varying(x.here, over) for x in xs]


# --- functions inside of an operation ---


def _function_of_arrays(fn: _ShardFunction, like: Sequence[Shard]) -> tuple[Callable[..., list[Any]], list[Shard]]:
    """Return a function of shards as one of arrays, and a list that has the layouts of its results once it has run."""
    layouts: list[Shard] = []

    def of_arrays(*here: Any) -> list[Any]:
        found = fn(_with_arrays(like, here))
        layouts[:] = [x._replace(here=None) for x in found]
        return _arrays_here(found)

    return of_arrays, layouts


def _traced_results(fn: _ShardFunction, xs: Sequence[Shard]) -> list[Shard]:
    """Return the results of a function, with types in place of arrays."""
    of_arrays, layouts = _function_of_arrays(fn, xs)
    types = jax.make_jaxpr(of_arrays)(*_arrays_here(xs)).out_avals
    return _with_arrays(layouts, types)


def _run_call(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    (called,) = inside(eqn)
    return self.function_on_shards(called)(xs)


def _run_checkpoint(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    (called,) = inside(eqn)
    fn, layouts = _function_of_arrays(self.function_on_shards(called), xs)
    remat = jax.checkpoint(fn, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
    found = remat(*_arrays_here(xs))
    return _with_arrays(layouts, found)


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
    return [device_varying(self.moved(eqn, x, y.over, y.sums).here, varying_axes(y.here)) for x, y in pairs]


def _settled_carry(
    self: OnShards, eqn: Any, body: _ShardFunction, fixed: list[Shard], carry: list[Shard], rest: list[Shard]
) -> tuple[list[Shard], list[Shard]]:
    """Choose the layouts of a carry, which may have more cut dimensions and sums than before the loop, never fewer.

    Returned are the carry and the results of a step, with types in place of arrays.
    """
    own = frozenset[str]().union(*(x.own for x in (*fixed, *carry, *rest)))
    carry = [x._replace(own=own) for x in carry]
    while True:
        found = _traced_results(body, [*fixed, *carry, *rest])
        wanted = [_common_layout(x, y)._replace(here=y.here) for x, y in zip(carry, found, strict=False)]
        new = _with_arrays(wanted, _arrays_like(self, eqn, carry, wanted))
        alike = [{i for i in x.alike & y.alike if not to.over[i]} for x, y, to in zip(carry, found, new, strict=False)]
        new = [x._replace(alike=frozenset(own)) for x, own in zip(new, alike, strict=True)]
        before, after = ([(x.over, x.sums, x.alike, varying_axes(x.here)) for x in xs] for xs in (carry, new))
        if before == after:
            return new, found
        carry = new


def _run_scan(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    (loop,), p = inside(eqn), eqn.params
    body = self.function_on_shards(loop)
    fixed, carry, each = scan_operands(p, xs)
    if not p["length"]:
        return [*carry, *(_complete_value(jnp.zeros(v.aval.shape, v.aval.dtype)) for v in eqn.outvars[len(carry) :])]
    each = [self.moved(eqn, x, ((), *x.over[1:]), x.sums) for x in each]
    rows = [Shard(x.here[0], x.over[1:], x.own, sums=x.sums) for x in each]
    carry, found = _settled_carry(self, eqn, body, fixed, carry, rows)

    def step(here: Any, row: Any) -> Any:
        found = body([*fixed, *_with_arrays(carry, here), *_with_arrays(rows, row)])
        return _arrays_like(self, eqn, found[: len(carry)], carry), _arrays_here(found[len(carry) :])

    last, every = jax.lax.scan(step, _arrays_here(carry), _arrays_here(each), p["length"], p["reverse"], p["unroll"])
    stacked = [Shard(y, ((), *x.over), sums=x.sums) for y, x in zip(every, found[len(carry) :], strict=True)]
    return [*_with_arrays(carry, last), *stacked]


def _body_of_while(eqn: Any, test: Inside, loop: Inside) -> Any:
    """Return the body of a loop as a program of all operands; what goes on for some elements keeps the others."""

    def body(*values: Any) -> list[Any]:
        (goes_on,) = jex.jaxpr_as_fun(eqn.params["cond_jaxpr"])(*(values[i] for i in test.operands))
        new = jex.jaxpr_as_fun(eqn.params["body_jaxpr"])(*(values[i] for i in loop.operands))
        if not goes_on.ndim:
            return new
        at = range(goes_on.ndim)
        return [
            jax.lax.select(jax.lax.broadcast_in_dim(goes_on, y.shape, at), y, x)
            for x, y in zip(values[len(values) - len(new) :], new, strict=True)
        ]

    return jax.make_jaxpr(body)(*_abstract_values(eqn.invars))


def _run_while(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    test, loop = inside(eqn)
    with self.context():
        program = _body_of_while(eqn, test, loop)
    body, goes_on = functools.partial(self.run, program.jaxpr, program.consts), self.function_on_shards(test)
    first = len(xs) - loop.carried
    fixed = xs[:first]
    carry, _ = _settled_carry(self, eqn, body, fixed, xs[first:], [])

    def goes_on_here(here: Any) -> Any:
        (found,) = goes_on([*xs[: test.first], *_with_arrays(carry, here)])
        return self.any_element(eqn, found)  # `vmap` leaves an answer for each element

    def step(here: Any) -> Any:
        return _arrays_like(self, eqn, body([*fixed, *_with_arrays(carry, here)]), carry)

    return _with_arrays(carry, jax.lax.while_loop(goes_on_here, step, _arrays_here(carry)))


def _run_linear_solve(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    """Solve a linear system, whose derivative follows from its product, on shards."""
    programs, counts = eqn.params["jaxprs"], eqn.params["const_lengths"]
    xs = _with_arrays(xs, _all_varying(xs))  # as JAX evaluates the programs again with more
    ends, rights = [*itertools.accumulate(counts)], xs[sum(counts) :]

    def of(i: int, values: Sequence[Shard]) -> list[Shard]:
        return self.run(programs[i].jaxpr, programs[i].consts, [*xs[ends[i] - counts[i] : ends[i]], *values])

    def here_of(i: int) -> Callable[..., list[Any]]:
        return lambda here: _arrays_like(self, eqn, of(i, _with_arrays(rights, here)), rights)

    solved = _traced_results(functools.partial(of, 2), rights)
    if len(solved) != len(rights):
        raise NeedsCompleteAxes(f"{self.described(eqn)} has auxiliary results.")
    rights = [self.moved(eqn, x, _common_layout(x, y).over) for x, y in zip(rights, solved, strict=True)]
    product, solve, backward = here_of(0), here_of(2), here_of(3) if programs[3] is not None else None
    found = jax.lax.custom_linear_solve(
        product, _arrays_here(rights), lambda _, b: solve(b), backward and (lambda _, b: backward(b))
    )
    return _with_arrays(rights, found)


def _run_cond(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    index, *args = xs
    branches = [self.function_on_shards(branch) for branch in inside(eqn)]
    each = [*zip(*(_traced_results(branch, args) for branch in branches), strict=True)]
    wanted = [_common_layout(*options) for options in each]
    vary = [
        frozenset(a for a in met.sums.union(*met.over) if not a.startswith("#")).union(
            *(varying_axes(x.here) for x in options)
        )
        for met, options in zip(wanted, each, strict=True)
    ]

    def taken_branch(branch: _ShardFunction, *here: Any) -> Any:
        found = zip(branch(_with_arrays(args, here)), wanted, vary, strict=True)
        return [device_varying(self.moved(eqn, x, to.over, to.sums).here, v) for x, to, v in found]

    at, taken = self.moved(eqn, index, ()).here, [functools.partial(taken_branch, branch) for branch in branches]
    return _with_arrays(wanted, jax.lax.switch(at, taken, *_arrays_here(args)))


# --- functions with their own derivative ---


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


def _run_with_derivative(self: OnShards, eqn: Any, xs: list[Shard]) -> list[Shard]:
    """Run a function with its own derivative, and the derivative, which is traced for complete axes, too."""
    (called,) = inside(eqn)
    inner = self.function_on_shards(called)
    of_arrays, layouts = _function_of_arrays(lambda xs: [self.moved(eqn, x, x.over) for x in inner(xs)], xs)
    of_jvp = eqn.primitive.name == "custom_jvp_call"
    derivative = functools.partial(
        _results_and_tangents if of_jvp else _cotangents_of_operands,
        self,
        eqn,
        _with_arrays(xs, [None] * len(xs)),
        layouts,
    )
    if of_jvp:
        on_shards: Any = jax.custom_jvp(of_arrays)
        on_shards.defjvp(derivative)
    else:
        on_shards = jax.custom_vjp(of_arrays)
        on_shards.defvjp(lambda *here: (on_shards(*here), here), derivative)
    out = on_shards(*_all_varying(xs))
    return [Shard(y, x.over) for y, x in zip(out, layouts, strict=True)]


def _results_and_tangents(
    self: OnShards, eqn: Any, xs: list[Shard], layouts: list[Shard], primals: Any, tangents: Any
) -> tuple[list[Any], list[Any]]:
    """Return the results of a function, and how they change."""
    fn, places = _smooth_part(eqn)
    avals = _abstract_values(eqn.invars)

    def both(primals: Any, tangents: Any) -> Any:
        return jax.jvp(lambda *smooth: fn(smooth, primals), [primals[i] for i in places], tangents)

    with self.context():
        program = jax.make_jaxpr(both)(avals, [avals[i] for i in places])
    given = [*_with_arrays(xs, primals), *(xs[i]._replace(here=tangents[i]) for i in places)]
    out = self.run(program.jaxpr, program.consts, given)
    layouts[:] = layouts or [Shard(None, x.over) for x in out[: len(out) // 2]]  # unless the function itself has run
    here = [self.moved(eqn, x, to.over).here for x, to in zip(out, layouts * 2, strict=True)]
    pairs = [*zip(here[: len(layouts)], here[len(layouts) :], strict=True)]
    return (
        [device_varying(x, varying_axes(y)) for x, y in pairs],
        [device_varying(y, varying_axes(x)) for x, y in pairs],
    )


def _cotangents_of_operands(
    self: OnShards, eqn: Any, xs: list[Shard], layouts: list[Shard], here: Any, cotangents: Any
) -> tuple[Any, ...]:
    """Return the cotangents of the operands of a function.

    A cotangent of a value that all devices have is summed first, and divided by their number after. Along axes that are
    none of the mesh, it stays a partial sum.
    """
    fn, places = _smooth_part(eqn)
    own = frozenset[str]().union(*(x.own for x in xs))
    axes = {a for over in self.names for a in over if not a.startswith("#")}

    def alike_over(x: Any, over: Layout) -> Axes:
        """Return the mesh axes over which devices have the same value, of which each has part of the cotangent."""
        return tuple(sorted(a for a in axes & varying_axes(x) if a not in own and not any(a in cut for cut in over)))

    def partial_over(over: Layout) -> frozenset[str]:
        apart = [*self.places, *({ROWS} & self.sizes.keys())]
        return frozenset(a for a in apart if not any(a in cut for cut in over))

    def complete(operands: Any, cotangents: Any) -> Any:
        return jax.vjp(lambda *smooth: fn(smooth, operands), *(operands[i] for i in places))[1](cotangents)

    with self.context():
        program = jax.make_jaxpr(complete)(_abstract_values(eqn.invars), _abstract_values(eqn.outvars))
    total = [
        Shard(
            jax.lax.psum(x, over) if (over := alike_over(x, to.over)) else x, to.over, own, sums=partial_over(to.over)
        )
        for x, to in zip(cotangents, layouts, strict=True)
    ]
    runner = copy.copy(self)
    runner.sums = True
    found = runner.run(program.jaxpr, program.consts, [*_with_arrays(xs, here), *total])
    result: list[Any] = [None] * len(xs)
    for i, x in zip(places, found, strict=True):
        y = self.moved(eqn, x, xs[i].over, partial_over(xs[i].over)).here
        devices = self.count(alike_over(here[i], xs[i].over))
        result[i] = device_varying(y / devices if devices > 1 else y, varying_axes(here[i]))
    return tuple(result)


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
    here = [self.moved(eqn, x, to).here for x, to in zip(xs, exchange.before, strict=True)]
    return [Shard(x, to) for x, to in zip(exchange.of_shards(here), exchange.after, strict=True)]


_CALLS: dict[str, Callable[[OnShards, Any, list[Shard]], list[Shard]]] = {
    **dict.fromkeys("jit pjit closed_call core_call call_hi_primitive".split(), _run_call),
    **dict.fromkeys("checkpoint remat remat2".split(), _run_checkpoint),
    "scan": _run_scan,
    "while": _run_while,
    "cond": _run_cond,
    "custom_linear_solve": _run_linear_solve,
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), _run_with_derivative),
    "exchange": _run_exchange,
}


def _mapped_exchange(xs: Sequence[Any], dims: Sequence[int | None], *, avals: Any, exchange: ShardExchange) -> Any:
    size = next(x.shape[d] for x, d in zip(xs, dims, strict=True) if d is not None)
    first = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(xs, dims, strict=True)]
    more = tuple(ShapedArray((size, *a.shape), a.dtype) for a in avals)
    return exchange_p.bind(*first, avals=more, exchange=exchange.of_mapped(dims)), [0] * len(avals)


exchange_p = traced_operation("exchange", lambda *xs, avals, exchange: list(avals), _mapped_exchange)
