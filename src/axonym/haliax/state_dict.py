"""State dicts, with Haliax's parameters. Entries that the tree lacks are ignored; `axonym.state` refuses them."""

import functools as _functools
from typing import Any as _Any

from .. import state as _state
from ..state import *  # noqa: F403  # the same names, but for those below
from ._signatures import with_parameters as _with_parameters

flatten_modules_for_export = _with_parameters(_state.flatten_modules_for_export, tree="t")


def _leniently(load: _Any) -> _Any:
    return _functools.update_wrapper(_functools.partial(load, ignore=("*",)), load)


def default_eqx_module_from_state_dict(mod: _Any, state_dict: _Any, prefix: str | None = None) -> _Any:
    """Load each field of a module, as one does whose class has no method for it."""
    own = isinstance(mod, _state.ModuleWithStateDictSerialization)
    load = _state.ModuleWithStateDictSerialization.from_state_dict if own else from_state_dict
    return load(mod, state_dict, prefix)


def default_eqx_module_to_state_dict(mod: _Any, prefix: str | None = None) -> _state.StateDict:
    """Write each field of a module, as one does whose class has no method for it."""
    own = isinstance(mod, _state.ModuleWithStateDictSerialization)
    write = _state.ModuleWithStateDictSerialization.to_state_dict if own else _state.to_state_dict
    return write(mod, prefix)


from_state_dict = _leniently(_state.from_state_dict)
from_torch_compatible_state_dict = _with_parameters(_leniently(_state.from_torch_compatible_state_dict), tree="t")
to_numpy_state_dict = _with_parameters(_state.to_numpy_state_dict, tree="model")
to_torch_compatible_state_dict = _with_parameters(_state.to_torch_compatible_state_dict, tree="t")
unflatten_modules_from_export = _with_parameters(_state.unflatten_modules_from_export, tree="t")
