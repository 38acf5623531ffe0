"""Layouts: each expression against NumPy, there and back, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym import nn
from axonym.state import WeightLayout, from_torch_compatible_state_dict, lazy_arrays, to_torch_compatible_state_dict
from tests.state.models import KEY, assert_same_tree

SIZES = {"layers": 2, "experts": 3, "vocab": 13, "embed": 5, "heads": 2, "group": 3, "size": 4, "mlp": 7, "rank": 1}


def tree_of(**arrays: str) -> dict[str, axn.NamedArray]:
    """Make arrays of the axes that are given, with numbers that all differ."""
    rng = np.random.default_rng(0)
    return {
        name: axn.named(rng.normal(size=[SIZES[n] for n in names.split()]).astype(np.float32), names.split())
        for name, names in arrays.items()
    }


def each(x: np.ndarray, key: str) -> dict[str, np.ndarray]:
    return {key.format(i): part for i, part in enumerate(x)}


# By name: the axes of each array, the table, and its entries by NumPy.
EXPRESSIONS: dict[str, tuple[dict[str, str], dict[str, str], Callable[..., dict[str, np.ndarray]]]] = {
    "order": ({"w": "embed mlp"}, {"w": "w -> mlp embed"}, lambda w: {"w": w.T}),
    "merged": (
        {"w": "heads group size embed"},
        {"w": "w -> embed (heads group size)"},
        lambda w: {"w": w.reshape(24, 5).T},
    ),
    "layers": ({"w": "mlp layers"}, {"a.{layers}.w": "w -> mlp"}, lambda w: each(w.T, "a.{}.w")),
    "experts of layers": (
        {"w": "layers experts embed mlp"},
        {"{layers}.{experts}": "w -> mlp embed"},
        lambda w: {f"{i}.{j}": w[i, j].T for i in range(2) for j in range(3)},
    ),
    "experts, stacked": (
        {"gate": "layers experts embed mlp", "up": "layers experts embed mlp"},
        {"{layers}.w13": "gate, up -> experts (_ mlp) embed"},
        lambda gate, up: each(np.concatenate([gate, up], 3).swapaxes(2, 3), "{}.w13"),
    ),
    "queries, keys and values in turn": (
        {"q": "heads group size embed", "k": "heads size embed", "v": "heads size embed"},
        {"qkv": "q (heads group), k (heads), v (heads) -> (_ size) embed"},
        lambda q, k, v: {"qkv": np.concatenate([x.reshape(-1, 5) for x in (q, k, v)])},
    ),
    "queries, keys and values of each head": (
        {"q": "heads group size embed", "k": "heads size embed", "v": "heads size embed"},
        {"qkv": "q (group), k, v -> (heads _ size) embed"},
        lambda q, k, v: {"qkv": np.concatenate([x.reshape(2, -1, 5) for x in (q, k, v)], 1).reshape(-1, 5)},
    ),
    "rotations of neighbours": (
        {"q": "heads size embed", "v": "heads size embed"},
        {"q": "q -> (heads half two) embed", "v": "v -> (heads size) embed"},
        lambda q, v: {"q": q.reshape(2, 2, 2, 5).swapaxes(1, 2).reshape(8, 5), "v": v.reshape(8, 5)},
    ),
    "the same twice": (
        {"table": "vocab embed"},
        {"table": "table -> vocab embed", "head": "= table"},
        lambda table: {"table": table, "head": table},
    ),
    "zeros behind": (
        {"q": "heads group size", "table": "vocab embed"},
        {"q": "q -> (heads=4 group size)", "table": "table -> vocab=16 embed"},
        lambda q, table: {"q": np.pad(q, [(0, 2), (0, 0), (0, 0)]).ravel(), "table": np.pad(table, [(0, 3), (0, 0)])},
    ),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_there_and_back(name: str) -> None:
    axes, table, by_numpy = EXPRESSIONS[name]
    tree = tree_of(**axes)
    layout = WeightLayout(table, split={"size": "two=2 half"})
    expected = by_numpy(**{k: np.asarray(x.array) for k, x in tree.items()})
    entries = jax.jit(layout.pack)(tree)
    like = jax.eval_shape(lambda: tree)
    for found in (entries, to_torch_compatible_state_dict(tree, layout=layout)):
        assert found.keys() == expected.keys() == layout.expected(like).keys()
        for key, x in expected.items():
            np.testing.assert_array_equal(np.asarray(getattr(found[key], "array", found[key])), x)
            assert layout.expected(like)[key].array.shape == x.shape
    for found in (entries, {key: x.array for key, x in entries.items()}):
        assert_same_tree(jax.jit(layout.unpack)(found, tree), tree)
    assert_same_tree(from_torch_compatible_state_dict(like, expected, layout=layout), tree)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_devices_read_their_shards(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read before it is known where it goes."""
    axes, table, by_numpy = EXPRESSIONS[name]
    tree = tree_of(**axes)
    entries = by_numpy(**{k: np.asarray(x.array) for k, x in tree.items()})
    layout = WeightLayout({k: v for k, v in table.items() if k != "head"}, split={"size": "two=2 half"})
    monkeypatch.setattr(lazy_arrays, "read_all", None)
    with axn.set_mesh(axn.make_mesh({"data": 4, "model": 2})), axn.axis_mapping({"heads": "model", "layers": "model"}):
        found = from_torch_compatible_state_dict(tree, entries, ignore=["head"], layout=layout)
    assert_same_tree(found, tree)
    shardings: list[Any] = [x.array.sharding for x in found.values()]
    assert any("model" in sharding.spec for sharding in shardings) == any(
        n in names.split() for names in axes.values() for n in ("heads", "layers")
    )


