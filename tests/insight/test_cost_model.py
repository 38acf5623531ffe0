"""Exchanges take what the shape of a topology says, resources add up, and bounds are below estimates."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from axonym.insight import CHIPS, Islands, Torus, cost_model
from axonym.insight._accounts import parts_of_report, rates_at
from axonym.insight.cost_model import Multiplication, Part, Sent, rate_of
from axonym.insight.linked_chips import Placement, topologies_of

pytestmark = pytest.mark.oldest


def gather(topology: Any, placed: Placement, *axes: str) -> cost_model.Rate:
    return rate_of("all-gather", topology.route(placed, axes), topology.chip)


def one(topology: Any, mesh: dict[str, int]) -> Placement:
    return topology.placements(mesh)[0]


def test_dimensions_wrap_around_where_the_documentation_says() -> None:
    assert all(Torus("v5p", (4, 4, 8)).wraps(d) for d in range(3))
    assert not any(Torus("v5p", (2, 2, 4)).wraps(d) for d in range(3))
    assert [Torus("v5e", (8, 16)).wraps(d) for d in range(2)] == [False, True]


def test_a_line_takes_twice_as_long_as_a_ring() -> None:
    mesh = {"data": 8, "model": 8}
    ring, line = Torus("v5p", (1, 8, 8)), Torus("v5e", (8, 8))
    # A slice with a dimension of one is not made of cubes.
    assert not ring.wraps(1)
    cube = Torus("v5p", (8, 8, 8))
    wrapped = gather(cube, one(cube, {"data": 64, "model": 8}), "model").per_byte * cube.chip.link
    straight = gather(line, one(line, mesh), "model").per_byte * line.chip.link
    assert straight == pytest.approx(2 * wrapped)


def test_ironwood_gathers_at_the_sum_of_its_dimensions() -> None:
    """179 GB/s in 2x2, over two links of 89: https://github.com/AI-Hypercomputer/tpu-recipes, collectives."""
    v7x = dataclasses.replace(CHIPS["v5p"], link_bandwidth=600e9)
    grid = Torus(v7x, (2, 2, 1))
    received = 3 / 4
    assert received / gather(grid, one(grid, {"data": 4}), "data").per_byte == pytest.approx(2 * 0.9 * 100e9)


def test_parts_of_a_dimension_share_its_links() -> None:
    torus = Torus("v5e", (16, 16))
    placed = next(p for p in torus.placements({"data": 64, "model": 4}) if len(p.spans["data"]) == 2)
    inner, whole = gather(torus, placed, "model"), one(torus, {"data": 16, "model": 16})
    # Four in a line, with one link to each side, against sixteen in a ring.
    assert inner.per_byte / (3 / 4) == pytest.approx(2 * gather(torus, whole, "model").per_byte / (15 / 16))


def test_axes_on_the_same_links_add_up() -> None:
    torus = Torus("v5p", (8, 8, 8))
    placed = one(torus, {"data": 64, "model": 8})
    sent = [Sent("all-gather", (a,), 1e9, "exchanging activations") for a in ("data", "model")]
    links = cost_model.bounds([Part(1, sent=tuple(sent))], rates_at(torus, placed), torus.chip).links
    # Both leave a chip over the same six links; each has dimensions of its own.
    assert links["data", "model"] == pytest.approx((63 / 64 + 7 / 8) * 1e9 / 600e9)
    assert set(links) == {("data", "model"), ("data",), ("model",)}


