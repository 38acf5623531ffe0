"""The methods of repeated layers, and the types of the functions that they take: see `axonym.nn.scan`."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, overload

import equinox as eqx

from ..axis import Axis
from ..schedules.pipeline_schedules import Schedule
from ..state.module import ModuleWithStateDictSerialization
from ..transforms.rematerialization import ScanCheckpointPolicy, ScanCheckpointSpec, policy_of
from . import _layer_arguments

L = TypeVar("L", bound=eqx.Module)
M = TypeVar("M", bound=eqx.Module)
M_co = TypeVar("M_co", bound=eqx.Module, covariant=True)
M_contra = TypeVar("M_contra", bound=eqx.Module, contravariant=True)
CarryT = TypeVar("CarryT")
OutputT_co = TypeVar("OutputT_co", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="BlockFoldable[Any]")


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

        >>> Layers, Embed = axn.make_axes(layers=3, embed=2)
        >>> axn.nn.Stacked.init(Layers, axn.nn.LayerNorm)(Embed).Layers
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
            Block: the axis of the layers.
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
            *args: more arguments of the layers.
            unroll: the number of layers in one iteration of the loop, True for all; None is one. A `BlockSeq` has no
                loop.
            schedule: the order of work if the axis of the layers is sharded, `axonym.schedules.GPipe` or `OneFOneB`.
                A `BlockSeq` takes none.
            then: a function of the result and `then_args` that returns the loss, a number, which `fold` returns. With
                `OneFOneB`, it is traced once and run on one microbatch at a time, so it must be a sum or a mean over
                examples. What needs more of the batch is an error with the line of your code.
            then_args: the arguments of `then`, such as labels and the layers of the head.
            **kwargs: more arguments of the layers, by keyword.

        >>> Layers, Embed = axn.make_axes(layers=3, embed=2)
        >>> layers = axn.nn.Stacked.init(Layers, axn.nn.Linear)(Embed, Embed, key=jax.random.key(0))
        >>> layers.fold(axn.ones(Embed)).shape
        {'embed': 2}
        """
        options: Any = {"unroll": unroll, "schedule": schedule, "then": then, "then_args": then_args}
        return self.fold_via(_call, **options)(init, *args, **kwargs)

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
        return self.scan_via(_call, unroll=unroll)(init, *args, **kwargs)

    def vmap(self, *args: Any, **kwargs: Any) -> Any:
        """Apply every layer to the same arguments, and stack the results.

        >>> Layers, Embed = axn.make_axes(layers=3, embed=2)
        >>> layers = axn.nn.Stacked.init(Layers, axn.nn.Linear)(Embed, Embed, key=jax.random.key(0))
        >>> layers.vmap(axn.ones(Embed)).shape
        {'layers': 3, 'embed': 2}
        """
        return self.vmap_via(_call)(*args, **kwargs)

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

        Arguments:
            fn: the function, from a layer, a carry and further arguments to the next carry.
            unroll, schedule, then, then_args: see `fold`.

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

        Arguments:
            fn: the function, from a layer, a carry and further arguments to the next carry and an output.
            unroll: see `fold`.

        >>> Layers, Embed = axn.make_axes(layers=3, embed=2)
        >>> layers = axn.nn.Stacked.init(Layers, axn.nn.Linear)(Embed, Embed, key=jax.random.key(0))
        >>> layers.scan_via(lambda layer, x: (layer(x), x.mean()))(axn.ones(Embed))[1].shape
        {'layers': 3}
        """
        return self._looped("scan", fn, unroll)

    def vmap_via(self, fn: VmapFunction[M, P, OutputT_co]) -> Callable[P, OutputT_co]:
        """Return a function that does what `vmap` does, with a function of a layer in place of the layer's call.

        Arguments:
            fn: the function, from a layer and further arguments to an output.

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

    @abc.abstractmethod
    def _scheduled(
        self, schedule: Schedule, fn: Callable[..., Any], unroll: Any, then: Any, then_args: Sequence[Any]
    ) -> Callable[..., Any]: ...

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


def _call(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return layer(*args, **kwargs)
