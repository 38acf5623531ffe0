"""Fourier transforms along named axes.

The `axis` argument of a transform says along which axes it runs, and may ask for a length and for another name:

| axis                         | transformed axis                                              |
|------------------------------|---------------------------------------------------------------|
| `None`                       | the last axis                                                 |
| `"time"`                     | that axis                                                     |
| `Axis("time", 16)`           | that axis, at length 16                                       |
| `{"time": Axis("freq", 16)}` | that axis, at length 16; it is called "freq" in the result    |
| `{"time": "freq"}`           | that axis; it is called "freq" in the result                  |
| `{"time": 16}`               | that axis, at length 16                                       |
| `("row", "col")`             | both at once; any of the forms above may stand for each       |

A size given here is a request, not a statement about the array: the length of the transform, to which `fft`, `ifft`,
`rfft` and `ihfft` pad or crop their input, and which `irfft` and `hfft` give their result. `rfft` and `ihfft` return
the `n // 2 + 1` terms that are not redundant. Of several axes the last one named is the one that `rfft` shortens.

To transform along a sharded axis, devices exchange it for another axis, by an all-to-all, and back. If there is no
other one, or a length is requested, or `rfft` shortens it, it is all-gathered.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from .axis import Axis, AxisSelection, AxisSelector, Names, name_of, selectors
from .core import errors
from .named_array import NamedArray
from .ops import _kernels
from .ops._blocks import blocks_of, pencils
from .ops._new_array import new_array
from .ops._op_types import publish
from .ops._operands import at_least_float32, distinct, one_axis, require_named

__all__ = ["fft", "fftfreq", "fftshift", "hfft", "ifft", "ifftshift", "ihfft", "irfft", "rfft", "rfftfreq"]

TransformAxes: TypeAlias = AxisSelection | Mapping[AxisSelector, AxisSelector | int | None]

_Requests = tuple[tuple[AxisSelector, AxisSelector | int | None], ...]


def _requested_axes(what: str, axis: TransformAxes | None) -> _Requests | None:
    """Return the axes to transform, and the new axis, name or length requested for each."""
    if axis is None:
        return None
    if not isinstance(axis, Mapping):
        return tuple((name_of(s), s) for s in selectors(axis))
    found: list[tuple[AxisSelector, AxisSelector | int | None]] = []
    for key, wanted in axis.items():
        try:
            length = wanted if wanted is None or isinstance(wanted, (Axis, str)) else operator.index(wanted)
        except TypeError:
            kind = type(wanted).__name__
            raise TypeError(
                f"{what}: axis {name_of(key)!r} can become an Axis, a name, a length or None, got {kind}."
            ) from None
        found.append((key, length))
    return tuple(found)


@_kernels.shared("names", "requests")
def _transform_kernel(
    what: str,
    one: Callable[..., Any],
    several: Callable[..., Any] | None,
    from_half: bool,
    names: Names,
    requests: _Requests | None,
    norm: str | None,
) -> _kernels.Kernel:
    """Make a kernel from a function along one axis and, if it exists, the function along several axes at once.

    If the input has only half of the terms (`from_half`), the result has 2 (n - 1) elements by default.
    """
    if requests is None:
        requests = tuple((n, None) for n in names[-1:])
    if not requests:
        raise ValueError(f"{what}: there is no axis to transform in {errors.describe_axes(names)}.")
    asked = tuple(key for key, _ in requests)
    chosen = _kernels.select(what, names, asked)
    positions = tuple(names.index(n) for n in chosen)
    wanted = [new for _, new in requests]
    lengths = [new.size if isinstance(new, Axis) else None if isinstance(new, str) else new for new in wanted]
    renamed = {n: name_of(new) for n, new in zip(chosen, wanted, strict=True) if isinstance(new, (Axis, str))}
    out_names = distinct(what, tuple(renamed.get(n, n) for n in names))
    if len(chosen) > 1 and several is None:
        raise ValueError(f"{what}: it runs along one axis, got {errors.describe_axes(chosen)}.")

    def positional(x):
        natural = [x.shape[p] for p in positions]
        if from_half:
            natural[-1] = 2 * (natural[-1] - 1)
        full = [default if length is None else length for default, length in zip(natural, lengths, strict=True)]
        short = [n for n, length in zip(chosen, full, strict=True) if length < 1]
        if short:
            listed = errors.quoted(short)
            raise ValueError(
                f"{what}: the result for {errors.describe_axes(names, x.shape)} would have no elements on {listed}. "
                "Ask for a length with Axis(name, size)."
            )
        x = at_least_float32(x)  # there are no half-precision routines
        if len(chosen) == 1 or several is None:
            return one(x, n=lengths[0], axis=positions[0], norm=norm)
        # JAX takes a length for every axis or for none, and without lengths it neither pads nor crops.
        same = all(length is None for length in lengths)
        return several(x, s=None if same else full, axes=positions, norm=norm)

    whole = dict.fromkeys((*chosen, *renamed.values()), "whole")
    successors = {old: (new,) for old, new in renamed.items()}
    return _kernels.make_kernel(
        what, positional, (names,), out_names, whole, successors=successors, selection=asked, on_auto="per device"
    )


def _sharded_axes(a: NamedArray, blocks: Collection[str], requests: _Requests | None, real: bool) -> list[str]:
    """Return the sharded axes along which to transform on pencils.

    Not the axis that a real transform shortens: its new size is odd if the old one is even, so it cannot be sharded.
    """
    shape, requests = a.shape, tuple((n, None) for n in a.names[-1:]) if requests is None else requests
    asked = {name_of(key): (key, new) for key, new in requests}
    if len(asked) < len(requests) or any(
        shape.get(n) != _size_of(key, shape.get(n, -1)) for n, (key, _) in asked.items()
    ):
        return []  # or an error, which the kernel raises
    kept = asked if not real else [*asked][:-1]
    return [
        n
        for n in kept
        if n in blocks and _size_of(asked[n][1], shape[n]) == shape[n] and not isinstance(asked[n][1], int)
    ]


def _size_of(axis: Any, default: int) -> int:
    return axis.size if isinstance(axis, Axis) else default


def _along(x: jax.Array, axis: int, fn: Callable[..., jax.Array], norm: str | None) -> jax.Array:
    return fn(at_least_float32(x), axis=axis, norm=norm)


# --- one row each ---


class _Transform(Protocol):
    def __call__(self, a: NamedArray, axis: TransformAxes | None = None, norm: str | None = None) -> NamedArray: ...


class _Shift(Protocol):
    def __call__(self, x: NamedArray, axes: AxisSelection | None = None) -> NamedArray: ...


def _make_transform(
    one: Callable[..., Any],
    several: Callable[..., Any] | None,
    summary: str,
    example: str,
    shown: str,
    *,
    along: str = '"t"',
    full: Callable[..., Any] = jnp.fft.fft,
    real: bool = False,
    from_half: bool = False,
) -> _Transform:
    """Make a transform; `full` is used along sharded axes, where a `real` transform of the last one is none."""
    what = one.__name__

    def op(a: NamedArray, axis: TransformAxes | None = None, norm: str | None = None) -> NamedArray:
        requests = _requested_axes(what, axis)

        def transformed(x: NamedArray, requests: _Requests | None) -> NamedArray:
            return _transform_kernel(what, one, several, from_half, x.names, requests, norm).apply(x.array)

        blocks = blocks_of(what, require_named(what, a))
        sharded = _sharded_axes(a, blocks, requests, real) if blocks and several is not None else []
        if not sharded:
            return transformed(a, requests)
        wanted = {name_of(key): new for key, new in requests or () if isinstance(new, (Axis, str))}
        distinct(what, tuple(name_of(wanted.get(n, n)) for n in a.names))
        lengths = [(key, None if isinstance(new, str) else getattr(new, "size", new)) for key, new in requests or ()]
        rest = tuple((key, length) for key, length in lengths if name_of(key) not in sharded)
        # A real transform begins with the axis that it shortens, its inverse ends with it, and others send real values.
        x = a
        first = real and not from_half
        if rest and first:
            x, done = transformed(a, rest), {name_of(key) for key, _ in rest}
            blocks = {n: b for n, b in blocks.items() if n not in done}
        for n in sharded:
            found = pencils(what, _along, [x], n, blocks, ("fn", full), ("norm", norm))
            x = transformed(x, ((n, None),)) if found is None else found
        x = transformed(x, rest) if rest and not first else x
        return x.rename({n: name_of(new) for n, new in wanted.items()})

    doc = f"""{summary}

    Arguments:
        axis: the axis to run along, or several; the last one by default. An `Axis` of another size asks for that
            length, and a mapping from old to new axes renames as well.
        norm: "backward" (the default), "ortho" or "forward": which direction is scaled.

    >>> axn.fft.{what}(axn.named({example}, "t"), {along})
    NamedArray({shown})
    """
    return publish(op, what, __name__, doc)


def _make_shift(fn: Callable[..., Any], summary: str, example: str, shown: str) -> _Shift:
    what = fn.__name__

    def op(x: NamedArray, axes: AxisSelection | None = None) -> NamedArray:
        kernel = _shift_kernel(fn, what, require_named(what, x).names, _kernels.hashable(axes))
        return kernel.apply(x.array)

    doc = f"""{summary}

    >>> axn.fft.{what}(axn.named({example}, "freq"))
    NamedArray({shown})
    """
    return publish(op, what, __name__, doc)


@_kernels.shared("names", "axes")
def _shift_kernel(fn: Callable[..., Any], what: str, names: Names, axes: Any) -> _kernels.Kernel:
    positions = tuple(names.index(n) for n in _kernels.select(what, names, axes))
    return _kernels.make_kernel(what, lambda x: fn(x, axes=positions), (names,), names, selection=axes)


# fmt: off
fft = _make_transform(jnp.fft.fft, jnp.fft.fftn, "Compute the discrete Fourier transform.", "[1., 2.]", "complex64[t=2], [ 3.+0.j -1.+0.j]")
ifft = _make_transform(jnp.fft.ifft, jnp.fft.ifftn, "Compute the inverse of `fft`.", "[3., -1.]", "complex64[t=2], [1.+0.j 2.+0.j]", full=jnp.fft.ifft)
rfft = _make_transform(jnp.fft.rfft, jnp.fft.rfftn, "Compute the discrete Fourier transform of real values, without its redundant half.", "[1., 2., 0., 2.]", "complex64[freq=3], [ 5.+0.j 1.+0.j -3.+0.j]", along='{"t": "freq"}', real=True)
irfft = _make_transform(jnp.fft.irfft, jnp.fft.irfftn, "Compute the inverse of `rfft`; an odd length must be requested.", "[5., 1., -3.]", "float32[t=4], [1. 2. 0. 2.]", along='axn.Axis("t", 4)', full=jnp.fft.ifft, real=True, from_half=True)
hfft = _make_transform(jnp.fft.hfft, None, "Compute the discrete Fourier transform of conjugate-symmetric values, which is real, along one axis.", "[1., 2., 0.]", "float32[t=4], [ 5. 1. -3. 1.]", from_half=True)
ihfft = _make_transform(jnp.fft.ihfft, None, "Compute the inverse of `hfft`, along one axis.", "[5., 1., -3., 1.]", "complex64[t=3], [1.+0.j 2.+0.j 0.+0.j]")
fftshift = _make_shift(jnp.fft.fftshift, "Reorder frequencies so that zero is in the middle, along all axes by default.", "[0, 1, -2, -1]", "int32[freq=4], [-2 -1 0 1]")
ifftshift = _make_shift(jnp.fft.ifftshift, "Undo `fftshift`, with the same arguments.", "[-2, -1, 0, 1]", "int32[freq=4], [ 0 1 -2 -1]")
# fmt: on


# --- frequencies ---


def fftfreq(axis: Axis, d: float = 1.0) -> NamedArray:
    """Return the frequencies of the terms that `fft` returns for an axis, with samples at a distance `d`.

    >>> axn.fft.fftfreq(axn.Axis("t", 4))
    NamedArray(float32[t=4], [ 0. 0.25 -0.5 -0.25])
    """
    axis = one_axis("fftfreq", "axis", axis)
    return new_array("fftfreq", jnp.fft.fftfreq, (axis.name,), (axis.size,), n=axis.size, d=d)


def rfftfreq(axis: Axis, d: float = 1.0) -> NamedArray:
    """Return the frequencies of the terms that `rfft` returns for an axis, with its size before the transform.

    >>> axn.fft.rfftfreq(axn.Axis("t", 4))
    NamedArray(float32[t=3], [0. 0.25 0.5 ])
    """
    axis = one_axis("rfftfreq", "axis", axis)
    return new_array("rfftfreq", jnp.fft.rfftfreq, (axis.name,), (axis.size,), n=axis.size, d=d)
