"""The reader of programs: it reads all known forms, and raises an error for others."""

from __future__ import annotations

import pytest

from axonym.insight._hlo import HloProgram, HloShape, Instruction, UnknownForm
from axonym.insight._hlo_devices import groups
from axonym.insight._of_programs import _exchange

HEAD = "HloModule jit_f, is_scheduled=true, num_partitions=8\n\n"


def collective(attributes: str, opcode: str = "all-reduce") -> Instruction:
    return Instruction("x", opcode, (HloShape("f32", (4,)),), ("y",), attributes + ", use_global_device_ids=true", "")


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ("replica_groups={{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("replica_groups={}", ((0, 1, 2, 3),)),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("replica_groups=mesh['data'=2,'model'=2] {'data'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['data'=2,'model'=2] {'data','model'}", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'b':(1)2}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['my axis'=2,'b'=2] {'my axis'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups=mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b':(2)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
    ],
)
def test_groups(attributes: str, expected: tuple[tuple[int, ...], ...]) -> None:
    assert groups(collective(attributes), 4) == expected


@pytest.mark.parametrize(
    "attributes",
    [
        "replica_groups=everyone",
        "replica_groups=mesh['data'=2,'model'=2] {'rows'}",
        "replica_groups=mesh['data'=4] {'data':(3)2}",
        "replica_groups=mesh['data'=4], device_ids=(3,1,2,0) {'data'}",
        "channel_id=1",
    ],
)
def test_groups_of_another_form_are_refused(attributes: str) -> None:
    with pytest.raises(UnknownForm):
        groups(collective(attributes), 4)


def test_groups_of_replicas_are_refused() -> None:
    with pytest.raises(UnknownForm, match="counts replicas"):
        groups(Instruction("x", "all-reduce", (), (), "replica_groups={{0,1}}", ""), 2)


def test_asynchronous_collectives_and_branches() -> None:
    text = HEAD + (
        "%yes (p.1: f32[4]) -> f32[8] {\n"
        "  %p.1 = f32[4]{0} parameter(0)\n"
        "  %s = (f32[4]{0:T(8,128)}, f32[8]{0:T(8,128)}) all-gather-start(%p.1), channel_id=1, "
        'replica_groups={{0,1}}, dimensions={0}, metadata={op_name="jit(f)/g" source_file="a.py" source_line=3}\n'
        "  ROOT %d = f32[8]{0} all-gather-done(%s)\n"
        "}\n\n"
        "%no (p.2: f32[4]) -> f32[8] {\n"
        "  %p.2 = f32[4]{0} parameter(0)\n"
        "  ROOT %c = f32[8]{0} concatenate(%p.2, /*index=1*/%p.2), dimensions={0}\n"
        "}\n\n"
        "ENTRY %main (p: pred[], q: f32[4]) -> f32[8] {\n"
        "  %p = pred[] parameter(0)\n"
        "  %q = f32[4]{0} parameter(1)\n"
        "  ROOT %r = f32[8]{0} conditional(%p, %q, %q), true_computation=%yes, false_computation=%no\n"
        "}\n"
    )
    program = HloProgram(text, 2)
    (visit,) = [v for v in program.visits() if v.instruction.opcode == "all-gather-start"]
    assert visit.branches and visit.times == 1
    assert visit.instruction.shapes == (HloShape("f32", (4,)), HloShape("f32", (8,)))
    assert [shapes for _, shapes in program.operands(visit)] == [(HloShape("f32", (4,)),)]
    assert program.frames(visit.instruction)[0].line == 3


def test_the_origin_of_a_converted_sum_is_the_product() -> None:
    """Compilers for CPUs sum bfloat16 in float32, and put the conversion into a fusion without a scope."""
    text = HEAD + (
        "%wrapped (p.1: bf16[4]) -> f32[4] {\n"
        "  %p.1 = bf16[4]{0} parameter(0)\n"
        "  ROOT %c = f32[4]{0} convert(%p.1)\n"
        "}\n\n"
        "ENTRY %main (p: bf16[4]) -> f32[4] {\n"
        "  %p = bf16[4]{0} parameter(0)\n"
        '  %made = bf16[4]{0} negate(%p), metadata={op_name="jit(f)/made"}\n'
        "  %wide = f32[4]{0} fusion(%made), kind=kLoop, calls=%wrapped\n"
        "  ROOT %sum = f32[4]{0} all-reduce(%wide), channel_id=1, replica_groups={{0,1}}\n"
        "}\n"
    )
    program = HloProgram(text, 2)
    (visit,) = [v for v in program.visits() if v.instruction.opcode == "all-reduce"]
    assert [(producer.scope, shapes[0].dtype) for producer, shapes in program.operands(visit)] == [
        ("jit(f)/made", "f32")
    ]


