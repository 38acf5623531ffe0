"""Fourier transforms along axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from ..fft import *  # noqa: F403  # the same names, and those below
from ..typing import AxisSelector
from .axis import Axis

AxisSizeLike: TypeAlias = int | Axis | None
"""The new axis of a transform: a size, an axis, or None for the axis as it is."""

AxisMapping: TypeAlias = Mapping[AxisSelector, AxisSizeLike]
"""The axes of a transform, and the new one of each."""
