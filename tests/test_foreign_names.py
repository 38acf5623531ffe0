"""Errors for names from NumPy, JAX and PyTorch end with one sentence that says what to write instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import optax
import pytest

import axonym as axn
from axonym import nn
from axonym.core import foreign_names

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
        ("softmax", "`axonym.nn.softmax(x, 'pos')`"),
        ("topk", "`axonym.top_k(x, 'pos', k)`"),
        ("clamp", "`axonym.clip(x, 0, 1)`"),
        ("isel", "`x['batch', 0]` selects by position"),
        ("value", "`x.array` is the JAX array"),
        ("fillna", "`axonym.where(axonym.isnan(x), 0, x)`"),
        ("add_", "arrays are immutable: write `x = x + y`"),
    ],
)
def test_attributes_of_an_array(name: str, advice: str) -> None:
    with pytest.raises(AttributeError, match=f"(?i)no attribute '{name}'.*{re.escape(advice)}.*\\.$"):
        getattr(X, name)


@pytest.mark.parametrize("labels", [X, X.array])
def test_sigmoid_cross_entropy_of_optax(labels: Any) -> None:
    with pytest.raises(TypeError, match=r"in a loss of Optax,? .*`axonym\.nn\.binary_cross_entropy_loss`"):
        optax.sigmoid_binary_cross_entropy(X, labels)


@pytest.mark.parametrize(
    ("module", "name", "advice"),
    [
        (axn, "matmul", "`axonym.dot(x, y, axis='embed')`"),
        (axn, "cat", "`axonym.concatenate([x, y], 'embed')`"),
        (axn, "squeeze", "`x['embed', 0]`"),
        (axn, "array", "`axonym.named(a, ('batch', 'embed'))`"),
        (axn, "randn", "`axonym.random.normal(key, {'batch': 8})`"),
        (axn, "softmax", "`axonym.nn.softmax(x, 'embed')`"),
        (axn, "with_sharding_constraint", "`axonym.shard(x, {'batch': 'data'})`"),
        (axn, "logical_axis_rules", "`with axonym.axis_mapping({'batch': 'data'}):`"),
        (axn, "norm", "`axonym.linalg.norm(x, 'embed')`"),
        (axn, "save", "`axonym.state.save_state_dict("),
        (axn, "cumsumm", "Did you mean 'cumsum'?"),
        (axn.random, "split", "It is `jax.random.split`."),
        (axn.random, "randn", "`axonym.random.normal(key, {'batch': 8})`"),
        (axn.random, "unifrom", "Did you mean 'uniform'?"),
        (nn.Dropout, "init", "since it has no parameters. Write `Dropout(0.1)`."),
        (nn, "Conv2d", "`axonym.nn.Conv.init(('height', 'width'), In, Out, kernel_size=3, key=key)`"),
        (axn, "DataLoader", "`axonym.named(a, ('batch', 'embed'))`"),
        (axn, "DDP", "`axonym.named_jit(step, {'batch': 'data'})`"),
        (axn, "state_dict", "`axonym.state.to_state_dict(model)`"),
        (nn, "Rngs", "Layers take a key"),
        (nn, "Sequential", "`axonym.nn.Stacked`"),
        (nn, "Linaer", "Did you mean 'Linear'?"),
    ],
)
def test_names_of_a_module(module: Any, name: str, advice: str) -> None:
    with pytest.raises(AttributeError, match=f"has no (attribute '|`){name}['`].*{re.escape(advice)}"):
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
    with pytest.raises(TypeError, match=r"'keepdims'\. It is not needed: the result broadcasts with the array by name"):
        axn.mean(X, "pos", keepdims=True)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'what'\. Write `std\(x, 'pos'\)`\.$"):
        X.std("pos", what=1)
    with pytest.raises(TypeError, match=r"'unbiased'\. Write `ddof=1`"):
        X.var(unbiased=True)
    with pytest.raises(TypeError, match=r"'skipna'\. Write `nanmean\(x, 'pos'\)`, which leaves out NaN\.$"):
        X.mean(skipna=True)
    with pytest.raises(TypeError, match=r"'skipna'\. Write `all\(x, 'pos'\)`\.$"):
        X.all(skipna=True)


untyped: Any = axn
layers: Any = nn
KEY = jax.random.key(0)
BY_POSITION = "{} got an unexpected keyword argument {!r}. Axes are selected by name, `{}`."


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layers.softmax(X, dim=-1), BY_POSITION.format("softmax()", "dim", "softmax(x, 'pos')")),
        (lambda: X.argmax(dim=1), BY_POSITION.format("argmax()", "dim", "argmax(x, 'pos')")),
        (lambda: X.cumsum(dim=1), BY_POSITION.format("cumsum()", "dim", "cumsum(x, 'pos')")),
        (
            lambda: untyped.concatenate([X, X], dim=0),
            BY_POSITION.format("concatenate()", "dim", "concatenate([x, y], 'batch')"),
        ),
        (lambda: untyped.stack([X, X], dim=0), BY_POSITION.format("stack()", "dim", "stack([x, y], 'new')")),
        (lambda: untyped.stack([X, X], dim="time"), BY_POSITION.format("stack()", "dim", "stack([x, y], 'time')")),
        (lambda: untyped.stack(X, 0), "as in axonym.stack([x, y], 'new'); got"),
        (
            lambda: untyped.broadcast_axis(X, dim="time"),
            BY_POSITION.format("broadcast_axis()", "dim", "broadcast_axis(x, axonym.Axis('time', 8))"),
        ),
        (lambda: untyped.roll(X, 1, dims=1), BY_POSITION.format("roll()", "dims", "roll(x, 1, 'pos')")),
        (lambda: untyped.sort(X, dim=1), BY_POSITION.format("sort()", "dim", "sort(x, 'pos')")),
        (lambda: untyped.vmap(len)(X), "Write `vmap(f, 'batch')(x)`."),
        (lambda: untyped.scan(len, 0.0, X), "Write `scan(f, 'batch')(carry, x)`."),
        (lambda: untyped.named([1, 2], "a", "b"), "Write `named(a, ('batch', 'embed'))`."),
        (lambda: untyped.linspace({"x": 3}, 0, 1), "Write `linspace(axonym.Axis('pos', 8), start=0, stop=1)`."),
        (
            lambda: untyped.random.normal((3, 4), key=KEY),
            "The first argument is a random key: write `normal(key, {'batch'",
        ),
        (
            lambda: untyped.random.normal((axn.Axis("batch", 2), axn.Axis("embed", 3))),
            "missing 1 required positional argument: 'shape'. The first argument is a random key: write `normal(key, ",
        ),
        (lambda: untyped.random.normal(KEY), "Write `normal(key, {'batch': 8})`."),
        (
            lambda: layers.dropout(X, 0.5),
            "missing 1 required keyword-only argument: 'inference'. Write `dropout(x, 0.1, inference=False, key=key)`.",
        ),
        (lambda: layers.cross_entropy_loss(X, X), "Write `cross_entropy_loss(logits, 'label', targets)`."),
        (lambda: layers.Linear(3, 4), "Write `Linear.init(In, Out, key=key)`."),
        (lambda: layers.Linear.init({"a": 3}, {"b": 4}), "Write `Linear.init(In, Out, key=key)`."),
        (lambda: layers.LayerNorm(64), "Write `LayerNorm.init(Embed)`."),
        (
            lambda: layers.LayerNorm.init(),
            "LayerNorm.init() missing 1 required positional argument: 'axis'. Write `LayerN",
        ),
        (lambda: layers.RmsNorm.init(dim=64), "Axes are selected by name, `RmsNorm.init(Embed)`."),
        (lambda: layers.Embedding(1000, 64), "Write `Embedding.init(Vocab, Embed, key=key)`."),
        (
            lambda: layers.Embedding.init(1000, 64, key=KEY),
            "must be an Axis, got int. Write `axonym.Axis('vocab', 1000)`.",
        ),
        (lambda: layers.Conv(3, 4, 3), "Write `Conv.init(Spatial, In, Out, kernel_size, key=key)`."),
        (lambda: layers.MLP(3, 4), "Write `MLP.init(In, Out, width, depth, key=key)`."),
        (lambda: layers.Dropout(p=0.1), "Write `Dropout(0.1)`."),
        (lambda: untyped.where(X > 0, dim=1), BY_POSITION.format("where()", "dim", "where(mask, x, y)")),
        (lambda: X.clip(min=0), "The bounds are `a_min` and `a_max`: write `clip(x, 0, 1)`."),
        (lambda: X.shape(), "A shape is not called: `x.shape[name]` is a size. The axes are batch, pos."),
        (
            lambda: len(X),
            "A named array has no len(), but a size for each axis of (batch, pos): `x.axis_size('batch')`",
        ),
    ],
)
def test_calls_that_do_not_fit(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        call()


def test_errors_of_the_body_are_its_own() -> None:
    def body(x: Any) -> None:
        raise TypeError("its own")

    with pytest.raises(TypeError, match=r"^its own"):
        axn.vmap(body, "batch")(X)
    assert axn.vmap.__name__ == "vmap" and isinstance(nn.Linear.__dict__["init"], staticmethod)


def test_values_are_not_assigned() -> None:
    with pytest.raises(TypeError, match=r"immutable\. Write `x = x\.at\['batch', 0\]\.set\(value\)`"):
        X["pos", 0] = 1
    with pytest.raises(TypeError, match=r"`x\.all\(\)` and `x\.any\(\)` reduce all of them"):
        assert X == X
    with pytest.raises(TypeError, match=r"x\['batch', index, \.\.\.\].* `axonym\.where\(mask, x, other\)`"):
        X[X > 0]


def test_advice_names_what_exists() -> None:
    """Every name of the library that a sentence speaks of can be found."""
    advice = [foreign_names.ARRAY, foreign_names.PACKAGE, foreign_names.NETWORKS, foreign_names.CALLS]
    texts = {text for table in advice for text in table.values()}
    for path in {path for text in texts for path in re.findall(r"axonym((?:\.\w+)+)", text)}:
        found: Any = axn
        for part in path[1:].split("."):
            found = getattr(found, part)
    missing = [name for name in foreign_names.ARRAY if hasattr(X, name)]
    assert not missing, f"arrays have {missing}"
    assert not [name for name in foreign_names.PACKAGE if hasattr(axn, name)]
    assert not [name for name in foreign_names.NETWORKS if hasattr(nn, name)]


def test_probes_of_other_libraries_find_nothing() -> None:
    assert not hasattr(X, "__array_interface__") and not hasattr(X, "_repr_latex_")
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
        lambda: axn.zeros([3, 4]),  # pyright: ignore[reportArgumentType]
        lambda: axn.ones(3, 4),  # pyright: ignore[reportArgumentType]
        lambda: axn.zeros((3, 4)),  # pyright: ignore[reportArgumentType]
        lambda: nn.Linear.init(64, 32, key=jax.random.key(0)),  # pyright: ignore[reportArgumentType]
        lambda: axn.random.normal(jax.random.key(0), (3, 4)),  # pyright: ignore[reportArgumentType]
    ],
)
def test_sizes_without_names(call: Any) -> None:
    with pytest.raises(TypeError, match=r"An axis has a name and a size, got int. Write `\{'batch': (3|64)\}`"):
        call()


def test_one_axis_is_advised_where_one_is_taken() -> None:
    with pytest.raises(TypeError, match=r"`argmax\(x, '\w+'\)`"):
        axn.argmax(X, dims=(0, 1))  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=r"`sum\(x, \('\w+', '\w+'\)\)`"):
        axn.sum(X, dims=(0, 1))  # pyright: ignore[reportCallIssue]
