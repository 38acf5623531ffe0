"""Collectives by name: effects, axes, and errors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import axonym as axn
from axonym.manual.collectives import axis_size

MAPPING = {"batch": "data", "pos": "model"}
X = np.arange(8 * 6 * 4, dtype=np.float32).reshape(8, 6, 4)


@pytest.fixture
def x() -> axn.NamedArray:
    """Its local part is (batch=2, pos=3, embed=4)."""
    return axn.named(X, ("batch", "pos", "embed"))


def run(fn: Any, *args: Any, mapping: Any = MAPPING, **options: Any) -> Any:
    return jax.block_until_ready(jax.jit(axn.shard_map(fn, mapping=mapping, **options))(*args))


CASES: dict[str, tuple[Any, Any]] = {
    "psum": (lambda x: axn.psum(axn.sum(x, "batch"), "batch"), X.sum(0)),
    "psum over a mesh axis": (lambda x: axn.psum(axn.sum(x, "batch"), "data"), X.sum(0)),
    "psum over several": (lambda x: axn.psum(axn.sum(x, ("batch", "pos")), ("batch", "model")), X.sum((0, 1))),
    "pmean": (lambda x: axn.pmean(axn.mean(x, "batch"), "batch"), X.mean(0)),
    "pmax": (lambda x: axn.pmax(axn.max(x, "pos"), "pos"), X.max(1)),
    "pmin": (lambda x: axn.pmin(axn.min(x, axn.Axis("pos", 3)), "pos"), X.min(1)),
    "psum of a tree": (lambda x: axn.psum({"a": x.sum("batch"), "b": x.array.sum(0)}, "batch")["a"], X.sum(0)),
    "all_gather": (lambda x: axn.all_gather(x, "batch", invariant=True), X),
    "all_gather by an axis with its size outside": (
        lambda x: axn.all_gather(x, axn.Axis("pos", 6), invariant=True),
        X,
    ),
    "all_gather, then reduced": (lambda x: axn.pmax(axn.all_gather(x, "batch"), "batch"), X),
    "shift": (lambda x: axn.shift(x, "batch"), np.roll(X, 2, 0)),
    "shift back by two": (lambda x: axn.shift(x, "batch", -2), np.roll(X, -4, 0)),
    "shift without closing the ring": (
        lambda x: axn.shift(x, "batch", wrap=False),
        np.concatenate([X[:2] * 0, X[:-2]]),
    ),
    "shift of a tree": (lambda x: axn.shift({"a": x}, "batch")["a"], np.roll(X, 2, 0)),
    "ppermute": (lambda x: axn.ppermute(x, "pos", [(0, 1)]), np.concatenate([X[:, :3] * 0, X[:, :3]], 1)),
    "axis_index": (
        lambda x: x * 0 + axn.axis_index("batch"),
        X * 0 + (np.arange(8) // 2)[:, None, None],
    ),
    "axis_index over several": (
        lambda x: x * 0 + axn.axis_index(("batch", "pos")),
        X * 0 + (np.arange(8) // 2 * 2)[:, None, None] + (np.arange(6) // 3)[None, :, None],
    ),
    "axis_size": (lambda x: x * axis_size("batch"), X * 4),
    "axis_offset": (
        lambda x: x * 0 + axn.axis_offset("pos"),
        X * 0 + (np.arange(6) // 3 * 3)[None, :, None],
    ),
    "axis_offset of an array": (
        lambda x: x * 0 + axn.axis_offset("pos", x=x["pos", 0:1]),
        X * 0 + (np.arange(6) // 3)[None, :, None],
    ),
    "axis_offset of what is whole": (lambda x: x + axn.axis_offset("embed"), X),
    "pvary": (
        lambda x: axn.psum(axn.pvary(axn.ones({"embed": 4}), ("batch", "model")), ("data", "pos")),
        np.full(4, 8),
    ),
    "pvary twice": (lambda x: axn.pvary(axn.pvary(x, "batch"), "batch"), X),
}


@pytest.mark.parametrize("case", CASES)
def test_gives(auto_mesh: Mesh, x, case: str) -> None:
    fn, expected = CASES[case]
    with jax.set_mesh(auto_mesh):
        found = run(fn, x)
    np.testing.assert_allclose(np.asarray(found.array), expected, rtol=1e-6)


def test_devices_are_counted_in_the_order_of_the_mapping(mesh: Mesh, x) -> None:
    """Which is not the order of the mesh, in which `jax.lax.ppermute` counts."""

    def body(x):
        return axn.shift(x, "batch"), axn.ppermute(x, "batch", [(0, 5), (1, 3)]), x * 0 + axn.axis_index("batch")

    with jax.set_mesh(mesh):
        shifted, sent, index = (y.array for y in run(body, x, mapping={"batch": ("model", "data")}))
    expected = X * 0
    expected[[5, 3]] = X[[0, 1]]
    np.testing.assert_array_equal(shifted, np.roll(X, 1, 0))
    np.testing.assert_array_equal(sent, expected)
    np.testing.assert_array_equal(index[:, 0, 0], np.arange(8))


EXCHANGES: dict[str, tuple[Any, dict[str, str], Any, dict[str, int]]] = {
    "psum_scatter": (
        lambda x: axn.psum_scatter(axn.sum(x, "batch"), "embed", over="batch"),
        {"pos": "model", "embed": "data"},
        X.sum(0),
        {"pos": 3, "embed": 1},
    ),
    "all_to_all": (
        lambda x: axn.all_to_all(x, split="embed", gather="pos"),
        {"batch": "data", "embed": "model"},
        X,
        {"batch": 2, "pos": 6, "embed": 2},
    ),
    "all_to_all there and back": (
        lambda x: axn.all_to_all(axn.all_to_all(x, "embed", "pos"), split="pos", gather="embed"),
        {"batch": "data", "pos": "model"},
        X,
        {"batch": 2, "pos": 3, "embed": 4},
    ),
    "all_to_all over a mesh axis": (
        lambda x: axn.all_to_all(x, split="embed", gather="batch", over="data"),
        {"embed": "data", "pos": "model"},
        X,
        {"batch": 8, "pos": 3, "embed": 1},
    ),
    "all_gather": (
        lambda x: axn.all_gather(x, "pos", invariant=True),
        {"batch": "data"},
        X,
        {"batch": 2, "pos": 6, "embed": 4},
    ),
}


@pytest.mark.parametrize("case", EXCHANGES)
def test_exchanges_change_the_sizes_inside(mesh: Mesh, x, case: str) -> None:
    fn, out_specs, expected, local = EXCHANGES[case]
    seen = []

    def body(x):
        y = fn(x)
        seen.append(y.shape)
        return y

    with jax.set_mesh(mesh):
        found = run(body, x, out_specs=out_specs)
    assert seen == [local]
    assert found.names == tuple(local)
    np.testing.assert_allclose(np.asarray(found.array), expected, rtol=1e-6)


def test_all_to_all_of_one_axis_transposes_over_devices(auto_mesh: Mesh) -> None:
    blocks = axn.arange(axn.Axis("batch", 16))
    with jax.set_mesh(auto_mesh):
        found = run(lambda x: axn.all_to_all(x, "batch", "batch"), blocks)
    np.testing.assert_array_equal(found.array, np.arange(16).reshape(4, 4).T.ravel())


def test_psum_is_a_scatter_and_a_gather(auto_mesh: Mesh, x) -> None:
    def both(x):
        total = axn.psum_scatter(axn.sum(x, "batch"), "embed", over="batch")
        return axn.all_gather(total, "embed", over="batch", invariant=True)

    with jax.set_mesh(auto_mesh):
        found = run(both, x, out_specs={"pos": "model"})
    np.testing.assert_allclose(found.array, X.sum(0))


def test_parameters_are_gathered_as_the_arguments_split_them(mesh: Mesh) -> None:
    """`embed` is not in the mapping, and whole in `x`: what splits it is how `w` came in."""
    w, x = axn.ones(axn.make_axes(embed=8, mlp=3)), axn.ones(axn.make_axes(batch=8, embed=8))
    call = lambda w, x: axn.dot(x, axn.all_gather(w, "embed"), axis="embed")
    with jax.set_mesh(mesh):
        found = run(call, w, x, mapping={"batch": "data"}, in_specs=({"embed": "data"}, None))
    np.testing.assert_array_equal(found.array, np.full((8, 3), 8.0))


LINEAR = {
    "psum": (lambda x: axn.psum(axn.sum(x, "batch"), "batch"), None),
    "pmean": (lambda x: axn.pmean(axn.mean(x, "batch"), "batch"), None),
    "all_gather": (lambda x: axn.psum(axn.all_gather(x, "batch") * (1.0 + axn.axis_index("batch")), "batch"), None),
    "all_gather to one value": (lambda x: axn.all_gather(x, "pos", invariant=True), None),
    "psum_scatter": EXCHANGES["psum_scatter"][:2],
    "all_to_all": EXCHANGES["all_to_all"][:2],
    "shift": (lambda x: axn.shift(x, "batch", 3), None),
    "ppermute": (lambda x: axn.ppermute(x, "pos", [(0, 1)]), None),
}


@pytest.mark.parametrize("case", LINEAR)
def test_gradients(auto_mesh: Mesh, x, case: str) -> None:
    """The transpose of a linear function moves over the inner product: <f(x), c> is <x, f'(c)>."""
    fn, out_specs = LINEAR[case]
    call = axn.shard_map(fn, mapping=MAPPING, out_specs=out_specs)

    def transposed(x, seed):
        y, pull = jax.vjp(call, x)
        c = axn.named(jax.random.normal(seed, y.array.shape), y.axes)
        return axn.sum(y * c).array, axn.sum(x * pull(c)[0]).array

    with jax.set_mesh(auto_mesh):
        forth, back = jax.block_until_ready(jax.jit(transposed)(x, jax.random.key(0)))
    np.testing.assert_allclose(forth, back, rtol=1e-4)


