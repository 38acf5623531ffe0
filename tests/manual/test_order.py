"""Axes sharded over several mesh axes: the mesh axes over which they can be gathered and sharded, and their order."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import axonym as axn

BOTH = ("data", "model")
MAPPING = {"batch": BOTH}
X = np.arange(64).reshape(8, 8)


@pytest.fixture
def x() -> axn.NamedArray:
    """Its local part is (batch=1, embed=8)."""
    return axn.named(X, ("batch", "embed"))


def run(fn: Any, x: axn.NamedArray, mapping: Any = MAPPING, **options: Any) -> Any:
    return jax.block_until_ready(jax.jit(axn.shard_map(fn, mapping=mapping, **options))(x))


def gather(x: axn.NamedArray, over: Any = None, invariant: bool = True) -> axn.NamedArray:
    return axn.all_gather(x, "batch", over=over, invariant=invariant)


def nested(x: axn.NamedArray) -> axn.NamedArray:
    return axn.shard_map(lambda x: gather(x, "model"), axis_names="model")(x)


WHOLE, BY_DATA = (None, None), ("data", None)
GATHERED: dict[str, tuple[Any, Any, Any]] = {
    "over the minor one": (lambda x: gather(x, "model"), X, BY_DATA),
    "over both": (gather, X, WHOLE),
    "over both, whatever the order": (lambda x: gather(x, ("model", "data")), X, WHOLE),
    "over both, by the logical axis": (lambda x: gather(x, "batch"), X, WHOLE),
    "one after the other": (lambda x: gather(gather(x, "model"), "data"), X, WHOLE),
    "over one, then over what is left": (lambda x: gather(gather(x, "model")), X, WHOLE),
    "not as one value": (
        lambda x: axn.pmax(gather(gather(x, "model", invariant=False), invariant=False), BOTH),
        X,
        WHOLE,
    ),
    "offset of a part": (
        lambda x: (lambda y: y * 0 + axn.axis_offset("batch", x=y))(gather(x, "model")),
        X * 0 + (np.arange(8) // 2 * 2)[:, None],
        BY_DATA,
    ),
    "offset of the whole": (lambda x: (lambda y: y + axn.axis_offset("batch", x=y))(gather(x)), X, WHOLE),
    "offset as it came in": (lambda x: x * 0 + axn.axis_offset("batch", x=x), X * 0 + np.arange(8)[:, None], None),
}


@pytest.mark.parametrize("case", GATHERED)
def test_gathers(mesh: Mesh, x, case: str) -> None:
    fn, expected, spec = GATHERED[case]
    with jax.set_mesh(mesh):
        found = run(fn, x)
    np.testing.assert_array_equal(found.array, expected)
    if spec is not None:
        assert found.array.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, P(*spec)), 2)


def test_gathers_in_a_nested_one(mesh: Mesh, x) -> None:
    with jax.set_mesh(mesh):
        found = run(nested, x, axis_names="data")
    np.testing.assert_array_equal(found.array, X)


def test_gathers_unchecked(auto_mesh: Mesh, x) -> None:
    """Nothing tells a part that was gathered from one that was resized."""
    with jax.set_mesh(auto_mesh):
        with pytest.raises(
            ValueError, match=r"could be sharded over 'data' or sharded over 'data' and 'model'. Say which"
        ):
            run(lambda x: gather(x, "model"), x, check_vma=False)
        found = run(lambda x: gather(x, "model"), x, check_vma=False, out_specs={"batch": "data"})
    np.testing.assert_array_equal(found.array, X)


EXCHANGES: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "over both": (lambda x: axn.all_to_all(x, "embed", "batch"), {"embed": BOTH}, X),
    "over both, whatever the order": (
        lambda x: axn.all_to_all(x, "embed", "batch", over=("model", "data")),
        {"embed": BOTH},
        X,
    ),
    "over the minor one": (
        lambda x: axn.all_to_all(x, "embed", "batch", over="model"),
        {"batch": "data", "embed": "model"},
        X,
    ),
    "over what is left": (
        lambda x: axn.all_to_all(gather(x, "model"), "embed", "batch"),
        {"embed": "data"},
        X,
    ),
    "there and back": (
        lambda x: axn.all_to_all(axn.all_to_all(x, "embed", "batch", over="model"), "batch", "embed", over="model"),
        {"batch": BOTH},
        X,
    ),
    "scattered, whatever the order": (
        lambda x: axn.psum_scatter(axn.sum(x, "batch"), "embed", over=("model", "data")),
        {"embed": BOTH},
        X.sum(0),
    ),
    "scattered one after the other": (
        lambda x: axn.psum_scatter(axn.psum_scatter(axn.sum(x, "batch"), "embed", over="data"), "embed", over="model"),
        {"embed": BOTH},
        X.sum(0),
    ),
}


@pytest.mark.parametrize("case", EXCHANGES)
def test_exchanges(auto_mesh: Mesh, x, case: str) -> None:
    fn, out_specs, expected = EXCHANGES[case]
    mapping = MAPPING | {"embed": BOTH} if case.startswith("scattered") else MAPPING
    with jax.set_mesh(auto_mesh):
        found = run(fn, x, mapping, in_specs={"x": MAPPING}, out_specs=out_specs)
    np.testing.assert_array_equal(found.array, expected)


def test_what_is_scattered_as_the_mapping_says_has_its_offset(auto_mesh: Mesh, x) -> None:
    def offsets(x):
        part = axn.psum_scatter(axn.sum(x, "batch"), "embed")
        return part * 0 + axn.axis_offset("embed", x=part)

    with jax.set_mesh(auto_mesh):
        found = run(offsets, x, {"embed": BOTH}, in_specs={"x": MAPPING})
    np.testing.assert_array_equal(found.array, np.arange(8))


ORDER = r"is sharded over 'data' and 'model', in this order.* Gather over 'model' first, or over all of these at once"
REFUSED: dict[str, tuple[Any, str]] = {
    "gathered over the major one": (lambda x: gather(x, "data"), f"all_gather: axis 'batch' of .* {ORDER}"),
    "gathered over the minor one twice": (
        lambda x: gather(gather(x, "model", invariant=False), "model"),
        r"axis 'batch' of .*\[batch=2, embed=8\] is sharded over 'data' here, and not over 'model'",
    ),
    "gathered, and not one value": (
        lambda x: gather(x, "model", invariant=False),
        r"the result \(batch=2, embed=8\) varies over mesh axis 'model'",
    ),
    "of no known size": (
        lambda x: gather(x.broadcast_axis(axn.Axis("other", 3)).flatten_axes(("other", "batch"), "batch"), "model"),
        "the size of .* does not tell how it is sharded",
    ),
    "exchanged over the major one": (
        lambda x: axn.all_to_all(x, "embed", "batch", over="data"),
        f"all_to_all: axis 'batch' of .* {ORDER}",
    ),
    "exchanged though whole": (
        lambda x: axn.all_to_all(gather(x, invariant=False), "embed", "batch"),
        "all_to_all: axis 'batch' of .* is replicated already",
    ),
    "sharded over the minor one": (
        lambda x: axn.psum_scatter(gather(x, invariant=False), "batch", over="model"),
        "psum_scatter: axis 'batch' of .* is to be sharded over 'data' and 'model', in this order. Shard it over",
    ),
    "sharded over what splits it": (
        lambda x: axn.psum_scatter(gather(x, "model", invariant=False), "batch", over="data"),
        "is sharded over mesh axis 'data' .* already: 2 of 8",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(auto_mesh: Mesh, x, case: str) -> None:
    fn, message = REFUSED[case]
    with jax.set_mesh(auto_mesh), pytest.raises(ValueError, match=message):
        run(fn, x)


def test_one_order_for_both_axes(auto_mesh: Mesh, x) -> None:
    mapping = MAPPING | {"embed": ("model", "data")}
    exchange = lambda x: axn.all_to_all(x, split="embed", gather="batch")
    with jax.set_mesh(auto_mesh), pytest.raises(ValueError, match=r"axes 'embed' and 'batch' .* in different orders"):
        run(exchange, x, mapping, in_specs={"x": MAPPING})


def test_sizes_that_could_be_either(auto_mesh: Mesh) -> None:
    """A part of one argument has the size that another one's has when it is gathered over the minor mesh axis."""
    large, small = axn.arange(axn.Axis("batch", 16)), axn.arange(axn.Axis("batch", 8))
    both = lambda over: lambda large, small: axn.all_gather(large, "batch", over=over, invariant=True)
    with jax.set_mesh(auto_mesh):
        with pytest.raises(ValueError, match=r"may be sharded over .* or over .*Say which with `over`"):
            jax.jit(axn.shard_map(both(None), mapping=MAPPING))(large, small)
        found = jax.jit(axn.shard_map(both(BOTH), mapping=MAPPING))(large, small)
        np.testing.assert_array_equal(found.array, large.array)
        offset = lambda large, small: large * 0 + axn.axis_offset("batch", x=large)
        with pytest.raises(ValueError, match=r"axis_offset: by its size, axis 'batch' .* may be sharded over"):
            jax.jit(axn.shard_map(offset, mapping=MAPPING))(large, small)