@pytest.mark.parametrize("opcode", ["all-scatter", "send", "collective-dance-start"])
def test_a_new_kind_of_collective_is_refused(opcode: str) -> None:
    text = f"{HEAD}ENTRY %main (p: f32[4]) -> f32[4] {{\n  ROOT %r = f32[4]{{0}} {opcode}(%p), channel_id=1\n}}\n"
    with pytest.raises(UnknownForm, match="not known here"):
        HloProgram(text, 2)


def test_sizes_of_types() -> None:
    sizes = {"pred": 1, "bf16": 2, "f8e4m3fn": 1, "s4": 1, "c64": 8, "token": 0}
    assert {dtype: HloShape(dtype, ()).bytes for dtype in sizes} == sizes
    assert HloShape("s4", (3,)).bytes == 2


# --- as compilers for TPUs write it ---

OF_SLICES = """HloModule jit_f, is_scheduled=true, num_partitions=16

ENTRY %main (p: f32[16,4]) -> f32[32,4] {
  %p = f32[16,4]{1,0} parameter(0), metadata={op_name="w"}
  %token = token[] after-all()
  %send = (f32[16,4]{1,0:T(8,128)}, u32[], token[]) send(%p, %token), channel_id=3, is_host_transfer=true, ATTRIBUTES
  %recv = (f32[32,4]{1,0:T(8,128)}, u32[], token[]) recv(%token), channel_id=2, is_host_transfer=true, ATTRIBUTES
  %send-done = token[] send-done(%send), channel_id=3, is_host_transfer=true
  %recv-done = (f32[32,4]{1,0}, token[]) recv-done(%recv), channel_id=2, is_host_transfer=true
  ROOT %found = f32[32,4]{1,0} get-tuple-element(%recv-done), index=0
}
""".replace(
    "ATTRIBUTES",
    'frontend_attributes={_xla_host_transfer_rendezvous="all-gather.2_0",_xla_megascale_target="{1,2}x{0:15}",'
    '_xla_megascale_transfer_type="ALL_GATHER"}',
)


def test_what_slices_of_tpus_send_each_other() -> None:
    """The text is for one slice; each device sends to those at its place in the others."""
    program = HloProgram(OF_SLICES, 32)
    assert program.devices_of_text == 16
    (visit,) = [v for v in program.visits() if v.instruction.opcode == "send"]
    found = _exchange(program, visit, None, {"replica": 2})
    ((producer, operand, result),) = found.carried
    assert (found.kind, found.axes, found.devices, found.slices, found.times) == ("all-gather", ("replica",), 2, 2, 1)
    assert (producer.scope, str(operand), str(result)) == ("w", "f32[16,4]", "f32[32,4]")
    other = HloProgram(OF_SLICES.replace("ALL_GATHER", "SOMEHOW"), 32)
    (visit,) = [v for v in other.visits() if v.instruction.opcode == "send"]
    with pytest.raises(UnknownForm, match="slices exchange data in the way 'somehow'"):
        _exchange(other, visit, None, {})


