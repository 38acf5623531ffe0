"""The active mapping: nesting, merging, caches, threads."""

from __future__ import annotations

import concurrent.futures
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym.distribution import active_settings
from axonym.scalax.sharding import MeshShardingHelper
from tests.helpers import spec


def test_nothing_is_in_force_at_first() -> None:
    assert axn.current_mapping() is None
    assert axn.current_mapping() is None


def test_nesting_and_merging() -> None:
    with axn.axis_mapping({"batch": "data", "embed": None}):
        with axn.axis_mapping({"mlp": "model"}):
            assert axn.current_mapping() == {"mlp": "model"}
        with axn.axis_mapping({"batch": "model"}, merge=True, mlp=["replica", "data"]):
            assert axn.current_mapping() == {"batch": "model", "embed": None, "mlp": ("replica", "data")}
        assert axn.current_mapping() == {"batch": "data", "embed": None}
    assert axn.current_mapping() is None


def test_as_decorator_again_and_again() -> None:
    @axn.axis_mapping({"batch": "data"})
    def mapping():
        return axn.current_mapping()

    assert mapping() == mapping() == {"batch": "data"}
    assert axn.current_mapping() is None


def test_keys_can_be_axes_and_values_resource_axes() -> None:
    with axn.axis_mapping({axn.Axis("batch", 8): "data"}):
        assert axn.current_mapping() == {"batch": "data"}


def test_an_empty_mapping_is_none() -> None:
    with axn.axis_mapping({"batch": "data"}), axn.axis_mapping({}):
        assert axn.current_mapping() is None


def test_it_is_restored_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="inside"), axn.axis_mapping({"batch": "data"}):
        raise RuntimeError("inside")
    assert axn.current_mapping() is None


def test_equal_settings_are_one_object() -> None:
    first = active_settings.intern_settings(mapping={"a": "data", "b": ("x", "y")})
    assert first is active_settings.intern_settings(mapping={"b": ("x", "y"), "a": "data"})
    assert first is not active_settings.intern_settings(
        mapping={"a": "data", "b": ("x", "y")}, parameter_mapping={"c": "data"}
    )
    assert active_settings.intern_settings(mapping={}) is None


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"batch": 3}, "axis 'batch' must map to the name of a mesh axis, to several, or to None; got 3"),
        ({3: "data"}, "a key is an axis or its name, got 3"),
        ({"batch": ("data", "data")}, "axis 'batch' is sharded over one mesh axis twice"),
        (["batch"], "expected a resource mapping such as"),
        ({"batch": "data", axn.Axis("batch", 2): "data"}, "axis 'batch' is mapped twice"),
    ],
)
def test_bad_mappings(mapping, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        with axn.axis_mapping(mapping):
            pass


def test_a_new_thread_starts_without_and_threads_do_not_meet() -> None:
    def inside(name: str):
        before = axn.current_mapping()
        with axn.axis_mapping({"batch": name}):
            return before, axn.current_mapping()

    with axn.axis_mapping({"batch": "outer"}), concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(inside, [f"axis{i}" for i in range(20)]))
        assert axn.current_mapping() == {"batch": "outer"}
    assert found == [(None, {"batch": f"axis{i}"}) for i in range(20)]


@pytest.mark.parametrize("make", [lambda: axn.axis_mapping({"batch": "data"}), lambda: MeshShardingHelper([8], ["x"])])
def test_one_block_in_two_threads(make) -> None:
    """Each thread gets back what it had, in whatever order they leave."""
    block, both_in, first_out = make(), threading.Barrier(2, timeout=60), threading.Event()

    def first():
        with axn.axis_mapping({"outer": "data"}), axn.set_mesh(axn.make_mesh({"outer": 8})):
            with block:
                both_in.wait()
            found = axn.current_mapping(), jax.sharding.get_mesh().axis_names
            first_out.set()
            return found

    def second():
        with block:
            both_in.wait()
            first_out.wait(60)
        return axn.current_mapping(), jax.sharding.get_mesh().axis_names

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = [f.result() for f in [pool.submit(first), pool.submit(second)]]
    assert found == [({"outer": "data"}, ("outer",)), (None, ())]


JITS = {
    "jit": jax.jit,
    "filter_jit": eqx.filter_jit,
    "named_jit": axn.named_jit,
    "nested": lambda f: jax.jit(lambda x: jax.jit(f)(x)),
    "grad": lambda f: jax.jit(lambda x: jax.grad(lambda y: f(y).sum().array)(x)),
    "vmap": lambda f: jax.jit(
        lambda x: axn.named(jax.vmap(lambda a: f(axn.named(a, "batch")).array)(x.array[None])[0], "batch")
    ),
    "scan": lambda f: jax.jit(lambda x: jax.lax.scan(lambda c, _: (c, f(x)), 0, None, length=1)[1].array[0]),
}


