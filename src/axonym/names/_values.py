"""The values of a program: the axes of arrays, facts about their elements, and the steps that make them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ._axes import Axis, AxisFactor, Copies, Dims, find

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

Factors: TypeAlias = tuple[AxisFactor, ...]


class Order(NamedTuple):
    """The positions of which the index along `high`, less that along `low`, is `least` or more."""

    high: AxisFactor
    low: AxisFactor
    least: int


class Mask(NamedTuple):
    """Which positions are kept."""

    kind: str
    """`kept` is true, `one` is 1 and `bias` is 0 where they are; `penalty` is a large number where they are not."""
    varies: Factors | None
    """The factors along which it varies; None if that is not known."""
    order: Order | None = None
    within: bool = True
    """Whether all that it keeps is in that order."""
    covers: bool = True
    """Whether it keeps all that is in that order."""
    parts: tuple[Mask, ...] = ()
    """The masks that all have to keep what it keeps, if it is made of several."""
    turned: bool = False
    """Whether it keeps what these parts together do not keep."""

    def inverted(self, kind: str) -> Mask:
        order = None if self.order is None else Order(self.order.low, self.order.high, 1 - self.order.least)
        return Mask(kind, self.varies, order, self.covers, self.within, self.parts, not self.turned)

    def every(self) -> tuple[Mask, ...]:
        """Return the masks that all have to keep what it keeps."""
        return self.parts if self.parts and not self.turned else (self,)

    def in_terms_of(self, to: Callable[[AxisFactor], Factors]) -> Mask:
        """Return the mask in terms of other factors."""
        varies = None if self.varies is None else tuple(g for f in self.varies for g in to(f))
        order = self.order
        if order is not None:
            high, low = to(order.high), to(order.low)
            order = Order(high[0], low[0], order.least) if len(high) == len(low) == 1 else None
        return self._replace(varies=varies, order=order, parts=tuple(m.in_terms_of(to) for m in self.parts))


class Facts(NamedTuple):
    """Facts about the values of an array."""

    value: float | None = None
    """The value of all its elements."""
    position: tuple[AxisFactor, int] | None = None
    """The factor along which it counts, and from which number."""
    difference: tuple[AxisFactor, AxisFactor, int] | None = None
    """The difference of the positions along two factors, and a number added to it."""
    varies: Factors | None = None
    """The factors along which it may vary; None if that is not known."""
    mask: Mask | None = None
    masks: tuple[Mask, ...] = ()
    """The masks of scores, or of arrays made from them."""
    exponential: bool = False
    total: Factors = ()
    """The factors along which exponentials are added up to give it, or its logarithm."""
    divided: Factors = ()
    """The factors along which scores are less by the logarithm of such a total."""
    weights: Factors = ()
    """The factors along which exponentials are divided by their total."""
    promoted_by: AxisStep | None = None
    """The step that gave it further axes before its own."""
    opened: bool = False
    """Whether it has got an axis of size 1 that is not before its own."""

    def copied(self, copy: Callable[[AxisFactor], AxisFactor]) -> Facts:
        """Return the facts about other factors."""

        def mask(m: Mask) -> Mask:
            return m.in_terms_of(lambda f: (copy(f),))

        return self._replace(
            position=self.position and (copy(self.position[0]), self.position[1]),
            difference=self.difference and (copy(self.difference[0]), copy(self.difference[1]), self.difference[2]),
            varies=self.varies and tuple(map(copy, self.varies)),
            mask=self.mask and mask(self.mask),
            masks=tuple(map(mask, self.masks)),
        )


class Pointer:
    """The axis whose positions the values of an integer array are; None until an operation says so."""

    __slots__ = ("axis",)

    def __init__(self, axis: Axis | None = None):
        self.axis = axis


class Axed:
    """The axes of an array in a program."""

    __slots__ = ("constant", "dims", "facts", "points", "terms", "transposed_from")

    def __init__(
        self, dims: Dims, constant: bool = False, points: tuple[Pointer, ...] | None = None, facts: Facts | None = None
    ):
        self.dims = dims
        self.constant = constant
        """Whether it depends on no argument; then each use has axes of its own."""
        self.points = points
        """The axes that it indexes: one, or one for each position along its last axis."""
        self.facts = facts
        """Facts about its elements."""
        self.terms: tuple[Axed, ...] = (self,)
        """The values of which it is the sum, or the latest of them."""
        self.transposed_from: Axed | None = None
        """The value that it is the transpose of."""

    def settle(self) -> None:
        """Let the axes be made of the factors that stand for their own, so that the axes of other arrays are equal."""
        self.dims = tuple([tuple(map(find, axis)) for axis in self.dims])

    def used(self) -> Axed:
        """Return the value for one use."""
        if not self.constant or not self.dims:
            return self
        copies = Copies()
        points = self.points and tuple(Pointer(None if p.axis is None else copies.axis(p.axis)) for p in self.points)
        facts = self.facts and self.facts.copied(copies.__getitem__)
        return Axed(tuple(map(copies.axis, self.dims)), points=points, facts=facts)


@dataclasses.dataclass(eq=False, slots=True)
class AxisStep:
    """An equation of a program, with its results and, if it calls functions, their steps."""

    eqn: JaxprEqn
    outer: AxisStep | None
    slices: dict[tuple[Any, int], list[tuple[int, int, int]]]
    """How the arrays of the same function are sliced, by array and dimension: start, stop and stride."""
    operands: Sequence[Axed] = ()
    """Its operands. Constants have axes of their own in each use."""
    results: Sequence[Axed] = ()
    bodies: Sequence[Any] = ()
    rule: Any = None
    """What it does to axes; None if it calls functions, or that is not known."""

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params

    @property
    def shape(self) -> tuple[int, ...]:
        return self.eqn.outvars[0].aval.shape  # pyright: ignore[reportAttributeAccessIssue]

    def shape_of(self, i: int) -> tuple[int, ...]:
        """Return the shape of an operand."""
        return self.eqn.invars[i].aval.shape  # pyright: ignore[reportAttributeAccessIssue]

    def within(self, transformation: str) -> bool:
        """Return whether it belongs to a transformation by JAX, such as `vmap(`."""
        step: AxisStep | None = self
        while step is not None:
            if transformation in str(step.eqn.source_info.name_stack):
                return True
            step = step.outer
        return False

    @property
    def backward(self) -> bool:
        """Return whether it belongs to the transposed part of a derivative."""
        return self.within("transpose(")


def dtype_kind(var: Any) -> str:
    """Return NumPy's letter for the kind of a variable's dtype; for keys and other values, an empty string."""
    return getattr(getattr(var.aval, "dtype", None), "kind", "")