LOOP = HEAD + (
    "%part (p.0: f32[4]) -> f32[8] {\n"
    "  %p.0 = f32[4]{0} parameter(0)\n"
    "  ROOT %g = f32[8]{0:T(128)S(1)} all-gather(%p.0), channel_id=7, replica_groups={{0,1}}, dimensions={0}, "
    'use_global_device_ids=true, frontend_attributes={chain_id="CHAIN"}\n'
    "}\n\n"
    "%again (p.3: f32[4]) -> f32[8] {\n"
    "  %p.3 = f32[4]{0} parameter(0)\n"
    "  ROOT %g.1 = f32[8]{0:T(128)S(1)} all-gather(%p.3), channel_id=7, replica_groups={{0,1}}, dimensions={0}, "
    'use_global_device_ids=true, frontend_attributes={chain_id="3"}\n'
    "}\n\n"
    "%body (p.1: (s32[], f32[4])) -> (s32[], f32[4]) {\n"
    "  %p.1 = (s32[]{:T(128)}, f32[4]{0}) parameter(0)\n"
    "  %x = f32[4]{0} get-tuple-element(%p.1), index=1\n"
    "  %i = s32[] get-tuple-element(%p.1), index=0\n"
    "  %one = s32[] constant(1)\n"
    "  ROOT %next = (s32[], f32[4]{0}) tuple(%added, %x)\n"
    "  %added = s32[]{:T(128)} add(%i, %one)\n"
    "  %first = f32[8]{0} fusion(%x), kind=kCustom, calls=%part\n"
    "  %second = f32[8]{0} fusion(%x), kind=kCustom, calls=%again\n"
    "}\n\n"
    "%test (p.2: (s32[], f32[4])) -> pred[] {\n"
    "  %p.2 = (s32[], f32[4]{0}) parameter(0)\n"
    "  %end = s32[] constant(5)\n"
    "  %at = s32[] get-tuple-element(%p.2), index=0\n"
    "  ROOT %lt = pred[]{:T(512)} compare(%at, %end), direction=LT\n"
    "}\n\n"
    "ENTRY %main (p: f32[4]) -> f32[4] {\n"
    "  %p = f32[4]{0} parameter(0)\n"
    "  %start = s32[]{:T(128)} constant(2)\n"
    "  %copied = s32[] copy(%start)\n"
    "  %given = (s32[], f32[4]{0}) tuple(%copied, %p)\n"
    "  %loop = (s32[], f32[4]{0}) while(%given), condition=%test, body=%body\n"
    "  ROOT %out = f32[4]{0} get-tuple-element(%loop), index=1\n"
    "}\n"
)


@pytest.mark.parametrize(
    ("old", "new", "times"),
    [
        ("", "", 3),
        ("constant(2)", "constant(0)", 5),
        ("constant(2)", "constant(9)", 0),
        ("direction=LT", "direction=NE", None),
        ("constant(1)", "constant(2)", 2),
        ("constant(1)", "constant(0)", None),
        ("add(%i, %one)", "add(%one, %i)", None),
        ("%start = s32[]{:T(128)} constant(2)", "%start = s32[]{:T(128)} custom-call()", None),
        ("tuple(%added, %x)", "tuple(%i, %x)", None),
        ("compare(%at, %end)", "compare(%end, %at)", None),
    ],
)
def test_loops_are_counted_without_their_number(old: str, new: str, times: int | None) -> None:
    """Only one that counts up from a constant to a constant."""
    text = LOOP.replace("CHAIN", "3").replace(old, new) if old else LOOP.replace("CHAIN", "3")
    found = [v for v in HloProgram(text, 2).visits() if v.instruction.opcode == "all-gather"]
    assert [v.times for v in found] == [times]


def test_an_asynchronous_collective_is_visited_once() -> None:
    for chain, count in (("3", 1), ("4", 2)):
        visits = HloProgram(LOOP.replace("CHAIN", chain), 2).visits()
        assert sum(v.instruction.opcode == "all-gather" for v in visits) == count


def test_collectives_on_sparse_cores_are_visited() -> None:
    """A call there starts without operands, and gets them by an update."""
    text = LOOP.replace("CHAIN", "3").replace(
        "  %second = f32[8]{0} fusion(%x), kind=kCustom, calls=%again\n",
        '  %begun = ((), (), (s32[1])) call-start(), async_execution_thread="sparsecore", to_apply=%called\n'
        "  %given.1 = ((f32[4]), f32[8]) call-update(%begun, %x)\n"
        "  %done = f32[8]{0} call-done(%given.1)\n",
    )
    called = text[text.index("%again") : text.index("%body")].replace("%again", "%called")
    text = text.replace(text[text.index("%again") : text.index("%body")], called.replace('chain_id="3"', ""))
    found = [v for v in HloProgram(text, 2).visits() if v.instruction.opcode == "all-gather"]
    assert [(v.computation, v.times) for v in found] == [("part", 3), ("called", 3)]


def test_a_collective_that_nothing_known_runs_is_refused() -> None:
    text = LOOP.replace("CHAIN", "3").replace("fusion(%x), kind=kCustom, calls=%again", "launch(%x), body=%again")
    with pytest.raises(UnknownForm, match="the program has 'all-gather' in 'again', and what runs that is not known"):
        HloProgram(text, 2)