def test_bounds_take_the_least_of_branches() -> None:
    """An estimate takes their mean; products of 8 bits count in estimates only; so on several meshes at once."""
    chip = CHIPS["v5p"]
    rate = cost_model.Rate(1e-9, 0.0, 0.0, {"network": np.array([1e-9, 2e-9])})

    def branch(i: int, flops: float, size: float) -> tuple[Multiplication, Sent]:
        at = ((7, 2, i),)
        sent = Sent("all-gather", ("data",), np.array([size, 2 * size]), "gathering parameters", branches=at)
        return Multiplication(np.array([flops, 1.0]), 1e9, branches=at), sent

    (a, x), (b, y) = branch(0, 4e12, 1e9), branch(1, 1e12, 3e9)
    narrow = Multiplication(8e12, 1e9, narrow=True)
    part = Part(2, (a, b, narrow), (x, y))
    least = cost_model.bounds([part], lambda *_: rate, chip)
    assert least.compute == pytest.approx(np.array([2e12, 2.0]) / chip.flops)
    assert least.links["data",] == pytest.approx(np.array([2.0, 8.0]))
    products = cost_model.estimate([part], lambda *_: rate, chip).terms["products"]
    assert products[0] == pytest.approx(2 * (2.5e12 + 8e12) / chip.flops / chip.reached.products, rel=1e-3)
    assert cost_model.bounds([Part(1, (a,))], lambda *_: rate, chip).compute == 0, "the other branch computes nothing"


def test_what_moves_to_the_host_takes_its_link() -> None:
    """It leaves in the forward pass and returns in the backward pass, one after the other."""
    chip = CHIPS["v6e"]
    parts = [Part(4, touched=1e6, offloaded=8e9), Part(4, touched=1e6, offloaded=8e9, forward=False)]
    rates = cost_model.least_rates(chip)
    least, seconds = cost_model.bounds(parts, rates, chip), cost_model.estimate(parts, rates, chip)
    assert least.host == pytest.approx(4 * 8e9 / 32e9) and least.bottleneck == "moving to the host"
    assert seconds.terms["offloading"] == pytest.approx(2 * 4 * 8e9 / 32e9, rel=1e-4)
    assert cost_model.bounds([Part(1, touched=1e6)], rates, chip).host is None


