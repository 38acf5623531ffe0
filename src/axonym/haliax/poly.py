"""Polynomials, as arrays of coefficients."""

from .. import vander as vander
from ..poly import *  # noqa: F403  # the same names, but for those here
from ..poly import trim_zeros as _trim_zeros
from ._signatures import with_parameters as _with_parameters

DEFAULT_POLY_AXIS_NAME = "degree"
trim_zeros = _with_parameters(_trim_zeros, p="f")
