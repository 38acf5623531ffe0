"""Read how Shardy, the part of the compiler that shards programs, shards a lowered step. It needs no devices.

Its passes insert collectives with the names of mesh axes into JAX's program. The compiler still changes that program:
`uncertain` sums up the bytes that it may omit or add.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..core.source_lines import Frame
from . import _flops, _scopes
from ._constraints import frames_of, scope_of
from ._describing import Exchange, Origin
from ._hlo import HloShape, along
from .collectives import sent_by

_PLACED = "inline,symbol-dce,sdy-propagation-pipeline"
_EXCHANGED = "sdy-insert-explicit-reshards{enable-full-version=true},sdy-reshard-to-collectives"
_PASSES = f"builtin.module({_PLACED},func.func({_EXCHANGED},sdy-populate-op-sharding-rules))"

_OF_SHARDY = {
    "sdy.all_gather": ("all-gather", "gathering_axes"),
    "sdy.all_reduce": ("all-reduce", "reduction_axes"),
    "sdy.reduce_scatter": ("reduce-scatter", "reduce_scatter_axes"),
    "sdy.all_to_all": ("all-to-all", "params"),
    "sdy.collective_permute": ("collective-permute", "out_sharding"),
}
"""The collectives that the passes insert, and the attribute with their mesh axes. Their types are of global arrays."""
_OF_STEP = {
    f"stablehlo.{kind.replace('-', '_')}": kind
    for kind in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
                 "collective-broadcast")
}  # fmt: skip
"""The collectives that the step itself requests. Their types are of the arrays on one device."""
_MOVES_NOTHING = {
    "stablehlo.constant", "stablehlo.iota", "stablehlo.return", "stablehlo.optimization_barrier", "func.return",
    "stablehlo.partition_id", "stablehlo.create_token", "stablehlo.after_all",
}  # fmt: skip
"""Operations that need no rule."""

Over = tuple[tuple[str, ...], ...]
"""The mesh axes of each axis of an array. Part of a mesh axis is `name:(before)size`, as in the program."""


def sharded_program(lowered: Any) -> ShardyProgram:
    """Run the passes of Shardy on a lowered function, and return its program."""
    # JAX has no public interface to read and change modules.
    try:
        from jaxlib.mlir import ir
        from jaxlib.mlir.passmanager import PassManager

        module = lowered.compiler_ir("stablehlo")
        with module.context:
            passes, copy = PassManager.parse(_PASSES), module.operation.clone()
            for operation in [op for op in _all(copy) if op.name.startswith("chlo.")]:
                _replace_chlo(operation, ir)
            passes.run(copy)
            return ShardyProgram(copy)
    except (ImportError, AttributeError, KeyError, IndexError, TypeError, ValueError) as e:
        raise NotImplementedError(
            f"explain: by='shardy' cannot shard or read this program with this version of jaxlib: {e}. "
            "by='partitioner' compiles the step instead."
        ) from e


def _replace_chlo(operation: Any, ir: Any) -> None:
    """Replace an elementwise operation that Shardy does not know by a known one with the same shapes."""
    operands, types = list(operation.operands), [result.type for result in operation.results]
    if len(types) != 1 or any(x.type.shape != types[0].shape for x in operands) or len(operands) not in (1, 2):
        return
    alike = all(x.type == types[0] for x in operands)
    name, given = ("stablehlo.add", [operands[0], operands[-1]]) if alike else ("stablehlo.is_finite", operands[:1])
    if alike or str(types[0].element_type) == "i1":
        at = ir.InsertionPoint(operation)
        new = ir.Operation.create(name, results=types, operands=given, loc=operation.location, ip=at)
        operation.results[0].replace_all_uses_with(new.results[0])
        operation.erase()


def _all(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _all(inner.operation)


@dataclasses.dataclass(frozen=True)
class _Within:
    """The loops, branches, scopes and lines around the operations of a block."""

    times: int | None = 1
    in_branch: bool = False
    scope: str = ""
    frames: tuple[Frame, ...] = ()
    manual: bool = False


class ShardyProgram:
    """The collectives and the flops of a module, after the passes of Shardy."""

    def __init__(self, module: Any):
        self._module = module  # later descriptions are read from it
        self.exchanges: list[Exchange] = []
        self.flops: int | None = 0
        self.needed_flops: int | None = 0
        """The flops that do not depend on branches."""
        self.products: list[tuple[str, tuple[Frame, ...], int]] = []
        """The scope, the lines and the flops of each product."""
        self.grouped = False
        """Whether the module has grouped products."""
        self.uncounted: dict[str, None] = {}
        """Operations whose flops are not counted."""
        self.moved: dict[str, None] = {}
        """Operations along sharded axes whose communication the compiler decides."""
        self.uncertain = 0
        """The error of the bytes sent, for each device."""
        self.mesh: dict[str, int] = {}
        self._functions: dict[str, Any] = {}
        self._over: dict[Any, Over] = {}
        """The mesh axes of the arguments of blocks."""
        self._loops: list[tuple[int | None, set[Any]]] = []
        """For each surrounding loop, how often it runs, and the values that may change between iterations."""
        self._numbers: dict[Any, int] = {}
        """A number for each array, equal for arrays that are computed alike: the compiler may compute them once."""
        self._known: dict[Any, int] = {}
        """The number of each result, by its operation and the numbers of its operands."""
        self._constant: set[int] = set()
        """The numbers of arrays that depend on no argument."""
        self._seen: set[Any] = set()
        for operation in (op.operation for op in module.regions[0].blocks[0].operations):
            if operation.name == "sdy.mesh":
                self.mesh |= {n: int(s) for n, s in re.findall(r'"([^"]+)"=(\d+)', str(operation.attributes["mesh"]))}
            elif operation.name == "func.func":
                self._functions[str(operation.attributes["sym_name"]).strip('"')] = operation
        self._enter(self._functions["main"], (), _Within())
        given = self._functions["main"].regions[0].blocks[0].arguments
        self.arguments = [(scope_of(str(x.location)), self._local(x)) for x in given]
        """The scope of each array in the arguments, and its shard."""

    # --- where operations are ---

    def _enter(self, function: Any, given: Sequence[Any], around: _Within) -> None:
        block, attributes = function.regions[0].blocks[0], function.attributes
        for i, argument in enumerate(block.arguments):
            own = attributes["arg_attrs"][i] if "arg_attrs" in attributes else {}
            if "sdy.sharding" in own:
                (self._over[argument],) = _shardings(str(own["sdy.sharding"]))
        self._argue(block, given)
        self._block(block, around)

    def _argue(self, block: Any, given: Sequence[Any]) -> None:
        """Map the arguments of a block to the values passed to them."""
        for argument, value in zip(block.arguments, given, strict=False):
            self._numbers[argument] = self._number(value)
            self._follow([value], [argument])

    def _follow(self, given: Sequence[Any], made: Sequence[Any]) -> None:
        """Record whether results change between the iterations of loops."""
        for _, changing in self._loops:
            (changing.difference_update if changing.isdisjoint(given) else changing.update)(made)

    def _block(self, block: Any, around: _Within) -> None:
        for operation in block.operations:
            op = operation.operation
            self._operation(op, around)
            self._numbers.update(zip(op.results, self._computed(op), strict=True))
            if self._loops:
                self._follow(list(op.operands), list(op.results))

    def _operation(self, op: Any, around: _Within) -> None:
        name = op.name
        if name == "stablehlo.while":
            self._loop(op, around)
        elif name in ("stablehlo.case", "stablehlo.if"):
            for region in op.regions:
                self._block(region.blocks[0], dataclasses.replace(around, in_branch=True))
        elif name == "func.call":
            self._enter(self._called(op), op.operands, self._within(op, around))
        elif name in ("sdy.manual_computation", "sdy.named_computation"):
            manual = name == "sdy.manual_computation"
            names = set(re.findall(r'"([^"]+)"', str(op.attributes["manual_axes"]))) if manual else set()
            block, inner = op.regions[0].blocks[0], self._within(op, around)
            for argument, over in zip(block.arguments, _shardings(str(op.attributes["in_shardings"])), strict=True):
                self._over[argument] = tuple(tuple(a for a in axes if _name(a) not in names) for axes in over)
            self._argue(block, op.operands)
            self._block(block, dataclasses.replace(inner, manual=inner.manual or manual))
        elif name in _OF_SHARDY:
            self._collective(op, *_OF_SHARDY[name], around)
        elif name in _OF_STEP:
            self._asked_for(op, _OF_STEP[name], around)
        else:
            self._other(op, around)

    def _loop(self, op: Any, around: _Within) -> None:
        test, body = (region.blocks[0] for region in op.regions)
        ends = _last(body).operands
        turns, loop = turns_of(op), self._key(op)
        times = None if around.times is None or turns is None else around.times * turns
        changed = {x for x, end in zip(body.arguments, ends, strict=True) if x != _moved_from(end)}
        for i, (start, result) in enumerate(zip(op.operands, op.results, strict=True)):
            self._over[test.arguments[i]] = self._over[body.arguments[i]] = self.over(result)
            turn = body.arguments[i]
            self._numbers[turn] = self._numbered((loop, i)) if turn in changed else self._number(start)
        self._loops.append((turns, changed))
        self._block(body, dataclasses.replace(around, times=times))
        self._loops.pop()

    def _called(self, call: Any) -> Any:
        """Return the function that an operation calls."""
        return self._functions[str(call.attributes["callee"]).lstrip("@").strip('"')]

    def _within(self, op: Any, around: _Within) -> _Within:
        scope, frames = self._origin(op, around)
        return dataclasses.replace(around, scope=scope, frames=frames())

    def _origin(self, op: Any, around: _Within) -> Origin:
        location = str(op.location)
        scope = "/".join(part for part in (around.scope, scope_of(location)) if part)
        return Origin(scope, lambda: (*frames_of(location), *around.frames))

    def _repeats(self, values: Sequence[Any]) -> int:
        """Return how often loops repeat an operation on the same values, which they could run once."""
        count = 1
        for turns, changing in reversed(self._loops):
            if not changing.isdisjoint(values):
                break
            count *= turns or 1
        return count

    # --- equal computations ---

    def _number(self, value: Any) -> int:
        """Return the number of an array, whatever its sharding."""
        value = _moved_from(value)
        return (
            self._numbers[value] if value in self._numbers else self._numbers.setdefault(value, self._numbered(value))
        )

    def _numbered(self, key: Any) -> int:
        return self._known.setdefault(key, len(self._known))

    def _computed(self, op: Any) -> Iterator[int]:
        """Return the numbers of the results of an operation."""
        if op.name == "func.call":
            yield from map(self._number, _last(self._called(op).regions[0].blocks[0]).operands)
        elif op.name in _THE_SAME or _changes_nothing(op):
            yield from (self._number(op.operands[i]) for i in range(len(op.results)))
        else:
            key = self._key(op)
            found = [self._numbered((key, i)) for i in range(len(op.results))]
            made_of = set(map(self._number, op.operands))
            if self._constant.issuperset(made_of) and (made_of or op.name in _CONSTANTS):
                self._constant.update(found)
            yield from found

    def _key(self, op: Any) -> Any:
        """Return a key that is equal for operations that compute the same."""
        inner = tuple((x.name, _said(x)) for x in _all(op)) if len(op.regions) else ()
        return op.name, _said(op), tuple(map(self._number, op.operands)), inner

    # --- arrays ---

    def over(self, value: Any) -> Over:
        """Return the mesh axes that an array is sharded over."""
        owner = getattr(value.owner, "attributes", None)
        if owner is None:
            found = self._over.get(value)
        else:
            names = ("out_sharding", "sharding", "out_shardings", "sdy.sharding")
            text = next((str(owner[name]) for name in names if name in owner), None)
            each = [] if text is None else _shardings(text)
            found = each[min(value.result_number, len(each) - 1)] if each else None
        return found or ((),) * len(getattr(value.type, "shape", ()))

    def _local(self, value: Any) -> HloShape:
        sizes = (-(-n // self._count(axes)) for n, axes in zip(value.type.shape, self.over(value), strict=True))
        return HloShape(_dtype(str(value.type.element_type)), tuple(sizes))

    def _shards(self, value: Any) -> int:
        """Return the number of shards of an array."""
        return self._count([a for axes in self.over(value) for a in axes])

    def _count(self, axes: Sequence[str]) -> int:
        return math.prod(int(a.rpartition(")")[2]) if ":" in a else self.mesh[a] for a in axes)

    # --- collectives ---

    def _collective(self, op: Any, kind: str, attribute: str, around: _Within) -> None:
        (operand,), (result,) = op.operands, op.results
        before, after, text = self._local(operand), self._local(result), str(op.attributes[attribute])
        if kind == "collective-permute":
            pairs = list(zip(self.over(operand), self.over(result), strict=True))
            axes = tuple(dict.fromkeys(a for x, y in pairs if x != y for a in (*x, *y)))
            self._note(op, kind, axes, 2, True, [(operand, before, after)], around)
            return
        given = after if kind in ("all-to-all", "all-reduce") else before
        # All-to-alls run one after another, other kinds along all axes at once.
        for listed in re.findall(r"\{([^{}]*)\}", text) if kind == "all-to-all" else [text]:
            axes = _axes(listed)
            if (count := self._count(axes)) > 1:
                whole = not any(":" in a for a in axes)
                self._note(op, kind, axes, count, whole, [(operand, given, after)], around)
                if kind == "all-reduce":
                    self._reduced(operand, axes, after.bytes, around)

    def _reduced(self, operand: Any, axes: Sequence[str], size: int, around: _Within) -> None:
        """Add the bytes sent if the compiler reduces the axes of an array one after another."""
        summed = operand.owner
        rule = str(summed.attributes["sdy.sharding_rule"]) if "sdy.sharding_rule" in summed.attributes else ""
        found = self._along(list(summed.operands), rule, "reduction")
        parts = {tuple(a for a in over if a in axes) for _, over in found} - {()}
        if len(parts) > 1:
            apart = sum(sent_by("all-reduce", size, self._count(part)) or 0 for part in parts)
            together = sent_by("all-reduce", size, self._count(axes)) or 0
            self.uncertain += (around.times or 1) * max(0, apart - together)

    def _asked_for(self, op: Any, kind: str, around: _Within) -> None:
        pairs = kind == "collective-permute"
        groups = op.attributes["source_target_pairs" if pairs else "replica_groups"]
        if listed := re.search(r"axes = \[(.*)\]", str(groups)):
            axes, whole = tuple(re.findall(r'"([^"]+)"', listed[1])), True
            if not axes or "sub_axis" in listed[1]:
                raise NotImplementedError(f"explain: by='shardy' cannot read {groups}. by='partitioner' does.")
            count = self._count(axes)
        else:
            found = tuple(map(tuple, np.array(groups).tolist()))
            (axes, whole), count = along(found, self.mesh, pairs), len(found[0])
        carried = [(x, self._local(x), self._local(y)) for x, y in zip(op.operands, op.results, strict=False)]
        pieces = 1
        if kind == "all-to-all":  # as the compiler for CPUs implements it
            (operand, shape, _), at, pieces = carried[0], int(op.attributes["split_dimension"]), count
            piece = HloShape(shape.dtype, (*shape.sizes[:at], shape.sizes[at] // count, *shape.sizes[at + 1 :]))
            carried = [(operand, piece, piece)]
        if count > 1:
            self._note(op, kind, axes, count, whole, carried, around, pieces)
            for value, before, after in carried if kind not in ("all-reduce", "collective-permute") else ():
                # The compiler may gather arrays that are sharded over mesh axes left to it, before and again after.
                if (shards := self._shards(value)) > 1:
                    most = (sent_by(kind, pieces * before.bytes, count) or 0) + pieces * (before.bytes + after.bytes)
                    self.uncertain += (around.times or 1) * (shards - 1) * most

    def _note(
        self, op: Any, kind: str, axes: Sequence[str], devices: int, whole: bool,
        carried: Sequence[tuple[Any, HloShape, HloShape]], around: _Within, pieces: int = 1,
    ) -> None:  # fmt: skip
        origin, names = self._origin(op, around), set(map(_name, axes))
        numbers = tuple(self._number(x) for x, _, _ in carried)
        key = kind, frozenset(names), numbers
        times = around.times or 1
        once = key in self._seen or self._constant.issuperset(numbers)
        avoided = times if once else times - times // self._repeats([x for x, _, _ in carried])
        self._seen.add(key)
        self.uncertain += avoided * sum(sent_by(kind, pieces * x.bytes, devices) or 0 for _, x, _ in carried)
        self.exchanges.append(
            Exchange(
                kind=kind,
                axes=tuple(a for a in self.mesh if a in names),
                devices=devices,
                along_all=whole,
                times=around.times,
                in_branch=around.in_branch,
                origin=origin,
                carried=[(self._producer(x, origin, around), before, after) for x, before, after in carried],
                pieces=pieces,
                users=functools.partial(self._users, op, around),
            )
        )

    def _producer(self, value: Any, otherwise: Origin, around: _Within) -> Origin:
        return self._origin(value.owner, around) if hasattr(value.owner, "regions") else otherwise

    def _users(self, op: Any, around: _Within) -> Iterator[Origin]:
        waiting = list(op.results)
        for value in waiting:
            for use in value.uses:
                yield self._origin(use.owner, around)
                if len(waiting) < 64:
                    waiting += use.owner.results

    # --- everything else ---

    def _product(self, op: Any, around: _Within) -> None:
        """Count the flops of a product or convolution."""
        # Without grouped products, as for CPUs, each row is multiplied by the matrices of all groups.
        origin = self._origin(op, around)
        groups = _scopes.groups(origin.scope)
        self.grouped = self.grouped or groups > 1
        each = flops_of(op, [self._local(x).sizes for x in (*list(op.operands)[:2], op.results[0])]) // groups
        if around.times is None:
            self.flops = self.needed_flops = None
            return
        self.products.append((origin.scope, origin.frames(), each * around.times))
        if self.flops is not None and self.needed_flops is not None:
            self.flops += each * around.times
            self.needed_flops += 0 if around.in_branch else each * around.times

    def _other(self, op: Any, around: _Within) -> None:
        name = op.name.partition(".")[2]
        if op.name in ("stablehlo.dot_general", "stablehlo.convolution"):
            self._product(op, around)
        elif op.name == "sdy.reshard":
            raise NotImplementedError(
                "explain: by='shardy' found a reshard that is not a collective. by='partitioner' reads such a program."
            )
        elif op.name == "chlo.ragged_dot":
            self.uncounted.setdefault(name)
            self.flops = self.needed_flops = None
        if op.name == "stablehlo.custom_call" and (called := str(op.attributes["call_target_name"]).strip('"')):
            if called == "CustomSPMDPartitioning":
                raise NotImplementedError(
                    "explain: by='shardy' cannot see inside an operation with its own partitioning, such as "
                    "`top_k` or `random.categorical` along a sharded axis. by='partitioner' does."
                )
            name = called
        values = [x for x in (*op.operands, *op.results) if hasattr(x.type, "shape")]
        if name == "gather" and not around.manual and not any(self.over(op.operands[1])):
            # The compiler may gather it at the look-up, at its use, and in the backward pass.
            found = op.results[0]
            self.uncertain += 3 * (around.times or 1) * self._local(found).bytes * (self._shards(found) - 1)
        if "sdy.sharding_rule" in op.attributes:
            rule = str(op.attributes["sdy.sharding_rule"])
            values = [x for x, _ in self._along(values, rule, "permutation", "need_replication")]
        elif op.name.startswith("sdy.") or op.name in _MOVES_NOTHING:
            return
        sharded = [x for x in values if any(self.over(x))]
        if sharded:  # at most, all are gathered
            self.moved.setdefault(name)
            most = sum(self._local(x).bytes * (self._shards(x) - 1) for x in sharded)
            self.uncertain += (around.times or 1) * most

    def _along(self, values: Sequence[Any], rule: str, *kinds: str) -> list[tuple[Any, tuple[str, ...]]]:
        """Return the arrays that are sharded along factors of some kinds in an operation's rule, and the mesh axes."""
        listed = re.findall(rf"(?:{'|'.join(kinds)})=\{{([^}}]*)\}}", rule)
        factors = {factor for found in listed for factor in re.findall(_FACTOR, found)}
        terms = re.findall(r"\[([^\[\]]*)\]", rule.partition("{")[0])
        return [
            (value, axes)
            for value, term in zip(values, terms, strict=False)
            for found, axes in zip(filter(None, term.split(", ")), self.over(value), strict=True)
            if axes and not factors.isdisjoint(re.findall(_FACTOR, found))
        ]


