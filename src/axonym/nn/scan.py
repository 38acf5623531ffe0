"""Repeated layers: `Stacked` stacks their arrays and scans over them, `BlockSeq` keeps them in a sequence.

A block is any Equinox module with an `init` that makes a block and a `__call__` from a carry to the next carry. Both
kinds have the same methods, make the same layers from the same keys, and give the same results and gradients.

The methods slice their arguments other than the carry for each layer: named arrays with the layer axis are sliced along
that axis, and raw arrays along their first axis. Every layer gets the same scalars and other values. A single random
key that is passed as `key`, also to `init`, is split into one for each layer.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, overload

import equinox as eqx
import jax
import jax.numpy as jnp

from ..axis import Axis
from ..core import errors
from ..named_array import is_named_array, wrap
from ..schedules._pipeline import fold_in_stages
from ..schedules.pipeline_schedules import Schedule
from ..state.loading import lazy_loading, stacked_from_state_dict
from ..state.module import ModuleWithStateDictSerialization
from ..state.naming import KeyMap, StateDict
from ..state.saving import stacked_to_state_dict
from ..transforms import scan as loops
from ..transforms.rematerialization import ScanCheckpointPolicy, ScanCheckpointSpec, checkpointed_steps, policy_of
from ..transforms.stacked_leaves import layer_of
from ..transforms.vmap import vmap
from ..tree import LayerStack
from . import _layer_arguments

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


L = TypeVar("L", bound=eqx.Module)
M = TypeVar("M", bound=eqx.Module)
M_co = TypeVar("M_co", bound=eqx.Module, covariant=True)
M_contra = TypeVar("M_contra", bound=eqx.Module, contravariant=True)
CarryT = TypeVar("CarryT")
OutputT_co = TypeVar("OutputT_co", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")


class ModuleInit(Protocol[M_co]):
    """The type of the function that `Stacked.init` returns, which makes a module.

    >>> init: axn.nn.scan.ModuleInit = axn.nn.Stacked.init(axn.Axis("layers", 3), axn.nn.LayerNorm)
    >>> init({"embed": 2}).Block
    Axis(name='layers', size=3)
    """

    def __call__(self, *args: Any, **kwargs: Any) -> M_co: ...


class FoldFunction(Protocol[M_contra, P, CarryT]):
    """The type of the function that `fold_via` takes: from a layer and a carry to the next carry.

    >>> def residual(layer: axn.nn.LayerNorm, x: axn.NamedArray) -> axn.NamedArray:
    ...     return x + layer(x)
    >>> fn: axn.nn.scan.FoldFunction = residual
    """

    def __call__(self, module: M_contra, carry: CarryT, /, *args: P.args, **kwargs: P.kwargs) -> CarryT: ...


class ScanFunction(Protocol[M_contra, CarryT, P, OutputT_co]):
    """The type of the function that `scan_via` takes: from a layer and a carry to the next carry and an output.

    >>> def with_mean(layer: axn.nn.LayerNorm, x: axn.NamedArray) -> tuple[axn.NamedArray, axn.NamedArray]:
    ...     return layer(x), x.mean()
    >>> fn: axn.nn.scan.ScanFunction = with_mean
    """

    def __call__(
        self, module: M_contra, carry: CarryT, /, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[CarryT, OutputT_co]: ...


class VmapFunction(Protocol[M_contra, P, OutputT_co]):
    """The type of the function that `vmap_via` takes: from a layer to an output.

    >>> def size(layer: axn.nn.Linear) -> axn.NamedArray:
    ...     return abs(layer.weight).max()
    >>> fn: axn.nn.scan.VmapFunction = size
    """

    def __call__(self, module: M_contra, /, *args: P.args, **kwargs: P.kwargs) -> OutputT_co: ...


class BlockFoldable(ModuleWithStateDictSerialization, Generic[M]):
    """A sequence of layers: the base class of `Stacked` and `BlockSeq`, for code that takes either.

    >>> def apply(layers: axn.nn.scan.BlockFoldable[axn.nn.Linear], x: axn.NamedArray) -> axn.NamedArray:
    ...     return layers.fold(x)
    >>> Layers, Embed = axn.make_axes(layers=3, embed=2)
    >>> for kind in (axn.nn.Stacked, axn.nn.BlockSeq):
    ...     layers = kind.init(Layers, axn.nn.Linear)(Embed, Embed, key=jax.random.key(0))
    ...     print(apply(layers, axn.ones(Embed)).shape)
    {'embed': 2}
    {'embed': 2}
    """

    if TYPE_CHECKING:  # subclasses declare it as a field, after another one

        @property
        def Block(self) -> Axis: ...

    @property
    def Layers(self) -> Axis:
        """Return the axis of the layers: another name for `Block`.

        >>> axn.nn.Stacked.init(axn.Axis("layers", 3), axn.nn.LayerNorm)({"embed": 2}).Layers
        Axis(name='layers', size=3)
        """
        return self.Block

    @classmethod
    def init(
        cls,
        Block: Axis,
        module: type[M],
        *,
        gradient_checkpointing: ScanCheckpointSpec = False,
        prevent_cse: bool | None = None,
        divisible_by: int = 1,
    ) -> ModuleInit[Self]:
        """Return a function that makes all layers from the arguments of the layers' `init`.

        Arguments:
            module: the class of the layers. Each layer's `init` gets its own random key, and its own slice of arguments
                that have the layer axis.
            gradient_checkpointing: the values saved for the backward pass: a `ScanCheckpointPolicy`, or a shorthand for
                one. True recomputes each layer from its carry; False saves everything.
            prevent_cse: overrides the policy's field of that name.
            divisible_by: the number of stages of a pipeline, times its rounds, if it does not divide the number of
                layers. A `Stacked` then has added layers, which are zeros and are skipped; a `BlockSeq` has none.

        >>> Layers, Embed = axn.make_axes(layers=3, embed=2)
        >>> layers = axn.nn.Stacked.init(Layers, axn.nn.LayerNorm, gradient_checkpointing=True)(Embed)
        >>> layers.stacked.weight.shape
        {'layers': 3, 'embed': 2}
        """
        if not isinstance(Block, Axis):
            raise TypeError(f"{cls.__name__}.init: the axis of the layers must be an Axis with a size, got {Block!r}.")
        make = getattr(module, "init", None)
        if not callable(make):
            raise TypeError(
                f"{cls.__name__}.init: {getattr(module, '__name__', module)!r} has no `init` that makes a layer."
            )
        if divisible_by < 1:
            raise ValueError(
                f"{cls.__name__}.init: `divisible_by` is a number of layers, at least 1; got {divisible_by}."
            )
        policy = policy_of(gradient_checkpointing)
        if prevent_cse is not None:
            policy = dataclasses.replace(policy, prevent_cse=prevent_cse)

        def of_all(*args: Any, **kwargs: Any) -> Self:
            return cls._make(
                Block, policy, -Block.size % divisible_by, make, args, _layer_arguments.split_key(Block, kwargs)
            )

        return functools.update_wrapper(of_all, make, updated=())

    @classmethod
    @abc.abstractmethod
    def _make(
        cls, Block: Axis, policy: ScanCheckpointPolicy, padding: int, make: Callable[..., Any], args: Any, kwargs: Any
    ) -> Self: ...

    @overload
    def fold(
        self,
        init: CarryT,
        *args: Any,
        unroll: int | bool | None = None,
        schedule: Schedule | None = None,
        then: None = None,
        **kwargs: Any,
    ) -> CarryT: ...
    @overload
    def fold(
        self,
        init: Any,
        *args: Any,
        unroll: int | bool | None = None,
        schedule: Schedule | None = None,
        then: Callable[..., R],
        then_args: Sequence[Any] = (),
        **kwargs: Any,
    ) -> R: ...
    def fold(
        self,
        init: Any,
        *args: Any,
        unroll: int | bool | None = None,
        schedule: Schedule | None = None,
        then: Callable[..., Any] | None = None,
        then_args: Sequence[Any] = (),
        **kwargs: Any,
    ) -> Any:
        """Apply the layers in turn, each to the result of the previous layer.

        Arguments:
            init: the input of the first layer.
            unroll: the number of layers in one iteration of the loop, True for all; None is one. A `BlockSeq` has no
                loop.
            schedule: the order of work if the axis of the layers is sharded, `axonym.schedules.GPipe` or `OneFOneB`.
                A `BlockSeq` takes none.
            then: a function of the result and `then_args` that returns the loss, a number, which `fold` returns. With
                `OneFOneB`, it is traced once and run on one microbatch at a time, so it must be a sum or a mean over
                examples. What needs more of the batch is an error with the line of your code.
            then_args: the arguments of `then`, such as labels and the layers of the head.
            *args, **kwargs: more arguments of the layers.

        >>> Layers, Embed = axn.make_axes(layers=3, embed=2)
        >>> layers = axn.nn.Stacked.init(Layers, axn.nn.Linear)(Embed, Embed, key=jax.random.key(0))
        >>> layers.fold(axn.ones(Embed)).shape
        {'embed': 2}
        """
        options: Any = {"unroll": unroll, "schedule": schedule, "then": then, "then_args": then_args}
        return self.fold_via(_call_layer, **options)(init, *args, **kwargs)

    def scan(self, init: CarryT, *args: Any, unroll: int | bool | None = None, **kwargs: Any) -> tuple[CarryT, Any]:
        """Apply the layers in turn as `fold` does, each returning the next carry and an output; stack the outputs.

        The arguments are as in `fold`.

        >>> import equinox as eqx
        >>> class Double(eqx.Module):
        ...     @staticmethod
        ...     def init():
        ...         return Double()
        ...     def __call__(self, x):
        ...         return 2 * x, x
        >>> axn.nn.BlockSeq.init(axn.Axis("layers", 3), Double)().scan(axn.ones({"embed": 2}))[1].shape
        {'layers': 3, 'embed': 2}
        """
        return self.scan_via(_call_layer, unroll=unroll)(init, *args, **kwargs)

    def vmap(self, *args: Any, **kwargs: Any) -> Any:
        """Apply every layer to the same arguments, and stack the results.

        >>> Layers, Embed = axn.make_axes(layers=3, embed=2)
        >>> layers = axn.nn.Stacked.init(Layers, axn.nn.Linear)(Embed, Embed, key=jax.random.key(0))
        >>> layers.vmap(axn.ones(Embed)).shape
        {'layers': 3, 'embed': 2}
        """
        return self.vmap_via(_call_layer)(*args, **kwargs)

    @overload
    def fold_via(
        self,
        fn: FoldFunction[M, P, CarryT],
        *,
        unroll: int | bool | None = None,
        schedule: Schedule | None = None,
        then: None = None,
    ) -> Callable[Concatenate[CarryT, P], CarryT]: ...
    @overload
    def fold_via(
        self,
        fn: FoldFunction[M, P, CarryT],
        *,
        unroll: int | bool | None = None,
        schedule: Schedule | None = None,
        then: Callable[..., R],
        then_args: Sequence[Any] = (),
    ) -> Callable[Concatenate[CarryT, P], R]: ...
    def fold_via(
        self,
        fn: Any,
        *,
        unroll: int | bool | None = None,
        schedule: Schedule | None = None,
        then: Callable[..., Any] | None = None,
        then_args: Sequence[Any] = (),
    ) -> Any:
        """Return a function that does what `fold` does, with a function of a layer in place of the layer's call.

        The other arguments are as in `fold`.

        >>> Layers, Embed = axn.make_axes(layers=3, embed=2)
        >>> layers = axn.nn.Stacked.init(Layers, axn.nn.Linear)(Embed, Embed, key=jax.random.key(0))
        >>> layers.fold_via(lambda layer, x: x + layer(x))(axn.ones(Embed)).shape
        {'embed': 2}
        """
        if schedule is not None:
            return self._scheduled(schedule, fn, unroll, then, then_args)
        looped = self._looped("fold", fn, unroll)
        if then is None:
            return looped
        return lambda init, *args, **kwargs: then(looped(init, *args, **kwargs), *then_args)

    def scan_via(
        self, fn: ScanFunction[M, CarryT, P, OutputT_co], *, unroll: int | bool | None = None
    ) -> Callable[Concatenate[CarryT, P], tuple[CarryT, OutputT_co]]:
        """Return a function that does what `scan` does, with a function of a layer in place of the layer's call.

        >>> Layers, Embed = axn.make_axes(layers=3, embed=2)
        >>> layers = axn.nn.Stacked.init(Layers, axn.nn.Linear)(Embed, Embed, key=jax.random.key(0))
        >>> layers.scan_via(lambda layer, x: (layer(x), x.mean()))(axn.ones(Embed))[1].shape
        {'layers': 3}
        """
        return self._looped("scan", fn, unroll)

    def vmap_via(self, fn: VmapFunction[M, P, OutputT_co]) -> Callable[P, OutputT_co]:
        """Return a function that does what `vmap` does, with a function of a layer in place of the layer's call.

        >>> Layers, Embed = axn.make_axes(layers=3, embed=2)
        >>> layers = axn.nn.Stacked.init(Layers, axn.nn.Linear)(Embed, Embed, key=jax.random.key(0))
        >>> layers.vmap_via(lambda layer: axn.max(abs(layer.weight)))().shape
        {'layers': 3}
        """

        def vmapped(*args: P.args, **kwargs: P.kwargs) -> OutputT_co:
            return self._vmapped(fn, args, _layer_arguments.split_key(self.Block, kwargs))

        return vmapped

    @abc.abstractmethod
    def _looped(self, what: str, fn: Callable[..., Any], unroll: int | bool | None) -> Callable[..., Any]: ...

    def _scheduled(
        self, schedule: Schedule, fn: Callable[..., Any], unroll: Any, then: Any, then_args: Sequence[Any]
    ) -> Callable[..., Any]:
        raise TypeError(
            "BlockSeq.fold: layers in a sequence cannot be stages of a pipeline, since they can differ. Use `Stacked`."
        )

    @abc.abstractmethod
    def _vmapped(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...

    @abc.abstractmethod
    def unstacked(self) -> Sequence[M]:
        """Return the layers one by one.

        >>> layers = axn.nn.Stacked.init(axn.Axis("layers", 3), axn.nn.LayerNorm)({"embed": 2})
        >>> [layer.weight.shape for layer in layers.unstacked()]
        [{'embed': 2}, {'embed': 2}, {'embed': 2}]
        """

    @abc.abstractmethod
    def get_layer(self, index: int) -> M:
        """Return one of the layers; a negative index counts from the end.

        >>> layers = axn.nn.Stacked.init(axn.Axis("layers", 3), axn.nn.LayerNorm)({"embed": 2})
        >>> layers.get_layer(-1).weight
        NamedArray(float32[embed=2], [1. 1.])
        """


# --- stacked ---


class Stacked(BlockFoldable[M], LayerStack):
    """Layers of one kind in one module, whose arrays have the layer axis.

    Arguments:
        stacked: the stacked layers. Named arrays have the axis `Block`, raw arrays have it first; named arrays without
            it are shared by all layers.
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

    _at_once: ClassVar[bool] = False
    """True if the state-dict methods of one layer are called once, with the arrays of all layers."""

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
        args, kwargs = _layer_arguments.with_added(Block, padding, (args, kwargs))
        kwargs = _layer_arguments.shard_keys(what, stored, kwargs)
        stacked = vmap(make, stored, default=_layer_arguments.first_axis)(*args, **kwargs)
        return cls(_layer_arguments.zeroed(Block, padding, stacked), Block, policy, padding)

    @property
    def _stored(self) -> Axis:
        """Return the axis of the layers with the added ones."""
        return self.Block.resize(self.Block.size + self.padding)

    def _skipping(
        self, what: str, fn: Callable[..., Any], run: Callable[..., Callable[..., Any]]
    ) -> Callable[..., Any]:
        """Return a function that runs all layers, and does not use the results of the added ones.

        From a `Stacked` that counts them as real and a function of a layer, `run` returns the function that runs them.
        """
        body = _layer_arguments.skipping(fn, self.Block, self.stacked, outputs=what == "scan")

        def run_all(init: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs = _layer_arguments.split_key(self.Block, kwargs)
            all_args, all_kwargs = _layer_arguments.with_added(self.Block, self.padding, (args, kwargs))
            layers = dataclasses.replace(self, stacked=self._filled(), Block=self._stored, padding=0)
            is_real = wrap(jnp.arange(self._stored.size) < self.Block.size, (self.Block.name,))
            result = run(layers, body)(init, *all_args, is_real=is_real, **all_kwargs)
            if what == "fold":
                return result
            return result[0], _layer_arguments.without_added(self.Block, self.padding, result[1], (args, kwargs))

        return run_all

    def _filled(self) -> M:
        return _layer_arguments.filled(self.Block, self.padding, self.stacked)

    def _looped(self, what: str, fn: Callable[..., Any], unroll: int | bool | None) -> Callable[..., Any]:
        if self.padding:
            return self._skipping(what, fn, lambda layers, body: layers._looped(what, body, unroll))
        transform = loops.fold if what == "fold" else loops.scan
        body = functools.partial(_apply_to_layer, fn)
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

        without_arrays: Any = dataclasses.replace(self, stacked=None)  # JAX keeps functions for the backward pass

        def of_some(stacked: M, Layers: Axis, carry: Any, *args: Any, **kwargs: Any) -> Any:
            layers = dataclasses.replace(without_arrays, stacked=stacked, Block=Layers)
            return layers._looped("fold", fn, unroll)(carry, *args, **kwargs)

        def scheduled(init: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs = _layer_arguments.split_key(self.Block, kwargs)
            _layer_arguments.check_sizes("Stacked.fold", self.Block, args, kwargs)
            return fold_in_stages(
                schedule, "Stacked.fold", self.Block, of_some, self.stacked, init, args, kwargs, then, then_args
            )

        return scheduled

    def _vmapped(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = args, kwargs
        args, kwargs = _layer_arguments.with_added(self.Block, self.padding, given)
        _layer_arguments.check_sizes("Stacked.vmap", self._stored, args, kwargs)
        mapped = vmap(functools.partial(_apply_to_layer, fn), self._stored, default=_layer_arguments.first_axis)
        results = mapped(*args, stacked=self._filled(), **kwargs)
        return _layer_arguments.without_added(self.Block, self.padding, results, given)

    def map_layers(self, fn: Callable[..., Any], *others: Any) -> Self:
        mapped = vmap(fn, self._stored, default=_layer_arguments.first_axis)(*(o._filled() for o in (self, *others)))
        return dataclasses.replace(self, stacked=_layer_arguments.zeroed(self.Block, self.padding, mapped))

    def added_layers(self) -> tuple[Axis, int] | None:
        return (self.Block, self.padding) if self.padding else None

    def unstacked(self) -> Sequence[M]:
        each = _layer_arguments.unstack("Stacked.unstacked", self._stored, (), {"stacked": self.stacked})
        return tuple(kwargs["stacked"] for _, kwargs in each[: self.Block.size])

    def get_layer(self, index: int) -> M:
        i = _layer_arguments.check_index("Stacked.get_layer", self.Block, index)
        if self.padding and not isinstance(i, int):  # JAX clips it, and counts it from the end, with the added layers
            i = jnp.clip(jnp.where(i < 0, i + self.Block.size, i), 0, self.Block.size - 1)
        return jax.tree.map(lambda x: layer_of(x, self.Block.name, i), self.stacked, is_leaf=is_named_array)

    # In a state dict, every layer has its own entries, as in a `BlockSeq` and in PyTorch models.

    def to_state_dict(self, prefix: str | None = None) -> StateDict:
        return stacked_to_state_dict(self.stacked, self.Block, prefix, at_once=self._at_once and not self.padding)

    @lazy_loading
    def from_state_dict(self, state_dict: Mapping[str, Any], prefix: str | None = None) -> Self:
        stacked = stacked_from_state_dict(
            self.stacked, self.Block, state_dict, prefix, padding=self.padding, at_once=self._at_once
        )
        return dataclasses.replace(self, stacked=stacked)


def _call_layer(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return layer(*args, **kwargs)


def _apply_to_layer(fn: Callable[..., Any], *args: Any, stacked: Any, **kwargs: Any) -> Any:
    """Apply a function of a layer, which is a keyword argument so that messages show the positions of the others."""
    return fn(stacked, *args, **kwargs)


# --- in sequence ---


class BlockSeq(BlockFoldable[M]):
    """Layers in a sequence, which can differ from each other.

    Every layer is compiled separately, so a deep model takes long to compile; `Stacked` compiles one layer.

    Arguments:
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
