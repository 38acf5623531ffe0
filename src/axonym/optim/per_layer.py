"""Apply an Optax transformation to each layer of a stack by itself, and find out whether that makes a difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..axis import AxisSelector, name_of
from ..core import errors
from ..distribution.mesh_axes import entries_of, mesh_around, reshard
from ..named_array import NamedArray, is_named_array, wrap
from ..ops.creation import arange
from ..sharding.leaves import leaves_of, parent_nodes
from ..transforms._mapped_axis import spmd_axes
from .roles import axes_of_stacks, with_values

if TYPE_CHECKING:
    import optax


def per_layer(tx: optax.GradientTransformation, axis: AxisSelector) -> optax.GradientTransformation:
    """Make a transformation that sees each layer of a stack by itself, and all other parameters as they are.

    Many transformations compute something of a whole array, such as its norm (`optax.lars`, `optax.lamb`) or means
    along its axes (`optax.adafactor`), so that layers of a stack would depend on each other.

    >>> import optax
    >>> tx = axn.optim.per_layer(optax.lars(1e-2), "layers")
    >>> layers = {"weight": axn.ones({"layers": 2, "embed": 4}), "scale": axn.ones({"embed": 4})}
    >>> updates, state = tx.update(layers, tx.init(layers), layers)
    >>> updates["weight"].shape
    {'layers': 2, 'embed': 4}
    """
    import optax

    name = name_of(axis)

    def labels(params: Any) -> Any:
        names = [leaf.names or () for leaf in leaves_of(params)[0]]
        if not any(name in own for own in names):
            raise ValueError(errors.missing_axes("optim.per_layer", [name], sorted({n for own in names for n in own})))
        return with_values(params, ["layers" if name in own else "others" for own in names])

    def init(params: Any) -> Any:
        return mapped(tx.init, params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new, state = mapped(tx.update, updates, state, params)

        def ordered(old: Any, x: Any) -> Any:
            return x if is_masked(old) else x.rearrange(old.names)

        return jax.tree.map(ordered, updates, new, is_leaf=is_named_array), state

    def mapped(fn: Callable[..., Any], *trees: Any) -> Any:
        """Call a function for each layer. Its results have the axis of layers in front.

        Not by `axonym.vmap`: states, such as Adafactor's, have arrays of other ranks under the names of a parameter.
        """

        def without_axis(x: Any) -> Any:
            if not isinstance(x, NamedArray):
                return x
            array = x.array if is_masked(x) else jnp.moveaxis(x.array, x.names.index(name), 0)
            return wrap(array, tuple(n for n in x.names if n != name))

        def placed(x: jax.Array) -> jax.Array:
            # On Explicit mesh axes, JAX maps over arrays that are sharded alike; a count of steps has no sharding yet.
            return x if over is None else reshard(x, (over, *entries_of(x)[1:]), mesh_around(arrays))

        def with_axis(x: Any) -> Any:
            return wrap(x.array, (name, *x.names)) if isinstance(x, NamedArray) and not is_masked(x) else x

        layers = jax.tree.map(without_axis, trees, is_leaf=is_named_array)
        arrays = jax.tree.leaves(layers)
        over = next(filter(None, (entries_of(x)[0] for x in arrays)), None)
        spmd = spmd_axes("optim.per_layer", name, arrays[0].shape[0])
        results = jax.vmap(fn, spmd_axis_name=spmd)(*jax.tree.map(placed, layers))
        return jax.tree.map(with_axis, jax.tree.map(placed, results), is_leaf=is_named_array)

    def is_masked(x: Any) -> bool:
        """Return whether Optax has taken the array out of a named array."""
        return isinstance(x, NamedArray) and not jax.tree.leaves(x.array)

    return optax.partition({"layers": optax.GradientTransformation(init, update), "others": tx}, labels)


def check(tx: optax.GradientTransformation, params: Any, *, seed: int = 0) -> dict[str, float]:
    """Return the stacked parameters whose update depends on other layers: the largest relative difference, by path.

    The second updates by random gradients are compared with those of `per_layer`. An optimizer that sees each element
    by itself, such as `optax.adamw`, gives an empty dictionary.

    >>> import optax
    >>> layers = axn.nn.Stacked.init(axn.Axis("layers", 2), axn.nn.Linear)(
    ...     axn.Axis("embed", 4), axn.Axis("mlp", 8), key=jax.random.key(0))
    >>> axn.optim.check(optax.adamw(1e-3), layers)
    {}
    >>> list(axn.optim.check(optax.lars(1e-2), layers))
    ['stacked/weight']
    """
    leaves, structure = leaves_of(params)
    random = np.random.default_rng(seed)
    drawn = [jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), leaf.value) for leaf in leaves]
    found: dict[str, float] = {}
    for axis in axes_of_stacks([node for leaf in leaves for node in parent_nodes(leaf.keys, params)]):
        # Layers of unlike sizes show more.
        sizes = [x.resolve_axis(axis) if isinstance(x, NamedArray) and axis in x.names else None for x in drawn]
        grown = [x if n is None else x * arange(n, start=1, dtype=x.dtype) for x, n in zip(drawn, sizes, strict=True)]
        gradients = jax.tree.unflatten(structure, grown)
        results = []
        for each in (tx, per_layer(tx, axis)):
            _, state = each.update(gradients, each.init(params), params)
            results.append(leaves_of(each.update(gradients, state, params)[0])[0])
        for leaf, whole, alone in zip(leaves, *results, strict=True):
            if leaf.shape is not None and axis in (leaf.names or ()):
                a, b = (np.asarray(x.value.array, np.float64) for x in (whole, alone))
                difference = float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), np.finfo(np.float32).tiny))
                if difference > 1e-4:
                    found[leaf.path] = max(difference, found.get(leaf.path, 0.0))
    return found
