"""The named array itself: construction, protocols, and its life as a pytree."""

from __future__ import annotations

import copy
import operator
import pickle
import re
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import axonym as axn
from tests.helpers import assert_named

Batch, Embed = axn.make_axes(batch=2, embed=3)


def _array(*axes: axn.Axis, start: float = 0.0) -> axn.NamedArray:
    """Make an array of floats start, start + 1, ..."""
    shape = [axis.size for axis in axes]
    return axn.named(jnp.arange(start, start + axn.axis.axis_size(axes)).reshape(shape), axes)


x = _array(Batch, Embed)


# --- construction ---


@pytest.mark.parametrize(
    "axes",
    [
        (Batch, Embed),
        [Batch, Embed],
        ("batch", "embed"),
        (Batch, "embed"),
        {"batch": 2, "embed": 3},
        {"batch": 2, "embed": None},
    ],
)
def test_axes_in_every_form(axes: Any) -> None:
    for made in (axn.named(jnp.zeros((2, 3)), axes), axn.NamedArray(jnp.zeros((2, 3)), axes)):
        assert made.axes == (Batch, Embed)
        assert made.names == ("batch", "embed")


def test_one_axis_or_none() -> None:
    assert axn.named(jnp.zeros(2), "batch").axes == (Batch,)
    assert axn.named(jnp.zeros(2), Batch).axes == (Batch,)
    assert axn.named(jnp.zeros(()), ()).axes == ()
    assert axn.NamedArray(jnp.zeros(())).axes == ()


@pytest.mark.parametrize(
    ("value", "axes", "dtype"),
    [
        ([1, 2], "batch", "int32"),
        ([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], (Batch, Embed), "float32"),
        (2.5, (), "float32"),
        (True, (), "bool"),
        ((1, 2), Batch, "int32"),
        (np.float16(1), (), "float16"),
    ],
)
def test_named_takes_lists_and_numbers(value: Any, axes: Any, dtype: str) -> None:
    made = axn.named(value, axes)
    assert str(made.dtype) == dtype
    np.testing.assert_array_equal(np.asarray(made.array), np.asarray(value))


def test_numpy_arrays_stay_what_they_are() -> None:
    """Nothing is moved to a device before it is used."""
    array = np.ones((2, 3))
    assert axn.named(array, ("batch", "embed")).array is array


def test_attributes() -> None:
    assert x.shape == {"batch": 2, "embed": 3}
    assert (x.ndim, x.size, x.nbytes, x.dtype) == (2, 6, 24, jnp.float32)
    assert x.ndim == 2
    assert x.has_axis("batch") and x.has_axis((Batch, "embed")) and not x.has_axis(("batch", "pos"))
    assert x.axis_size("embed") == 3 and x.axis_size(("embed", "batch")) == (3, 2)
    assert x.axis_indices("embed") == 1 and x.axis_indices(("embed", "pos")) == (1, None)
    assert x.axis_indices("pos") is None
    assert x.resolve_axis("embed") is Embed
    assert x.resolve_axis(("embed", Batch)) == (Embed, Batch)
    assert x.resolve_axis({"embed": None}) == {"embed": 3}


