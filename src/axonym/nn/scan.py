"""Repeated layers: `Stacked` stacks their arrays and scans over them, `BlockSeq` keeps them in a sequence.

A transformer repeats one block with different parameters. `Stacked` keeps the parameters of all blocks in one module,
whose arrays have a layer axis, and loops over them with `axonym.scan`, so only one block is compiled. `BlockSeq` keeps
the blocks in a sequence and calls them in turn, so they can differ. Both have the same methods, make the same layers
from the same keys, and give the same results and gradients.

A block is any Equinox module with an `init` that makes a block and a `__call__` from a carry to the next carry:

>>> import equinox as eqx
>>> class Shift(eqx.Module):
...     by: axn.NamedArray
...     @staticmethod
...     def init(Embed, *, key):
...         return Shift(axn.random.normal(key, Embed))
...     def __call__(self, x):
...         return x + self.by
>>> Layers, Embed = axn.make_axes(layers=3, embed=2)
>>> layers = axn.nn.Stacked.init(Layers, Shift)(Embed, key=jax.random.key(0))
>>> layers.stacked.by.shape
{'layers': 3, 'embed': 2}
>>> y = layers.fold(axn.zeros(Embed))
>>> axn.allclose(y, layers.stacked.by.sum(Layers))
True

The methods slice their arguments other than the carry for each layer: named arrays with the layer axis are sliced along
that axis, and raw arrays along their first axis. Every layer gets the same scalars and other values. A single random
key that is passed as `key`, also to `init`, is split into one for each layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import equinox as eqx
import jax.numpy as jnp

from ..axis import Axis
from ..core import errors
from ..named_array import wrap
from ..schedules._pipeline import fold_in_stages
from ..schedules.pipeline_schedules import Schedule
from ..state.loading import lazy_loading, stacked_from_state_dict
from ..state.naming import KeyMap, StateDict
from ..state.saving import stacked_to_state_dict
from ..transforms import scan as loops
from ..transforms.rematerialization import ScanCheckpointPolicy, ScanCheckpointSpec, checkpointed_steps, policy_of
from ..transforms.vmap import vmap
from ..tree import LayerStack
from . import _layer_arguments, _padding
from ._block_foldable import BlockFoldable, FoldFunction, L, M, ModuleInit, ScanFunction, VmapFunction

__all__ = [
    "BlockFoldable",
    "BlockSeq",
    "FoldFunction",
    "ModuleInit",
    "ScanCheckpointPolicy",
    "ScanFunction",
    "Stacked",
    "VmapFunction",
]


# --- stacked ---


class Stacked(BlockFoldable[M], LayerStack):
    """Layers of one kind in one module, whose arrays have the layer axis.

    Arguments:
        stacked: the stacked layers. Named arrays have the axis `Block`, raw arrays have it first; named arrays without
            it are shared by all layers.
        Block: the axis of the layers.
        gradient_checkpointing: the values of each layer that are saved for the backward pass.
        padding: the number of added layers at the end of the arrays, with which the stages of a pipeline divide the
            layers. They are zeros and are skipped; `init` adds them for `divisible_by`.

    >>> Layers, Embed = axn.make_axes(layers=12, embed=2)
    >>> layers = axn.nn.Stacked.init(Layers, axn.nn.Linear)(Embed, Embed, key=jax.random.key(0))
    >>> layers.stacked.bias.shape
    {'layers': 12, 'embed': 2}
    >>> layers.fold(axn.ones(Embed)).shape
    {'embed': 2}
    """

    stacked: M
    Block: Axis = eqx.field(static=True)  # pyright: ignore[reportIncompatibleMethodOverride]  # what the base asks for
    gradient_checkpointing: ScanCheckpointPolicy = eqx.field(static=True, converter=policy_of, default=policy_of(False))
    padding: int = eqx.field(static=True, default=0)

    if TYPE_CHECKING:  # the type that the base class has for it does not say which layers there are

        @classmethod
        def init(  # pyright: ignore[reportIncompatibleMethodOverride]
            cls,
            Block: Axis,
            module: type[L],
            *,
            gradient_checkpointing: ScanCheckpointSpec = False,
            prevent_cse: bool | None = None,
            divisible_by: int = 1,
        ) -> ModuleInit[Stacked[L]]: ...

    @classmethod
    def _make(
        cls, Block: Axis, policy: ScanCheckpointPolicy, padding: int, make: Callable[..., Any], args: Any, kwargs: Any
    ) -> Self:
        what = f"{cls.__name__}.init"
        _layer_arguments.check_sizes(what, Block, args, kwargs)
        stored = Block.resize(Block.size + padding)
        if padding:
            args, kwargs = _padding.with_added(Block, padding, (args, kwargs))
        kwargs = _layer_arguments.shard_keys(what, stored, kwargs)
        stacked = vmap(make, stored, default=_layer_arguments.first_axis)(*args, **kwargs)
        return cls(_padding.zeroed(Block, stacked) if padding else stacked, Block, policy, padding)

    @property
    def _stored(self) -> Axis:
        """Return the axis of the layers with the added ones."""
        return self.Block.resize(self.Block.size + self.padding)

    def _skipping(
        self, what: str, fn: Callable[..., Any], run: Callable[..., Callable[..., Any]]
    ) -> Callable[..., Any]:
        """Return a function that runs all layers, and does not use the results of the added ones.

        Arguments:
            run: returns the function that runs them, from a `Stacked` of real layers and a function of a layer.
        """
        body = _padding.skipping(fn, self.Block, self.stacked, outputs=what == "scan")

        def run_all(init: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs = _layer_arguments.split_key(self.Block, kwargs)
            all_args, all_kwargs = _padding.with_added(self.Block, self.padding, (args, kwargs))
            layers = dataclasses.replace(self, stacked=self._filled(), Block=self._stored, padding=0)
            is_real = wrap(jnp.arange(self._stored.size) < self.Block.size, (self.Block.name,))
            result = run(layers, body)(init, *all_args, is_real=is_real, **all_kwargs)
            if what == "fold":
                return result
            return result[0], _padding.without_added(self.Block, self.padding, result[1], (args, kwargs))

        return run_all

    def _filled(self) -> M:
        return _padding.filled(self.Block, self.stacked) if self.padding else self.stacked

    def _looped(self, what: str, fn: Callable[..., Any], unroll: int | bool | None) -> Callable[..., Any]:
        if self.padding:
            return self._skipping(what, fn, lambda layers, body: layers._looped(what, body, unroll))
        transform = loops.fold if what == "fold" else loops.scan
        body = functools.partial(_apply, fn)
        loop = transform(body, self.Block, remat=self.gradient_checkpointing, unroll=1 if unroll is None else unroll)

        def looped(init: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs = _layer_arguments.split_key(self.Block, kwargs)
            _layer_arguments.check_sizes(f"Stacked.{what}", self.Block, args, kwargs)
            return loop(init, *args, stacked=self.stacked, **kwargs)

        return looped

    def _scheduled(
        self, schedule: Schedule, fn: Callable[..., Any], unroll: Any, then: Any, then_args: Sequence[Any]
    ) -> Callable[..., Any]:
        if self.padding:
            return self._skipping(
                "fold", fn, lambda layers, body: layers._scheduled(schedule, body, unroll, then, then_args)
            )

        without_arrays: Any = dataclasses.replace(self, stacked=None)  # JAX keeps what a derivative calls

        def of_some(stacked: M, Layers: Axis, carry: Any, *args: Any, **kwargs: Any) -> Any:
            layers = dataclasses.replace(without_arrays, stacked=stacked, Block=Layers)
            return layers._looped("fold", fn, unroll)(carry, *args, **kwargs)

        def scheduled(init: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs = _layer_arguments.split_key(self.Block, kwargs)
            _layer_arguments.check_sizes("Stacked.fold", self.Block, args, kwargs)
            what, stacked = "Stacked.fold", self.stacked
            return fold_in_stages(schedule, what, self.Block, of_some, stacked, init, args, kwargs, then, then_args)

        return scheduled

    def _vmapped(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = args, kwargs
        if self.padding:
            args, kwargs = _padding.with_added(self.Block, self.padding, given)
        _layer_arguments.check_sizes("Stacked.vmap", self._stored, args, kwargs)
        mapped = vmap(functools.partial(_apply, fn), self._stored, default=_layer_arguments.first_axis)
        results = mapped(*args, stacked=self._filled(), **kwargs)
        return _padding.without_added(self.Block, self.padding, results, given) if self.padding else results

    def map_layers(self, fn: Callable[..., Any], *others: Any) -> Self:
        mapped = vmap(fn, self._stored, default=_layer_arguments.first_axis)(*(o._filled() for o in (self, *others)))
        return dataclasses.replace(self, stacked=_padding.zeroed(self.Block, mapped) if self.padding else mapped)

    def added_layers(self) -> tuple[Axis, int] | None:
        return (self.Block, self.padding) if self.padding else None

    def unstacked(self) -> Sequence[M]:
        each = _layer_arguments.unstack("Stacked.unstacked", self._stored, (), {"stacked": self.stacked})
        return tuple(kwargs["stacked"] for _, kwargs in each[: self.Block.size])

    def get_layer(self, index: int) -> M:
        i = _layer_arguments.check_index("Stacked.get_layer", self.Block, index)
        if self.padding and not isinstance(i, int):  # JAX clips it, and counts it from the end, with the added layers
            i = jnp.clip(jnp.where(i < 0, i + self.Block.size, i), 0, self.Block.size - 1)
        return _layer_arguments.take_layer(self.Block, self.stacked, i)

    # In a state dict, every layer has its own entries, as in a `BlockSeq` and in PyTorch models.

    def to_state_dict(self, prefix: str | None = None) -> StateDict:
        return stacked_to_state_dict(self.stacked, self.Block, prefix)

    @lazy_loading
    def from_state_dict(self, state_dict: Mapping[str, Any], prefix: str | None = None) -> Self:
        stacked = stacked_from_state_dict(self.stacked, self.Block, state_dict, prefix, padding=self.padding)
        return dataclasses.replace(self, stacked=stacked)


# The layer is a keyword argument, so that messages show the caller's positions of other arguments.


def _apply(fn: Callable[..., Any], *args: Any, stacked: Any, **kwargs: Any) -> Any:
    return fn(stacked, *args, **kwargs)


# --- in sequence ---


class BlockSeq(BlockFoldable[M]):
    """Layers in a sequence, which can differ from each other.

    Every layer is compiled separately, so a deep model takes long to compile; `Stacked` compiles one layer.

    Arguments:
        blocks: the layers.
        Block, gradient_checkpointing: as in `Stacked`.

    >>> Layers, Embed = axn.make_axes(layers=2, embed=2)
    >>> norm, linear = axn.nn.LayerNorm.init(Embed), axn.nn.Linear.init(Embed, Embed, key=jax.random.key(0))
    >>> axn.nn.BlockSeq([norm, linear], Layers).fold(axn.ones(Embed)).shape
    {'embed': 2}
    """

    blocks: Sequence[M] = eqx.field(converter=tuple)  # pyright: ignore[reportGeneralTypeIssues]
    Block: Axis = eqx.field(static=True)  # pyright: ignore[reportIncompatibleMethodOverride]  # what the base asks for
    gradient_checkpointing: ScanCheckpointPolicy = eqx.field(static=True, converter=policy_of, default=policy_of(False))

    def __check_init__(self) -> None:
        if len(self.blocks) != self.Block.size:
            raise ValueError(f"BlockSeq: got {errors.counted(len(self.blocks), 'layer')} for the axis {self.Block}.")

    if TYPE_CHECKING:  # the type that the base class has for it does not say which layers there are

        @classmethod
        def init(  # pyright: ignore[reportIncompatibleMethodOverride]
            cls,
            Block: Axis,
            module: type[L],
            *,
            gradient_checkpointing: ScanCheckpointSpec = False,
            prevent_cse: bool | None = None,
            divisible_by: int = 1,
        ) -> ModuleInit[BlockSeq[L]]: ...

    @classmethod
    def _make(
        cls, Block: Axis, policy: ScanCheckpointPolicy, padding: int, make: Callable[..., Any], args: Any, kwargs: Any
    ) -> Self:
        each = _layer_arguments.unstack(f"{cls.__name__}.init", Block, args, kwargs)
        return cls([make(*own_args, **own_kwargs) for own_args, own_kwargs in each], Block, policy)

    def _looped(self, what: str, fn: Callable[..., Any], unroll: int | bool | None) -> Callable[..., Any]:
        def step(carry: Any, call: tuple[Any, Any, Any]) -> tuple[Any, Any]:
            block, args, kwargs = call
            result = fn(block, carry, *args, **kwargs)
            if what == "fold":
                return result, None
            if not isinstance(result, tuple) or len(result) != 2:
                raise ValueError(
                    "BlockSeq.scan: a layer must return a pair, the next carry and an output (None for nothing), not "
                    f"a {type(result).__name__}. Use `fold` for layers that return the carry alone."
                )
            return result

        def looped(init: Any, *args: Any, **kwargs: Any) -> Any:
            calls = self._calls(what, args, _layer_arguments.split_key(self.Block, kwargs))
            label = f"{what}({self.Block.name})"
            final, outputs = checkpointed_steps(self.gradient_checkpointing, label, step, init, calls)
            if what == "fold":
                return final
            return final, _layer_arguments.stack_results("BlockSeq.scan", self.Block, outputs, numbers=True)

        return looped

    def _scheduled(
        self, schedule: Schedule, fn: Callable[..., Any], unroll: Any, then: Any, then_args: Sequence[Any]
    ) -> Callable[..., Any]:
        raise TypeError(
            "BlockSeq.fold: layers in a sequence cannot be stages of a pipeline, since they can differ. Use `Stacked`."
        )

    def _vmapped(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        results = [fn(block, *own, **own_kwargs) for block, own, own_kwargs in self._calls("vmap", args, kwargs)]
        return _layer_arguments.stack_results("BlockSeq.vmap", self.Block, results, numbers=False)

    def _calls(self, what: str, args: Any, kwargs: Any) -> list[tuple[Any, Any, Any]]:
        """Return each layer with its arguments."""
        each = _layer_arguments.unstack(f"BlockSeq.{what}", self.Block, args, kwargs)
        return [(block, *own) for block, own in zip(self.blocks, each, strict=True)]

    def unstacked(self) -> Sequence[M]:
        return self.blocks

    def _state_dict_key_map(self) -> KeyMap:
        return {"blocks": None}

    def get_layer(self, index: int) -> M:
        return self.blocks[_layer_arguments.check_index("BlockSeq.get_layer", self.Block, index)]
