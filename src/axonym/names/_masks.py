"""Follow positions through a program: masks, softmax, and which of two roles of an axis belongs to the keys.

Roles of an axis are alike until something tells them apart. These facts follow values forward through a program: the
positions that a mask keeps, the scores that it masks, and the axis along which exponentials are divided by their sum.
Where such weights are summed over that same axis, it is the role of keys, and the other one the role of queries. Then a
mask can be the wrong way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..distribution.axis_marks import EXCHANGE, MARK
from ._axes import Axes, Axis, AxisFactor, Dims, Meeting, find, last_base, leaves
from ._values import Axed, AxisStep, Factors, Facts, Mask, Order, dtype_kind

LARGE = 100.0
"""Masks add to scores, or subtract from them, numbers whose absolute value is larger than this."""


NOTHING = Facts()


def _carried_facts(known: Sequence[Facts]) -> Facts | None:
    """Return the facts that outlast an operation position for position."""
    masks = tuple(dict.fromkeys(m for f in known for m in f.masks))
    total = next((f.total for f in known if f.total), ())
    return Facts(masks=masks, total=total) if masks or total else None


def _varying_factors(xs: Sequence[Axed], known: Sequence[Facts]) -> Factors | None:
    """Return the factors along which the result of an operation on these arrays varies."""
    found: list[AxisFactor] = []
    for x, facts in zip(xs, known, strict=True):
        found += _factors_along(x) if facts.varies is None else facts.varies
    return tuple(found)


def _factors_along(x: Axed) -> Axis:
    return tuple(f for axis in x.dims for f in axis)


# --- values of constants ---


def is_readable(value: Any) -> bool:
    """Return whether the elements of a constant are here, and few enough to look at."""
    if value is None or isinstance(value, Tracer) or np.size(value) > 2**22:
        return False
    return not isinstance(value, jax.Array) or value.is_fully_addressable


def facts_of_value(dims: Dims, value: Any) -> Facts | None:
    """Return the facts about a constant with elements: whether it is a mask, one number, or counts positions."""
    dtype: Any = getattr(value, "dtype", None)
    if not is_readable(value) or not any(jnp.issubdtype(dtype, kind) for kind in (np.bool_, np.integer, np.floating)):
        return None
    x = np.asarray(value)
    low, high = (x.min().item(), x.max().item()) if x.size else (0, 0)
    if low == high:
        return Facts(value=float(low), varies=())
    if x.ndim == 1 and jnp.issubdtype(x.dtype, np.integer) and (np.diff(x) == 1).all():
        return Facts(position=(dims[0][0], int(low)), varies=dims[0])
    if (low, high) == (0, 1):
        kind, kept = "kept" if x.dtype == bool else "one", high
    else:
        kind, kept = "bias" if high == 0 and low <= -LARGE else "penalty" if low == 0 and high >= LARGE else "", 0
    if not kind or not ((x == low) | (x == high)).all():
        return None
    keeps: Any = x == kept
    along = [i for i in range(x.ndim) if (keeps != keeps.take([0], i)).any()]
    varies, order, covers = tuple(f for i in along for f in dims[i]), None, True
    if len(along) == 2:
        (i, j), there = along, keeps.any(tuple(k for k in range(x.ndim) if k not in along))
        distance = np.arange(x.shape[i])[:, None] - np.arange(x.shape[j])
        for a, b, ahead in ((i, j, distance), (j, i, -distance)):
            least = int(ahead[there].min())
            covers = bool(there[ahead >= least].all())
            if covers or (least >= 0 and ahead[there].max() > 0):
                order = Order(dims[a][0], dims[b][0], least)
                break
    return Facts(mask=Mask(kind, varies, order, True, order is None or covers), varies=varies)


# --- what each primitive tells ---

_LAYOUT = {"transpose", "reshape", "squeeze", "copy", "stop_gradient", "reduce_precision", "name"}
_LAYOUT |= {"optimization_barrier", "sharding_constraint", "log", "expand_dims", "pvary", "dynamic_slice"}
_LAYOUT |= {MARK, EXCHANGE}


def facts_of(step: AxisStep, xs: Sequence[Axed], result: Axed) -> Facts | None:
    """Return the facts about the result of a step, the first one if there are several."""
    known, name = [x.facts or NOTHING for x in xs], step.name
    match name:
        case "iota":
            axis = result.dims[step.params["dimension"]]
            return Facts(position=(axis[0], 0), varies=axis) if len(axis) == 1 else None
        case "slice":  # the first positions of axes, as of a mask that is made for the longest input
            if xs[0].dims == result.dims or any(step.params["start_indices"]) or step.params["strides"]:
                return known[0]
            pairs = [(leaves(axis), leaves(to)) for axis, to in zip(xs[0].dims, result.dims, strict=True)]
            part = {axis[0]: to[0] for axis, to in pairs if len(axis) == len(to) == 1}
            return known[0].copied(lambda f: part.get(find(f), f))
        case "broadcast_in_dim":
            at, rank = step.params["broadcast_dimensions"], len(step.shape)
            leading = 0 < len(at) < rank and tuple(at) == tuple(range(rank - len(at), rank))
            opened = not leading and rank > len(at) and all(step.shape[i] == 1 for i in range(rank) if i not in at)
            return known[0]._replace(
                varies=_varying_factors(xs, known), promoted_by=step if leading else None, opened=opened and len(at) > 0
            )
        case "add" | "sub":
            return _facts_of_sum(xs, known, result, -1 if name == "sub" else 1)
        case "mul":
            a, b = known
            for x, y in ((a, b), (b, a)):
                if x.mask is not None and x.mask.kind == "one" and y.value is not None and abs(y.value) >= LARGE:
                    return Facts(mask=x.mask.inverted("bias" if y.value < 0 else "penalty"), varies=x.varies)
            if a.mask is not None and b.mask is not None and a.mask.kind == b.mask.kind == "one":
                return Facts(mask=_intersected_masks(a.mask, b.mask), varies=_varying_factors(xs, known))
            return _facts_of_weights(known)
        case "div":
            return _facts_of_weights(known)
        case "exp" | "exp2":
            masks = known[0].masks
            return (
                Facts(masks=masks, weights=known[0].divided)
                if known[0].divided
                else Facts(masks=masks, exponential=True)
            )
        case "reduce_sum":
            if not known[0].exponential and not known[0].weights:
                return None
            return Facts(total=tuple(f for i in step.params["axes"] for f in leaves(xs[0].dims[i])))
        case "ge" | "gt" | "le" | "lt" | "eq" | "ne":
            return _facts_of_comparison(name, xs, known)
        case "not":
            mask = _as_mask(xs[0], known[0]).inverted("kept")
            return Facts(mask=mask, varies=mask.varies)
        case "and" | "or":
            both = [
                _as_mask(x, facts) if name == "and" else _as_mask(x, facts).inverted("kept")
                for x, facts in zip(xs, known, strict=True)
            ]
            mask = _intersected_masks(*both)
            return Facts(mask=mask if name == "and" else mask.inverted("kept"), varies=mask.varies)
        case "select_n":
            return _facts_of_choice(step, xs, known, result) if len(xs) == 3 else None
        case "convert_element_type":
            mask = known[0].mask
            if mask is None or mask.kind not in ("kept", "one"):
                return known[0]
            return known[0]._replace(mask=mask._replace(kind="kept" if _is_bool(step) else "one"))
        case "neg" if (mask := known[0].mask) is not None and mask.kind == "penalty":
            return known[0]._replace(mask=mask._replace(kind="bias"))
        case _ if name in _LAYOUT and xs:
            return known[0]
    position_for_position = len(step.shape) == max((len(x.dims) for x in xs), default=0)
    single = len(step.eqn.outvars) == 1
    return _carried_facts(known) if single and position_for_position and name != "dot_general" else None


def _facts_of_sum(xs: Sequence[Axed], known: Sequence[Facts], result: Axed, sign: int) -> Facts | None:
    """Follow sums and differences: of positions, and of scores with masks."""
    a, b = known
    if b.value is not None and a.position is not None and float(b.value).is_integer():
        return a._replace(position=(a.position[0], a.position[1] + sign * int(b.value)))
    if sign == 1 and a.value is not None and b.position is not None and float(a.value).is_integer():
        return b._replace(position=(b.position[0], b.position[1] + int(a.value)))
    if sign == -1 and a.position is not None and b.position is not None:
        (high, i), (low, j) = a.position, b.position
        return Facts(difference=(high, low, i - j), varies=_varying_factors(xs, known))
    if sign == -1 and a.value == 1 and b.mask is not None and b.mask.kind == "one":
        return Facts(mask=b.mask.inverted("one"), varies=b.varies)
    # Scores plus a bias, or minus a penalty: an operand that has a kind of mask is the mask, unless both are masks,
    # which are combined before either is applied. Minus a logarithm of sums, scores become weights.
    for at, kind in ((1, "bias" if sign == 1 else "penalty"), (0, "bias")):
        mask, other = known[at].mask, known[1 - at].mask
        if mask is not None and mask.kind == kind:
            if other is not None and other.kind == kind:
                return Facts(mask=_intersected_masks(other, mask), varies=_varying_factors(xs, known))
            masks = (*a.masks, *b.masks, _applied_mask(mask, xs[at], result))
            return (_carried_facts(known) or NOTHING)._replace(masks=masks)
    carried = _carried_facts(known)
    if carried is not None and sign == -1 and b.total:
        return Facts(masks=carried.masks, divided=(*a.divided, *b.total))
    return carried


def _applied_mask(mask: Mask, x: Axed, scores: Axed) -> Mask:
    """Return a mask in terms of the factors of the scores that it masks, which can be roles of its own."""
    if len(x.dims) != len(scores.dims):
        return Mask(mask.kind, None)
    there = {f: leaves(to) for axis, to in zip(x.dims, scores.dims, strict=True) for f in leaves(axis)}
    return mask.in_terms_of(lambda f: tuple(to for g in leaves((f,)) for to in there.get(g, (g,))))


def _intersected_masks(a: Mask, b: Mask) -> Mask:
    """Return the mask that keeps what two masks keep."""
    varies = None if a.varies is None or b.varies is None else (*a.varies, *b.varies)
    orders = [m.order for m in (a, b) if m.order is not None and m.within]
    ahead = [o for o in orders if o.least >= 0] or orders  # a window has another order beside the order of time
    return Mask(a.kind, varies, ahead[0] if ahead else None, True, False, (*a.every(), *b.every()))


def _facts_of_weights(known: Sequence[Facts]) -> Facts | None:
    """Return the facts of a product or quotient of exponentials, weights or others."""
    carried = _carried_facts(known) or NOTHING
    exponential, total = any(f.exponential for f in known), carried.total
    weights = next((f.weights for f in known if f.weights), ())
    if carried is NOTHING and not exponential and not weights:
        return None
    if (exponential or weights) and total:
        return Facts(masks=carried.masks, weights=(*weights, *total))
    return carried._replace(exponential=exponential, weights=weights)


def _facts_of_comparison(name: str, xs: Sequence[Axed], known: Sequence[Facts]) -> Facts | None:
    """Follow comparisons: of positions, which give an order, and of masks with numbers."""
    a, b = known
    varies = _varying_factors(xs, known)
    if a.mask is not None and a.mask.kind == "one" and b.value is not None and 0 <= b.value <= 1:
        keeps = {"gt": b.value < 1, "ge": b.value > 0, "ne": b.value == 0, "eq": b.value == 1}.get(name, False)
        drops = {"eq": b.value == 0, "ne": b.value == 1, "lt": b.value > 0, "le": b.value < 1}.get(name, False)
        if keeps or drops:
            return Facts(mask=a.mask._replace(kind="kept") if keeps else a.mask.inverted("kept"), varies=varies)
    found: tuple[AxisFactor, AxisFactor, int] | None = None
    if a.position is not None and b.position is not None:
        found = (a.position[0], b.position[0], a.position[1] - b.position[1])
    elif a.difference is not None and b.value is not None and float(b.value).is_integer():
        found = (*a.difference[:2], a.difference[2] - int(b.value))
    if found is not None and name == "eq" and found[2] == 0 and found[0].size == found[1].size:
        high, low = find(found[0]), find(found[1])
        high.like, low.like = (*high.like, low), (*low.like, high)  # an identity matrix
    if found is None or find(found[0]) is find(found[1]) or name not in ("ge", "gt", "le", "lt"):
        return Facts(mask=Mask("kept", varies), varies=varies)
    left, right, more = found
    strict = name in ("gt", "lt")
    order = Order(left, right, strict - more) if name in ("ge", "gt") else Order(right, left, strict + more)
    return Facts(mask=Mask("kept", varies, order), varies=varies)


def _as_mask(x: Axed, facts: Facts) -> Mask:
    """Return the mask that a boolean array is."""
    return facts.mask or Mask("kept", _factors_along(x) if facts.varies is None else facts.varies)


def _facts_of_choice(step: AxisStep, xs: Sequence[Axed], known: Sequence[Facts], result: Axed) -> Facts | None:
    """Follow a choice between scores and a large negative number, or between constants, by a mask."""
    keep = _as_mask(xs[0], known[0])
    # Either branch may be the one that is left out, so both orders are tried, one with the mask inverted.
    for other, chosen, mask in ((known[1], known[2], keep), (known[2], known[1], keep.inverted("kept"))):
        if other.value is not None and other.value <= -LARGE and (chosen.value is None or chosen.value > -LARGE):
            if chosen.value is not None:
                return Facts(mask=mask._replace(kind="bias"), varies=mask.varies)
            mask = _applied_mask(mask, xs[0], result)
            return (_carried_facts(known[1:]) or NOTHING)._replace(masks=(*chosen.masks, mask))
        if other.value == 0 and chosen.value == 1:
            return Facts(mask=mask._replace(kind="kept" if _is_bool(step) else "one"), varies=mask.varies)
        if other.value == 0 and chosen.mask is not None:
            return Facts(mask=_intersected_masks(chosen.mask, mask), varies=_varying_factors(xs, known))
    return _facts_of_weights(known[1:])


def _is_bool(step: AxisStep) -> bool:
    return dtype_kind(step.eqn.outvars[0]) == "b"


# --- where weights are summed ---


def sum_of_weights(axes: Axes, step: AxisStep, x: Axed, summed: Iterable[int], other: Axed) -> None:
    """Tell the roles of an axis apart where the weights of a softmax are summed; find masks that do not fit them."""
    if x.facts is None or not x.facts.weights or step.backward:
        return
    over = [f for i in summed for f in leaves(x.dims[i])]
    rest = [f for i, axis in enumerate(x.dims) if i not in summed for f in leaves(axis) if f.base is not None]
    normalized = {find(f) for f in leaves(x.facts.weights)}
    # A softmax normalizes over keys, so they are the axis that its weights are summed over with values.
    keys = [f for f in over if f in normalized and f.base is not None]
    for key in keys:
        key.side = "key"
        queries = [f for f in rest if last_base(f) is last_base(key)]
        for query in queries:
            query.side = "query"
            if query.name is not None and query.name != last_base(query).name:
                axes.found.append(Meeting(last_base(query), query, step, "side"))
        for mask in x.facts.masks:
            if mask.order is not None and mask.within:
                high, low, least = mask.order
                if find(high) is key and find(low) in queries and least >= 0:
                    axes.found.append(Meeting(key, find(low), step, "future"))
        # What masks positions of queries masks no keys, whatever an order of positions masks beside it.
        others = [m for mask in x.facts.masks for m in mask.every() if m.order is None or not (m.within and m.covers)]
        along = [None if m.varies is None else {find(f) for f in leaves(m.varies)} for m in others]
        if all(own is not None and key not in own for own in along):
            masked = [own for own in along if own and not own.isdisjoint(queries)]
            axes.found += [Meeting(key, queries[0], step, "mask") for _ in masked]
    # Summed over the queries instead: the softmax went over the wrong one of two axes of the same origin.
    if not keys and not (other.facts and other.facts.weights):
        for f in rest:
            if f in normalized and (role := next((o for o in over if last_base(o) is last_base(f)), None)):
                axes.found.append(Meeting(f, role, step, "softmax"))


_WORDS_FOR_KEYS = {"key", "keys", "k", "kv", "source", "src"}


def is_declared_role(name: str, base: str, given: Sequence[set[Any]]) -> bool:
    """Return whether a name that is given to arguments belongs to a role of an axis with another name.

    It stands nowhere without the axis, and the axis stands somewhere without it; or it is the name of the axis with a
    word for keys.
    """
    if base in name and name.replace(base, "", 1).strip("_") in _WORDS_FOR_KEYS:
        return True
    own = [names for names in given if name in names]
    alone = any(base in names for names in given if name not in names)
    return alone and bool(own) and all(base in names for names in own)