def test_casts() -> None:
    tree = {k: axn.round(x * 8) / 8 for k, x in tree_of(w="mlp embed", b="mlp").items()}  # which bfloat16 has
    layout = WeightLayout({"w": "w -> mlp embed as bfloat16", "b": "b -> mlp"})
    entries = to_torch_compatible_state_dict(tree, layout=layout)
    assert entries["w"].dtype == jnp.bfloat16 and entries["b"].dtype == np.float32
    assert_same_tree(from_torch_compatible_state_dict(tree, entries, layout=layout), tree)


def test_what_layers_declare() -> None:
    """The factor of a parametrization is in the entries, and the added layers of a stack are not."""
    Layers, Embed, Mlp = axn.make_axes(layers=3, embed=4, mlp=2)

    def init() -> Any:
        stacked = nn.Stacked.init(Layers, nn.Linear, divisible_by=4)
        return stacked(Embed, Mlp, key=KEY, use_bias=False, reparam_cls=nn.mup.OutputLinearMup)

    model = init()
    layout = WeightLayout({"{layers}.weight": "stacked.weight -> mlp embed"})
    entries = to_torch_compatible_state_dict(model, layout=layout)
    expected = to_torch_compatible_state_dict(model)
    assert entries.keys() == expected.keys() == {f"{i}.weight" for i in range(3)}
    for key, x in expected.items():
        np.testing.assert_array_equal(entries[key], x)
    assert_same_tree(from_torch_compatible_state_dict(eqx.filter_eval_shape(init), entries, layout=layout), model)
    with pytest.raises(TypeError, match="ConvTranspose has its own `flatten_for_export`, which a table does not call"):
        WeightLayout({}).pack(nn.ConvTranspose.init("time", Embed, Mlp, 3, key=KEY))


def test_loading() -> None:
    tree = tree_of(table="vocab embed", w="layers mlp embed")
    layout = WeightLayout({"t": "table -> vocab embed", "head": "= t", "{layers}.w": "w -> embed mlp"})
    entries = {f"m.{k}": x for k, x in to_torch_compatible_state_dict(tree, layout=layout).items()}
    mesh = axn.make_mesh({"data": 4, "model": 2})
    del entries["m.head"]  # which files may leave out
    with axn.set_mesh(mesh), axn.axis_mapping({"layers": "model"}):
        found = from_torch_compatible_state_dict(tree, entries, prefix="m", layout=layout)
    w: Any = found["w"].array
    assert w.sharding.spec == jax.P("model", None, None)
    assert_same_tree(found, tree)
    partly = from_torch_compatible_state_dict(tree, {"m.t": entries["m.t"]}, prefix="m", strict=False, layout=layout)
    assert partly["w"].array is tree["w"].array
    with pytest.raises(
        ValueError, match=r"'m\.t' has shape \(13, 5\), but in the tree it is float32\[vocab=12, embed=5"
    ):
        from_torch_compatible_state_dict(
            tree | {"table": tree["table"]["vocab", :12]}, entries, prefix="m", layout=layout
        )
    with pytest.raises(ValueError, match="'head' differs from 't', but in the layout they are the same"):
        other = {"m.head": entries["m.t"] + 1}
        from_torch_compatible_state_dict(tree, entries | other, prefix="m", layout=layout)


# --- what is refused ---

Q = "heads group size embed"
WRONG_ROWS = {
    "w": "'w' has no `->`, with the axes of the entry behind it",
    "a, b -> mlp embed": "'a, b -> mlp embed' has no `_`, the axis along which its 2 arrays are joined",
    "a -> (_ mlp) embed": "has `_`, the axis along which several arrays are joined, but only one array",
    "a b -> mlp": "expected the path of an array, and its own axes in parentheses, in 'a b'",
    "a -> mlp ...": "only names and groups of names have a place",
    "a -> mlp mlp": "'mlp' occurs a second time",
    "a, b (mlp) -> (_ mlp)": "has 'mlp' twice in b",
    "a -> mlp as float7": "no dtype is called 'float7'",
    "a -> mlp as ,": "no dtype is called ','",
    "a -> mlp as int8": "'w': a cast to int8 would cut off fractions",
    "= tabel": "'w' is the same as 'tabel', which is not the key of one entry. Did you mean 'table'?",
}


