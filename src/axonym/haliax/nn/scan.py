"""Repeated layers."""

from ...nn.scan import *  # noqa: F403
from ..hof import ScanCheckpointPolicy as ScanCheckpointPolicy