class Hidden:
    """A value in place of an array, without an array's attributes."""


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: axn.named(jnp.zeros((2, 3)), "batch"),
            ValueError,
            "1 axis (batch) for an array of rank 2, shape (2, 3)",
        ),
        (lambda: axn.named(jnp.zeros((2, 3)), "a b"), ValueError, "shape (2, 3). Names are a sequence: ('a', 'b')."),
        (
            lambda: axn.named(jax.random.split(jax.random.PRNGKey(0), 2), Batch),
            ValueError,
            "shape (2, 2). Keys of `jax.random.PRNGKey` have a last dimension of their own; those of `jax.random.key`",
        ),
        (
            lambda: axn.named(jnp.zeros(2), (Batch, Embed)),
            ValueError,
            "2 axes (batch=2, embed=3) for an array of rank 1",
        ),
        (
            lambda: axn.named(jnp.zeros((3, 2)), (Batch, Embed)),
            ValueError,
            "axis 'batch' has size 2, but the array has 3",
        ),
        (lambda: axn.named(jnp.zeros((2, 2)), ("a", "a")), ValueError, "'a' would name more than one axis in (a, a)"),
        (
            lambda: axn.named(jnp.zeros((2, 3)), cast(Any, (0, 1))),
            TypeError,
            "An axis is selected by an Axis or its name, got int",
        ),
        (lambda: axn.named(x, ("a", "b")), TypeError, "already has names, float32[batch=2, embed=3]. Use `rename`"),
        (
            lambda: axn.NamedArray(x, ("a", "b")),
            TypeError,
            "already has names, float32[batch=2, embed=3]. Use `rename`",
        ),
        (
            lambda: axn.NamedArray([1, 2], "a"),
            TypeError,
            "expected an array, got list. Lists go through `axonym.named`",
        ),
        (lambda: axn.NamedArray(type, "a"), TypeError, "expected an array, got type"),
        (lambda: axn.NamedArray(Hidden(), "a"), TypeError, "expected an array, got Hidden"),
        (lambda: x.resolve_axis("embd"), ValueError, "no axis 'embd' in (batch=2, embed=3). Did you mean 'embed'?"),
        (
            lambda: x.resolve_axis(axn.Axis("embed", 4)),
            ValueError,
            "conflicting sizes: 3 in the array, 4 in the argument",
        ),
        (lambda: x.axis_size(("pos", "heads")), ValueError, "no axes 'pos', 'heads' in (batch=2, embed=3)"),
    ],
)
def test_construction_errors(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make()


# --- a pytree with one leaf ---


def test_flatten_and_unflatten() -> None:
    leaves, structure = jax.tree.flatten({"w": x})
    assert len(leaves) == 1 and leaves[0] is x.array
    again = jax.tree.unflatten(structure, leaves)["w"]
    assert again.array is x.array and again.names == x.names
    assert jax.tree.structure(x) == jax.tree.structure(_array(Batch, Embed, start=7.0))
    assert jax.tree.structure(x) != jax.tree.structure(x.rename({"batch": "pos"}))
    assert jax.tree.structure(x) != jax.tree.structure(axn.rearrange(x, ("embed", "batch")))
    assert hash(jax.tree.structure(x)) == hash(jax.tree.structure(_array(Batch, Embed)))


@pytest.mark.parametrize("leaf", [None, object(), "text", jax.ShapeDtypeStruct((2, 3), jnp.float32), jnp.zeros((7,))])
def test_anything_may_stand_for_the_array(leaf: Any) -> None:
    """What maps over leaves may leave anything behind; nothing is checked until it is used."""
    made = jax.tree.map(lambda _: leaf, x)
    assert isinstance(made, axn.NamedArray)
    assert made.array is leaf and made.names == x.names
    assert str(made) and repr(made)


def test_paths_name_the_array() -> None:
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path({"w": x})]
    assert paths == ["['w'].array"]


def test_abstract_arrays() -> None:
    abstract = jax.eval_shape(lambda: axn.zeros((Batch, Embed)))
    assert isinstance(abstract.array, jax.ShapeDtypeStruct)
    assert abstract.axes == (Batch, Embed)
    assert (abstract.size, abstract.nbytes, abstract.dtype) == (6, 24, jnp.float32)
    assert repr(abstract) == "NamedArray(float32[batch=2, embed=3], ShapeDtypeStruct)"
    out = jax.eval_shape(lambda a: axn.sum(a, "batch"), abstract)
    assert out.axes == (Embed,)


def test_jit_grad_and_cond() -> None:
    def loss(a: axn.NamedArray) -> jax.Array:
        return axn.sum(a * a).scalar()

    assert_named(jax.jit(lambda a: a + 1)(x), axn.named(x.array + 1, x.names))
    assert_named(jax.grad(loss)(x), axn.named(2 * x.array, x.names))
    assert_named(jax.jit(jax.grad(loss))(x), axn.named(2 * x.array, x.names))
    assert_named(jax.lax.cond(True, lambda a: a, lambda a: -a, x), x)
    assert_named(jax.lax.fori_loop(0, 3, lambda _, a: a + 1, x), axn.named(x.array + 3, x.names))
    primal, tangent = jax.jvp(lambda a: a * a, (x,), (x,))
    assert_named(primal, axn.named(x.array**2, x.names))
    assert_named(tangent, axn.named(2 * x.array**2, x.names))