def test_vmap(auto_mesh: Mesh, x) -> None:
    total = axn.shard_map(lambda x: axn.psum(axn.sum(x, "batch"), "batch"), mapping=MAPPING)
    with jax.set_mesh(auto_mesh):
        found = jax.jit(jax.vmap(lambda a: total(axn.named(a, ("batch", "pos"))).array, in_axes=2))(x.array)
    np.testing.assert_allclose(found, X.sum(0).T)


def test_inside_the_positional_shard_map(auto_mesh: Mesh) -> None:
    """A collective needs no more than the mesh, and the mapping where it is asked by a logical axis."""
    with jax.set_mesh(auto_mesh), axn.axis_mapping(MAPPING):
        for word in ("data", "batch"):
            total = jax.shard_map(lambda x, word=word: axn.psum(x.sum(0), word), in_specs=P("data"), out_specs=P())
            np.testing.assert_allclose(jax.jit(total)(X), X.sum(0))


# --- words that could mean two things ---


def test_a_word_for_two_things_is_refused(auto_mesh: Mesh) -> None:
    x = axn.ones(axn.make_axes(data=8, other=4))
    mapping = {"other": "data", "data": "model"}
    total = lambda word: lambda x: axn.psum(axn.sum(x, ("data", "other")), (word, "other", axn.MeshAxis("model")))
    with jax.set_mesh(auto_mesh):
        with pytest.raises(ValueError) as caught:
            run(total("data"), x, mapping=mapping)
        assert str(caught.value) == (
            "psum: 'data' could be the logical axis, which is sharded over 'model', or the mesh axis. Say which: "
            "`axonym.MeshAxis('data')` is the mesh axis, and an Axis, as `x.resolve_axis('data')` gives, the logical "
            "one."
        )
        for word in (axn.MeshAxis("data"), axn.Axis("data", 8)):
            np.testing.assert_array_equal(run(total(word), x, mapping=mapping).array, 32)
        with pytest.raises(
            ValueError, match=r"'model' could be the logical axis, which is replicated, or the mesh axis"
        ):
            run(lambda x: axn.psum(x, "model"), axn.ones({"model": 4, "batch": 8}))
        same = run(lambda x: axn.psum(axn.sum(x, "data"), "data"), axn.ones({"data": 8}), mapping={"data": "data"})
        np.testing.assert_array_equal(same.array, 8)


