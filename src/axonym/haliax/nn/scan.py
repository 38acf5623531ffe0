"""Repeated layers."""

from typing import ParamSpec, TypeVar

import equinox as eqx

from ...nn.scan import *  # noqa: F403  # the same names, but for those below
from ..hof import ScanCheckpointPolicy as ScanCheckpointPolicy, ScanCheckpointSpec as ScanCheckpointSpec
from ..jax_utils import tree_checkpoint_name as tree_checkpoint_name

M = TypeVar("M", bound=eqx.Module)
M_co = TypeVar("M_co", bound=eqx.Module, covariant=True)
M_contra = TypeVar("M_contra", bound=eqx.Module, contravariant=True)
S = TypeVar("S", bound=eqx.Module)
CarryT = TypeVar("CarryT")
OutputT_co = TypeVar("OutputT_co", covariant=True)
P = ParamSpec("P")
