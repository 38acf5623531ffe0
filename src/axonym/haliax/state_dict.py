"""State dicts, with Haliax's parameters."""

from .. import state as _state
from ..state import *  # noqa: F403
from ._signatures import with_parameters as _with_parameters

flatten_modules_for_export = _with_parameters(_state.flatten_modules_for_export, tree="t")
from_torch_compatible_state_dict = _with_parameters(_state.from_torch_compatible_state_dict, tree="t")
to_numpy_state_dict = _with_parameters(_state.to_numpy_state_dict, tree="model")
to_torch_compatible_state_dict = _with_parameters(_state.to_torch_compatible_state_dict, tree="t")
unflatten_modules_from_export = _with_parameters(_state.unflatten_modules_from_export, tree="t")
