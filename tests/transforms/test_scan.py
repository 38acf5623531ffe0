"""`scan`, `fold` and `map` by name: compared with the positional form, scanned and carried values, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym.transforms.scan import fold, map, scan
from axonym.transforms.vmap import vmap
from tests.helpers import assert_named, draw
from tests.transforms.scan_cases import (
    CASES,
    LATE,
    START,
    WEIGHT,
    XS,
    Batch,
    Embed,
    Layer,
    Out,
    Time,
    loss_of,
    step,
)

# --- against the positional form ---


@pytest.mark.parametrize("name", CASES)
def test_is_the_positional_form(name: str) -> None:
    case = CASES[name]
    raw = START.array, case.xs.array, WEIGHT.array
    final, outputs = case.theirs(*raw)
    for transform in (lambda f: f, jax.jit):
        found = transform(case.ours)(START, case.xs, WEIGHT)
        assert_named(found[0], axn.named(final, (Batch, Embed)), rtol=1e-5, atol=1e-6)
        assert_named(found[1], axn.named(outputs, (Time, Batch)), rtol=1e-5, atol=1e-6)
    ours = jax.jit(jax.grad(loss_of(case.ours), argnums=(0, 1, 2)))(START, case.xs, WEIGHT)
    theirs = jax.jit(jax.grad(loss_of(case.theirs), argnums=(0, 1, 2)))(*raw)
    for a, b, like in zip(ours, theirs, (START, case.xs, WEIGHT), strict=True):
        assert_named(a, axn.named(b, like.axes), rtol=1e-4, atol=1e-5)


def test_under_other_transforms() -> None:
    def ours(x: Any) -> Any:
        return CASES["first"].ours(START, x, WEIGHT)[1]

    def theirs(x: Any) -> Any:
        return CASES["first"].theirs(START.array, x, WEIGHT.array)[1]

    several = jnp.stack([XS.array, 2 * XS.array])
    named = axn.named(several, (axn.Axis("ensemble", 2), *XS.axes))
    np.testing.assert_allclose(vmap(ours, "ensemble")(named).array, jax.vmap(theirs)(several), rtol=1e-5)
    found = jax.jvp(ours, (XS,), (XS,))[1]
    np.testing.assert_allclose(found.array, jax.jvp(theirs, (XS.array,), (XS.array,))[1], rtol=1e-4, atol=1e-5)
    found = jax.grad(lambda x: ours(x).sum().array)(XS)
    np.testing.assert_allclose(found.array, jax.grad(lambda x: theirs(x).sum())(XS.array), rtol=1e-4, atol=1e-5)


def test_fold_and_map_are_parts_of_scan() -> None:
    final, outputs = scan(fn=step, axis=Time)(START, XS, WEIGHT)
    assert_named(fold(lambda h, x, w: step(h, x, w)[0], Time)(START, XS, w=WEIGHT), final)
    squares = map(lambda pair: pair["x"] * pair["w"], "time", reverse=True)({"x": LATE, "w": WEIGHT})
    assert_named(squares, (LATE * WEIGHT).rearrange(("time", "batch", "embed")))
    assert outputs.axes == (Time, Batch)


# --- what is scanned, and what is not ---


def test_raw_arrays_are_scanned_along_their_first_axis() -> None:
    raw = np.arange(16, dtype=np.float32).reshape(8, 2)
    total, (named, rows) = scan(lambda c, x, r: (c + r.sum(), (x, 2 * r)), "time")(0.0, XS, raw)
    assert float(total) == raw.sum()
    assert_named(named, XS)
    assert isinstance(rows, jax.Array)
    np.testing.assert_array_equal(rows, 2 * raw)


def test_scalars_keys_and_other_leaves_are_the_same_in_every_step() -> None:
    seen = []

    def body(c: Any, x: Any, scale: Any, key: Any, flag: bool, name: str) -> Any:
        seen.append((flag, name, jnp.shape(scale), key.shape))
        return c + scale * x.sum().array if flag else c

    found = fold(body, "time")(0.0, XS, jnp.float32(2), jax.random.key(0), True, "hidden")
    np.testing.assert_allclose(found, 2 * XS.array.sum(), rtol=1e-4)
    assert set(seen) == {(True, "hidden", (), ())}


def test_static_arguments_are_told_apart_by_type() -> None:
    def body(c: Any, x: Any, k: Any) -> Any:
        return c + (1 if k is True else 10 if type(k) is int else 100)

    totals = [int(fold(body, "time")(0, XS, k)) for k in (True, 1, 1.0, True)]
    assert totals == [8, 80, 800, 8]


def test_numbers_that_are_returned_are_stacked() -> None:
    """Where `vmap` passes them on."""
    np.testing.assert_array_equal(map(lambda x: 1.5, "time")(XS), np.full(8, 1.5))
    assert vmap(lambda x: 1.5, "time")(XS) == 1.5


def test_is_scanned_leaves_arrays_out() -> None:
    key = jnp.arange(2)
    _, found = scan(lambda c, x, k: (c, k), "time", is_scanned=axn.is_named_array)(0.0, XS, key)
    np.testing.assert_array_equal(found, jnp.tile(key, (8, 1)))
    whole = fold(lambda c, x: c + x, Time, is_scanned=False)(axn.zeros(XS.axes), XS)
    assert_named(whole, 8 * XS, rtol=1e-6)
    assert map(lambda x, k: k, "time", is_mapped=lambda x: x.ndim > 1)(XS, key).shape == (8, 2)


def test_nothing_needs_to_be_scanned() -> None:
    final, outputs = scan(lambda c: (2 * c, c), axn.Axis("time", 3))(axn.ones(Embed))
    assert_named(final, axn.full(Embed, 8.0))
    assert outputs.shape == {"time": 3, "embed": 6}


def test_no_steps() -> None:
    final, outputs = scan(lambda c, x: (c + x, c), "time")(axn.zeros(Embed), axn.zeros({"time": 0, "embed": 6}))
    assert_named(final, axn.zeros(Embed))
    assert outputs.shape == {"time": 0, "embed": 6}


class Block(eqx.Module):
    """A layer with leaves of all kinds."""

    weight: axn.NamedArray
    bias: axn.NamedArray | None
    activation: Callable[[Any], Any]
    rate: float
    width: int = eqx.field(static=True)

    def __call__(self, x: axn.NamedArray) -> axn.NamedArray:
        return self.activation(axn.dot(x, self.weight, axis="embed").rename({"out": "embed"})) * self.rate


def test_stacked_modules() -> None:
    weight = draw(Out, Layer, Embed)
    stacked = Block(weight, None, axn.tanh, 0.5, 6)
    found = fold(lambda x, block: block(x), Layer)(START, stacked)
    expected = START.array
    for i in range(3):
        expected = 0.5 * jnp.tanh(expected @ weight.array[:, i].T)
    assert_named(found, axn.named(expected, (Batch, Embed)), rtol=1e-5, atol=1e-6)
    gradient = eqx.filter_grad(lambda s: fold(lambda x, block: block(x), Layer)(START, s).sum().array)(stacked)
    assert gradient.weight.axes == weight.axes


def test_modules_as_carries_and_outputs() -> None:
    block = Block(draw(Out, Embed), None, axn.tanh, 0.5, 6)

    def body(block: Block, x: Any) -> tuple[Block, Block]:
        return eqx.tree_at(lambda b: b.weight, block, block.weight + x.sum()), block

    final, all_of_them = scan(body, "time")(block, XS)
    assert final.activation is axn.tanh and all_of_them.activation is axn.tanh
    np.testing.assert_allclose(final.weight.array, block.weight.array + XS.array.sum(), rtol=1e-4)
    assert all_of_them.weight.axes == (Time, Out, Embed)
    assert jnp.shape(all_of_them.rate) == (8,)  # a number that is returned is an array, as in JAX


def test_placeholders_for_arrays_are_handed_on() -> None:
    hollow = Block(axn.NamedArray(None, (), ("out", "embed")), None, axn.tanh, 0.5, 6)
    found = map(lambda x, block: x if block.weight.array is None else -x, "time")(XS, hollow)
    assert_named(found, XS)


def test_references_are_written_in_place() -> None:
    ref = axn.new_ref(axn.zeros(Time))

    def body(i: Any, x: Any) -> Any:
        ref["time", i] = x.sum()
        return i + 1

    fold(body, "time")(0, XS)
    np.testing.assert_allclose(ref[...].array, XS.array.sum((1, 2)), rtol=1e-5)


# --- carries ---


def test_the_order_of_axes_in_a_carry_is_only_layout() -> None:
    def body(h: Any, x: Any) -> tuple[Any, Any]:
        assert h.axes == (Batch, Embed)
        return (h + x).rearrange(("embed", "batch")), None

    final, _ = scan(body, "time")(START, XS)
    assert_named(final, START + XS.sum("time"), rtol=1e-5)


@pytest.mark.parametrize(
    ("init", "dtype", "expected"),
    [(0, jnp.float32, jnp.float32), (0.0, jnp.bfloat16, jnp.bfloat16), (jnp.float32(0), jnp.bfloat16, jnp.float32)],
)
def test_numbers_take_the_dtype_of_the_body(init: Any, dtype: Any, expected: Any) -> None:
    xs = XS.astype(dtype)
    found = fold(lambda c, x: c + x.sum(), "time")(init, xs)
    assert isinstance(found, jax.Array), "a raw carry stays one"
    raw = jax.lax.scan(lambda c, x: (c + x.sum(), None), init, xs.array)[0]
    assert found.dtype == raw.dtype == expected


def test_a_changed_carry_is_described_leaf_by_leaf() -> None:
    init = {"h": START, "k": jnp.ones(3), "n": jnp.int32(0), "f": axn.tanh, "ok": 0.0}

    def body(c: Any, x: Any) -> Any:
        return c | {"h": c["h"].sum("batch"), "k": c["k"][:2], "n": c["n"] + 0.5, "f": axn.sin}

    with pytest.raises(TypeError) as error:
        fold(body, "time")(init, XS)
    lines = str(error.value).splitlines()
    assert lines[0] == "fold:"
    assert "carry['f'] goes in as a function tanh and comes out as a function sin." in lines[1]
    assert "carry['h'] goes in as float32[batch=4, embed=6] and comes out as float32[embed=6]." in lines[2]
    assert "carry['k'] goes in as raw float32[3] and comes out as raw float32[2]." in lines[3]
    assert "carry['n'] goes in as int32[] and comes out as float32[]. Cast it with `.astype(int32)`" in lines[4]
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("init", "body", "message"),
    [
        ({"a": 0.0, "b": 0.0}, lambda c, x: {"a": c["a"]}, r"carry\['b'\] goes in but does not come out"),
        ({"a": 0.0}, lambda c, x: {"a": 0.0, "z": 0.0}, r"carry\['z'\] comes out but does not go in"),
        (0.0, lambda c, x: (c, x), r"carry goes in but .* and carry\[0\], carry\[1\] comes out"),
        (((0.0,), [0.0]), lambda c, x: (c[0], tuple(c[1])), r"a part of it goes in as .*\[\*\].* as .*\(\*,\)"),
        (axn.zeros(()), lambda c, x: c + x, r"goes in as float32\[\] and comes out as float32\[batch=4, embed=6\]"),
        (jnp.zeros(6), lambda c, x: x.sum("batch"), r"as raw float32\[6\] and comes out as float32\[embed=6\]"),
    ],
)  # fmt: skip
def test_a_carry_of_another_structure(init: Any, body: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        fold(body, "time")(init, XS)


# --- other refusals ---


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: scan(step, "tme")(START, XS, WEIGHT), ValueError, r"no scanned array .* 'tme'.*Did you mean 'time'"),
        (lambda: scan(step, axn.Axis("time", 5))(START, XS, WEIGHT), ValueError, r"8 in args\[0\], 5 in the axis"),
        (lambda: fold(lambda c, x, y: c, "time")(0, XS, y=jnp.ones(3)), ValueError, r"3 in kwargs\['y'\].*`is_sc"),
        (lambda: map(lambda x, y: x, "time")(XS, jnp.ones(3)), ValueError, r"3 in args\[1\].*`is_mapped`"),
        (lambda: scan(lambda c, x: c, "time")(0.0, XS), ValueError, "must return a pair.*Use `fold`"),  # pyright: ignore[reportArgumentType]
        (lambda: map(lambda x: axn.ones(Time), "time")(XS), ValueError, "axis 'time' of its own"),
        (lambda: jax.vmap(map(lambda x: x, "time"))(XS), ValueError, "3 names .* for an array of rank 2"),
        (lambda: fold(step, "time", unroll=0), ValueError, "at least 1, or True; got 0"),
        (lambda: scan(step, "time", remat=cast(Any, "most")), ValueError, "expected one of True, .*, got 'most'"),
    ],
)  # fmt: skip
def test_refusals(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("axis", [(Time, Embed), ["time"], 0, {"time": 4}], ids=str)
def test_one_axis_is_looped_over(axis: Any) -> None:
    with pytest.raises(TypeError, match="fold: expected one axis, an Axis or a name, got"):
        fold(lambda h, x: h, axis)


@pytest.mark.parametrize("unroll", [1.5, "all", 0])
def test_unroll_is_a_number_of_steps(unroll: Any) -> None:
    with pytest.raises(ValueError, match="fold: `unroll` is a number of steps, at least 1, or True"):
        fold(lambda h, x: h, Time, unroll=unroll)
