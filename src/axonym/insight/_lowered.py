"""Read a lowered step, before it is partitioned: its products, the arguments that they use, and its constraints."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ..core.source_lines import Frame
from . import _flops, _scopes


class OneHot(NamedTuple):
    """An operand of a product that tells an index from others, as `one_hot` makes."""

    before: int
    """The number of its rows that are summed."""
    after: int
    """The number of rows in the result."""
    looks_up: bool
    """True if the sum is over the numbers that the index may have."""


@dataclasses.dataclass(frozen=True)
class Product:
    """A product or a convolution."""

    scope: str
    frames: tuple[Frame, ...]
    flops: int | None
    """Its flops on all devices together, if none is repeated; None if they depend on values."""
    arguments: tuple[int | None, ...]
    """For each operand, the number of the argument that it is, in another dtype or layout, or a slice of it."""
    one_hot: OneHot | None = None
    """The operand that tells an index from others, if there is one."""


_SAME = {
    f"stablehlo.{name}"
    for name in ("convert", "transpose", "reshape", "broadcast_in_dim", "dynamic_slice", "slice", "all_gather",
                 "optimization_barrier")
} | {"sdy.sharding_constraint"}  # fmt: skip
"""Operations whose result is their first operand in another form, or part of it."""
_COMBINED = {f"stablehlo.{name}" for name in ("and", "multiply", "select")}
_PLACED = {"sdy.sharding_constraint", "stablehlo.all_reduce", "stablehlo.reduce_scatter"}
_PRODUCTS = {"stablehlo.dot_general", "stablehlo.convolution"}


class LoweredStep(NamedTuple):
    """Facts about a step that is lowered, but not partitioned yet."""

    products: tuple[Product, ...] = ()
    """The products, in the order of the program."""
    converted: Mapping[int, str] = MappingProxyType({})
    """By number, the arguments that a placement constrains before they are converted to a smaller dtype, and this."""
    cast: tuple[tuple[tuple[Frame, ...], str, str], ...] = ()
    """The lines that convert gradients to a larger dtype before a placement or a sum over devices, and the dtypes."""


def read_step(lowered: Any, mesh: Mapping[str, int]) -> LoweredStep:
    """Read a lowered function; nothing is known if its module cannot be read."""
    # Modules have no public interface for reading.
    with contextlib.suppress(AttributeError, ImportError, KeyError, IndexError, TypeError, ValueError):
        walk = _Walk(lowered.compiler_ir("stablehlo"), mesh)
        return LoweredStep(tuple(walk.products), walk.converted, tuple(walk.cast))
    return LoweredStep()


class _Walk:
    """Walks through a module in the order in which its operations run."""

    def __init__(self, module: Any, mesh: Mapping[str, int]):
        self.products: list[Product] = []
        self.converted: dict[int, str] = {}
        self.cast: list[tuple[tuple[Frame, ...], str, str]] = []
        self._mesh = mesh
        self._functions: dict[str, Any] = {}
        self._given: dict[Any, Any] = {}
        """The values that the arguments of blocks stand for."""
        for operation in (op.operation for op in module.operation.regions[0].blocks[0].operations):
            if operation.name == "func.func":
                self._functions[str(operation.attributes["sym_name"]).strip('"')] = operation
        self._main = self._functions["main"].regions[0].blocks[0]
        self._around: list[Any] = []
        """The calls around an operation."""
        self._manual: set[str] = set()
        self._block(self._main, 1)

    def _block(self, block: Any, times: int | None) -> None:
        for operation in block.operations:
            op = operation.operation
            if op.name in _PRODUCTS:
                self.products.append(self._product(op, times))
            elif op.name in _PLACED:
                self._placed(op)
            elif op.name == "stablehlo.while":
                body, turns = op.regions[1].blocks[0], _turns_of(op)
                ends = _last(body).operands
                same = [(x, start) for x, start, end in zip(body.arguments, op.operands, ends, strict=True) if x == end]
                self._given.update(same)
                self._block(body, None if times is None or turns is None else times * turns)
            elif op.name == "func.call":
                self._inside(op, self._called(op), times)
            elif op.name in ("sdy.manual_computation", "sdy.named_computation"):
                axes = (
                    set(re.findall(r'"([^"]+)"', str(op.attributes["manual_axes"]))) if "manual" in op.name else set()
                )
                outer, self._manual = self._manual, self._manual | axes
                self._inside(op, op.regions[0].blocks[0], times)
                self._manual = outer
            elif op.name in ("stablehlo.case", "stablehlo.if"):
                taken, of = _scopes.turns(scope_of(str(op.location))) or (1, 1)
                for i, region in enumerate(op.regions):
                    share = taken if i or of == 1 else of - taken
                    self._block(region.blocks[0], None if times is None else times * share // of)

    def _inside(self, op: Any, block: Any, times: int | None) -> None:
        self._given.update(zip(block.arguments, op.operands, strict=True))
        self._around.append(op)
        self._block(block, times)
        self._around.pop()

    def _placed(self, op: Any) -> None:
        """Record whether an argument is converted to a smaller dtype after a placement, or a gradient before it."""
        owner = op.operands[0].owner
        if getattr(owner, "name", "") == "stablehlo.convert" and (dtypes := _widened(op.operands[0])):
            phases = [
                _scopes.phase(scope_of(str(getattr(x, "location", "")))) for x in (owner, owner.operands[0].owner)
            ]
            if phases == ["", "backward"]:
                self.cast.append((frames_of(str(owner.location)), *dtypes))
        if op.name != "sdy.sharding_constraint":
            return
        users = [use.owner for use in op.results[0].uses]
        dtypes = {str(user.results[0].type.element_type) for user in users if user.name == "stablehlo.convert"}
        number = self._argument(op.operands[0]) if len(dtypes) == 1 == len(users) else None
        if number is not None:
            (dtype,), given = dtypes, str(op.operands[0].type.element_type)
            same = given == str(self._main.arguments[number].type.element_type)
            if same and _bits(dtype) < _bits(given):
                self.converted[number] = dtype

    def _called(self, call: Any) -> Any:
        return self._functions[str(call.attributes["callee"]).lstrip("@").strip('"')].regions[0].blocks[0]

    def _product(self, op: Any, times: int | None) -> Product:
        locations = [str(x.location) for x in (*self._around, op)]
        scope = "/".join(filter(None, map(scope_of, locations)))
        frames = tuple(f for location in reversed(locations) for f in frames_of(location))
        shapes = [tuple(x.type.shape) for x in (*list(op.operands)[:2], op.results[0])]
        flops = _flops_of(op, shapes)
        flops = flops * self._copies(scope) // _scopes.groups(scope)
        arguments = tuple(self._argument(x) for x in list(op.operands)[:2])
        one_hot = next(filter(None, (self._one_hot(op, i) for i in (0, 1))), None) if flops else None
        return Product(
            scope,
            frames,
            None if times is None else flops * times,
            arguments,
            one_hot,
        )

    def _one_hot(self, op: Any, of: int) -> OneHot | None:
        """Describe an operand that tells an index from others, as `one_hot` makes."""
        if op.name != "stablehlo.dot_general" or not (counts := self._counts(op.operands[of])):
            return None
        shape, summed = op.operands[of].type.shape, _summed(op, of)
        rest = [n for i, n in enumerate(shape) if i not in (*summed, *_summed(op, of, "batching"))]
        before = math.prod(shape[i] for i in summed)
        return OneHot(before, math.prod(rest), len(counts) == 1 and max(counts) % before == 0)

    def _counts(self, value: Any) -> set[int]:
        """Return the sizes of counts from 0 whose equality with other numbers makes a value, up to scales."""
        waiting, found = [value], set[int]()
        for x in itertools.islice(waiting, 64):
            owner = x.owner
            name = getattr(owner, "name", "")
            if name == "func.call":
                block = self._called(owner)
                self._given.update(zip(block.arguments, owner.operands, strict=True))
                waiting.append(_last(block).operands[x.result_number])
            elif x in self._given:
                waiting.append(self._given[x])
            elif name in _SAME:
                waiting.append(owner.operands[0])
            elif name in _COMBINED:
                waiting += owner.operands
            elif name == "stablehlo.compare" and " EQ>" in str(owner.attributes["comparison_direction"]):
                # Masks of groups, as grouped products have them on CPUs, compare by size.
                for side in owner.operands:
                    while getattr(side.owner, "name", "") in _SAME:
                        side = side.owner.operands[0]
                    if getattr(side.owner, "name", "") == "stablehlo.iota":
                        found.add(side.type.shape[int(side.owner.attributes["iota_dimension"])])
        return found

    def _copies(self, scope: str) -> int:
        """Return how many devices a per-device operation needs, of which each has a part of the work.

        A named product runs per device if it gathers parameters; the mesh axes that shard none of its axes repeat it.
        """
        operation, axes, pipeline = _scopes.operation(scope), self._manual, _scopes.around(scope, "pipeline")
        if operation is not None and operation.name == "dot":
            # Stages of a pipeline have layers of their own.
            axes = axes & (operation.over | (pipeline.over if pipeline else set()))
        return math.prod(self._mesh.get(a, 1) for a in axes)

    def _argument(self, value: Any) -> int | None:
        """Return the number of the argument of the program that a value is."""
        for _ in range(256):
            owner = value.owner
            if not hasattr(owner, "regions"):  # an argument of a block
                if owner == self._main:
                    return value.arg_number
                if value not in self._given:
                    return None
                value = self._given[value]
            elif owner.name in _SAME:
                value = owner.operands[0]
            elif owner.name == "func.call":
                block = self._called(owner)
                self._given.update(zip(block.arguments, owner.operands, strict=True))
                results = _last(block).operands
                value = results[value.result_number]
            else:
                return None
        return None


def _widened(value: Any) -> tuple[str, str] | None:
    """Return the floating-point dtypes before and after a conversion to a larger one, whose result a value is."""
    while getattr(value.owner, "name", "") in _SAME:
        owner = value.owner
        value = owner.operands[0]
        if owner.name == "stablehlo.convert":
            before, after = (str(x.type.element_type) for x in (value, owner.results[0]))
            return (before, after) if before[:1] in "bf" and 8 < _bits(before) < _bits(after) else None
    return None


def _flops_of(op: Any, shapes: Sequence[Sequence[int]]) -> int:
    """Return the flops of a product or convolution, whose two operands and result have some sizes."""
    left, _, result = shapes
    if op.name == "stablehlo.dot_general":
        return _flops.of_product(result, [left[i] for i in _summed(op, 0)])
    numbers = re.sub(r".*<(.*)>", r"\1", str(op.attributes["dimension_numbers"]))
    labels = re.sub(r"[\s,\[\]]", "", numbers).replace("x", "_")
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
    windows = [[int(n) for n in op.attributes[name]] if name in op.attributes else [] for name in names]
    windows[1] = windows[1][::2]
    return _flops.of_convolution(labels, shapes, *windows)


def _summed(op: Any, of: int, what: str = "contracting") -> list[int]:
    """Return the axes of an operand that a product sums over, or has in common with the other."""
    side = ("lhs", "rhs")[of]
    numbers = re.search(rf"{side}_{what}_dimensions = \[([^\]]*)\]", str(op.attributes["dot_dimension_numbers"]))
    return [int(i) for i in re.findall(r"\d+", numbers[1])] if numbers else []


def _turns_of(loop: Any) -> int | None:
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


def _last(block: Any) -> Any:
    """Return the operation that ends a block, whose operands are its results."""
    return block.operations[len(block.operations) - 1].operation


def _constant(value: Any) -> int | None:
    """Return the whole number that all elements of a constant are."""
    while getattr(value.owner, "name", "") in ("stablehlo.broadcast_in_dim", "stablehlo.convert"):
        value = value.owner.operands[0]
    constant = getattr(value.owner, "name", "") == "stablehlo.constant"
    found = re.match(r"dense<(-?\d+)>", str(value.owner.attributes["value"])) if constant else None
    return int(found[1]) if found else None


def _bits(dtype: str) -> int:
    """Return the size of an element of a type such as `bf16` or `f8E4M3FN`."""
    found = re.match(r"\D+(\d+)", dtype)
    return int(found[1]) if found else 0


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A sharding constraint on the result of another operation."""

    scopes: tuple[str, ...]
    """Its own scope, the scope of the constrained operation, and, if that is elementwise, of the operations before it:
    XLA shards their results alike."""
    sizes: tuple[int, ...]
    """The sizes of the array on all devices together."""
    over: tuple[tuple[str, ...] | None, ...]
    """The mesh axes that the constraint shards each axis over; None if it leaves the axis to the compiler."""
    frames: tuple[Frame, ...]

    @property
    def kept(self) -> set[str]:
        """Return the mesh axes that the array is sharded over."""
        return {a for axes in self.over for a in axes or ()}

    def gathers(self, sizes: Mapping[int, int], over: Collection[str], mesh: Mapping[str, int]) -> bool:
        """Return whether it makes XLA all-gather the array, so that some axes have these sizes on each device."""
        known = {
            place: size // math.prod(mesh.get(a, 1) for a in axes)
            for place, (size, axes) in enumerate(zip(self.sizes, self.over, strict=True))
            if axes is not None
        }
        return self.kept.isdisjoint(over) and sizes.items() <= known.items()

    def moves(self, place: int, over: Collection[str]) -> bool:
        """Return whether it reshards the array from an axis, which was sharded over these mesh axes, to another one."""
        own = self.over[place] if place < len(self.over) else None
        return own is not None and self.kept.issuperset(over) and set(over).isdisjoint(own)


