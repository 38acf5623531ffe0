"""Every operation and every way to call it, from one table, compared with positional code.

The rows are the `CASES` of the modules `cases_*.py` in this folder. Each runs in the modes below, one after another, so
that they share compiled programs.
"""

from __future__ import annotations

import functools
import importlib
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import axonym as axn
from tests.conftest import DEVICES, MESH_AXES, MESH_SHAPE
from tests.helpers import compilations, spec
from tests.ops.case import SIZES, Case

FOLDER = Path(__file__).parent
CASES: list[Case] = [
    case
    for path in sorted(FOLDER.glob("cases_*.py"))
    for case in importlib.import_module(f"tests.ops.{path.stem}").CASES
]

# Operations that the table cannot hold, and the file that tests them: see `test_completeness.py`.
CREATION = "arange eye full geomspace linspace logspace ones zeros"
ELSEWHERE: dict[str, str] = dict.fromkeys(CREATION.split(), "ops/test_creation.py") | {
    "ds": "ops/test_indexing.py",
    "from_dlpack": "interop/test_dlpack.py",
    "updated_slice": "ops/test_indexing.py",
}


# --- operands and results ---


def _reference(case: Case, *arrays: Any) -> Any:
    """Run plain positional code, without the strict numerics of the tests."""
    with np.errstate(all="ignore"), jax.numpy_rank_promotion("allow"):
        return case.reference(*arrays)


