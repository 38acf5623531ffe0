"""What models of many layers have in common, and the types of the functions that they take."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

import equinox as eqx

from ..axis import Axis
from ..state.module import ModuleWithStateDictSerialization
from ..transforms.checkpointing import ScanCheckpointPolicy, ScanCheckpointSpec, policy_of
from . import _layer_arguments

M = TypeVar("M", bound=eqx.Module)
M_co = TypeVar("M_co", bound=eqx.Module, covariant=True)
M_contra = TypeVar("M_contra", bound=eqx.Module, contravariant=True)
CarryT = TypeVar("CarryT")
OutputT_co = TypeVar("OutputT_co", covariant=True)
P = ParamSpec("P")
S = TypeVar("S", bound="BlockFoldable[Any]")


class ModuleInit(Protocol[M_co]):
    """What makes a module: the type of what `Stacked.init` returns.

    >>> init: axn.nn.scan.ModuleInit = axn.nn.Stacked.init(axn.Axis("layers", 3), axn.nn.LayerNorm)
    >>> init({"embed": 2}).Block
    Axis(name='layers', size=3)
    """

    def __call__(self, *args: Any, **kwargs: Any) -> M_co: ...


class FoldFunction(Protocol[M_contra, P, CarryT]):
    """What `fold_via` takes: from a layer and a carry to the next carry.

    >>> def residual(layer: axn.nn.LayerNorm, x: axn.NamedArray) -> axn.NamedArray:
    ...     return x + layer(x)
    >>> fn: axn.nn.scan.FoldFunction = residual
    """

    def __call__(self, module: M_contra, carry: CarryT, /, *args: P.args, **kwargs: P.kwargs) -> CarryT: ...


class ScanFunction(Protocol[M_contra, CarryT, P, OutputT_co]):
    """What `scan_via` takes: from a layer and a carry to the next carry and an output.

    >>> def with_mean(layer: axn.nn.LayerNorm, x: axn.NamedArray) -> tuple[axn.NamedArray, axn.NamedArray]:
    ...     return layer(x), x.mean()
    >>> fn: axn.nn.scan.ScanFunction = with_mean
    """

    def __call__(
        self, module: M_contra, carry: CarryT, /, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[CarryT, OutputT_co]: ...


class VmapFunction(Protocol[M_contra, P, OutputT_co]):
    """What `vmap_via` takes: from a layer to an output.

    >>> def size(layer: axn.nn.Linear) -> axn.NamedArray:
    ...     return abs(layer.weight).max()
    >>> fn: axn.nn.scan.VmapFunction = size
    """

    def __call__(self, module: M_contra, /, *args: P.args, **kwargs: P.kwargs) -> OutputT_co: ...


class BlockFoldable(ModuleWithStateDictSerialization, Generic[M]):
    """Layers that are applied one after the other: what `Stacked` and `BlockSeq` have in common.

    It is the type for code that takes either of them.

    >>> def apply(layers: axn.nn.scan.BlockFoldable[axn.nn.Linear], x: axn.NamedArray) -> axn.NamedArray:
    ...     return layers.fold(x)
    >>> Layers, Embed = axn.make_axes(layers=3, embed=2)
    >>> for kind in (axn.nn.Stacked, axn.nn.BlockSeq):
    ...     layers = kind.init(Layers, axn.nn.Linear)(Embed, Embed, key=jax.random.key(0))
    ...     print(apply(layers, axn.ones(Embed)).shape)
    {'embed': 2}
    {'embed': 2}
    """

    if TYPE_CHECKING:  # a field of the subclasses, where it does not stand first

        @property
        def Block(self) -> Axis: ...

    @property
    def Layers(self) -> Axis:
        """The axis of the layers, `Block`, under another name.

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
    ) -> ModuleInit[Self]:
        """A function that takes the arguments of the layers' `init` and makes them all.

        Arguments:
            Block: the axis of the layers.
            module: the class of the layers. Its `init` is given the arguments, each layer its own part of those that
                have the axis, and its own random key.
            gradient_checkpointing: what is kept for the backward pass: a `ScanCheckpointPolicy`, or a word for one.
                True computes each layer again from its carry; False keeps everything.
            prevent_cse: the field of the policy of that name, if it is to be another.

        >>> Layers, Embed = axn.make_axes(layers=3, embed=2)
        >>> layers = axn.nn.Stacked.init(Layers, axn.nn.LayerNorm, gradient_checkpointing=True)(Embed)
        >>> layers.stacked.weight.shape
        {'layers': 3, 'embed': 2}
        """
        if not isinstance(Block, Axis):
            raise TypeError(f"{cls.__name__}.init: the layers are counted by an Axis with a size, got {Block!r}.")
        make = getattr(module, "init", None)
        if not callable(make):
            raise TypeError(
                f"{cls.__name__}.init: {getattr(module, '__name__', module)!r} has no `init` that makes a layer."
            )
        policy = policy_of(gradient_checkpointing)
        if prevent_cse is not None:
            policy = dataclasses.replace(policy, prevent_cse=prevent_cse)

        def of_all(*args: Any, **kwargs: Any) -> Self:
            return cls._make(Block, policy, make, args, _layer_arguments.with_keys(Block, kwargs))

        return functools.update_wrapper(of_all, make, updated=())

    @classmethod
    @abc.abstractmethod
    def _make(
        cls, Block: Axis, policy: ScanCheckpointPolicy, make: Callable[..., Any], args: Any, kwargs: Any
    ) -> Self: ...

    def fold(self, init: CarryT, *args: Any, unroll: int | bool | None = None, **kwargs: Any) -> CarryT:
        """Apply the layers one after the other, each to what the one before it returned.

        Arguments:
            init: what the first layer is applied to.
            *args: more arguments of the layers.
            unroll: how many layers to put into one turn of the loop, True for all; None is one. A `BlockSeq` has no
                loop.
            **kwargs: more arguments of the layers, by keyword.

        >>> Layers, Embed = axn.make_axes(layers=3, embed=2)
        >>> layers = axn.nn.Stacked.init(Layers, axn.nn.Linear)(Embed, Embed, key=jax.random.key(0))
        >>> layers.fold(axn.ones(Embed)).shape
        {'embed': 2}
        """
        return self.fold_via(_call, unroll=unroll)(init, *args, **kwargs)

    def scan(self, init: CarryT, *args: Any, unroll: int | bool | None = None, **kwargs: Any) -> tuple[CarryT, Any]:
        """`fold` for layers that return a pair: the next carry, and an output. The outputs are stacked.

        Arguments:
            init: what the first layer is applied to.
            *args: more arguments of the layers.
            unroll: see `fold`.
            **kwargs: more arguments of the layers, by keyword.

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
        """Apply every layer on its own to the same arguments, and stack the results.

        Arguments:
            *args: the arguments of the layers.
            **kwargs: those by keyword.

        >>> Layers, Embed = axn.make_axes(layers=3, embed=2)
        >>> layers = axn.nn.Stacked.init(Layers, axn.nn.Linear)(Embed, Embed, key=jax.random.key(0))
        >>> layers.vmap(axn.ones(Embed)).shape
        {'layers': 3, 'embed': 2}
        """
        return self.vmap_via(_call)(*args, **kwargs)

    def fold_via(
        self, fn: FoldFunction[M, P, CarryT], *, unroll: int | bool | None = None
    ) -> Callable[Concatenate[CarryT, P], CarryT]:
        """`fold` by a function of a layer instead of the layer's own call.

        Arguments:
            fn: the function, from a layer, a carry and further arguments to the next carry.
            unroll: see `fold`.

        >>> Layers, Embed = axn.make_axes(layers=3, embed=2)
        >>> layers = axn.nn.Stacked.init(Layers, axn.nn.Linear)(Embed, Embed, key=jax.random.key(0))
        >>> layers.fold_via(lambda layer, x: x + layer(x))(axn.ones(Embed)).shape
        {'embed': 2}
        """
        return self._looped("fold", fn, unroll)

    def scan_via(
        self, fn: ScanFunction[M, CarryT, P, OutputT_co], *, unroll: int | bool | None = None
    ) -> Callable[Concatenate[CarryT, P], tuple[CarryT, OutputT_co]]:
        """`scan` by a function of a layer instead of the layer's own call.

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
        """`vmap` by a function of a layer instead of the layer's own call.

        Arguments:
            fn: the function, from a layer and further arguments to an output.

        >>> Layers, Embed = axn.make_axes(layers=3, embed=2)
        >>> layers = axn.nn.Stacked.init(Layers, axn.nn.Linear)(Embed, Embed, key=jax.random.key(0))
        >>> layers.vmap_via(lambda layer: axn.max(abs(layer.weight)))().shape
        {'layers': 3}
        """

        def vmapped(*args: P.args, **kwargs: P.kwargs) -> OutputT_co:
            return self._vmapped(fn, args, _layer_arguments.with_keys(self.Block, kwargs))

        return vmapped

    @abc.abstractmethod
    def _looped(self, what: str, fn: Callable[..., Any], unroll: int | bool | None) -> Callable[..., Any]:
        """The layers in turn, as `fold` or `scan` does it."""

    @abc.abstractmethod
    def _vmapped(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a function makes of every layer."""

    @abc.abstractmethod
    def unstacked(self) -> Sequence[M]:
        """The layers, one by one.

        >>> layers = axn.nn.Stacked.init(axn.Axis("layers", 3), axn.nn.LayerNorm)({"embed": 2})
        >>> [layer.weight.shape for layer in layers.unstacked()]
        [{'embed': 2}, {'embed': 2}, {'embed': 2}]
        """

    @abc.abstractmethod
    def get_layer(self, index: int) -> M:
        """One of the layers.

        Arguments:
            index: which one; negative numbers count from the end.

        >>> layers = axn.nn.Stacked.init(axn.Axis("layers", 3), axn.nn.LayerNorm)({"embed": 2})
        >>> layers.get_layer(-1).weight
        NamedArray(float32[embed=2], [1. 1.])
        """


def _call(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return layer(*args, **kwargs)
