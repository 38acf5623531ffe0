"""`ModuleWithStateDictSerialization`: a module that says how it is written to and read from state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import equinox as eqx

from .loading import lazy_loading, loaded_children
from .naming import KeyMap, StateDict
from .saving import children_to_state_dict


class ModuleWithStateDictSerialization(eqx.Module):
    """A module whose form in state dicts differs from its fields.

    Any module can be written to a state dict, under the names of its fields. One that derives from this class can
    override how: `_state_dict_key_map` for other names, `flatten_for_export` and `unflatten_from_export` for other
    shapes in the forms that are for PyTorch, and the two methods that write and read it for everything else.

    >>> import equinox as eqx
    >>> from axonym.state import ModuleWithStateDictSerialization, to_state_dict
    >>> class Norm(ModuleWithStateDictSerialization):
    ...     scale: axn.NamedArray
    ...     def _state_dict_key_map(self):
    ...         return {"scale": "weight"}
    >>> list(to_state_dict({"norm": Norm(axn.ones({"embed": 2}))}))
    ['norm.weight']
    """

    def _state_dict_key_map(self) -> KeyMap:
        """What fields are called in state dicts, where that is not their name.

        A field that is mapped to None has no step of its own in the keys: what it holds stands where the module does.
        """
        return {}

    def to_state_dict(self, prefix: str | None = None) -> StateDict:
        """The arrays and numbers of the module by key.

        Arguments:
            prefix: where the module stands in the state dict.

        >>> from axonym.state import ModuleWithStateDictSerialization
        >>> class Norm(ModuleWithStateDictSerialization):
        ...     scale: axn.NamedArray
        >>> Norm(axn.ones({"embed": 2})).to_state_dict("norm")
        {'norm.scale': Array([1., 1.], dtype=float32)}
        """
        return children_to_state_dict(self, prefix)

    @lazy_loading
    def from_state_dict(self, state_dict: Mapping[str, Any], prefix: str | None = None) -> Self:
        """The module with its arrays and numbers from a state dict.

        One that overrides this is given real arrays by `super().from_state_dict(...)`, and so can compute with them.

        Arguments:
            state_dict: arrays by key.
            prefix: where the module stands in it.

        >>> from axonym.state import ModuleWithStateDictSerialization
        >>> class Norm(ModuleWithStateDictSerialization):
        ...     scale: axn.NamedArray
        >>> Norm(axn.ones({"embed": 2})).from_state_dict({"norm.scale": np.zeros(2)}, "norm").scale
        NamedArray(float32[embed=2], [0. 0.])
        """
        return loaded_children(self, state_dict, prefix)

    def flatten_for_export(self) -> Self:
        """The module as PyTorch would have it, with one axis where it has several.

        Only `to_torch_compatible_state_dict` and `from_torch_compatible_state_dict` ask for this. It should do no more
        than reshape, transpose and rename: then arrays can be loaded one part at a time.

        >>> from axonym.state import ModuleWithStateDictSerialization
        >>> class Norm(ModuleWithStateDictSerialization):
        ...     scale: axn.NamedArray
        ...     def flatten_for_export(self):
        ...         return Norm(self.scale.flatten("flat"))
        >>> Norm(axn.ones({"heads": 2, "size": 2})).flatten_for_export().scale.shape
        {'flat': 4}
        """
        return self

    def unflatten_from_export(self, template: Any) -> Self:
        """The module that `flatten_for_export` flattened.

        Arguments:
            template: a module as it should be, for its axes. The values of its arrays mean nothing.

        >>> from axonym.state import ModuleWithStateDictSerialization
        >>> class Norm(ModuleWithStateDictSerialization):
        ...     scale: axn.NamedArray
        ...     def unflatten_from_export(self, template):
        ...         return Norm(self.scale.unflatten_axis("flat", template.scale.axes))
        >>> template = Norm(axn.ones({"heads": 2, "size": 2}))
        >>> Norm(axn.ones({"flat": 4})).unflatten_from_export(template).scale.shape
        {'heads': 2, 'size': 2}
        """
        return self
