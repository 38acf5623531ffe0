"""Two laws that tie the places where it is decided how an operation is distributed.

1. *Results lie by the mapping.* If every operand is sharded as the mapping shards its axes, so is every result. Reports
   by name rely on it: they take an axis to be sharded as it is mapped, wherever the array came from.
2. *Three tiers agree.* What a step sends, by kind and mesh axes, is the same by name, on Auto mesh axes, where XLA
   decides, and on Explicit ones, where this library does. By name, an answer may also be refused, or be uncertain by a
   number of bytes, which it says.

A change of the policy that only one tier follows breaks the second law, and a result that lies elsewhere the first. The
exceptions are data, each with its reason; one that is no longer needed fails.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import axonym as axn
from axonym.insight._named_events import NotKnown
from tests.conftest import MESH_AXES
from tests.helpers import spec
from tests.insight import cases
from tests.insight.test_by_names import MAPPINGS, language_model
from tests.ops.case import SIZES as SIZES_OF_CASES, Case
from tests.ops.test_operations import CASES

# --- law 1 ---

LIES_ELSEWHERE: dict[str, str] = {
    "fft.irfft-roundtrip": "goes through an axis of a size that the mesh does not divide",
    "take_along_axis-several": "renames an axis, which keeps its sharding",
    "top_k": "the few values along an axis come out replicated, for every device finds all of them",
}
"""The cases with a result that does not lie by the mapping. An axis that no operand has may take over the sharding of
one that goes away, and is not checked."""


def _mappings_of(case: Case, mesh: Mesh) -> list[dict[str, str]]:
    """Return a mapping of one axis, and one of two, each onto mesh axes that divide them."""
    names = list(dict.fromkeys(n for operand in case.operands for n in operand.names))
    fitting = [(n, a) for n in names for a in MESH_AXES if SIZES_OF_CASES[n] % mesh.shape[a] == 0]
    pairs = [{n: a, m: b} for n, a in fitting for m, b in fitting if n < m and a != b]
    return [*pairs[:1], *({n: a} for n, a in fitting[-1:])]


def _misplaced(case: Case, mapping: Mapping[str, str], mesh: Mesh) -> list[str]:
    """Return the axes of results that are not sharded by the mapping, if operands are. This only traces."""
    operands = []
    for operand in case.operands:
        x = operand.draw(np.random.default_rng(0))
        sharding = NamedSharding(mesh, PartitionSpec(*(mapping.get(n) for n in operand.names)))
        operands.append(axn.named(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), operand.names))
    known = {n for operand in case.operands for n in operand.names}
    found = []
    with jax.set_mesh(mesh), axn.axis_mapping(mapping):
        results = jax.tree.leaves(jax.eval_shape(case.call, *operands), is_leaf=axn.is_named_array)
    for x in results:
        for axis, entry in zip(x.axes, spec(x), strict=True) if isinstance(x, axn.NamedArray) else ():
            wanted = mapping.get(axis.name)
            wanted = None if wanted is None or axis.size % mesh.shape[wanted] else wanted
            if entry != wanted and (axis.name in known or axis.name in mapping):
                found.append(f"{axis} over {entry} instead of {wanted} under {dict(mapping)}")
    return found


@pytest.mark.oldest  # with every version, test_operations.py checks that axes of operands stay sharded
def test_results_lie_by_the_mapping(explicit_mesh: Mesh) -> None:
    traced = [case for case in CASES if case.sharded and case.jit]
    found = {
        case.id: [line for m in _mappings_of(case, explicit_mesh) for line in _misplaced(case, m, explicit_mesh)]
        for case in traced
    }
    elsewhere = {name: lines for name, lines in found.items() if lines}
    assert elsewhere.keys() == LIES_ELSEWHERE.keys(), elsewhere


# --- law 2 ---

SIZES = {"a": 8, "b": 16, "c": 32, "d": 8, "e": 16}


def _array(names: str, dtype: Any = float) -> Any:
    return jax.eval_shape(lambda: axn.zeros({n: SIZES[n] for n in names}, dtype=dtype))


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation and its arguments."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    by: tuple[int, ...] = ()
    """The arguments to differentiate by; all if it is empty."""
    differentiable: bool = True
    fsdp: tuple[Any, ...] = ()
    """Pairs of a parameter and a compute mapping to try too."""


FSDP: tuple[Any, ...] = (
    ({"c": "data"}, {"a": "data"}),
    ({"d": "data"}, {"a": "data"}),
    ({"c": ("data", "model")}, {"a": ("data", "model")}),
    ({"d": "data", "c": "model"}, {"a": "data", "c": "model"}),
    ({"c": "data", "d": "model"}, {"a": "data", "d": "model"}),
    ({"d": "data"}, {"a": "data", "c": "model"}),
)
UNSHARED = ({"d": "data"}, {"b": "model"})


def _dot(axis: Any) -> Callable[..., Any]:
    return lambda *xs: axn.dot(*xs, axis=axis)


def _layers(x: Any, w: Any, v: Any) -> Any:
    return axn.dot(axn.tanh(axn.dot(x, w, axis="c")), v, axis="b")


ABC, AC, CD = _array("abc"), _array("ac"), _array("cd")
CHAIN = (AC, _array("cb"), _array("bd"))
OPERATIONS: dict[str, Operation] = {
    "product": Operation(_dot("c"), (ABC, CD), fsdp=FSDP),
    "product in batches": Operation(_dot("c"), (ABC, _array("acd"))),
    "three operands": Operation(lambda *xs: axn.einsum("-> a d", *xs), CHAIN, fsdp=FSDP[:1]),
    "one operand": Operation(_dot("c"), (ABC,)),
    "layers": Operation(_layers, CHAIN, fsdp=FSDP),
    "elementwise": Operation(axn.add, (ABC, _array("bc")), fsdp=FSDP),
    "divmod": Operation(axn.divmod, (ABC, _array("bc")), differentiable=False, fsdp=FSDP[:1]),
    "where": Operation(lambda x, y: axn.where(x > 0, x, y), (AC, _array("c"))),
    "where of a parameter": Operation(lambda x, w: axn.where(w > 0, w, x), (ABC, _array("bc")), fsdp=FSDP),
    "clip": Operation(lambda x, w: axn.clip(x, w, 2 * w), (ABC, _array("bc")), fsdp=FSDP),
    "sum": Operation(lambda x: axn.sum(x, "c"), (ABC,)),
    "sum over several": Operation(lambda x: axn.sum(x, ("b", "c")), (ABC,)),
    "mean": Operation(lambda x: axn.mean(axn.square(x)), (ABC,)),
    "max": Operation(lambda x: axn.max(x, "c"), (AC,)),
    "argmax": Operation(lambda x: axn.argmax(x, "c"), (AC,), differentiable=False),
    "cumsum": Operation(lambda x: axn.cumsum(x, "c"), (AC,)),
    "softmax": Operation(lambda x: axn.nn.softmax(x, "c"), (ABC,)),
    "slice": Operation(lambda x: x["c", 1:9], (ABC,)),
    "concatenate": Operation(lambda x, y: axn.concatenate([x, y], "c"), (AC, AC)),
    "roll": Operation(lambda x: axn.roll(x, 1, "c"), (ABC,)),
    "sort": Operation(lambda x: axn.sort(x, "c"), (ABC,)),
    "top-k": Operation(lambda x: axn.top_k(x, "c", 4)[0], (ABC,)),
    "fft": Operation(lambda x: axn.real(axn.fft.fft(x, "c")), (AC,)),
    "rename": Operation(lambda x: axn.rename(x, {"c": "f"}), (AC,)),
    "unflatten": Operation(lambda x: axn.unflatten_axis(x, "c", {"f": 4, "g": 8}), (AC,)),
    "flatten": Operation(lambda x: axn.flatten_axes(x, ("b", "c"), "f"), (ABC,)),
    "look-up": Operation(lambda i, t: t["c", i], (_array("ab", int), CD), by=(1,), fsdp=(*FSDP, UNSHARED)),
    "update": Operation(
        lambda i, t, u: t.at["c", i].add(u), (_array("a", int), CD, _array("ad")), by=(1, 2), fsdp=FSDP
    ),
}  # fmt: skip


def _drawn_product(seed: int) -> Operation:
    """Return a contraction of two or three operands with drawn axes."""
    rng = random.Random(seed)
    operands = ["".join(rng.sample("abcde", rng.randint(2, 3))) for _ in range(rng.randint(2, 3))]
    names = sorted({*"".join(operands)})
    summed = [n for n in rng.sample(names, rng.randint(1, len(names) - 1)) if sum(n in o for o in operands) > 1]
    return Operation(_dot(tuple(summed)), tuple(map(_array, operands)))


OPERATIONS |= {f"drawn product {seed}": _drawn_product(seed) for seed in (0, 3, 5, 7)}


def mappings_of(operation: Operation) -> list[Any]:
    """Return mappings of one axis, drawn ones of two, and pairs of a parameter and a compute mapping."""
    names = sorted({n for x in operation.arguments for n in x.names})
    rng = random.Random(len(names))
    pairs = dict.fromkeys(tuple(rng.sample(names, 2)) for _ in range(3))
    drawn = [dict(zip(pair, MESH_AXES, strict=True)) for pair in pairs]
    known = [pair for pair in operation.fsdp if {*pair[0], *pair[1]} <= {*names}]
    return [*({n: "model"} for n in names), *drawn, *known]


def sent_bytes(report: axn.insight.Report) -> dict[Any, int]:
    """Return the bytes that each device sends, by kind and mesh axes."""
    found: collections.Counter[Any] = collections.Counter()
    for c in report.collectives:
        found[c.kind, c.axes] += c.total_sent or 0
    return dict(found)


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a tier sends something else than Auto mesh axes, and why."""

    tier: str
    """"explicit"; "uncertain" for names, within the bytes that the report is uncertain by; or "names"."""
    operation: str
    when: Callable[[Mapping[str, Any], Mapping[str, Any], bool], bool]
    """Whether it is so, from the parameter and the compute mapping, and for the gradient or not."""
    why: str


