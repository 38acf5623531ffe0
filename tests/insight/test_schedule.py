"""The schedules of programs for TPUs: every exchange is found, with what is computed beside it.

`programs` has texts that the compiler wrote, of two layers of a multilayer perceptron of 4096 x 14336, forward and
backward, without the attributes that nothing here reads.
"""

from __future__ import annotations

import functools
import pathlib
import re
from collections import Counter

import pytest

from axonym.insight._hlo import COLLECTIVES, HloProgram, Visit
from axonym.insight._schedule import Schedule, links_used, seconds_waited
from axonym.insight.chips import CHIPS
from tests.insight.test_hlo import HEAD, LOOP, OF_SLICES

DEVICES = {
    "fsdp_v5e_4x4": 16,
    "jit_v5e_4x4": 16,
    "scatters_v5e_4x4": 16,
    "sparse_v5p_2x2x4": 16,
    "slices_v5e_4x4": 32,
    "fsdp_v5p_4x4x4": 64,
}


@functools.cache
def program(name: str) -> HloProgram:
    return HloProgram((pathlib.Path(__file__).parent / "programs" / f"{name}.txt").read_text(), DEVICES[name])


def exchanges(of: HloProgram) -> list[Visit]:
    kinds = ((v, v.instruction.opcode.removesuffix("-start")) for v in of.visits())
    return [v for v, kind in kinds if kind in COLLECTIVES or kind == "send"]


@pytest.mark.parametrize("name", DEVICES)
def test_every_collective_of_a_text_is_visited(name: str) -> None:
    """They are counted in the text itself, in whatever computation: several fusions carry one chain."""
    written, chains = Counter[str](), set[str]()
    for line in program(name).text.splitlines():
        if (found := re.search(r"= .*? ((?:all|reduce|collective)-[a-z-]+?(?:-start)?|send)\(", line)) is None:
            continue
        kind, chain = found[1].removesuffix("-start"), re.search(r'chain_id="(\d+)"', line)
        if kind.endswith("-done") or (chain and chain[1] in chains):
            continue
        chains |= {chain[1]} if chain else set()
        written[kind] += 1
    if name == "scatters_v5e_4x4":  # one is in the fusion `all-reduce-scatter`
        written = Counter({"reduce-scatter": 2, "collective-permute": 1})
    assert Counter(v.instruction.opcode.removesuffix("-start") for v in exchanges(program(name))) == written
    assert all(v.times is not None for v in exchanges(program(name)))


@pytest.mark.parametrize("name", DEVICES)
def test_the_schedule_has_every_exchange(name: str) -> None:
    found = Schedule(program(name))
    assert {v.instruction.name for v in exchanges(program(name))} == found.beside.keys()
    assert None not in found.beside.values() and found.cycles > 0 and "loop" not in found.unknown


@pytest.mark.parametrize(
    ("name", "kind", "alone", "count"),
    [
        ("fsdp_v5e_4x4", "all-gather", True, 2),
        ("fsdp_v5e_4x4", "all-gather", False, 2),
        ("fsdp_v5e_4x4", "all-reduce", True, 3),
        ("jit_v5e_4x4", "collective-permute", False, 15),
        ("sparse_v5p_2x2x4", "all-gather", False, 2),
        ("sparse_v5p_2x2x4", "all-reduce", False, 2),
        ("sparse_v5p_2x2x4", "all-reduce", True, 1),
        ("slices_v5e_4x4", "send", False, 5),
        ("slices_v5e_4x4", "reduce-scatter", True, 4),
        ("fsdp_v5p_4x4x4", "all-reduce", True, 7),
    ],
)
def test_what_is_computed_beside_exchanges(name: str, kind: str, alone: bool, count: int) -> None:
    beside = Schedule(program(name)).beside
    found = [v for v in exchanges(program(name)) if v.instruction.opcode.removesuffix("-start") == kind]
    assert sum((beside[v.instruction.name] == 0) is alone for v in found) == count


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fsdp_v5e_4x4", {None: 1, ("reduce-scatter", "bf16[14336,256]"): 1, ("reduce-scatter", "bf16[256,14336]"): 1}),
        (
            "fsdp_v5p_4x4x4",
            {
                None: 1,
                ("all-gather", "bf16[1,14336,64]"): 1,
                ("all-gather", "bf16[1,64,14336]"): 1,
                ("all-gather", "bf16[14336,64]"): 1,
                ("all-gather", "bf16[64,14336]"): 1,
                ("reduce-scatter", "bf16[14336,64]"): 1,
                ("reduce-scatter", "bf16[64,14336]"): 1,
            },
        ),
        (
            "sparse_v5p_2x2x4",
            {None: 1, ("reduce-scatter", "bf16[14336,256]"): 1, ("reduce-scatter", "bf16[256,14336]"): 1},
        ),
    ],
)
def test_what_a_step_asks_for(name: str, expected: dict[tuple[str, str] | None, int]) -> None:
    """Over a whole torus, the compiler makes all-reduces of reduce-scatters, and on v5p of all-gathers."""
    sums = [v for v in exchanges(program(name)) if v.instruction.opcode == "all-reduce"]
    asked = [program(name).asked_for(v, DEVICES[name]) for v in sums]
    assert Counter(None if a is None else (a[0], str(a[2])) for a in asked) == expected
    assert all(a is None or a[1].scope for a in asked), "where it comes from"


