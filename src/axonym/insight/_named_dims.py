"""Find the names of the axes of arrays."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from . import _scopes
from ._named_events import Dims, Value


def matched(old: dict[str, int], new: dict[str, int | None]) -> dict[str, str]:
    """Match axes by size, in their order."""
    found, left = {}, dict(new)
    for name, size in old.items():
        for other, known in left.items():
            if known == size:
                found[name] = other
                del left[other]
                break
    return found if len(found) == len(old) else {}


def new_names(dims: Dims, operation: _scopes.ScopedOperation, *, mapped: bool) -> dict[str, str]:
    """Return the operation's names for the axes of an operand that it names differently, matched by size.

    Arguments:
        mapped: whether the operation runs in a `vmap`, which adds axes that the operation does not have.
    """
    own = set(operation.axes)
    stale = {n: size for n, size in dims if n is not None and n not in own}
    names = {n for n, _ in dims if n is not None and n in own}
    terms = (*operation.operands, *operation.results)
    if stale and mapped:
        rest = by_scope(tuple(d for d in dims if d[0] not in stale), operation)
        known = {n for n, size in rest if n is not None or size > 1}
        if any(known == {a.name for a in term} for term in terms):
            return {}  # `vmap` maps over them
    for term in terms if stale else ():
        missing = {a.name: a.size for a in term if a.name not in names}
        if names <= {a.name for a in term} and len(missing) >= len(stale) and (new := matched(stale, missing)):
            return new
    return {}


def with_names(x: Value, dims: Dims) -> Value:
    """Add names to the axes of a value that have none."""
    merged = tuple((a if a is not None else b, n) for (a, n), (b, _) in zip(x.dims, dims, strict=True))
    return x if merged == x.dims else dataclasses.replace(x, dims=merged, base=merged)


def by_scope(dims: Dims, operation: _scopes.ScopedOperation | None, alone: bool = False) -> Dims:
    """Name axes that have no name by the operand or result of the operation that has their sizes.

    Arguments:
        alone: whether to do so only if there is one such operand, whatever the results are.
    """
    if operation is None or all(n is not None or size == 1 for n, size in dims):
        return dims
    own = set(operation.axes)
    if not alone and any(n is not None and n not in own for n, _ in dims):  # it runs in a `vmap` over these axes
        left = iter(by_scope(tuple(d for d in dims if d[0] is None or d[0] in own), operation))
        return tuple(next(left) if n is None or n in own else (n, size) for n, size in dims)
    found = [
        tuple((a.name if size > 1 else n, size) for a, (n, size) in zip(term, dims, strict=True))
        for term in (operation.operands if alone else (*operation.operands, *operation.results))
        if _can_be(dims, term)
    ]
    return dims if not found or (alone and len(set(found)) > 1) else found[0]


def _can_be(dims: Dims, term: _scopes.Term) -> bool:
    """Return whether an array can be an operand or result of an operation, by its sizes and the names that it has."""
    return len(term) == len(dims) and all(
        size == 1 or (a.size == size and n in (None, a.name)) for a, (n, size) in zip(term, dims, strict=True)
    )


def moved(name: str, params: Any, dims: Dims, shape: tuple[int, ...]) -> Dims | None:
    """Return the axes of a result that is its operand in another layout; None if they are not known."""
    if name == "transpose":
        return tuple(dims[i] for i in params["permutation"])
    if name == "broadcast_in_dim":
        found: list[tuple[str | None, int]] = [(None, n) for n in shape]
        for at, d in zip(params["broadcast_dimensions"], dims, strict=True):
            found[at] = d if d[1] == shape[at] else (None, shape[at])
        return tuple(found)
    if name in ("reshape", "squeeze", "expand_dims"):
        large = [d for d in dims if d[1] != 1]
        if [n for _, n in large] != [n for n in shape if n != 1]:
            return None
        left = iter(large)
        return tuple((None, 1) if n == 1 else next(left) for n in shape)
    return dims if tuple(n for _, n in dims) == shape else None


def joined_axes(axes: _scopes.Term) -> tuple[str, int]:
    """Return the name and the size of the axis that several axes are joined into."""
    return "*".join(a.name for a in axes), math.prod(a.size or 1 for a in axes)


def moved_rows(
    dispatch: _scopes.ScopedOperation, dims: Dims, shape: tuple[int, ...]
) -> tuple[Dims, dict[str, tuple[str, ...]]] | None:
    """Return the axes of rows that are sorted, repeated, joined or restored, and the names of the joined axes.

    Returns None if the operand or the result does not begin with the axes of the rows.

    Arguments:
        dispatch: the dispatch of the rows to experts. Rows for several experts lack some axes of the others.
    """
    rows = dispatch.operands[0]
    kinds = [axes for axes in (rows, tuple(a for a in rows if a in dispatch.operands[1])) if axes]
    apart = [tuple(a.size or 1 for a in axes) for axes in kinds]
    given = tuple(n for _, n in dims)
    if not any(given[: len(sizes)] == sizes or given[:1] == (math.prod(sizes),) for sizes in apart):
        return None
    for axes, sizes in zip(kinds, apart, strict=True):
        name, joined = joined_axes(axes)
        if shape[: len(sizes)] == sizes:
            leading, names = tuple((a.name, a.size or 1) for a in axes), {}
        elif shape[:1] == (joined,):
            leading, names = ((name, joined),), {name: tuple(a.name for a in axes)}
        else:
            continue
        rest = shape[len(leading) :]
        features = dims[len(dims) - len(rest) :] if rest else ()
        same = tuple(n for _, n in features) == rest
        return (*leading, *(features if same else ((None, n) for n in rest))), names
    return None


def has_names_of(dims: Dims, term: _scopes.Term) -> bool:
    """Return whether an array has the axes of an operand, in their order; axes without names may be any of them."""
    left = iter([d for d in dims if d[1] != 1])
    return all(any(size == a.size and n in (None, a.name) for n, size in left) for a in term if a.size != 1)


def renamings(dims: Dims, term: _scopes.Term) -> tuple[int, int, list[Dims]]:
    """Find the axes of an operand in an array, in their order, by size.

    Returns how many names agree, how many axes the operand lacks, and the array with the names of the operand, in each
    way in which so many names agree; no way if the sizes do not fit. A `vmap` adds axes that the operand lacks.
    """
    large = [i for i, (_, size) in enumerate(dims) if size != 1]
    wanted = [a for a in term if a.size != 1]
    agreed, found = -1, list[Dims]()
    for places in itertools.combinations(large, len(wanted)) if wanted else ():
        if any(dims[i][1] != a.size for i, a in zip(places, wanted, strict=True)):
            continue
        agree = sum(dims[i][0] == a.name for i, a in zip(places, wanted, strict=True))
        if agree < agreed:
            continue
        new = {i: a.name for i, a in zip(places, wanted, strict=True)}
        named = tuple((new.get(i, n), size) for i, (n, size) in enumerate(dims))
        agreed, found = agree, [*(found if agree == agreed else ()), named]
    return agreed, len(large) - len(wanted), list(dict.fromkeys(found))
