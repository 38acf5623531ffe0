"""Stencils: the same on every mesh, and nothing is sent but halos."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

import axonym as axn
from axonym import NamedArray
from benchmarks.communication import bytes_moved
from tests.helpers import compilations, spec
from tests.manual.solvers import SOLVERS, Solver, heat, laplacian, weno5

MAPPING = {"x": "data", "y": "model"}
DRAW = np.random.default_rng(0)
FIELD = axn.named(jnp.asarray(DRAW.normal(size=(16, 8, 3)), "float32"), ("x", "y", "c"))
PROFILE = axn.named(jnp.asarray(DRAW.normal(size=8), "float32"), "y")


def received(compiled: Any, but: str = "all-reduce") -> int:
    """Return the bytes of halos that a device receives; there must be no other collectives but one kind."""
    moved = bytes_moved(compiled)
    assert moved.keys() <= {"collective-permute", but}, moved
    return moved["collective-permute"].bytes if moved else 0


def values_and_gradients(solver: Solver) -> Callable[..., Any]:
    def loss(fields: Any) -> Any:
        new = solver.step(*fields)
        return axn.sum(sum((x**2 for x in new[1:2] if x.names == new[0].names), start=new[0] ** 2)).array, new

    return jax.value_and_grad(loss, has_aux=True)


def within(found: Any, wanted: Any, ulps: int) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.abs(np.asarray(x) - np.asarray(y)).max() <= ulps * np.spacing(np.abs(y).max()), ulps


@pytest.mark.parametrize("name", SOLVERS)
def test_a_solver_is_the_same_on_every_mesh_and_sends_halos(name: str, auto_mesh: Mesh, explicit_mesh: Mesh) -> None:
    solver = SOLVERS[name]
    ((_, new), gradients), first = jax.jit(values_and_gradients(solver))(solver.start()), True
    for mesh in (auto_mesh, explicit_mesh):
        with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
            fields = axn.shard(solver.start())
            step = jax.jit(values_and_gradients(solver)).lower(fields).compile()
            (_, found), slopes = jax.block_until_ready(step(fields))
            assert spec(found[0]) == spec(fields[0])
            within(found, new, 2)
            within(slopes, gradients, 10)
            halos = 4 * solver.received(16 // 4, 16 // 2)
            assert received(step) == 2 * halos, "as much in the backward pass"
            if first:
                assert received(jax.jit(solver.step).lower(*fields).compile()) == halos
            first = False


@pytest.mark.parametrize("least", [1e-2, 1e-6])
def test_weno_against_float64(least: float, auto_mesh: Mesh, explicit_mesh: Mesh) -> None:
    """With float32, rounding moves its gradients on one device, too: the more, the less smoothness it assumes."""
    solver = dataclasses.replace(SOLVERS["WENO5"], step=functools.partial(weno5, least=least))

    def both(fields: Any) -> list[np.ndarray]:
        (_, new), gradients = jax.block_until_ready(jax.jit(values_and_gradients(solver))(fields))
        return [np.asarray(x.array) for x in (new[0], gradients[0])]

    def error(found: list[np.ndarray]) -> list[float]:
        """Return the largest differences, in units in the last place of the largest value."""
        pairs = zip(found, exact, strict=True)
        return [np.abs(x - y).max() / np.spacing(np.abs(y).max().astype(x.dtype)) for x, y in pairs]

    fields = solver.start()
    with jax.enable_x64(True):
        exact = both(wide := jax.tree.map(lambda x: x.astype("float64"), fields))
    alone = error(both(fields))
    for mesh in (auto_mesh, explicit_mesh):
        with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
            values, gradients = error(both(axn.shard(fields)))
            assert values <= 2 and gradients <= alone[1] + 10
            with jax.enable_x64(True):
                found = both(axn.shard(wide))
        assert found[0].dtype == np.float64
        values, gradients = error(found)
        assert values <= 2 and gradients <= 10


# --- boundaries ---

NINE = [(i, j) for i in (-1, 0, 1) for j in (-2, 0, 1)]


def nine(u: Any) -> NamedArray:
    return axn.stack([(k + 1) * u(x=i, y=j) for k, (i, j) in enumerate(NINE)], "k").sum("k")


def five(u: Any) -> NamedArray:
    return u() + 0.1 * laplacian(u)


BOUNDARIES: dict[str, dict[str, Any]] = {
    "periodic": {"x": "periodic", "y": "periodic"},
    "edge": {"x": "edge", "y": "edge"},
    "reflect": {"y": "reflect", "x": "reflect"},
    "symmetric": {"x": "symmetric", "y": ("symmetric", "edge")},
    "numbers": {"x": (1.5, "edge"), "y": ("reflect", jnp.float32(-2))},
    "corners": {"y": 1.0, "x": 2.0},
    "profile": {"x": (PROFILE, "edge"), "y": "edge"},
    "functions": {"x": lambda edge: -edge, "y": ("periodic",) * 2},
}


def padded(x: NamedArray, boundary: dict[str, Any]) -> np.ndarray:
    """Return the field with two more elements at each end, padded by NumPy one axis after another."""
    found = np.asarray(x.array)
    for axis, given in boundary.items():
        position = x.names.index(axis)
        before, after = (_behind(found, side, position, last) for last, side in enumerate(_pair(given)))
        found = np.concatenate([before, found, after], position)
    return found


def _pair(given: Any) -> tuple[Any, Any]:
    return given if isinstance(given, tuple) else (given, given)


def _behind(x: np.ndarray, side: Any, position: int, last: int) -> np.ndarray:
    """Return the two elements behind one end."""
    if isinstance(side, str):
        mode: Any = {"periodic": "wrap"}.get(side, side)
        whole = np.pad(x, [(2, 2) if n == position else (0, 0) for n in range(x.ndim)], mode=mode)
        return whole.take([-2, -1] if last else [0, 1], position)
    if isinstance(side, NamedArray):
        side = np.asarray(side.array)[:, None]
    value: Any = side(x.take([-1, -2] if last else [1, 0], position)) if callable(side) else side
    return np.broadcast_to(value, [2 if n == position else size for n, size in enumerate(x.shape)])


@pytest.mark.parametrize("name", BOUNDARIES)
def test_boundaries_are_as_numpy_pads(name: str, mesh: Mesh) -> None:
    boundary = BOUNDARIES[name]
    whole = padded(FIELD, boundary)
    wanted = sum((k + 1) * whole[2 + i : 18 + i, 2 + j : 10 + j] for k, (i, j) in enumerate(NINE))
    apply = axn.stencil(nine, boundary)
    np.testing.assert_allclose(apply(FIELD).array, wanted, rtol=1e-5, atol=1e-5)
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        found = apply(axn.shard(FIELD))  # at once, without jit
    np.testing.assert_allclose(found.array, wanted, rtol=1e-5, atol=1e-5)
    assert found.names == FIELD.names and spec(found)[:2] == ("data", "model")


@pytest.mark.parametrize("name", BOUNDARIES)
def test_several_steps_with_one_exchange(name: str, auto_mesh: Mesh) -> None:
    once, thrice = (axn.stencil(five, BOUNDARIES[name], steps=steps) for steps in (1, 3))
    wanted = once(once(once(FIELD)))
    np.testing.assert_allclose(thrice(FIELD).array, wanted.array, rtol=1e-5, atol=1e-5)
    with jax.set_mesh(auto_mesh), axn.axis_mapping(MAPPING):
        step = jax.jit(thrice).lower(x := axn.shard(FIELD)).compile()
        np.testing.assert_allclose(step(x).array, wanted.array, rtol=1e-5, atol=1e-5)
        assert bytes_moved(step)["collective-permute"].count == (6 if name == "profile" else 4)


OF_EDGES: list[Callable[[NamedArray], NamedArray]] = [
    lambda e: 2 - e["x", 0],
    lambda e: e.mean("x"),
    lambda e: 2 * e.mean(),
    lambda e: axn.flip(e, "x") - PROFILE,
    lambda e: axn.cumsum(e, "x"),
    axn.sqrt,
]


def test_the_function_of_a_boundary_sees_the_end_of_the_field(mesh: Mesh) -> None:
    def loss(x: NamedArray) -> Any:
        found = [
            axn.stencil(lambda u: u(x=-2) * u(x=2), {"x": fn}, steps=1 + i % 2)(x) for i, fn in enumerate(OF_EDGES)
        ]
        return axn.sum(axn.stack(found, "case").sum("case") ** 2).array, found

    # A root has no slope at zero: no element is zero at an end, and some are inside.
    x = axn.square(FIELD["c", 0]).at["x", 4:12].set(0.0)
    (_, wanted), slope = jax.value_and_grad(loss, has_aux=True)(x)
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        (_, found), slopes = jax.block_until_ready(jax.jit(jax.value_and_grad(loss, has_aux=True))(axn.shard(x)))
        at_once = axn.stencil(lambda u: u(x=-2), {"x": OF_EDGES[0]})(axn.shard(x))
    for one, other in zip([*found, slopes], [*wanted, slope], strict=True):
        np.testing.assert_allclose(one.rearrange(other.names).array, other.array, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(at_once.array, axn.stencil(lambda u: u(x=-2), {"x": OF_EDGES[0]})(x).array, rtol=1e-6)


def test_a_boundary_is_not_rounded() -> None:
    whole = axn.arange(axn.Axis("x", 4))

    def shifted(x: NamedArray, boundary: Any) -> NamedArray:
        return axn.stencil(lambda u: u(x=-1), {"x": boundary})(x)

    for value in (jnp.nan, 0.5, axn.named(0.5, ()), lambda e: e / 2):
        assert "int32 cannot hold" in refused(lambda value=value: shifted(whole, value))
    assert "complex" in refused(lambda: shifted(whole.astype(float), 1j))
    assert "float32, which a field of bfloat16" in refused(lambda: shifted(whole.astype("bfloat16"), np.float32(1)))
    assert shifted(whole, 7).tolist() == [7, 0, 1, 2] and shifted(whole.astype("bfloat16"), 0.5).dtype == jnp.bfloat16


# --- surroundings ---


def test_inside_shard_map(mesh: Mesh) -> None:
    apply = axn.stencil(nine, BOUNDARIES["numbers"])

    def loss(x: NamedArray) -> Any:
        return axn.sum(apply(x) ** 2).array

    wanted, slope = jax.value_and_grad(loss)(FIELD)
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        inside = jax.jit(axn.shard_map(apply))
        x = axn.shard(FIELD)
        program = inside.lower(x).compile()
        np.testing.assert_allclose(program(x).array, apply(FIELD).array, rtol=1e-5, atol=1e-5)
        # Two elements of `y` from below, one from above, with corners; one element of `x` from each side.
        assert received(program) == 4 * 3 * (2 * 4 + 3 * (4 + 2))
        value, found = jax.jit(jax.value_and_grad(lambda x: axn.sum(inside(x) ** 2).array))(x)
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
        np.testing.assert_allclose(found.array, slope.array, rtol=1e-4, atol=1e-4)


def test_transforms(mesh: Mesh) -> None:
    def smooth(x: NamedArray) -> NamedArray:
        return axn.stencil(five, BOUNDARIES["numbers"])(x)

    def scanned(x: NamedArray) -> NamedArray:
        return jax.lax.scan(jax.checkpoint(lambda x, _: (smooth(x), None)), x, length=3)[0]

    def mapped(x: NamedArray) -> NamedArray:
        # Over a sharded axis.
        return axn.vmap(axn.stencil(lambda u: u(x=-1) + 2 * u(x=1), {"x": (0.5, "edge")}), "y")(x)

    def changed(x: NamedArray) -> NamedArray:
        return jax.jvp(smooth, (x,), (x * x,))[1]

    for fn in (scanned, mapped, changed):
        slope = jax.grad(lambda x, fn=fn: axn.sum(fn(x) ** 2).array)
        with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
            program = jax.jit(lambda x, fn=fn, slope=slope: (fn(x), slope(x))).lower(x := axn.shard(FIELD)).compile()
            found = jax.block_until_ready(program(x))
            assert received(program) > 0
        for x, wanted in zip(found, (fn(FIELD), slope(FIELD)), strict=True):
            np.testing.assert_allclose(
                x.rearrange(FIELD.names).array, wanted.rearrange(FIELD.names).array, rtol=1e-4, atol=1e-4
            )


def test_an_eager_call_compiles_once() -> None:
    def call(x: NamedArray) -> NamedArray:
        return axn.stencil(lambda u: u(x=-1) + u(x=1), {"x": lambda edge: -edge})(x)

    call(FIELD)
    with compilations() as seen:
        call(FIELD)
    assert not [event for event in seen if "backend_compile" in event]


def test_sharded_over_two_mesh_axes_and_one_way() -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    upwind = axn.stencil(lambda u: u() - u(x=-1), {"x": "periodic"})
    with jax.set_mesh(mesh), axn.axis_mapping({"x": ("a", "b")}):
        program = jax.jit(upwind).lower(x := axn.shard(FIELD)).compile()
        np.testing.assert_allclose(program(x).array, FIELD.array - jnp.roll(FIELD.array, 1, 0), rtol=1e-6)
    assert received(program) == 4 * 8 * 3


# --- functions of blocks ---


def test_map_overlap(mesh: Mesh) -> None:
    kernel = axn.named([0.125, 0.5, 0.25], "x")

    def fn(u: NamedArray, v: NamedArray) -> tuple[NamedArray, NamedArray]:
        # One result without halo, one with it; new arrays inside have the sizes of blocks.
        return axn.convolve(u, kernel, "x", mode="valid"), u + axn.roll(v, 1, "x") + axn.zeros(u.axes)

    apply = axn.map_overlap(fn, {"x": 1, "y": (0, 2)}, {"x": "edge", "y": ("reflect", 0.0)})
    wanted = apply(FIELD, 2 * FIELD)
    whole = np.pad(np.asarray(FIELD.array), [(1, 1), (0, 0), (0, 0)], mode="edge")
    np.testing.assert_allclose(
        wanted[0].rearrange(FIELD.names).array, 0.25 * whole[:-2] + 0.5 * whole[1:-1] + 0.125 * whole[2:], rtol=1e-5
    )
    with jax.set_mesh(mesh), axn.axis_mapping(MAPPING):
        program = jax.jit(apply).lower(x := axn.shard(FIELD), 2 * x).compile()
        found = jax.block_until_ready(program(x, 2 * x))
        assert "all-gather" not in bytes_moved(program)
    for x, y in zip(found, wanted, strict=True):
        assert x.names == y.names and "data" in spec(x)
        np.testing.assert_allclose(x.array, y.array, rtol=1e-5, atol=1e-5)


def test_map_overlap_refuses_other_sizes(auto_mesh: Mesh) -> None:
    call = axn.map_overlap(lambda u: axn.diff(u, "x"), {"x": 1}, {"x": "edge"})
    assert "has size 17 in a result" in refused(lambda: call(FIELD))
    with jax.set_mesh(auto_mesh), axn.axis_mapping(MAPPING):
        assert "has size 5 in a result" in refused(lambda: call(axn.shard(FIELD)))


# --- reports ---


@pytest.mark.oldest
@pytest.mark.parametrize("steps", [1, 2])
def test_a_report_by_names_has_each_halo(steps: int, auto_mesh: Mesh) -> None:
    def loss(u: NamedArray) -> Any:
        return axn.sum(axn.stencil(five, {"x": "edge", "y": (0.0, "reflect")}, steps=steps)(u) ** 2).array

    reports = [
        axn.insight.explain(jax.value_and_grad(loss), FIELD, mesh=auto_mesh, mapping=MAPPING, by=by)
        for by in ("names", "partitioner")
    ]
    sends = [
        sorted((c.phase, c.axes, c.sent, c.reason) for c in r.collectives if c.kind == "collective-permute")
        for r in reports
    ]
    assert sends[0] == sends[1] and len(sends[0]) == 8
    assert sends[0][0][-1] == "passes the halo of x, which is sharded over data, to neighbors"


SCALING = """
import jax
import axonym as axn
from axonym.insight import explain
from tests.manual.solvers import SOLVERS

