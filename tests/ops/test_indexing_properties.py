"""Random arrays, indices and contractions, compared with positional NumPy.

The reference does not broadcast or gather: for every element of the result, it looks up the elements of the operands by
name. Sizes are few and small, so that examples share compiled programs.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings, strategies as st

import axonym as axn
from axonym.ops.updating import updated_slice

SIZES = {"a": 2, "b": 3, "c": 4, "d": 2, "e": 3}
NAMES = tuple(SIZES)
FEW = settings(max_examples=12)


def _values(names: tuple[str, ...], sizes: dict[str, int], seed: int, low: int = -9, high: int = 10) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, [sizes[n] for n in names])


@st.composite
def layouts(draw: st.DrawFn, least: int, most: int) -> tuple[str, ...]:
    """Draw some names in any order."""
    return tuple(draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=least, max_size=most)))


# --- indexing ---


@st.composite
def static_indices(draw: st.DrawFn, size: int) -> Any:
    """Draw an integer, a slice or a list."""
    integer = st.integers(-size, size - 1)
    bound = st.none() | st.integers(-size - 2, size + 2)
    step = st.sampled_from([None, 1, 2, 3, -1, -2])
    return draw(integer | st.builds(slice, bound, bound, step) | st.lists(integer, max_size=3))


@st.composite
def index_problems(draw: st.DrawFn) -> tuple[axn.NamedArray, dict[str, Any]]:
    """Draw an array and an index for some of its axes. Index arrays have axes of the array, indexed or new ones."""
    names = draw(layouts(1, 4))
    seed = draw(st.integers(0, 2**16))
    indexed = draw(st.lists(st.sampled_from(names), unique=True, min_size=1, max_size=3))
    index: dict[str, Any] = {}
    for name in indexed:
        size = SIZES[name]
        kind = draw(st.sampled_from(["static", "array", "array", "dynamic slice"]))
        if kind == "static":
            index[name] = draw(static_indices(size))
        elif kind == "dynamic slice":
            length = draw(st.integers(0, size))
            start = draw(st.integers(0, size - length))
            index[name] = axn.ds(jnp.int32(start) if draw(st.booleans()) else start, length)
        else:
            # An axis that is indexed but kept has another size, so it is not among those of index arrays here.
            free = [n for n in NAMES if n not in indexed or n == name]
            own = tuple(draw(st.lists(st.sampled_from(free), unique=True, max_size=2)))
            index[name] = axn.named(jnp.asarray(_values(own, SIZES, seed + 1, -size, size), jnp.int32), own)
    # The axes an index array may have, and those that a slice or a list resizes, must not be confused.
    resized = {n for n, i in index.items() if isinstance(i, (slice, list, axn.ds))}
    for n, i in list(index.items()):
        if isinstance(i, axn.NamedArray) and resized & set(i.names):
            del index[n]
    return axn.named(_values(names, SIZES, seed), names), index


def _picks(size: int, index: Any) -> Any:
    """Return the positions that an index other than a named array selects."""
    if isinstance(index, axn.ds):
        return [int(index.start) + i for i in range(index.size)]
    return np.arange(size)[index]


def _positions(x: axn.NamedArray, index: dict[str, Any], at: dict[str, int]) -> tuple[int, ...]:
    """Return the position in the array of an element of the result, given its position by axis name."""
    found = []
    for name in x.names:
        if name not in index:
            found.append(at[name])
        elif isinstance(index[name], axn.NamedArray):
            array = index[name]
            found.append(int(np.asarray(array.array)[tuple(at[n] for n in array.names)]) % SIZES[name])
        else:
            picks = _picks(SIZES[name], index[name])
            found.append(int(picks if np.ndim(picks) == 0 else picks[at[name]]))
    return tuple(found)


def _result_axes(x: axn.NamedArray, index: dict[str, Any]) -> dict[str, int]:
    axes: dict[str, int] = {}
    for name in x.names:
        if name not in index:
            axes[name] = SIZES[name]
        elif isinstance(index[name], axn.NamedArray):
            axes |= index[name].shape
        elif np.ndim(picks := _picks(SIZES[name], index[name])):
            axes[name] = len(picks)
    return axes


def _places(axes: dict[str, int]) -> list[dict[str, int]]:
    return [dict(zip(axes, at, strict=True)) for at in itertools.product(*map(range, axes.values()))]


@FEW
@given(index_problems())
def test_reading(problem: tuple[axn.NamedArray, dict[str, Any]]) -> None:
    x, index = problem
    axes = _result_axes(x, index)
    source = np.asarray(x.array)
    for result in (x[index], axn.index(x, dict(reversed(index.items())))):
        assert dict(result.shape) == axes
        found = np.transpose(np.asarray(result.array), [result.names.index(n) for n in axes])
        for at in _places(axes):
            assert found[tuple(at.values())] == source[_positions(x, index, at)]


@FEW
@given(index_problems(), st.randoms(use_true_random=False))
def test_adding(problem: tuple[axn.NamedArray, dict[str, Any]], random: Any) -> None:
    """Every element is added to as often as it is selected; the value has some of the axes, in some order."""
    x, index = problem
    axes = _result_axes(x, index)
    names = tuple(random.sample(list(axes), random.randint(0, len(axes))))
    value = _values(names, axes, random.randint(0, 1000))
    result = x.at[index].add(axn.named(value, names))
    expected = np.array(x.array)
    for at in _places(axes):
        expected[_positions(x, index, at)] += value[tuple(at[n] for n in names)]
    assert result.names == x.names
    np.testing.assert_array_equal(result.array, expected)


@FEW
@given(index_problems())
@example((axn.arange({"c": 4, "b": 3}), {"b": axn.ds(3, 0)}))  # an empty slice at the end
def test_what_is_written_is_read_back(problem: tuple[axn.NamedArray, dict[str, Any]]) -> None:
    x, index = problem
    assert np.all(np.asarray(x.at[index].set(77)[index].array) == 77)
    changed = np.asarray(x.at[index].set(77).array) != np.asarray(x.array)
    touched = {_positions(x, index, at) for at in _places(_result_axes(x, index))}
    assert set(map(tuple, np.argwhere(changed).tolist())) == touched


@FEW
@given(layouts(1, 4), st.data())
def test_slices_with_a_start_and_a_length(names: tuple[str, ...], data: st.DataObject) -> None:
    x = axn.named(_values(names, SIZES, 3), names)
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    lengths = {n: data.draw(st.integers(1, SIZES[n])) for n in chosen}
    starts = {n: data.draw(st.integers(0, SIZES[n] - lengths[n])) for n in chosen}
    block = tuple(slice(starts.get(n, 0), starts.get(n, 0) + lengths.get(n, SIZES[n])) for n in names)
    part = axn.slice(x, starts, lengths)
    assert part.names == names
    np.testing.assert_array_equal(part.array, np.asarray(x.array)[block])
    expected = np.array(x.array)
    expected[block] *= 2
    shuffled = (2 * part).rearrange(data.draw(st.permutations(names)))
    np.testing.assert_array_equal(updated_slice(x, starts, shuffled).array, expected)


# --- contractions ---


@st.composite
def contraction_problems(draw: st.DrawFn) -> tuple[list[axn.NamedArray], tuple[str, ...]]:
    """Draw up to three arrays, and axes of the result in some order: some, and all that one of several has alone."""
    seed = draw(st.integers(0, 2**16))
    arrays = [
        axn.named(_values(names, SIZES, seed + i).astype(np.float32), names)
        for i, names in enumerate(draw(st.lists(layouts(0, 3), min_size=1, max_size=3)))
    ]
    union = list(dict.fromkeys(n for x in arrays for n in x.names))
    kept = draw(st.lists(st.sampled_from(union), unique=True)) if union else []
    kept += [n for n in union if n not in kept and len(arrays) > 1 and sum(n in x.names for x in arrays) == 1]
    return arrays, tuple(kept)


def _by_numpy(arrays: list[axn.NamedArray], kept: tuple[str, ...]) -> np.ndarray:
    equation = f"{','.join(''.join(x.names) for x in arrays)}->{''.join(kept)}"
    return np.einsum(equation, *(np.asarray(x.array) for x in arrays))


@FEW
@given(contraction_problems())
def test_dot(problem: tuple[list[axn.NamedArray], tuple[str, ...]]) -> None:
    arrays, kept = problem
    summed = [n for n in NAMES if any(n in x.names for x in arrays) and n not in kept]
    result = axn.dot(*arrays, axis=summed, out_axes=kept)
    assert result.names == kept
    np.testing.assert_allclose(result.array, _by_numpy(arrays, kept), rtol=1e-5, atol=1e-3)
    unordered = axn.dot(*arrays, axis=summed)
    union = tuple(dict.fromkeys(n for x in arrays for n in x.names))
    assert unordered.names == tuple(n for n in union if n in kept)
    np.testing.assert_allclose(unordered.array, _by_numpy(arrays, unordered.names), rtol=1e-5, atol=1e-3)


@FEW
@given(contraction_problems(), st.data())
def test_einsum(problem: tuple[list[axn.NamedArray], tuple[str, ...]], data: st.DataObject) -> None:
    """Written in order with words of its own, by name, and by the output alone: all mean the same."""
    arrays, kept = problem
    union = list(dict.fromkeys(n for x in arrays for n in x.names))
    words = dict(zip(union, data.draw(st.permutations(["i", "j", "k", "batch", "a"])), strict=False))
    out = " ".join(words[n] for n in kept)
    in_order = ", ".join(" ".join(words[n] for n in x.names) for x in arrays)
    aliases = {words[n]: n for n in kept}
    summed = " ".join(n for n in union if n not in kept)
    results = [
        axn.einsum(f"-> {' '.join(kept)}", *arrays),
        axn.einsum(f"-> {out}", *arrays, **aliases),  # pyright: ignore[reportArgumentType]
        axn.einsum(f"{{{summed} {' '.join(kept)}}} -> {' '.join(kept)}", *arrays),
    ]
    if len(arrays) > 1 or arrays[0].names:  # nothing in front of the arrow means that nothing is said of the input
        results.append(axn.einsum(f"{in_order} -> {out}", *arrays))
    for result in results:
        assert result.names == kept
        np.testing.assert_allclose(result.array, _by_numpy(arrays, kept), rtol=1e-5, atol=1e-3)
    rest_in_front = axn.einsum(f"{{{summed}}} ->", *arrays)
    assert rest_in_front.names == tuple(n for n in union if n in kept)