def test_other_names_are_another_type_in_cond() -> None:
    with pytest.raises(TypeError):
        jax.lax.cond(True, lambda a: a, lambda a: a.rename({"batch": "pos"}), x)


def test_carried_through_scan() -> None:
    steps = jnp.arange(4.0)
    last, each = jax.lax.scan(lambda carry, i: (carry + i, axn.sum(carry)), x, steps)
    assert_named(last, axn.named(x.array + 6, x.names))
    assert each.names == () and each.array.shape == (4,)  # the stacked axis has no name: see test_rank_mismatch


def test_optax_state() -> None:
    params = {"w": x, "b": _array(Embed)}
    optimizer = optax.adam(0.1)
    state = optimizer.init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    updates, state = jax.jit(optimizer.update)(grads, state, params)
    updated: Any = optax.apply_updates(params, updates)
    assert isinstance(updated["w"], axn.NamedArray) and updated["w"].names == x.names
    np.testing.assert_allclose(updated["w"].array, x.array - 0.1, rtol=1e-4)
    moments = [s for s in jax.tree.leaves(state, is_leaf=axn.is_named_array) if axn.is_named_array(s)]
    assert len(moments) == 4
    assert float(optax.tree.norm(grads)) == pytest.approx(np.sqrt(9))


def test_equinox_partition_and_combine() -> None:
    tree = {"w": x, "n": 3, "i": axn.named([1, 2], "batch")}
    floats, rest = eqx.partition(tree, eqx.is_inexact_array)
    assert isinstance(rest["w"], axn.NamedArray) and rest["w"].array is None
    assert isinstance(floats["i"], axn.NamedArray) and floats["i"].array is None
    combined = eqx.combine(floats, rest)
    assert_named(combined["w"], x)
    assert_named(combined["i"], tree["i"])
    gradient = eqx.filter_grad(lambda t: axn.sum(t["w"] * t["n"]).scalar())(tree)
    assert_named(gradient["w"], axn.named(jnp.full((2, 3), 3.0), x.names))


def test_what_was_filtered_out_has_no_size() -> None:
    empty = eqx.filter({"w": x}, lambda _: False)["w"]
    for ask in (lambda: empty.size, lambda: empty.shape, lambda: empty.axes):
        with pytest.raises(ValueError, match=r"The named array \(batch, embed\) is empty: its array is None"):
            ask()
    assert repr(empty) == "NamedArray(NoneType(batch, embed), NoneType)"


def test_what_jax_makes_of_a_jacobian_can_be_shown() -> None:
    found = jax.jacrev(lambda w: w * w)(axn.ones({"embed": 2}))
    assert repr(found) == "NamedArray(NamedArray(embed), NamedArray)"


def test_equinox_module_with_named_fields() -> None:
    class Model(eqx.Module):
        w: axn.NamedArray
        n: int = eqx.field(static=True)

    model = Model(x, 2)
    doubled = eqx.filter_jit(lambda m: eqx.tree_at(lambda t: t.w, m, m.w * m.n))(model)
    assert_named(doubled.w, axn.named(2 * x.array, x.names))


