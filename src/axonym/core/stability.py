"""Say in docstrings which names of the package may change before 1.0, and warn of names that are deprecated."""

from __future__ import annotations

import inspect
from typing import Any

from . import errors

MAY_CHANGE = frozenset(
    """
    Coordinates Labelled MeshAxis NamedRef all_gather all_to_all array_equiv axis_index axis_offset bitwise_count
    convolve custom_partitioning debug divmod exp2 fabs float_power fmod freeze frexp from_dlpack from_xarray
    geomspace get groups i0 in_context insight interp iscomplex isneginf isposinf isreal lint_mapping logaddexp2
    logspace manual map_overlap named_array names nanargmax nanargmin nancumprod nancumsum nanprod nanvar new_ref
    nextafter ops optim packbits partitioned pmax pmean pmin poly ppermute precision psum psum_scatter ptp pvary
    quantization ref regrid remap rint rolling schedules segment_max segment_mean segment_min segment_sum
    shift signbit sinc stencil swap testing to_xarray transfer tree_checkpoint_name trunc unpackbits updated_slice
    vander
    """.split()
)
"""Public names of the package that its page on versions does not promise. Modules say so in their own docstrings."""
NOTE = "May change before 1.0."


def note_changes(namespace: dict[str, Any]) -> None:
    """Add to the docstrings of functions and classes that they may change, for `help` and notebooks."""
    for name in MAY_CHANGE & namespace.keys():
        if (doc := namespace[name].__doc__) and NOTE not in doc:
            namespace[name].__doc__ = f"{inspect.cleandoc(doc)}\n\n{NOTE}"


def deprecated(old: str, instead: str, since: str) -> None:
    """Warn, at the user's line, that a name, parameter or behavior is deprecated since a minor version of the package.

    Arguments:
        old: what was written.
        instead: what to write.
        since: the minor version in which this warning is new. This version and the next one still have the old form.
    """
    major, minor = map(int, since.split("."))
    until = f"{major}.{minor + 2}"
    text = f"{old} is deprecated since Axonym {since}, and {until} will not have it. Write {instead}."
    errors.warn(text, DeprecationWarning)
