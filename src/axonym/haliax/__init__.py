"""Haliax's names, paths and defaults: code written for Haliax runs with `import axonym.haliax as hax`.

Everything not defined here is Axonym's own; `_signatures` gives functions Haliax's parameters. New code should use
`import axonym as axn`, which has one name for each thing; both work on the same arrays, so a program can use both.
In code that imports this package, named arrays have the methods that only Haliax has, such as `updated_slice`.

Modules that are the same here and in Axonym, such as `hax.nn.conv`, are registered under both names when this package
is imported. A type checker finds their contents as attributes, `hax.nn.conv.Conv`, not as imports from
`axonym.haliax.nn.conv`.

>>> import axonym.haliax as hax
>>> Batch, Embed = hax.make_axes(batch=2, embed=3)
>>> hax.absolute(hax.named(-jnp.ones((2, 3)), (Batch, Embed))).product("embed")
NamedArray(float32[batch=2], [1. 1.])
"""

# ruff: noqa: I001
# fmt: off
import sys as _sys

from .. import (
    abs as abs, add as add, all as all, allclose as allclose, angle as angle, any as any,
    arccos as arccos, arccosh as arccosh, arcsin as arcsin, arcsinh as arcsinh, arctan as arctan,
    arctan2 as arctan2, arctanh as arctanh, argmax as argmax, argmin as argmin,
    array_equal as array_equal, array_equiv as array_equiv, Axis as Axis,
    bincount as bincount, bitwise_and as bitwise_and, bitwise_count as bitwise_count, bitwise_or as bitwise_or,
    bitwise_xor as bitwise_xor, broadcast_arrays as broadcast_arrays, broadcast_axis as broadcast_axis,
    broadcast_to as broadcast_to, cbrt as cbrt, ceil as ceil, clip as clip,
    conj as conj, copy as copy, cos as cos, cosh as cosh, cumprod as cumprod, cumsum as cumsum, deg2rad as deg2rad,
    divide as divide, divmod as divmod, equal as equal, exp as exp,
    exp2 as exp2, expm1 as expm1, fabs as fabs, flatten as flatten, flatten_axes as flatten_axes,
    float_power as float_power, floor as floor, floor_divide as floor_divide, fmax as fmax, fmin as fmin,
    fmod as fmod, fold as fold, freeze as freeze, frexp as frexp,
    full_like as full_like, get as get, greater as greater, greater_equal as greater_equal,
    hypot as hypot, i0 as i0, imag as imag, index as index, invert as invert, is_named_array as is_named_array,
    isclose as isclose, iscomplex as iscomplex, isfinite as isfinite, isinf as isinf, isnan as isnan,
    isneginf as isneginf, isposinf as isposinf, isreal as isreal, left_shift as left_shift, less as less,
    less_equal as less_equal, log as log, log10 as log10, log1p as log1p, log2 as log2,
    logaddexp as logaddexp, logaddexp2 as logaddexp2, logical_and as logical_and, logical_not as logical_not,
    logical_or as logical_or, logical_xor as logical_xor, make_axes as make_axes, map as map,
    max as max, maximum as maximum, mean as mean, min as min, minimum as minimum, mod as mod, multiply as multiply,
    Named as Named, named as named, NamedArray as NamedArray, NamedRef as NamedRef,
    nanargmax as nanargmax, nanargmin as nanargmin, nancumprod as nancumprod, nancumsum as nancumsum,
    nanmax as nanmax, nanmean as nanmean, nanmin as nanmin, nanprod as nanprod, nanstd as nanstd, nansum as nansum,
    nanvar as nanvar, negative as negative, new_ref as new_ref, nextafter as nextafter, nonzero as nonzero,
    not_equal as not_equal, ones_like as ones_like, packbits as packbits, pad as pad,
    pad_left as pad_left, positive as positive, power as power, prod as prod, ptp as ptp,
    rad2deg as rad2deg, real as real,
    reciprocal as reciprocal, repeat as repeat, right_shift as right_shift, rint as rint,
    round as round, rsqrt as rsqrt,
    searchsorted as searchsorted, set_mesh as set_mesh, sign as sign, signbit as signbit,
    sin as sin, sinc as sinc, sinh as sinh, sort as sort, split as split, sqrt as sqrt,
    square as square, std as std, subtract as subtract, sum as sum, swap as swap,
    tan as tan, tanh as tanh, tile as tile, trace as trace, tree as tree,
    trunc as trunc, unbind as unbind,
    unflatten_axis as unflatten_axis, unique as unique, unpackbits as unpackbits, vander as vander, var as var,
    zeros_like as zeros_like,
)

