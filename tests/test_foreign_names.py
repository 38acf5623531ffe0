"""Habits from NumPy, JAX and PyTorch end in one sentence that says what to write here."""

from __future__ import annotations

import re
from typing import Any

import jax
import pytest

import axonym as axn
from axonym import _foreign_names, nn

X: Any = axn.ones({"batch": 2, "pos": 3})


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("T", "`axonym.rearrange(x, ('pos', 'batch'))`"),
        ("reshape", "`axonym.flatten_axes(x, ('batch', 'pos'), 'new')` merges axes"),
        ("view", "`axonym.unflatten_axis(x, 'pos', {'a': 2, 'b': 3})` splits one"),
        ("permute", "`axonym.rearrange(x, ('pos', 'batch'))`"),
        ("transpose", "the order of axes never matters"),
        ("unsqueeze", "`axonym.broadcast_axis(x, axonym.Axis('new', 1))`"),
        ("numpy", "`numpy.asarray(x.array)`"),
        ("to", "`axonym.shard(x, {'batch': 'data'})`"),
        ("mm", "`axonym.dot(x, y, axis='pos')`"),
        ("relu", "`axonym.nn.relu`"),
    ],
)
def test_attributes_of_an_array(name: str, advice: str) -> None:
    with pytest.raises(AttributeError, match=f"(?i)no attribute '{name}'.*{re.escape(advice)}.*\\.$"):
        getattr(X, name)


@pytest.mark.parametrize(
    ("module", "name", "advice"),
    [
        (axn, "matmul", "`axonym.dot(x, y, axis='embed')`"),
        (axn, "cat", "`axonym.concatenate([x, y], 'embed')`"),
        (axn, "squeeze", "`x['embed', 0]`"),
        (axn, "array", "`axonym.named(a, ('batch', 'embed'))`"),
        (axn, "randn", "`axonym.random.normal(key, {'batch': 8})`"),
        (axn, "softmax", "`axonym.nn.softmax`"),
        (axn, "cumsumm", "Did you mean 'cumsum'?"),
        (nn, "Conv2d", "`axonym.nn.Conv.init(('height', 'width'), In, Out, kernel_size=3, key=key)`"),
        (nn, "Sequential", "`axonym.nn.Stacked`"),
        (nn, "Linaer", "Did you mean 'Linear'?"),
    ],
)
def test_names_of_a_module(module: Any, name: str, advice: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'.*{re.escape(advice)}"):
        getattr(module, name)


def test_errors_of_properties_are_their_own() -> None:
    empty = axn.NamedArray(None, (), ("x",))
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'dtype'"):
        _ = empty.dtype


def test_shapes_are_trees() -> None:
    assert jax.tree.leaves(X.shape) == [2, 3]
    assert jax.jit(lambda x: x.shape)(X) == {"batch": 2, "pos": 3}
    assert jax.tree.map(lambda size: size + 1, X.shape) == {"batch": 3, "pos": 4}


def test_keywords_of_a_reduction() -> None:
    with pytest.raises(TypeError, match=r"sum\(\) got an unexpected keyword argument 'dim'\..* `sum\(x, 'pos'\)`\."):
        X.sum(dim=1)
    with pytest.raises(TypeError, match=r"'keepdims'\. It is not needed: the result goes with the array by name"):
        axn.mean(X, "pos", keepdims=True)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'what'\.$"):
        X.std("pos", what=1)


def test_advice_names_what_exists() -> None:
    """Every name of the library that a sentence speaks of can be found."""
    texts = {*_foreign_names.ARRAY.values(), *_foreign_names.PACKAGE.values(), *_foreign_names.NETWORKS.values()}
    for path in {path for text in texts for path in re.findall(r"axonym((?:\.\w+)+)", text)}:
        found: Any = axn
        for part in path[1:].split("."):
            found = getattr(found, part)
    missing = [name for name in _foreign_names.ARRAY if hasattr(X, name)]
    assert not missing, f"arrays have {missing}"
    assert not [name for name in _foreign_names.PACKAGE if hasattr(axn, name)]
    assert not [name for name in _foreign_names.NETWORKS if hasattr(nn, name)]


def test_probes_of_other_libraries_find_nothing() -> None:
    assert not hasattr(X, "__array_interface__") and not hasattr(X, "_repr_html_")
    with pytest.raises(AttributeError, match="'array'"):
        axn.NamedArray.__new__(axn.NamedArray).array


def test_shapes_are_looked_up_by_name() -> None:
    shape = X.shape
    assert shape == {"batch": 2, "pos": 3} and {**shape} == dict(shape) == shape and list(shape.values()) == [2, 3]
    assert axn.zeros(shape).axes == X.axes
    with pytest.raises(TypeError, match=r"looked up by name, got 0: write `x\.shape\[name\]`. The axes are batch, pos"):
        shape[0]
    with pytest.raises(KeyError, match=r"no axis 'bach' in \(batch=2, pos=3\). Did you mean 'batch'"):
        shape["bach"]
    with pytest.raises(TypeError, match=r"Iterating over the shape \(batch=2, pos=3\) is ambiguous"):
        _batch, _pos = shape


@pytest.mark.parametrize(
    "call",
    [
        lambda: axn.zeros((3, 4)),  # pyright: ignore[reportArgumentType]
        lambda: nn.Linear.init(64, 32, key=jax.random.key(0)),  # pyright: ignore[reportArgumentType]
        lambda: axn.random.normal(jax.random.key(0), (3, 4)),  # pyright: ignore[reportArgumentType]
    ],
)
def test_sizes_without_names(call: Any) -> None:
    with pytest.raises(TypeError, match=r"An axis has a name and a size, got int. Write `\{'batch': 8\}`"):
        call()