DIFFERENCES = (
    Difference(
        "explicit", "flatten", lambda stored, used, gradient: "c" in used,
        "shards of the minor axis are no shards of the new one, so they are exchanged, which XLA does otherwise",
    ),
    Difference(
        "uncertain", "drawn product 7", lambda stored, used, gradient: gradient and used.keys() == {"c", "e"},
        "a sum over axes on two mesh axes is one all-reduce over both, or one after the other",
    ),
)  # fmt: skip
"""There is one more, which shows only under another policy: on CPUs, the partitioner makes no reduce-scatter, but an
all-reduce and a slice, which send twice the bytes. A reduce-scatter for FSDP is the library's own, and stays one."""


REFUSED = {
    *("argmax", "concatenate", "cumsum", "fft", "roll", "slice", "sort", "top-k"),  # along a sharded axis
    *("flatten", "rename", "unflatten"),  # of a sharded axis
    *("look-up", "update"),  # in a table that is stored sharded, unless columns are exchanged
}
"""The operations for which reports by name may be refused."""


def _differences(step: Any, operation: Operation, mapping: Any) -> set[str]:
    """Return the tiers that do not send what is sent on Auto mesh axes, or "refused"."""
    reports = {}
    for kind in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(cases.mesh_of(kind, data=4, model=2)):
            reports[kind] = axn.insight.explain(step, *operation.arguments, mapping=mapping, by="partitioner")
    auto = sent_bytes(reports[AxisType.Auto])
    found = set() if sent_bytes(reports[AxisType.Explicit]) == auto else {"explicit"}
    try:
        mesh = cases.mesh_of(data=4, model=2)
        names = axn.insight.explain(step, *operation.arguments, mapping=mapping, mesh=mesh, by="names")
    except NotKnown:
        return found | {"refused"}
    if sent_bytes(names) == auto:
        return found
    off = abs(sum(sent_bytes(names).values()) - sum(auto.values()))
    return found | {"uncertain" if off <= names.uncertain else "names"}