@pytest.mark.parametrize("name", JITS)
def test_no_compiled_function_keeps_a_mapping(name: str, mesh) -> None:
    traces: list[object] = []

    def fn(x):
        traces.append(axn.current_mapping())
        return axn.shard(x * x)

    compiled = JITS[name](fn)
    x = axn.ones({"batch": 8})
    specs = []
    with jax.set_mesh(mesh):
        for target in ("data", "model", "data"):
            with axn.axis_mapping({"batch": target}):
                count = len(traces)
                result = jax.block_until_ready(compiled(x))
                specs.append(getattr(result, "array", result).sharding.spec[0])
        assert len(traces) == count, "the mapping that returned was traced again"
    assert {"batch": "data"} in traces and {"batch": "model"} in traces
    if name not in ("grad", "scan"):  # there the compiler is free to place the result elsewhere
        assert specs == ["data", "model", "data"]


def test_two_wrappers_of_one_function(mesh) -> None:
    def fn(x):
        return axn.shard(x * 2)

    first, second = jax.jit(fn), jax.jit(fn)
    x = axn.ones({"batch": 8})
    with jax.set_mesh(mesh):
        with axn.axis_mapping({"batch": "data"}):
            assert first(x).array.sharding.spec[0] == "data"
        with axn.axis_mapping({"batch": "model"}):
            assert second(x).array.sharding.spec[0] == "model"
            assert first(x).array.sharding.spec[0] == "model"


def test_named_operations_do_not_go_stale_on_explicit_axes(explicit_mesh) -> None:
    x = axn.ones({"batch": 8})
    with jax.set_mesh(explicit_mesh):
        for target, expected in (("model", "model"), ("data", "data"), ("model", "model")):
            with axn.axis_mapping({"new": target}):
                wide = axn.shard(x, {"batch": None}).broadcast_axis(axn.Axis("new", 8))
                # An array that is whole says nothing about its result, so JAX leaves it whole.
                assert wide.array.is_fully_replicated
            with axn.axis_mapping({"batch": "data" if target == "model" else "model", "new": target}):
                split = axn.shard(x).broadcast_axis(axn.Axis("new", 8))
                assert spec(split)[0] == expected


def test_jnp_is_not_recompiled_by_a_mapping_more_than_once(mesh) -> None:
    traces = 0

    @jax.jit
    def fn(x):
        nonlocal traces
        traces += 1
        return jnp.sin(x)

    with jax.set_mesh(mesh):
        fn(1.0)
        for _ in range(3):
            with axn.axis_mapping({"batch": "data"}):
                fn(1.0)
    assert traces == 2


def test_one_block_can_be_entered_again() -> None:
    block = axn.axis_mapping({"batch": "data"})
    for _ in range(2):
        with block:
            with block:
                assert axn.current_mapping() == {"batch": "data"}
            assert axn.current_mapping() == {"batch": "data"}
        assert axn.current_mapping() is None


def test_as_a_decorator_it_refuses_what_runs_between_other_code() -> None:
    @axn.axis_mapping({"batch": "data"})
    def plain() -> Any:
        return axn.current_mapping()

    assert plain() == {"batch": "data"}

    def numbers() -> Iterator[int]:
        yield 1

    async def later() -> None: ...

    for fn in (numbers, later):
        with pytest.raises(TypeError, match="runs between other code"):
            axn.axis_mapping({"batch": "data"})(fn)


UNKNOWN: dict[str, Callable[[axn.NamedArray], Any]] = {
    "exp": axn.exp,
    "add": lambda x: x + 1,
    "sum": lambda x: axn.sum(x, "x"),
    "cumsum": lambda x: axn.cumsum(x, "x"),
    "sort": lambda x: axn.sort(x, "x"),
    "dot": lambda x: axn.dot(x, x, axis="d"),
    "index": lambda x: axn.take(x, "x", axn.named([1, 2], "j")),
    "top_k": lambda x: axn.top_k(x, "x", 2),
    "cross_entropy_loss": lambda x: axn.nn.cross_entropy_loss(x, "x", axn.named(np.arange(8), "d")),
    "random.categorical": lambda x: axn.random.categorical(jax.random.key(0), x, "x"),
    "zeros": lambda x: axn.zeros(x.axes),
    "vmap": axn.vmap(lambda row: row.array, "x"),
    "fold": lambda x: axn.fold(lambda total, row: total + row.array.sum(), "x")(0.0, x),
    "map": axn.map(lambda row: row.array, "x"),
    "lift(sum)": axn.lift(jnp.sum, "x ->"),
    "shard": axn.shard,
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_every_operation_refuses_a_mesh_axis_that_the_mesh_lacks(what: str, mesh: jax.sharding.Mesh) -> None:
    """On Auto mesh axes as on Explicit ones, outside of jit and inside, by the public name."""
    x = axn.named(np.ones((8, 8), np.float32), ("x", "d"))
    with axn.axis_mapping({"x": "modle"}):
        for run in (UNKNOWN[what], jax.jit(UNKNOWN[what])):
            message = rf"{re.escape(what)}.* 'modle', which .*\. Did you mean 'model'"
            with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
                run(x)


def test_without_a_mesh_no_mesh_axis_is_lacking() -> None:
    with axn.axis_mapping({"x": "modle"}):
        assert axn.exp(axn.zeros({"x": 8})).sum().item() == 8