def test_copy_and_pickle() -> None:
    for made in (copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert_named(made, x)
    host = axn.named(np.ones(2), "batch")
    assert isinstance(pickle.loads(pickle.dumps(host)).array, np.ndarray)
    assert copy.deepcopy(host).array is not host.array
    broken = axn.NamedArray(jnp.zeros((4, 2)), names=("batch",))
    assert pickle.loads(pickle.dumps(broken)).names == ("batch",)


def test_names_are_interned() -> None:
    """Metadata compared by identity is what makes dispatch cheap."""
    again = axn.named(x.array, ("".join(["ba", "tch"]), "embed"))
    assert all(a is b for a, b in zip(again.names, x.names, strict=True))


# --- representation ---


@pytest.mark.parametrize(
    ("array", "text", "shown"),
    [
        (x["batch", :1], "float32[batch=1, embed=3] [[0. 1. 2.]]", "float32[batch=1, embed=3], [[0. 1. 2.]]"),
        (axn.named([[1, 2], [3, 4]], ("a", "b")), "int32[a=2, b=2]\n[[1 2]\n [3 4]]", "int32[a=2, b=2], [[1 2] [3 4]]"),
        (axn.named(1.5, ()), "float32[] 1.5", "float32[], 1.5"),
        (axn.named([True, False], "a"), "bool[a=2] [ True False]", "bool[a=2], [ True False]"),
        (axn.named(np.ones(2), "a"), "float64[a=2] [1. 1.]", "float64[a=2], [1. 1.]"),
        (axn.named(jnp.zeros((65,)), "a"), "float32[a=65]", "float32[a=65]"),
        (axn.named(np.zeros((65,)), "a"), "float64[a=65]", "float64[a=65], ndarray"),
        (axn.named([[[1, 2]]], ("a", "b", "c")), "int32[a=1, b=1, c=2]", "int32[a=1, b=1, c=2], [[[1 2]]]"),
        (axn.named(jnp.zeros((0, 3)), ("a", "b")), "float32[a=0, b=3] []", "float32[a=0, b=3], []"),
        (axn.named(jnp.zeros(2, jnp.bfloat16), "a"), "bfloat16[a=2] [0 0]", "bfloat16[a=2], [0 0]"),
        (axn.NamedArray(None, names=("a", "b")), "NoneType(a, b)", "NoneType(a, b), NoneType"),
        (axn.NamedArray(jnp.zeros((4, 2)), names=("a",)), "float32[a] over shape (4, 2)\n[[0. 0.]", None),
    ],
)  # fmt: skip
def test_str_and_repr(array: axn.NamedArray, text: str, shown: str | None) -> None:
    if shown is None:  # names that do not fit
        assert str(array).startswith(text)
    else:
        assert str(array) == f"{array}" == text
        assert repr(array) == f"NamedArray({shown})"


def test_what_is_printed_where_values_are_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    """A tracer shows its axes; `jax.debug.print` shows the values that it has in the compiled program."""

    @jax.jit
    def run(a: axn.NamedArray) -> axn.NamedArray:
        print("traced", a)
        jax.debug.print("ran {a} {mean:.1f}", a=a["batch", 0], mean=a.mean())
        return a

    jax.block_until_ready(run(x))
    jax.effects_barrier()
    assert capsys.readouterr().out == "traced float32[batch=2, embed=3]\nran float32[embed=3] [0. 1. 2.] 2.5\n"


def test_a_model_prints_a_line_for_each_parameter() -> None:
    layer = axn.nn.Linear.init(axn.Axis("embed", 3), axn.Axis("mlp", 8), key=jax.random.key(0))
    lines = ["weight=float32[mlp=8, embed=3],", "bias=float32[mlp=8],"]
    assert [line.strip() for line in str(layer).splitlines()][1:3] == lines
    assert eqx.tree_pformat({"w": x, "n": 3}) == "{'w': float32[batch=2, embed=3], 'n': 3}"
    assert eqx.tree_pformat(eqx.filter_eval_shape(lambda: x)) == "float32[batch=2, embed=3]"
    assert eqx.tree_pformat(x["batch", 0], short_arrays=False) == "NamedArray(float32[embed=3], [0. 1. 2.])"


def test_sharded_arrays_are_printed(mesh: Mesh) -> None:
    a = axn.arange(axn.Axis("a", 8))
    with jax.set_mesh(mesh):
        for mapping in ({"a": "data"}, {"a": None}):
            placed = axn.shard(a, mapping)
            assert str(placed) == "int32[a=8] [0 1 2 3 4 5 6 7]"


def test_repr_of_tracers_and_keys() -> None:
    shown = []
    jax.jit(lambda a: shown.append(repr(a)))(x)
    assert shown == ["NamedArray(float32[batch=2, embed=3])"]
    keys = axn.named(jax.random.split(jax.random.key(0), 2), "batch")
    assert repr(keys) == "NamedArray(key<fry>[batch=2])"


class FarAway:
    """An array that fails the test if its values are requested."""

    shape, dtype, size, ndim = (1000, 1000), np.dtype("float32"), 10**6, 2

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the values were fetched")


def test_large_arrays_are_not_fetched() -> None:
    large = axn.named(FarAway(), ("a", "b"))
    assert repr(large) == "NamedArray(float32[a=1000, b=1000], FarAway)"
    on_device = axn.named(jnp.zeros((100, 100)), ("a", "b"))
    with jax.transfer_guard("disallow"):
        assert repr(on_device) == "NamedArray(float32[a=100, b=100])"
        assert str(on_device) == "float32[a=100, b=100]"


class OnOtherHosts(FarAway):
    shape, size, ndim = (4,), 4, 1
    is_fully_addressable = is_fully_replicated = False

    def is_deleted(self) -> bool:
        return False


def test_arrays_of_other_hosts_are_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "Array", (jax.Array, OnOtherHosts))
    elsewhere = axn.named(OnOtherHosts(), "a")
    assert str(elsewhere) == "float32[a=4]" and repr(elsewhere) == "NamedArray(float32[a=4])"


