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
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from .axis import Axis, AxisSelection, AxisSelector, Names, name_of, selectors
from .core import errors
from .named_array import NamedArray
from .ops import _kernels
from .ops._blocks import blocks_of
from .ops._blockwise import pencils
from .ops._new_array import new_array
from .ops._operands import at_least_float32, distinct, one_axis, require_named

__all__ = ["fft", "fftfreq", "fftshift", "hfft", "ifft", "ifftshift", "ihfft", "irfft", "rfft", "rfftfreq"]

TransformAxes: TypeAlias = AxisSelection | Mapping[AxisSelector, AxisSelector | int | None]

_Requests = tuple[tuple[AxisSelector, AxisSelector | int | None], ...]


def _requests(what: str, axis: TransformAxes | None) -> _Requests | None:
    """Return the axes to transform, and the new axis, name or length requested for each."""
    if axis is None:
        return None
    if not isinstance(axis, Mapping):
        return tuple((name_of(s), s) for s in selectors(axis))
    return tuple((key, wanted if wanted is None else _request(what, key, wanted)) for key, wanted in axis.items())


def _request(what: str, key: AxisSelector, wanted: Any) -> AxisSelector | int:
    """Return the request for an axis: a new axis, a new name or a length."""
    if isinstance(wanted, (Axis, str)):
        return wanted
    try:
        return operator.index(wanted)
    except TypeError:
        raise TypeError(
            f"{what}: axis {name_of(key)!r} can become an Axis, a name, a length or None, got {type(wanted).__name__}."
        ) from None


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

    successors, along = {old: (new,) for old, new in renamed.items()}, {*chosen, *renamed.values()}
    return _kernels.make_along_kernel(
        what, positional, (names,), out_names, along, per_device=True, selection=asked, successors=successors
    )


def _transform(
    what: str,
    one: Any,
    several: Any,
    a: NamedArray,
    axis: Any,
    norm: str | None,
    full: Any = jnp.fft.fft,
    real: bool = False,
    from_half: bool = False,
) -> NamedArray:
    """Transform along some axes: with `full` along sharded ones, where a `real` transform of the last one is none."""
    requests = _requests(what, axis)

    def transformed(x: NamedArray, requests: _Requests | None) -> NamedArray:
        return _transform_kernel(what, one, several, from_half, x.names, requests, norm).apply(x.array)

    blocks = blocks_of(what, require_named(what, a))
    sharded = _sharded(a, blocks, requests, real) if blocks and several is not None else []
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


def _sharded(a: NamedArray, blocks: Collection[str], requests: _Requests | None, real: bool) -> list[str]:
    """Return the sharded axes along which to transform on pencils.

    Not the axis that a real transform shortens: its new size is odd if the old one is even, so it cannot be sharded.
    """
    shape, requests = a.shape, tuple((n, None) for n in a.names[-1:]) if requests is None else requests
    asked = {name_of(key): (key, new) for key, new in requests}
    if len(asked) < len(requests) or any(shape.get(n) != _size(key, shape.get(n, -1)) for n, (key, _) in asked.items()):
        return []  # or an error, which the kernel raises
    kept = asked if not real else [*asked][:-1]
    return [
        n for n in kept if n in blocks and _size(asked[n][1], shape[n]) == shape[n] and not isinstance(asked[n][1], int)
    ]


def _size(axis: Any, default: int) -> int:
    return axis.size if isinstance(axis, Axis) else default


def _along(x: jax.Array, axis: int, fn: Callable[..., jax.Array], norm: str | None) -> jax.Array:
    return fn(at_least_float32(x), axis=axis, norm=norm)


# --- transforms ---


def fft(a: NamedArray, axis: TransformAxes | None = None, norm: str | None = None) -> NamedArray:
    """Compute the discrete Fourier transform.

    Arguments:
        axis: the axis to run along, or several; the last one by default. An `Axis` of another size asks for that
            length, and a mapping `{old axis: new axis}` renames as well.
        norm: "backward" (the default), "ortho" or "forward": which direction is scaled.

    >>> axn.fft.fft(axn.named([1., 2.], "t"), "t")
    NamedArray(complex64[t=2], [ 3.+0.j -1.+0.j])
    """
    return _transform("fft", jnp.fft.fft, jnp.fft.fftn, a, axis, norm)


