"""The functions of transforms: those that hold arrays, those that are found again, and garbage collection."""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import axonym as axn
from axonym.core import function_cache
from axonym.custom_partitioning import partitioned
from axonym.transforms.control import cond, while_loop
from axonym.transforms.lift import lift
from axonym.transforms.scan import associative_scan, fold, map, scan
from tests.helpers import assert_named, compilations, spec

Batch, Embed, Out, Time = axn.make_axes(batch=8, embed=4, out=3, time=5)
X = axn.named(jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32), (Batch, Embed))
WEIGHT = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
START, ONES, XS = axn.zeros(Embed), axn.ones(Embed), axn.ones((Time, Embed))


class Project(eqx.Module):
    """A positional function that holds an array."""

    weight: jax.Array
    activation: Callable[[Any], Any] = jnp.tanh
    scale: float = 2.0

    def __call__(self, v: Any) -> Any:
        return self.activation(v @ self.weight) * self.scale

    def method(self, v: Any) -> Any:
        return self(v)

    @lift("_, embed -> out")
    def by_name(self, v: Any) -> Any:
        return self(v)


class Decay(eqx.Module):
    """A body that holds a named array, and a function that is not static."""

    rate: axn.NamedArray
    activation: Callable[[Any], Any] = axn.tanh
    power: int = eqx.field(static=True, default=1)

    def __call__(self, h: Any, x: Any) -> Any:
        return self.activation(h * self.rate**self.power + x)

    def method(self, h: Any, x: Any) -> Any:
        return self(h, x)


class Scale(eqx.Module):
    """A positional function that holds an array of one axis."""

    by: jax.Array

    def method(self, v: Any) -> Any:
        return v * self.by


def decay(rate: axn.NamedArray, h: Any, x: Any) -> Any:
    return axn.tanh(h * rate + x)


# --- arrays that functions hold ---