_CONSTANTS = {"sdy.constant", "stablehlo.constant", "stablehlo.iota"}
"""Operations without operands."""
_THE_SAME = {"stablehlo.optimization_barrier", "sdy.sharding_constraint", "sdy.reshard"}
"""Operations whose results are their operands."""
_NEUTRAL = {"stablehlo.add": 0, "stablehlo.subtract": 0, "stablehlo.multiply": 1, "stablehlo.divide": 1}


def _changes_nothing(op: Any) -> bool:
    """Return whether an operation adds zero, or multiplies by one."""
    return op.name in _NEUTRAL and _splat(op.operands[1]) == _NEUTRAL[op.name]


def _splat(value: Any) -> float | None:
    """Return the value that all elements of a constant have."""
    while getattr(value.owner, "name", "") in ("stablehlo.broadcast_in_dim", "stablehlo.convert"):
        value = value.owner.operands[0]
    if getattr(value.owner, "name", "") not in ("sdy.constant", "stablehlo.constant"):
        return None
    found = re.match(r"dense<(-?[\d.]+(?:[eE][+-]?\d+)?)>", str(value.owner.attributes["value"]))
    return float(found[1]) if found else None


def _said(op: Any) -> Any:
    """Return the attributes of an operation, without operands and shardings."""
    said = tuple((name, str(op.attributes[name])) for name in op.attributes if not name.startswith("sdy."))
    return said, tuple(str(result.type) for result in op.results)


