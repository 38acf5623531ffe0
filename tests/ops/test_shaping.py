"""Shapes and layouts: errors, and the shardings of results on a mesh of Explicit axes."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import axonym as axn
from axonym import Axis
from tests.helpers import spec


@pytest.fixture
def x() -> axn.NamedArray:
    return axn.named(jnp.arange(24.0).reshape(2, 3, 4), ("a", "b", "c"))


def _points_at(error: pytest.ExceptionInfo, part: str) -> bool:
    """Return whether the caret of an error is under a part of the expression."""
    _, text, pointer = str(error.value).split("\n")
    start = pointer.index("^")
    return text[start : start + pointer.count("^")].strip() == part


# --- rearrange ---


def test_rearrange_takes_an_order_in_any_form(x):
    for order in [("c", "a", "b"), ["c", Axis("a", 2), "b"], {"c": 4, "a": None, "b": 3}, ("c", ...), (..., "a", "b")]:
        assert axn.rearrange(x, order).names == ("c", "a", "b")
    assert axn.rearrange(x, "c", ...).names == ("c", "a", "b")
    assert axn.rearrange(x, ...).names == ("a", "b", "c")
    assert axn.rearrange(axn.ones(Axis("a", 2)), Axis("a", 2)).names == ("a",)


@pytest.mark.parametrize(
    ("order", "error", "message"),
    [
        (("a", "d", ...), ValueError, r"rearrange: no axis 'd' in \(a=2, b=3, c=4\)"),
        (("a", "b"), ValueError, r"rearrange: 'c' of \(a, b, c\)"),
        (("a", "a", ...), ValueError, "'a' would name more than one axis"),
        ((Axis("c", 5), ...), ValueError, "axis 'c' has conflicting sizes: 4 in the array, 5 in the argument"),
        (("a", 1, ...), TypeError, "An axis is selected by an Axis or its name, got int"),
    ],
)
def test_rearrange_refuses_an_order(x, order, error, message):
    with pytest.raises(error, match=message):
        axn.rearrange(x, order)


def test_rearrange_refuses_other_arguments(x):
    with pytest.raises(TypeError, match="expected an expression"):
        axn.rearrange(x)
    with pytest.raises(TypeError, match="a=, b= has no meaning for an order of axes"):
        axn.rearrange(x, ("c", ...), a=2, b=3)
    with pytest.raises(TypeError, match="rearrange: expected a NamedArray, got ndarray"):
        axn.rearrange(np.ones(2), "a -> a")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="'q' stands for a size, a name or an Axis, got float"):
        axn.rearrange(x, "a b (q r) -> a b q r", q=2.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="'q' stands for a size of -2"):
        axn.rearrange(x, "a b (q r) -> a b q r", q=-2)
    with pytest.raises(ValueError, match=r"rowz= names nothing in .* Did you mean 'rows'\?"):
        axn.rearrange(x, "a b (rows cols) -> a b rows cols", rowz=2)


@pytest.mark.parametrize(
    ("expression", "bindings", "part", "message"),
    [
        ("abc -> cab", {}, "", r"too few axes for .*\. Words are separated by spaces: write `a b c -> c a b`\."),
        ("a b -> a b", {}, "", r"too few axes for an array with \(a=2, b=3, c=4\)"),
        ("a b c d -> a", {}, "d", "too many axes"),
        ("... a b c d -> a", {}, "d", "too many axes"),
        ("b a c -> a b c", {}, "b", "'b' is at the position of 'a'"),
        ("i j k -> k j i", {"j": "c"}, "j", "'j', that is 'c', is at the position of 'b'"),
        ("i (z: j l) k -> i", {"j": 1}, "z", "'z' is at the position of 'b'"),
        ("i j k -> k j i", {"j": 4}, "j", "axis 'b' has size 3, not 4"),
        ("{c} -> c", {}, "", r"\(a=2, b=3\) would be dropped"),
        ("{(c: i j) ...} -> i", {"j": 2}, "", r"\(a=2, b=3, j=2\) would be dropped"),
        ("{bb} -> bb ...", {}, "bb", r"no axis 'bb' in \(a=2, b=3, c=4\)"),
        ("{z} -> z ...", {"z": "q"}, "z", "no axis 'q'"),
        ("{(i j)} -> i j ...", {"i": 2}, "(i j)", "axes are found by name"),
        ("{b i} -> b i", {"i": "b"}, "i", "axis 'b' is named a second time"),
        ("a b (i j) -> a b i j", {}, "(i j)", "the sizes of 'i' and 'j' are not known"),
        ("a b (i j) -> a b i j", {"i": 3}, "(i j)", r"axis 'c' of size 4 does not split into 3 \* \?"),
        ("a b (i j) -> a b i j", {"i": 2, "j": 3}, "(i j)", r"does not split into 2 \* 3"),
        ("a b (i j) -> a b i j", {"i": 0}, "(i j)", r"does not split into 0 \* \?"),
        ("a b c -> (a b) c", {}, "(a b)", "a merged axis needs a name"),
        ("a b c -> a b d", {}, "d", "'d' is not on the left-hand side"),
        ("{a} -> a b ...", {}, "b", "'b' is not on the left-hand side. Name the axis there too"),
        ("rows b c -> row b c", {}, "row", r"Did you mean 'rows'\?"),
        ("a b c -> a (a: b c)", {}, "(a: b c)", "a second axis 'a' in the result"),
        ("a b (a2 j) -> a b a2 j", {"a2": Axis("a", 2)}, "a2", "a second axis 'a' in the result"),
        ("a b c -> (n: a b) c", {"n": 5}, "(n: a b)", "'n' is said to have size 5, but its factors make 6"),
    ],
)
def test_rearrange_points_at_what_is_wrong(x, expression, bindings, part, message):
    with pytest.raises(ValueError, match=f"^rearrange: .*{message}") as error:
        axn.rearrange(x, expression, **bindings)
    # A missing part has no extent: the caret is then after the last character.
    assert _points_at(error, part)


def test_rearrange_names_what_it_makes(x):
    def names(expression, **bindings):
        return axn.rearrange(x, expression, **bindings).shape

    assert names("i j k -> k i j") == {"c": 4, "a": 2, "b": 3}  # names bind by position, axes keep their own
    assert names("i j k -> (i: j i) k") == {"i": 6, "c": 4}
    assert names("i j (k l) -> l ... k", k=2, l="low") == {"low": 2, "a": 2, "b": 3, "k": 2}
    assert names("... (k l) -> ... l k", k=Axis("high", 2)) == {"a": 2, "b": 3, "l": 2, "high": 2}
    assert names("{(c: c low)} -> ... low c", c=2) == {"a": 2, "b": 3, "low": 2, "c": 2}
    assert names("{(c: i j)} -> i ...", j=2) == {"i": 2, "a": 2, "b": 3, "j": 2}
    assert names("{h w} -> ... w h", h="b", w="c") == {"a": 2, "c": 4, "b": 3}
    assert names("{b c} -> ... (Q: b c)", Q="flat") == {"a": 2, "flat": 12}
    assert names("a, b, c -> (ab: a, b), c") == {"ab": 6, "c": 4}
    assert names("a ... -> ... a") == {"b": 3, "c": 4, "a": 2}


def test_rearrange_may_give_two_factors_one_name(x):
    result = axn.rearrange(x, "a b (i j) -> a b (n: j i)", i=Axis("k", 2), j=Axis("k", 2))
    np.testing.assert_array_equal(result.array, x.array.reshape(2, 3, 2, 2).transpose(0, 1, 3, 2).reshape(2, 3, 4))


def _primitives(jaxpr) -> list[str]:
    """Return the names of the primitives of a program, including those inside jitted functions."""
    found = []
    for e in jaxpr.eqns:
        found += _primitives(e.params["jaxpr"]) if "jaxpr" in e.params else [e.primitive.name]
    return found


@pytest.mark.parametrize(
    ("expression", "primitives"),
    [
        ("a b c -> a b c", []),
        ("a b c -> a (n: b) c", []),
        ("{c b a} -> c b a", ["transpose"]),
        ("a b (i j) -> a b i j", ["reshape"]),
        ("a b c -> a (n: b c)", ["reshape"]),
        ("a b (i j) -> a (n: b i) j", ["reshape"]),
        ("a b (i j) -> i a (n: b j)", ["reshape", "transpose", "reshape"]),
    ],
)
def test_rearrange_does_no_more_than_needed(x, expression, primitives):
    bindings = {"i": 2} if "i" in expression else {}
    assert _primitives(jax.make_jaxpr(lambda x: axn.rearrange(x, expression, **bindings))(x)) == primitives


# --- broadcasting ---


def test_broadcasting_takes_any_spec_and_scalars(x):
    c = axn.ones(Axis("c", 4))
    for selection in [Axis("b", 3), (Axis("b", 3),), [Axis("b", 3)], {"b": 3}]:
        assert axn.broadcast_axis(c, selection).shape == {"b": 3, "c": 4}
    assert axn.broadcast_axis(x, Axis("c", 4)).names == x.names
    for scalar in (2.0, np.float32(2), jnp.float32(2), axn.named(2.0, ())):
        result = axn.broadcast_to(scalar, {"a": 2, "b": 3})
        assert result.shape == {"a": 2, "b": 3}
        assert (result.array == 2).all()


def test_broadcasting_refuses(x):
    with pytest.raises(ValueError, match=r"broadcast_to: the array \(a, b, c\) has axes \(a, c\).* among \(b=3\)"):
        axn.broadcast_to(x, Axis("b", 3))
    with pytest.raises(ValueError, match="broadcast_to: axis 'b' has conflicting sizes: 3 in the array, 5 in the arg"):
        axn.broadcast_to(x, {"a": 2, "b": 5, "c": 4})
    with pytest.raises(ValueError, match="broadcast_axis: axis 'b' has conflicting sizes"):
        axn.broadcast_axis(x, Axis("b", 5))
    with pytest.raises(ValueError, match="broadcast_axis needs axes with sizes, got only the name 'd'"):
        axn.broadcast_axis(x, "d")  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(ValueError, match="broadcast_axis: 'd' would name more than one axis"):
        axn.broadcast_axis(x, (Axis("d", 2), Axis("d", 2)))
    with pytest.raises(TypeError, match=r"broadcast_to: an operand has no axis names but shape \(2,\)"):
        axn.broadcast_to(np.ones(2), Axis("d", 2))


def test_broadcast_arrays_hands_back_what_has_no_axes(x):
    assert axn.broadcast_arrays() == ()
    assert axn.broadcast_arrays(None, 2.0) == (None, 2.0)
    result = axn.broadcast_arrays(axn.ones(Axis("c", 4)), None, 2.0, x)
    assert result[1:3] == (None, 2.0)
    assert [r.axes for r in result[::3] if isinstance(r, axn.NamedArray)] == [x.axes, x.axes]


def test_broadcast_arrays_refuses(x):
    d = axn.ones(Axis("d", 2))
    with pytest.raises(ValueError, match=r"cannot broadcast \(a, b, c\) and \(d\): no operand has all the axes"):
        axn.broadcast_arrays(x, d)
    with pytest.raises(ValueError, match="axis 'b' has conflicting sizes: 3 in the arrays before, 4 in array 2"):
        axn.broadcast_arrays(x, None, axn.ones(Axis("b", 4)))
    with pytest.raises(TypeError, match="broadcast_arrays: expected a NamedArray, got ndarray"):
        axn.broadcast_arrays(x, np.ones(4))


# --- names, splitting, merging ---


def test_rename_shares_the_array_and_swaps(x):
    result = axn.rename(x, {"a": "b", Axis("b", 3): Axis("a", 3)})
    assert result.names == ("b", "a", "c")
    assert result.array is x.array
    abstract = axn.NamedArray(jax.ShapeDtypeStruct((2,), jnp.float32), "a")
    assert axn.rename(abstract, {"a": "z"}).axes == (Axis("z", 2),)


@pytest.mark.parametrize(
    ("renames", "message"),
    [
        ({"aa": "z", "d": "y"}, r"rename: no axes 'aa', 'd' in \(a=2, b=3, c=4\)"),
        ({"a": "b"}, "rename: 'b' would name more than one axis"),
        ({"a": "z", Axis("a", 2): "y"}, "rename: 'a' would name more than one axis"),
        ({"a": Axis("z", 5), Axis("b", 7): "y"}, r"cannot rename a to z\(5\), b\(7\) to y in \(a=2, b=3, c=4\)"),
    ],
)
def test_rename_refuses(x, renames, message):
    with pytest.raises(ValueError, match=message):
        axn.rename(x, renames)


def test_rename_suggests_the_nearest_name():
    with pytest.raises(ValueError, match=r"no axis 'embd' in \(batch=2, embed=3\)\. Did you mean 'embed'\?"):
        axn.rename(axn.ones({"batch": 2, "embed": 3}), {"embd": "e"})


def test_flatten_axes_of_a_spec():
    a, b, c = axn.make_axes(a=2, b=3, c=4)
    assert axn.flatten_axes((a, b, c), ("c", a), "n") == (Axis("n", 8), b)
    assert axn.flatten_axes([a, b, c], ["b", "c"], Axis("n", 12)) == (a, Axis("n", 12))
    assert axn.flatten_axes({"a": 2, "b": 3}, "b", "b2") == {"a": 2, "b2": 3}
    assert axn.flatten_axes(a, (), "n") == (Axis("n", 1), a)
    with pytest.raises(ValueError, match=r"flatten_axes: no axis 'd' in \(a=2, b=3\)"):
        axn.flatten_axes((a, b), ("a", "d"), "n")
    with pytest.raises(ValueError, match="axis 'a' has conflicting sizes"):
        axn.flatten_axes((a, b), (Axis("a", 3), "b"), "n")
    with pytest.raises(ValueError, match="'a' would name more than one axis"):
        axn.flatten_axes((a, b), ("a", "a"), "n")
    with pytest.raises(ValueError, match="axis 'n' has conflicting sizes: 5 in the argument, 6 in the result"):
        axn.flatten_axes((a, b), ("a", "b"), Axis("n", 5))
    with pytest.raises(ValueError, match="'c' would name more than one axis"):
        axn.flatten_axes((a, b, c), ("a", "b"), "c")


def test_flatten_axes_of_none_one_and_the_name_of_an_old_one(x):
    assert axn.flatten_axes(x, (), "n").shape == {"n": 1, "a": 2, "b": 3, "c": 4}
    assert axn.flatten(axn.named(1.0, ()), "n").shape == {"n": 1}
    assert axn.flatten_axes(x, "b", "n").shape == {"a": 2, "n": 3, "c": 4}
    merged = axn.flatten_axes(x, ("c", "a"), "a")
    assert merged.shape == {"a": 8, "b": 3}
    np.testing.assert_array_equal(merged.array, x.array.transpose(2, 0, 1).reshape(8, 3))


def test_unflatten_without_elements() -> None:
    x = axn.zeros({"a": 0, "b": 3})
    assert axn.unflatten_axis(x, "a", {"i": 0, "j": 4}).shape == {"i": 0, "j": 4, "b": 3}
    assert axn.unflatten_axis(x, "a", {"i": None, "j": 4}).shape == {"i": 0, "j": 4, "b": 3}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: axn.flatten_axes(x, ("a", "d"), "n"), r"flatten_axes: no axis 'd' in \(a=2, b=3, c=4\)"),
        (lambda x: axn.flatten_axes(x, ("a", "a"), "n"), "flatten_axes: 'a' would name more than one axis"),
        (lambda x: axn.flatten_axes(x, ("a", "b"), "c"), "flatten_axes: 'c' would name more than one axis"),
        (lambda x: axn.flatten_axes(x, {"a": 3}, "n"), "flatten_axes: axis 'a' has conflicting sizes"),
        (lambda x: axn.flatten(x, Axis("n", 5)), "flatten: axis 'n' has conflicting sizes: 5 in the argument, 24"),
        (lambda x: axn.flatten(x, Axis("n", 5)), "flatten: axis 'n' has conflicting sizes: 5 in the argument, 24"),
        (lambda x: axn.unflatten_axis(x, "d", Axis("e", 2)), r"unflatten_axis: no axis 'd' in \(a=2, b=3, c=4\)"),
        (lambda x: axn.unflatten_axis(x, "c", ("i", "j")), "the sizes of 'i' and 'j' are not known"),
        (
            lambda x: axn.unflatten_axis(x, "c", {"i": 3, "j": None}),
            r"axis 'c' of size 4 does not split into \(i=3, j=\?\)",
        ),
        (
            lambda x: axn.unflatten_axis(x, "c", {"i": 2, "j": 4}),
            r"axis 'c' of size 4 does not split into \(i=2, j=4\)",
        ),
        (lambda x: axn.unflatten_axis(x, "c", {"i": 0, "j": None}), r"does not split into \(i=0, j=\?\)"),
        (lambda x: axn.unflatten_axis(x, "c", {"i": 0, "j": 4}), r"does not split into \(i=0, j=4\)"),
        (lambda x: axn.unflatten_axis(x, "c", ()), r"does not split into \(\)"),
        (lambda x: axn.unflatten_axis(x, "c", {"a": 2, "j": 2}), "'a' would name more than one axis"),
        (lambda x: axn.unflatten_axis(x, Axis("c", 5), {"i": 2, "j": 2}), "axis 'c' has conflicting sizes"),
        (lambda x: axn.unbind(x, "d"), r"unbind: no axis 'd' in \(a=2, b=3, c=4\)"),
        (lambda x: axn.unbind(x, Axis("a", 3)), "unbind: axis 'a' has conflicting sizes"),
        (lambda x: axn.split(x, "d", [Axis("i", 2)]), r"split: no axis 'd' in \(a=2, b=3, c=4\)"),
        (lambda x: axn.split(x, "c", {"i": 1, "j": 2}), r"axis 'c' has size 4, but the parts \(i=1, j=2\) make 3"),
        (lambda x: axn.split(x, "c", []), r"axis 'c' has size 4, but the parts \(\) make 0"),
        (lambda x: axn.split(x, "c", [Axis("a", 1), Axis("c", 3)]), "split: 'a' would name more than one axis"),
        (
            lambda x: axn.split(x, "c", list[Any]("ij")),
            "split needs axes with sizes, got only the name 'i', 'j'",
        ),
    ],
)
def test_splitting_and_merging_refuse(x, call, message):
    with pytest.raises(ValueError, match=message):
        call(x)


def test_split_into_a_number_of_parts_is_refused(x):
    with pytest.raises(TypeError, match="split: expected the axis of each part, with its size, got int"):
        axn.split(x, "c", 2)  # pyright: ignore[reportArgumentType]


def test_taking_apart_into_nothing():
    empty = axn.ones({"a": 0, "b": 2})
    assert axn.unbind(empty, "a") == []
    assert axn.unflatten_axis(axn.ones({"a": 1, "b": 2}), "a", ()).shape == {"b": 2}


def test_raw_arrays_are_refused():
    calls = [
        lambda x: axn.rename(x, {"a": "b"}),
        lambda x: axn.flatten(x, "n"),
        lambda x: axn.flatten(x, "n"),
        lambda x: axn.unflatten_axis(x, "a", Axis("b", 2)),
        lambda x: axn.unbind(x, "a"),
        lambda x: axn.split(x, "a", Axis("b", 2)),
        lambda x: axn.pad(x, {"a": 1}),
        lambda x: axn.pad_left(x, "a", Axis("b", 2)),
        lambda x: axn.repeat(x, 2, "a"),
        lambda x: axn.tile(x, {"a": 2}),
        lambda x: axn.roll(x, 1, "a"),
        lambda x: axn.flip(x, "a"),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="expected a NamedArray, got ndarray"):
            call(np.ones(2))


def test_a_rank_that_names_do_not_fit_is_reported():
    broken = axn.NamedArray(jnp.ones((2, 2)), names=("a",))
    for call in (
        lambda x: axn.flatten(x, "n"),
        lambda x: axn.rearrange(x, ("a",)),
        lambda x: axn.rearrange(x, "a -> a"),
        lambda x: axn.unbind(x, "a"),
        lambda x: axn.broadcast_axis(x, Axis("b", 2)),
        lambda x: axn.broadcast_arrays(x, x),
    ):
        with pytest.raises(ValueError, match="has 1 name"):
            call(broken)


# --- joining and the rest ---


def test_stack_of_scalars():
    result = axn.stack([1.0, axn.named(2.0, ()), np.float32(3)], Axis("s", 3))
    assert result.axes == (Axis("s", 3),)
    np.testing.assert_array_equal(result.array, [1, 2, 3])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, c: axn.stack([x, c], "s"), r"stack: .* Array 0 has \(a, b, c\), but array 1 has \(c\)"),
        (lambda x, c: axn.stack([x, x], "a"), "stack: 'a' would name more than one axis"),
        (lambda x, c: axn.stack([x, x], Axis("s", 3)), "axis 's' has conflicting sizes: 3 in the argument, 2 in the"),
        (lambda x, c: axn.stack([], "s"), "stack: expected at least one array"),
        (lambda x, c: axn.stack([c, axn.ones({"c": 5})], "s"), "stack: axis 'c' has conflicting sizes"),
        (lambda x, c: axn.concatenate([x, c], "c"), r"concatenate: .* Array 0 has \(a, b, c\), but array 1 has \(c\)"),
        (lambda x, c: axn.concatenate([x, c], "a"), r"concatenate: no axis 'a' in \(c=4\)"),
        (lambda x, c: axn.concatenate([c, c], Axis("c", 9)), "'c' has conflicting sizes: 9 in the argument, 8 in the"),
        (lambda x, c: axn.concatenate([], "a"), "concatenate: expected at least one array"),
        (
            lambda x, c: axn.concatenate([x, axn.ones({"a": 9, "b": 3, "c": 5})], "a"),
            "concatenate: axis 'c' has conflicting sizes: 4 in array 0, 5 in array 1",
        ),
        (lambda x, c: axn.pad(c, {"d": (1, 1)}), r"pad: no axis 'd' in \(c=4\)"),
        (lambda x, c: axn.pad(c, {"c": (-1, 1)}), r"pad: axis 'c' cannot be padded by \(-1, 1\)"),
        (lambda x, c: axn.pad(c, {Axis("c", 5): 1}), "pad: axis 'c' has conflicting sizes"),
        (lambda x, c: axn.pad(c, {"c": 1}, constant_values=(1, 2, 3)), "one for before and one for after, got 3"),
        (lambda x, c: axn.pad(c, {"c": 1}, constant_values=c), r"`constant_values` must be a scalar.*\(c=4\)"),
        (lambda x, c: axn.pad_left(c, "d", Axis("e", 8)), r"pad_left: no axis 'd' in \(c=4\)"),
        (lambda x, c: axn.pad_left(c, "c", Axis("e", 3)), r"axis 'c' of size 4 is longer than e\(3\)"),
        (lambda x, c: axn.pad_left(x, "c", Axis("a", 8)), "pad_left: 'a' would name more than one axis"),
        (lambda x, c: axn.repeat(c, -1, "c"), "`repeats` cannot be negative, got -1"),
        (lambda x, c: axn.repeat(c, 2, "d"), r"repeat: no axis 'd' in \(c=4\)"),
        (
            lambda x, c: axn.repeat(c, axn.ones({"a": 2}), "c"),
            r"must be a scalar or have the one axis 'c', got \(a=2\)",
        ),
        (lambda x, c: axn.repeat(c, [1, 2], "c"), "repeat: axis 'c' has conflicting sizes: 4 .* 2 "),
        (lambda x, c: axn.tile(c, {"c": -1}), r"tile: .* cannot be negative, got \(c=-1\)"),
        (lambda x, c: axn.tile(c, {"c": 2, Axis("c", 4): 3}), "tile: 'c' would name more than one axis"),
        (lambda x, c: axn.tile(c, {Axis("c", 5): 2}), "tile: axis 'c' has conflicting sizes"),
        (lambda x, c: axn.roll(c, 1, "d"), r"roll: no axis 'd' in \(c=4\)"),
        (lambda x, c: axn.roll(x, (1, 2), ("a", "b", "c")), r"roll: 2 shifts for the axes \(a, b, c\)"),
        (lambda x, c: axn.roll(c, c, "c"), r"`shift` must be a scalar, got an array with axes \(c=4\)"),
        (lambda x, c: axn.flip(c, "d"), r"flip: no axis 'd' in \(c=4\)"),
    ],
)
def test_joining_refuses(x, call, message):
    with pytest.raises(ValueError, match=message):
        call(x, axn.ones({"c": 4}))


def test_joining_refuses_other_types(x):
    for join in (axn.stack, axn.concatenate):
        with pytest.raises(TypeError, match=r"the arrays come first, and then the axis, as in .*; got str and list"):
            join("x", [axn.ones({"x": 2})])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="stack: expected a sequence of arrays, got NamedArray"):
        axn.stack(x, "s")
    with pytest.raises(TypeError, match="pad: axis 'a' takes two integers, before and after, got"):
        axn.pad(x, {"a": 1.5})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"pad: axis 'a' takes two integers.*got \(1, 2, 3\)"):
        axn.pad(x, {"a": (1, 2, 3)})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="pad_left: `new_axis` says how long to make the axis"):
        axn.pad_left(x, "a", "longer")  # pyright: ignore[reportArgumentType]


def test_repeat_takes_counts_in_any_form():
    x = axn.arange(Axis("x", 3))
    for counts in ([1, 0, 2], (1, 0, 2), np.array([1, 0, 2]), jnp.array([1, 0, 2]), axn.named([1, 0, 2], "x")):
        np.testing.assert_array_equal(axn.repeat(x, counts, "x").array, [0, 2, 2])
    for count in (2, np.int32(2), jnp.int32(2), axn.named(2, ())):
        np.testing.assert_array_equal(axn.repeat(x, count, "x").array, [0, 0, 1, 1, 2, 2])


def test_repeat_takes_counts_in_a_small_dtype():
    counts = np.array([100, 100], np.int8)
    for repeats in (counts, jnp.array(counts), axn.named(counts, "x")):
        assert axn.repeat(axn.named([0, 1], "x"), repeats, "x").sum().item() == 100
    assert axn.repeat(axn.zeros({"x": 100}), jnp.asarray(2, "int8"), "x").shape == {"x": 200}


def test_repeat_in_jit_needs_the_size_of_the_result():
    x = axn.arange(Axis("x", 2))
    with pytest.raises(ValueError, match=r"repeat: how long axis 'x' becomes .* Pass total_repeat_length"):
        jax.jit(lambda n: axn.repeat(x, n, "x"))(jnp.array([1, 2]))
    result = jax.jit(lambda n: axn.repeat(x, n, "x", total_repeat_length=3))(jnp.array([1, 2]))
    np.testing.assert_array_equal(result.array, [0, 1, 1])


def test_roll_takes_shifts_in_any_form(x):
    expected = np.roll(x.array, (1, 2), (0, 2))
    for shift in ((1, 2), [1, np.int64(2)], np.array([1, 2]), jnp.array([1, 2]), (axn.named(1, ()), 2)):
        np.testing.assert_array_equal(axn.roll(x, shift, ("a", "c")).array, expected)
    np.testing.assert_array_equal(axn.roll(x, 2, {"a": 2, "c": None}).array, np.roll(x.array, (2, 2), (0, 2)))


@pytest.mark.parametrize("mode", ["edge", "linear_ramp", "maximum", "mean", "minimum", "symmetric", "wrap"])
def test_pad_modes(x, mode):
    result = axn.pad(x, {"c": (2, 1)}, mode=mode)
    np.testing.assert_allclose(result.array, np.pad(x.array, ((0, 0), (0, 0), (2, 1)), mode=mode))


def test_values_do_not_compile_again(x):
    traces = 0

    @jax.jit
    def f(x, value, shift):
        nonlocal traces
        traces += 1
        return axn.roll(axn.pad_left(axn.pad(x, {"a": 1}, constant_values=value), "b", Axis("d", 5), value), shift, "c")

    for value in (1.0, 2.0):
        result = f(x, value, int(value))
        expected = np.pad(
            np.pad(x.array, ((1, 1), (0, 0), (0, 0)), constant_values=value),
            ((0, 0), (2, 0), (0, 0)),
            constant_values=value,
        )
        np.testing.assert_array_equal(result.array, np.roll(expected, int(value), 2))
    assert traces == 1


# --- Explicit meshes: data is 4 long, model is 2 ---


def _on(mesh, spec, **sizes) -> axn.NamedArray:
    values = np.arange(np.prod([*sizes.values()]), dtype=np.float32).reshape([*sizes.values()])
    return axn.named(jax.device_put(values, NamedSharding(mesh, spec)), tuple(sizes))


JOINT = ("data", "model")
BOTH = P("data", "model")


@pytest.mark.parametrize(
    ("spec", "call", "expected", "moves"),
    [
        # An axis that is split passes its mesh axes to the factors, the major one first, as far as they divide them.
        (BOTH, lambda x: axn.unflatten_axis(x, "x", (Axis("i", 4), "j")), P("data", None, "model"), False),
        (BOTH, lambda x: axn.unflatten_axis(x, "x", (Axis("i", 1), "j")), P(None, "data", "model"), False),
        (BOTH, lambda x: axn.unflatten_axis(x, "x", (Axis("i", 2), "j")), P(None, "data", "model"), True),
        (BOTH, lambda x: axn.unflatten_axis(x, "x", (Axis("y2", 4), "x")), P("data", None, "model"), False),
        (P(JOINT), lambda x: axn.unflatten_axis(x, "x", (Axis("i", 4), "j")), P("data", "model", None), False),
        (P(JOINT), lambda x: axn.unflatten_axis(x, "x", (Axis("i", 8), "j")), P(JOINT, None, None), False),
        (P("data"), lambda x: axn.unflatten_axis(x, "x", {"i": 2, "k": 2, "j": 4}), P(None, None, "data", None), True),
        (BOTH, lambda x: axn.rearrange(x, "(i j) y -> j y i", i=4), P(None, "model", "data"), False),
        # An axis merged from several has the mesh axes of all.
        (P("data", None), lambda x: axn.flatten(x, "n"), P("data"), False),
        (BOTH, lambda x: axn.flatten(x, "n"), P(JOINT), True),
        (BOTH, lambda x: axn.flatten_axes(x, ("y", "x"), "n"), P(("model", "data")), True),
        (BOTH, lambda x: axn.flatten_axes(x, ("y", "x"), "x"), P(("model", "data")), True),
        (BOTH, lambda x: axn.rearrange(x, "x y -> (n: y x)"), P(("model", "data")), True),
        (BOTH, lambda x: axn.rearrange(x, "(i j) y -> j (n: i y)", i=4), P(None, JOINT), None),
        # A new name takes over from the old one.
        (BOTH, lambda x: axn.rename(x, {"x": "y", "y": "x"}), BOTH, False),
        (BOTH, lambda x: axn.rearrange(x, "x y -> y (n: x)"), P("model", "data"), False),
        (BOTH, lambda x: axn.flatten_axes(x, "x", "n"), BOTH, False),
        (BOTH, lambda x: axn.pad_left(x, "x", Axis("n", 24)), BOTH, None),
        (BOTH, lambda x: axn.pad_left(x, "x", Axis("n", 17)), P(None, "model"), None),
        # Axes that keep their names keep their shardings, and new axes are replicated.
        (BOTH, lambda x: axn.rearrange(x, ("y", "x")), P("model", "data"), False),
        (BOTH, lambda x: axn.broadcast_axis(x, Axis("z", 4)), P(None, "data", "model"), False),
        (BOTH, lambda x: axn.stack([x, x], "z"), P(None, "data", "model"), False),
        (BOTH, lambda x: axn.tile(x, {"z": 2}), P(None, "data", "model"), False),
        (BOTH, lambda x: axn.repeat(x, 2, "x"), BOTH, False),
    ],
)  # fmt: skip
def test_placement(explicit_mesh, spec, call, expected, moves):
    x = _on(explicit_mesh, spec, x=16, y=4)
    values = call(axn.named(np.asarray(x.array), x.names))
    with jax.set_mesh(explicit_mesh):
        jitted = jax.jit(call)
        results = [call(x), jax.block_until_ready(jitted(x))]
        program = jitted.lower(x).compile().as_text() or ""
    for result in results:
        assert result.axes == values.axes
        assert result.array.sharding.spec == expected
        np.testing.assert_array_equal(result.array, values.array)
    if moves is not None:
        found = re.findall(r"(all-gather|all-to-all|all-reduce|collective-permute)\(", program)
        assert bool(found) is moves


def test_placement_of_parts(explicit_mesh):
    x = _on(explicit_mesh, P("data", "model"), x=16, y=4)
    i, x2, k = axn.split(x, "x", (Axis("i", 8), Axis("x", 4), Axis("k", 4)))
    assert [spec(p) for p in (i, x2, k)] == [("data", "model")] * 3
    assert [spec(p) for p in axn.unbind(x, "y")] == [("data",)] * 4
    odd, rest = axn.split(x, "x", (Axis("odd", 3), Axis("rest", 13)))
    assert [spec(p) for p in (odd, rest)] == [(None, "model")] * 2


def test_broadcast_arrays_places_new_axes_like_the_others(explicit_mesh):
    x = _on(explicit_mesh, P("data", "model"), x=16, y=4)
    bias = axn.named(jnp.ones(4), "y")
    with jax.set_mesh(explicit_mesh):
        for result in (axn.broadcast_arrays(bias, x), jax.jit(axn.broadcast_arrays)(bias, x)):
            assert [spec(r) for r in result] == [("data", "model")] * 2


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_the_gradient_of_a_roll_rolls_back(explicit: bool) -> None:
    """Each roll sends one row to a neighbor, and so does its gradient; that of `jax.numpy.roll` sends more."""
    x = axn.random.normal(jax.random.key(0), {"x": 64, "y": 4})

    def loss(x: axn.NamedArray) -> jax.Array:
        return axn.sum(axn.sin(axn.roll(x, 1, "x") - axn.roll(x, -1, "x"))).array

    expected = jax.grad(loss)(x)
    with jax.set_mesh(axn.make_mesh({"a": 8}, explicit=explicit)), axn.axis_mapping({"x": "a"}):
        placed = axn.shard(x)
        program = jax.jit(jax.grad(loss)).lower(placed).compile()
        np.testing.assert_allclose(np.asarray(program(placed).array), np.asarray(expected.array), rtol=1e-5, atol=1e-6)
    kinds = re.findall(r" (all-\w+(?:-\w+)?|reduce-scatter|collective-permute)(?:-start)?\(", program.as_text() or "")
    assert kinds == ["collective-permute"] * 4


@pytest.mark.parametrize("shift", [3, -9, 0])
def test_a_roll_is_differentiated_mapped_and_run_per_device(shift: int, auto_mesh: Mesh) -> None:
    x = axn.random.normal(jax.random.key(0), {"batch": 4, "x": 8})

    def rolled(x: axn.NamedArray) -> axn.NamedArray:
        return axn.roll(x, shift, "x")

    with jax.set_mesh(auto_mesh), axn.axis_mapping({"batch": "data"}):
        per_device = jax.jit(axn.shard_map(rolled))(x)
    for found in (*jax.jvp(rolled, (x,), (x,)), axn.vmap(rolled, "batch")(x), per_device):
        np.testing.assert_array_equal(np.asarray(found.array), np.roll(np.asarray(x.array), shift, 1))
