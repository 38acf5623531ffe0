"""Kernels that differ only in names share one compiled function, without a visible difference."""

from __future__ import annotations

import ast
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer
from jax.sharding import AxisType, Mesh

import axonym as axn
from axonym import nn
from axonym.named_array import wrap_result
from axonym.nn import attention
from axonym.ops import _kernels
from axonym.ops.updating import updated_slice
from tests.helpers import compilations

FIRST = ("batch", "embed", "mlp")
# The same axes under other names: in the opposite alphabetical order, and some that look like something else.
OTHERS = [("x", "y", "z"), ("z", "y", "x"), ("#1", "#0", "embed")]

KEY = jax.random.key(0)
RAW = np.linspace(-2.0, 3.0, 12, dtype=np.float32).reshape(3, 4)
SQUARE = np.eye(3, dtype=np.float32) * 2 + np.linspace(0, 1, 9, dtype=np.float32).reshape(3, 3)


def _x(*names: str) -> axn.NamedArray:
    """Make an array of 3, 4, or 3 x 4 numbers."""
    return axn.named(jnp.asarray(RAW if len(names) == 2 else RAW[0]), names)


def _ids(*names: str) -> axn.NamedArray:
    return axn.named(jnp.asarray([2, 0]), names)


def _square(a: str, b: str) -> axn.NamedArray:
    return axn.named(jnp.asarray(SQUARE), (a, b))