class Constraints:
    """The sharding constraints of a lowered function, found on first use."""

    def __init__(self, lowered: Any):
        self._lowered = lowered
        self._by_scope: dict[str, list[Constraint]] | None = None

    def after(self, scope: str) -> Sequence[Constraint]:
        """Return the constraints on the result of an operation, or at its scope."""
        if self._by_scope is None:
            self._by_scope = {}
            # Modules have no public interface for reading. If this fails, only the compiler's own lines are known.
            with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
                for constraint in _constraints(self._lowered.compiler_ir("stablehlo").operation):
                    for known in constraint.scopes:
                        self._by_scope.setdefault(known, []).append(constraint)
        # In a function that a compiled function calls, scopes lack the scope of the call and its transformations.
        called = re.sub(r"(jvp|transpose)\(|\)", "", scope)
        inner = (c for known, c in self._by_scope.items() if known and called.endswith(f"/{known}"))
        return self._by_scope.get(scope) or next(inner, ())


def _constraints(operation: Any) -> Iterator[Constraint]:
    """Yield the constraints in an operation, except the ones that JAX adds for the type of a result."""
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                inner = inner.operation
                if inner.name == "sdy.sharding_constraint":
                    location, before = str(inner.location), tuple(_computing(inner.operands[0]))
                    own = scope_of(location)
                    if before[:1] != ((own, False),):
                        sizes, over = tuple(inner.results[0].type.shape), _over(str(inner.attributes["sharding"]))
                        yield Constraint((own, *(of for of, _ in before)), sizes, over, frames_of(location))
                yield from _constraints(inner)


