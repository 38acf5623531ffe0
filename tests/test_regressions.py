"""Small bugs of the past."""

from __future__ import annotations

import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
