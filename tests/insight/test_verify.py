"""`verify` evaluates partitioned programs, and finds what differs; `python -m tests.insight.verified` checks more."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import axonym as axn
from axonym.custom_partitioning import partitioned
from axonym.insight import verify
from axonym.insight._compiling import around_partitioning
from axonym.insight._hlo import HloProgram
from axonym.insight._hlo_devices import tiling
from axonym.insight._hlo_values import Machine, listed
from axonym.insight.verifying import compare_programs
from tests.insight import verified

BUGS = Path(__file__).parents[2] / "docs" / "compiler_bugs.md"


def placed(mesh: Any, shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


# --- steps ---


@pytest.mark.parametrize(
    "name",
    [
        "plain JAX, Auto",
        "plain JAX, Explicit",
        "mixture experts, Auto",
        "classifier height, Auto",
        "custom_partitioning 0, Auto",
        "generate int4 in groups of 4, Auto",
        "pallas_kernel 2, Auto",
    ],
)
def test_steps_of_examples_are_the_same(name: str) -> None:
    case = verified.STEPS[name]()
    found = verified.verified(case)
    assert (found.same, found.devices, found.scales) == (True, case[0].size, (1.0, 1 / 16, 16.0)), found


@pytest.mark.parametrize(("name", "count"), [("plain JAX", 8), ("pipeline", 2)])
def test_planted_bugs_are_found(name: str, count: int) -> None:
    found = verified.planted(verified.STEPS[f"{name}, Auto"](), count)
    missed = [what for what, verdict, equal in found if verdict.same is not False and not equal]
    assert len(found) == count and not missed, missed
    assert all(verdict.first is not None for _, verdict, equal in found if not equal)


def test_a_missing_sum_is_named(auto_mesh: Mesh) -> None:
    x, w = axn.ones({"batch": 8, "embed": 16}), axn.ones({"embed": 16, "mlp": 32})
    with jax.set_mesh(auto_mesh):
        step = axn.named_jit(
            lambda x, w: axn.dot(x, w, axis="embed"), {"embed": "model"}, in_placement={"embed": "model"}
        )
        texts = around_partitioning(step.lower(x, w))
    line = next(line for line in texts[1].splitlines() if " all-reduce(" in line)
    head, _, rest = line.partition("all-reduce(")
    changed = line, f"{head}copy({rest.partition(')')[0]}), {rest[rest.index('metadata=') :]}"
    before, after = HloProgram(texts[0], 8), HloProgram(texts[1].replace(*changed), 8)
    found = compare_programs("dot", before, after, mesh={"data": 4, "model": 2})
    assert found.first is not None and found.first.source is not None
    assert found.first.source.function == "test_a_missing_sum_is_named.<locals>.<lambda>"
    assert str(found).startswith(
        "dot: not kept by the compiler for 8 devices: result[0]\n  dot[batch, embed; embed, mlp -> "
    )
    assert "gives a partial sum over model, which nothing adds up" in found.first.what


# --- bugs of the compiler ---


def test_each_bug_that_ends_the_process_does() -> None:
    """The table of the page loses a row when this fails."""
    page = BUGS.read_text()
    setup = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)[0]
    helper, *programs = re.findall(r"^```py\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert len(programs) == page.count("(#programs-that-end-the-process)")
    started = [
        subprocess.Popen(
            [sys.executable, "-c", setup + helper + program], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        for program in programs
    ]
    for process, program in zip(started, programs, strict=True):
        _, said = process.communicate(timeout=300)
        assert process.returncode < 0 and b"Check fail" in said, (
            f"it does not end the process:\n{program}\n{said[-2000:]!r}"
        )


@pytest.mark.parametrize("size", [8, 12])
def test_the_verdict_on_a_scan_is_that_of_running_it(size: int, auto_mesh: Mesh) -> None:
    def gradient(x: jax.Array, given: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: jax.lax.associative_scan(jnp.multiply, x), x)[1](given)[0]

    x, given = np.random.default_rng(0).uniform(0.5, 1.5, (2, size)).astype(np.float32)
    expected = jax.jit(gradient)(x, given)
    for spec in (PartitionSpec("data"), PartitionSpec()):
        args = (
            jax.device_put(x, NamedSharding(auto_mesh, spec)),
            jax.device_put(given, NamedSharding(auto_mesh, PartitionSpec())),
        )
        ran = jax.block_until_ready(jax.jit(gradient)(*args))
        found = verify(gradient, *args)
        assert found.same == np.allclose(ran, expected, rtol=1e-4), found
        if not found.same:
            assert found.first is not None and found.first.operation == "pad" and found.first.source is not None
            assert found.first.source.line == gradient.__code__.co_firstlineno + 1


# --- meshes ---


def test_a_mesh_that_is_not_here() -> None:
    mesh = AbstractMesh((16, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    args = placed(mesh, (32, 16), "data"), placed(mesh, (16, 8), None, "model")
    for found in (verify(jnp.dot, *args), verify(jnp.dot, *map(jnp.ones, ((32, 16), (16, 8))), mesh=mesh)):
        assert (found.same, found.devices) == (True, 64)
    x = axn.ones({"batch": 64, "embed": 4})
    assert verify(lambda x: axn.cumsum(x, "batch"), x, mapping={"batch": "data"}, mesh=mesh).same


def test_an_uneven_axis_and_partly_manual_code(auto_mesh: Mesh) -> None:
    def rows(x: jax.Array) -> jax.Array:
        spec = PartitionSpec("data")
        scaled = lambda x: x / jax.lax.psum(jnp.sum(x * x), "data")
        y = jax.shard_map(scaled, mesh=auto_mesh, in_specs=spec, out_specs=spec, axis_names={"data"})(x)
        return jax.lax.with_sharding_constraint(y[1:] * 2, NamedSharding(auto_mesh, PartitionSpec(None, "model")))

    assert verify(rows, placed(auto_mesh, (8, 6), "data", "model")).same


# --- what is not known ---


def test_what_is_not_known_is_refused(auto_mesh: Mesh) -> None:
    found = verify(lambda x: jnp.linalg.eigvalsh(x), placed(auto_mesh, (8, 4, 4), "data"))
    assert found.same is None and found.unknown == ("custom-call to lapack_ssyevd_ffi",)
    found = verify(lambda x: jnp.log(-jnp.abs(x) - 1), placed(auto_mesh, (8,), "data"))
    assert (found.same, found.unknown) == (None, ("results that are NaN, at all inputs tried",))
    with pytest.raises(ValueError, match=r"the sharding \{unreduced\}"):
        tiling("{unreduced}", 1, 8)


def test_ill_conditioned_elements_are_left_out(auto_mesh: Mesh) -> None:
    """A rounding of the arguments moves the sine of a huge sum as far as another order of summing does."""

    def step(x: jax.Array) -> dict[str, jax.Array]:
        return {"huge": jnp.sin(1e15 * jnp.sum(x)), "rounded": jnp.round(1e15 * jnp.sum(x)).astype(int), "y": x * 2}

    x = placed(auto_mesh, (64,), ("data", "model"))
    found = verify(step, x)
    assert found.same and "result['huge']" in found.ill_conditioned and "result['y']" not in found.ill_conditioned
    assert "but for elements that a rounding of the arguments moves as far: result['huge']" in str(found)
    texts = around_partitioning(jax.jit(step).lower(x))
    broken = HloProgram(texts[1].replace("constant(2)", "constant(3)"), 8)
    assert compare_programs("step", HloProgram(texts[0], 8), broken).different == ("result[2]",)


GROUPS = {
    "{{0,1},{2,3},{4,5},{6,7}}": "has groups of [2] devices, which do not fit its sizes",
    "{{0,1,2,3},{4,5},{6,7}}": "has groups of [2, 4] devices, which do not fit its sizes",
    "{{0,1,2,3},{4,5,6,6}}": "does not have each of 8 devices in one group",
    "{{0,1,2,3}}": "does not have each of 8 devices in one group",
    "{{0,1,2,3},{4,5,6,9}}": "does not have each of 8 devices in one group",
}


@pytest.mark.parametrize("groups", GROUPS)
def test_groups_of_devices_that_do_not_fit(groups: str, auto_mesh: Mesh) -> None:
    x = placed(auto_mesh, (8,), "data")
    whole = NamedSharding(auto_mesh, PartitionSpec())
    before, after = around_partitioning(jax.jit(lambda x: x * 2, out_shardings=whole).lower(x))
    wrong, count = re.subn(r"replica_groups=.*?(, dimensions)", rf"replica_groups={groups}\1", after)
    assert count == 1, after
    found = compare_programs("f", HloProgram(before, 8), HloProgram(wrong, 8))
    assert found.same is False and found.first is not None, found
    assert found.first.what.endswith(f"in the partitioned program, it {GROUPS[groups]}")


def test_pairs_of_devices_that_do_not_fit(auto_mesh: Mesh) -> None:
    x = placed(auto_mesh, (8,), "data")
    before, after = around_partitioning(jax.jit(lambda x: jnp.roll(x, 2)).lower(x))
    for pairs in ("{{0,2},{1,2}}", "{{0,1},{0,2}}", "{{0,9}}"):
        wrong, count = re.subn(r"source_target_pairs=\{\{.*?\}\}", f"source_target_pairs={pairs}", after)
        assert count, after
        found = compare_programs("f", HloProgram(before, 8), HloProgram(wrong, 8))
        assert found.same is False and "sends or receives twice" in str(found), found


def test_inputs_have_no_roots_of_negative_numbers(auto_mesh: Mesh) -> None:
    """Moments that a root is taken of become positive, others keep their signs."""
    texts = around_partitioning(
        jax.jit(lambda m, v: (m / jnp.sqrt(0.9 * v + 0.1 * m * m), jnp.sign(m))).lower(
            *(placed(auto_mesh, (64,), "data"),) * 2
        )
    )
    before, after = (HloProgram(text, 8) for text in texts)
    assert compare_programs("f", before, after).scales == (1.0, 1 / 16, 16.0)
    given = np.array([-1.0, 2.0] * 32), np.array([0.0, 3.0] * 32)
    signs = listed(Machine(before).run([x[None] for x in given]))[1]
    assert Counter(signs.ravel().tolist()) == {-1.0: 32, 1.0: 32}


# --- operations ---

KEY = jax.random.key(0)
OPERATIONS: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "integers": (
        lambda x: (jnp.int32(x * 100) // 7 % 5, jnp.int32(x * 9) >> 2, jnp.uint32(x * 9) << 3, ~jnp.int8(x)),
        ((8, 4),),
    ),
    "bits": (
        lambda x: jax.lax.bitcast_convert_type(x, jnp.int32) ^ jnp.int32(jax.lax.population_count(jnp.uint8(3))),
        ((8,),),
    ),
    "random": (lambda x: jax.random.uniform(KEY, x.shape) + x, ((8, 4),)),
    "sorts": (lambda x: (jnp.sort(x, 0), jnp.argsort(-x, 1), jax.lax.top_k(x, 2), jnp.median(x, 0)), ((8, 5),)),
    "extremes": (lambda x: (jnp.argmax(x, 0), jnp.argmin(x, 1), jnp.nanmax(x), jax.lax.cummax(x, 0)), ((8, 5),)),
    "gathers": (
        lambda x, y: (
            x[jnp.argsort(y[:, 0])],
            jnp.take_along_axis(x, jnp.argsort(y, 0), 0),
            x.at[jnp.argsort(y[:, 1])[:3]].add(2),
        ),
        ((8, 4), (8, 4)),
    ),
    "slices": (
        lambda x: (
            jax.lax.dynamic_slice(x, (jnp.argmax(x[:, 0]), 0), (3, 2)),
            jnp.roll(x, 3, 0),
            jnp.flip(x, 0),
            jnp.tril(x),
        ),
        ((8, 4),),
    ),
    "complex": (
        lambda x, y: (
            jnp.fft.fft(x + 1j * y, axis=0),
            jnp.abs(jnp.fft.rfft2(x)),
            jnp.angle((x + 1j * y) / (y - 2j)),
            jnp.fft.irfft((x - 2j * y) * jnp.array([[1j, 2, 3 - 1j, 1]])),
        ),
        ((8, 4), (8, 4)),
    ),
    "small integers": (lambda x: (jnp.round(x * 3).astype(jnp.int4) * 2).astype(jnp.int4).astype(float), ((8, 4),)),
    "loops": (
        lambda x: jax.lax.fori_loop(0, 3, lambda i, x: jnp.where(i == 1, x, jnp.tanh(x @ x.T @ x)), x),
        ((8, 4),),
    ),
    "branches": (lambda x: jax.lax.switch(jnp.int32(jnp.sum(x) > 0), [jnp.cos, jnp.exp], x), ((8, 4),)),
    "convolution": (
        lambda x, w: jax.lax.conv_general_dilated(x, w, (2,), ((2, 1),), (2,), (2,), feature_group_count=2),
        ((8, 4, 9), (6, 2, 3)),
    ),
    "pooling": (
        jax.grad(lambda x: jnp.sum(jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2), (1, 2), "SAME") ** 2)),
        ((8, 6),),
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_evaluated_as_they_run(name: str, auto_mesh: Mesh) -> None:
    """Both programs are evaluated; so, here, the one before partitioning is also compared with running it."""
    fn, shapes = OPERATIONS[name]
    rng = np.random.default_rng(0)
    args = [
        jax.device_put(
            rng.normal(size=s).astype(np.float32),
            NamedSharding(auto_mesh, PartitionSpec("data" if s[0] == 8 else None)),
        )
        for s in shapes
    ]
    before = HloProgram(around_partitioning(jax.jit(fn).lower(*args))[0], 8)
    values = listed(Machine(before).run([np.asarray(x, np.float64)[None] for x in args]))
    for value, expected in zip(values, jax.tree.leaves(jax.block_until_ready(jax.jit(fn)(*args))), strict=True):
        np.testing.assert_allclose(value[0], np.asarray(expected), rtol=1e-4, atol=1e-5)
    found = verify(fn, *args)
    assert found.same, found


def test_an_operation_with_its_own_partitioning(auto_mesh: Mesh) -> None:
    """Also one whose function for a shard forgets the sum over devices; two that nothing tells apart are not known."""

    def total(factor: float) -> Any:
        @partitioned("b v -> b", reduced="v")
        def total(x: jax.Array) -> jax.Array:
            return factor * jnp.sum(x, -1)

        return total

    x = placed(auto_mesh, (8, 6), "data", "model")
    with jax.set_mesh(auto_mesh):
        assert verify(lambda x: axn.top_k(axn.named(x, ("b", "v")), "v", 2), x).same
        found = verify(lambda x: jnp.tanh(total(1.0)(x)), x)
        both = verify(lambda x: (total(1.0)(x), total(2.0)(x)), x)
    assert found.same is False and found.first is not None and found.first.operation == "custom_partitioning", found
    assert "gives a partial sum over model" in found.first.what
    assert both.same is None and "one of 2 operations" in both.unknown[0], both


def test_scatter_of_several_arrays() -> None:
    text = """HloModule f, num_partitions=2

