"""`axonym.transforms` under the name that existing code imports it by."""

from .transforms.checkpointing import ScanCheckpointPolicy as ScanCheckpointPolicy
from .transforms.scan import fold as fold, map as map, scan as scan
from .transforms.vmap import vmap as vmap
