"""The policy by itself: decisions from names, sizes and mappings, without arrays."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import axonym as axn
from axonym.distribution import policy
from axonym.distribution.mesh_axes import entry_of
from axonym.distribution.policy import Mappings, PartialSum, PlacedAxes, Undecided
from tests.distribution.test_laws import DIFFERENCES, OPERATIONS, mappings_of, sent_bytes
from tests.helpers import spec
from tests.insight import cases

MESH = {"data": 4, "model": 2}
SIZES = dict.fromkeys("abcde", 8)


def test_results_of_operands_that_lie_by_the_mapping_lie_by_it() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        by = Mappings(
            MESH, dict(zip(rng.sample("abcde", 2), rng.choice([("data", "model"), ("data", None)]), strict=True)), {}
        )
        operands = [tuple(rng.sample("abcde", rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        names = list(dict.fromkeys(n for operand in operands for n in operand))
        summed = tuple(rng.sample(names, rng.randint(0, len(names) - 1)))
        kept = tuple(n for n in names if n not in summed)
        placed = [PlacedAxes(operand, [*map(by.used, operand)]) for operand in operands]
        decision = policy.combine("dot", placed, kept, SIZES, by, summed)
        assert decision.result.over == [*map(by.used, kept)] and not decision.gathers
        assert [a for part in decision.sums for a in part.axes] == [a for n in summed for a in by.used(n)]


def test_parameters_are_gathered_and_their_gradients_scattered() -> None:
    by = Mappings(MESH, {"a": "data", "d": "model"}, {"c": "data", "d": "model"})
    x, w = (PlacedAxes(names, [*map(by.used, names)]) for names in (("a", "c"), ("c", "d")))
    decision = policy.combine("dot", [x, w], ("a", "d"), SIZES, by, ("c",))
    assert decision.operands == [x, (("c", "d"), [("data",), ("model",)])]
    assert decision.gathers == {1: [("data",), ()]} and decision.sums == []
    stored = decision.operands[1]
    gradient = policy.sums_of_jax([("data",)], w, stored)
    assert gradient == (stored, [PartialSum("reduce-scatter", ("data",))])
    gradient = policy.sums_of_jax([("data", "other")], w, stored)
    assert gradient[1] == [PartialSum("reduce-scatter", ("data",)), PartialSum("all-reduce", ("other",))]


@pytest.mark.parametrize(
    ("compute", "storage", "others", "over"),
    [
        ({"a": "data"}, {"c": "data"}, ("data",), ("data",)),
        ({"a": "data"}, {"c": "data"}, (), None),  # no operand shares its mesh axis
        ({"a": "data", "c": "model"}, {"c": ("model", "data")}, ("data",), ("data",)),
        ({"a": "data", "c": "model"}, {"c": "data"}, ("data",), None),  # storage does not refine
        ({"a": "data"}, {}, ("data",), ()),
    ],
)
def test_which_parameters_are_gathered(compute, storage, others, over) -> None:
    assert policy.gathered_over("cd", others, Mappings(MESH, compute, storage)) == over


def test_successors_take_over_what_divides_them() -> None:
    placed, by = [PlacedAxes(("c",), [("data", "model")])], Mappings(MESH, {}, {})
    settle = lambda sizes: policy.settle("unflatten", ("x", "y"), sizes, placed, by, {"c": ("x", "y")}).over
    assert settle({"x": 4, "y": 2}) == [("data",), ("model",)]
    assert settle({"x": 8, "y": 1}) == [("data", "model"), ()]
    assert settle({"x": 2, "y": 4}) == [(), ("data",)]


def test_what_names_leave_open() -> None:
    over = [PlacedAxes(("a",), [(axis,)]) for axis in ("data", "model")]
    with pytest.raises(Undecided, match="add: the operands shard axis 'a' over different mesh axes"):
        policy.settle("add", ("a",), SIZES, over, Mappings(MESH, {}, {}))
    assert policy.settle("add", ("a",), SIZES, over, Mappings(MESH, {"a": "model"}, {})).over == [("model",)]


# --- one function ---

ADD_UP = policy.add_up


def _scattered(parts: Any, result: PlacedAxes, sizes: Any, by: Mappings) -> Any:
    """Another policy: a product is scattered onto its first free axis if none has the mesh axes of the sum."""
    result, sums = ADD_UP(parts, result, sizes, by)
    over = sums[0].axes if sums else ()
    fits = [i for i, size in enumerate(sizes) if result.names[i] and not result.over[i] and size % by.count(over) == 0]
    if not over or not fits or any(set(over) & set(axes) for axes in result.over):
        return result, sums
    placed = [over if i == fits[0] else axes for i, axes in enumerate(result.over)]
    return PlacedAxes(result.names, placed), [PartialSum("reduce-scatter", over, result.names[fits[0]])]


@pytest.fixture
def own_programs() -> Iterator[None]:
    """Clear what JAX has traced, which does not know of another policy."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("own_programs")
