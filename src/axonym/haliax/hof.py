"""Functions over an axis."""

from .. import ScanCheckpointPolicy as ScanCheckpointPolicy, fold as fold, map as map, scan as scan, vmap as vmap
