"""Keys, the methods of modules, and errors if a state dict does not fit."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym.state import (
    ModuleWithStateDictSerialization,
    from_state_dict,
    to_numpy_state_dict,
    to_state_dict,
    with_prefix,
)
from tests.state.models import assert_same_tree

W = axn.named(np.arange(6.0, dtype=np.float32).reshape(2, 3), ("out", "in"))


class Renamed(ModuleWithStateDictSerialization):
    """A module with one field under another name, and one without its own part of the key."""

    scale: axn.NamedArray
    inner: Any
    missing: axn.NamedArray | None = None
    size: int = eqx.field(static=True, default=3)

    def _state_dict_key_map(self) -> dict[str, str | None]:
        return {"scale": "weight", "inner": None}


class Doubled(ModuleWithStateDictSerialization):
    """A module that writes half of its value, so that it must compute when it is read."""

    weight: axn.NamedArray

    def to_state_dict(self, prefix: str | None = None) -> dict[str, Any]:
        return {with_prefix(prefix, "half"): self.weight.array / 2}

    def from_state_dict(self, state_dict: Any, prefix: str | None = None) -> Doubled:
        entries = {with_prefix(prefix, "weight"): state_dict[with_prefix(prefix, "half")]}
        return Doubled(super().from_state_dict(entries, prefix).weight * 2)


class Pair(NamedTuple):
    first: Any
    second: Any


def example() -> dict[str, Any]:
    return {
        "module": Renamed(W, {"bias": jnp.ones(3)}),
        "pair": Pair([jnp.zeros(2), None], (W * 2,)),
        "numbers": {"eps": 1e-5, "steps": 3, "on": True},
        "function": jnp.tanh,
        "placeholder": axn.NamedArray(None, (), ("x",)),
        "own": Doubled(W),
    }


def test_keys() -> None:
    found = to_state_dict(example(), "model")
    assert set(found) == {
        "model.module.weight",
        "model.module.bias",
        "model.pair.first.0",
        "model.pair.second.0",
        "model.numbers.eps",
        "model.numbers.steps",
        "model.numbers.on",
        "model.own.half",
    }
    assert found["model.module.weight"] is W.array and found["model.numbers.steps"] == 3


def test_round_trip_through_abstract_arrays() -> None:
    tree = example()
    abstract = eqx.filter_eval_shape(example)
    entries = to_numpy_state_dict(tree)
    assert all(isinstance(x, np.ndarray) or np.isscalar(x) for x in entries.values())
    assert_same_tree(from_state_dict(abstract, entries), tree)
    assert_same_tree(from_state_dict(abstract, to_state_dict(tree, "a.b"), "a.b"), tree)
    assert to_state_dict(abstract["module"])["weight"].shape == (2, 3)


def test_methods_of_a_module_can_be_called_directly() -> None:
    module = Renamed(W * 0, {"bias": jnp.ones(3)}).from_state_dict({"x.weight": W.array, "x.bias": np.zeros(3)}, "x")
    np.testing.assert_array_equal(module.scale.array, W.array)
    np.testing.assert_array_equal(Doubled(W * 0).from_state_dict({"half": W.array / 2}).weight.array, W.array)


def test_an_array_on_its_own_needs_a_key() -> None:
    assert to_state_dict(W, "w")["w"] is W.array
    np.testing.assert_array_equal(from_state_dict(W * 0, {"w": W.array}, "w").array, W.array)
    with pytest.raises(ValueError, match="to_state_dict: an array on its own has no key"):
        to_state_dict(W)
    with pytest.raises(ValueError, match="from_state_dict: an array on its own has no key"):
        from_state_dict(W, {})


def test_arrays_get_the_dtype_of_the_tree() -> None:
    tree = {"w": jnp.zeros(2, "bfloat16"), "i": jnp.zeros(2, "int32"), "n": 2}
    found = from_state_dict(tree, {"w": np.ones(2), "i": np.ones(2, np.int64), "n": np.float64(3.0)})
    assert found["w"].dtype == jnp.bfloat16 and found["i"].dtype == jnp.int32
    assert found["n"] == 3 and isinstance(found["n"], int)


def test_integers_do_not_wrap() -> None:
    tree = {"n": axn.zeros({"x": 2}, dtype=jnp.int8), "m": jnp.zeros(2, jnp.int32)}
    fit = {"n": np.array([-128, 127]), "m": np.array([1, 2], np.uint64)}
    assert from_state_dict(tree, fit)["n"].array.tolist() == [-128, 127]
    with pytest.raises(ValueError, match=r"^from_state_dict: 'n' has values from 1 to 300, which int8"):
        from_state_dict(tree, {**fit, "n": np.array([1, 300])})
    with pytest.raises(
        ValueError, match=r"^from_state_dict: 'm' has .* to 1099511627776, which int32 .* `jax_enable_x"
    ):
        from_state_dict(tree, {**fit, "m": np.array([1, 2**40])})


def test_integers_on_devices_do_not_wrap_either() -> None:
    tree = {"n": axn.zeros({"x": 8}, dtype=jnp.int8)}
    for explicit in (False, True):
        with jax.set_mesh(axn.make_mesh({"data": 8}, explicit=explicit)):
            numbers = axn.shard(axn.arange({"x": 8}), {"x": "data"}).array
            assert from_state_dict(tree, {"n": numbers})["n"].array.tolist() == list(range(8))
            with pytest.raises(ValueError, match=r"^from_state_dict: 'n' has values from 0 to 700, which int8"):
                from_state_dict(tree, {"n": 100 * numbers})


def test_numbers_stay_what_they_are() -> None:
    tree = {"steps": 3, "on": True, "rate": 0.5, "scale": 1j}
    found = from_state_dict(tree, {"steps": np.ones(1), "on": 0, "rate": np.float32(np.nan), "scale": jnp.bfloat16(2)})
    assert str(found) == "{'on': False, 'rate': nan, 'scale': (2+0j), 'steps': 1}"
    entries = {"steps": np.float32(2.5), "on": np.ones(3), "rate": 2j, "scale": "1j"}
    with pytest.raises(ValueError, match=r"does not fit the tree, 4 problems") as e:
        from_state_dict(tree, entries)
    for line in (
        "'steps' is 2.5, but in the tree it is a number, int.",
        "'on' is float64[3], but in the tree it is a number, bool.",
        "'rate' is 2j, but in the tree it is a number, float.",
        "'scale' is 1j, but in the tree it is a number, complex.",
    ):
        assert line in str(e.value)


def test_entries_are_copied() -> None:
    entry = np.zeros(3, np.float32)
    found = from_state_dict({"w": jnp.ones(3)}, {"w": entry})
    entry[:] = 7
    np.testing.assert_array_equal(found["w"], np.zeros(3))


def test_everything_that_does_not_fit_is_one_error() -> None:
    tree = {"weight": W, "bias": jnp.zeros(3), "ids": jnp.zeros(2, "int32"), "deep": [W]}
    entries = {"weigth": W.array, "bias": np.zeros(4), "ids": np.zeros(2), "deep.0": W.array, "deep.1": W.array}
    with pytest.raises(ValueError) as e:
        from_state_dict(tree, entries)
    lines = str(e.value).splitlines()
    assert lines[0].startswith("from_state_dict: the state dict does not fit the tree, 5 problems.")
    assert "ignore" in lines[0] and "strict=False" in lines[0]
    assert sorted(line.strip() for line in lines[1:]) == [
        "'bias' has shape (4,), but in the tree it is float32[3].",
        "'deep.1' is in the state dict, but not in the tree.",
        "'ids' has dtype float64, but in the tree it is int32[2].",
        "'weight' is missing, for float32[out=2, in=3]. Did you mean 'weigth'?",
        "'weigth' is in the state dict, but not in the tree.",
    ]


def test_a_forgotten_prefix_is_found() -> None:
    entries = to_state_dict({"w": W, "b": W}, "model")
    with pytest.raises(ValueError, match=r"All missing keys are there with 'model\.' in front"):
        from_state_dict({"w": W, "b": W}, entries)
    with pytest.raises(ValueError, match=r"All missing keys are there without 'model\.' in front"):
        from_state_dict({"w": W, "b": W}, {"w": W.array, "b": W.array}, "model")


def test_only_what_is_below_the_prefix_must_be_in_the_tree() -> None:
    from_state_dict({"w": W}, {"a.w": W.array, "b.w": W.array, "ab": W.array}, "a")
    with pytest.raises(ValueError, match=r"'a\.b' is in the state dict"):
        from_state_dict({"w": W}, {"a.w": W.array, "a.b": W.array}, "a")


def test_leniency_is_asked_for() -> None:
    tree, entries = {"w": W, "b": W * 0}, {"w": W.array * 2, "old.inv_freq": np.ones(1)}
    found = from_state_dict(tree, entries, strict=False)
    np.testing.assert_array_equal(found["w"].array, W.array * 2)
    assert found["b"].array is tree["b"].array
    np.testing.assert_array_equal(from_state_dict({"w": W}, entries, ignore=["*.inv_freq"])["w"].array, W.array * 2)
    with pytest.raises(ValueError, match="'b' is missing"):
        from_state_dict(tree, entries, ignore=["*.inv_freq"])
    with pytest.raises(ValueError, match="b is missing, and the tree has only its shape and dtype"):
        from_state_dict(jax.eval_shape(lambda: tree), entries, strict=False)
    with pytest.raises(ValueError, match=r"'w' has shape \(3, 2\)"):
        from_state_dict({"w": W}, {"w": W.array.T}, strict=False)


def test_leniency_reaches_modules_that_load_themselves() -> None:
    tree = {"own": Doubled(W)}
    with pytest.raises(ValueError, match=r"'own\.weight' has shape \(2,\)"):
        from_state_dict(tree, {"own.half": np.zeros(2)})
    found = from_state_dict(tree, {"own.half": W.array, "own.more": W.array}, strict=False)
    np.testing.assert_array_equal(found["own"].weight.array, W.array * 2)


def test_a_module_can_be_lenient_about_a_part() -> None:
    class Lenient(ModuleWithStateDictSerialization):
        optional: axn.NamedArray
        other: axn.NamedArray

        def from_state_dict(self, state_dict: Any, prefix: str | None = None) -> Lenient:
            optional = from_state_dict(self.optional, state_dict, with_prefix(prefix, "optional"), strict=False)
            return Lenient(optional, from_state_dict(self.other, state_dict, with_prefix(prefix, "other")))

    found = from_state_dict([Lenient(W, W)], {"0.other": W.array * 2})[0]
    assert found.optional.array is W.array
    np.testing.assert_array_equal(found.other.array, W.array * 2)
    with pytest.raises(ValueError, match=r"'0\.other' is missing"):
        from_state_dict([Lenient(W, W)], {"0.optional": W.array})


def test_a_key_map_that_makes_no_sense() -> None:
    class Wrong(ModuleWithStateDictSerialization):
        a: axn.NamedArray
        b: axn.NamedArray

        def _state_dict_key_map(self) -> dict[str, str | None]:
            return {"a": "b"}

    class Misspelt(Wrong):
        def _state_dict_key_map(self) -> dict[str, str | None]:
            return {"c": "b"}

    with pytest.raises(ValueError, match="Wrong has two arrays with the key 'b'"):
        to_state_dict(Wrong(W, W))
    with pytest.raises(ValueError, match="the module has no field 'c'"):
        to_state_dict(Misspelt(W, W))


def test_in_a_compiled_function() -> None:
    entries = to_state_dict(tree := example())
    loaded = jax.jit(lambda entries: from_state_dict(eqx.filter_eval_shape(example), entries)["own"].weight)(entries)
    np.testing.assert_array_equal(loaded.array, tree["own"].weight.array)


def test_a_layer_that_is_missing_keeps_its_own_value() -> None:
    """The other layers of the stack are loaded."""
    layers = axn.nn.Stacked.init(axn.Axis("layers", 3), axn.nn.LayerNorm)(axn.Axis("embed", 2))
    entries = {f"{i}.{key}": np.full(2, float(i + 5)) for i in range(3) for key in ("weight", "bias")}
    del entries["1.weight"]
    loaded = axn.state.to_state_dict(from_state_dict(layers, entries, strict=False))
    assert [loaded[f"{i}.weight"][0] for i in range(3)] == [5, 1, 7]
    assert [loaded[f"{i}.bias"][0] for i in range(3)] == [5, 6, 7]
    with pytest.raises(ValueError, match="stacked/weight is missing, and the tree has only its shape"):
        from_state_dict(jax.eval_shape(lambda: layers), entries, strict=False)


def test_a_scaled_layer_that_is_missing_keeps_its_own_value() -> None:
    make = axn.nn.Stacked.init(axn.Axis("layers", 3), axn.nn.Linear)
    mup = axn.nn.mup.OutputLinearMup
    layers = make(axn.Axis("x", 2), axn.Axis("y", 2), key=jax.random.key(0), use_bias=False, reparam_cls=mup)
    entries = {key: 2 * x for key, x in axn.state.to_state_dict(layers).items() if key != "1.weight"}
    loaded = from_state_dict(layers, entries, strict=False).stacked.weight.array
    np.testing.assert_allclose(loaded, layers.stacked.weight.array * np.array([2, 1, 2])[:, None, None], rtol=1e-6)