def test_deleted_arrays_can_be_shown() -> None:
    gone = axn.named(jnp.zeros(2), "a")
    gone.array.delete()
    assert repr(gone) == "NamedArray(float32[a=2])"


# --- equality, hashing, truth, numbers ---


def test_equality_is_elementwise() -> None:
    assert_named(x == x, axn.named(jnp.full((2, 3), True), x.names))
    assert_named(x != axn.named([0.0, 1.0, 9.0], "embed"), axn.named(x.array != jnp.array([[0.0, 1.0, 9.0]]), x.names))
    assert (x == "text") is False
    assert (x != None) is True
    with pytest.raises(TypeError, match="unhashable type: 'NamedArray'"):
        hash(x)


def test_python_numbers() -> None:
    three = axn.named(3, ())
    assert bool(three) is True and int(three) == 3 and float(three) == 3.0 and complex(three) == 3
    assert operator.index(three) == 3 and [0, 1, 2, "here"][three] == "here"
    assert three.item() == 3 and int(three.scalar()) == 3
    assert axn.named([[7]], ("a", "b")).item() == 7
    assert x.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert x.tobytes() == np.asarray(x.array).tobytes()
    assert x.tobytes("F") == np.asarray(x.array).tobytes("F")


@pytest.mark.parametrize(
    ("convert", "what"),
    [
        (bool, "a truth value"),
        (int, "int()"),
        (float, "float()"),
        (complex, "complex()"),
        (operator.index, "an index"),
    ],
)
def test_only_what_has_no_axes_is_a_number(convert: Callable[[Any], Any], what: str) -> None:
    with pytest.raises(
        TypeError, match=re.escape(f"{what} needs a named array without axes, got float32[batch=2, embed=3]")
    ):
        convert(x)


def test_host_values_of_several_elements() -> None:
    with pytest.raises(ValueError, match=re.escape("scalar: expected no axes, got float32[batch=2, embed=3]")):
        x.scalar()
    with pytest.raises(
        ValueError, match=re.escape("item: expected exactly one element, got float32[batch=2, embed=3]")
    ):
        x.item()


def test_floats_are_no_index() -> None:
    with pytest.raises(TypeError):
        operator.index(axn.named(1.0, ()))


def test_iteration_names_the_way_out() -> None:
    with pytest.raises(TypeError, match=re.escape("name the axis, as in `for row in x.unbind('batch')`")):
        iter(x)
    with pytest.raises(TypeError, match=re.escape("use `x.unbind('embed')`")):
        list(_array(Embed))
    with pytest.raises(TypeError, match="without axes is not iterable"):
        list(axn.named(1, ()))