@pytest.mark.parametrize("row", WRONG_ROWS)
def test_rows_that_cannot_be_read(row: str) -> None:
    with pytest.raises(ValueError, match=re.escape(WRONG_ROWS[row])) as e:
        WeightLayout({"w": row, "table": "table -> vocab embed"})
    assert str(e.value).startswith("WeightLayout: 'w'") or "^" in str(e.value)


WRONG_TABLES: list[tuple[dict[str, str], dict[str, str], str]] = [
    ({"q": Q}, {"w": "q -> (heads group) embed"}, "'w': axis 'size' of q, of size 4, has no place."),
    ({"q": Q}, {"w": "q -> (heads group siez) size embed"}, "without 'siez'. Did you mean 'size'?"),
    (
        {"q": Q, "k": Q},
        {"w": "q -> (heads group size) embed"},
        "k is float32[heads=2, group=3, size=4, embed=5], but no",
    ),
    ({"q": Q}, {"w": "p -> (heads group size) embed"}, "but no row has it."),
    (
        {"q": "mlp"},
        {"w": "q -> mlp", "v": "q -> mlp"},
        "q is in 'w' and 'v'. A row such as '= w' repeats another's entry.",
    ),
    ({"a": "mlp embed"}, {"w": "a, b -> (_ mlp) embed"}, "'w': the tree has no b."),
    ({"a": "mlp", "b": "mlp"}, {"{layers}": "a -> mlp", "b": "b -> mlp"}, "a is float32[mlp=7], without 'layers'"),
    ({"a": "layers mlp", "b": "mlp"}, {"{layers}": "a -> mlp", "1": "b -> mlp"}, "'1' is the key of 2 entries."),
    ({"a": "mlp"}, {"w": "a -> mlp=6"}, "'w': axis 'mlp' of a has size 7, more than the 6 in the table."),
    ({"a": "mlp"}, {"w": "a -> two half"}, "a is float32[mlp=7], without 'two'"),
    ({"a": "mlp size"}, {"w": "a -> mlp thirds rest"}, "axis 'size' of a, of size 4, is not (thirds=3, rest=?)."),
    ({"a": "mlp"}, {"w": "a -> mlp", "t": "b -> mlp", "v": "= t"}, "'v': the tree has no 't'."),
]


@pytest.mark.parametrize(("axes", "table", "message"), WRONG_TABLES)
def test_tables_that_do_not_fit(axes: dict[str, str], table: dict[str, str], message: str) -> None:
    layout = WeightLayout(table, split={"size": "thirds=3 rest"})
    for call in (layout.pack, layout.expected, layout.check):
        with pytest.raises(ValueError, match=re.escape(message)) as e:
            call(tree_of(**axes))
        assert str(e.value).startswith("WeightLayout: the table does not fit")


def test_arrays_that_cannot_be_joined() -> None:
    tree: Any = {
        "a": axn.ones({"mlp": 3, "embed": 2}),
        "b": axn.ones({"mlp": 3, "embed": 4}, "bfloat16"),
        "c": jnp.ones(2),
    }
    layout = WeightLayout({"w": "a, b -> (_ mlp) embed", "c": "c -> mlp"})
    with pytest.raises(ValueError) as e:
        layout.pack(tree)
    assert str(e.value).splitlines() == [
        "WeightLayout: the table does not fit, 3 problems.",
        "  'w': a is float32, but b is bfloat16.",
        "  'w': axis 'embed' has size 2 in a, but 4 in b.",
        "  'c': c is float32[2], an array without names.",
    ]


def test_entries_that_do_not_fit() -> None:
    tree = tree_of(q=Q, w="mlp embed", v="vocab")
    layout = WeightLayout({"q": "q -> (heads group size) embed", "w": "w -> mlp embed", "v": "v -> vocab"})
    entries: dict[str, Any] = {
        "q": jax.ShapeDtypeStruct((5, 24), "float32"),
        "w": axn.ones({"embed": 7, "mlp": 5}),
        "x": np.ones(3),
    }
    for call in (layout.check, lambda tree, entries: layout.unpack(entries, tree)):
        with pytest.raises(ValueError) as e:
            call(tree, entries)
        assert str(e.value).splitlines()[1:] == [
            "  'x' is there, but no row has it.",
            "  'q': axis '(heads group size)' has size 5, but by the table 24.",
            "  'q': axis 'embed' has size 24, but by the table 5.",
            "  'w' is float32[embed=7, mlp=5], but by the table float32[mlp=7, embed=5].",
            "  'v' is missing, for float32[vocab=13].",
        ]
    square = WeightLayout({"w": "w -> mlp embed"})
    with pytest.raises(ValueError, match="'w': axes 'mlp' and 'embed' both have size 3, so shapes do not show whether"):
        square.check({"w": axn.ones({"mlp": 3, "embed": 3})})
