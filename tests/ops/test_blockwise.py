"""Operations along a sharded axis exchange halos, totals or shards, and never gather the axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import axonym as axn
from axonym import NamedArray, fft
from axonym.ops import _blocks
from benchmarks.communication import bytes_moved
from tests.helpers import spec

MAPPING = {"x": "data"}
DRAW = np.random.default_rng(0)
X = axn.named(jnp.asarray(DRAW.uniform(0.5, 1.5, (64, 16)), "float32"), ("x", "c"))
PLANES = axn.named(jnp.asarray(DRAW.uniform(0.5, 1.5, (16, 8, 10)), "float32"), ("x", "y", "z"))
PLACES = axn.named(jnp.cumsum(jnp.asarray(DRAW.uniform(0.5, 1.5, 64), "float32")), "x")
NEAR = axn.named(((np.arange(64)[:, None] + [-1, 0, 2]) % 64).astype(np.uint8), ("x", "corner"))
HALF = axn.named(np.arange(64).reshape(32, 2), ("x", "corner"))
BACKWARD = axn.named(np.stack([np.arange(64)[::-1], np.roll(np.arange(64), 32)], 1), ("x", "corner"))
WEIGHTS = axn.named(jnp.asarray([0.2, 0.3, 0.5]), "corner")
POSITIONS = axn.named(np.arange(-1, 63, dtype=np.float32) * 0.99, "x")
POINTS = axn.named(np.arange(64, dtype=np.float32), "x")
ROW, SHARD = 4 * 16, 4 * 64 * 16 // 4


def power(x: NamedArray) -> NamedArray:
    return axn.real(x) ** 2 + axn.imag(x) ** 2


def solve(x: NamedArray) -> NamedArray:
    one = axn.ones(x.resolve_axis("x"))
    return axn.linalg.tridiagonal_solve(-one, 3 * one, -x / 2, x, "x")


@dataclasses.dataclass(frozen=True)
class Along:
    """An operation along `x`, and the bytes of the results of its collectives of one kind."""

    call: Callable[[NamedArray], NamedArray]
    kind: str
    bytes: int | None
    planes: bool = False
    lies: bool = True

    @property
    def field(self) -> NamedArray:
        return PLANES if self.planes else X


CASES = {
    "cumsum": Along(lambda x: axn.cumsum(x, "x"), "all-gather", 4 * ROW),
    "nancumsum": Along(lambda x: axn.nancumsum(x, "x"), "all-gather", 4 * ROW),
    "cumprod": Along(lambda x: axn.cumprod(x, "x"), "all-gather", 4 * ROW),
    "gradient": Along(lambda x: axn.gradient(x, "x", spacing=0.5), "collective-permute", 2 * ROW),
    "coordinates": Along(lambda x: axn.gradient(x, "x", spacing=PLACES), "collective-permute", 2 * ROW + 2 * 4),
    "rolling": Along(
        lambda x: axn.rolling(x, "x", axn.Axis("window", 5), "edge").mean("window"), "collective-permute", 4 * ROW
    ),
    "coarsened": Along(
        lambda x: x.unflatten_axis("x", (axn.Axis("x", 16), axn.Axis("window", 4))).mean("window"), "none", 0
    ),
    # The values one way, and complex ones the other.
    "fft": Along(lambda x: power(fft.fft(x, "x")), "all-to-all", 3 * SHARD),
    # Along `y` at once, where 5 terms are left; then the 10 elements of `z` are shared, padded to 12.
    "rfft": Along(lambda x: power(fft.rfft(x, {"x": "kx", "y": "ky"})), "all-to-all", 2 * 8 * 4 * 5 * 12, True, False),
    "irfft": Along(
        lambda x: fft.irfft(fft.rfft(x, ("x", "y")) * 2, ("x", "y")), "all-to-all", 4 * 8 * 4 * 5 * 12, True
    ),
    # From one element before a shard to two after it, around the ends of the axis, too.
    "regrid": Along(lambda x: axn.regrid(x, "x", NEAR, WEIGHTS, "corner"), "collective-permute", 3 * ROW),
    "regrid locally": Along(lambda x: axn.regrid(x, "x", HALF, WEIGHTS["corner", 1:], "corner"), "none", 0),
    "interp": Along(
        lambda x: axn.interp(POSITIONS, POINTS, x, axis="x", left=2.0, right="extrapolate"),
        "collective-permute",
        2 * ROW,
    ),
    "tridiagonal": Along(solve, "all-to-all", None),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_gathered(name: str, mesh: Mesh) -> None:
    along = CASES[name]

    def both(x: NamedArray) -> Any:
        return along.call(x), jax.grad(lambda x: axn.sum(along.call(x) ** 2).array)(x)

    wanted = jax.jit(both)(along.field)
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        x = axn.shard(along.field)
        program = jax.jit(along.call).lower(x).compile()
        moved = bytes_moved(program)
        assert moved.keys() <= {along.kind}, moved
        assert along.bytes in (None, sum(m.bytes for m in moved.values())), moved
        found = program(x), along.call(x)
        if along.lies:
            assert "data" in spec(found[0])
        for result in found:
            assert result.names == wanted[0].names
            np.testing.assert_allclose(result.array, wanted[0].array, rtol=2e-5, atol=1e-4)
        slope = jax.jit(lambda x: both(x)[1])(x)
        scale = np.abs(wanted[1].array).max()
        np.testing.assert_allclose(slope.array, wanted[1].array, rtol=1e-4, atol=3e-6 * scale)


@pytest.mark.oldest
@pytest.mark.parametrize("name", [name for name, along in CASES.items() if along.lies])
def test_a_report_by_names_has_what_the_partitioner_sends(name: str, auto_mesh: Mesh) -> None:
    along = CASES[name]

    def loss(x: NamedArray) -> Any:
        return axn.sum(axn.real(along.call(x)) ** 2).array

    by_names, partitioned = (
        axn.insight.explain(jax.value_and_grad(loss), along.field, mesh=auto_mesh, mapping=MAPPING, by=by)
        for by in ("names", "partitioner")
    )
    sent = [
        sorted((c.kind, c.sent, c.phase, c.reason) for c in report.collectives) for report in (by_names, partitioned)
    ]
    if name == "tridiagonal":  # two diagonals are ones, which XLA makes where they are needed
        gathers, sent[0] = sent[0][:2], sent[0][2:]
        assert sum(sent or 0 for _, sent, *_ in gathers) == by_names.uncertain == 2 * 3 * 4 * 16
    assert sent[0] == sent[1] and all(reason for *_, reason in sent[0])


ANYWHERE: dict[str, Callable[[NamedArray], NamedArray]] = {
    "far": lambda x: axn.regrid(x, "x", BACKWARD, WEIGHTS["corner", 1:], "corner"),
    "computed": lambda x: axn.regrid(x, "x", axn.roll(axn.named(jnp.arange(64), "x"), 3, "x").broadcast_axis(axn.Axis(
        "corner", 3)), WEIGHTS, "corner"),
    "interp": lambda x: axn.interp(x["c", 0] * 40, POINTS, x, axis="x"),
    "columns": lambda x: axn.interp(x * 40, axn.cumsum(x, "x"), x, axis="x", left=0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", ANYWHERE)
def test_look_ups_anywhere_take_all_elements_once(name: str, mesh: Mesh) -> None:
    call = ANYWHERE[name]

    def both(x: NamedArray) -> Any:
        return call(x), jax.grad(lambda x: axn.sum(call(x) ** 2).array)(x)

    wanted = jax.jit(both)(X)
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        program = jax.jit(call).lower(x := axn.shard(X)).compile()
        moved = bytes_moved(program)
        found = jax.block_until_ready((*jax.jit(both)(x), call(x)))
    fields = 2 if name == "columns" else 1  # with the points
    assert moved["all-gather"].bytes <= fields * 4 * SHARD + 4 * ROW + 4 * 64, moved
    assert moved.keys() <= {"all-gather"} or name == "computed", moved
    assert "data" in spec(found[0])
    for one, other in zip(found, (*wanted, wanted[0]), strict=True):
        np.testing.assert_allclose(
            one.rearrange(other.names).array, other.array, rtol=1e-4, atol=1e-5 * np.abs(other.array).max()
        )


def test_look_ups_beyond_the_ends_and_of_all_dtypes(mesh: Mesh) -> None:
    """Values at an end are taken alone: their neighbors may be NaN. Positions are clamped as by indexing."""
    points, y = np.arange(16.0, dtype=np.float32), axn.named(np.linspace(-2, 18, 16).astype(np.float32), "y")
    values = points.copy()
    values[[1, -2]] = np.nan
    shifted = axn.named(np.arange(16)[:, None] + np.array([2, 0]), ("y", "corner"))
    weights = axn.named(np.ones((16, 2), np.float32) / [1, 2], ("y", "corner"))
    calls = {
        "ends": lambda v, at: axn.interp(y, axn.named(points, "x"), v),
        "complex": lambda v, at: axn.interp(y, axn.named(points, "x"), axn.cos(v) * (1 + 2j)),
        "positions": lambda v, at: axn.regrid(v, "x", at, weights, "corner"),
    }
    for name, call in calls.items():
        wanted = jax.jit(call)(axn.named(values, "x"), shifted)
        with jax.set_mesh(mesh), axn.axis_mapping({"x": "data", "y": "data"}):
            found = jax.jit(call)(axn.shard(axn.named(values, "x")), shifted)
        assert spec(found) == ("data",), name
        np.testing.assert_allclose(found.array, wanted.array, rtol=1e-5, err_msg=name)


def test_look_ups_for_few_places_do_not_gather(auto_mesh: Mesh) -> None:
    few, many = (axn.named(jnp.linspace(1.0, 50.0, n), "station") for n in (3, 40))
    with jax.set_mesh(auto_mesh), axn.axis_mapping(MAPPING):
        for places in (few, many):
            program = (
                jax.jit(lambda x, p: axn.interp(p, POINTS, x, axis="x")).lower(x := axn.shard(X), places).compile()
            )
            moved = bytes_moved(program)
            assert sum(m.bytes for m in moved.values()) <= 4 * SHARD, moved
            wanted = axn.interp(places, POINTS, X, axis="x")
            np.testing.assert_allclose(program(x, places).array, wanted.array, rtol=1e-5, atol=1e-5)


def test_reports_by_names_say_which_look_ups_they_do_not_know(auto_mesh: Mesh) -> None:
    places = axn.named(np.linspace(1.0, 50.0, 40), "station")
    with pytest.raises(ValueError, match="places that are not sharded like x in interp"):
        axn.insight.explain(
            lambda x: axn.interp(places, POINTS, x, axis="x"), X, mesh=auto_mesh, mapping=MAPPING, by="names"
        )


def test_what_regrid_refuses() -> None:
    indices = axn.named(np.array([[0, 64]]), ("x", "corner"))
    with pytest.raises(ValueError, match="positions outside of axis 'x' of size 64"):
        axn.regrid(X, "x", indices, WEIGHTS["corner", 1:], "corner")
    with pytest.raises(TypeError, match="`indices` needs integers, got an array of float32"):
        axn.regrid(X, "x", NEAR * 1.0, WEIGHTS, "corner")
    with pytest.raises(ValueError, match="no axis 'k' in"):
        axn.regrid(X, "x", NEAR, WEIGHTS, "k")
    with pytest.raises(ValueError, match="64 in the array, 8 in the argument"):
        axn.regrid(X, axn.Axis("x", 8), NEAR, WEIGHTS, "corner")
    with pytest.raises(ValueError, match="`weights` has axes"):
        axn.regrid(X, "x", NEAR, WEIGHTS.rename({"corner": "k"}), "corner")


@pytest.mark.parametrize("n", [1, 3])
def test_differences_send_a_halo(n: int, auto_mesh: Mesh, explicit_mesh: Mesh) -> None:
    wanted = jnp.diff(X.array, n=n, axis=0)
    for mesh in (auto_mesh, explicit_mesh):
        with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
            program = jax.jit(lambda x: axn.diff(x, "x", n=n).max()).lower(x := axn.shard(X)).compile()
            np.testing.assert_allclose(axn.diff(x, "x", n=n).array, wanted, rtol=1e-4, atol=1e-5)
        if mesh is auto_mesh:
            moved = bytes_moved(program)
            assert "all-gather" not in moved and moved["collective-permute"].bytes == n * ROW


def test_what_has_no_other_axis_is_gathered_and_right(auto_mesh: Mesh) -> None:
    with jax.set_mesh(auto_mesh), axn.axis_mapping(MAPPING):
        x = axn.shard(PLACES)
        for call in (lambda x: power(fft.fft(x, "x")), lambda x: power(fft.rfft(x, "x")), solve):
            np.testing.assert_allclose(jax.jit(call)(x).array, call(PLACES).array, rtol=2e-5, atol=1e-2)


def test_coordinates_go_on_behind_the_ends(mesh: Mesh) -> None:
    places = axn.named(jnp.asarray([*range(15), 0], "float32"), "x")  # the first one is the last one, too

    def slopes(x: NamedArray, places: NamedArray) -> Any:
        return jax.grad(lambda x, places: axn.sum(axn.gradient(x, "x", spacing=places)).array, (0, 1))(x, places)

    wanted = slopes(x := axn.square(places) + 1, places)
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        found = jax.block_until_ready(jax.jit(slopes)(axn.shard(x), axn.shard(places)))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.array, other.array, rtol=1e-5, atol=1e-4)


def test_selectors_of_every_form_send_as_much(auto_mesh: Mesh) -> None:
    forms: list[Any] = [X.resolve_axis("x"), ["x"], ("x",)]
    with jax.set_mesh(auto_mesh), axn.axis_mapping(MAPPING | {"c": "model"}):
        for call in (
            lambda x: axn.gradient(x, forms[0], spacing=PLACES),
            lambda x: axn.gradient(x, forms[1]),
            lambda x: axn.cumsum(x, forms[2]),
        ):
            moved = bytes_moved(jax.jit(call).lower(axn.shard(X)).compile())
            assert sum(m.bytes for m in moved.values()) <= 4 * ROW, moved


def test_totals_stay_sharded_over_axes_without_a_mapping(auto_mesh: Mesh) -> None:
    sharding = jax.NamedSharding(auto_mesh, PartitionSpec("data", "model"))
    with jax.set_mesh(auto_mesh), axn.axis_mapping(MAPPING):
        x = jax.ShapeDtypeStruct(X.array.shape, X.dtype, sharding=sharding)
        program = jax.jit(lambda raw: axn.cumsum(axn.named(raw, X.names), "x").array).lower(x).compile()
    assert bytes_moved(program)["all-gather"].bytes == 4 * ROW // 2


def test_a_mesh_axis_shards_only_the_first_of_two_axes(auto_mesh: Mesh) -> None:
    def call(x: NamedArray) -> Any:
        return fft.fft(x, "x"), axn.cumsum(x, "x"), axn.stencil(lambda u: u(x=-1), {"x": "edge"})(x)

    x = axn.rename(X, {"c": "x", "x": "batch"})
    with jax.set_mesh(auto_mesh), axn.axis_mapping({"batch": "data", "x": "data"}):
        found = jax.jit(call)(x)
    for one, other in zip(found, call(x), strict=True):
        np.testing.assert_allclose(one.array, other.array, rtol=1e-4, atol=1e-4)


def test_new_names_may_be_names_of_other_axes(auto_mesh: Mesh) -> None:
    renames: tuple[dict[str, Any], ...] = ({"x": "c", "c": "x"}, {"x": "k", "c": "x"})
    for new in renames:
        with jax.set_mesh(auto_mesh), axn.axis_mapping(MAPPING):
            found = fft.fft(axn.shard(X), new)
        wanted = fft.fft(X, new)
        assert found.names == wanted.names
        np.testing.assert_allclose(found.array, wanted.array, rtol=1e-4, atol=1e-3)


def test_what_is_refused_without_shards_is_refused_with_them(auto_mesh: Mesh) -> None:
    shorter, (a, b) = axn.Axis("x", 8), X.names
    calls: list[tuple[str, Callable[[NamedArray], Any]]] = [
        ("64 in the array, 8 in the argument", lambda x: fft.fft(x, {shorter: "k"})),
        ("64 in the array, 8 in the argument", lambda x: axn.linalg.tridiagonal_solve(x, x, x, x, shorter)),
        ("would name more than one axis", lambda x: fft.fft(x, {a: b})),
        ("no axis to transform", lambda x: fft.fft(x, ())),
    ]
    ranks: list[Callable[[NamedArray], Any]] = [
        lambda x: axn.cumsum(x, "x"),
        lambda x: fft.fft(x, "x"),
        lambda x: axn.stencil(lambda u: u(x=-1), {"x": 0})(x),
    ]
    calls += [("2 names .* rank 1", lambda x, fn=fn: jax.jit(jax.vmap(fn, 1))(x)) for fn in ranks]
    with jax.set_mesh(auto_mesh), axn.axis_mapping(MAPPING):
        for message, call in calls:
            with pytest.raises(ValueError, match=message):
                call(axn.shard(X))


def test_without_shards_no_mesh_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than a small operation, if there is none."""

    def fail(*_: Any) -> Any:
        raise AssertionError

    for call in (lambda: fft.fft(X, "x"), lambda: axn.cumsum(X, "x"), lambda: axn.gradient(X, "x"), lambda: solve(X)):
        call()
        monkeypatch.setattr(_blocks, "mesh_around", fail)
        call()
        monkeypatch.undo()


def test_diagonals_have_zeros_beside_no_neighbor(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU it does not matter; on GPUs, JAX's function uses them."""
    seen, solved = list[jax.Array](), jax.lax.linalg.tridiagonal_solve
    monkeypatch.setattr(jax.lax.linalg, "tridiagonal_solve", lambda *of: seen.extend(of) or solved(*of))
    one = axn.ones({"x": 5})
    with jax.disable_jit():
        axn.linalg.tridiagonal_solve(one, 3 * one, one, one, "x")
    np.testing.assert_array_equal(seen[0], [0, 1, 1, 1, 1])
    np.testing.assert_array_equal(seen[2], [1, 1, 1, 1, 0])