# One or more calls of every family of operations. `a`, `b` and `c` are the names of axes.
FAMILIES: dict[str, Callable[[str, str, str], Any]] = {
    "elementwise": lambda a, b, c: [axn.exp(_x(a, b)), axn.frexp(_x(a, b)), axn.round(_x(a, b), 1), -_x(a, b)],
    "binary": lambda a, b, c: [_x(a, b) + _x(b), _x(b) * _x(a, b), _x(a, b) - 1.0, 2 / _x(a, b), _x(a, b) ** 2],
    "transposed": lambda a, b, c: _x(a, b) + axn.rearrange(_x(a, b), (b, a)),
    "reductions": lambda a, b, c: [axn.sum(_x(a, b), a), axn.max(_x(a, b), (b, a)), axn.mean(_x(a, b), axn.Axis(b, 4))],
    "masked": lambda a, b, c: axn.var(_x(a, b), a, where=_x(b) > -2),
    "index of": lambda a, b, c: [axn.argmax(_x(a, b), b), axn.argmin(_x(a, b))],
    "cumulative": lambda a, b, c: [axn.cumsum(_x(a, b), a), axn.diff(_x(a, b), b)],
    "contraction": lambda a, b, c: [
        axn.dot(_x(a, b), axn.rename(_x(a, b), {a: c}), axis=b),
        axn.dot(_x(a, b), _x(b), axis=None),
        axn.einsum("i j, k j -> k i", _x(a, b), _x(c, b)),
        axn.einsum("{A B} -> B", _x(a, b), A=a, B=b),
    ],
    "rearranging": lambda a, b, c: [
        axn.rearrange(_x(a, b), (b, ...)),
        axn.rearrange(_x(a, b), "i (j k) -> k i j", j=2),
        axn.rearrange(_x(a, b), "i j -> (new: j i)", new=c),
        axn.flatten_axes(_x(a, b), (b, a), c),
        axn.unflatten_axis(_x(a, b), b, (axn.Axis(b, 2), axn.Axis(c, 2))),
        axn.unbind(_x(a, b), b)[1],
        axn.split(_x(a, b), b, [axn.Axis(b, 1), axn.Axis(c, 3)]),
    ],
    "indexing": lambda a, b, c: [
        _x(a, b)[a, 1],
        _x(a, b)[b, 1:3],
        _x(a, b)[a, _ids(c)],
        _x(a, b)[{a: axn.named(jnp.asarray([2, 0, 1, 1]), b)}],
        _x(a, b)[a, 1, b, [2, 0]],
    ],
    "updates": lambda a, b, c: [
        _x(a, b).at[a, 1].set(0.0),
        _x(a, b).at[b, _ids(c)].add(axn.named(jnp.ones(2), c)),
        updated_slice(_x(a, b), {b: 1}, _x(a, b)[b, 0:2]),
    ],
    "concatenation": lambda a, b, c: [
        axn.concatenate([_x(a, b), axn.rearrange(_x(a, b), (b, a))], a),
        axn.stack([_x(a, b), _x(a, b)], c),
    ],
    "padding": lambda a, b, c: [axn.pad(_x(a, b), {b: (1, 2)}), axn.tile(_x(a, b), {c: 2, a: 2})],
    "moving": lambda a, b, c: [axn.roll(_x(a, b), 1, b), axn.flip(_x(a, b), a), axn.repeat(_x(a, b), 2, a)],
    "broadcasting": lambda a, b, c: [
        axn.broadcast_axis(_x(a, b), axn.Axis(c, 2)),
        axn.broadcast_arrays(_x(b), _x(a, b)),
        axn.broadcast_to(_x(b), {a: 2, b: 4}),
    ],
    "selection": lambda a, b, c: [
        axn.where(_x(b) > 0, _x(a, b), 0.0),
        axn.clip(_x(a, b), _x(b), 1.0),
        axn.take_along_axis(_x(a, b), _ids(b)[b, 0:1], b),
        axn.nonzero(_x(a, b) > 0, size=axn.Axis(c, 5)),
    ],
    "sorting": lambda a, b, c: [axn.sort(_x(a, b), a), axn.argsort(_x(a, b), b)],
    "largest": lambda a, b, c: [
        *axn.top_k(_x(a, b), b, 2, c),
        *axn.top_k(_x(a, b), b, _ids(a)[a, [1, 0, 1]] + 1, max_k=3, replacement=_x(a)[a, [0, 1, 2]]),
    ],
    "statistics": lambda a, b, c: [
        axn.median(_x(a, b), a),
        axn.quantile(_x(a, b), axn.named([0.25, 0.5], c), b),
    ],
    "sets": lambda a, b, c: [
        axn.unique(_x(a, b), axn.Axis(c, 3)),
        axn.bincount(_ids(a), axn.Axis(c, 3)),
    ],
    "diagonals": lambda a, b, c: [axn.tril(_square(a, b), a, b)],
    "signal": lambda a, b, c: [axn.convolve(_x(a, b), _x(b), b)],
    "linalg": lambda a, b, c: [
        axn.linalg.inv(_square(a, b), (a, b)),
        axn.linalg.solve(_square(a, b), axn.named(jnp.ones(3), a), (a, b)),
        axn.linalg.norm(_x(a, b), b),
    ],
    "fft": lambda a, b, c: [axn.fft.rfft(_x(a, b), {b: c}), axn.fft.fftshift(_x(a, b), a)],
    "polynomials": lambda a, b, c: [axn.poly.polyval(_x(b), _x(a)), axn.poly.polymul(_x(a), _x(b))],
    "creation": lambda a, b, c: [
        axn.zeros({a: 2, b: 3}),
        axn.arange(axn.Axis(a, 4)),
        axn.vander(_x(a), axn.Axis(b, 2)),
    ],
    "random": lambda a, b, c: [
        axn.random.normal(KEY, {a: 3, b: 2}),
        axn.random.uniform(KEY, {a: 3, b: 4}, minval=_x(b) - 9.0),
        axn.random.permutation(KEY, _x(a, b), b),
        # Draws depend on the order of the examples' axes by name, so there is only one axis.
        axn.random.categorical(KEY, _x(a, b), b, temperature=axn.exp(_x(a)[a, 0:3]), top_k=3),
    ],
    "activations": lambda a, b, c: [nn.relu(_x(a, b)), nn.softmax(_x(a, b), b), nn.glu(_x(a, b), b)],
    "layers": lambda a, b, c: [
        nn.one_hot(_ids(a), axn.Axis(b, 3)),
        nn.cross_entropy_loss(_x(a, b), b, axn.named(jnp.asarray([1, 0, 3]), a)),
        nn.standardize(_x(a, b), b),
        nn.dropout(_x(a, b), 0.5, inference=False, key=KEY),
        nn.max_pool(_x(a, b), axn.Axis(b, 2)),
        attention.apply_rotary(_x(a, b), b, a),
        attention.causal_mask(axn.Axis(a, 3), axn.Axis(b, 3)),
        nn.MoELinear.init(axn.Axis(a, 2), axn.Axis(b, 4), axn.Axis(c, 5), key=KEY)(
            _x("rows", b), axn.named(jnp.asarray([1, 2]), a)
        ),
    ],
}