POSITIONAL: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "module": lambda w: lift(Project(w), "embed -> out"),
    "method": lambda w: lift(Project(w).method, "embed -> out"),
    "partial": lambda w: lift(functools.partial(lambda w, v: jnp.tanh(v @ w) * 2.0, w), "embed -> out"),
    "partial of a tree": lambda w: lift(
        jax.tree_util.Partial(lambda m, v: m["m"](v), {"m": Project(w)}), "embed -> out"
    ),
    "handed on": lambda w: Project(w).by_name,
}


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("make", POSITIONAL.values(), ids=POSITIONAL)
def test_lifted_on_meshes(mesh: Mesh, make: Callable[[Any], Callable[..., Any]], transform: Any) -> None:
    expected = axn.named(jnp.tanh(X.array @ WEIGHT) * 2.0, (Batch, Out))
    with jax.set_mesh(mesh):
        weight, x = jax.device_put(WEIGHT), axn.shard(X, {"batch": "data", "embed": "model"})
        found = jax.block_until_ready(transform(lambda w, x: make(w)(x))(weight, x))
    assert spec(found) == ("data", None)
    assert_named(axn.to_host(found), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", POSITIONAL.values(), ids=POSITIONAL)
def test_gradients_of_what_is_held(make: Callable[[Any], Callable[..., Any]]) -> None:
    found = jax.grad(lambda w: make(w)(X).sum().scalar())(jnp.asarray(WEIGHT))
    expected = jax.grad(lambda w: (jnp.tanh(X.array @ w) * 2.0).sum())(jnp.asarray(WEIGHT))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_a_body() -> None:
    def loss(rate: Any, transform: Any) -> Any:
        return transform(Decay(rate).method)(START, XS).sum().scalar()

    rate = axn.full(Embed, 0.5)
    with jax.checking_leaks():
        found = jax.jit(jax.grad(lambda r: loss(r, lambda f: fold(f, Time))))(rate)
    expected = jax.grad(lambda r: loss(r, lambda f: lambda h, xs: functools.reduce(f, xs.unbind("time"), h)))(rate)
    assert_named(found, expected, rtol=1e-5)
    assert_named(jax.grad(lambda r: loss(r, lambda f: fold(f, Time)))(rate), expected, rtol=1e-5)


# --- what is found again ---

OTHER = axn.full(Embed, 0.75)
AGAIN: dict[str, Callable[[axn.NamedArray], Any]] = {
    "module": lambda r: fold(Decay(r), Time)(START, XS),
    "partial": lambda r: map(functools.partial(decay, r, ONES), Time)(XS),
    "method": lambda r: fold(Decay(r).method, Time)(START, XS),
    "while": lambda r: while_loop(functools.partial(_below, r), functools.partial(_grown, r), START),
    "cond": lambda r: cond(True, Decay(r), Decay(r).method, ONES, ONES),
    "associative": lambda r: associative_scan(functools.partial(_weighed, r), XS, Time),
    "lift": lambda r: lift(jnp.linalg.norm, "embed ->")(r),
    "lift a module": lambda r: lift(Scale(r.array).method, "embed -> embed")(X),
}


def _below(limit: Any, x: Any) -> Any:
    return x.sum() < limit.sum()


def _grown(by: Any, x: Any) -> Any:
    return x + by


def _weighed(weight: Any, a: Any, b: Any) -> Any:
    return a + b * weight


@pytest.mark.parametrize("call", AGAIN.values(), ids=AGAIN)
def test_equal_functions_are_compiled_once(call: Callable[[axn.NamedArray], Any]) -> None:
    """Also where each call makes a new one, as when a method is looked up or a function lifted in a loop."""
    call(axn.full(Embed, 0.5)), axn.sum(call(OTHER))
    first = axn.full(Embed, 0.5)
    with compilations() as seen:
        found = [call(first), call(OTHER)]
    assert not seen
    assert float(axn.sum(found[0]).array) != float(axn.sum(found[1]).array)


def test_static_parts_are_told_apart() -> None:
    rate = axn.full(Embed, 0.5)
    bodies = Decay(rate), Decay(rate, axn.sin), Decay(rate, power=2)
    for body, activation, power in zip(bodies, (jnp.tanh, jnp.sin, jnp.tanh), (1, 1, 2), strict=True):
        found = fold(body, Time)(ONES, XS)
        h = jnp.ones(4)
        for _ in range(5):
            h = activation(h * 0.5**power + 1.0)
        np.testing.assert_allclose(found.array, h, rtol=1e-5)


def test_an_object_that_changes_is_seen() -> None:
    class Counter:
        step = 1.0

        def method(self, h: Any, x: Any) -> Any:
            return h + self.step

    counter = Counter()
    assert float(fold(counter.method, Time)(0.0, XS)) == 5.0
    counter.step = 2.0
    assert float(fold(counter.method, Time)(0.0, XS)) == 10.0


def test_functions_that_cannot_be_known_again_are_kept_with_the_lifted_one() -> None:
    class Listing(eqx.Module):
        powers: list[int] = eqx.field(static=True)

        def __call__(self, v: Any) -> Any:
            return sum(v**p for p in self.powers)

    lifted = lift(Listing([1, 2]), "embed -> embed")
    assert_named(lifted(X), X + X * X, rtol=1e-6)
    with compilations() as seen:
        lifted(X)
    assert not seen


# --- garbage collection ---


def test_leaves_are_not_kept() -> None:
    """What a static leaf closes over goes with it, though the body and what was compiled for it live on."""

    def body(h: Any, x: Any, model: Any) -> tuple[Any, Any]:
        return model["fn"](h), model

    def use() -> list[weakref.ref[Any]]:
        big = jnp.ones(8)
        model = {"fn": lambda h: h + big[0]}
        scan(body, Time)(0.0, XS, model)
        cond(True, body, body, 0.0, 0.0, model)
        return [weakref.ref(big), weakref.ref(model["fn"])]

    references = use()
    gc.collect()
    assert [r() for r in references] == [None, None]
    assert not function_cache._CACHES[body]


@pytest.mark.parametrize("holder", [functools.partial, jax.tree_util.Partial, lambda fn, w: Project(w, fn)])
def test_what_holds_them_is_not_kept(holder: Callable[..., Any]) -> None:
    def use() -> list[weakref.ref[Any]]:
        weight = jnp.ones((4, 1))

        def fn(*args: Any) -> Any:
            return args[-1] * 1.0

        lift(holder(fn, weight), "embed -> new")(X)
        return [weakref.ref(weight), weakref.ref(fn)]

    references = use()
    gc.collect()
    assert [r() for r in references] == [None, None]


class Holder(eqx.Module):
    """A tree with a static field, which JAX compares by `==`."""

    rate: axn.NamedArray
    static: Any = eqx.field(static=True)


class Body(Holder):
    """A function with a static field."""

    def __call__(self, x: Any) -> Any:
        return _number(x, self)


@dataclasses.dataclass(frozen=True)
class Config:
    value: Any


def _number(x: Any, holder: Any) -> Any:
    """Return a number that shows which program was run."""
    value = holder.static if isinstance(holder, Holder) else holder
    return x * 0.0 + [repr(v) for values in ALIKE.values() for v in values].index(repr(value))


ALIKE: dict[str, tuple[Any, ...]] = {
    "numbers": (1, 1.0, True, 1 + 0j),
    "signs": (0.0, -0.0, 0, False),
    "tuples": ((1, 2), (1.0, 2), (True, 2)),
    "sets": (frozenset({1}), frozenset({1.0}), frozenset({True})),
    "dataclasses": (Config(1), Config(1.0), Config((True,)), Config((1,))),
}
PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "static field of an argument": lambda v: map(_number, Time)(XS, Holder(ONES, v)),
    "leaf of the function": lambda v: map(lambda x, v: _number(x, Config(v).value), Time)(XS, v),
    "static field of the function": lambda v: map(Body(ONES, v), Time)(XS),
    "branch": lambda v: cond(True, _number, _number, ONES, Holder(ONES, v)),
    "lift": lambda v: lift(_number, "embed -> embed")(ONES, Holder(ONES, v)),
    "partitioned": lambda v: PARTITIONED(ONES, holder=v),
    "hashable_partition": lambda v: STATIC(*axn.tree.hashable_partition(Holder(ONES, v), eqx.is_array)),
    "named_jit": lambda v: NAMED_JIT(ONES, v, jnp.tanh),
    "named_jit, in a static field": lambda v: BY_FIELD(ONES, Holder(ONES, v)),
    "named_jit, in a static field, with a function": lambda v: NAMED_JIT(ONES, Holder(ONES, v), jnp.tanh),
}
PARTITIONED = partitioned(_number)
STATIC = jax.jit(lambda *parts: _number(ONES, axn.tree.hashable_combine(*parts)), static_argnums=1)
NAMED_JIT = axn.named_jit(lambda x, holder, _: _number(x, holder))
BY_FIELD = axn.named_jit(_number)


@pytest.mark.oldest
@pytest.mark.parametrize("run", PROGRAMS.values(), ids=PROGRAMS)
def test_static_values_are_told_apart_by_type_and_sign(run: Callable[[Any], Any]) -> None:
    values = [v for alike in ALIKE.values() for v in alike]
    for _ in range(2):
        assert [int(axn.max(run(v)).array) for v in values] == list(range(len(values)))


def test_placeholders_are_told_apart_by_type() -> None:
    """1 and True in the place of an array are two programs, although Python calls them equal."""
    xs, tree = axn.arange(axn.Axis("t", 2)), {"w": axn.ones({"q": 2})}

    def masked(x: Any, placeholders: Any) -> Any:
        held = placeholders["w"].array
        return x * (2.5 if isinstance(held, bool) else held)

    one, true = (jax.tree.map(lambda _, v=v: v, tree) for v in (1, True))
    assert axn.map(masked, "t")(xs, one).tolist() == [0, 1]
    assert axn.map(masked, "t")(xs, true).tolist() == [0.0, 2.5]
