"""Exchanges take what islands of chips say, resources add up, and bounds are below estimates."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from axonym.insight import CHIPS, Islands, cost_model
from axonym.insight._accounts import parts_of_report
from axonym.insight.chips import islands_of
from axonym.insight.cost_model import Multiplication, Part, Sent

pytestmark = pytest.mark.oldest


def gather(islands: Islands, mesh: dict[str, int], *axes: str) -> cost_model.Rate:
    return islands.rate(mesh, "all-gather", axes)


def test_rings_have_the_links_of_one_dimension() -> None:
    """Ironwood gathers at 179 GB/s in 2x2: https://github.com/AI-Hypercomputer/tpu-recipes, collectives.

    Over all chips, the compiler makes a sum of a gather, which is sent twice over all links.
    """
    cube = Islands("v5p", 512)
    one, two, three = (gather(cube, {"data": 512 // n, "model": n}, "model") for n in (8, 64, 512))
    for rate, n, dimensions in ((one, 8, 1), (two, 64, 1), (three, 512, 3 / 2)):
        assert rate.per_byte == pytest.approx((1 - 1 / n) / (dimensions * 2 * cube.chip.link) / 0.9)
        assert rate.busy == {"links": pytest.approx((1 - 1 / n) / cube.chip.link_bandwidth)}


def test_axes_on_the_same_links_add_up() -> None:
    cube, mesh = Islands("v5p", 512), {"data": 64, "model": 8}
    sent = [Sent("all-gather", (a,), 1e9, "exchanging activations") for a in ("data", "model")]
    links = cost_model.bounds([Part(1, sent=tuple(sent))], functools.partial(cube.rate, mesh), cube.chip).links
    assert links == {("data", "model"): pytest.approx((63 / 64 + 7 / 8) * 1e9 / 600e9)}


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
    inside, across = (gather(cluster, {"data": 64 // n, "model": n}, "model") for n in (8, 16))
    assert (
        across.per_byte >= inside.per_byte
        and across.launch > inside.launch
        and set(across.busy) == {"links", "network"}
    )
    # An axis outside of one that fills the island has one network card, an axis alone has eight.
    outside = gather(cluster, {"data": 8, "model": 8}, "data").busy["network"]
    alone = gather(cluster, {"data": 64}, "data").busy["network"]
    assert outside == pytest.approx(8 * alone)


def test_slices_exchange_over_the_network() -> None:
    slices = islands_of("v5e:16x16x2slices", "v5p")
    assert slices.chips == 512 and str(slices) == "v5e:512 in 2 slices"
    mesh = {"data": 2, "model": 256}
    assert gather(slices, mesh, "data").busy.keys() == {"network"} and slices.between(mesh) == ["data"]
    assert slices.placements(mesh) == [mesh, {"model": 256, "data": 2}] and Islands("v5e", 256).placements(mesh) == [
        mesh
    ]


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"])
@pytest.mark.parametrize("topology", [Islands("v5p", 128), Islands("v5e", 128, 16), Islands("h100", 128)])
def test_bounds_are_below_estimates(kind: str, topology: Any) -> None:
    for mesh in ({"data": 128}, {"data": 16, "model": 8}, {"replica": 8, "data": 4, "model": 4}):
        for placed in topology.placements(mesh):
            for a in mesh:
                axes: tuple[str, ...] = (a,)
                rates = functools.partial(topology.rate, placed)
                product = Multiplication(1e12, 64)
                parts = [Part(3, (product,), (Sent(kind, axes, 1e8, "exchanging activations"),), 1e6)]
                least = cost_model.bound(parts, rates, topology.chip)
                assert 0 < least <= cost_model.estimate(parts, rates, topology.chip).seconds


def test_names_of_topologies() -> None:
    assert islands_of("v5p:8x8x8", "v5e") == Islands("v5p", 512) == islands_of(512, "v5p")
    assert islands_of("v5e:16x16x4slices", "v5p") == Islands("v5e", 1024, 256) == islands_of(1024, "v5e")
    assert islands_of("h100:64", "v5p") == Islands("h100", 64)
    for name in ("v5p:8by8", "v5e:16x16xslices"):
        with pytest.raises(ValueError, match="a topology is written as 'v5p:8x8x8'"):
            islands_of(name, "v5p")
    with pytest.raises(ValueError, match=r"512 chips of v5e cannot be divided into islands of 512, .* at most 256"):
        islands_of("v5e:16x32", "v5p")
    with pytest.raises(ValueError, match="cannot be divided into islands of 8"):
        Islands("h100", 12)
    own = dataclasses.replace(CHIPS["v5e"], name="own", island=0)
    assert Islands(own, 1024).size == 1024, "a chip without a largest slice"


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
    slices = Islands("v5e", 128, 16)
    each = [gather(slices, p, "data") for n in (2, 4, 8) for p in slices.placements({"data": 128 // n, "model": n})]
    together = cost_model.stacked(each)
    parts = [Part(1, (), (Sent("all-gather", ("data",), 1e9, "gathering parameters"),))]
    seconds = cost_model.estimate(parts, lambda *_: together, slices.chip)
    for i, rate in enumerate(each):
        alone = cost_model.estimate(parts, lambda *_, rate=rate: rate, slices.chip)
        assert seconds.at(i).seconds == pytest.approx(float(alone.seconds))
    assert np.shape(seconds.seconds) == (len(each),)


MIB = 2**20


def seconds(kind: str, islands: Islands, mesh: dict[str, int], axis: str, size: float) -> tuple[float, ...]:
    """The seconds at published rates of an exchange of a complete array, and those that its resources are busy."""
    reached = dataclasses.replace(islands.chip.reached, links=1.0, network=1.0)
    ideal = dataclasses.replace(islands, chip=dataclasses.replace(islands.chip, reached=reached))
    rate = ideal.rate(mesh, kind, (axis,))
    return rate.per_byte * size, max(rate.busy.values()) * size


def test_an_all_to_all_sends_what_a_device_has() -> None:
    """Each of k devices sends its s bytes but for its own share: the complete array has k times as many."""
    own = 64 * MIB
    for found in seconds("all-to-all", Islands("h100", 8), {"expert": 8}, "expert", 8 * own):
        assert found == pytest.approx(own * 7 / 8 / 450e9)
    # Sixteen in two islands: half of what a device has goes over its network card.
    for found in seconds("all-to-all", Islands("h100", 16), {"expert": 16}, "expert", 16 * own):
        assert found == pytest.approx(own / 2 / 50e9)
    # Two slices alike.
    for found in seconds("all-to-all", Islands("v5e", 32, 16), {"expert": 32}, "expert", 32 * own):
        assert found == pytest.approx(own / 2 / 3.125e9)


def test_a_shift_to_a_neighbor_uses_one_link() -> None:
    own = 64 * MIB
    for islands, mesh, rate in (
        (Islands("v5p", 512), {"pos": 512}, 100e9),
        (Islands("v5p", 512), {"data": 64, "pos": 8}, 100e9),
        (Islands("v5e", 32, 16), {"pos": 32}, 3.125e9),
        (Islands("h100", 16), {"pos": 16}, 50e9),
        (Islands("h100", 16), {"data": 2, "pos": 8}, 450e9),
    ):
        found, _ = seconds("collective-permute", islands, mesh, "pos", own)
        assert found == pytest.approx(own / rate), mesh


def test_bounds_of_sums() -> None:
    """Chips of a torus send twice; switches of islands may add up what chips send."""
    own = 64 * MIB
    assert seconds("all-reduce", Islands("v5e", 256), {"model": 256}, "model", own)[1] == pytest.approx(
        2 * own * 255 / 256 / 200e9
    )
    assert seconds("all-reduce", Islands("h100", 8), {"model": 8}, "model", own)[1] == pytest.approx(
        own * 7 / 8 / 450e9
    )


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
    for mesh, axis, resources in (
        ({"data": 8, "model": 3}, "model", ["network"]),  # 8 are no multiple of 3: some threes lie in two islands
        ({"data": 6, "model": 4}, "data", ["links", "network"]),
        ({"data": 4, "model": 6}, "model", ["links", "network"]),
        ({"data": 3, "model": 8}, "data", ["network"]),
    ):
        assert [*gather(cluster, mesh, axis).busy] == resources, (mesh, axis)
    assert [*gather(Islands("h100", 6), {"model": 6}, "model").busy] == ["links"]
