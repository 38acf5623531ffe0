"""The form for PyTorch: one axis where a layer has several, and layers one by one."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym import nn
from axonym.state import (
    ModuleWithStateDictSerialization,
    flatten_modules_for_export,
    from_state_dict,
    from_torch_compatible_state_dict,
    to_state_dict,
    to_torch_compatible_state_dict,
    unflatten_modules_from_export,
)
from tests.state.models import (
    KEY,
    Embed,
    Heads,
    Layers,
    Model,
    Size,
    Vocab,
    assert_same_entries,
    assert_same_tree,
    torch_form,
)

KINDS = pytest.mark.parametrize("kind", [nn.Stacked, nn.BlockSeq])


@KINDS
def test_layers_are_flattened_and_unstacked(kind: Any) -> None:
    model = Model.init(kind)
    assert_same_entries(to_torch_compatible_state_dict(model), torch_form(model))
    abstract = to_torch_compatible_state_dict(eqx.filter_eval_shape(Model.init, kind), prefix="m")
    assert {k: x.shape for k, x in abstract.items()} == {f"m.{k}": x.shape for k, x in torch_form(model).items()}


@KINDS
def test_round_trip(kind: Any) -> None:
    model, abstract = Model.init(kind), eqx.filter_eval_shape(Model.init, kind)
    assert_same_tree(from_torch_compatible_state_dict(abstract, torch_form(model)), model)
    entries = to_torch_compatible_state_dict(model, flatten=False, prefix="m")
    assert entries["m.layers.1.attend.weight"].shape == (2, 6, 4)
    assert_same_tree(from_torch_compatible_state_dict(abstract, entries, unflatten=False, prefix="m"), model)
    assert_same_tree(from_state_dict(abstract, to_state_dict(model)), model)


def test_one_state_dict_for_both_kinds_of_layers() -> None:
    stacked = Model.init(nn.Stacked)
    in_sequence = from_state_dict(eqx.filter_eval_shape(Model.init, nn.BlockSeq), to_state_dict(stacked))
    assert_same_entries(to_torch_compatible_state_dict(in_sequence), torch_form(stacked))


def test_stacks_in_stacks() -> None:
    Outer = axn.Axis("outer", 2)

    class Group(eqx.Module):
        layers: nn.Stacked

        @staticmethod
        def init(*, key: jax.Array) -> Group:
            return Group(nn.Stacked.init(Layers, nn.Linear)(Embed, (Heads, Size), key=key))

    def init() -> nn.Stacked:
        return nn.Stacked.init(Outer, Group)(key=KEY)

    model = init()
    weight = model.stacked.layers.stacked.weight
    entries = to_torch_compatible_state_dict(model)
    assert len(entries) == 2 * 3 * 2
    for i in range(2):
        for j in range(3):
            expected = weight["outer", i, "layers", j].array.reshape(12, 4)
            np.testing.assert_array_equal(entries[f"{i}.layers.{j}.weight"], expected)
    assert_same_tree(from_torch_compatible_state_dict(eqx.filter_eval_shape(init), entries), model)


def test_flattened_modules_are_modules() -> None:
    layer = nn.Linear.init((Heads, Size), (), key=KEY)
    flat = flatten_modules_for_export({"a": [layer]})["a"][0]
    assert flat.weight.shape == {"__OUT__": 1, "__IN__": 12} and flat.In == axn.Axis("__IN__", 12)
    np.testing.assert_allclose(flat(axn.ones({"__IN__": 12})).array, layer(axn.ones((Heads, Size))).array[None], 1e-6)
    assert_same_tree(unflatten_modules_from_export({"a": [flat]}, {"a": [layer]})["a"][0], layer)
    for like_those_of_torch in (nn.Linear.init(Embed, Embed, key=KEY), nn.Embedding.init(Vocab, Embed, key=KEY)):
        assert_same_tree(flatten_modules_for_export(like_those_of_torch), like_those_of_torch)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_weights_are_what_inputs_are_multiplied_with(dtype: Any) -> None:
    """PyTorch knows no parametrizations, so that of the layer is in its weight."""

    def init() -> nn.Stacked[nn.Linear]:
        make = nn.Stacked.init(Layers, nn.Linear)
        layers = make((Heads, Size), Embed, key=KEY, use_bias=False, reparam_cls=nn.mup.OutputLinearMup)
        return jax.tree.map(lambda x: x.astype(dtype), layers)

    layers = init()
    entries, x = to_torch_compatible_state_dict(layers), axn.ones((Heads, Size), dtype)
    for i, expected in enumerate(layers.vmap(x).unbind("layers")):
        weight = entries[f"{i}.weight"]
        assert weight.dtype == dtype and isinstance(weight, np.ndarray)
        np.testing.assert_allclose(weight.astype(np.float32).sum(1), expected.array.astype(np.float32), 0.05)
    loaded = from_torch_compatible_state_dict(eqx.filter_eval_shape(init), entries)
    in_jit = jax.jit(from_torch_compatible_state_dict)(layers, entries)
    for found in (loaded, in_jit):
        actual, desired = (x.stacked.weight.array.astype(np.float32) for x in (found, layers))
        np.testing.assert_allclose(actual, desired, rtol=0.02 if dtype == jnp.bfloat16 else 1e-6)
    partly = from_torch_compatible_state_dict(layers, {}, strict=False)
    assert partly.stacked.weight.array is layers.stacked.weight.array


def test_axes_in_another_order() -> None:
    """A weight whose axes were put in another order is the same to PyTorch, and comes back in that order."""
    layer = nn.Linear.init(Embed, (Heads, Size), key=KEY)
    moved = dataclasses.replace(layer, weight=layer.weight.rearrange(("size", "heads", "embed")))
    entries = to_torch_compatible_state_dict(moved)
    assert_same_entries(entries, to_torch_compatible_state_dict(layer))
    assert_same_tree(from_torch_compatible_state_dict(moved, entries), moved)


class Fused(ModuleWithStateDictSerialization):
    """A module of two arrays that PyTorch stores as one, scaled: more than a change of form."""

    q: axn.NamedArray
    k: axn.NamedArray
    both: axn.NamedArray | None = None

    def flatten_for_export(self) -> Fused:
        return Fused(None, None, nn.relu(axn.concatenate([self.q, self.k], "out")) * 2)  # pyright: ignore[reportArgumentType]

    def unflatten_from_export(self, template: Any) -> Fused:
        assert self.both is not None
        sizes = [template.q.axis_size("out"), template.k.axis_size("out")]
        q, k = axn.split(self.both / 2, "out", [axn.Axis("out", s) for s in sizes])
        return Fused(q, k)


def test_hooks_that_compute() -> None:
    layers = Fused(axn.ones({"layers": 3, "out": 2}), axn.zeros({"layers": 3, "out": 1}))
    stack = nn.Stacked(layers, Layers)
    entries = to_torch_compatible_state_dict(stack)
    assert_same_entries(entries, {f"{i}.both": np.array([2, 2, 0], np.float32) for i in range(3)})
    assert_same_tree(from_torch_compatible_state_dict(jax.eval_shape(lambda: stack), entries), stack)
    in_jit = jax.jit(lambda e: from_torch_compatible_state_dict(jax.eval_shape(lambda: stack), e))
    assert_same_tree(in_jit(entries), stack)


def test_what_is_not_there() -> None:
    model = Model.init()
    entries = torch_form(model)
    del entries["layers.1.attend.bias"], entries["embed.weight"], entries["layers.2.norm.bias"]
    entries["layers.0.gain"] = np.zeros(3, np.float32)
    with pytest.raises(ValueError) as e:
        from_torch_compatible_state_dict(model, entries)
    assert str(e.value).startswith("from_torch_compatible_state_dict: the state dict does not fit the tree, 4 problems")
    for line in (
        "'embed.weight' is missing, for float32[vocab=8, __OUT__=12].",
        "'layers.1.attend.bias' is missing, for float32[__OUT__=12].",
        "'layers.2.norm.bias' is missing, for float32[embed=4].",
        "'layers.0.gain' has shape (3,), but in the tree it is float32[2].",
    ):
        assert line in str(e.value)
    entries["layers.0.gain"] = np.full(2, 7, np.float32)
    entries["layers.2.attend.bias"] = np.full_like(entries["layers.2.attend.bias"], 5)
    found = from_torch_compatible_state_dict(model, entries, strict=False)
    np.testing.assert_array_equal(found.layers.stacked.gain[0], np.full(2, 7))
    own, loaded = model.layers.stacked.attend.bias.array, found.layers.stacked.attend.bias.array
    np.testing.assert_array_equal(loaded, own.at[2].set(5))  # layer 1 is missing, and keeps its value
    assert found.embed.weight.array is model.embed.weight.array


class Tensor:
    """A tensor like PyTorch's: it has a shape, and NumPy can read it, but not as bfloat16."""

    def __init__(self, array: jax.Array):
        self.array: Any = array
        self.shape, self.dtype = array.shape, f"torch.{array.dtype}"

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        if self.array.dtype == jnp.bfloat16:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return np.asarray(self.array)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_tensors_of_others_are_converted() -> None:
    entries = {"x": Tensor(jnp.ones(2)), "y": Tensor(jnp.ones(2, jnp.bfloat16))}
    found = from_state_dict({"x": jnp.zeros(2), "y": jnp.zeros(2)}, entries)
    assert_same_tree(found, {"x": jnp.ones(2), "y": jnp.ones(2)})