def _spec(x: axn.NamedArray) -> Any:
    sharding: Any = x.array.sharding
    return sharding.spec


def _leaves(result: Any) -> list[axn.NamedArray]:
    return jax.tree.leaves(result, is_leaf=axn.is_named_array)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_names_compile_nothing_and_give_the_same(family: str) -> None:
    first = _leaves(FAMILIES[family](*FIRST))
    others = []
    with compilations() as compiled:
        for names in OTHERS:
            others.append(_leaves(FAMILIES[family](*names)))
    assert compiled == []
    for names, found in zip(OTHERS, others, strict=True):
        meaning: dict[str, str] = dict(zip(FIRST, names, strict=True))
        for x, y in zip(first, found, strict=True):
            assert y.names == tuple(meaning.get(n, n) for n in x.names)
            np.testing.assert_array_equal(x.array, y.array)


def _found(family: str, names: tuple[str, str, str]) -> list[Any]:
    """Return the axes, values and shardings of a family's results, or the error."""
    try:
        results = _leaves(FAMILIES[family](*names))
    except ValueError as error:
        return [str(error)]
    return [(x.names, np.asarray(x.array), x.array.sharding) for x in results]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mapping_that_says_the_same_compiles_nothing(family: str, mesh: Mesh) -> None:
    """Results lie as those of the kernels of the names themselves, whatever the mapping before."""
    with jax.set_mesh(mesh):
        for mapped in (None, 0, 1):
            with axn.axis_mapping({"other": "data"} if mapped is None else {FIRST[mapped]: "model"}):
                first = _found(family, FIRST)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(_kernels.Kernel, "apply", lambda k, *xs: wrap_result(k.call(*xs), k.names))
                    expected = _found(family, FIRST)
            assert len(first) == len(expected)
            for x, y in zip(first, expected, strict=True):
                if isinstance(y, str):
                    assert x == y
                    continue
                assert x[0] == y[0] and x[2].is_equivalent_to(y[2], len(y[0])), (x[2], y[2])
                np.testing.assert_allclose(x[1], y[1], rtol=1e-6)
            if mapped is None:
                with axn.axis_mapping({"other": "data"}), compilations() as compiled:
                    found = [_found(family, names) for names in OTHERS]
                assert compiled == [] and all(len(each) == len(first) for each in found)


@pytest.mark.parametrize("entry", [None, "data"])
def test_what_a_mapping_says_of_other_axes_compiles_nothing(entry: str | None, mesh: Mesh) -> None:
    """In derivatives, whose backward pass is JAX's, under one mapping; the operations themselves under any."""

    def loss(w: axn.NamedArray, x: axn.NamedArray) -> axn.NamedArray:
        y = axn.exp(axn.dot(x, w, axis=w.names[0]))
        assert isinstance(y.array, Tracer) or (_spec(y) + (None,))[0] == entry
        return axn.sum(y + 1.0)

    names = [("a", "b"), ("c", "d"), ("e", "f")]
    kept = {a: entry for a, _ in names}
    with jax.set_mesh(mesh):
        for compute in (loss, axn.grad(loss)):
            counts = []
            for (a, b), also in zip(names, ({}, {"out2": "model"}, {"g": "data", "h": "model"}), strict=True):
                with axn.axis_mapping({**kept, **(also if compute is loss else {})}):
                    w, x = axn.shard((axn.ones({b: 4, "out": 2}), axn.ones({a: 8, b: 4})))
                    with compilations() as compiled:
                        found = jax.block_until_ready(compute(w, x))
                np.testing.assert_allclose(
                    found.array, 8 * np.exp(4.0) if found.names else 16 * (1 + np.exp(4.0)), 1e-5
                )
                counts.append(sum("backend_compile" in event for event in compiled))
            assert counts[1:] == [0, 0], counts


def _loss(p: Any, x: axn.NamedArray, a: str, b: str, c: str) -> jax.Array:
    """Compute a loss of twelve operations, among them those of two layers."""
    weight, bias = p
    h = nn.relu(axn.dot(x, weight, axis=b) + bias)
    h = nn.softmax(h * axn.mean(h, c), c)[c, 0:3]
    h = axn.concatenate([h, axn.sum(h, c).broadcast_axis(axn.Axis(c, 1))], c)
    return axn.sum(axn.tanh(h) - axn.max(h, a)).array


