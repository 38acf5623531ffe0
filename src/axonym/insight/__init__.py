"""Report what a step sends between devices, keeps in memory and computes, in the names of its model.

`explain` compiles a step and reads the program: it neither runs the step nor estimates anything, and reports what it
cannot know as not known. `compare` explains a step under several mappings, `contract` checks what a step must not do,
and `blame` finds where an axis stops being sharded. `plan` searches for the mapping under which a step takes the least
time. `snapshot` writes a text to keep with the tests. From the command line, `python -m axonym.insight` explains and
compares.
"""

from ..core.source_lines import Source as Source
from .blaming import Blame as Blame, blame as blame
from .chips import CHIPS as CHIPS, Chip as Chip
from .collectives import Collective as Collective
from .comparing import Comparison as Comparison, compare as compare
from .contracts import BrokenContract as BrokenContract, Contract as Contract, contract as contract
from .differing import FirstDifference as FirstDifference
from .explaining import explain as explain
from .planning import MappingPlan as MappingPlan, PlannedMapping as PlannedMapping, plan as plan
from .report import Bounds as Bounds, Memory as Memory, Report as Report
from .snapshots import snapshot as snapshot
from .timeline import HeldArray as HeldArray, MemoryTimeline as MemoryTimeline
from .verifying import Verification as Verification, verify as verify