FORWARD = ("product", "layers", "flatten", "look-up", "update")
"""The operations with a gradient that are also tried alone: those that send most, or otherwise than their gradient."""


@pytest.mark.parametrize(
    ("what", "gradient"),
    [
        # Gradients send what their operation sends, and more.
        (what, gradient)
        for what, o in OPERATIONS.items()
        for gradient in (False, True)
        if (o.differentiable if gradient else what in FORWARD or not o.differentiable)
    ],
)
def test_three_tiers_agree(what: str, gradient: bool) -> None:
    operation = OPERATIONS[what]
    numbers = operation.by or tuple(range(len(operation.arguments)))
    step = operation.call
    if gradient:
        step = jax.grad(lambda *xs: (operation.call(*xs) ** 2).sum().scalar(), numbers)
    for mapping in mappings_of(operation):
        stored, used = mapping if isinstance(mapping, tuple) else ({}, mapping)
        known = {d.tier for d in DIFFERENCES if d.operation == what and d.when(stored, used, gradient)}
        found = _differences(step, operation, mapping)
        assert found - {"refused"} == known and ("refused" not in found or what in REFUSED), mapping


IN_THE_LAW = {
    "fft.irfft-roundtrip": "fft",
    "top_k": "top-k",
    "fft.py _transform_kernel": "fft",
    "ops/contraction.py _plan_kernel": "product",
    "ops/indexing.py get_kernel": "look-up",
}
"""The operation of the law for each case that lies elsewhere, and for each function that makes kernels of operations
that run per device or along an axis."""
_BATCHES, _OTHERWISE = (
    "`_along` in `ops/_kernels.py` distributes its batches as it does the batches of an FFT",
    "on Auto mesh axes it avoids what XLA partitions wrongly: see `_on_auto_axes`",
)
EXCUSED = {
    "take_along_axis-several": "along a sharded axis it is a look-up, whose result has another name",
    "linalg.py _matrix_kernel": _BATCHES,
    "linalg.py _norm_kernel": _BATCHES,
    "linalg.py _solve_kernel": _BATCHES,
    "linalg.py _tridiagonal_kernel": _BATCHES,
    "nn/moe.py _grouped_kernel": "experts send rows by the data: tests/insight/test_by_names.py compares their steps",
    "ops/interpolation.py _interp_kernel": _BATCHES,
    "ops/signal.py _convolution_kernel": _OTHERWISE,
    "poly.py _poly_kernel": _OTHERWISE,
    "poly.py _polyfit_kernel": _BATCHES,
    "poly.py _polyval_kernel": _BATCHES,
}
"""Why the others need no operation of their own."""


