"""`ModuleWithStateDictSerialization`: a module that defines its own form in state dicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import equinox as eqx

from ..axis import Axis, AxisSpec, axes_of_spec, axis_size
from ..named_array import is_jax_array_like
from ..ops.rearranging import rearrange
from ..ops.shaping import flatten_axes, unflatten_axis
from .lazy_arrays import scale_array
from .loading import lazy_loading, load_children
from .naming import KeyMap, StateDict
from .saving import children_to_state_dict

ExportAxes = Mapping[str, Mapping[str, AxisSpec]]
"""The axes that become one: by the field that has them in the module, their form in each array that has them, too."""


class ModuleWithStateDictSerialization(eqx.Module):
    """A module whose form in state dicts differs from its fields.

    Any module can be written to a state dict, under the names of its fields. A subclass of this class can declare other
    names in `_state_dict_key_map`, factors in `_state_dict_scales`, and in `_export_axes` the axes that are one in
    PyTorch-compatible state dicts. For other changes of shape, it can override `flatten_for_export` and
    `unflatten_from_export`, and for everything else `to_state_dict` and `from_state_dict`.

    >>> import equinox as eqx
    >>> class Norm(axn.state.ModuleWithStateDictSerialization):
    ...     scale: axn.NamedArray
    ...     def _state_dict_key_map(self):
    ...         return {"scale": "weight"}
    >>> list(axn.state.to_state_dict({"norm": Norm(axn.ones({"embed": 2}))}))
    ['norm.weight']
    """

    def _state_dict_key_map(self) -> KeyMap:
        """Return the key in state dicts of each field that is not stored under its own name.

        A field that is mapped to None adds nothing to the keys: its contents get the module's own prefix.
        """
        return {}

    def _state_dict_scales(self) -> Mapping[str, float]:
        """Return, by field, factors of the arrays in state dicts: what the module applies, and PyTorch's does not."""
        return {}

    def _export_axes(self) -> ExportAxes:
        """Return the axes that are one axis in PyTorch: by field with the axes, the axes in each array.

        For a field `axis` and a weight with these axes, it is `{"axis": {"weight": self.axis}}`.
        """
        return {}

    def _scaled(self, scales: Mapping[str, float]) -> Self:
        scaled = {field: scale_array(getattr(self, field), by) for field, by in scales.items() if by != 1}
        return dataclasses.replace(self, **scaled) if scaled else self

    def to_state_dict(self, prefix: str | None = None) -> StateDict:
        """Return the arrays and numbers of the module by key.

        >>> class Norm(axn.state.ModuleWithStateDictSerialization):
        ...     scale: axn.NamedArray
        >>> Norm(axn.ones({"embed": 2})).to_state_dict("norm")
        {'norm.scale': Array([1., 1.], dtype=float32)}
        """
        return children_to_state_dict(self._scaled(self._state_dict_scales()), prefix)

    @lazy_loading
    def from_state_dict(self, state_dict: Mapping[str, Any], prefix: str | None = None) -> Self:
        """Load the arrays and numbers of the module from a state dict.

        In an override, `super().from_state_dict(...)` returns JAX arrays, so the override can compute with them.

        >>> class Norm(axn.state.ModuleWithStateDictSerialization):
        ...     scale: axn.NamedArray
        >>> Norm(axn.ones({"embed": 2})).from_state_dict({"norm.scale": np.zeros(2)}, "norm").scale
        NamedArray(float32[embed=2], [0. 0.])
        """
        loaded = load_children(self, state_dict, prefix)
        return loaded._scaled({field: 1 / by for field, by in self._state_dict_scales().items()})

    def flatten_for_export(self) -> Self:
        """Return the module with the shapes that PyTorch uses, such as one axis where the module has several.

        Only `to_torch_compatible_state_dict` and `from_torch_compatible_state_dict` call this method. It should only
        reshape, transpose and rename arrays, so that they can be loaded one shard at a time.

        >>> class Norm(axn.state.ModuleWithStateDictSerialization):
        ...     scale: axn.NamedArray
        ...     def flatten_for_export(self):
        ...         return Norm(self.scale.flatten("flat"))
        >>> Norm(axn.ones({"heads": 2, "size": 2})).flatten_for_export().scale.shape
        {'flat': 4}
        """
        declared = self._export_axes()
        if all(isinstance(getattr(self, field), Axis) for field in declared):
            return self
        changed: dict[str, Any] = {}
        for field, arrays in declared.items():
            name = _merged_name(field)
            changed[field] = Axis(name, axis_size(getattr(self, field)))
            for array, spec in arrays.items():
                x = changed.get(array, getattr(self, array))
                merged = tuple(a.name for a in axes_of_spec(spec))
                changed[array] = flatten_axes(x, merged, name) if is_jax_array_like(x) else x
        return dataclasses.replace(self, **changed)

    def unflatten_from_export(self, template: Any) -> Self:
        """Undo `flatten_for_export`.

        Arguments:
            template: a module with the axes that the result should have. The values of its arrays are not used.

        >>> class Norm(axn.state.ModuleWithStateDictSerialization):
        ...     scale: axn.NamedArray
        ...     def unflatten_from_export(self, template):
        ...         return Norm(self.scale.unflatten_axis("flat", template.scale.axes))
        >>> template = Norm(axn.ones({"heads": 2, "size": 2}))
        >>> Norm(axn.ones({"flat": 4})).unflatten_from_export(template).scale.shape
        {'heads': 2, 'size': 2}
        """
        declared = template._export_axes()
        if all(isinstance(getattr(template, field), Axis) for field in declared):
            return self
        changed: dict[str, Any] = {}
        for field, arrays in declared.items():
            changed[field] = getattr(template, field)
            for array, spec in arrays.items():
                x = changed.get(array, getattr(self, array))
                split = axes_of_spec(spec)
                changed[array] = unflatten_axis(x, _merged_name(field), split) if is_jax_array_like(x) else x
        for array in {array for arrays in declared.values() for array in arrays}:
            x, like = changed[array], getattr(template, array)
            if is_jax_array_like(x) and like is not None and x.names != like.names:
                changed[array] = rearrange(x, like.names)
        return dataclasses.replace(self, **changed)


def _merged_name(field: str) -> str:
    """Return the name of the axis that the axes of a field become. Existing code looks for these names."""
    return "__IN__" if field == "In" else "__OUT__"