_SAY_NOTHING_OF_AXES = {"comparison_direction", "compare_type", "result_accuracy"}


def _is_elementwise(operation: Any) -> bool:
    plain = _SAY_NOTHING_OF_AXES.issuperset(operation.attributes) and not len(operation.regions)
    return plain and operation.name.startswith("stablehlo.") and "dynamic" not in operation.name


def _computing(value: Any) -> Iterator[tuple[str, bool]]:
    """Yield the scopes that produce an array, back through elementwise operations and other constraints.

    Each comes with whether it is a constraint.
    """
    waiting = [value]
    # A bound on the work: every constraint follows its own chain of elementwise operations.
    for inner in itertools.islice(waiting, 32):
        producer = getattr(inner.owner, "operation", inner.owner)
        if hasattr(producer, "location"):  # it is not an argument of the function
            placed = producer.name == "sdy.sharding_constraint"
            yield scope_of(str(producer.location)), placed
            if placed or _is_elementwise(producer):
                waiting += [x for x in producer.operands if getattr(x.type, "shape", None) == value.type.shape]


def scope_of(location: str) -> str:
    found = re.match(r'loc\("((?:[^"\\]|\\.)*)"', location)
    return found[1] if found else ""


def frames_of(location: str) -> tuple[Frame, ...]:
    """Return the lines in a location, the innermost first."""
    found = re.findall(r'"([^"]*)"\("([^"]+)":(\d+)', location)
    return tuple(Frame(file, int(line), function) for function, file, line in found)


def _over(sharding: str) -> tuple[tuple[str, ...] | None, ...]:
    """Return the mesh axes of each axis in a sharding such as `#sdy.sharding<@mesh, [{"data"}, {}, {?}]>`."""
    listed = re.findall(r"\{([^{}]*)\}", sharding[sharding.index("[") : sharding.rindex("]")])
    return tuple(None if axes == "?" else tuple(re.findall(r'"([^"]+)"', axes)) for axes in listed)