def _plain_loss(p: Any, x: jax.Array) -> jax.Array:
    weight, bias = p
    h = jax.nn.relu(x @ weight + bias[None])
    h = jax.nn.softmax(h * jnp.mean(h, 1)[:, None], 1)[:, 0:3]
    h = jnp.concatenate([h, jnp.sum(h, 1)[:, None]], 1)
    return jnp.sum(jnp.tanh(h) - jnp.max(h, 0)[None])


def _sized(rows: int, inner: int, columns: int, *names: str) -> tuple[Any, axn.NamedArray]:
    """Return the parameters and the input of the losses."""
    a, b, c = names

    def ramp(*shape: int) -> jax.Array:
        return jnp.asarray(np.linspace(-2, 2, math.prod(shape), dtype=np.float32).reshape(shape))

    parts = (axn.named(ramp(inner, columns), (b, c)), axn.named(ramp(columns), c))
    return parts, axn.named(ramp(rows, inner), (a, b))


def _raw(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.array if axn.is_named_array(x) else x, tree, is_leaf=axn.is_named_array)


def _scaled(p: Any, by: jax.Array) -> Any:
    return jax.tree.map(lambda x: x * by, p)


# Transformations outside of jit, each with its own sizes, so that they share no compiled programs.
FOLLOWING: dict[str, tuple[tuple[int, int, int], Callable[[Callable[[Any], jax.Array], Any], Any]]] = {
    "grad": ((3, 5, 11), lambda f, p: jax.grad(f)(p)),
    "jvp": ((3, 5, 12), lambda f, p: jax.jvp(f, (p,), (p,))),
    "linearize": ((3, 5, 13), lambda f, p: jax.linearize(f, p)[1](p)),
    "vjp": ((3, 5, 14), lambda f, p: jax.vjp(f, p)[1](jnp.float32(2.0))),
    "vmap": ((3, 5, 15), lambda f, p: jax.vmap(lambda by: f(_scaled(p, by)))(jnp.arange(3.0))),
    "vmap of grad": ((3, 5, 16), lambda f, p: jax.vmap(lambda by: jax.grad(f)(_scaled(p, by)))(jnp.arange(3.0))),
    "jvp of grad": ((3, 5, 17), lambda f, p: jax.jvp(jax.grad(f), (p,), (p,))[1]),
}


@pytest.mark.parametrize("following", FOLLOWING)
def test_derivatives_by_other_names_compile_nothing(following: str) -> None:
    """Nor do they compile more than those of positional code."""
    sizes, follow = FOLLOWING[following]
    found = []
    plain_p, plain_x = _raw(_sized(*sizes, *FIRST))
    with compilations() as plain:
        expected = follow(lambda p: _plain_loss(p, plain_x), plain_p)
    for names in (FIRST, *OTHERS, ("row", "col", "out")):
        p, x = _sized(*sizes, *names)
        with compilations() as compiled:
            found.append(_raw(follow(lambda p, x=x, names=names: _loss(p, x, *names), p)))
        assert len(compiled) <= (len(plain) if names == FIRST else 0)
    for each in found:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), each, expected)


def test_derivatives_on_a_mesh_by_any_names(mesh: Mesh) -> None:
    """The values are those of one device, and a gradient lies as its parameter does."""
    expected = jax.grad(_plain_loss)(*_raw(_sized(8, 4, 8, *FIRST)))
    with jax.set_mesh(mesh):
        for names, active in ((FIRST, False), (OTHERS[1], False), (OTHERS[1], True)):
            mapping = {names[0]: "data", names[1]: "model"}
            p, x = axn.shard(_sized(8, 4, 8, *names), mapping)
            with axn.axis_mapping(mapping if active else {}):
                found = jax.grad(lambda p, x=x, names=names: _loss(p, x, *names))(p)
            for gradient, values, parameter in zip(found, expected, p, strict=True):
                assert gradient.names == parameter.names
                assert gradient.array.sharding.is_equivalent_to(parameter.array.sharding, parameter.ndim)
                np.testing.assert_allclose(gradient.array, values, rtol=1e-5, atol=1e-6)