def _draw(case: Case, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng([zlib.crc32(case.id.encode()), seed])
    return [operand.draw(rng, SIZES) for operand in case.operands]


def _named(case: Case, arrays: Sequence[Any]) -> list[axn.NamedArray]:
    return [axn.named(jnp.asarray(x), operand.names) for operand, x in zip(case.operands, arrays, strict=True)]


def _results(result: Any) -> list[Any]:
    """Return the named arrays, arrays and host values in the result of a call."""
    return jax.tree.leaves(result, is_leaf=axn.is_named_array)


def _raw(result: Any) -> list[Any]:
    """Return the same without names."""
    return [x.array if isinstance(x, axn.NamedArray) else x for x in _results(result)]


def _axis_names(result: Any) -> list[tuple[str, ...] | None]:
    return [x.names if isinstance(x, axn.NamedArray) else None for x in _results(result)]


@functools.cache
def _eager(case: Case, seed: int = 0) -> tuple[list[np.ndarray], list[tuple[str, ...] | None]]:
    """Return the values and names of the plain call, to compare other modes with."""
    result = case.call(*_named(case, _draw(case, seed)))
    return [np.asarray(x) for x in _raw(result)], _axis_names(result)


def _assert_close(case: Case, found: Sequence[Any], expected: Sequence[Any], what: str) -> None:
    assert len(found) == len(expected), f"{what}: {len(found)} results instead of {len(expected)}"
    for i, (x, y) in enumerate(zip(map(np.asarray, found), map(np.asarray, expected), strict=True)):
        where = f"{what}, result {i}"
        assert x.shape == y.shape, f"{where}: shape {x.shape} instead of {y.shape}"
        assert x.dtype.kind == y.dtype.kind, f"{where}: dtype {x.dtype} instead of {y.dtype}"
        if x.dtype.kind in "fc":
            np.testing.assert_allclose(x, y, rtol=case.rtol, atol=case.atol, err_msg=where)
        else:
            np.testing.assert_array_equal(x, y, err_msg=where)


def _assert_same(case: Case, result: Any, what: str) -> None:
    values, names = _eager(case)
    assert _axis_names(result) == names, what
    _assert_close(case, _raw(result), values, what)


# --- the modes ---


def _check_eager(case: Case) -> None:
    """Check the values, dtypes and order of axes against the reference; a second call must compile nothing."""
    values, names = _eager(case)
    _assert_close(case, values, jax.tree.leaves(_reference(case, *_draw(case))), "reference")
    if case.names is not None:
        several = bool(case.names) and not isinstance(case.names[0], str)
        assert names == (list(case.names) if several else [case.names])
    arguments = _named(case, _draw(case))
    assert any(_compiles_nothing(case, arguments) for _ in range(3)), "each further call compiled again"


def _compiles_nothing(case: Case, arguments: Sequence[axn.NamedArray]) -> bool:
    """Return whether a call compiles nothing. JAX's own caches are bounded too, so that any single call may miss."""
    with compilations() as compiled:
        case.call(*arguments)
    return not compiled


def _check_layout(case: Case) -> None:
    """Check that operands with reversed axes give the same result, up to the order of its axes."""
    reverse = [
        axn.named(jnp.asarray(x.T), operand.names[::-1]) for operand, x in zip(case.operands, _draw(case), strict=True)
    ]
    result = case.call(*reverse)
    values, names = _eager(case)
    found = []
    for x, wanted in zip(_results(result), names, strict=True):
        if wanted is None:
            found.append(x)
            continue
        assert sorted(x.names) == sorted(wanted)
        found.append(np.transpose(np.asarray(x.array), [x.names.index(n) for n in wanted]))
    _assert_close(case, found, values, "transposed operands")


def _check_jit(case: Case) -> None:
    """Check the same under jit; new operands must not be traced again."""
    traces = 0

    def traced(*arrays):
        nonlocal traces
        traces += 1
        return case.call(*arrays)

    fn = jax.jit(traced)
    _assert_same(case, fn(*_named(case, _draw(case))), "jit")
    fn(*_named(case, _draw(case)))
    assert traces == 1


def _weighted(results: Sequence[Any]) -> Any:
    """Return a scalar that depends on every element of every result, each with another weight."""
    total = 0.0
    for x in results:
        if jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            weights = np.cos(np.arange(np.size(x))).reshape(np.shape(x)) + 0.1
            total += jnp.sum(jnp.real(x) * weights.astype(jnp.real(x).dtype))
            if jnp.iscomplexobj(x):
                total += jnp.sum(jnp.imag(x) * weights.astype(jnp.imag(x).dtype))
    return total


def _differentiable(case: Case) -> tuple[int, ...]:
    chosen = tuple(i for i, x in enumerate(_draw(case)) if np.issubdtype(x.dtype, np.floating))
    assert chosen, f"{case.id} has no float operand to differentiate by: set grad=False"
    return chosen


def _loss(case: Case) -> Callable[..., Any]:
    return lambda *arrays: _weighted(_raw(case.call(*arrays)))


@functools.cache
def _gradients(case: Case) -> list[np.ndarray]:
    found = jax.jit(jax.grad(_loss(case), _differentiable(case)))(*_named(case, _draw(case)))
    assert _axis_names(found) == [case.operands[i].names for i in _differentiable(case)]
    return [np.asarray(x) for x in _raw(found)]


def _check_grad(case: Case) -> None:
    """Check the gradient against the reference's, by JAX if possible, else by finite differences."""
    chosen, arrays = _differentiable(case), _draw(case)

    def reference(*xs):
        return _weighted(jax.tree.leaves(_reference(case, *xs)))

    try:
        expected = jax.jit(jax.grad(reference, chosen))(*map(jnp.asarray, arrays))
    except (jax.errors.JAXTypeError, TypeError):  # the reference uses NumPy
        with jax.enable_x64(True):
            wide = [x.astype(np.float64) if i in chosen else x for i, x in enumerate(arrays)]

            def named(*xs):
                every = [xs[chosen.index(i)] if i in chosen else x for i, x in enumerate(wide)]
                return _loss(case)(*_named(case, every))

            floats = [wide[i] for i in chosen]
            jax.test_util.check_grads(jax.jit(named), floats, order=1, modes=("rev",), atol=1e-4, rtol=1e-4, eps=1e-5)
        return
    _assert_close(case, _gradients(case), expected, "gradient")


def _check_vmap(case: Case) -> None:
    """Check that the call mapped over a leading axis gives the results for each slice."""
    stacked = [np.stack(pair) for pair in zip(_draw(case), _draw(case, 1), strict=True)]
    mapped = jax.jit(jax.vmap(lambda *arrays: _raw(case.call(*_named(case, arrays)))))(*stacked)
    for i in range(2):
        _assert_close(case, [x[i] for x in mapped], _eager(case, i)[0], f"vmap, slice {i}")


# --- the modes on a mesh ---

# The axes that are sharded over each mesh axis, in order of preference. A case has one axis on each mesh axis, so the
# operands agree, and no operand has two axes on one mesh axis.
SPLIT = {"data": ("batch", "row", "x", "pos"), "model": ("embed", "col", "y", "heads", "pos")}


def _placement(case: Case) -> dict[str, str]:
    """Mesh axis by axis name."""
    present = list(dict.fromkeys(n for operand in case.operands for n in operand.names))
    chosen: dict[str, str] = {}
    for mesh_axis, parts in zip(MESH_AXES, MESH_SHAPE, strict=True):
        for name in (*SPLIT[mesh_axis], *present):
            if name in present and name not in chosen and SIZES[name] % parts == 0:
                chosen[name] = mesh_axis
                break
    return chosen


def _sharded(case: Case, mesh: Mesh) -> list[axn.NamedArray]:
    placement, found = _placement(case), []
    for operand, x in zip(case.operands, _draw(case), strict=True):
        spec = PartitionSpec(*(placement.get(n) for n in operand.names))
        found.append(axn.named(jax.device_put(x, NamedSharding(mesh, spec)), operand.names))
    return found


def _spec(x: axn.NamedArray) -> tuple[Any, ...]:
    """Return the entries of the partition spec of a result, one for each axis."""
    return tuple(e[0] if isinstance(e, tuple) and len(e) == 1 else e for e in spec(x))


def _assert_kept(case: Case, result: Any, mesh: Mesh, what: str) -> None:
    """Check that an axis of an operand keeps its sharding in the result if the mesh divides its size."""
    placement = _placement(case)
    for x in _results(result):
        if isinstance(x, axn.NamedArray):
            whole = {n: m for n, m in placement.items() if n in x.names and x.shape[n] % mesh.shape[m] == 0}
            assert dict(zip(x.names, _spec(x), strict=True)).items() >= whole.items(), what


def _on_mesh(case: Case, mesh: Mesh) -> tuple[str, Any]:
    """Run the call on the mesh: the first case of an operation in jit with an active mapping, and others eagerly.

    Wait for the result: see `conftest`.
    """
    arguments = _sharded(case, mesh)
    with jax.set_mesh(mesh):
        if not case.jit or case is not FIRST[case.name]:
            return "eager", jax.block_until_ready(case.call(*arguments))
        with axn.axis_mapping(_placement(case)):
            return "jit", jax.block_until_ready(jax.jit(case.call)(*arguments))


def _check_auto(case: Case, mesh: Mesh) -> None:
    what, result = _on_mesh(case, mesh)
    _assert_same(case, result, what)
    for x in _raw(result):
        if isinstance(x, jax.Array):
            assert len(x.sharding.device_set) == DEVICES, what
    if case is FIRST[case.name]:
        _assert_same(case, jax.block_until_ready(case.call(*_sharded(case, mesh))), "no mesh set")


def _check_explicit(case: Case, mesh: Mesh) -> None:
    what, result = _on_mesh(case, mesh)
    _assert_same(case, result, what)
    _assert_kept(case, result, mesh, what)
    if case is FIRST[case.name]:
        result = jax.block_until_ready(case.call(*_sharded(case, mesh)))
        _assert_same(case, result, "no mesh set")
        _assert_kept(case, result, mesh, "no mesh set")


def _check_explicit_grad(case: Case, mesh: Mesh) -> None:
    """Check that gradients have the shardings of their arrays."""
    arguments = _sharded(case, mesh)
    with jax.set_mesh(mesh), axn.axis_mapping(_placement(case)):
        found = jax.block_until_ready(jax.jit(jax.grad(_loss(case), _differentiable(case)))(*arguments))
    _assert_close(case, _raw(found), _gradients(case), "gradient")
    for x, i in zip(found, _differentiable(case), strict=True):
        assert _spec(x) == _spec(arguments[i])


MODES: dict[str, tuple[Callable[..., None], AxisType | None]] = {
    "eager": (_check_eager, None),
    "layout": (_check_layout, None),
    "jit": (_check_jit, None),
    "grad": (_check_grad, None),
    "vmap": (_check_vmap, None),
    "auto": (_check_auto, AxisType.Auto),
    "explicit": (_check_explicit, AxisType.Explicit),
    "explicit_grad": (_check_explicit_grad, AxisType.Explicit),
}


def _modes(case: Case) -> list[str]:
    """Return the modes to run a case in: for the first case of an operation, all modes that the case allows.

    Further cases call the operation with other arguments. Bugs there show without running each of them in every mode,
    which would double the time of the suite.
    """
    first = case is FIRST[case.name]
    possible = {
        "layout": first and case.layout and any(len(operand.names) > 1 for operand in case.operands),
        "jit": first and case.jit,
        "grad": case.grad,
        "vmap": first and case.vmap and case.jit,
        "auto": first and case.sharded,
        "explicit": case.sharded,
        "explicit_grad": first and case.sharded and case.grad and case.jit,
    }
    return [mode for mode in MODES if possible.get(mode, True)]


FIRST = {case.name: case for case in reversed(CASES)}


def _marks(case: Case, mode: str) -> tuple[pytest.MarkDecorator, ...]:
    """Mark modes as `oldest`: on one device, transformations depend on names and the kernel, not on JAX's version.

    The eager call is quick, and so runs with both versions. Those on meshes are dealt out.
    """
    one_device = ("layout", "jit", "grad", "vmap")
    if case is not FIRST[case.name] or mode in one_device:
        return (pytest.mark.oldest,)
    return (pytest.mark.quick,) if mode == "eager" else ()


@pytest.fixture
def _bounded_memory() -> None:
    """Clear the caches after a hundred calls: for all calls they would take several gigabytes."""
    if _eager.cache_info().currsize > 100:
        _eager.cache_clear()
        _gradients.cache_clear()
        jax.clear_caches()


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        pytest.param(case, mode, id=f"{case.id}-{mode}", marks=_marks(case, mode))
        for case in CASES
        for mode in _modes(case)
    ],
)
@pytest.mark.usefixtures("_bounded_memory")
def test_operation(case: Case, mode: str, auto_mesh: Mesh, explicit_mesh: Mesh) -> None:
    check, mesh = MODES[mode]
    if mesh is None:
        check(case)
    else:
        check(case, auto_mesh if mesh is AxisType.Auto else explicit_mesh)


# --- the table itself ---


def test_case_names_are_unique() -> None:
    ids = [case.id for case in CASES]
    assert sorted(ids) == sorted(set(ids))
