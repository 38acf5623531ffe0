"""Indexing: errors and their texts, indices out of range, and the number of compilations."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import axonym as axn
from tests.helpers import assert_named, compilations, covering

X = axn.arange(axn.make_axes(batch=3, pos=4))
LINE = axn.named(jnp.arange(5.0), "x")
EMPTY = axn.zeros({"x": 0})


def named(values: Any, *names: str) -> axn.NamedArray:
    return axn.named(np.asarray(values), names)


# --- what is refused ---

KEYS = [
    # the index, the error, its text
    (("pso", 0), ValueError, "Indexing: no axis 'pso' in (batch=3, pos=4). Did you mean 'pos'?"),
    ({"pos": 0, "heads": 1, "key": 2}, ValueError, "Indexing: no axes 'heads', 'key' in (batch=3, pos=4)."),
    ((axn.Axis("pos", 5), 0), ValueError, "axis 'pos' has conflicting sizes: 4 in the array, 5 in the index"),
    (("pos", 0, "pos", 1), ValueError, "Indexing int32[batch=3, pos=4]: more than one index for axis 'pos'."),
    (("pos", 4), IndexError, "Indexing: 4 is out of range for axis 'pos' of size 4: an index lies in -4..3."),
    (("pos", np.int64(-5)), IndexError, "Indexing: -5 is out of range for axis 'pos' of size 4"),
    (
        ("pos", axn.ds(3, 2)),
        IndexError,
        "ds(3, 2) is out of range for axis 'pos' of size 4: the start must lie in 0..2",
    ),
    (("pos", axn.ds(-1, 1)), IndexError, "ds(-1, 1) is out of range for axis 'pos' of size 4"),
    (("pos", axn.ds(0, 5)), IndexError, "a slice of 5 elements does not fit axis 'pos' of size 4"),
    (
        ("pos", axn.ds(named([0, 1], "pos"), 2)),
        ValueError,
        "the start of a slice of axis 'pos' cannot have this axis itself",
    ),
    (("pos", axn.ds(0.5, 2)), TypeError, "axis 'pos' cannot be indexed with float"),  # pyright: ignore[reportArgumentType]
    (
        0,
        TypeError,
        "expected axes and indices in turn, x['batch', index, ...], or a mapping {'batch': index}. There is no",
    ),
    ((0, 1), TypeError, "Indexing int32[batch=3, pos=4]: expected axes and indices in turn"),
    (slice(0, 2), TypeError, "There is no indexing by position."),
    ("pos", TypeError, "There is no indexing by position."),
    (("pos", 0, "batch"), TypeError, "There is no indexing by position."),
    (None, TypeError, "There is no indexing by position."),
    (jnp.arange(2), TypeError, "There is no indexing by position."),
    (
        ("pos", 1.0),
        TypeError,
        "axis 'pos' cannot be indexed with float; use an integer, a slice, ds(start, size) or an",
    ),
    (("pos", None), TypeError, "axis 'pos' cannot be indexed with NoneType"),
    (("pos", True), TypeError, "axis 'pos' cannot be indexed with bool"),
    (("pos", named([0.0, 1.0], "picked")), TypeError, "axis 'pos' needs integers, got an array of float"),
    (("pos", np.zeros((2, 2), int)), ValueError, "a raw index array for axis 'pos' has shape (2, 2); only 1-D ones go"),
    (("pos", [[0, 1], [1, 2]]), ValueError, "Name its axes with axonym.named(array, axes)."),
    (("pos", slice(0.0, 2)), TypeError, "the bounds of a slice of axis 'pos' must be integers, got float, int."),
    (("pos", slice(0, 2, 0)), ValueError, "slice step cannot be zero"),
    (("pos", np.ones(3, bool)), ValueError, "a mask for axis 'pos' of size 4 must have this axis alone, got (pos=3)"),
    (("pos", named(np.ones((4, 2), bool), "pos", "heads")), ValueError, "got (pos=4, heads=2). For masks over several"),
    (("pos", named(np.ones(4, bool), "heads")), ValueError, "got (heads=4)"),
    (
        ("pos", named([0, 1], "batch")),
        ValueError,
        "'batch' has conflicting sizes: 3 in the array, 2 in the index of 'pos'",
    ),
    (
        ("pos", named([0, 1], "picked"), "batch", named([0, 1, 2], "picked")),
        ValueError,
        "'picked' has conflicting sizes: 2 in the index of 'pos', 3 in the index of 'batch'",
    ),
    (
        ("batch", slice(0, 2), "pos", named([0, 1, 2], "batch")),
        ValueError,
        "'batch' has conflicting sizes: 2 in the array, 3 in the index of 'pos'",
    ),
]


@pytest.mark.parametrize(("key", "error", "message"), KEYS, ids=[m[:40] for _, _, m in KEYS])
def test_refused(key: Any, error: type[Exception], message: str) -> None:
    for attempt in (lambda: X[key], lambda: X.at[key].set(0), lambda: X.at[key].get(mode="clip")):
        with pytest.raises(error, match=re.escape(message)):
            attempt()


def test_refused_says_no_values() -> None:
    secret = axn.named(jnp.array([12345.0]), "x")
    for key in (("y", 0), ("x", 3), 0):
        with pytest.raises((ValueError, IndexError, TypeError)) as caught:
            secret[key]  # pyright: ignore[reportArgumentType]
        assert "12345" not in str(caught.value)


def test_axis_without_elements() -> None:
    with pytest.raises(IndexError, match=r"0 is out of range for axis 'x' of size 0: it has no elements\."):
        EMPTY["x", 0]
    assert EMPTY["x", ::-1].shape == {"x": 0}
    assert EMPTY["x", []].shape == {"x": 0}


def test_traced_bounds() -> None:
    with pytest.raises(TypeError, match=r"axis 'x' needs known bounds, got traced ones\. Use ds\(start, size\)"):
        jax.jit(lambda i: LINE["x", i : i + 2])(1)
    with pytest.raises(TypeError, match=r"a traced mask for axis 'x' would give a result of unknown size"):
        jax.jit(lambda x: x["x", x > 2])(LINE)


def test_length_of_a_dynamic_slice() -> None:
    with pytest.raises(ValueError, match=r"ds: a length cannot be negative, got -1\."):
        axn.ds(0, -1)
    with pytest.raises(TypeError, match="interpreted as an integer"):
        axn.ds(0, 1.5)  # pyright: ignore[reportArgumentType]


def test_dynamic_slices_as_values() -> None:
    assert axn.ds is axn.ds
    assert repr(axn.ds.block(2, 3)) == "ds(6, 3)"
    assert axn.ds(0, axn.Axis("x", 3)).size == 3


def test_raw_vmap_leaves_an_array_that_refuses() -> None:
    with pytest.raises(ValueError, match=r"2 names \(batch, pos\) for an array of rank 1"):
        jax.vmap(lambda x: x["pos", 0])(X)
    with pytest.raises(ValueError, match=r"1 name \(batch\) for an array of rank 0"):
        jax.vmap(lambda i: LINE["x", i])(named([1, 2], "batch"))


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (
            axn.ones({"heads": 2}),
            ValueError,
            "at[...].set: the value has axes (heads) that the selected part (batch, pos)",
        ),
        (
            axn.ones({"pos": 1}),
            ValueError,
            "at[...].set: axis 'pos' has conflicting sizes: 2 in the selected part, 1 in the",
        ),
        (axn.ones({"pos": 4}), ValueError, "2 in the selected part, 4 in the value"),
        (
            axn.ones({"batch": 2}),
            ValueError,
            "axis 'batch' has conflicting sizes: 3 in the selected part, 2 in the value",
        ),
        (
            jnp.ones(2),
            TypeError,
            "at[...].set: an operand has no axis names but shape (2,). Only scalars go without names",
        ),
    ],
)
def test_refused_values(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        X.astype(float).at["pos", 1:3].set(value)


def test_refused_value_along_new_axes() -> None:
    picked = named([0, 1], "picked")
    with pytest.raises(ValueError, match="axis 'picked' has conflicting sizes: 2 in the selected part, 3 in the value"):
        X.at["pos", picked].add(axn.ones({"picked": 3}, dtype=int))
    with pytest.raises(ValueError, match=r"the value has axes \(pos\) that the selected part \(batch, picked\) lacks"):
        X.at["pos", picked].add(axn.ones({"pos": 4}, dtype=int))


SLICES = [
    (lambda: axn.slice(X, "key", start=0, length=1), ValueError, "no axis 'key' in (batch=3, pos=4)"),
    (
        lambda: axn.slice(X),
        TypeError,
        "slice of int32[batch=3, pos=4]: give an axis with start and length, or mappings",
    ),
    (
        lambda: axn.slice(X, "pos", start=1),
        ValueError,
        "each axis needs a start and a size; got starts for ['pos'] and sizes",
    ),
    (lambda: axn.slice(X, {"pos": 1}, {"batch": 1}), ValueError, "got starts for ['pos'] and sizes for ['batch']"),
    (
        lambda: axn.slice(X, "pos", axn.Axis("a", 3), length=2),
        ValueError,
        "the new axis a(3) does not have the length 2",
    ),
    (lambda: axn.slice(X, "pos", start=3, length=2), IndexError, "ds(3, 2) is out of range for axis 'pos' of size 4"),
    (lambda: axn.slice(X, "pos", axn.Axis("batch", 2)), ValueError, "slice: 'batch' would name more than one axis"),
    (lambda: axn.updated_slice(X, {"key": 0}, X), ValueError, "updated_slice: no axis 'key' in (batch=3, pos=4)."),
    (lambda: axn.updated_slice(X, {"pos": 0}, axn.ones({"key": 1})), ValueError, "updated_slice: no axis 'key'"),
    (
        lambda: axn.updated_slice(X, {"pos": 0}, 1),  # pyright: ignore
        TypeError,
        "updated_slice: expected a NamedArray for `update`, got int.",
    ),
    (lambda: axn.updated_slice(X, {"pos": 1.5}, X), TypeError, "the start along 'pos' is an integer, got float32."),
    (
        lambda: axn.updated_slice(X, {"pos": 3}, axn.zeros({"pos": 2}, dtype=int)),
        IndexError,
        "updated_slice: 3 out of range for axis 'pos' of size 4: the start of a slice lies in 0..2.",
    ),
    (
        lambda: axn.updated_slice(X, {"pos": -1}, axn.zeros({"pos": 2}, dtype=int)),
        IndexError,
        "updated_slice: -1 out of range",
    ),
    (
        lambda: axn.updated_slice(X, {"pos": 0}, axn.zeros({"pos": 5, "batch": 9}, dtype=int)),
        ValueError,
        "updated_slice: (batch=9, pos=5) of the update does not fit (batch=3, pos=4).",
    ),
    (
        lambda: axn.updated_slice(X, {"pos": named([0, 1], "batch")}, axn.zeros({"pos": 2}, dtype=int)),
        ValueError,
        "updated_slice: axis 'batch' has conflicting sizes: 3 in the array, 2 in the start of 'pos'.",
    ),
    (
        lambda: axn.updated_slice(X, {"pos": named([0, 1, 0], "batch")}, axn.zeros({"batch": 2}, dtype=int)),
        ValueError,
        "3 in the array, 3 in the start of 'pos', 2 in the update",
    ),
    (
        lambda: axn.updated_slice(X, {"pos": named([0, 1, 0], "batch"), "batch": 1}, axn.zeros({}, dtype=int)),
        ValueError,
        "updated_slice: a start is given along (batch), which start arrays have too.",
    ),
    (lambda: axn.updated_slice(X, {"pos": jnp.arange(3)}, axn.zeros({})), TypeError, "no axis names but shape (3,)"),
]


@pytest.mark.parametrize(("attempt", "error", "message"), SLICES, ids=[m[:40] for _, _, m in SLICES])
def test_refused_slices(attempt: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        attempt()


# --- at the ends ---


@pytest.mark.parametrize("bounds", [slice(3, 1), slice(-9, None, -1), slice(1, 3, -1), slice(5, None), slice(9, 20, 2)])
def test_empty_slices(bounds: slice) -> None:
    for read in (lambda x: x["x", bounds], lambda x: x.at["x", bounds].get(mode="clip")):
        assert read(LINE).shape == {"x": 0}
        assert jax.jit(read)(LINE).shape == {"x": 0}
    assert_named(LINE.at["x", bounds].set(7.0), LINE)


@pytest.mark.parametrize("position", [4, 9, -1, -5, -6, -100])
def test_dynamic_index_out_of_range_is_that_of_jax(position: int) -> None:
    array = LINE.array
    for dtype in (jnp.int32, jnp.int8):
        i = jnp.asarray(position, dtype)
        picked = axn.named(i[None], "picked")
        read = jax.jit(lambda x, i, picked: (x["x", i], x["x", picked]))
        one, several = read(LINE, i, picked)
        assert one.item() == array[jnp.int32(position)]
        assert several.tolist() == array[jnp.array([position])].tolist()
        for mode in ("fill", "clip"):
            found = LINE.at["x", picked].get(mode=mode, fill_value=-7.0 if mode == "fill" else None)
            expected = array.at[jnp.array([position])].get(mode=mode, fill_value=-7.0 if mode == "fill" else None)
            assert found.tolist() == expected.tolist()
        changed = jax.jit(lambda x, i: x.at["x", i].set(9.0))(LINE, i)
        assert changed.tolist() == array.at[jnp.int32(position)].set(9.0).tolist()


INDICES = {  # indices that are out of range, and what the message says of them
    "number": (lambda p: jnp.int32(p), "5 out of range for axis 'x' of size 5: an index lies in -5..4."),
    "array": (lambda p: jnp.array([1, p, 9]), "5, 9 out of range for axis 'x' of size 5"),
    "NumPy": (lambda p: np.array([1, p]), "5 out of range for axis 'x' of size 5"),
    "named": (lambda p: axn.named(jnp.array([p, 0]), "picked"), "5 out of range for axis 'x' of size 5"),
    "named NumPy": (lambda p: axn.named(np.array([p, 0]), "picked"), "5 out of range for axis 'x' of size 5"),
    "uint8": (lambda p: jnp.array([p], jnp.uint8), "5 out of range for axis 'x' of size 5"),
    "slice": (lambda p: axn.ds(jnp.int32(p), 2), "5 out of range for axis 'x' of size 5: the start of a slice lies in"),
    "slices": (lambda p: axn.ds(axn.named(jnp.array([0, p - 1]), "i"), 2), "4 out of range for axis 'x' of size 5"),
}


@pytest.mark.parametrize("kind", INDICES)
def test_known_indices_out_of_range_are_errors(kind: str) -> None:
    make, text = INDICES[kind]
    index = make(5)
    uses = {
        "read": lambda x: x["x", index],
        "get": lambda x: x.at["x", index].get(),
        "set": lambda x: x.at["x", index].set(0),
        "gradient": lambda x: jax.grad(lambda y: axn.sum(y["x", index]).scalar())(x),
        "vmap": lambda x: axn.vmap(lambda y: y["x", index], "batch")(x.broadcast_axis(axn.Axis("batch", 2))),
        "constant in jit": lambda x: jax.jit(lambda y: y["x", index])(x),
        "reference": lambda x: axn.new_ref(x)["x", index],
    }
    if "slice" not in kind:
        uses["take"] = lambda x: axn.take(x, "x", index)
    for use in uses.values():
        with pytest.raises(IndexError, match=re.escape(text)):
            use(LINE)
    for mode in ("clip", "fill"):
        LINE.at["x", index].get(mode=mode), LINE.at["x", index].set(0, mode=mode)
    assert make(3) is not None and LINE["x", make(3) if kind != "array" else jnp.array([-5, 4])].size


def test_indices_out_of_range_on_many_devices(mesh: Mesh) -> None:
    far = axn.shard(axn.named(jnp.arange(8), "picked"), {"picked": "data"}, mesh)
    for x in (LINE, axn.shard(axn.arange(axn.make_axes(x=4, y=8)), {"y": "model"}, mesh)):
        with pytest.raises(IndexError, match="out of range for axis 'x'"):
            x["x", far]


@pytest.mark.parametrize("start", [4, -1])
def test_known_starts_of_updates_are_checked(start: int) -> None:
    update = axn.ones({"x": 2})
    for at in (start, jnp.int32(start), np.int32(start)):
        with pytest.raises(IndexError, match=rf"updated_slice: {start} out of range for axis 'x' of size 5"):
            axn.updated_slice(LINE, {"x": at}, update)


def test_updates_out_of_range_are_dropped() -> None:
    @jax.jit  # outside, where the values are known, they are checked
    def changed(x: axn.NamedArray, positions: axn.NamedArray, start: jax.Array) -> Any:
        return x.at["x", positions].set(9.0), x.at["x", axn.ds(start, 2)].set(9.0)

    positions = axn.named(jnp.array([1, 5]), "y")
    assert [x.tolist() for x in changed(LINE, positions, jnp.int32(4))] == [[0, 9, 2, 3, 4], [0, 1, 2, 3, 9]]
    assert LINE.at["x", positions].set(9.0, mode="clip").tolist() == [0, 9, 2, 3, 9]
    assert LINE.at["x", positions].set(9.0, mode="drop").tolist() == [0, 9, 2, 3, 4]


@pytest.mark.parametrize(("start", "expected"), [(0, [0, 1]), (3, [3, 4]), (4, [3, 4]), (99, [3, 4]), (-2, [3, 4])])
def test_dynamic_slices_are_moved_to_fit(start: int, expected: list[int]) -> None:
    @jax.jit
    def moved(x: axn.NamedArray, i: jax.Array) -> Any:
        sliced = axn.slice(x, "x", start=i, length=2), axn.slice(x, "x", "window", start=i, length=2)
        return x["x", axn.ds(i, 2)], *sliced, axn.updated_slice(axn.zeros_like(x), {"x": i}, axn.ones({"x": 2}))

    read, sliced, window, changed = moved(LINE, jnp.int32(start))
    assert read.tolist() == sliced.tolist() == window.tolist() == expected
    assert window.shape == {"window": 2}
    assert np.flatnonzero(changed.array).tolist() == expected


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.uint32])
def test_narrow_index_dtypes_reach_the_whole_axis(dtype: Any) -> None:
    """JAX works in the dtype of the index, which may be too narrow for the size of the axis."""
    x = axn.arange(axn.Axis("x", 1000))
    i = jnp.asarray(100, dtype)
    assert x["x", i].item() == 100
    assert x["x", axn.ds(i, 3)].tolist() == [100, 101, 102]
    assert x["x", axn.named(i[None], "y")].tolist() == [100]
    assert x.at["x", i].set(-1)["x", 100].item() == -1
    if jnp.issubdtype(dtype, jnp.signedinteger):
        assert x["x", -i].item() == 900


def test_floats_written_to_integers_warn_as_in_jax() -> None:
    with pytest.warns(FutureWarning, match="scatter inputs have incompatible types"):
        X.at["pos", 0].set(1.5)


def test_an_index_of_nothing_is_the_array_itself() -> None:
    assert X[...] is X and X[{}] is X and X[()] is X


def test_traced_positions_in_a_list() -> None:
    found = jax.jit(lambda x, i: x["x", [i, 0, i + 1]])(LINE, 2)
    assert_named(found, axn.named([2.0, 0.0, 3.0], "x"))


def test_order_of_new_axes_is_the_same_with_a_mode() -> None:
    x = axn.arange(axn.make_axes(a=2, b=3, c=4))
    for key in (
        ("a", 0, "c", named([3, 1], "n")),
        ("c", named([3, 1], "n"), "b", 1),
        ("b", slice(1, 3), "a", named([0], "b2")),
    ):
        assert_named(x.at[key].get(mode="clip"), x[key])


def test_gradients_of_repeated_elements_add_up() -> None:
    table, tokens = axn.zeros({"vocab": 4, "embed": 2}), named([1, 3, 1], "pos")
    found = jax.grad(lambda t: t["vocab", tokens].sum().scalar())(table)
    assert_named(found, axn.named([[0.0, 0.0], [2.0, 2.0], [0.0, 0.0], [1.0, 1.0]], ("vocab", "embed")))


# --- what is compiled ---


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lambda x, i: x["pos", i], id="integer"),
        pytest.param(lambda x, i: x["pos", i - 4, "batch", 2 - i % 3], id="negative"),
        pytest.param(lambda x, i: x["pos", i : i + 1], id="slice"),
        pytest.param(lambda x, i: x["pos", axn.ds(i, 1)], id="ds"),
        pytest.param(lambda x, i: x["pos", axn.ds.block(i, 1), "batch", 0], id="ds.block"),
        pytest.param(lambda x, i: x.at["pos", i].set(i), id="set"),
        pytest.param(lambda x, i: x["pos", [i, 0]], id="list"),
        pytest.param(
            lambda x, i: axn.updated_slice(x, {"pos": i}, axn.zeros({"pos": 1}, dtype=int)), id="updated_slice"
        ),
    ],
)
def test_walking_along_an_axis_compiles_once(step: Any) -> None:
    step(X, 0)
    with compilations() as compiled:
        for i in range(1, 4):
            step(X, i)
    assert compiled == []


def test_a_static_index_is_static_in_a_program() -> None:
    """In jit nothing is looked up at run time that was known before."""
    text = jax.jit(lambda x: (x["pos", 1], x["pos", 1:3], x["batch", ::2])).lower(X).as_text()
    assert "dynamic_slice" not in text and "gather" not in text


@pytest.mark.parametrize(
    ("how", "index", "mesh"),
    covering(
        ["set", "multiply", "max"],
        [{"x": 5}, {"x": slice(5, 6)}, {"x": slice(0, None, -1)}, {"x": 5, "y": 1}, {"x": 5, "z": 1}],
        ["auto", "explicit"],
    ),
    ids=str,
    indirect=["mesh"],
)
def test_gradients_of_updates_at_one_position_of_a_sharded_axis(how: str, index: Any, mesh: Mesh) -> None:
    """In the other shards nothing is updated."""
    x = axn.random.normal(jax.random.key(0), {"x": 8, "y": 2, "z": 3})
    values = axn.random.normal(jax.random.key(1), {"y": 2, "z": 3})
    weights = axn.random.normal(jax.random.key(2), {"x": 8, "y": 2, "z": 3})

    def loss(x: axn.NamedArray, values: axn.NamedArray) -> jax.Array:
        value = values[{n: i for n, i in index.items() if n != "x"}]
        return axn.dot(getattr(x.at[index], how)(value), weights, axis=("x", "y", "z")).array

    expected = jax.jit(jax.grad(loss, (0, 1)))(x, values)
    with jax.set_mesh(mesh):
        found = jax.jit(jax.grad(loss, (0, 1)))(axn.shard(x, {"x": "data"}), values)
    for a, b in zip(found, expected, strict=True):
        assert_named(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["multiply", "divide", "power"])
def test_what_is_not_updated_does_not_matter_to_gradients(how: str) -> None:
    x = axn.named([2.0, -1.0, 0.0, -jnp.inf], "x")
    found = jax.grad(lambda value: getattr(x.at["x", 0], how)(value)["x", 0].array)(3.0)
    expected = {"multiply": 2.0, "divide": -2 / 9, "power": 8 * np.log(2)}[how]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda x: x["x", :-3:3] + x["x", 1:-2:3], id="gaps of two"),
        pytest.param(lambda x: x["x", ::-2] - x["x", ::2], id="both ways"),
        pytest.param(lambda x: axn.nn.pool.pool(x, axn.Axis("x", 2), 0.0, jax.lax.add, stride=3), id="pool"),
    ],
)
def test_gradients_of_several_strides_along_a_sharded_axis(fn: Any, auto_mesh: Mesh) -> None:
    """XLA pads what is replicated once for all, where each gradient needs a padding of its own."""
    x = axn.arange(axn.Axis("x", 16)) * 1.0
    given = axn.sin(axn.arange(fn(x).axes) * 1.0 + 1.0)

    def gradient(x: axn.NamedArray, given: axn.NamedArray) -> axn.NamedArray:
        return jax.vjp(fn, x)[1](given)[0]

    expected = np.array([axn.dot(fn(axn.named(row, "x")), given, axis="x").item() for row in np.eye(16, dtype="f4")])
    for placement in (PartitionSpec("data"), PartitionSpec()):
        operands = axn.shard(x, placement, auto_mesh), axn.shard(given, PartitionSpec(), auto_mesh)
        step = jax.jit(gradient, out_shardings=NamedSharding(auto_mesh, PartitionSpec("data")))
        np.testing.assert_allclose(jax.block_until_ready(step(*operands)).array, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("start", [2, 3])
@pytest.mark.parametrize("step", [3, 4, -4])
def test_strides_past_the_end_of_a_sharded_axis(start: int, step: int, mesh: Mesh) -> None:
    """XLA takes the wrong element where less than a stride is left, or fails."""
    x = axn.random.normal(jax.random.key(0), {"x": 4})

    def values_and_gradients(x: axn.NamedArray) -> Any:
        return x["x", start::step], jax.grad(lambda x: axn.sum(axn.square(x["x", start::step])).array)(x)

    with jax.set_mesh(mesh), axn.axis_mapping({"x": "data"}):
        found = jax.jit(values_and_gradients)(axn.shard(x))
    for a, b in zip(found, values_and_gradients(x), strict=True):
        np.testing.assert_allclose(np.asarray(a.array), np.asarray(b.array), rtol=1e-6)
