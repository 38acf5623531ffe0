"""State dicts, also in PyTorch's shapes, safetensors files and distributed checkpoints."""

from .checkpoint import latest_checkpoint as latest_checkpoint, restore_checkpoint as restore_checkpoint
from .checkpoint_saves import (
    PendingCheckpoint as PendingCheckpoint,
    save_checkpoint as save_checkpoint,
    save_checkpoint_async as save_checkpoint_async,
)
from .export import (
    flatten_modules_for_export as flatten_modules_for_export,
    from_torch_compatible_state_dict as from_torch_compatible_state_dict,
    to_torch_compatible_state_dict as to_torch_compatible_state_dict,
    unflatten_modules_from_export as unflatten_modules_from_export,
)
from .file_checksums import verify as verify
from .layouts import WeightLayout as WeightLayout
from .loading import (
    from_state_dict as from_state_dict,
    lazy_loading as lazy_loading,
    stacked_from_state_dict as stacked_from_state_dict,
)
from .module import ModuleWithStateDictSerialization as ModuleWithStateDictSerialization
from .naming import StateDict as StateDict, with_prefix as with_prefix
from .safetensors import load_state_dict as load_state_dict, save_state_dict as save_state_dict
from .saving import (
    stacked_to_state_dict as stacked_to_state_dict,
    to_numpy_state_dict as to_numpy_state_dict,
    to_state_dict as to_state_dict,
)