_FACTOR = r"[a-z](?:_\d+)?"


def _name(axis: str) -> str:
    return axis.partition(":")[0]


def _axes(text: str) -> tuple[str, ...]:
    """Return the mesh axes in a list such as `"data", "model":(1)2`."""
    return tuple(name + part for name, part in re.findall(r'"([^"]+)"(:\(\d+\)\d+)?', text))


def _shardings(text: str) -> list[Over]:
    """Return the mesh axes in one or several shardings such as `<@mesh, [{"data"}, {}]>`."""
    axis = r'(?:"[^"]+"(?::\(\d+\)\d+)?|\?)'
    found = re.findall(rf"<@[^,\s]+, \[((?:\{{(?:{axis}(?:, )?)*\}}(?:p\d+)?(?:, )?)*)\]", text)
    if len(found) != text.count("<@") or (not found and not text.endswith("<[]>")):
        raise NotImplementedError(f"explain: by='shardy' cannot read the sharding {text}. by='partitioner' does.")
    return [tuple(_axes(axes) for axes in re.findall(r"\{([^{}]*)\}", listed)) for listed in found]


def _dtype(element: str) -> str:
    """Convert a type to XLA's name."""
    if element == "i1":
        return "pred"
    found = re.fullmatch(r"(u?)i(\d+)", element)
    return f"{found[1] or 's'}{found[2]}" if found else element.lower()


