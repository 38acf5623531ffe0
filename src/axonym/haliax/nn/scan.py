"""Repeated layers."""

from __future__ import annotations

import dataclasses as _dataclasses
from collections.abc import Mapping as _Mapping
from typing import TYPE_CHECKING, Any as _Any, ParamSpec, Self as _Self, TypeVar

import equinox as eqx

from ...nn.scan import (
    BlockFoldable as BlockFoldable,
    BlockSeq as BlockSeq,
    FoldFunction as FoldFunction,
    ModuleInit as ModuleInit,
    ScanFunction as ScanFunction,
    Stacked as _Stacked,
    VmapFunction as VmapFunction,
)
from ...state import (
    StateDict as _StateDict,
    lazy_loading as _lazy_loading,
    stacked_from_state_dict as _load,
    stacked_to_state_dict as _save,
)
from ..axis import Axis
from ..hof import ScanCheckpointPolicy as ScanCheckpointPolicy, ScanCheckpointSpec as ScanCheckpointSpec
from ..jax_utils import tree_checkpoint_name as tree_checkpoint_name

M = TypeVar("M", bound=eqx.Module)
M_co = TypeVar("M_co", bound=eqx.Module, covariant=True)
M_contra = TypeVar("M_contra", bound=eqx.Module, contravariant=True)
S = TypeVar("S", bound=eqx.Module)
CarryT = TypeVar("CarryT")
OutputT_co = TypeVar("OutputT_co", covariant=True)
P = ParamSpec("P")


class Stacked(_Stacked[M]):
    """`axonym.nn.Stacked`, whose layers are written and loaded all at once by their own methods.

    >>> Layers, Embed = hax.make_axes(layers=2, embed=3)
    >>> layers = hax.nn.Stacked.init(Layers, hax.nn.LayerNorm)(Embed)
    >>> {key: x.shape for key, x in layers.to_state_dict("h").items() if key.startswith("h.1")}
    {'h.1.weight': (3,), 'h.1.bias': (3,)}
    """

    if TYPE_CHECKING:  # for a checker, the base class would return its own layers

        @classmethod
        def init(  # pyright: ignore[reportIncompatibleMethodOverride]
            cls,
            Block: Axis,
            module: type[S],
            *,
            gradient_checkpointing: ScanCheckpointSpec = False,
            prevent_cse: bool | None = None,
            divisible_by: int = 1,
        ) -> ModuleInit[Stacked[S]]: ...

    def to_state_dict(self, prefix: str | None = None) -> _StateDict:
        return _save(self.stacked, self.Block, prefix, at_once=not self.padding)

    @_lazy_loading
    def from_state_dict(self, state_dict: _Mapping[str, _Any], prefix: str | None = None) -> _Self:
        stacked = _load(self.stacked, self.Block, state_dict, prefix, padding=self.padding, at_once=True)
        return _dataclasses.replace(self, stacked=stacked)
