"""Axonym: named-axis arrays for JAX.

A `NamedArray` is a JAX array whose axes have names. Operations refer to axes by name, never by position, so the order
of axes never changes the meaning of a program.

>>> Batch, Embed, Mlp = axn.make_axes(batch=2, embed=3, mlp=4)
>>> x, w = axn.ones((Batch, Embed)), axn.ones((Mlp, Embed))
>>> axn.dot(x, w, axis=Embed).mean(Batch)
NamedArray(float32[mlp=4], [3. 3. 3. 3.])
"""

import typing as _typing

import jax as _jax  # noqa: F401  # first: from deeper in the stack, JAX's import takes longer

from ._methods import attach as _attach
from .axis import Axis as Axis, make_axes as make_axes
from .core import lazy_loading as _lazy_loading, stability as _stability
from .named_array import NamedArray as NamedArray, is_named_array as is_named_array, named as named
from .ops._index_plan import ds as ds
from .ops.broadcasting import (
    broadcast_arrays as broadcast_arrays,
    broadcast_axis as broadcast_axis,
    broadcast_to as broadcast_to,
)
from .ops.contraction import dot as dot, einsum as einsum
from .ops.creation import (
    arange as arange,
    eye as eye,
    from_dlpack as from_dlpack,
    full as full,
    full_like as full_like,
    geomspace as geomspace,
    linspace as linspace,
    logspace as logspace,
    ones as ones,
    ones_like as ones_like,
    vander as vander,
    zeros as zeros,
    zeros_like as zeros_like,
)
from .ops.diagonals import trace as trace, tril as tril, triu as triu
from .ops.elementwise import (
    abs as abs,
    add as add,
    allclose as allclose,
    angle as angle,
    arccos as arccos,
    arccosh as arccosh,
    arcsin as arcsin,
    arcsinh as arcsinh,
    arctan as arctan,
    arctan2 as arctan2,
    arctanh as arctanh,
    array_equal as array_equal,
    array_equiv as array_equiv,
    astype as astype,
    bitwise_and as bitwise_and,
    bitwise_count as bitwise_count,
    bitwise_or as bitwise_or,
    bitwise_xor as bitwise_xor,
    cbrt as cbrt,
    ceil as ceil,
    conj as conj,
    copy as copy,
    cos as cos,
    cosh as cosh,
    deg2rad as deg2rad,
    divide as divide,
    divmod as divmod,
    equal as equal,
    exp as exp,
    exp2 as exp2,
    expm1 as expm1,
    fabs as fabs,
    float_power as float_power,
    floor as floor,
    floor_divide as floor_divide,
    fmax as fmax,
    fmin as fmin,
    fmod as fmod,
    frexp as frexp,
    greater as greater,
    greater_equal as greater_equal,
    hypot as hypot,
    i0 as i0,
    imag as imag,
    invert as invert,
    isclose as isclose,
    iscomplex as iscomplex,
    isfinite as isfinite,
    isinf as isinf,
    isnan as isnan,
    isneginf as isneginf,
    isposinf as isposinf,
    isreal as isreal,
    left_shift as left_shift,
    less as less,
    less_equal as less_equal,
    log as log,
    log1p as log1p,
    log2 as log2,
    log10 as log10,
    logaddexp as logaddexp,
    logaddexp2 as logaddexp2,
    logical_and as logical_and,
    logical_not as logical_not,
    logical_or as logical_or,
    logical_xor as logical_xor,
    maximum as maximum,
    minimum as minimum,
    mod as mod,
    multiply as multiply,
    negative as negative,
    nextafter as nextafter,
    not_equal as not_equal,
    positive as positive,
    power as power,
    rad2deg as rad2deg,
    real as real,
    reciprocal as reciprocal,
    right_shift as right_shift,
    rint as rint,
    round as round,
    rsqrt as rsqrt,
    sign as sign,
    signbit as signbit,
    sin as sin,
    sinc as sinc,
    sinh as sinh,
    sqrt as sqrt,
    square as square,
    subtract as subtract,
    tan as tan,
    tanh as tanh,
    trunc as trunc,
)
from .ops.indexing import index as index, slice as slice, take as take
from .ops.interpolation import interp as interp, regrid as regrid
from .ops.joining import (
    concatenate as concatenate,
    flip as flip,
    pad as pad,
    pad_left as pad_left,
    repeat as repeat,
    roll as roll,
    stack as stack,
    tile as tile,
)
from .ops.rearranging import rearrange as rearrange
from .ops.reductions import (
    all as all,
    any as any,
    argmax as argmax,
    argmin as argmin,
    cumprod as cumprod,
    cumsum as cumsum,
    logsumexp as logsumexp,
    max as max,
    mean as mean,
    min as min,
    nanargmax as nanargmax,
    nanargmin as nanargmin,
    nancumprod as nancumprod,
    nancumsum as nancumsum,
    nanmax as nanmax,
    nanmean as nanmean,
    nanmin as nanmin,
    nanprod as nanprod,
    nanstd as nanstd,
    nansum as nansum,
    nanvar as nanvar,
    prod as prod,
    ptp as ptp,
    std as std,
    sum as sum,
    var as var,
)
from .ops.segments import (
    segment_max as segment_max,
    segment_mean as segment_mean,
    segment_min as segment_min,
    segment_sum as segment_sum,
)
from .ops.selection import (
    clip as clip,
    nonzero as nonzero,
    searchsorted as searchsorted,
    take_along_axis as take_along_axis,
    where as where,
)
from .ops.shaping import (
    flatten as flatten,
    flatten_axes as flatten_axes,
    rename as rename,
    split as split,
    unbind as unbind,
    unflatten_axis as unflatten_axis,
)
from .ops.signal import (
    convolve as convolve,
)
from .ops.sorting import (
    argsort as argsort,
    bincount as bincount,
    packbits as packbits,
    sort as sort,
    unique as unique,
    unpackbits as unpackbits,
)
from .ops.statistics import (
    diff as diff,
    gradient as gradient,
    median as median,
    quantile as quantile,
)
from .ops.updating import updated_slice as updated_slice
from .typing import Named as Named

__version__ = "0.1.0"

_attach()
_stability.note_changes(globals())

if _typing.TYPE_CHECKING:
    from . import (
        axis as axis,
        custom_partitioning as custom_partitioning,
        debug as debug,
        fft as fft,
        insight as insight,
        linalg as linalg,
        manual as manual,
        named_array as named_array,
        names as names,
        nn as nn,
        ops as ops,
        optim as optim,
        poly as poly,
        precision as precision,
        quantization as quantization,
        random as random,
        ref as ref,
        schedules as schedules,
        sharding as sharding,
        state as state,
        testing as testing,
        transforms as transforms,
        tree as tree,
        typing as typing,
    )
    from ._late_names import *  # noqa: F403  # a list here would repeat the one there
else:  # so that type checkers refuse a name that does not exist
    __getattr__, __dir__ = _lazy_loading.loaders(globals(), apart=("core", "distribution", "haliax", "scalax"))
