"""Properties that hold for any axes in any order."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import axonym as axn

# Few names and sizes from a small range, so that examples share compiled programs.
SIZES = {"a": 1, "b": 2, "c": 3, "d": 2}
NAMES = list(SIZES)

orders = st.permutations(NAMES).flatmap(lambda names: st.integers(0, 4).map(lambda n: tuple(names[:n])))
"""Some of the names, in any order."""


def _draw(names: tuple[str, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, [SIZES[n] for n in names]).astype(np.float32)


def _subset(names: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...]]:
    """Draw some of these names, in any order."""
    return st.permutations(names).flatmap(lambda ns: st.integers(0, len(ns)).map(lambda n: tuple(ns[:n])))


def _letters(names: tuple[str, ...]) -> str:
    return "".join(string.ascii_lowercase[NAMES.index(n)] for n in names)


def _spread(x: np.ndarray, names: tuple[str, ...], out_names: tuple[str, ...]) -> np.ndarray:
    """Broadcast `x` to the axes of the result, by `einsum` with ones for the axes it lacks."""
    ones = np.ones([SIZES[n] for n in out_names], np.float32)
    return np.einsum(f"{_letters(names)},{_letters(out_names)}->{_letters(out_names)}", x, ones)


@given(data=st.data(), large=orders, swapped=st.booleans())
@settings(max_examples=30)
def test_elementwise_operations_broadcast_by_name(data: st.DataObject, large: tuple[str, ...], swapped: bool) -> None:
    small = data.draw(_subset(large))
    a_names, b_names = (small, large) if swapped else (large, small)
    expected_names = a_names if len(a_names) == len(large) else b_names
    a, b = _draw(a_names, 1), _draw(b_names, 2)
    found = axn.subtract(axn.named(a, a_names), axn.named(b, b_names))
    assert found.names == expected_names
    expected = _spread(a, a_names, expected_names) - _spread(b, b_names, expected_names)
    np.testing.assert_array_equal(np.asarray(found.array), expected)


@given(data=st.data(), names=st.permutations(NAMES), shared=st.integers(0, 2))
@settings(max_examples=20)
def test_no_outer_products_by_accident(data: st.DataObject, names: list[str], shared: int) -> None:
    """Each operand has an axis that the other lacks."""
    first = tuple(data.draw(st.permutations([*names[:shared], names[shared]])))
    second = tuple(data.draw(st.permutations([*names[:shared], names[shared + 1]])))
    with pytest.raises(ValueError, match="add: cannot broadcast"):
        axn.add(axn.named(_draw(first, 1), first), axn.named(_draw(second, 2), second))


REDUCTIONS: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (axn.sum, np.sum),
    (axn.max, np.max),
    (axn.mean, np.mean),
    (axn.var, np.var),
]


@given(data=st.data(), names=orders, which=st.sampled_from(REDUCTIONS), as_axes=st.booleans())
@settings(max_examples=30)
def test_reductions_over_any_axes(
    data: st.DataObject, names: tuple[str, ...], which: tuple[Callable[..., Any], Callable[..., Any]], as_axes: bool
) -> None:
    reduced = data.draw(_subset(names))
    array = _draw(names, 3)
    selection = [axn.Axis(n, SIZES[n]) for n in reduced] if as_axes else reduced
    found = which[0](axn.named(array, names), selection)
    assert found.names == tuple(n for n in names if n not in reduced)
    expected = which[1](array, axis=tuple(names.index(n) for n in reduced))
    np.testing.assert_allclose(np.asarray(found.array), expected, rtol=1e-5, atol=1e-6)


@given(data=st.data(), names=orders.filter(len))
@settings(max_examples=20)
def test_masks_select_by_name(data: st.DataObject, names: tuple[str, ...]) -> None:
    masked, reduced = data.draw(_subset(names)), data.draw(_subset(names))
    array, mask = _draw(names, 4), _draw(masked, 5) > 0
    found = axn.sum(axn.named(array, names), reduced, where=axn.named(mask, masked))
    kept = _spread(mask.astype(np.float32), masked, names)
    expected = np.sum(array * kept, axis=tuple(names.index(n) for n in reduced))
    np.testing.assert_allclose(np.asarray(found.array), expected, rtol=1e-5)


@given(names=orders.filter(len), other=st.randoms(use_true_random=False), which=st.integers(0, 3))
@settings(max_examples=20)
def test_order_is_only_layout(names: tuple[str, ...], other: Any, which: int) -> None:
    """An operation on a transposed array is the transposed operation."""
    axis = names[which % len(names)]
    x = axn.named(_draw(names, 6), names)
    shuffled = tuple(other.sample(names, len(names)))
    y = axn.rearrange(x, shuffled)
    for operation in (lambda a: axn.cumsum(a, axis), lambda a: axn.logsumexp(a, axis), lambda a: axn.argmin(a, axis)):
        found, expected = operation(y), operation(x)
        assert found.names == tuple(n for n in shuffled if n in expected.names)
        np.testing.assert_allclose(axn.rearrange(found, expected.names).array, expected.array, rtol=1e-6)


@given(data=st.data(), names=orders)
@settings(max_examples=20)
def test_the_algebra_of_axes_is_that_of_sets(data: st.DataObject, names: tuple[str, ...]) -> None:
    other = data.draw(orders)
    first, second = (tuple(axn.Axis(n, SIZES[n]) for n in ns) for ns in (names, other))
    union = axn.axis.union_axes(first, second)
    both = axn.axis.intersect_axes(first, second)
    rest = axn.axis.without_axes(first, second)
    assert set(union) == set(first) | set(second) and len(union) == len(set(union))
    assert set(both) == set(first) & set(second)
    assert set(rest) == set(first) - set(second)
    assert both + rest == tuple(sorted(both + rest, key=lambda a: (a not in second, first.index(a))))
    assert union[: len(first)] == first
    assert axn.axis.concat_axes(rest, second) == rest + second
    assert axn.axis.selects_axis(union, first) and axn.axis.selects_axis(first, both)
    assert axn.axis.axis_size(first) == np.prod([SIZES[n] for n in names], dtype=int)


@given(data=st.data(), names=orders)
@settings(max_examples=30)
def test_a_partial_order_keeps_what_it_names(data: st.DataObject, names: tuple[str, ...]) -> None:
    named = data.draw(_subset(names))
    dots = data.draw(st.sets(st.integers(0, len(named)), min_size=1))
    partial: list[Any] = [
        s for i in range(len(named) + 1) for s in (([...] if i in dots else []) + list(named[i : i + 1]))
    ]
    found = axn.axis.rearrange_for_partial_order(partial, names)
    assert sorted(found) == sorted(names)
    assert tuple(n for n in found if n in named) == named
    assert [n for n in found if n not in named] == [n for n in names if n not in named] or len(dots) > 1


@given(names=orders.filter(lambda ns: len(ns) > 0))
@settings(max_examples=30)
def test_named_arrays_round_trip(names: tuple[str, ...]) -> None:
    array = jnp.asarray(_draw(names, 7))
    x = axn.named(array, names)
    assert x.shape == {n: SIZES[n] for n in names}
    assert x.axes == tuple(axn.Axis(n, SIZES[n]) for n in names)
    assert axn.rearrange(x, names).array is x.array or np.array_equal(axn.rearrange(x, names).array, array)