def test_the_fusion_all_reduce_scatter_is_a_reduce_scatter() -> None:
    """Of an array that it pads: its result is longer than the shard that is used."""
    fused, *_ = exchanges(program("scatters_v5e_4x4"))
    ((producer, shapes),) = program("scatters_v5e_4x4").operands(fused)
    assert (fused.instruction.opcode, str(fused.instruction.shapes[0])) == ("reduce-scatter", "bf16[1040,2048]")
    assert (producer.scope, str(shapes[0])) == ("g", "bf16[4096,2048]")


@pytest.mark.parametrize(
    ("name", "links"), [("fsdp_v5e_4x4", {2, 4}), ("fsdp_v5p_4x4x4", {6}), ("jit_v5e_4x4", {1, 2, 4})]
)
def test_the_links_of_a_collective(name: str, links: set[int]) -> None:
    """Rings use both directions of one axis, sums over a torus those of all axes, and permutations one direction."""
    assert {links_used(v.instruction) for v in exchanges(program(name))} == links


def test_time_is_what_the_links_need_less_what_is_computed_beside_it() -> None:
    v5e = CHIPS["v5e"]
    assert seconds_waited(90_000_000, 0, 2, v5e) == pytest.approx(1e-3)
    assert seconds_waited(90_000_000, 750_000, 2, v5e) == pytest.approx(5e-4)
    assert seconds_waited(90_000_000, 10**9, 2, v5e) == 0


# --- each form of an asynchronous exchange, in a text made by hand ---

COMPUTE = '  %c{0} = f32[4]{{0}} fusion(%x), kind=kLoop, calls=%none, backend_config={{"estimated_cycles":"{1}"}}\n'
NONE = "%none (p.9: f32[4]) -> f32[4] {\n  ROOT %p.9 = f32[4]{0} parameter(0)\n}\n\n"
GATHER = "channel_id=1, replica_groups={{0,1}}, dimensions={0}, use_global_device_ids=true"
CALLED = (
    "%called (p.8: f32[4]) -> f32[8] {\n  %p.8 = f32[4]{0} parameter(0)\n"
    f"  ROOT %found = f32[8]{{0}} all-gather(%p.8), {GATHER}\n}}\n\n"
)


def beside(lines: str, called: str = "") -> dict[str, int | None]:
    text = f"{HEAD}{NONE}{called}ENTRY %main (x: f32[4]) -> f32[4] {{\n  %x = f32[4]{{0}} parameter(0)\n{lines}}}\n"
    return Schedule(HloProgram(text, 2)).beside


def test_a_start_and_an_end() -> None:
    lines = COMPUTE.format(0, 5) + f"  %found = (f32[4]{{0}}, f32[8]{{0}}) all-gather-start(%x), {GATHER}\n"
    lines += COMPUTE.format(1, 7) + "  %done = f32[8]{0} all-gather-done(%found)\n" + COMPUTE.format(2, 9)
    assert beside(lines) == {"found": 7}
    assert beside(lines.replace("all-gather-done(%found)", "copy(%x)")) == {"found": None}
    assert beside(COMPUTE.format(0, 5) + f"  %found = f32[8]{{0}} all-gather(%x), {GATHER}\n") == {"found": 0}


@pytest.mark.parametrize(
    "start", ["call-start(), to_apply=%called", "custom-call-start(), called_computations={%called}"]
)
def test_a_call_on_a_sparse_core(start: str) -> None:
    """It has its operands only by the update."""
    kind = start.partition("-start")[0]
    lines = f'  %begun = ((), (), (s32[1])) {start}, async_execution_thread="sparsecore"\n' + COMPUTE.format(0, 5)
    lines += f"  %given = ((f32[4]), f32[8]) {kind}-update(%begun, %x)\n" + COMPUTE.format(1, 7)
    assert beside(lines + f"  %done = f32[8]{{0}} {kind}-done(%given)\n", CALLED) == {"found": 7}


def test_a_chain_of_fusions_in_a_loop() -> None:
    text = LOOP.replace("CHAIN", "3").replace("calls=%again", 'calls=%again, backend_config={"estimated_cycles":"7"}')
    found = Schedule(HloProgram(text, 2))
    assert found.beside == {"g": 7} and found.cycles == 3 * 7


def test_what_slices_send() -> None:
    cycles = '  %c = f32[16,4]{1,0} fusion(%p), kind=kLoop, calls=%none, backend_config={"estimated_cycles":"7"}\n'
    text = OF_SLICES.replace("  %send-done", f"{cycles}  %send-done").replace("ENTRY", f"{NONE}ENTRY")
    assert Schedule(HloProgram(text, 32)).beside == {"send": 7}


def test_branches_take_their_mean() -> None:
    other = f"%other (x: f32[4]) -> f32[4] {{\n  %x = f32[4]{{0}} parameter(0)\n{COMPUTE.format(7, 9)}}}\n\n"
    text = f"{HEAD}{NONE}{other}ENTRY %main (x: f32[4]) -> f32[4] {{\n  %x = f32[4]{{0}} parameter(0)\n"
    text += "  ROOT %r = f32[4]{0} conditional(%x, %x, %x), true_computation=%other, false_computation=%none\n}\n"
    assert Schedule(HloProgram(text, 2)).cycles == 4