def ifft(a: NamedArray, axis: TransformAxes | None = None, norm: str | None = None) -> NamedArray:
    """Compute the inverse of `fft`, with the same arguments.

    >>> axn.fft.ifft(axn.named([3., -1.], "t"), "t")
    NamedArray(complex64[t=2], [1.+0.j 2.+0.j])
    """
    return _transform("ifft", jnp.fft.ifft, jnp.fft.ifftn, a, axis, norm, full=jnp.fft.ifft)


def rfft(a: NamedArray, axis: TransformAxes | None = None, norm: str | None = None) -> NamedArray:
    """Compute the discrete Fourier transform of real values, without its redundant half. The arguments are as in `fft`.

    >>> axn.fft.rfft(axn.named([1., 2., 0., 2.], "t"), {"t": "freq"})
    NamedArray(complex64[freq=3], [ 5.+0.j 1.+0.j -3.+0.j])
    """
    return _transform("rfft", jnp.fft.rfft, jnp.fft.rfftn, a, axis, norm, real=True)


def irfft(a: NamedArray, axis: TransformAxes | None = None, norm: str | None = None) -> NamedArray:
    """Compute the inverse of `rfft`; an odd length must be requested. The arguments are as in `fft`.

    >>> axn.fft.irfft(axn.named([5., 1., -3.], "t"), axn.Axis("t", 4))
    NamedArray(float32[t=4], [1. 2. 0. 2.])
    """
    irfft, irfftn = jnp.fft.irfft, jnp.fft.irfftn
    return _transform("irfft", irfft, irfftn, a, axis, norm, full=jnp.fft.ifft, real=True, from_half=True)


def hfft(a: NamedArray, axis: TransformAxes | None = None, norm: str | None = None) -> NamedArray:
    """Compute the discrete Fourier transform of conjugate-symmetric values, which is real.

    The arguments are as in `fft`, but it runs along one axis.

    >>> axn.fft.hfft(axn.named([1., 2., 0.], "t"), "t")
    NamedArray(float32[t=4], [ 5. 1. -3. 1.])
    """
    return _transform("hfft", jnp.fft.hfft, None, a, axis, norm, from_half=True)


def ihfft(a: NamedArray, axis: TransformAxes | None = None, norm: str | None = None) -> NamedArray:
    """Compute the inverse of `hfft`, with the same arguments.

    >>> axn.fft.ihfft(axn.named([5., 1., -3., 1.], "t"), "t")
    NamedArray(complex64[t=3], [1.+0.j 2.+0.j 0.+0.j])
    """
    return _transform("ihfft", jnp.fft.ihfft, None, a, axis, norm)


# --- shifts ---


@_kernels.shared("names", "axes")
def _shift_kernel(fn: Callable[..., Any], what: str, names: Names, axes: Any) -> _kernels.Kernel:
    positions = tuple(names.index(n) for n in _kernels.select(what, names, axes))
    return _kernels.make_kernel(what, lambda x: fn(x, axes=positions), (names,), names, selection=axes)


def fftshift(x: NamedArray, axes: AxisSelection | None = None) -> NamedArray:
    """Reorder frequencies so that zero is in the middle, along all axes by default.

    >>> axn.fft.fftshift(axn.named([0, 1, -2, -1], "freq"))
    NamedArray(int32[freq=4], [-2 -1 0 1])
    """
    names = require_named("fftshift", x).names
    return _shift_kernel(jnp.fft.fftshift, "fftshift", names, _kernels.hashable(axes)).apply(x.array)


def ifftshift(x: NamedArray, axes: AxisSelection | None = None) -> NamedArray:
    """Undo `fftshift`, with the same arguments.

    >>> axn.fft.ifftshift(axn.named([-2, -1, 0, 1], "freq"))
    NamedArray(int32[freq=4], [ 0 1 -2 -1])
    """
    names = require_named("ifftshift", x).names
    return _shift_kernel(jnp.fft.ifftshift, "ifftshift", names, _kernels.hashable(axes)).apply(x.array)


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
