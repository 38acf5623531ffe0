"""Repeated layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ParamSpec, TypeVar

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

    _at_once = True

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