def _moved_from(value: Any) -> Any:
    """Return the array of which this one is a resharded copy."""
    while getattr(value.owner, "name", "") in ("sdy.all_gather", "sdy.all_slice", "sdy.all_to_all"):
        value = value.owner.operands[0]
    return value


def _last(block: Any) -> Any:
    """Return the operation that ends a block, whose operands are its results."""
    return block.operations[len(block.operations) - 1].operation


def flops_of(op: Any, shapes: Sequence[Sequence[int]]) -> int:
    """Return the flops of a product or convolution, whose two operands and result have some sizes."""
    left, _, result = shapes
    if op.name == "stablehlo.dot_general":
        numbers = re.search(r"lhs_contracting_dimensions = \[([^\]]*)\]", str(op.attributes["dot_dimension_numbers"]))
        summed = [left[int(i)] for i in re.findall(r"\d+", numbers[1])] if numbers else []
        return _flops.of_product(result, summed)
    numbers = re.sub(r".*<(.*)>", r"\1", str(op.attributes["dimension_numbers"]))
    labels = re.sub(r"[\s,\[\]]", "", numbers).replace("x", "_")
    spatial = sum(label.isdecimal() for label in labels.partition("_")[0])

    def of(name: str, otherwise: int) -> list[int]:
        return [int(n) for n in op.attributes[name]] if name in op.attributes else [otherwise] * spatial

    padding = [int(n) for n in op.attributes["padding"]][::2] if "padding" in op.attributes else [0] * spatial
    windows = [*map(_flops.Window, of("window_strides", 1), padding, of("lhs_dilation", 1), of("rhs_dilation", 1))]
    return _flops.of_convolution(labels, shapes, windows)


def turns_of(loop: Any) -> int | None:
    """Return how often a loop that counts from one constant to another runs; None for other loops."""
    test, body = (region.blocks[0] for region in loop.regions)
    compare, step = _last(test).operands[0].owner, _last(body)
    if getattr(compare, "name", "") != "stablehlo.compare" or " LT" not in str(
        compare.attributes["comparison_direction"]
    ):
        return None
    counter, end = compare.operands
    at = next((i for i, argument in enumerate(test.arguments) if argument == counter), None)
    if at is None or getattr(add := step.operands[at].owner, "name", "") != "stablehlo.add":
        return None
    by = [_constant(x) for x in add.operands if x != body.arguments[at]]
    start, stop = _constant(loop.operands[at]), _constant(end)
    return None if len(by) != 1 or not by[0] or None in (start, stop) else -((start - stop) // by[0])  # pyright: ignore


def _constant(value: Any) -> int | None:
    number = _splat(value)
    return None if number is None or number % 1 else int(number)