# --- operators ---

OPERATORS: list[Callable[[Any, Any], Any]] = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    operator.eq,
    operator.ne,
]
BITWISE: list[Callable[[Any, Any], Any]] = [
    operator.and_,
    operator.or_,
    operator.xor,
    operator.lshift,
    operator.rshift,
]


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("number", [2, 2.5, np.float32(2.5), jnp.float32(2.5)], ids=["int", "float", "numpy", "jax"])
def test_operators_with_numbers(op: Callable[[Any, Any], Any], number: Any) -> None:
    array = x.array + 1
    assert_named(op(x + 1, number), axn.named(op(array, number), x.names), rtol=1e-6)
    assert_named(op(number, x + 1), axn.named(op(number, array), x.names), rtol=1e-6)


@pytest.mark.parametrize("op", OPERATORS + BITWISE)
def test_operators_match_axes_by_name(op: Callable[[Any, Any], Any]) -> None:
    a = axn.named(jnp.arange(1, 7).reshape(2, 3), ("batch", "embed"))
    b = axn.named(jnp.arange(1, 7).reshape(3, 2) % 4, ("embed", "batch"))
    c = axn.named(jnp.array([1, 2, 3]), "embed")
    assert_named(op(a, b), axn.named(op(a.array, b.array.T), a.names))
    assert_named(op(b, a), axn.named(op(b.array, a.array.T), b.names))
    assert_named(op(a, c), axn.named(op(a.array, c.array[None, :]), a.names))
    assert_named(op(c, a), axn.named(op(c.array[None, :], a.array), a.names))


@pytest.mark.parametrize("op", BITWISE)
def test_bitwise_operators_with_numbers(op: Callable[[Any, Any], Any]) -> None:
    a = axn.named(jnp.arange(1, 7).reshape(2, 3), ("batch", "embed"))
    assert_named(op(a, 2), axn.named(op(a.array, 2), a.names))
    assert_named(op(2, a), axn.named(op(2, a.array), a.names))


def test_divmod() -> None:
    for found, expected in (
        (divmod(x, 2.0), jnp.divmod(x.array, 2.0)),
        (divmod(7.0, x + 1), jnp.divmod(7.0, x.array + 1)),
    ):
        for i in range(2):
            assert_named(found[i], axn.named(expected[i], x.names))


def test_unary_operators() -> None:
    assert_named(-x, axn.named(-x.array, x.names))
    assert_named(+x, x)
    assert_named(abs(-x), x)
    assert_named(~axn.named([0, 1], "a"), axn.named([-1, -2], "a"))
    assert_named(~axn.named([True, False], "a"), axn.named([False, True], "a"))


def test_augmented_assignment_rebinds() -> None:
    y = x
    y += 1
    assert_named(y, axn.named(x.array + 1, x.names))
    assert x.array is not y.array


@pytest.mark.parametrize("op", OPERATORS)
def test_numbers_do_not_change_the_dtype(op: Callable[[Any, Any], Any]) -> None:
    """Python numbers are weakly typed, as in JAX."""
    half = axn.named(jnp.ones(2, jnp.bfloat16), "a")
    expected = op(half.array, 2.5).dtype
    assert op(half, 2.5).dtype == expected
    assert op(2.5, half).dtype == expected
    assert op(half, 2).dtype == expected


def test_operators_with_what_is_no_array() -> None:
    for other in ("text", None, [1, 2], {"a": 1}):
        with pytest.raises(TypeError, match="unsupported operand type"):
            x + other  # pyright: ignore[reportOperatorIssue]
        with pytest.raises(TypeError):
            other + x  # pyright: ignore[reportOperatorIssue]


def test_raw_arrays_with_axes_are_refused() -> None:
    for other in (jnp.ones((2, 3)), np.ones((2, 3))):
        for op in (operator.add, operator.mul, operator.lt):
            with pytest.raises(TypeError, match=r"(no axis names but shape \(2, 3\))|(does not take a NamedArray)"):
                op(x, other)
            with pytest.raises(TypeError, match=r"(no axis names but shape \(2, 3\))|(does not take a NamedArray)"):
                op(other, x)


