"""Creation: values, dtypes, the forms of a spec, and the sharding of new arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import axonym as axn
from tests.helpers import assert_named, compilations

untyped: Any = axn  # for calls that a type checker would refuse
X, Y = axn.make_axes(x=4, y=3)


def _expect(found: axn.NamedArray, values: Any, *names: str) -> None:
    values = np.asarray(values)
    dtype = {"f": np.float32, "i": np.int32}.get(values.dtype.kind, values.dtype)
    assert_named(found, axn.named(jnp.asarray(values.astype(dtype)), names), rtol=1e-6)


@pytest.mark.parametrize("spec", [(X, Y), [X, Y], {"x": 4, "y": 3}])
def test_every_form_of_spec(spec: Any) -> None:
    _expect(axn.zeros(spec), np.zeros((4, 3)), "x", "y")
    _expect(axn.ones(spec), np.ones((4, 3)), "x", "y")
    _expect(axn.full(spec, 7), np.full((4, 3), 7), "x", "y")
    _expect(axn.arange(spec), np.arange(12).reshape(4, 3), "x", "y")


def test_one_axis_and_none() -> None:
    _expect(axn.zeros(X), np.zeros(4), "x")
    _expect(axn.ones(()), np.ones(()))
    _expect(axn.arange(()), np.arange(1)[0])
    _expect(axn.full((), 2.5), np.float32(2.5))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.int8, "uint8", bool, float, int])
def test_dtypes(dtype: Any) -> None:
    expected = jax.dtypes.canonicalize_dtype(dtype)
    made = (
        axn.zeros(X, dtype),
        axn.ones(X, dtype),
        axn.full(X, 1, dtype),
        axn.zeros_like(axn.ones(X), dtype),
        axn.ones_like(axn.ones(X), dtype),
        axn.full_like(axn.ones(X), 1, dtype),
        axn.eye(X, Y, dtype=dtype),
    )
    assert [x.dtype for x in made] == [expected] * len(made)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.int8, "uint8", float, int])
@pytest.mark.parametrize("start", [0, 1])
def test_dtype_of_counting(dtype: Any, start: int) -> None:
    found = axn.arange(X, start=start, dtype=dtype)
    assert found.dtype == jax.dtypes.canonicalize_dtype(dtype)
    np.testing.assert_array_equal(np.asarray(found.array, np.float32), np.arange(start, start + 4))


def test_full_takes_the_dtype_of_its_value() -> None:
    assert axn.full(X, 1).dtype == np.int32
    assert axn.full(X, True).dtype == np.bool_
    assert axn.full(X, axn.sum(axn.ones(X, jnp.bfloat16))).dtype == jnp.bfloat16


def test_like() -> None:
    x = axn.arange((Y, X))
    _expect(axn.zeros_like(x), np.zeros((3, 4), np.int32), "y", "x")
    _expect(axn.ones_like(x), np.ones((3, 4), np.int32), "y", "x")
    _expect(axn.full_like(x, 2.5), np.full((3, 4), 2), "y", "x")
    assert axn.zeros_like(axn.NamedArray(jax.ShapeDtypeStruct((4,), np.int8), X)).dtype == np.int8


NEW: dict[str, Callable[[], axn.NamedArray]] = {
    "zeros": lambda: axn.zeros({"batch": 8, "embed": 4}),
    "ones": lambda: axn.ones({"batch": 8, "embed": 4}, jnp.int8),
    "full": lambda: axn.full({"batch": 8, "embed": 4}, 2.5),
    "arange": lambda: axn.arange({"batch": 8, "embed": 4}),
    "arange_from": lambda: axn.arange({"batch": 8, "embed": 4}, start=3, step=0.5),
    "linspace": lambda: axn.linspace(axn.Axis("batch", 8), start=0, stop=1),
    "geomspace": lambda: axn.geomspace(axn.Axis("batch", 8), start=1, stop=2),
    "logspace": lambda: axn.logspace(axn.Axis("batch", 8), start=1, stop=2),
    "eye": lambda: axn.eye(axn.Axis("batch", 8), axn.Axis("embed", 4)),
    "fftfreq": lambda: axn.fft.fftfreq(axn.Axis("batch", 8)),
    "rfftfreq": lambda: axn.fft.rfftfreq(axn.Axis("frequency", 8)),
    "normal": lambda: axn.random.normal(jax.random.key(0), {"batch": 8, "embed": 4}),
}


@pytest.mark.parametrize("name", NEW)
def test_the_mapping_shards_new_arrays_as_it_shards_random_draws(name: str, mesh: Mesh) -> None:
    """With the values and types that they have without a mapping, eagerly and in jit."""
    new = NEW[name]
    mapping = {"batch": "data", "embed": "model", "frequency": None}
    alone = new()
    with jax.set_mesh(mesh), axn.axis_mapping(mapping):
        for found in (new(), jax.jit(new)()):
            expected = NamedSharding(mesh, PartitionSpec(*(mapping[n] for n in found.names)))
            assert found.array.sharding.is_equivalent_to(expected, found.ndim)
            assert_named(found, alone, rtol=1e-6)
            assert found.array.weak_type == alone.array.weak_type
        with axn.axis_mapping({}):
            assert new().array.sharding.is_fully_replicated or name == "normal"


def test_a_new_array_is_never_whole_on_a_device(mesh: Mesh) -> None:
    with jax.set_mesh(mesh), axn.axis_mapping({"batch": "data", "embed": "model"}):
        compiled = jax.jit(lambda: axn.zeros({"batch": 800, "embed": 400})).lower().compile()
    program = str(compiled.as_text())
    assert "f32[200,200]" in program and "f32[800,400]" not in program


def test_new_arrays_inside_shard_map(mesh: Mesh) -> None:
    """The active mapping says nothing about mesh axes that are manual there."""

    @axn.shard_map(mapping={"batch": "data"}, mesh=mesh)
    def double(x: axn.NamedArray) -> axn.NamedArray:
        zeros = axn.zeros({"batch": x.axis_size("batch"), "embed": 3})
        return x + zeros["embed", 0] + axn.random.normal(jax.random.key(0), {"batch": 2, "embed": 5})["embed", 0] * 0

    with jax.set_mesh(mesh), axn.axis_mapping({"batch": "data", "embed": "data"}):
        _expect(double(axn.shard(axn.arange(axn.Axis("batch", 8)) * 1.0)), np.arange(8.0), "batch")


def test_new_arrays_whose_size_the_mesh_does_not_divide(mesh: Mesh) -> None:
    with jax.set_mesh(mesh), axn.axis_mapping({"batch": "data"}):
        with pytest.raises(ValueError, match=r"^zeros on mesh \(data=4, model=2\): .*axis 'batch' of size 5 .* 4"):
            axn.zeros({"batch": 5})
        with axn.axis_mapping({"batch": None}, merge=True):
            assert axn.zeros({"batch": 5}).array.sharding.is_fully_replicated


LIKE: list[Callable[[axn.NamedArray], axn.NamedArray]] = [
    lambda x: axn.zeros_like(x),
    lambda x: axn.ones_like(x),
    lambda x: axn.full_like(x, 3),
]


@pytest.mark.parametrize("like", LIKE)
def test_like_keeps_the_sharding(like: Callable[..., Any], auto_mesh: Mesh, explicit_mesh: Mesh) -> None:
    for mesh in (auto_mesh, explicit_mesh):
        sharding = NamedSharding(mesh, PartitionSpec(None, "data"))
        x = axn.named(jax.device_put(jnp.ones((3, 4)), sharding), ("y", "x"))
        with jax.set_mesh(mesh):
            assert like(x).array.sharding == sharding
    with jax.set_mesh(explicit_mesh):
        assert jax.jit(like)(x).array.sharding == sharding


def test_arange() -> None:
    _expect(axn.arange(X, start=3, step=-2), [3, 1, -1, -3], "x")
    _expect(axn.arange(X, step=0.5), [0.0, 0.5, 1.0, 1.5], "x")
    _expect(axn.arange((X, Y), start=1, step=2), np.arange(1, 25, 2).reshape(4, 3), "x", "y")
    _expect(axn.arange(X, start=0.1, step=0.1), np.float32(0.1) * np.arange(1, 5), "x")
    # The number of elements is that of the axis, whatever rounding does to start and step.
    assert axn.arange(axn.Axis("x", 49), step=1 / 49).size == 49


def test_arange_counts_in_a_dtype_that_holds_the_positions() -> None:
    found = axn.arange(axn.Axis("x", 1000), start=jnp.bfloat16(1), step=jnp.bfloat16(1))
    np.testing.assert_array_equal(found.array, np.arange(1, 1001).astype(jnp.bfloat16))


def test_arange_from_a_traced_start() -> None:
    found = jax.jit(lambda s: axn.arange(X, start=s, step=2))(3)
    _expect(found, [3, 5, 7, 9], "x")
    axn.arange(X, start=11, step=3)
    with compilations() as compiled:
        axn.arange(X, start=12, step=4)
    assert compiled == []


def test_spaced() -> None:
    _expect(axn.linspace(X, start=0, stop=3), [0.0, 1.0, 2.0, 3.0], "x")
    _expect(axn.linspace(X, start=0, stop=4, endpoint=False), [0.0, 1.0, 2.0, 3.0], "x")
    _expect(axn.linspace(X, start=0, stop=3, dtype=int), [0, 1, 2, 3], "x")
    _expect(axn.geomspace(X, start=1, stop=8), [1.0, 2.0, 4.0, 8.0], "x")
    _expect(axn.geomspace(X, start=1, stop=16, endpoint=False), [1.0, 2.0, 4.0, 8.0], "x")
    _expect(axn.logspace(X, start=0, stop=3), [1.0, 10.0, 100.0, 1000.0], "x")
    _expect(axn.logspace(X, start=0, stop=3, base=2), [1.0, 2.0, 4.0, 8.0], "x")
    _expect(jax.jit(lambda s: axn.linspace(X, start=0, stop=s))(axn.sum(axn.ones(Y))), [0.0, 1.0, 2.0, 3.0], "x")


def test_a_bare_name_means_fifty_points() -> None:
    assert axn.linspace("x", start=0, stop=1).shape == {"x": 50}


@pytest.mark.parametrize("k", [0, 1, -2])
def test_banded(k: int) -> None:
    _expect(axn.eye(X, Y, k), np.eye(4, 3, k), "x", "y")


def test_vander() -> None:
    x = axn.named([1.0, 2.0, 3.0], "x")
    _expect(axn.vander(x, "power"), np.vander([1.0, 2.0, 3.0]), "x", "power")
    _expect(axn.vander(x, axn.Axis("power", 5)), np.vander([1.0, 2.0, 3.0], 5), "x", "power")
    _expect(axn.vander(x, axn.Axis("power", 2), increasing=True), [[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], "x", "power")
    batched = axn.vander(axn.arange((X, Y)), axn.Axis("power", 3))
    _expect(batched, np.stack([np.vander(row, 3) for row in np.arange(12).reshape(4, 3)]), "x", "y", "power")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: axn.zeros((X, X)), ValueError, r"^zeros: 'x' would name more than one axis"),
        (lambda: untyped.ones(("x", Y)), ValueError, r"^ones needs axes with sizes, got only the name 'x'"),
        (lambda: untyped.zeros(4), TypeError, r"An axis has a name and a size, got int\. Write `\{'batch': 4\}`"),
        (lambda: axn.full(X, axn.ones(Y)), ValueError, r"^full: `fill_value` must be a scalar, .* axes \(y=3\)"),
        (lambda: untyped.full(X, [1, 2]), ValueError, r"^full: `fill_value` must be a scalar, .* shape \(2,\)"),
        (lambda: untyped.zeros_like(jnp.ones(3)), TypeError, r"^zeros_like: expected a NamedArray, got ArrayImpl"),
        (lambda: jax.vmap(axn.ones_like)(axn.ones((X, Y))), ValueError, r"^ones_like: .* 2 names \(x, y\) .* rank 1"),
        (
            lambda: untyped.linspace((X, Y), start=0, stop=1),
            ValueError,
            r"^linspace: `axis` must be one axis, .*x=4, y=3",
        ),
        (lambda: untyped.linspace(3, start=0, stop=1), TypeError, r"^linspace: `axis` must be an Axis, got int"),
        (lambda: axn.geomspace(X, start=axn.ones(Y), stop=1), ValueError, r"^geomspace: `start` must be a scalar"),
        (lambda: axn.eye(X, X), ValueError, r"^eye: 'x' would name more than one axis"),
        (lambda: axn.vander(axn.ones((X, Y)), "d"), ValueError, r"^vander: how many powers of \(x=4, y=3\)\?"),
        (lambda: axn.vander(axn.ones(X), axn.Axis("x", 2)), ValueError, r"^vander: 'x' would name more than one axis"),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
