"""Properties of shapes and layouts for any axes: compared with NumPy, and round trips."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st

import axonym as axn
from axonym import Axis, NamedArray

NAMES = ("a", "b", "c", "d", "e")
FEW = settings(max_examples=12)

sizes = st.integers(1, 4)


@st.composite
def axes(draw, least: int = 1, most: int = 4) -> tuple[Axis, ...]:
    names = draw(st.permutations(NAMES))[: draw(st.integers(least, most))]
    return tuple(Axis(n, draw(sizes)) for n in names)


def _array(axes: tuple[Axis, ...]) -> NamedArray:
    """Make an array whose elements are their positions."""
    shape = [a.size for a in axes]
    return axn.named(jnp.arange(math.prod(shape)).reshape(shape), axes)


def _values(x: NamedArray, names: tuple[str, ...], shape: dict[str, int] | None = None) -> np.ndarray:
    """Return the elements with the axes in another order, broadcast along missing ones: by index, one at a time."""
    shape = {**(shape or {}), **x.shape}
    values, found = np.asarray(x.array), np.empty([shape[n] for n in names], x.dtype)
    for index in np.ndindex(*found.shape):
        at = dict(zip(names, index, strict=True))
        found[index] = values[tuple(at[n] for n in x.names)]
    return found


def _assert_is(found: NamedArray, values: np.ndarray, names: tuple[str, ...]) -> None:
    assert found.names == names
    np.testing.assert_array_equal(found.array, values)


# --- rearrange ---


@FEW
@given(st.data())
def test_an_order(data):
    x = _array(data.draw(axes()))
    order = tuple(data.draw(st.permutations(x.names)))
    _assert_is(axn.rearrange(x, order), _values(x, order), order)
    _assert_is(axn.rearrange(x, f"{{{' '.join(x.names)}}} -> {' '.join(order)}"), _values(x, order), order)


@FEW
@given(st.data())
def test_an_ellipsis_takes_the_rest_in_order(data):
    x = _array(data.draw(axes()))
    named = tuple(data.draw(st.permutations(x.names)))[: data.draw(st.integers(0, x.ndim))]
    where = data.draw(st.integers(0, len(named)))
    rest = tuple(n for n in x.names if n not in named)
    order = (*named[:where], *rest, *named[where:])
    text = " ".join((*named[:where], "...", *named[where:]))
    for found in (
        axn.rearrange(x, (*named[:where], ..., *named[where:])),
        axn.rearrange(x, f"{{{' '.join(named)}}} -> {text}"),
        axn.rearrange(x, f"{' '.join(x.names)} -> {text}"),
        axn.rearrange(x, f"{x.names[0]} ... -> {text}") if set(named) <= {x.names[0]} else axn.rearrange(x, order),
    ):
        _assert_is(found, _values(x, order), order)


@st.composite
def rearrangements(draw) -> tuple[NamedArray, str, dict[str, Any], str, dict[str, Any], np.ndarray, tuple[str, ...]]:
    """Draw an array, an expression that splits, moves and merges axes, its inverse, and NumPy's result."""
    whole = draw(axes(most=3))
    factors: dict[str, list[tuple[str, int]]] = {}
    for axis in whole:
        count = draw(st.integers(1, 3))
        factors[axis.name] = [(f"{axis.name}{i}" if count > 1 else axis.name, draw(sizes)) for i in range(count)]
    x = _array(tuple(Axis(n, math.prod(size for _, size in f)) for n, f in factors.items()))

    flat = [name for f in factors.values() for name, _ in f]
    known = dict(pair for f in factors.values() for pair in f)
    moved = draw(st.permutations(flat))
    outputs: list[list[str]] = []
    for name in moved:
        if outputs and draw(st.booleans()):
            outputs[-1].append(name)
        else:
            outputs.append([name])
    merged = {f"m{i}" if len(names) > 1 else names[0]: names for i, names in enumerate(outputs)}

    def side(axes: dict[str, list[str]], named: bool = True) -> str:
        def group(n: str, names: list[str]) -> str:
            return names[0] if len(names) == 1 else f"({f'{n}: ' if named else ''}{' '.join(names)})"

        return " ".join(group(n, names) for n, names in axes.items())

    def bindings(axes: dict[str, list[str]]) -> dict[str, Any]:
        """Draw all sizes, or all but one, of every axis that is split."""
        found = {}
        for names in axes.values():
            left_out = draw(st.sampled_from([None, *names]))
            found |= {n: known[n] for n in names if len(names) > 1 and n != left_out}
        return found

    split = {n: [name for name, _ in f] for n, f in factors.items()}
    if draw(st.booleans()):
        chosen = draw(st.permutations(list(split)))
        there = f"{{{side({n: split[n] for n in chosen})}}} -> {side(merged)}"
    else:
        there = f"{side(split, named=draw(st.booleans()))} -> {side(merged)}"
    back = f"{side(merged, named=False)} -> {side(split)}"

    values = np.asarray(x.array).reshape([known[n] for n in flat]).transpose([flat.index(n) for n in moved])
    values = values.reshape([math.prod(known[n] for n in names) for names in merged.values()])
    return x, there, bindings(split), back, bindings(merged), values, tuple(merged)


