"""Inspect trees: show how their arrays are sharded, and find common mistakes."""

from ..debug import *  # noqa: F403  # the same names, but for those below
from ..debug import describe_array as _describe_array, diagnose_common_issues as _diagnose_common_issues
from ._signatures import with_parameters as _with_parameters
from .util import is_jax_or_hax_array_like as is_jax_or_hax_array_like

describe_array = _with_parameters(_describe_array, array="arr")
diagnose_common_issues = _with_parameters(_diagnose_common_issues, tree="module")
