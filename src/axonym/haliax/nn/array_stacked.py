"""`ArrayStacked`: layers of one kind in one module, whose arrays are raw and have the layers first."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Self, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from ... import fold, is_named_array, scan
from ...state import (
    ModuleWithStateDictSerialization,
    StateDict,
    lazy_loading,
    stacked_from_state_dict,
    stacked_to_state_dict,
)
from ...tree import LayerStack
from ..axis import Axis
from ..hof import ScanCheckpointPolicy, ScanCheckpointSpec

M = TypeVar("M", bound=eqx.Module)

InAxes: TypeAlias = int | tuple[Any, ...] | None
"""The axis of the layers, in all arguments or in each; or a tuple for arguments, and a dictionary for keywords."""
Unroll: TypeAlias = int | bool | None


def _policy(spec: Any) -> ScanCheckpointPolicy:
    return ScanCheckpointPolicy.from_bool_or_str(spec) if isinstance(spec, (bool, str)) else spec


class ArrayStacked(ModuleWithStateDictSerialization, LayerStack, Generic[M]):
    """Layers of one kind in one module; `Stacked` is for layers with named arrays.

    Arguments:
        stacked: the stacked layers. An array whose first axis has `num_layers` elements has one for each layer, and
            all else is shared by the layers.
        num_layers: the number of layers.
        gradient_checkpointing: the values of each layer that are saved for the backward pass.

    >>> import equinox as eqx
    >>> class Scale(eqx.Module):
    ...     weight: jax.Array
    ...     @staticmethod
    ...     def init(key):
    ...         return Scale(jax.random.normal(key, 2))
    ...     def __call__(self, x):
    ...         return x * self.weight
    >>> layers = hax.nn.array_stacked.ArrayStacked.init(3, Scale)(jax.random.split(jax.random.key(0), 3))
    >>> layers.stacked.weight.shape, layers.fold(jnp.ones(2)).shape
    ((3, 2), (2,))
    """

    stacked: M
    num_layers: int = eqx.field(static=True)
    gradient_checkpointing: ScanCheckpointPolicy = eqx.field(static=True, converter=_policy, default=_policy(False))

    @classmethod
    def init(
        cls, num_layers: int, module: type[Any], *, gradient_checkpointing: ScanCheckpointSpec = False
    ) -> Callable[..., Self]:
        """Return a function that makes the layers with `module.init`, from arguments of which some have the layers."""

        def make(*args: Any, **kwargs: Any) -> Self:
            own, shared = _parts((args, kwargs), num_layers)

            def one(own: Any) -> Any:
                args, kwargs = eqx.combine(own, shared)
                return module.init(*args, **kwargs)

            stacked = jax.vmap(one, axis_size=num_layers)(own)
            if any(map(is_named_array, jax.tree.leaves(stacked, is_leaf=is_named_array))):
                raise TypeError(f"ArrayStacked: {module.__name__} has named arrays. Use `nn.Stacked` for it.")
            return cls(stacked, num_layers, gradient_checkpointing)

        return functools.wraps(module)(make)

    def fold(self, init: Any, *args: Any, unroll: Unroll = None, in_axes: InAxes = None, **kwargs: Any) -> Any:
        """Call one layer after the other, each with the result of the one before."""
        return self.fold_via(_call, unroll=unroll, in_axes=in_axes)(init, *args, **kwargs)

    def scan(self, init: Any, *args: Any, unroll: Unroll = None, in_axes: InAxes = None, **kwargs: Any) -> Any:
        """Call one layer after the other; each returns what the next one gets, and an output, which are stacked."""
        return self.scan_via(_call, unroll=unroll, in_axes=in_axes)(init, *args, **kwargs)

    def fold_via(self, fn: Callable[..., Any], *, unroll: Unroll = None, in_axes: InAxes = None) -> Callable[..., Any]:
        """Make `fold` with a function of a layer and its arguments. `in_axes` says which arguments have the layers."""
        return self._looped(fold, fn, unroll, in_axes)

    def scan_via(self, fn: Callable[..., Any], *, unroll: Unroll = None, in_axes: InAxes = None) -> Callable[..., Any]:
        """Make `scan` with a function of a layer and its arguments. `in_axes` says which arguments have the layers."""
        return self._looped(scan, fn, unroll, in_axes)

    def _looped(self, transform: Any, fn: Callable[..., Any], unroll: Any, in_axes: InAxes) -> Callable[..., Any]:
        def step(shared: Any, carry: Any, own: Any) -> Any:
            layer, (args, kwargs) = eqx.combine(own, shared)
            return fn(layer, carry, *args, **kwargs)

        def looped(init: Any, *args: Any, **kwargs: Any) -> Any:
            own, shared = _parts(self.stacked, self.num_layers)
            axes, given = _axes_of(in_axes, args, kwargs), (args, kwargs)
            each = jax.tree.map(self._layers_first, axes, given, is_leaf=_is_none)
            rest = jax.tree.map(lambda axis, x: x if axis is None else None, axes, given, is_leaf=_is_none)
            loop = transform(
                functools.partial(step, (shared, rest)),
                Axis("layers", self.num_layers),
                remat=self.gradient_checkpointing,
                unroll=1 if unroll is None else unroll,
            )
            return loop(init, (own, each))

        return looped

    def _layers_first(self, axis: int | None, x: Any) -> Any:
        if axis is None:
            return None
        if jnp.shape(x)[axis : axis + 1 or None] != (self.num_layers,):
            raise ValueError(f"ArrayStacked: axis {axis} of shape {jnp.shape(x)} is not the {self.num_layers} layers.")
        return jnp.moveaxis(x, axis, 0)

    def vmap_via(
        self, fn: Callable[..., Any], *, in_axes: InAxes = None, out_axes: int | None = 0
    ) -> Callable[..., Any]:
        """Call a function of a layer and its arguments for all layers at once."""

        def mapped(*args: Any, **kwargs: Any) -> Any:
            own, shared = _parts(self.stacked, self.num_layers)

            def one(own: Any, args: Any, kwargs: Any) -> Any:
                return fn(eqx.combine(own, shared), *args, **kwargs)

            return jax.vmap(one, (0, *_axes_of(in_axes, args, kwargs)), out_axes)(own, args, kwargs)

        return mapped

    def get_layer(self, index: int) -> M:
        """Return one layer."""
        own, shared = _parts(self.stacked, self.num_layers)
        return eqx.combine(jax.tree.map(lambda x: x[index], own), shared)

    def unstacked(self) -> Sequence[M]:
        """Return the layers."""
        return tuple(self.get_layer(i) for i in range(self.num_layers))

    def map_layers(self, fn: Callable[..., Any], *others: Any) -> Self:
        each = [fn(*(x.get_layer(i) for x in (self, *others))) for i in range(self.num_layers)]
        stacked = jax.tree.map(lambda *x: jnp.stack(x) if eqx.is_array(x[0]) else x[0], *each)
        return dataclasses.replace(self, stacked=stacked)

    def to_state_dict(self, prefix: str | None = None) -> StateDict:
        return stacked_to_state_dict(self.stacked, Axis("layers", self.num_layers), prefix, at_once=True)

    @lazy_loading
    def from_state_dict(self, state_dict: Mapping[str, Any], prefix: str | None = None) -> Self:
        layers = Axis("layers", self.num_layers)
        stacked = stacked_from_state_dict(self.stacked, layers, state_dict, prefix, at_once=True)
        return dataclasses.replace(self, stacked=stacked)


def _call(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return layer(*args, **kwargs)


def _is_none(x: Any) -> bool:
    return x is None


def _parts(tree: Any, layers: int) -> tuple[Any, Any]:
    """Split a tree into the arrays that have the layers first, and the rest."""
    return eqx.partition(tree, lambda x: eqx.is_array(x) and x.shape[:1] == (layers,), is_leaf=is_named_array)


def _axes_of(in_axes: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return the axis of the layers for each argument, or None."""
    pair = isinstance(in_axes, tuple) and len(in_axes) == 2 and isinstance(in_axes[1], dict)
    of_args, of_kwargs = in_axes if pair else (in_axes, None)
    of_args = of_args if isinstance(of_args, tuple) else (of_args,) * len(args)
    of_kwargs = of_kwargs if isinstance(of_kwargs, dict) else dict.fromkeys(kwargs, of_kwargs)
    if len(of_args) != len(args) or of_kwargs.keys() != kwargs.keys():
        raise ValueError(f"ArrayStacked: in_axes {in_axes} is not for {len(args)} arguments and keywords {[*kwargs]}.")
    return of_args, of_kwargs