@settings(max_examples=25)
@given(rearrangements())
def test_splitting_moving_and_merging_there_and_back(drawn):
    x, there, sizes_there, back, sizes_back, values, names = drawn
    found = axn.rearrange(x, there, **sizes_there)
    _assert_is(found, values, names)
    _assert_is(axn.rearrange(found, back, **sizes_back), np.asarray(x.array), x.names)


# --- broadcasting ---


@FEW
@given(st.data())
def test_broadcast_to(data):
    full = data.draw(axes())
    own = [a for a in data.draw(st.permutations(full)) if data.draw(st.booleans())]
    x = _array(tuple(own))
    names, shape = tuple(a.name for a in full), {a.name: a.size for a in full}
    _assert_is(axn.broadcast_to(x, full), _values(x, names, shape), names)
    new = (*(n for n in names if n not in x.names), *x.names)
    values = _values(x, new, shape)
    _assert_is(axn.broadcast_to(x, shape, ensure_order=False), values, new)
    _assert_is(axn.broadcast_to(x, full, enforce_no_extra_axes=False), _values(x, names, shape), names)
    _assert_is(axn.broadcast_axis(x, [a for a in full if a not in own]), values, new)


@FEW
@given(st.data())
def test_broadcast_arrays(data):
    shape = {a.name: a.size for a in data.draw(axes(least=2))}
    arrays = []
    for _ in range(data.draw(st.integers(1, 3))):
        names = [n for n in data.draw(st.permutations(list(shape))) if data.draw(st.booleans())]
        arrays.append(_array(tuple(Axis(n, shape[n]) for n in names)))
    found = axn.broadcast_arrays(*arrays, require_subset=False)
    assert len({x.names for x in found}) == 1
    assert set(found[0].names) == {n for x in arrays for n in x.names}
    for before, after in zip(arrays, found, strict=True):
        _assert_is(after, _values(before, after.names, shape), after.names)
    for before, after in zip(
        arrays, axn.broadcast_arrays(*arrays, require_subset=False, ensure_order=False), strict=True
    ):
        assert after.names[len(after.names) - before.ndim :] == before.names
        assert set(after.names) == set(found[0].names)
        _assert_is(after, _values(before, after.names, shape), after.names)


# --- round trips ---


@FEW
@given(st.data())
def test_flatten_and_unflatten(data):
    x = _array(data.draw(axes()))
    old = tuple(data.draw(st.permutations(x.names)))[: data.draw(st.integers(1, x.ndim))]
    flat = axn.flatten_axes(x, old, "flat")
    assert flat.axes == axn.flatten_axes(x.axes, old, "flat")
    assert flat.names.index("flat") == min(map(x.names.index, old))
    back = axn.unflatten_axis(flat, "flat", x.resolve_axis(old))
    _assert_is(axn.rearrange(back, x.names), np.asarray(x.array), x.names)
    left_out = data.draw(st.sampled_from(old))
    partly = axn.unflatten_axis(flat, "flat", [n if n == left_out else x.resolve_axis(n) for n in old])
    _assert_is(partly, np.asarray(back.array), back.names)


@FEW
@given(st.data())
def test_taking_apart_and_putting_together(data):
    x = _array(data.draw(axes()))
    axis = data.draw(st.sampled_from(x.axes))
    cuts = sorted(data.draw(st.lists(st.integers(0, axis.size), max_size=3)))
    lengths = np.diff([0, *cuts, axis.size])
    parts = axn.split(x, axis, [axis.resize(int(n)) for n in lengths])
    assert [p.axis_size(axis.name) for p in parts] == list(lengths)
    _assert_is(axn.concatenate(parts, axis), np.asarray(x.array), x.names)
    stacked = axn.stack(axn.unbind(x, axis), axis)
    order = (axis.name, *(n for n in x.names if n != axis.name))
    _assert_is(stacked, _values(x, order), order)


@FEW
@given(st.data())
def test_layouts_of_the_operands_do_not_matter(data):
    x = _array(data.draw(axes()))
    axis = data.draw(st.sampled_from(x.axes))
    y = axn.rearrange(x, tuple(data.draw(st.permutations(x.names))))
    twice = np.concatenate([x.array, x.array], axis=x.names.index(axis.name))
    _assert_is(axn.concatenate([x, y], axis.name), twice, x.names)
    _assert_is(axn.stack([x, y], "new"), np.stack([x.array, x.array]), ("new", *x.names))
    _assert_is(axn.tile(x, {axis: 2}), twice, x.names)
    for call in (
        lambda z: axn.roll(z, 3, axis),
        lambda z: axn.flip(z, axis),
        lambda z: axn.repeat(z, 2, axis),
        lambda z: axn.pad(z, {axis: (2, 1)}, constant_values=-1),
        lambda z: axn.pad_left(z, axis, axis.resize(axis.size + 2), -1),
    ):
        _assert_is(axn.rearrange(call(y), x.names), np.asarray(call(x).array), x.names)