def _made_with_care() -> set[str]:
    """Return the functions that make kernels of products, per device, or of all of an axis, each with its file."""
    found = set()
    root = Path(axn.__file__).parent
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for f in tree.body:
            calls = [c for c in ast.walk(f) if isinstance(c, ast.Call)]
            made = [c for c in calls if ast.unparse(c.func).rpartition(".")[2] == "make_kernel"]
            keywords = {k.arg for c in made for k in c.keywords}
            words = {c.value for c in ast.walk(f) if isinstance(c, ast.Constant)}
            if isinstance(f, ast.FunctionDef) and made and (keywords & {"per_device", "product"} or "whole" in words):
                found.add(f"{path.relative_to(root).as_posix()} {f.name}")
    return found


def test_operations_that_exchange_are_in_the_law() -> None:
    needed = _made_with_care() | LIES_ELSEWHERE.keys()
    missing = sorted(needed - IN_THE_LAW.keys() - EXCUSED.keys())
    assert not missing, (
        f"{', '.join(missing)}: add an operation to OPERATIONS in {Path(__file__).name}, and its name to IN_THE_LAW, "
        "or say in EXCUSED why there is none"
    )
    gone = sorted((IN_THE_LAW.keys() | EXCUSED.keys()) - needed)
    assert not gone and set(IN_THE_LAW.values()) <= OPERATIONS.keys(), gone


@pytest.mark.parametrize("mapping", ["mixed", "hybrid"])
def test_training_steps_agree(mapping: str) -> None:
    """The step of a language model on Explicit mesh axes sends what names say. `test_by_names.py` has Auto axes."""
    case, mesh = language_model("llama"), cases.mesh_of(AxisType.Explicit, data=4, model=2)
    with jax.set_mesh(mesh):
        names, explicit = (
            axn.insight.explain(*case, mapping=MAPPINGS[mapping], by=by) for by in ("names", "partitioner")
        )
    assert sent_bytes(names) == sent_bytes(explicit) and names.flops == explicit.flops
