"""Repeated layers."""

from ...nn.scan import *  # noqa: F403  # the same names, but for those below
from ..hof import ScanCheckpointPolicy as ScanCheckpointPolicy, ScanCheckpointSpec as ScanCheckpointSpec
from ..jax_utils import tree_checkpoint_name as tree_checkpoint_name
