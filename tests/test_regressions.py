"""Small bugs of the past."""

from __future__ import annotations

import pickle
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import axonym as axn


@pytest.mark.parametrize("fill", [False, np.bool_(False), np.asarray(False), jnp.asarray(False)])
def test_fill_value_may_be_false_or_an_array(fill):
    x = axn.named([True, True], "x")
    assert x.at["x", axn.named([5], "y")].get(mode="fill", fill_value=fill).tolist() == [False]


def test_python_protocols():
    x = axn.named([1.26, 2.0], "x")
    assert weakref.ref(x)() is x
    assert f"{x['x', 0]:.1f}" == "1.3"
    assert f"{x}" == str(x)
    assert round(x, 1).tolist() == pytest.approx([1.3, 2.0])
    assert round(x).tolist() == [1.0, 2.0]
    with pytest.raises(TypeError, match="a format needs a named array without axes"):
        f"{x:.1f}"


def test_a_known_index_array_must_be_in_range() -> None:
    x = axn.arange(axn.Axis("x", 8))
    for index in ([0, 9], np.array([9]), [-9]):
        with pytest.raises(IndexError, match=r"out of range for axis 'x' of size 8: an index lies in -8\.\.7"):
            x["x", index]
        with pytest.raises(IndexError, match="out of range for axis 'x'"):
            x.at["x", index].set(0)
    assert x.at["x", [0, 9]].get(mode="fill", fill_value=-1).tolist() == [0, -1]


def test_unpickled_names_are_interned() -> None:
    x = axn.ones({"batch": 2})
    y = pickle.loads(pickle.dumps(x))
    assert y.names[0] is x.names[0]


def test_donation_that_meets_no_argument_is_an_error() -> None:
    x = axn.ones({"batch": 2})
    with pytest.raises(ValueError, match=r"'stat' is to be donated, but .*, which has state\. Did you mean 'state'"):
        axn.named_jit(lambda *, state: state, donate_kwargs={"stat": True})(state=x)
    with pytest.raises(ValueError, match=r"'args\[0\]' is to be donated, but is not an argument of the call"):
        axn.named_jit(lambda a: a, donate_args=(True, True))(x)


def test_a_misspelled_mapping_in_part_of_a_placement_warns(auto_mesh) -> None:
    x = axn.ones({"batch": 8})
    with jax.set_mesh(auto_mesh):
        with pytest.warns(UserWarning, match="Did you mean 'batch'"):
            axn.shard({"x": x, "y": x}, {"x": {"bath": "data"}, "y": jax.P()})
        with pytest.warns(UserWarning, match="it has no named axes"):
            axn.shard([x.array], {"batch": "data"})


def test_numpy_functions_drop_no_keywords() -> None:
    x = axn.named(jnp.arange(3.0), "x")
    assert (np.float32(2) * x).tolist() == np.multiply(2, x).tolist() == [0, 2, 4]  # pyright: ignore
    for keywords in ({"where": np.array([True, False, True])}, {"dtype": np.float64}, {"out": np.zeros(3)}):
        with pytest.raises(TypeError, match=r"numpy.multiply works by position"):
            np.multiply(np.float32(2), x, **keywords)  # pyright: ignore


def test_negative_powers_of_integers_are_refused() -> None:
    x = axn.named(jnp.array([-3, 3]), "x")
    for power in (-1, np.int32(-1), np.int64(-2)):
        with pytest.raises(TypeError, match="Integers cannot be raised to negative powers"):
            axn.power(x, power)
        assert axn.power(x * 1.0, power).dtype == jnp.float32
    assert axn.power(x, np.int8(3)).tolist() == [-27, 27]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="slices have a hash from Python 3.12 on")
def test_slices_are_told_apart_by_type_and_sign() -> None:
    fn = axn.named_jit(lambda x, s: x * float(np.signbit(s.start)) if isinstance(s.start, float) else x + 5)
    x = axn.ones({"x": 2})
    found = [fn(x, s).tolist()[0] for s in (slice(0.0, 2), slice(-0.0, 2), slice(0, 2))]
    assert found == [0, 1, 6]


def test_one_array_padded_with_several_values(auto_mesh: Mesh) -> None:
    """Before jax 0.12, XLA pads a sharded array once for all pads of one width: also running sums and products."""

    def fn(x: axn.NamedArray) -> dict[str, axn.NamedArray]:
        whole = x.astype(int)
        pads = {f"pad {v}": axn.pad(x, {"x": (15, 0)}, constant_values=v) for v in (0.0, 1.0, 2.0)}
        sums = {"sum": axn.cumsum(x, "x"), "nansum": axn.nancumsum(x, "x"), "whole sum": axn.cumsum(whole, "x")}
        products = {"product": axn.cumprod(x, "x"), "nanproduct": axn.nancumprod(x, "x")}
        return {**pads, **sums, **products, "whole product": axn.cumprod(whole, "x")}

    x = axn.named(np.arange(1.0, 17.0, dtype=np.float32) / 8, "x")
    found = jax.block_until_ready(jax.jit(fn)(axn.shard(x, {"x": "data"}, auto_mesh)))
    for name, expected in jax.jit(fn)(x).items():
        np.testing.assert_allclose(found[name].array, expected.array, rtol=1e-4, err_msg=name)
