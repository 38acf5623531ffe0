"""Small things that once went wrong."""

from __future__ import annotations

import weakref

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