def test_another_policy_is_one_function(monkeypatch: pytest.MonkeyPatch, auto_mesh: Mesh, explicit_mesh: Mesh) -> None:
    """Explicit mesh axes, FSDP and reports by name follow it; XLA on Auto mesh axes does not."""
    monkeypatch.setattr(policy, "add_up", _scattered)
    x, w = axn.ones({"rows": 8, "contracted": 16}), axn.ones({"contracted": 16, "columns": 8})
    dot = lambda x, w: axn.dot(x, w, axis="contracted")
    mapping = {"contracted": "data"}
    for mesh, wanted in ((explicit_mesh, P("data", None)), (auto_mesh, P())):
        with jax.set_mesh(mesh), axn.axis_mapping(mapping):
            found = jax.block_until_ready(jax.jit(dot)(axn.shard(x), axn.shard(w)))
        assert found.array.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, wanted), 2)
        assert (found.array == 16).all()
    fsdp = ({"columns": "data"}, {"rows": "data", "contracted": "model"})
    kinds = {}
    for by in ("names", "partitioner"):
        with jax.set_mesh(auto_mesh):
            report = axn.insight.explain(dot, x, w, mapping=fsdp, by=by)
        kinds[by] = sorted((c.kind, c.axes, c.sent) for c in report.collectives)
    assert kinds["names"] == kinds["partitioner"]
    assert [kind for kind, axes, _ in kinds["names"] if axes == ("model",)] == ["all-gather", "reduce-scatter"]


PRODUCTS = [name for name in OPERATIONS if "product" in name or name in ("three operands", "one operand", "layers")]


@pytest.mark.oldest
@pytest.mark.usefixtures("own_programs")
@pytest.mark.parametrize("what", PRODUCTS)
def test_gradients_do_not_ask_a_policy_for_products(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in reports by name nor on Explicit mesh axes: under another policy, both send the same.

    Mappings of a contracted axis are left out. There the product itself is scattered, for which the partitioner for
    CPUs sends other bytes; where its result lies is tested below.
    """
    operation = OPERATIONS[what]
    by, kept = tuple(range(len(operation.arguments))), _result_of(what).names
    for mapping in mappings_of(operation):
        stored, used = mapping if isinstance(mapping, tuple) else ({}, mapping)
        if any(axes and n not in kept for n, axes in used.items()):
            continue
        sent = []
        for add_up in (ADD_UP, _scattered):
            monkeypatch.setattr(policy, "add_up", add_up)
            jax.clear_caches()
            step = jax.grad(lambda *xs: (operation.call(*xs) ** 2).sum().scalar(), by)
            with jax.set_mesh(cases.mesh_of(AxisType.Explicit, data=4, model=2)):
                reports = [
                    axn.insight.explain(step, *operation.arguments, mapping=mapping, by=source)
                    for source in ("names", "partitioner")
                ]
            sent.append([sent_bytes(report) for report in reports])
        (names, explicit), scattered = sent
        assert [names, explicit] == scattered, mapping
        assert names == explicit or any(d.operation == what and d.when(stored, used, True) for d in DIFFERENCES), (
            mapping
        )


def _result_of(what: str) -> Any:
    return jax.eval_shape(OPERATIONS[what].call, *OPERATIONS[what].arguments)


@pytest.mark.usefixtures("own_programs")
@pytest.mark.parametrize("what", ["product", "product in batches"])
def test_results_lie_where_another_policy_puts_them(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Explicit mesh axes, the result of each product lies where `combine` and `add_up` say."""
    monkeypatch.setattr(policy, "add_up", _scattered)
    operation, mesh, scattered = OPERATIONS[what], cases.mesh_of(AxisType.Explicit, data=4, model=2), 0
    sizes = {n: size for x in operation.arguments for n, size in x.shape.items()}
    for mapping in mappings_of(operation):
        if isinstance(mapping, tuple):
            continue
        by = Mappings(MESH, mapping, {})
        placed = [PlacedAxes(x.names, [*map(by.used, x.names)]) for x in operation.arguments]
        out = _result_of(what).names
        summed = tuple(n for n in sizes if n not in out)
        with jax.set_mesh(mesh), axn.axis_mapping(mapping):
            found = jax.eval_shape(lambda *xs: operation.call(*map(axn.shard, xs)), *operation.arguments)
        decision = policy.combine("dot", placed, out, sizes, by, summed)
        assert spec(found) == tuple(entry_of(axes) for axes in decision.result.over), mapping
        scattered += any(part.onto for part in decision.sums)
    assert scattered
