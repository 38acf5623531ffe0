"""Normalization: functions such as `softmax`, and layers with a learned scale and shift."""

from ... import logsumexp as _logsumexp
from ...nn import standardize as _standardize
from ...nn.normalization import *  # noqa: F403  # the same names, and those below
from .._signatures import with_parameters as _with_parameters

logsumexp = _with_parameters(_logsumexp, array="a")
standardize = _with_parameters(_standardize, eps="epsilon")