def test_tensor_parallelism_falls_off_an_island() -> None:
    """Sixteen GPUs in two islands are never cheaper than eight in one, at equal bytes."""
    cluster = Islands("h100", 64)
    inside, across = (gather(cluster, Placement({"data": 64 // n, "model": n}), "model") for n in (8, 16))
    assert (
        across.per_byte >= inside.per_byte
        and across.launch > inside.launch
        and set(across.busy) == {"links", "network"}
    )
    # An axis outside of one that fills the island has one network card, an axis alone has eight.
    outside = gather(cluster, Placement({"data": 8, "model": 8}), "data").busy["network"]
    alone = gather(cluster, Placement({"data": 64}), "data").busy["network"]
    assert outside == pytest.approx(8 * alone)


def test_slices_exchange_over_the_network() -> None:
    torus = Torus("v5e", (16, 16), slices=2)
    assert torus.chips == 512 and str(torus) == "v5e:16x16x2slices"
    placed = torus.placements({"data": 2, "model": 256})
    assert any("network" in gather(torus, p, "data").busy for p in placed)


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"])
@pytest.mark.parametrize("topology", [Torus("v5p", (4, 4, 8)), Torus("v5e", (4, 4), 8), Islands("h100", 128)])
def test_bounds_are_below_estimates(kind: str, topology: Any) -> None:
    for mesh in ({"data": 128}, {"data": 16, "model": 8}, {"replica": 8, "data": 4, "model": 4}):
        for placed in topology.placements(mesh):
            for a in mesh:
                axes: tuple[str, ...] = (a,)
                rates = rates_at(topology, placed)
                product = Multiplication(1e12, 64)
                parts = [Part(3, (product,), (Sent(kind, axes, 1e8, "exchanging activations"),), 1e6)]
                least = cost_model.bound(parts, rates, topology.chip)
                assert 0 < least <= cost_model.estimate(parts, rates, topology.chip).seconds


def test_names_of_topologies() -> None:
    assert topologies_of("v5p:8x8x8", "v5e") == [Torus("v5p", (8, 8, 8))]
    assert topologies_of("v5e:16x16x4slices", "v5p") == [Torus("v5e", (16, 16), 4)]
    assert topologies_of("h100:64", "v5p") == [Islands("h100", 64)]
    assert Torus("v5p", (8, 8, 8)) in topologies_of(512, "v5p")
    assert {t.slices for t in topologies_of(512, "v5e")} == {2}  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="a topology is written as 'v5p:8x8x8'"):
        topologies_of("v5p:8by8", "v5p")
    with pytest.raises(ValueError, match=r"the largest slice of v5e is 16x16, got 16x32. Use several"):
        Torus("v5e", (16, 32))
    with pytest.raises(ValueError, match="cannot be divided into islands of 8"):
        Islands("h100", 12)


def test_what_computing_hides() -> None:
    chip = CHIPS["v5p"]
    rate = cost_model.Rate(1e-9, 0.0, 1.0, {})
    ahead = Part(
        2, (Multiplication(chip.flops, 1e9),), (Sent("all-gather", ("data",), 1e8, "gathering parameters", True),)
    )
    terms = cost_model.estimate([ahead], lambda *_: rate, chip).terms
    assert terms["gathering parameters over data"] == pytest.approx(2 * 0.1 * (1 - chip.reached.ahead))
    waiting = cost_model.estimate([dataclasses.replace(ahead, waits=True)], lambda *_: rate, chip)
    assert set(waiting.terms) == {"waiting of stages"}
    assert cost_model.bound([dataclasses.replace(ahead, waits=True)], lambda *_: rate, chip) == 0


def test_several_meshes_at_once() -> None:
    torus = Torus("v5p", (4, 4, 8))
    each = [gather(torus, p, "data") for n in (2, 4, 8) for p in torus.placements({"data": 128 // n, "model": n})]
    together = cost_model.stacked(each)
    parts = [Part(1, (), (Sent("all-gather", ("data",), 1e9, "gathering parameters"),))]
    seconds = cost_model.estimate(parts, lambda *_: together, torus.chip)
    for i, rate in enumerate(each):
        alone = cost_model.estimate(parts, lambda *_, rate=rate: rate, torus.chip)
        assert seconds.at(i).seconds == pytest.approx(float(alone.seconds))
    assert np.shape(seconds.seconds) == (len(each),)


MIB = 2**20


def seconds(kind: str, topology: Any, placed: Placement, axes: tuple[str, ...], size: float) -> tuple[float, ...]:
    """The seconds at published rates of an exchange of a complete array, and those that its resources are busy."""
    reached = dataclasses.replace(topology.chip.reached, links=1.0, network=1.0)
    ideal = dataclasses.replace(topology, chip=dataclasses.replace(topology.chip, reached=reached))
    rate = rate_of(kind, ideal.route(placed, axes), ideal.chip)
    return rate.per_byte * size, max(rate.busy.values()) * size


def test_an_all_to_all_sends_what_a_device_has() -> None:
    """Each of k devices sends its s bytes but for its own share: the complete array has k times as many."""
    own = 64 * MIB
    islands = Islands("h100", 8)
    for found in seconds("all-to-all", islands, Placement({"expert": 8}), ("expert",), 8 * own):
        assert found == pytest.approx(own * 7 / 8 / 450e9)
    # Sixteen in two islands: half of what a device has goes over its network card.
    islands = Islands("h100", 16)
    for found in seconds("all-to-all", islands, Placement({"expert": 16}), ("expert",), 16 * own):
        assert found == pytest.approx(own / 2 / 50e9)
    # Through each of the two cuts of a ring of 16, an eighth of 16 devices' bytes goes one way; in 16 x 16 as well.
    torus = Torus("v5e", (16, 16))
    placed = one(torus, {"data": 16, "model": 16})
    for found in seconds("all-to-all", torus, placed, ("model",), 16 * own):
        assert found == pytest.approx(own * 16 / 8 / 50e9)
    for found in seconds("all-to-all", torus, one(torus, {"expert": 256}), ("expert",), 256 * own):
        assert found == pytest.approx(own * 16 / 8 / 50e9)
    # The middle of a line of four carries what two devices send to the two others, one way.
    grid = Torus("v5e", (4, 4))
    for found in seconds("all-to-all", grid, one(grid, {"data": 4, "model": 4}), ("model",), 4 * own):
        assert found == pytest.approx(own * 4 / 4 / 50e9)
    # Two slices: half of what a device has goes over the network.
    slices = Torus("v5e", (4, 4), slices=2)
    for found in seconds("all-to-all", slices, one(slices, {"expert": 32}), ("expert",), 32 * own):
        assert found == pytest.approx(own / 2 / 3.125e9)


def test_a_shift_to_a_neighbor_uses_one_link() -> None:
    own = 64 * MIB
    cube, slices, islands = Torus("v5p", (8, 8, 8)), Torus("v5e", (4, 4), slices=2), Islands("h100", 16)
    for topology, mesh, rate in (
        (cube, {"pos": 512}, 100e9),
        (cube, {"data": 64, "pos": 8}, 100e9),
        (slices, {"pos": 32}, 3.125e9),
        (islands, {"pos": 16}, 50e9),
        (islands, {"data": 2, "pos": 8}, 450e9),
    ):
        found, _ = seconds("collective-permute", topology, one(topology, mesh), ("pos",), own)
        assert found == pytest.approx(own / rate), mesh


def test_bounds_of_sums() -> None:
    """A line reduces to one end and returns at the same time; a ring of n sends (1 - 1/n) twice, both ways."""
    own = 64 * MIB
    line, ring, islands = Torus("v5e", (8, 8)), Torus("v5e", (16, 16)), Islands("h100", 8)
    for topology, mesh, least in (
        (line, {"data": 8, "model": 8}, own / 50e9),
        (ring, {"data": 16, "model": 16}, own * 15 / 16 / 50e9),
        (islands, {"model": 8}, own * 7 / 8 / 450e9),
    ):
        assert seconds("all-reduce", topology, one(topology, mesh), ("model",), own)[1] == pytest.approx(least)


def test_exchanges_of_a_pipeline_overlap_with_its_layers() -> None:
    """A pipeline of six turns exchanges while it computes the layers, which are of other turns; amounts stay."""
    layers, head = (Part(n, (Multiplication(flops, 64),)) for n, flops in ((4, 1e12), (1, 1e9)))
    of: dict[str, Any] = {"axes": ("stage",), "sent": 1, "devices": 2, "parameters": (), "stored": (), "branches": ()}
    sent = [SimpleNamespace(kind="collective-permute", size=100, times=n, phase="forward", **of) for n in (6, 1)]
    report: Any = SimpleNamespace(flops=None, collectives=sent)
    first, last = parts_of_report(report, [layers, head])
    assert [(x.size * first.times, x.count * first.times) for x in first.sent] == [(600, 6)]
    assert [(x.size, x.count) for x in last.sent] == [(100, 1)]


def test_counts_that_are_no_power_of_two() -> None:
    cluster = Islands("h100", 24)
    for mesh, axis, counts in (
        ({"data": 8, "model": 3}, "model", [3]),  # 8 are no multiple of 3: some threes lie in two islands
        ({"data": 6, "model": 4}, "data", [2, 3]),
        ({"data": 4, "model": 6}, "model", [2, 3]),
        ({"data": 3, "model": 8}, "data", [3]),
    ):
        levels = cluster.route(Placement(mesh), (axis,))
        assert [level.count for level in levels] == counts, (mesh, axis)
    assert [level.count for level in Islands("h100", 6).route(Placement({"model": 6}), ("model",))] == [6]


def test_a_chip_without_a_largest_slice() -> None:
    own = dataclasses.replace(CHIPS["v5e"], name="own", pod=())
    assert Torus(own, (4, 4)) in topologies_of(16, own)
    with pytest.raises(ValueError, match="a topology is written as 'v5p:8x8x8'"):
        topologies_of("v5e:16x16xslices", "v5p")
