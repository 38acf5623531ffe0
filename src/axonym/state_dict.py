"""State dicts, under the name that existing code imports them by."""

from .state import (
    ModuleWithStateDictSerialization as ModuleWithStateDictSerialization,
    StateDict as StateDict,
    flatten_modules_for_export as flatten_modules_for_export,
    from_state_dict as from_state_dict,
    from_torch_compatible_state_dict as from_torch_compatible_state_dict,
    load_state_dict as load_state_dict,
    save_state_dict as save_state_dict,
    to_numpy_state_dict as to_numpy_state_dict,
    to_state_dict as to_state_dict,
    to_torch_compatible_state_dict as to_torch_compatible_state_dict,
    unflatten_modules_from_export as unflatten_modules_from_export,
    with_prefix as with_prefix,
)
