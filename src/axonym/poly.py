"""Polynomials by name: `axonym.ops.poly` under the name that existing code imports it by."""

from .ops.poly import (
    DEFAULT_POLY_AXIS_NAME as DEFAULT_POLY_AXIS_NAME,
    poly as poly,
    polyadd as polyadd,
    polyder as polyder,
    polydiv as polydiv,
    polyfit as polyfit,
    polyint as polyint,
    polymul as polymul,
    polysub as polysub,
    polyval as polyval,
    roots as roots,
    trim_zeros as trim_zeros,
)
