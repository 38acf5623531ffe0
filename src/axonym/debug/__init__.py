"""Show the shardings of a tree's arrays, draw arrays, and find common mistakes in models. May change before 1.0."""

from .._display import Shown as Shown, describe_devices as describe_devices, show as show
from ..named_array import describe_array as describe_array
from .drawing import draw as draw
from .problems import (
    IdentityMap as IdentityMap,
    ModuleProblems as ModuleProblems,
    diagnose_common_issues as diagnose_common_issues,
)
from .shardings import (
    describe_shardings as describe_shardings,
    visualize_named_sharding as visualize_named_sharding,
    visualize_shardings as visualize_shardings,
)
