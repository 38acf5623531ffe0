"""Named references: reading and writing, views of views, inside jit, as pytrees, on a mesh."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import axonym as axn
from tests.helpers import assert_named, spec

GRID = np.arange(12.0, dtype=np.float32).reshape(3, 4)
Row, Col = axn.make_axes(row=3, col=4)


def grid() -> axn.NamedRef:
    return axn.new_ref(axn.named(jnp.asarray(GRID), (Row, Col)))


def line(size: int = 8) -> axn.NamedRef:
    return axn.new_ref(axn.arange(axn.Axis("x", size)).astype(jnp.float32))


def positions(view: axn.NamedRef) -> list[int]:
    """Return the elements of a line that a view reads; check that writing to the view changes the same ones."""
    read = [int(v) for v in np.ravel(view.value().array)]
    before = np.asarray(view.unsliced().value().array)
    view[...] = -1.0
    after = np.asarray(view.unsliced().value().array)
    assert np.flatnonzero(after == -1).tolist() == sorted(set(read))
    view.unsliced()[...] = axn.named(jnp.asarray(before), view.unsliced().names)
    return read


# --- the whole ---


def test_what_it_says_of_itself() -> None:
    ref = grid()
    assert ref.axes == (Row, Col) and ref.names == ("row", "col") and ref.ndim == 2
    assert ref.shape == {"row": 3, "col": 4}
    assert ref.dtype == jnp.float32
    assert ref.resolve_axis("col") is Col
    assert repr(ref) == "NamedRef(float32[row=3, col=4])"
    assert repr(ref.slice({"row": 1, "col": axn.ds(jnp.int32(1), 2)})) == "NamedRef(float32[col=2])"


def test_the_array_it_is_made_of_is_not_changed() -> None:
    x = axn.zeros(Row)
    ref = axn.new_ref(x)
    ref[...] = 1.0
    assert x.tolist() == [0, 0, 0]


def test_reading_and_writing() -> None:
    ref = grid()
    assert_named(ref[...], axn.named(GRID, (Row, Col)))
    assert_named(ref["row", 1, "col", -1], axn.named(jnp.float32(7), ()))
    assert_named(ref[{"col": slice(1, 4, 2)}], axn.named(GRID[:, 1:4:2], ("row", "col")))
    ref["row", 0] = 0.5
    ref[{Col: 2}] = axn.named([10, 20, 30], "row")
    ref["col", 1:3, "row", 2] = axn.named([7.0, 8.0], "col")
    expected = GRID.copy()
    expected[0] = 0.5
    expected[:, 2] = [10, 20, 30]
    expected[2, 1:3] = [7, 8]
    assert_named(ref.value(), axn.named(expected, (Row, Col)))


def test_the_order_of_a_value_does_not_matter() -> None:
    ref = grid()
    ref[...] = axn.named(-GRID.T, ("col", "row"))
    assert_named(ref[...], axn.named(-GRID, (Row, Col)))


def test_get_swap_and_freeze() -> None:
    ref = grid()
    assert_named(axn.get(ref), ref[...])
    assert_named(axn.get(ref, {"row": 1}), ref["row", 1])
    assert_named(axn.swap(ref, {"row": 1}, 0.0), axn.named(GRID[1], Col))
    assert_named(axn.swap(ref, ..., axn.named(GRID, (Row, Col)))["row", 1], axn.zeros(Col))
    assert_named(axn.freeze(ref), axn.named(GRID, (Row, Col)))


def test_a_frozen_view_is_what_it_shows() -> None:
    assert_named(axn.freeze(grid().slice({"row": 1, "col": slice(3, 0, -1)})), axn.named(GRID[1, 3:0:-1], "col"))
    assert_named(axn.freeze(grid().slice({"col": axn.ds(jnp.int32(2), 2)})), axn.named(GRID[:, 2:], ("row", "col")))


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (axn.named([1, 0], "picked"), [1, 0]),
        ([2, 2], [2, 2]),
        (np.array([True, False, False, True]), [0, 3]),
        (axn.ds(axn.named([0, 2], "window"), 2), [0, 1, 2, 3]),
    ],
    ids=["named", "list", "mask", "windows"],
)
def test_index_arrays(index: Any, expected: list[int]) -> None:
    ref = line(4)
    assert np.ravel(ref["x", index].array).tolist() == expected
    ref["x", index] = -1.0
    assert np.flatnonzero(ref[...].array == -1).tolist() == sorted(set(expected))
    view = grid().slice({"row": 1})
    view["col", [0, 3]] = axn.named([-1.0, -2.0], "col")
    assert view["col", [3, 0]].tolist() == [-2, -1] and view.unsliced()["row", 0].tolist() == [0, 1, 2, 3]


# --- views ---

VIEWS: list[tuple[Callable[[axn.NamedRef], axn.NamedRef], list[int]]] = [
    (lambda r: r.slice({"x": 3}), [3]),
    (lambda r: r.slice({"x": slice(2, 6)}), [2, 3, 4, 5]),
    (lambda r: r.slice({"x": slice(None, None, -3)}), [7, 4, 1]),
    (lambda r: r.slice({"x": slice(4, 1)}), []),
    (lambda r: r.slice({"x": slice(-20, None, -1)}), []),
    (lambda r: r.slice({"x": axn.ds(2, 3)}), [2, 3, 4]),
    (lambda r: r.slice({"x": axn.ds(jnp.int32(2), 3)}), [2, 3, 4]),
    (lambda r: r.slice({"x": axn.ds.block(1, axn.axis.axis_size(axn.Axis("x", 4)))}), [4, 5, 6, 7]),
    (lambda r: r.slice({"x": slice(1, 8, 2)}).slice({"x": slice(1, 4, 2)}), [3, 7]),
    (lambda r: r.slice({"x": slice(1, 8, 2)}).slice({"x": -1}), [7]),
    (lambda r: r.slice({"x": slice(None, None, -1)}).slice({"x": slice(1, 3)}), [6, 5]),
    (lambda r: r.slice({"x": slice(None, None, -1)}).slice({"x": slice(None, None, -2)}), [0, 2, 4, 6]),
    (lambda r: r.slice({"x": slice(None, None, -1)}).slice({"x": axn.ds(jnp.int32(1), 2)}), [6, 5]),
    (lambda r: r.slice({"x": slice(0, 8, 2)}).slice({"x": axn.ds(jnp.int32(1), 2)}), [2, 4]),
    (lambda r: r.slice({"x": axn.ds(jnp.int32(2), 5)}).slice({"x": slice(1, 5, 2)}), [3, 5]),
    (lambda r: r.slice({"x": axn.ds(jnp.int32(2), 5)}).slice({"x": slice(None, None, -2)}), [6, 4, 2]),
    (lambda r: r.slice({"x": axn.ds(jnp.int32(2), 5)}).slice({"x": axn.ds(jnp.int32(1), 2)}), [3, 4]),
    (lambda r: r.slice({"x": axn.ds(jnp.int32(2), 5)}).slice({"x": jnp.int32(-1)}), [6]),
    (lambda r: r.slice({"x": axn.ds(jnp.int32(2), 5)}).slice({}), [2, 3, 4, 5, 6]),
]


@pytest.mark.parametrize(("view", "expected"), VIEWS)
def test_views(view: Callable[[axn.NamedRef], axn.NamedRef], expected: list[int]) -> None:
    assert positions(view(line())) == expected


@pytest.mark.parametrize(("view", "expected"), VIEWS)
def test_views_made_and_used_in_jit(view: Callable[[axn.NamedRef], axn.NamedRef], expected: list[int]) -> None:
    def read_and_write(ref):
        found = view(ref)[...]
        view(ref)[...] = -1.0
        return found

    ref = line()
    assert np.ravel(jax.jit(read_and_write)(ref).array).tolist() == expected
    assert np.flatnonzero(ref[...].array == -1).tolist() == sorted(expected)


OUT_OF_RANGE = [
    # an index into the view of 2, 3, 4, the size of a slice, and the positions in the memory
    (jnp.int32(3), None, [4]),
    (jnp.int32(99), None, [4]),
    (jnp.int32(-1), None, [4]),
    (jnp.int32(-3), None, [2]),
    (jnp.int32(-9), None, [2]),
    (jnp.uint8(7), None, [4]),
    (jnp.int32(2), 2, [3, 4]),
    (jnp.int32(-1), 2, [3, 4]),
    (jnp.int32(-9), 2, [2, 3]),
]


@pytest.mark.parametrize(("position", "size", "expected"), OUT_OF_RANGE)
def test_no_position_reaches_beyond_a_view(position: Any, size: int | None, expected: list[int]) -> None:
    def index(position: Any) -> Any:
        return position if size is None else axn.ds(position, size)

    for bounds, found in (
        (slice(2, 5), expected),
        (slice(4, 1, -1), [6 - e for e in expected]),
        (slice(0, 3), [e - 2 for e in expected]),
    ):

        @jax.jit
        def read(ref: axn.NamedRef, i: Any, bounds: slice = bounds) -> Any:
            return ref.slice({"x": bounds}).slice({"x": index(i)}).value()

        assert np.ravel(read(line(), position).array).tolist() == found
        view = line().slice({"x": bounds})
        if size is None and -3 <= position < 3:
            assert positions(view.slice({"x": position})) == sorted(found)
            continue
        for use in (lambda: view.slice({"x": index(position)}), lambda: view["x", index(position)]):  # noqa: B023
            with pytest.raises(IndexError, match="out of range for axis 'x' of size 3"):
                use()


def test_views_of_several_axes() -> None:
    ref = grid()
    view = ref.slice({"row": axn.ds(jnp.int32(1), 2)}).slice({"col": slice(None, None, -2)})
    assert_named(view[...], axn.named(GRID[1:, ::-2], ("row", "col")))
    view[...] = axn.named([[1.0, 2.0], [3.0, 4.0]], ("col", "row"))
    expected = GRID.copy()
    expected[1:, ::-2] = [[1, 3], [2, 4]]
    assert_named(ref[...], axn.named(expected, (Row, Col)))
    assert view["row", 0].names == ("col",)
    assert view.unsliced().axes == ref.axes


def test_views_share_their_memory() -> None:
    ref = grid()
    one, other = ref.slice({"row": 1}), ref.slice({"col": 2})
    one["col", 2] = 100.0
    assert other["row", 1].item() == ref["row", 1, "col", 2].item() == 100


# --- in programs ---


def test_as_argument_of_jit() -> None:
    traces = 0

    @jax.jit
    def put(ref, i, value):
        nonlocal traces
        traces += 1
        old = ref["row", i]
        ref["row", i] = value
        return old

    ref = grid()
    for i in range(3):
        assert_named(put(ref, i, axn.full(Col, float(i))), axn.named(GRID[i], Col))
    assert ref["col", 0].tolist() == [0, 1, 2]
    assert traces == 1


def test_closed_over_by_jit() -> None:
    ref = grid()

    @jax.jit
    def put(i):
        ref["row", i, "col", axn.ds(i, 2)] += 100.0

    put(1), put(2)
    expected = GRID.copy()
    expected[1, 1:3] += 100
    expected[2, 2:4] += 100
    assert_named(ref[...], axn.named(expected, (Row, Col)))


def test_made_and_frozen_in_jit() -> None:
    @jax.jit
    def running(x):
        ref = axn.new_ref(axn.zeros_like(x))

        def step(i, total):
            total = total + x["x", i]
            ref["x", i] = total
            return total

        jax.lax.fori_loop(0, 4, step, axn.zeros(()))
        return axn.freeze(ref)

    x = axn.named([1.0, 2.0, 3.0, 4.0], "x")
    assert_named(running(x), axn.cumsum(x, "x"))
    assert_named(jax.grad(lambda x: running(x).sum().scalar())(x), axn.named([4.0, 3.0, 2.0, 1.0], "x"))


def test_views_as_arguments_of_jit() -> None:
    view = line().slice({"x": axn.ds(jnp.int32(2), 5)})
    assert jax.jit(lambda v: v["x", ::2])(view).tolist() == [2, 4, 6]


def test_as_pytree() -> None:
    view = grid().slice({"row": axn.ds(jnp.int32(1), 2), "col": 3})
    leaves, tree = jax.tree.flatten(view)
    assert len(leaves) == 2 and leaves[1] == 1
    again = jax.tree.unflatten(tree, leaves)
    assert_named(again[...], axn.named(GRID[1:, 3], "row"))
    assert jax.tree.structure(grid()) == jax.tree.structure(grid()) != tree
    assert len({grid(), grid()}) == 2


def test_a_write_at_a_traced_position_stays_one_update() -> None:
    """A dynamic slice is put in as such, not element by element."""

    def put(x, new, i):
        ref = axn.new_ref(x)
        ref["x", axn.ds(i, 2)] = new
        return axn.freeze(ref)

    text = jax.jit(put).lower(axn.zeros({"x": 8}), axn.ones({"x": 2}), 1).as_text()
    assert text.count("stablehlo.dynamic_update_slice") == 1 and "scatter" not in text


@pytest.mark.parametrize("index", [("batch", 1), ("batch", slice(0, 4)), ("embed", slice(None, None, -2))])
def test_on_explicit_axes(explicit_mesh: Mesh, index: Any) -> None:
    raw = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    x = axn.named(jax.device_put(raw, NamedSharding(explicit_mesh, P("data", "model"))), ("batch", "embed"))
    expected = axn.named(raw, ("batch", "embed"))

    def use(ref, i):
        ref[index] = ref[index] + 1.0
        ref["embed", i] = 0.0

    with jax.set_mesh(explicit_mesh):
        ref = axn.new_ref(x)
        jax.block_until_ready(jax.jit(use)(ref, 2))
        assert spec(ref[...]) == ("data", "model")
        assert_named(ref[index], expected.at[index].add(1.0).at["embed", 2].set(0.0)[index])
        assert_named(axn.freeze(ref), expected.at[index].add(1.0).at["embed", 2].set(0.0))


# --- what is refused ---

REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: grid()[0], TypeError, "Indexing float32[row=3, col=4]: expected axes and indices in turn"),  # pyright: ignore
    (lambda: list(grid()), TypeError, "There is no indexing by position."),  # pyright: ignore
    (lambda: grid()["rwo", 0], ValueError, "Indexing: no axis 'rwo' in (row=3, col=4). Did you mean 'row'?"),
    (lambda: grid()["row", 3], IndexError, "Indexing: 3 is out of range for axis 'row' of size 3"),
    (lambda: grid().slice({"row": 0})["row", 0], ValueError, "Indexing: no axis 'row' in (col=4)."),
    (lambda: grid().slice({"row": slice(0, 2)})["row", 2], IndexError, "2 is out of range for axis 'row' of size 2"),
    (lambda: grid().slice({"row": slice(0, 2)})["row", axn.ds(1, 2)], IndexError, "ds(1, 2) is out of range"),
    (lambda: grid().resolve_axis("key"), ValueError, "resolve_axis: no axis 'key' in (row=3, col=4)."),
    (
        lambda: grid().resolve_axis(axn.Axis("row", 4)),
        ValueError,
        "axis 'row' has conflicting sizes: 3 in the array, 4",
    ),
    (
        lambda: grid().slice({"row": [0, 1]}),
        TypeError,
        "slice of NamedRef(float32[row=3, col=4]): a view takes integers, slices and ds(start, size), not index",
    ),
    (lambda: axn.new_ref(jnp.ones(3)), TypeError, "new_ref: expected a NamedArray, got ArrayImpl."),  # pyright: ignore
    (
        lambda: jax.vmap(lambda x: axn.new_ref(x)[...])(axn.ones((Row, Col))),
        ValueError,
        "This named array has 2 names (row, col) for an array of rank 1",
    ),
]


@pytest.mark.parametrize(("attempt", "error", "message"), REFUSED, ids=[m[:40] for _, _, m in REFUSED])
def test_refused(attempt: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        attempt()


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (axn.ones({"key": 2}), ValueError, "the array (key) has axes (key) that are not among (row"),
        (axn.ones({"row": 2}), ValueError, "axis 'row' has conflicting sizes: 2 in the array, 3 in the argument"),
        (axn.ones({"row": 1}), ValueError, "axis 'row' has conflicting sizes: 1 in the array, 3 in the argument"),
        (jnp.ones(3), TypeError, "an operand has no axis names but shape (3,)"),
        (
            1j,
            TypeError,
            "Writing complex64 to NamedRef(float32[row=3]) would lose part of it. Convert it first with `astype`.",
        ),
    ],
)
def test_refused_values(value: Any, error: type[Exception], message: str) -> None:
    ref = grid()
    with pytest.raises(error, match=re.escape(message)):
        ref["col", 0] = value
    assert_named(ref[...], axn.named(GRID, (Row, Col)))


def test_dtypes_of_values() -> None:
    ref = axn.new_ref(axn.zeros(Row, jnp.bfloat16))
    ref["row", 0] = 1
    ref["row", 1] = axn.named(jnp.float32(2.5), ())
    assert ref[...].dtype == jnp.bfloat16 and ref[...].tolist() == [1, 2.5, 0]
    with pytest.raises(TypeError, match="Writing float32 to NamedRef"):
        axn.new_ref(axn.zeros(Row, jnp.int32))["row", 0] = 1.5


def test_address() -> None:
    ref = grid()
    assert ref.unsafe_buffer_pointer() == ref.slice({"row": 1}).unsafe_buffer_pointer()


@pytest.mark.parametrize("jit", [False, True])
def test_a_stride_next_to_a_position(jit: bool) -> None:
    def fn(base: axn.NamedArray) -> tuple[axn.NamedArray, axn.NamedArray]:
        ref = axn.new_ref(base)
        return axn.swap(ref, {"x": 1, "y": slice(None, None, 2)}, 7.0), axn.freeze(ref)

    old, new = (jax.jit(fn) if jit else fn)(axn.arange(axn.make_axes(x=2, y=3), dtype=float))
    assert old.array.tolist() == [3, 5]
    assert new.array.tolist() == [[0, 1, 2], [7, 4, 7]]


def test_a_reference_without_elements() -> None:
    ref = axn.new_ref(axn.zeros({"x": 0, "y": 2}))
    ref[...] = 1.0
    ref["y", 0] = 1.0
    assert ref[...].shape == {"x": 0, "y": 2}
    assert ref["y", 1].shape == {"x": 0}