def test_an_axis_that_is_split_in_two_ways(auto_mesh: Mesh) -> None:
    a, b = axn.ones({"embed": 8}), axn.ones({"embed": 8})
    split = ({"embed": "data"}, {"embed": "model"})
    with jax.set_mesh(auto_mesh):
        with pytest.raises(
            ValueError, match="the arguments shard axis 'embed' in several ways, over 'data' and 'model'"
        ):
            run(lambda a, b: axn.all_gather(a, "embed"), a, b, in_specs=split)
        gathered = lambda a, b: axn.all_gather(a, "embed", over="data", invariant=True)
        np.testing.assert_array_equal(run(gathered, a, b, in_specs=split).array, np.ones(8))


# --- refusals ---

NUMBER: Any = 3
REFUSED: dict[str, tuple[Any, str]] = {
    "unknown word": (lambda x: axn.psum(x, "bach"), "psum: 'bach' is neither a mesh axis nor .*mean 'batch'"),
    "unknown mesh axis": (lambda x: axn.psum(x, axn.MeshAxis("dat")), "psum: no mesh axis 'dat'.*(data=4, model=2)"),
    "not a word": (lambda x: axn.psum(x, NUMBER), "psum: an axis is given by an Axis, a name or a MeshAxis, got int"),
    "an axis that is not split": (lambda x: axn.psum(x, "embed"), "psum: 'embed' is neither a mesh axis nor"),
    "psum of what does not vary": (
        lambda x: axn.psum(axn.psum(axn.sum(x, "batch"), "batch"), "batch"),
        r"psum: the array float32\[pos=3, embed=4\] is the same on all 4 devices of mesh axis 'data' \(which shards "
        r"'batch'\): the sum would be 4 times it",
    ),
    "pmean of a gradient": (
        lambda x: axn.pmean(
            jax.grad(lambda w: axn.mean(axn.sum(x * w, ("batch", "pos"))).array)(axn.ones({"embed": 4})), "batch"
        ),
        r"pmean: .* is the same on all 4 devices .*\(Differentiation already sums the gradient of a value that "
        "is the same on all devices; to average it",
    ),
    "psum of a number": (lambda x: axn.psum(1.0, "batch"), "psum: the value is the same on all 4 devices.*axis_size"),
    "gather what is whole": (
        lambda x: axn.all_gather(x, "embed", over="data"),
        r"all_gather: axis 'embed' of float32\[batch=2, pos=3, embed=4\] is replicated already: 4 is its size outside",
    ),
    "gather twice": (
        lambda x: axn.all_gather(axn.all_gather(x, "batch"), "batch"),
        "all_gather: axis 'batch' of .* is replicated already: 8 is its size outside",
    ),
    "gather what does not vary": (
        lambda x: axn.all_gather(axn.ones({"new": 2}), "new", over="data"),
        "all_gather: the array .* is the same on all 4 devices of mesh axis 'data'",
    ),
    "gather over nothing": (
        lambda x: axn.all_gather(x, "embed"),
        "all_gather: nothing shards axis 'embed' of .* here: neither the arguments nor the mapping",
    ),
    "gather an axis that is not there": (
        lambda x: axn.all_gather(x, "bach"),
        r"all_gather: no axis 'bach' in \(batch=2, pos=3, embed=4\). Did you mean 'batch'",
    ),
    "gather an axis of another size": (
        lambda x: axn.all_gather(x, axn.Axis("batch", 9)),
        "axis 'batch' has conflicting",
    ),
    "gather a raw array": (lambda x: axn.all_gather(x.array, "batch"), "all_gather: expected a NamedArray"),
    "scatter what does not divide": (
        lambda x: axn.psum_scatter(x, "pos", over="batch"),
        r"psum_scatter: axis 'pos' of .* cannot be sharded over mesh axis 'data' \(which shards 'batch'\): 3 is not a "
        "multiple of 4",
    ),
    "scatter what does not vary": (
        lambda x: axn.psum_scatter(axn.ones({"embed": 4}), "embed", over="batch"),
        "psum_scatter: the array .* is the same on all 4 devices",
    ),
    "all_to_all of what does not divide": (
        lambda x: axn.all_to_all(x, split="pos", gather="batch", over="batch"),
        "all_to_all: axis 'pos' of .* cannot be sharded over mesh axis 'data'",
    ),
    "ppermute to nowhere": (
        lambda x: axn.ppermute(x, "batch", [(0, 4)]),
        r"ppermute: \(0, 4\) names a device outside of 0..3: mesh axis 'data' \(which shards 'batch'\) has 4",
    ),
    "ppermute twice": (
        lambda x: axn.ppermute(x, "batch", [(0, 1), (2, 1)]),
        "device 1 is the destination of more than",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(auto_mesh: Mesh, x, case: str) -> None:
    fn, message = REFUSED[case]
    with jax.set_mesh(auto_mesh), pytest.raises((ValueError, TypeError), match=message):
        run(fn, x)


def test_what_is_split_is_not_split_again(auto_mesh: Mesh) -> None:
    with jax.set_mesh(auto_mesh):
        with pytest.raises(
            ValueError, match=r"axis 'batch' of .* is sharded over mesh axis 'data' .* already: 4 of 16. Each"
        ):
            run(lambda x: axn.psum_scatter(x, "batch"), axn.ones({"batch": 16}))
        with pytest.raises(
            ValueError, match=r"all_to_all: axis 'batch' of .* is sharded over mesh axis 'data' .* already"
        ):
            run(lambda x: axn.all_to_all(x, "batch", "pos", over="data"), axn.ones({"batch": 16, "pos": 2}))


def test_all_to_all_between_axes_that_go_elsewhere(auto_mesh: Mesh, x) -> None:
    """What came in split is what is put together; on the way back, sizes do not tell."""
    there = lambda x: axn.all_to_all(x, split="embed", gather="pos")
    back = lambda over: lambda x: axn.all_to_all(there(x), split="pos", gather="embed", over=over)
    mapping = {"pos": "model", "embed": "data"}
    with jax.set_mesh(auto_mesh):
        with pytest.raises(
            ValueError, match=r"over mesh axis 'data' .* and over mesh axis 'model' .*\. Choose one with"
        ):
            run(back(None), x, mapping=mapping, in_specs={"pos": "model"})
        same = run(back("model"), x, mapping=mapping, in_specs={"pos": "model"})
        gone = run(there, x, mapping=mapping, in_specs={"pos": "model"}, out_specs={"embed": "model"})
    np.testing.assert_array_equal(same.array, X)
    np.testing.assert_array_equal(gone.array, X)


def test_the_offset_in_an_axis_that_the_arguments_do_not_have(auto_mesh: Mesh, x) -> None:
    mapping = MAPPING | {"new": "data"}
    offsets = lambda x: axn.pvary(axn.zeros({"new": 5}), "new") + axn.axis_offset("new", x=axn.zeros({"new": 5}))
    with jax.set_mesh(auto_mesh):
        np.testing.assert_array_equal(run(offsets, x, mapping=mapping).array, np.arange(20) // 5 * 5)
        with pytest.raises(ValueError, match=r"how large is a shard of axis 'new'.* The arguments do not have it"):
            run(lambda x: axn.axis_offset("new"), x, mapping=mapping)


def test_outside_of_a_shard_map(auto_mesh: Mesh, x) -> None:
    for word in ("batch", axn.MeshAxis("data")):
        with pytest.raises(ValueError, match="psum: collectives work inside `axonym"):
            axn.psum(x, word)
    with axn.axis_mapping(MAPPING), pytest.raises(ValueError, match="psum: collectives work inside `axonym"):
        axn.psum(x, "batch")
    with jax.set_mesh(auto_mesh):
        with pytest.raises(
            ValueError, match="psum: 'pos' means mesh axis 'model', which is left to the partitioner here"
        ):
            run(lambda x: axn.psum(x, "pos"), x, axis_names={"data"})


# --- devices as an axis ---

WITHOUT_TILING: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "all_gather": (
        lambda x: axn.all_gather(x.broadcast_axis(axn.Axis("from", 1)), "from", over="batch"),
        lambda a: jax.lax.all_gather(a, "data"),
        ("from", "batch", "pos", "embed"),
    ),
    "psum_scatter": (
        lambda x: axn.psum_scatter(x, "embed", over="data")["embed", 0],
        lambda a: jax.lax.psum_scatter(a, "data", scatter_dimension=2),
        ("batch", "pos"),
    ),
    "all_to_all": (
        lambda x: axn.all_to_all(x, "embed", "embed", over="data").rename({"embed": "from"}),
        lambda a: jax.lax.all_to_all(a, "data", 2, 2),
        ("batch", "pos", "from"),
    ),
}


@pytest.mark.parametrize("case", WITHOUT_TILING)
def test_what_jax_does_without_tiling(mesh: Mesh, x, case: str) -> None:
    fn, raw, names = WITHOUT_TILING[case]
    inside = lambda x: (fn(x), axn.named(raw(x.array), names))
    with jax.set_mesh(mesh):
        found, expected = run(inside, x, out_specs={"batch": "data", "pos": "model"})
        assert found.names == names
        np.testing.assert_array_equal(found.array, expected.array)

        def loss(x, which):
            return axn.sum(run(inside, x, out_specs={"batch": "data", "pos": "model"})[which] ** 2).scalar()

        ours, theirs = jax.grad(loss)(x, 0), jax.grad(loss)(x, 1)
        np.testing.assert_allclose(ours.array, theirs.array)


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_gradient_of_one_value_that_is_gathered(check_vma: bool, mesh: Mesh) -> None:
    """Without `check_vma` JAX would take the result for one value of each device, and each device's share for all."""
    x = axn.random.normal(jax.random.key(0), {"batch": 8, "embed": 4})

    def loss(x: axn.NamedArray) -> jax.Array:
        def of_all(x: axn.NamedArray) -> axn.NamedArray:
            return axn.all_gather(axn.all_gather(x, "embed", invariant=True), "batch", invariant=True)

        return axn.sum(axn.sin(axn.shard_map(of_all, check_vma=check_vma)(x))).scalar()

    with jax.set_mesh(mesh), axn.axis_mapping({"batch": "data", "embed": "model"}):
        found = jax.block_until_ready(jax.jit(jax.grad(loss))(axn.shard(x)))
    np.testing.assert_allclose(found.array, jnp.cos(x.array), rtol=1e-5)
