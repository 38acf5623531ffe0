"""Names of arguments come from `names=` and from what the code says."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jaxtyping import Array, Float, Int

import axonym as axn
from axonym.names import name, names_of
from axonym.names._sources import names_of_leaves
from axonym.typing import Named

if TYPE_CHECKING:
    from somewhere import Unknown  # pyright: ignore[reportMissingImports]

untyped: Any = linen  # for functions that it does not export for type checkers


def f(*args: Any, **kwargs: Any) -> None: ...


def found(fn: Any, *args: Any, names: Any = None, **kwargs: Any) -> list[Any]:
    return [x.names for x in names_of_leaves(fn, args, kwargs, names)]


X, W = jnp.ones((2, 3)), jnp.ones((3, 4))
TREE = {"attn": {"query": W, "key": W}, "norm": jnp.ones(3)}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("batch embed", ("batch", "embed")),
        ("batch, embed", ("batch", "embed")),
        ("batch _", ("batch", None)),
        ("_ _", (None, None)),
        ("pos pos", ("pos", "pos'")),
        ("pos pos'", ("pos", "pos'")),
        (("batch", None), ("batch", None)),
        (["batch", "embed"], ("batch", "embed")),
        (jax.P("batch", None), ("batch", None)),
        (None, None),
    ],
)
def test_the_names_of_one_array(names: Any, expected: Any) -> None:
    assert found(f, X, names=(names,)) == [expected]


def test_entries_are_tree_prefixes_of_arguments() -> None:
    query, whole = ("embed", "hidden"), {"attn": "embed hidden", "norm": ("embed",)}
    assert found(f, TREE, X, names=(whole, "batch embed")) == [query, query, ("embed",), ("batch", "embed")]
    assert found(f, (X, [W]), names=(("batch embed", ["embed hidden"]),)) == [("batch", "embed"), query]
    assert found(f, (X, [W]), names=((None, "embed hidden"),)) == [None, query]
    assert found(f, {"w": W, "none": None}, names=({"w": "embed hidden"},)) == [query]
    assert found(f, W, W, names="embed hidden") == [query, query]


def test_a_dictionary_without_the_keys_of_the_argument_has_patterns() -> None:
    names = {"query": "embed inner", "attn/.*": "embed hidden"}  # the first that is found
    assert found(f, TREE, names=(names,)) == [("embed", "hidden"), ("embed", "inner"), None]
    assert found(f, TREE, names=({"attn": {"^q": ("embed", None)}, "norm": None},)) == [None, ("embed", None), None]
    assert found(f, TREE["attn"], names=({"key": "embed hidden"},)) == [("embed", "hidden"), None]
    assert found(f, TREE, names=({"*/query": "embed inner", "*/norm": "embed"},)) == [
        None,
        ("embed", "inner"),
        ("embed",),
    ]


def test_a_dictionary_from_parameters() -> None:
    def step(params: Any, *xs: Any, scale: Any = None, **more: Any) -> None: ...

    args, kwargs = (W, X, X), {"scale": jnp.ones(4), "mask": X}
    names = {"params": "embed hidden", "scale": "hidden", "mask": "batch embed"}
    expected = [("embed", "hidden"), None, None, ("batch", "embed"), ("hidden",)]  # in the order of the tree's leaves
    assert found(step, *args, **kwargs, names=names) == expected
    one, all_of_them = ("batch", "embed"), [("batch", "embed")] * 2
    assert found(step, *args, names={"xs": "batch embed"}) == [None, *all_of_them]
    assert found(step, *args, names={"xs": (None, "batch embed")}) == [None, None, one]
    # Anything else has patterns of complete paths.
    assert found(step, TREE, X, names={"params/norm": "embed", "xs/0": "batch embed"})[2:] == [("embed",), one]


def test_the_path_of_an_array_names_no_other() -> None:
    def step(x: Any, params: Any) -> None: ...

    params = {"exp": X, "w": X, "w_out": X}
    names = {"x": "batch embed", "params/exp": "embed mlp"}
    assert found(step, X, params, names=names) == [("batch", "embed"), ("embed", "mlp"), None, None]
    names = (None, {"w": "embed mlp"})
    assert found(step, X, params, names=names) == [None, None, ("embed", "mlp"), None]


def test_every_leaf_has_an_entry() -> None:
    model = eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))
    args = model, np.ones(3), None, 2.0, np.float32(1)
    leaves = names_of_leaves(f, args, {"text": "abc"})
    assert len(leaves) == len(jax.tree.leaves((args, "abc")))
    assert leaves[-4:] == [(None, ""), ((), "a scalar"), ((), "a scalar"), (None, "")]
    placeholder = jax.tree.map(lambda x: None, axn.ones({"batch": 2}))
    assert found(f, placeholder, axn.ones({"embed": 3}), jax.ShapeDtypeStruct((2,), "float32")) == [("embed",), None]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("batch embed",), "1 entry for 2 positional arguments. Give an entry for each"),
        (("batch", None), "names= at 'x': (batch) has 1 name, but x has shape (2, 3)."),
        (
            (None, {"attn": "embed", "norm": "embed"}),
            "names= at 'params/attn/key': (embed) has 1 name, but params/attn/key has",
        ),
        (
            (None, {"quer": "a b", "kez": "a b"}),
            "'kez' is no key of params, and as a pattern it is found in none of its 3 paths. The nearest: 'attn/key'",
        ),
        ((None, {"attn/**/query": "a b"}), "Write 'attn/.*/query'."),
        ((None, {"query": {"w": "a b"}}), "'query' is no key of the argument, so it is a pattern"),
        ((None, ("a b",)), "params has 2 parts (attn, norm), and its names are ('a b',)"),
        ((None, {"norm": "a b"}), "pattern 'norm' of names=: (a, b) has 2 names, but params/norm has shape (3,)"),
        (("batch 3", None), "'3' is no name"),
        ({"z": "batch embed"}, "'z' is no key of the tree, and as a pattern"),
        ({"x": "batch embed", "parms": "a b"}, "The nearest: 'params', "),
        ((7, None), "x is an array, and its names are 7"),
        (((axn.Axis("batch", 2), axn.Axis("embed", 3)), None), "strings such as 'batch embed'"),
        ((None, {0: "a b"}), "0 is no pattern of paths, which is a string."),
        ((None, {"norm": 7}), "and not to an object of type int"),
    ],
)
def test_names_that_do_not_fit(names: Any, message: str) -> None:
    def step(x: Any, params: Any) -> None: ...

    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        names_of_leaves(step, (X, TREE), {}, names)


# --- what the code says ---


class Layer(eqx.Module):
    weight: Float[Array, "out in"]
    bias: Float[Array, "#out"] | None
    other: list[Float[Array, "in *rest"]]  # which a stack of layers also fits
    named: Array = axn.field(axis_names=("embed",))


class Pair(NamedTuple):
    first: Float[Array, "batch 3"]
    second: Int[Array, "batch n+1"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Partly:
    x: Float[Array, "batch embed"]
    y: Unknown


class Boxed(nnx.Module):
    def __init__(self) -> None:
        with nnx.use_eager_sharding(False):  # the names are no mesh axes
            self.w = nnx.Param(W, out_sharding=("embed", None))
        self.plain = nnx.Param(X)


def test_annotations_of_parameters() -> None:
    def step(x: Float[Array, "batch embed"], *ys: Named["batch ... embed"], z: Float[Array, "_ ..."] | None = None): ...

    def inside(x: dict[str, tuple[Float[Array, "n d"], Float[Array, " d"]]]) -> None: ...

    three = jnp.ones((2, 5, 3))
    assert found(step, X, three, X, z=X) == [
        ("batch", "embed"),
        ("batch", None, "embed"),
        ("batch", "embed"),
        (None, None),
    ]
    assert found(jax.jit(step), X) == found(functools.partial(step, z=X), X) == [("batch", "embed")]
    assert found(step, three) == [None]  # of another rank, for example in vmap
    assert found(inside, {"a": (X, jnp.ones(3))}) == [("n", "d"), ("d",)]


def test_annotations_of_fields() -> None:
    layer = Layer(W, jnp.ones(1), [X, jnp.ones((3, 4, 5))], jnp.ones(3))
    assert found(f, [layer]) == [("out", "in"), (None,), None, None, ("embed",)]
    assert found(f, Pair(X, X)) == [("batch", None), ("batch", None)]
    assert found(f, Partly(X, X)) == [("batch", "embed"), None]
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), layer)
    assert found(f, stacked)[0] is None  # no name is better than a wrong one

    class Model(eqx.Module):
        def __call__(self, x: Float[Array, "batch embed"]) -> None: ...

    assert found(Model(), X) == found(Model().__call__, X) == [("batch", "embed")]


def test_metadata_of_flax() -> None:
    expected = [None, ("embed", None)]  # plain, w
    assert found(f, Boxed()) == found(f, nnx.state(Boxed())) == expected
    init = untyped.with_logical_partitioning(linen.initializers.ones_init(), ("embed", "mlp"))
    params = linen.Dense(4, kernel_init=init).init(jax.random.key(0), X)
    assert found(f, params) == [None, ("embed", "mlp")]


@pytest.mark.parametrize(
    ("argument", "source"),
    [
        (Layer(W, None, [], jnp.ones(3)), "the annotation of `Layer.weight`"),
        (Boxed(), "metadata of Flax's Param"),
        ({"w": axn.named(W, ("out", "in"))}, "a named array"),
    ],
)
def test_sources_agree(argument: Any, source: str) -> None:
    (says,) = [x for x in names_of_leaves(f, (argument,), {}, None) if x.names and len(x.names) == 2]
    assert says.source == source
    names = " ".join(n or "_" for n in says.names or ())
    assert says in names_of_leaves(f, (argument,), {}, ({"w": names},))
    with pytest.raises(
        ValueError, match=re.escape(f"is 'wrong' by pattern '^w' of names=, but {(says.names or [])[0]!r} by {source}.")
    ):
        names_of_leaves(f, (argument,), {}, ({"^w": "wrong _"},))


def test_names_add_to_what_the_code_says() -> None:
    def step(x: Float[Array, "batch _"]) -> None: ...

    assert names_of_leaves(step, (X,), {}, ("_ embed",)) == [(("batch", "embed"), "names= at 'x'")]


# --- whole trees ---


def test_names_of_composes_with_names() -> None:
    layer = Layer(W, None, [X], jnp.ones(3))
    for tree in (layer, Boxed(), {"a": axn.ones({"embed": 2}), "b": [X]}, Pair(X, X)):
        raw = jax.tree.map(jnp.asarray, tree)
        assert found(f, raw, names=(names_of(tree),)) == found(f, tree)


def test_name_makes_named_arrays() -> None:
    named = name(TREE, {"query|key": "embed hidden"})
    assert named["attn"]["query"].names == ("embed", "hidden")
    assert named["norm"] is TREE["norm"]
    assert names_of(named) == {"attn": {"key": "embed hidden", "query": "embed hidden"}, "norm": None}
    layer: Any = name(Layer(W, None, [], jnp.ones(3)))
    assert layer.weight.names == ("out", "in")
    spaced = {"w": axn.named(W, ("my axis", "embed"))}
    again: Any = name({"w": W}, names_of(spaced))
    assert again["w"].names == ("my axis", "embed")
    with pytest.raises(ValueError, match=re.escape("the array has an axis without a name in (batch, _)")):
        name(X, "batch _")
