"""Equinox modules are flattened once, and nobody can tell."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer
from jax.sharding import Mesh

import axonym as axn
from axonym.sharding import _flat_modules
from tests.helpers import compilations
from tests.sharding.test_shard import spec


class Layer(eqx.Module):
    weight: axn.NamedArray
    activation: Callable[[Any], Any]
    rate: Any = 1.0
    scale: Any = eqx.field(static=True, default=1.0)

    def __call__(self, x: axn.NamedArray) -> axn.NamedArray:
        return self.activation(x * self.weight) * self.rate * self.scale


class Model(eqx.Module):
    layers: Any


class State(NamedTuple):
    step: jax.Array
    momentum: Any


def layer(value: float = 2.0, **fields: Any) -> Layer:
    return Layer(axn.full({"x": 8}, value), **({"activation": axn.tanh} | fields))


@pytest.fixture
def flattened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The modules that were flattened."""
    seen = []

    def flatten_arrays(tree: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(jax.tree.leaves(tree)[0], Tracer):
            seen.append(tree)
        return real(tree, *args, **kwargs)

    real = _flat_modules.flatten_arrays
    monkeypatch.setattr(_flat_modules, "flatten_arrays", flatten_arrays)
    return seen


X = axn.arange({"x": 8}) / 8.0


def test_a_module_is_flattened_once(flattened: list[Any]) -> None:
    fn = axn.named_jit(lambda model, x: model.layers[0](x))
    model = Model((layer(), layer()))
    for _ in range(3):
        np.testing.assert_allclose(fn(model, X).array, np.tanh(2 * X.array), rtol=1e-6)
    assert len(flattened) == 1
    other = Model((layer(3.0), layer()))
    with compilations() as compiled:
        y = fn(other, X)
    assert compiled == [] and len(flattened) == 2
    np.testing.assert_allclose(y.array, np.tanh(3 * X.array), rtol=1e-6)


@pytest.mark.parametrize("donated", [None, (True, True, False)])
def test_what_a_step_returns_is_known(donated: Any, flattened: list[Any]) -> None:
    """Also inside tuples, as in the states of optimizers."""

    def train(model: Model, state: tuple[State, Any], x: axn.NamedArray) -> Any:
        (step, momentum), empty = state
        momentum = jax.tree.map(lambda m: m + 1 if eqx.is_array(m) else m, momentum)
        model = jax.tree.map(lambda a, m: a + m if eqx.is_array(a) else a, model, momentum)
        return axn.sum(model.layers[0](x)), model, (State(step + 1, momentum), empty)

    compiled_step = axn.named_jit(train, donate_args=donated)
    model = expected = Model((layer(),))
    zeros = lambda x: x * 0 if eqx.is_array(x) else x
    state = others = (State(jnp.zeros((), int), jax.tree.map(zeros, model)), ())
    for i in range(3):
        wanted, expected, others = train(expected, others, X)
        if donated:
            expected, others = jax.tree.map(lambda x: x + 0 if eqx.is_array(x) else x, (expected, others))
        value, model, state = compiled_step(model, state, X)
        np.testing.assert_allclose(value.array, wanted.array, rtol=1e-6)
        assert type(model) is Model and type(state) is tuple and type(state[0]) is State and model.layers[0].rate == 1.0
        assert int(state[0].step) == i + 1 and len(flattened) == 2, "the first model, and its momentum"


def test_what_can_change_is_looked_at_each_time() -> None:
    fn = axn.named_jit(lambda model, x: model.layers[0](x))
    for holding in (list, lambda layers: dict(enumerate(layers))):
        model = Model(holding([layer()]))
        fn(model, X)
        model.layers[0] = layer(5.0)
        np.testing.assert_allclose(fn(model, X).array, np.tanh(5 * X.array), rtol=1e-6)
    options = {"by": 2.0}
    model = layer(scale=options)
    fn = axn.named_jit(lambda model, x: x * model.scale["by"])
    for by in (2.0, 3.0):
        options["by"] = by
        np.testing.assert_allclose(fn(model, X).array, by * X.array, rtol=1e-6)
    numbers = np.ones(8, np.float32)
    model, fn = Model((axn.named(numbers, "x"),)), axn.named_jit(lambda model: model.layers[0] * 2)
    for value in (1, 2):
        numbers[:] = value
        np.testing.assert_array_equal(fn(model).array, np.full(8, 2 * value))


@pytest.mark.parametrize("field", ["rate", "scale"])
def test_static_values_are_told_apart_by_type_and_sign(field: str) -> None:
    fn = axn.named_jit(lambda model: repr(getattr(model, field)))
    for value in (1, 1.0, True, 0.0, -0.0, 1):
        assert fn(layer(**{field: value})) == repr(value)


def test_other_functions_in_a_module_are_other_programs() -> None:
    fn = axn.named_jit(lambda model, x: model(x))
    for activation in (axn.tanh, axn.exp, axn.tanh):
        found = fn(layer(activation=activation), X)
        np.testing.assert_allclose(found.array, activation(2 * X).array, rtol=1e-6)
    with pytest.raises(TypeError, match="must be hashable"):
        fn(layer(rate={1}), X)


def test_modules_that_are_gone_are_forgotten() -> None:
    fn = axn.named_jit(lambda model: jax.tree.map(lambda x: x + 1 if eqx.is_array(x) else x, model))
    gc.collect()
    before = len(_flat_modules._known)
    for _ in range(5):
        fn(fn(Model((layer(),))))
    gc.collect()
    assert len(_flat_modules._known) == before


def test_placements_and_derivatives(mesh: Mesh) -> None:
    """In a compiled function with mappings, and where transforms are applied around it."""
    model = Model((layer(),))
    with jax.set_mesh(mesh):
        fn = axn.named_jit(lambda model: model, {"x": "data"}, in_placement={"x": "data"})
        for _ in range(2):
            model = fn(model)
            assert spec(model.layers[0].weight) == ("data",)
        loss = axn.named_jit(lambda layer, x: axn.sum(layer(x)).scalar(), {"x": "data"})
        found, wanted = (
            eqx.filter_grad(f)(model.layers[0], X) for f in (loss, lambda layer, x: axn.sum(layer(x)).scalar())
        )
        np.testing.assert_allclose(found.weight.array, wanted.weight.array, rtol=1e-6)
        with axn.axis_mapping({"x": "model"}):  # where settings are to be activated around the call
            np.testing.assert_allclose(loss(model.layers[0], X), axn.sum(model.layers[0](X)).array, rtol=1e-6)


def test_what_is_compiled_ahead_is_what_is_called() -> None:
    """Compiled once, whether modules come back, are donated, or have static leaves."""
    for donated in (None, (True, False)):
        fn = axn.named_jit(lambda model, x: (model.layers[0](x), model), donate_args=donated)
        model = Model((layer(),))
        lowered = fn.lower(model, X)
        assert type(lowered.out_info[1]) is Model
        compiled = lowered.compile()
        with compilations() as seen:
            y, again = fn(model, X)
            found, last = compiled(again, X)
        assert not [event for event in seen if event.endswith("backend_compile_duration")]
        assert type(last) is Model
        np.testing.assert_array_equal(y.array, found.array)