def test_matmul_needs_an_axis() -> None:
    for left, right in ((x, x), (x, jnp.ones(3)), (jnp.ones((3, 2)), x)):
        with pytest.raises(TypeError, match=re.escape("does not say which axes to sum over")):
            left @ right  # pyright: ignore[reportOperatorIssue]


# --- names and array disagree ---


def test_raw_jacobians() -> None:
    """They are named arrays in named arrays, which the error of their first use says how to avoid."""
    raw = jax.jacfwd(lambda x: 2 * x)(axn.ones({"embed": 3}))
    with pytest.raises(ValueError, match=r"`jax\.jacobian`.*`axonym\.jacobian`"):
        raw + 1


def test_raw_tree_maps_that_reduce() -> None:
    mapped = jax.tree.map(lambda w: w.mean(), {"w": axn.ones({"embed": 3})})
    with pytest.raises(ValueError, match=r"`jax\.tree\.map` with a function that reduces.*`axonym\.tree\.map`"):
        mapped["w"] + 1


def test_rank_mismatch() -> None:
    """What a positional transform leaves behind says so when it is used, and what to do."""
    broken = jax.vmap(lambda row: axn.named(row, "embed"))(x.array)
    assert broken.names == ("embed",) and broken.array.shape == (2, 3)
    explained = re.escape(
        "has 1 name (embed) for an array of rank 2, shape (2, 3). A positional function changed its rank"
    )
    for use in (
        lambda: broken + 1,
        lambda: broken + broken,
        lambda: axn.sum(broken, "embed"),
        lambda: axn.exp(broken),
        lambda: broken.axes,
        lambda: broken.shape,
        lambda: broken.resolve_axis("embed"),
        lambda: axn.rearrange(broken, ("embed",)),
        lambda: axn.dot(broken, broken, axis="embed"),
        lambda: broken["embed", 0],
        lambda: axn.cumsum(broken, "embed"),
        lambda: broken.rename({"embed": "pos"}).axes,
    ):
        with pytest.raises(ValueError, match=explained.replace("embed", "(embed|pos)")):
            use()


# --- positional functions ---


anything: Any = x  # a type checker would also reject most of these calls


@pytest.mark.parametrize(
    ("function", "called", "instead"),
    [
        (lambda: jnp.sum(anything), "sum", "axonym.sum"),
        (lambda: jnp.add(anything, 1), "add", "axonym.add"),
        (lambda: jnp.exp(anything), "exp", "axonym.exp"),
        (lambda: jnp.linalg.inv(anything), "inv", "axonym.linalg.inv"),
        (lambda: jnp.fft.fft(anything), "fft", "axonym.fft.fft"),
        (lambda: jnp.where(anything, 1, 2), "where", "axonym.where"),
        (lambda: jnp.concatenate([anything, anything]), "concatenate", "axonym.concatenate"),
        (lambda: np.exp(anything), "exp", "axonym.exp"),
        (lambda: np.add(anything, 1), "add", "axonym.add"),
        (lambda: np.sum(anything), "sum", "axonym.sum"),
        (lambda: np.concatenate([anything, anything]), "concatenate", "axonym.concatenate"),
        (lambda: np.linalg.inv(anything), "inv", "axonym.linalg.inv"),
        (lambda: np.sort(anything), "sort", "axonym.sort"),
    ],
)
def test_positional_functions_name_ours(function: Callable[[], Any], called: str, instead: str) -> None:
    with pytest.raises(TypeError) as raised:
        function()
    message = str(raised.value)
    assert called in message and f"`{instead}`" in message and "`x.array`" in message, message