from ..axis import (
    axis_name as axis_name, axis_size as axis_size, concat_axes as concat_axes,
    replace_axis as replace_axis, resolve_axis as resolve_axis, selects_axis as selects_axis,
)

from ..typing import (
    AxisSelection as AxisSelection, AxisSelector as AxisSelector, AxisSpec as AxisSpec,
    NamedArrayAxes as NamedArrayAxes, NamedArrayAxesSpec as NamedArrayAxesSpec, NamedOrNumeric as NamedOrNumeric,
    ReductionFunction as ReductionFunction, SimpleReductionFunction as SimpleReductionFunction,
)
from .. import nn as _nn, ref as ref
from . import (
    _src as _src, axis as axis, core as core, debug as debug, fft as _fft, haxtyping as haxtyping, hof as hof,
    jax_utils as jax_utils, nn as nn, ops as ops, partitioning as partitioning, poly as _poly,
    quantization as quantization, random as random, state_dict as state_dict, testing as testing,
    tree_util as tree_util, types as types, util as util, wrap as wrap,
)
from .poly import (
    poly as poly, polyadd as polyadd, polyder as polyder, polydiv as polydiv, polyfit as polyfit,
    polyint as polyint, polymul as polymul, polysub as polysub, polyval as polyval, roots as roots,
    trim_zeros as trim_zeros,
)
from .field import field as field  # after the modules of that name
from .fft import (
    fft as fft, fftshift as fftshift, hfft as hfft, ifft as ifft, ifftshift as ifftshift,
    ihfft as ihfft, irfft as irfft, rfft as rfft,
)
from .axis import (
    axis_spec_to_tuple as axis_spec_to_tuple, concat_axis_specs as concat_axis_specs, dblock as dblock, ds as ds,
    dslice as dslice, eliminate_axes as eliminate_axes, to_jax_shape as to_jax_shape,
)
from .core import (
    are_shape_checks_enabled as are_shape_checks_enabled, enable_shape_checks as enable_shape_checks, ndim as ndim,
    rearrange as rearrange, rename as rename, slice as slice, take as take, top_k as top_k,
    updated_slice as updated_slice,
)
from .hof import ScanCheckpointPolicy as ScanCheckpointPolicy, scan as scan, vmap as vmap
from .jax_utils import tree_checkpoint_name as tree_checkpoint_name
from .ops import (
    arange as arange, argsort as argsort, concatenate as concatenate, dot as dot, einsum as einsum, fftfreq as fftfreq,
    full as full, geomspace as geomspace, linspace as linspace, logspace as logspace, ones as ones,
    rfftfreq as rfftfreq, roll as roll,
    stack as stack, tril as tril, triu as triu, unique_all as unique_all, unique_counts as unique_counts,
    unique_inverse as unique_inverse, unique_values as unique_values, where as where, zeros as zeros,
)
from .partitioning import (
    auto_sharded as auto_sharded, axis_mapping as axis_mapping, fsdp as fsdp, named_jit as named_jit, shard as shard,
    shard_map as shard_map, shard_with_axis_mapping as shard_with_axis_mapping,
)
from .types import Scalar as Scalar
# fmt: on

# --- operations on two operands ---

for _name in """
    add arctan2 bitwise_and bitwise_or bitwise_xor divide equal float_power floor_divide fmax fmin fmod greater
    greater_equal hypot left_shift less less_equal logaddexp logaddexp2 logical_and logical_or logical_xor maximum
    minimum mod multiply nextafter not_equal power right_shift subtract
""".split():
    globals()[_name] = ops.allowing_raw(globals()[_name])

# --- operations under their other names ---

absolute = abs
amax = max
amin = min
around = round
bitwise_invert = bitwise_not = invert
bitwise_left_shift = left_shift
bitwise_right_shift = right_shift
conjugate = conj
degrees = rad2deg
fix = trunc
product = prod
radians = deg2rad
ravel = flatten
remainder = mod
true_divide = divide

# --- modules that are used unchanged ---

specialized_fns = core

# So that `from axonym.haliax.nn.attention import causal_mask` works as well as `hax.nn.attention.causal_mask`.
for _path, _module in {
    "_src.scan": nn.scan,
    "_src.state_dict": state_dict,
    "_src.util": util,
    "fft.fft": _fft,
    "nn.conv": _nn.conv,
    "nn.mup": _nn.mup,
    "poly.poly": _poly,
    "ref": ref,
    "specialized_fns": specialized_fns,
    "tree": tree,
}.items():
    _sys.modules[f"{__name__}.{_path}"] = _module
