"""Repeated layers."""

from ...nn.scan import *  # noqa: F403  # the same names, but for those below
from ...nn.scan import (
    CarryT as CarryT,
    M as M,
    M_co as M_co,
    M_contra as M_contra,
    OutputT_co as OutputT_co,
    P as P,
    S as S,
)
from ..hof import ScanCheckpointPolicy as ScanCheckpointPolicy, ScanCheckpointSpec as ScanCheckpointSpec
from ..jax_utils import tree_checkpoint_name as tree_checkpoint_name