%both (a: f32[], b: s32[], c: f32[], d: s32[]) -> (f32[], s32[]) {
  %a = f32[] parameter(0)
  %b = s32[] parameter(1)
  %c = f32[] parameter(2)
  %d = s32[] parameter(3)
  %e = f32[] add(%a, %c)
  %f = s32[] maximum(%b, %d)
  ROOT %g = (f32[], s32[]) tuple(%e, %f)
}

ENTRY %main (x: f32[4], y: s32[4], i: s32[3,1], u: f32[3], v: s32[3]) -> (f32[4], s32[4]) {
  %x = f32[4] parameter(0)
  %y = s32[4] parameter(1)
  %i = s32[3,1] parameter(2)
  %u = f32[3] parameter(3)
  %v = s32[3] parameter(4)
  ROOT %s = (f32[4], s32[4]) scatter(%x, %y, %i, %u, %v), inserted_window_dims={0}, ATTRIBUTES
}
"""
    text = text.replace("ATTRIBUTES", "scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%both")
    given = np.ones(4), np.zeros(4, np.int32), np.array([[1], [1], [9]]), np.array([2.0, 3, 4]), np.array([7, 5, 6])
    x, y = listed(Machine(HloProgram(text, 2)).run([a[None] for a in given]))
    assert (x.tolist(), y.tolist()) == ([[1, 6, 1, 1]], [[0, 7, 0, 0]])


def test_masks_do_not_loosen_the_tolerance(auto_mesh: Mesh) -> None:
    """A bug of convolutions is found beside elements that stand for infinity."""

    def gradient(x: jax.Array, weight: jax.Array) -> jax.Array:
        found = jax.grad(lambda w: jnp.sum(jax.lax.conv(x, w, (1,), "SAME") ** 2))(weight)
        return jnp.where(jnp.tri(4, 3) > 0, found, jnp.finfo(jnp.float32).min)

    arguments = placed(auto_mesh, (2, 4, 16), None, None, "data"), placed(auto_mesh, (4, 4, 3))
    assert verify(gradient, *arguments).same is False
