"""Say what a step costs, in the names of its model: what it sends between devices, keeps in memory, and computes.

`explain` compiles a step and reads the program: it neither runs the step nor estimates anything. What it cannot know,
it says is not known.
"""

from .chips import CHIPS as CHIPS, Chip as Chip
from .explaining import explain as explain
from .report import (
    Bounds as Bounds,
    Collective as Collective,
    Memory as Memory,
    Report as Report,
    Source as Source,
)
