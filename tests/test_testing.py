"""`axonym.testing` finds functions that depend on their sharding, and accepts those that do not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import axonym as axn
from axonym.custom_partitioning import partitioned
from axonym.testing import check_shard_invariance
from tests.insight import cases

X = axn.random.normal(jax.random.key(0), {"batch": 8, "embed": 16})
W = axn.random.normal(jax.random.key(1), {"embed": 16, "mlp": 8})


def test_plain_functions_pass_on_every_placement() -> None:
    def layer(x: axn.NamedArray, w: axn.NamedArray) -> Any:
        hidden = axn.nn.softmax(axn.dot(x, w, axis="embed"), "mlp")
        return {"hidden": hidden, "top": axn.argmax(hidden, "mlp"), "count": 3}

    result = check_shard_invariance(layer, X, W, draws=8)
    assert result.compared >= 6 and result.compared + len(result.refusals) == 8
    assert all("'batch' and 'mlp' of the result would both be sharded over" in m for m in result.refusals.values())


def test_missing_psum_is_found_and_made_small() -> None:
    def forgetful(x: axn.NamedArray, w: axn.NamedArray) -> Any:
        return axn.shard_map(lambda x, w: axn.dot(x, w, axis="embed"), check_vma=False)(x, w)

    with pytest.raises(AssertionError) as raised:
        check_shard_invariance(forgetful, X, W)
    message = str(raised.value)
    assert "forgetful depends on how it is distributed" in message and "the result.array differs" in message
    mesh = "axn.make_mesh({'data': 2, 'model': 1})", "axn.make_mesh({'data': 1, 'model': 2})"
    assert any(m in message for m in mesh)
    assert "{'embed': 'data'}" in message or "{'embed': 'model'}" in message


def test_psum_in_place_passes() -> None:
    def summed(x: axn.NamedArray, w: axn.NamedArray) -> Any:
        return axn.shard_map(lambda x, w: axn.psum(axn.dot(x, w, axis="embed"), "embed"))(x, w)

    result = check_shard_invariance(summed, X, W, draws=20)
    assert result.compared and result.refusals, "mappings that leave embed alone are refused"
    assert all(
        "psum: 'embed' is neither" in m or "are both sharded over mesh axis" in m for m in result.refusals.values()
    )


def test_wrong_gradients_are_found() -> None:
    @jax.custom_vjp
    def double(x: jax.Array) -> jax.Array:
        return 2 * x

    def backward(_: None, g: jax.Array) -> tuple[jax.Array]:
        return (g * (2 + jax.sharding.get_abstract_mesh().size - 1),)

    double.defvjp(lambda x: (double(x), None), backward)

    def doubled(x: axn.NamedArray) -> axn.NamedArray:
        return axn.named(double(x.array), x.axes)

    with pytest.raises(AssertionError, match=r"the gradient.* differs"):
        check_shard_invariance(doubled, X)
    assert check_shard_invariance(doubled, X, gradients=False, draws=4).compared == 4


def test_an_axis_may_have_several_sizes() -> None:
    kernel = axn.ones({"batch": 3})
    result = check_shard_invariance(lambda x, k: x.sum() + k.sum(), X, kernel, draws=4, gradients=False)
    assert result.compared == 4


def test_empty_results_are_compared() -> None:
    assert check_shard_invariance(lambda x: x["batch", :0], X, draws=6).compared == 6


def test_weakly_typed_arguments_stay_weak(auto_mesh: Mesh) -> None:
    """A reference that got strong copies would compute in other dtypes."""
    weak, narrow = jnp.full((8, 2), 3), jnp.ones((8, 2), jnp.int8)
    assert weak.weak_type
    sharded = jax.device_put(weak, NamedSharding(auto_mesh, P("data")))
    with jax.set_mesh(auto_mesh):
        check_shard_invariance(lambda x, y: x + y, sharded, narrow, reference=lambda x, y: y + x, gradients=False)


def test_random_draws_that_depend_on_the_device_are_found() -> None:
    def local_noise(x: axn.NamedArray, key: jax.Array) -> Any:
        def noisy(x: axn.NamedArray) -> Any:
            return x + axn.named(jax.random.normal(key, x.array.shape), x.names)

        return axn.shard_map(noisy)(x)

    with pytest.raises(AssertionError, match="depends on how it is distributed"):
        check_shard_invariance(local_noise, X, jax.random.key(3))

    def noise(x: axn.NamedArray, key: jax.Array) -> Any:
        return x + axn.random.normal(key, x.axes)

    assert check_shard_invariance(noise, X, jax.random.key(3), draws=6).compared == 6


def test_the_same_seed_draws_the_same_placements() -> None:
    seen: list[Any] = []

    def watch(x: axn.NamedArray) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        seen.append((mesh.shape_tuple, mesh.axis_types, str(axn.current_mapping())))
        return x

    for _ in range(2):
        check_shard_invariance(watch, X, draws=8, gradients=False, seed=5)
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]
    assert any(len(set(kinds)) == 2 for _, kinds, _ in seen), "mixed meshes are drawn too"
    assert any("('data', 'model')" in mapping for _, _, mapping in seen), "and mappings to two mesh axes"


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no argument has named axes"):
        check_shard_invariance(jnp.sum, jnp.ones(4))

    def only_one_device(x: axn.NamedArray) -> Any:
        if jax.sharding.get_abstract_mesh().size > 1:
            raise ValueError("one device only")
        return x

    with pytest.raises(ValueError, match=r"every placement was refused, the first:\n.*\n.*one device only"):
        check_shard_invariance(only_one_device, X, draws=3, refusals="one device only")


@pytest.mark.parametrize("error", [ValueError, TypeError, RuntimeError, KeyError])
def test_an_error_on_several_devices_is_no_refusal(error: type[Exception]) -> None:
    def shaky(x: axn.NamedArray) -> axn.NamedArray:
        if jax.sharding.get_abstract_mesh().size > 2:
            raise error("an axis was lost")
        return x

    with pytest.raises(AssertionError, match=r"shaky depends on how .*\n.*\nit raises .*an axis was lost") as raised:
        check_shard_invariance(shaky, X, draws=10)
    assert isinstance(raised.value.__cause__, error)
    result = check_shard_invariance(shaky, X, draws=10, refusals="axis was lost")
    assert result.compared and set(map(type, result.refusals.values())) == {str}


def test_what_jax_refuses_of_raw_arrays_is_named() -> None:
    def reshaped(x: axn.NamedArray) -> jax.Array:
        return x.array.reshape(4, 32)

    with pytest.raises(AssertionError, match="it raises ShardingTypeError"):
        check_shard_invariance(reshaped, X)
    result = check_shard_invariance(reshaped, X, draws=10, refusals="reshape")
    assert result.compared and result.refusals


# --- in float64 ---


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_mean_is_no_sum(dtype: str) -> None:
    """At few digits, a factor of two is little beside rounding; evaluated in float64, it is not."""

    def averaged(x: axn.NamedArray) -> axn.NamedArray:
        return axn.shard_map(lambda x: axn.pmean(axn.sum(x, "embed"), "embed"))(x)

    blame = (
        r"\n.*div at test_testing.py:\d+ gives 1/2 \(one over the size of (data|model)\) of a value of the reference"
    )
    with pytest.raises(AssertionError, match=blame):
        check_shard_invariance(averaged, X.astype(dtype), draws=10, refusals="is neither")


def test_what_one_scale_hides_is_found(auto_mesh: Mesh) -> None:
    """Clipped, a mean and four times the mean are both 1, except at 1/16 times the argument."""

    def clipped(x: jax.Array) -> jax.Array:
        total = jax.shard_map(
            lambda x: jax.lax.psum(jnp.mean(x), "data"), mesh=auto_mesh, in_specs=P("data"), out_specs=P()
        )
        return jnp.minimum(total(x), 1)

    with pytest.raises(AssertionError, match="at 1/16 times the arguments"):
        check_shard_invariance(clipped, abs(X.array) + 2, reference=lambda x: jnp.minimum(jnp.mean(x), 1))


def test_equal_shards_are_made_different() -> None:
    """Also those of zeros; a mask of zeros and ones keeps its zeros."""

    def first_shard(x: axn.NamedArray, bias: axn.NamedArray, mask: axn.NamedArray) -> axn.NamedArray:
        kept = axn.where(mask != 0, x + bias, 0)
        return axn.shard_map(lambda x: axn.psum(axn.sum(x), "batch"))(kept["batch", :4]) * 2

    same = axn.ones({"batch": 8}), axn.zeros({"batch": 8}), axn.named([1.0, 0.0] * 4, "batch")
    for i in range(2):
        with pytest.raises(AssertionError, match=r"the result\.array differs"):
            arguments = [a if k in (i, 2) else a * 0 for k, a in enumerate(same)]
            check_shard_invariance(first_shard, *arguments, reference=lambda x, b, m: axn.sum((x + b) * m), draws=4)
    doubled = lambda x, m: axn.where(m != 0, x, 0)
    assert check_shard_invariance(doubled, X, same[2], reference=lambda x, m: x * (m != 0), draws=4).compared


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the result\.array has elements that are NaN"):
        check_shard_invariance(axn.log, X, draws=2)
    result = check_shard_invariance(lambda x: axn.sqrt(x + 8), X, draws=2)
    assert result.scales == (1.0, 1 / 16), "some of 16 times the argument have no root"

    def nan_on_many(x: axn.NamedArray) -> axn.NamedArray:
        return x * (float("nan") if jax.sharding.get_abstract_mesh().size > 1 else 1)

    with pytest.raises(AssertionError, match=r"the result\.array has elements that are NaN"):
        check_shard_invariance(nan_on_many, X, draws=2)


def test_what_is_not_widened_is_said() -> None:
    """Kernels and callbacks; and then the tolerance is the one of their dtype."""

    def double(x: jax.Array) -> jax.Array:
        def kernel(x_ref: Any, y_ref: Any) -> None:
            y_ref[...] = 2 * x_ref[...]

        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    def plain(x: axn.NamedArray) -> Any:
        return x * 2 / 3, axn.tanh(x)

    def host(x: axn.NamedArray) -> Any:
        kind = jax.ShapeDtypeStruct(x.array.shape, x.dtype)
        tanh = jax.pure_callback(np.tanh, kind, x.array, vmap_method="sequential")
        doubled = axn.shard_map(lambda x: axn.named(double(x.array), x.names), check_vma=False)(x)
        return doubled / 3, axn.named(tanh, x.names)

    result = check_shard_invariance(host, X, reference=plain, draws=1, gradients=False)
    assert result.own_precision == ("pallas_call", "pure_callback")
    with pytest.raises(AssertionError, match=r"the result\[\d\]\.array differs"):
        check_shard_invariance(host, X, reference=plain, draws=1, gradients=False, rtol=1e-12)


# --- against a reference, and without names ---


@pytest.mark.parametrize("summed", [True, False])
def test_partitioning_rule(summed: bool) -> None:
    """An axis that is `reduced`, with and without its psum; the casts inside are not rounded."""

    @partitioned(reduced="embed")
    def squares(x: axn.NamedArray) -> axn.NamedArray:
        return axn.sum(x * x, "embed")

    @squares.per_shard
    def _(x: axn.NamedArray) -> axn.NamedArray:
        y = axn.sum(x.astype("bfloat16") * x, "embed")
        return axn.psum(y, "embed") if summed else y

    def check() -> Any:
        return check_shard_invariance(squares, X, reference=lambda x: axn.sum(x * x, "embed"), draws=5)

    if summed:
        assert check().compared == 5
    else:
        with pytest.raises(AssertionError, match=r"reduce_sum.* gives a partial sum over (data|model), which nothing"):
            check()


def test_plain_jax(auto_mesh: Mesh, explicit_mesh: Mesh) -> None:
    """Arrays without names keep the shardings that they have, on Auto and on Explicit axes."""
    x, w = X.array, W.array.astype(jnp.bfloat16)

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.gelu(jax.nn.softmax(x) @ w)

    for mesh in (auto_mesh, explicit_mesh):
        with jax.set_mesh(mesh):
            placed = jax.device_put(x, P("data")), jax.device_put(w, P(None, "model"))
            found = check_shard_invariance(layer, *placed)
            assert (found.compared, found.scales, found.own_precision) == (1, (1.0, 1 / 16, 16.0), ())

            def local(x: jax.Array, w: jax.Array) -> jax.Array:
                specs = {"in_specs": (P("data"), P(None, "model")), "out_specs": P("data", "model")}
                normal = lambda x: x / jnp.mean(x)
                return jax.shard_map(lambda x, w: normal(x @ w), **specs)(x, w)

            with pytest.raises(AssertionError, match="local depends on how it is distributed"):
                check_shard_invariance(local, *placed)
    placed = jax.device_put(x, NamedSharding(auto_mesh, P("data")))
    assert check_shard_invariance(jnp.sum, placed).compared == 1, "no mesh needs to be active"


def test_a_function_with_a_mesh_of_its_own(auto_mesh: Mesh) -> None:
    summed = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=auto_mesh, in_specs=P("data"), out_specs=P())
    with pytest.raises(ValueError, match=r"runs on several devices wherever its arguments are.*`reference=`"):
        check_shard_invariance(summed, X.array)
    assert check_shard_invariance(summed, X.array, reference=lambda x: x.reshape(4, 2, 16).sum(0)).compared == 1
    specs: Any = {"mesh": auto_mesh, "in_specs": P("data"), "out_specs": P(), "check_vma": False}

    def twice(x: jax.Array) -> jax.Array:
        return jax.lax.psum(jax.lax.psum(jnp.sum(x, 0), "data"), "data")

    with pytest.raises(AssertionError, match=r"psum over data at .* gives 4 times \(the size of data\)"):
        check_shard_invariance(jax.shard_map(twice, **specs), X.array, reference=lambda x: x.sum(0))

    def all_experts(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("ei,fi->e", x, jax.lax.all_gather(w, "data", tiled=True))

    specs = {**specs, "in_specs": P("data"), "out_specs": P("data")}
    with pytest.raises(AssertionError, match=r"reduce_sum at .* takes `w`, all-gathered over data at test_testing.py"):
        check_shard_invariance(
            jax.shard_map(all_experts, **specs), X.array, X.array[::-1], reference=lambda x, w: jnp.sum(x * w, 1)
        )

    def needs_many(x: jax.Array) -> jax.Array:
        if jax.sharding.get_abstract_mesh().size == 1:
            raise RuntimeError("not on one device")
        return x

    with pytest.raises(RuntimeError, match="not on one device") as raised, jax.set_mesh(auto_mesh):
        check_shard_invariance(needs_many, X.array)
    assert any("pass `reference=`" in note for note in raised.value.__notes__)


BUGS_OF_STEPS = {
    "": "",
    "gathered in another order": r"dot_general at .* takes ppermute at .*, all-gathered over data",
    "not added up": r"dynamic_slice at .* takes a partial sum over data, from dot_general",
    "a sum for a mean": r"reduce_scatter over data at .* gives 4 times \(the size of data\) a value of the reference",
    "divided twice": r"div at .* gives 1/4 \(one over the size of data\) of a value of the reference",
    "loss of one device": r"div at .* gives a partial sum over data, which nothing adds up",
}


@pytest.mark.parametrize("bug", BUGS_OF_STEPS)
def test_what_is_wrong_with_an_fsdp_step_is_named(bug: str, auto_mesh: Mesh) -> None:
    """The mean of a loss gives values on each device that are multiples of the reference, and rightly so."""
    lax = jax.lax

    def loss(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ w) - y) ** 2)

    def plain(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        value, g = jax.value_and_grad(loss)(w, x, y)
        return [w - 0.1 * g, value]  # a list is no other result than a tuple

    def step(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        own = w if bug != "gathered in another order" else lax.ppermute(w, "data", [(i, (i + 1) % 4) for i in range(4)])
        value, g = jax.value_and_grad(loss)(lax.all_gather(own, "data", tiled=True), x, y)
        if bug == "not added up":
            g = lax.dynamic_slice_in_dim(g, lax.axis_index("data") * len(w), len(w))
        else:
            g = lax.psum_scatter(g, "data", tiled=True) / (1 if bug == "a sum for a mean" else 4)
        g = g / 4 if bug == "divided twice" else g
        return w - 0.1 * g, value if bug == "loss of one device" else lax.pmean(value, "data")

    specs: Any = {"mesh": auto_mesh, "in_specs": P("data"), "out_specs": (P("data"), P()), "check_vma": False}
    args = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(8, 4), (16, 8), (16, 4)])]

    def check() -> None:
        check_shard_invariance(jax.shard_map(step, **specs), *args, reference=plain)

    if not bug:
        return check()
    with pytest.raises(AssertionError, match=r"\n" + BUGS_OF_STEPS[bug]):
        check()


def test_every_copy_of_a_result_counts(auto_mesh: Mesh) -> None:
    def of_the_first(x: jax.Array) -> jax.Array:
        return jnp.where(jax.lax.axis_index("data") == 0, jax.lax.psum(jnp.sum(x, 0), "data"), 0)

    fn = jax.shard_map(of_the_first, mesh=auto_mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    with pytest.raises(AssertionError, match="the result differs"):
        check_shard_invariance(fn, X.array, reference=lambda x: x.sum(0), gradients=False)


def test_rounding_of_a_true_zero_is_no_difference() -> None:
    """Everything that is compared is 0, so that only the arguments tell how large rounding errors may be."""

    def zero(x: axn.NamedArray, error: float = 0) -> axn.NamedArray:
        return axn.sum(x * 3.1) - axn.sum(x) * 3.1 + error * axn.sum(x)

    check_shard_invariance(zero, X, reference=lambda x: 0 * axn.sum(x), draws=4)
    with pytest.raises(AssertionError, match=r"the result\.array differs by up to"):
        check_shard_invariance(lambda x: zero(x, 1e-10), X, reference=lambda x: 0 * axn.sum(x))


def test_masks_do_not_loosen_the_tolerance(auto_mesh: Mesh) -> None:
    def masked(x: jax.Array) -> jax.Array:
        return jnp.where(jnp.arange(16) < 12, -1e20, x)

    doubled = jax.shard_map(lambda x: masked(2 * x), mesh=auto_mesh, in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(AssertionError, match="the result differs"):
        check_shard_invariance(doubled, X.array, reference=masked, gradients=False)


def test_ill_conditioned_elements_are_left_out_and_said() -> None:
    def oscillating(x: axn.NamedArray) -> Any:
        total = axn.sum(axn.exp(x) * 1e20, "batch")  # of an order of additions that depends on the mesh
        return axn.sin(total), axn.argmax(axn.sin(total), "embed")

    result = check_shard_invariance(oscillating, X, draws=6, gradients=False)
    assert result.compared == 6 and any(w.startswith("the result[0].array") for w in result.ill_conditioned)

    def wrong_elsewhere(x: axn.NamedArray) -> Any:
        oscillates = axn.sin(axn.sum(axn.exp(x) * 1e20, "batch"))
        forgotten = axn.shard_map(lambda x: axn.sum(x, "batch"), check_vma=False)(x)
        return axn.where(axn.arange({"embed": 16}) < 8, oscillates, forgotten)

    with pytest.raises(AssertionError, match=r"wrong_elsewhere depends on how it is distributed"):
        check_shard_invariance(wrong_elsewhere, X, gradients=False)


# --- bugs of the compiler: docs/compiler_bugs.md ---

PLAIN_CONV = jax.lax.conv
BUGS_OF_THE_COMPILER: dict[str, tuple[Any, Any, str]] = {
    "pad with gaps": (lambda x: jax.lax.pad(x, 0.0, [(6, 6, 1)]), [((4,), ("data",))], "pad at test_testing.py:"),
    "gradient of strided slices": (
        lambda x, y: jax.vjp(lambda x: x[0:12:3] * x[1:13:3] + x[2:14:3], x)[1](y),
        [((16,), ("data",)), ((4,), ())],
        "pad at test_testing.py:",
    ),
    "gradient of a convolution": (
        lambda x, w: jax.grad(lambda w: jnp.sum(PLAIN_CONV(x, w, (1,), "SAME") ** 2))(w),
        [((2, 4, 16), (None, None, "data")), ((4, 4, 3), ())],
        "gives 2 times (the size of model) a value of the reference",
    ),
    "convolution with a sharded kernel": (
        lambda x, w: PLAIN_CONV(x, w, (1,), "SAME"),
        [((2, 4, 16), (None, None, "model")), ((4, 4, 4), (None, None, "data"))],
        "gives 4 times (the size of data) a value of the reference",
    ),
    "gradient of overlapping pools": (
        lambda x, y: jax.vjp(lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (3,), (1,), "SAME"), x)[1](y),
        [((16,), ("data",))] * 2,
        "select_and_scatter_add at test_testing.py:",
    ),
    "scatter from an uneven axis": (
        lambda x: jnp.zeros(5).at[jnp.arange(7) % 5].add(x[:7]),
        [((8,), ("data",))],
        "scatter-add at test_testing.py:",
    ),
}


@pytest.mark.parametrize("name", BUGS_OF_THE_COMPILER)
def test_bugs_of_the_compiler_are_found(name: str, auto_mesh: Mesh) -> None:
    """Abstract arguments get values; a row goes when its bug goes."""
    fn, arrays, words = BUGS_OF_THE_COMPILER[name]
    args = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(auto_mesh, P(*spec))) for s, spec in arrays]
    with pytest.raises(AssertionError) as raised:
        check_shard_invariance(fn, *args, gradients=False)
    assert words in str(raised.value)


def test_each_bug_that_ends_the_process_does() -> None:
    """The table of the page loses a row when this fails."""
    page = (Path(__file__).parents[1] / "docs" / "compiler_bugs.md").read_text()
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


# --- steps of the examples, distributed in their own ways ---

STEPS: dict[str, tuple[Any, Any]] = {
    "a sharding that names an Explicit mesh": (lambda: cases.plain_jax(AxisType.Explicit), None),
    "gradients of integers": (lambda: cases.classifier("height"), {}),
    "weights in int4": (lambda: cases.generated("int4 in groups of 4"), {}),
    "Pallas kernels that are interpreted": (lambda: cases.kernels(2), {}),
    "rows sent to experts": (lambda: cases.mixture("experts"), {}),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_examples_are_the_same(name: str) -> None:
    case, mapping = STEPS[name]
    mesh, step, args = case()
    with jax.set_mesh(mesh):
        found = check_shard_invariance(step, *args, mapping=mapping, gradients=False)
    assert (found.compared, found.scales) == (1, (1.0, 1 / 16, 16.0))


def test_abstract_arguments_get_values_that_are_no_nan(auto_mesh: Mesh) -> None:
    """Roots need positive numbers, and keys are drawn too."""

    def step(v: jax.Array, n: jax.Array, key: jax.Array) -> Any:
        return jnp.sqrt(v) + jax.random.normal(key, v.shape), n * 2

    whole = NamedSharding(auto_mesh, P("data"))
    args = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=whole), jax.ShapeDtypeStruct((8,), jnp.int8, sharding=whole)
    key = jax.eval_shape(lambda: jax.random.key(0))
    assert check_shard_invariance(step, *args, key, gradients=False).scales == (1.0, 1 / 16, 16.0)


def test_a_mesh_with_more_devices_than_there_are() -> None:
    mesh = jax.sharding.AbstractMesh((16, 4), ("data", "model"))
    x = jax.ShapeDtypeStruct((32, 4), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match=r"has 64 devices and this process 8\..*'jax_num_cpu_devices', 64"):
        check_shard_invariance(jnp.sum, x)


def test_shardings_inside_a_function_are_left_out_on_one_device(auto_mesh: Mesh) -> None:
    columns = NamedSharding(auto_mesh, P(None, "model"))
    x = jax.device_put(X.array, NamedSharding(auto_mesh, P("data")))
    constrained = lambda x: jax.lax.with_sharding_constraint(jnp.tanh(x), columns)
    assert check_shard_invariance(constrained, x).compared == 1
    assert check_shard_invariance(jax.jit(jnp.tanh, out_shardings=columns), x).compared == 1


def test_shardings_of_an_explicit_mesh_inside_a_function_are_left_out(explicit_mesh: Mesh) -> None:
    columns, rows = NamedSharding(explicit_mesh, P(None, "model")), NamedSharding(explicit_mesh, P("data"))

    def step(x: jax.Array, factor: float = 1.0) -> Any:
        y = jnp.einsum("bi,io->bo", x, jnp.ones((16, 8)), out_sharding=rows)
        totals = jax.lax.scan(lambda c, row: (c + row.sum(), row * 2), 0.0, jax.sharding.reshard(y, columns))
        return totals, jnp.zeros((8, 2), device=rows) + factor

    def per_device(x: jax.Array) -> jax.Array:
        specs: Any = {"mesh": explicit_mesh, "in_specs": P("data"), "out_specs": P()}
        return jax.shard_map(lambda x: jax.lax.psum(x, "data"), **specs)(x) * step(x)[1][0, 0]

    with jax.set_mesh(explicit_mesh):
        x = jax.device_put(X.array, rows)
        assert check_shard_invariance(step, x).compared == 1
        with pytest.raises(AssertionError, match=r"the result\[1\] differs"):
            check_shard_invariance(step, x, reference=lambda x: step(x, 2.0))
        named = axn.named(jax.device_put(X.array, P()), ("batch", "embed"))
        assert check_shard_invariance(lambda x: step(x.array), named, mapping={"batch": "data"}).compared == 1
        with pytest.raises(ValueError, match="mesh") as raised:
            check_shard_invariance(per_device, x)
    assert any("pass `reference=`" in note for note in raised.value.__notes__)


def test_what_shard_map_returns_can_still_be_called(auto_mesh: Mesh) -> None:
    """It keeps the mesh of its first call, which is not the one device."""
    specs: Any = {"in_specs": P("data"), "out_specs": P()}
    mapped = jax.shard_map(lambda x: jax.lax.psum(x, "data"), **specs)
    with jax.set_mesh(auto_mesh):
        x = jax.device_put(X.array, P("data"))
        with pytest.raises(ValueError, match="should match the mesh passed to shard_map") as raised:
            check_shard_invariance(mapped, x)
        assert any("call `jax.shard_map` in it" in note for note in raised.value.__notes__)
        found = mapped(x)
        np.testing.assert_allclose(found, X.array.reshape(4, 2, 16).sum(0), rtol=1e-6)

        def total(x: jax.Array) -> jax.Array:
            return jax.shard_map(lambda x: jax.lax.psum(x.sum(0), "data"), **specs)(x)

        assert check_shard_invariance(total, x).compared == 1


def test_refusals_are_described() -> None:
    def rows_only(x: axn.NamedArray, w: axn.NamedArray) -> axn.NamedArray:
        return axn.shard_map(lambda x, w: axn.dot(x, w, axis="embed"))(x, w)

    result = check_shard_invariance(rows_only, X, W, draws=40, seed=1)
    assert result.compared and any(r"results: the " in m for m in result.refusals.values())
    assert all(re.search(r"\w[^:]*$", message) for message in result.refusals.values())


def test_one_mapping_on_the_active_mesh(auto_mesh: Mesh) -> None:
    seen: set[str] = set()

    def step(x: axn.NamedArray, count: jax.Array) -> Any:
        seen.add(str(axn.current_mapping()))
        return axn.sum(x * x, "embed") + count

    count = jax.device_put(jnp.ones(()), NamedSharding(auto_mesh, P()))
    with jax.set_mesh(auto_mesh):
        assert check_shard_invariance(step, X, count, mapping={"batch": "data"}).compared == 1
        stored = axn.fsdp(lambda x: axn.sum(x, "embed"), {"embed": "data"}, {"batch": "data"})
        assert check_shard_invariance(stored, X, mapping={}).compared == 1
        with pytest.raises(AssertionError, match=r"axn.axis_mapping\(\{'embed': 'data'\}\)"):
            check_shard_invariance(
                lambda x: axn.shard_map(lambda x: axn.sum(x, "embed"), check_vma=False)(x), X, mapping={"embed": "data"}
            )
    assert any("data" in mapping for mapping in seen)
    with pytest.raises(ValueError, match="a mapping is for named arguments on the active mesh"):
        check_shard_invariance(lambda x: x, X, mapping={"batch": "data"})