def test_which_names_are_equal_decides() -> None:
    """Other patterns of equal names are other programs."""
    x, y = _square("a", "b"), _square("b", "c")
    np.testing.assert_allclose(axn.dot(x, y, axis="b").array, SQUARE @ SQUARE, rtol=1e-6)
    np.testing.assert_allclose(axn.dot(x, y.rename({"b": "c", "c": "b"}), axis="b").array, SQUARE @ SQUARE.T, rtol=1e-6)
    np.testing.assert_array_equal((x + x.rename({"a": "b", "b": "a"})).array, SQUARE + SQUARE.T)
    np.testing.assert_array_equal((x + x).array, SQUARE + SQUARE)


def test_an_axis_may_be_called_as_an_option() -> None:
    padded = axn.pad(_x("constant"), {"constant": (1, 0)}, mode="constant")
    assert padded.names == ("constant",)
    np.testing.assert_array_equal(padded.array, np.pad(RAW[0], (1, 0)))
    assert axn.sort(_x("sort", "axis"), "axis").names == ("sort", "axis")


# Calls that the compiled function rejects, and words that the message must contain.
MISTAKES: dict[str, tuple[Callable[[str, str], Any], tuple[str, ...]]] = {
    "sizes": (lambda a, b: _x(a, b) + _x(b)[b, 0:2], ("4", "2")),
    "no axis": (lambda a, b: axn.sum(_x(a, b), f"{b}s"), ()),
    "size of the argument": (lambda a, b: axn.max(_x(a, b), axn.Axis(b, 7)), ("7", "4")),
    "outer product": (lambda a, b: _x(a) + _x(b), ("broadcast_axis",)),
    "contraction": (lambda a, b: axn.dot(_x(a, b), _x(b)[b, 0:3], axis=b), ("4", "3")),
    "look-up": (lambda a, b: axn.take_along_axis(_x(b, a), axn.named(jnp.zeros(2, int), b), a), ("3", "2")),
    "update": (lambda a, b: _x(a, b).at[a, 0].set(axn.named(jnp.ones(2), b)), ("4", "2")),
    "concatenation": (lambda a, b: axn.concatenate([_x(a, b), _x(a, b)[b, 0:2]], a), ("4", "2")),
    "size of the result": (lambda a, b: axn.flatten_axes(_x(a, b), (a, b), axn.Axis(f"{a}{b}", 11)), ("12", "11")),
    "matrix": (lambda a, b: axn.linalg.inv(_x(a, b), (a, b)), ("not square",)),
    "rearrange": (lambda a, b: axn.rearrange(_x(a, b), f"{{({b}: i j)}} -> i j", i=3), ("3",)),
    "transform": (lambda a, b: axn.fft.irfft(_x(a, b)[b, 0:1], b), ("no elements",)),
    "layer": (lambda a, b: nn.glu(_x(a, b)[b, 0:3], b), ("even",)),
}


def _traced(tracer: Callable[..., Any], call: Callable[[str, str], Any], names: tuple[str, str]) -> None:
    """Call with operands that a transformation traces."""

    def follow(by: jax.Array) -> jax.Array:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "_x", lambda *names, make=_x: make(*names) * by)
            call(*names)
        return by

    tracer(follow)


TRACERS: dict[str, Callable[[Callable[[jax.Array], jax.Array]], Any]] = {
    "none": lambda f: f(jnp.float32(1.0)),
    "grad": lambda f: jax.grad(f)(1.0),
    "vmap": lambda f: jax.vmap(f)(jnp.ones(2)),
}


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors_speak_of_the_names_that_the_user_gave(mistake: str, tracer: str) -> None:
    call, words = MISTAKES[mistake]
    for names in (("batch", "embed"), ("row", "col")):
        with pytest.raises((ValueError, TypeError)) as caught:
            _traced(TRACERS[tracer], call, names)
        message = str(caught.value)
        assert names[1] in message and "#" not in message
        assert all(word in message for word in words)
        assert caught.value.__context__ is None or "#" not in str(caught.value.__context__)


