"""Report how much a step sends between devices, keeps in memory and computes, in the names of its model.

May change before 1.0.

`explain` reads the compiled program of a step, without running it, or works it out by name; it reports numbers that it
cannot know as not known. `compare` explains a step under several mappings, and `contract` checks limits on a step.
`plan` searches for the mapping under which a step takes the least time. `snapshot` writes a text to keep with the
tests. From the command line, `python -m axonym.insight` explains and compares.
"""

from ..core.source_lines import Source as Source
from ._arguments import PlacedArgument as PlacedArgument
from ._figures import Memory as Memory
from ._searching import PlannedMapping as PlannedMapping
from .chips import CHIPS as CHIPS, Chip as Chip, Islands as Islands, Reached as Reached
from .comparing import Comparison as Comparison, compare as compare
from .contracts import (
    BrokenContract as BrokenContract,
    Contract as Contract,
    contract as contract,
    snapshot as snapshot,
)
from .cost_model import Bounds as Bounds, Estimate as Estimate
from .explaining import explain as explain
from .page import Page as Page
from .planning import MappingPlan as MappingPlan, plan as plan
from .records import (
    AvoidableWork as AvoidableWork,
    Collective as Collective,
    HeldArray as HeldArray,
    MemoryTimeline as MemoryTimeline,
    RepeatedWork as RepeatedWork,
)
from .report import Report as Report
from .suspicions import Suspicion as Suspicion
from .verdict import Verdict as Verdict