jax.config.update("jax_num_cpu_devices", 512)
for n in (8, 512):
    mesh = jax.make_mesh((n // 2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2,
                         devices=jax.devices()[:n])
    sizes = {"x": 4 * (n // 2), "y": 16, "q": 9}
    for name, solver in SOLVERS.items():
        names = [tuple(a.name for a in axes) for axes in solver.fields]
        fields = [axn.named(jax.ShapeDtypeStruct([sizes[a] for a in own], "float32"), own) for own in names]
        report = explain(solver.step, *fields, mesh=mesh, mapping={"x": "data", "y": "model"}, by="partitioner")
        assert {c.kind for c in report.collectives} == {"collective-permute"}, name
        assert sum(c.sent for c in report.collectives) == 4 * solver.received(4, 8), (name, n)
"""


@pytest.mark.oldest
def test_a_device_sends_as_much_on_512_devices() -> None:
    """By the formula of the solver, in the partitioned program: with a shard of 4 by 8 on 8 devices, and on 512."""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", SCALING], cwd=root, timeout=300, check=True)


# --- errors ---


untyped: Any = lambda x: x  # for calls that a type checker would refuse


def refused(fn: Callable[[], Any]) -> str:
    with pytest.raises((ValueError, TypeError)) as found:
        fn()
    return str(found.value)


def test_errors(auto_mesh: Mesh) -> None:
    def one(u: Any) -> NamedArray:
        return u(x=-1)

    assert "'edge'" in refused(lambda: axn.stencil(one, {})(FIELD))
    assert "no axis 'z'" in refused(lambda: axn.stencil(lambda u: u(z=1), {"x": "edge"})(FIELD))
    assert "no field has axis 'xx'" in refused(lambda: axn.stencil(one, {"xx": "edge"})(FIELD))
    assert "cannot be 'wrap'" in refused(lambda: axn.stencil(one, {"x": "wrap"})(FIELD))
    assert "periodic at both ends" in refused(lambda: axn.stencil(one, {"x": ("periodic", 0.0)})(FIELD))
    assert "one for both ends" in refused(lambda: axn.stencil(one, {"x": (0.0,) * 3})(FIELD))
    assert "cannot be None" in refused(lambda: axn.stencil(one, {"x": None})(FIELD))
    assert "by axis, such as" in refused(lambda: axn.map_overlap(one, {"x": 1}, untyped(None))(FIELD))
    assert "only axes of field 0" in refused(lambda: axn.stencil(one, {"x": axn.zeros({"z": 2})})(FIELD))
    assert "only axes of field 0" in refused(lambda: axn.stencil(one, {"x": axn.zeros({"y": 9})})(FIELD))
    assert "Fields on staggered" in refused(lambda: axn.stencil(lambda u, v: u(), {"x": 0})(FIELD, axn.ones({"x": 17})))
    assert "an integer, got float" in refused(lambda: axn.stencil(one, {"x": 0}, steps=untyped(1.5)))
    assert "or a pair" in refused(lambda: axn.map_overlap(one, {"x": untyped(1.5)}, {}))
    assert "Did you mean 'x'" in refused(lambda: axn.map_overlap(one, {"xx": 1}, {"x": 0})(FIELD.rename({"y": "xy"})))
    shorter = axn.Axis("x", 8)
    for call in (
        lambda: axn.stencil(one, {shorter: 0})(FIELD),
        lambda: axn.map_overlap(one, {shorter: 1}, {"x": 0})(FIELD),
        lambda: axn.rolling(FIELD, shorter, axn.Axis("window", 2), 0),
    ):
        assert "conflicting sizes: 16 in the array, 8 in the argument" in refused(call)
    assert "an integer" in refused(lambda: axn.stencil(lambda u: u(x=0.5), {"x": "edge"})(FIELD))
    assert "2 boundaries for 1 fields" in refused(lambda: axn.stencil(one, [{"x": "edge"}] * 2)(FIELD))
    assert "no such axis" in refused(lambda: axn.stencil(one, {"x": FIELD})(FIELD))
    assert "or fewer" in refused(lambda: axn.stencil(one, {"x": lambda edge: 0.0})(FIELD))
    assert "has no axis 'x'" in refused(lambda: axn.map_overlap(lambda u: u.sum("x"), {"x": 1}, {"x": "edge"})(FIELD))
    assert "returns its first fields" in refused(lambda: axn.stencil(lambda u: None, {"x": "edge"}, steps=2)(FIELD))
    wide = axn.stencil(lambda u: u(x=-5), {"x": "edge"})
    wide(FIELD)
    with jax.set_mesh(auto_mesh), axn.axis_mapping(MAPPING):
        assert "has 4 on each of 4 devices along data" in refused(lambda: wide(axn.shard(FIELD)))


def test_without_a_mapping_it_warns_in_jit(auto_mesh: Mesh) -> None:
    call = axn.stencil(five, {"x": "edge", "y": "edge"})
    with jax.set_mesh(auto_mesh):
        with pytest.warns(UserWarning, match="no mapping is active"):
            found = jax.jit(call)(FIELD)
        x = axn.named(jax.device_put(FIELD.array, jax.NamedSharding(auto_mesh, PartitionSpec("data"))), FIELD.names)
        np.testing.assert_allclose(call(x).array, found.array, rtol=1e-6)  # at once, the array says where it lies


def test_an_axis_may_have_any_name() -> None:
    x = axn.named([1.0, 2.0], "self")
    assert axn.stencil(lambda u: u(**{"self": -1}), {"self": 0})(x).tolist() == [0, 1]


def test_heat_keeps_its_layout() -> None:
    (found,) = heat(FIELD)
    assert found.names == FIELD.names and found.dtype == FIELD.dtype