def test_programs_say_the_names() -> None:
    """A kernel that other names have compiled leaves no trace in a program that is explained."""
    x = _x("row", "col")
    axn.sum(axn.exp(x), "col"), axn.exp(_x("other", "names"))
    text = jax.jit(lambda x: axn.sum(axn.exp(x), "col")).lower(x).as_text(debug_info=True)
    assert "exp[row=3,col=4->row,col]" in text and "sum[row=3,col=4->row]" in text
    for followed, by in ((jax.grad, jnp.float32(2.0)), (jax.vmap, jnp.ones(2))):
        program = jax.jit(followed(lambda by: axn.sum(axn.exp(x * by), "col")["row", 0].array))
        assert "exp[row=3,col=4->row,col]" in program.lower(by).as_text(debug_info=True)
    constant = jax.jit(lambda: axn.exp(x) + 1.0).lower().as_text(debug_info=True)
    assert "#0" not in constant and "_0=" not in constant


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mapping_shards_by_the_names_themselves(kind: AxisType) -> None:
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(kind,))):
        axn.random.normal(KEY, {"b": 8})
        with axn.axis_mapping({"batch": "data"}):
            for name, sharded in (("batch", True), ("other", False), ("batch", True)):
                drawn = axn.random.normal(KEY, {name: 8})
                assert drawn.array.sharding.is_fully_replicated != sharded
        assert axn.random.normal(KEY, {"batch": 8}).array.sharding.is_fully_replicated


def test_the_names_themselves_settle_where_operands_disagree() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        for name in ("batch", "row"):
            x, y = (axn.shard(axn.ones({name: 8}), {name: over}) for over in ("data", "model"))
            with pytest.raises(ValueError, match=f"axis {name!r} over different mesh axes"):
                x + y
            for over in ("data", "model"):
                with axn.axis_mapping({name: over}):
                    assert _spec(x + y) == jax.P(over)


def test_the_sharding_of_the_operands_is_kept_by_any_names() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        for a, b in (("batch", "embed"), ("x", "y"), ("y", "x")):
            x = axn.shard(axn.ones({a: 8, b: 4}), {a: "data"})
            assert _spec(axn.exp(x)) == jax.P("data", None)
            assert _spec(axn.sum(x, b)) == jax.P("data")
            assert _spec(x + axn.ones({b: 4})) == jax.P("data", None)
            assert _spec(axn.dot(x, axn.ones({b: 4, "c": 2}), axis=b)) == jax.P("data", None)


def test_gradients_outside_of_jit() -> None:
    for names in (("a", "b"), ("b", "a"), ("x", "y")):
        gradient = jax.grad(lambda x: axn.sum(x * x).array)(_x(*names))
        assert gradient.names == names
        np.testing.assert_array_equal(gradient.array, 2 * RAW)


def test_threads() -> None:
    """Several threads find the same compiled function at once, each by its own names."""
    results: dict[int, axn.NamedArray] = {}
    start = threading.Barrier(8)

    def work(i: int) -> None:
        start.wait()
        x = axn.named(jnp.asarray(RAW), (f"a{i}", f"b{i}"))
        results[i] = axn.logsumexp(x * float(i) + x, f"b{i}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, found in results.items():
        assert found.names == (f"a{i}",)
        np.testing.assert_allclose(found.array, jax.nn.logsumexp(RAW * (i + 1.0), axis=1), rtol=1e-5)


@pytest.mark.oldest
def test_builders_declare_every_parameter_that_holds_names() -> None:
    """One that is forgotten would be part of the program."""
    found, missing = 0, []
    for path in sorted(Path(axn.__file__).parent.rglob("*.py")):
        text = path.read_text()
        for function in ast.walk(ast.parse(text)) if "shared(" in text else ():
            if not isinstance(function, ast.FunctionDef):
                continue
            for decorator in function.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("shared"):
                    declared = {ast.literal_eval(argument) for argument in decorator.args}
                    given = [*function.args.args, *([function.args.vararg] if function.args.vararg else [])]
                    types = {p.arg: ast.unparse(p.annotation) if p.annotation else "" for p in given}
                    assert declared <= types.keys()
                    holding = {n for n, t in types.items() if _speaks_of_names(n, t)}
                    missing += [f"{path.name}: {function.name}({n})" for n in holding - declared]
                    found += 1
    assert found > 60
    assert missing == []


def _speaks_of_names(parameter: str, annotation: str) -> bool:
    called_so = parameter.endswith(("axis", "axes", "names")) and annotation != "bool"
    return called_so or any(word in annotation for word in ("Names", "Axis", "Axes", "Item"))