def test_conversion_to_numpy_is_refused() -> None:
    for convert in (np.asarray, np.array):
        with pytest.raises(
            TypeError, match=r"write `numpy\.asarray\(x\.array\)`, or `axonym\.to_host\(x\)\.array` for"
        ):
            convert(x)
    for convert in (jnp.asarray, jnp.array):
        with pytest.raises(
            TypeError, match=r"not converted to a JAX array, which has no names: its array is `x\.array`"
        ):
            convert(x)
    with pytest.raises(TypeError, match=r"axonym has none of that name; use `axonym\.lift`, or pass .*`x\.array`"):
        np.apply_along_axis(len, 0, x)


def test_arrays_without_axes_are_converted() -> None:
    """They have no names to lose, so logs and pictures take them like other numbers."""
    losses = [axn.mean(x * i) for i in range(3)]
    expected = np.array([float(loss) for loss in losses], np.float32)
    for convert in (np.asarray, np.array, np.stack):
        np.testing.assert_array_equal(convert(losses), expected)
    assert jnp.asarray(losses[1]) is losses[1].array
    assert np.asarray(losses[1], np.float64).dtype == np.float64 and np.asarray(losses[1]).shape == ()
    assert np.mean(losses) == np.mean(expected) and np.mean(losses[2]) == expected[2]
    assert np.isclose(losses[1], expected[1]) and not np.isnan(losses[1]) and np.exp(losses[0]) == 1
    np.testing.assert_allclose(losses, expected)
    assert isinstance(np.float32(2) * losses[1], axn.NamedArray)  # operators give named arrays
    with pytest.raises(TypeError, match=r"write `numpy\.asarray\(x\.array\)`"):
        np.mean([x, x])
    with pytest.raises(TypeError, match="works by position"):
        np.add(losses[0], x)
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(lambda x: np.asarray(axn.mean(x)))(x)


def test_plots_of_arrays_without_axes() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    losses = [axn.mean(x * i) for i in range(3)]
    line = figure.subplots().plot(losses)[0]
    np.testing.assert_array_equal(line.get_ydata(), [float(loss) for loss in losses])


def test_named_numpy_arrays_stay_in_host_memory() -> None:
    host = axn.named(np.arange(4.0), "batch")
    assert isinstance(host.array, np.ndarray) and host.sharding is None
    assert isinstance(host.at["batch", 0].set(5).array, jax.Array)
    mesh = axn.make_mesh({"data": 4})
    placed = axn.shard(host, {"batch": "data"}, mesh)
    assert placed.sharding == jax.NamedSharding(mesh, jax.P("data"))
    assert (host + 1).sharding == jnp.ones(4).sharding
    assert jax.eval_shape(lambda: axn.ones({"batch": 4})).sharding is None


def test_batches_that_a_data_loader_stacks() -> None:
    """As Grain does by default."""
    examples = [{"tokens": axn.named(np.arange(4) + i, "pos"), "label": axn.named(np.int32(i), ())} for i in range(3)]
    batch = jax.tree.map(lambda *xs: np.stack(xs), *examples)
    with pytest.raises(ValueError, match="data loader that stacks examples") as raised:
        axn.sum(batch["tokens"])
    batch_fn = eval(str(raised.value).split("`batch_fn=")[1].split("`")[0], {"axonym": axn})
    assert {name: x.shape for name, x in batch_fn(examples).items()} == {
        "tokens": {"batch": 3, "pos": 4},
        "label": {"batch": 3},
    }


def test_scalars_on_the_left() -> None:
    """NumPy and JAX scalars try their own operator first, and must hand over."""
    for two in (np.float32(2), jnp.float32(2), np.int32(2), jnp.asarray(2), np.float64(2.0)):
        assert_named(axn.astype(two * x, "float32"), axn.named(2 * x.array, x.names))
        assert_named(axn.astype(two - x, "float32"), axn.named(2 - x.array, x.names))
        assert_named(two < x, axn.named(2 < x.array, x.names))
    assert_named(jax.jit(lambda a: a * x)(jnp.float32(2)), axn.named(2 * x.array, x.names))


def test_tracers_on_the_left() -> None:
    gradient = jax.grad(lambda s: axn.sum(s * x).scalar())(2.0)
    assert float(gradient) == 15.0
