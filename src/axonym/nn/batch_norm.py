"""`BatchNorm`, whose running statistics are kept in Equinox's `State`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer

from ..axis import Axis, AxisSelection, AxisSelector, name_of, selectors
from ..core import errors
from ..core.named_scope import named_call
from ..distribution.mesh_axes import has_manual, mesh_around
from ..manual._axis_environment import MeshAxis, axes_of_sharded, count
from ..manual.collectives import pmean, sharded_over
from ..named_array import NamedArray
from ..ops._operands import one_axis, require_named
from ..ops.creation import ones, zeros
from ..ops.elementwise import rsqrt, square
from ..ops.reductions import mean
from ..ops.selection import where
from ..state.loading import lazy_loading, load_children
from ..state.module import ModuleWithStateDictSerialization
from ..state.naming import StateDict
from ..state.saving import children_to_state_dict

__all__ = ["BatchNorm", "RunningStatistics", "with_state"]

T = TypeVar("T")


class RunningStatistics(eqx.Module):
    """The running statistics of a `BatchNorm`, under their names in PyTorch.

    >>> import equinox as eqx
    >>> layer, state = eqx.nn.make_with_state(axn.nn.BatchNorm.init)(axn.Axis("channels", 2), "batch")
    >>> state.get(layer.running).running_var
    NamedArray(float32[channels=2], [1. 1.])
    """

    running_mean: NamedArray
    running_var: NamedArray
    num_batches_tracked: jax.Array


class BatchNorm(ModuleWithStateDictSerialization):
    """Batch normalization: normalize each channel over the batch, then scale and shift it.

    In training, mean and variance come from the batch, and update the running ones, which inference uses.
    The statistics are of the whole batch, however it is sharded, inside `shard_map` too. The running ones are kept in
    Equinox's `State`: `equinox.nn.make_with_state` makes a layer or model and its state, and each call returns the new
    state with the result. `equinox.nn.inference_mode` switches all such layers of a model.

    Arguments:
        axis: the axis of the channels, which the statistics have.
        Batch: all other axes of the input, along which the statistics are computed: batch axes and spatial axes.
        momentum: the share of each batch in the running statistics, as in PyTorch. The momentum of Equinox and Flax is
            one minus this.

    >>> import equinox as eqx
    >>> layer, state = eqx.nn.make_with_state(axn.nn.BatchNorm.init)(axn.Axis("channels", 2), "batch")
    >>> y, state = layer(axn.named([[1., 3.], [3., 7.]], ("batch", "channels")), state)
    >>> y
    NamedArray(float32[batch=2, channels=2], [[-1. -1.] [ 1. 1.]])
    >>> state.get(layer.running).running_mean
    NamedArray(float32[channels=2], [0.2 0.5])
    """

    axis: Axis = eqx.field(static=True)
    Batch: tuple[AxisSelector, ...] = eqx.field(static=True, converter=selectors)
    weight: NamedArray | None
    bias: NamedArray | None
    running: eqx.nn.StateIndex[Any]
    eps: float = eqx.field(default=1e-5, static=True)
    momentum: float = eqx.field(default=0.1, static=True)
    inference: bool = False

    @staticmethod
    def init(
        axis: Axis,
        Batch: AxisSelection,
        eps: float = 1e-5,
        momentum: float = 0.1,
        *,
        use_weight: bool = True,
        use_bias: bool = True,
    ) -> BatchNorm:
        """Make a layer with a scale of one, a shift of zero, and running statistics of mean zero and variance one.

        The arguments are the fields of the layer.

        >>> layer = axn.nn.BatchNorm.init(axn.Axis("channels", 4), ("batch", "height", "width"))
        >>> layer.weight.shape
        {'channels': 4}
        """
        axis = one_axis("BatchNorm", "axis", axis)
        running = RunningStatistics(zeros(axis), ones(axis), jnp.zeros((), jnp.int32))
        weight, bias = ones(axis) if use_weight else None, zeros(axis) if use_bias else None
        return BatchNorm(axis, Batch, weight, bias, eqx.nn.StateIndex(running), eps, momentum)  # pyright: ignore[reportArgumentType]

    @named_call
    def __call__(
        self, x: NamedArray, state: eqx.nn.State, *, inference: bool | None = None, key: Any = None
    ) -> tuple[NamedArray, eqx.nn.State]:
        """Normalize an array, and return it with the new state; `inference` overrides the layer's setting."""
        batch = tuple(map(name_of, self.Batch))
        require_named("BatchNorm", x)
        if set(x.names) != {self.axis.name, *batch} or len(x.names) < 2:
            raise ValueError(
                f"BatchNorm: the layer is for arrays with the axes "
                f"{errors.describe_axes((*batch, self.axis.name))}, got {errors.describe_shape(x.shape)}. Name all "
                "axes but the channels as `Batch`, and call the layer on a whole batch, outside of `vmap`."
            )
        inference = self.inference if inference is None else inference
        old: RunningStatistics = state.get(self.running)
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        center, variance = old.running_mean, old.running_var
        if isinstance(inference, Tracer) or not inference:
            # Inside `shard_map`, a device has a shard of the batch.
            shards = [n for n in batch if axes_of_sharded("BatchNorm", n)] if has_manual(mesh_around()) else []
            over = tuple(a for n in shards for a in sharded_over("BatchNorm", wide, n))

            def average(x: NamedArray) -> NamedArray:
                found = mean(x, batch)
                return pmean(found, tuple(map(MeshAxis, over))) if over else found

            center = average(wide)
            variance = average(square(wide - center))
            size = count(over) * math.prod(wide.axis_size(n) for n in batch)
            unbiased = variance * (size / max(size - 1, 1))
            means, variances = (
                (x + (jax.lax.stop_gradient(own) - x) * self.momentum).astype(x.dtype)
                for x, own in ((old.running_mean, center), (old.running_var, unbiased))
            )
            new = RunningStatistics(means, variances, old.num_batches_tracked + 1)
            if isinstance(inference, Tracer):
                new = jax.tree.map(lambda a, b: jnp.where(inference, a, b), old, new)
                center = where(inference, old.running_mean, center)
                variance = where(inference, old.running_var, variance)
            # `State.set` refuses a value with another sharding on Explicit mesh axes.
            state = state.update(eqx.nn.State(_same_index(self.running, new)))
        y = (wide - center) * rsqrt(variance + self.eps)
        y = y.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else y
        y = y if self.weight is None else y * self.weight
        return (y if self.bias is None else y + self.bias), state

    # In a state dict, the running statistics are beside the parameters, and nothing else is.

    def to_state_dict(self, prefix: str | None = None) -> StateDict:
        return children_to_state_dict(self._with_statistics("written"), prefix)

    @lazy_loading
    def from_state_dict(self, state_dict: Mapping[str, Any], prefix: str | None = None) -> BatchNorm:
        loaded = load_children(self._with_statistics("loaded"), state_dict, prefix)
        running = _same_index(self.running, loaded.running)
        return dataclasses.replace(loaded, running=running, inference=self.inference)

    def _state_dict_key_map(self) -> dict[str, str | None]:
        return {"running": None}

    def _with_statistics(self, what: str) -> Any:
        """Return the layer with its running statistics in place of their index."""
        running = self.running.init
        if not isinstance(running, RunningStatistics):
            raise ValueError(
                f"BatchNorm: the running statistics are not in the model but in its state, so they cannot be {what} "
                "with it. Pass `axonym.nn.with_state(model, state)`."
            )
        return dataclasses.replace(self, running=running, inference=None)


def with_state(model: T, state: eqx.nn.State) -> T:
    """Return a model that has its state in it, as before `equinox.nn.make_with_state` took it out.

    Functions that write a model to a file or a state dict take it in this form, and functions that load one return it.
    Then `equinox.nn.State(model)` is the state, and `equinox.nn.delete_init_state(model)` the model without it.

    >>> import equinox as eqx
    >>> layer, state = eqx.nn.make_with_state(axn.nn.BatchNorm.init)(axn.Axis("channels", 2), "batch")
    >>> list(axn.state.to_torch_compatible_state_dict(axn.nn.with_state(layer, state)))
    ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """

    def is_index(x: Any) -> bool:
        return isinstance(x, eqx.nn.StateIndex)

    return jax.tree.map(lambda x: _same_index(x, state.get(x)) if is_index(x) else x, model, is_leaf=is_index)


def _same_index(index: eqx.nn.StateIndex[Any], value: Any) -> eqx.nn.StateIndex[Any]:
    """Return an index of the same place in the state, with another initial value."""
    found = eqx.nn.StateIndex(value)
    object.__setattr__(found, "marker", index.marker)  # as `equinox.nn.make_with_state` does
    return found
