"""Repeated layers."""

from ...nn.scan import *  # noqa: F403
from ...nn.scan import tree_checkpoint_name as tree_checkpoint_name
from ..hof import ScanCheckpointPolicy as ScanCheckpointPolicy
