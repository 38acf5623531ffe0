"""State that is carried from step to step in place of its gradient.

A quantised product keeps a record of the values it sees. It has nowhere to return it: what is returned is the product.
So the record goes out the way gradients do: the "gradient" of a module that derives from `OverwriteWithGradient` is its
value for the next step. A training step sets these apart, and puts them in the place of the old ones:

```python
grads = eqx.filter_grad(loss)(model)
overwrites, grads = partition_for_grad_overwrite(grads)
updates, state = optimizer.update(grads, state)
model = apply_updates(model, updates, overwrites)
```

Gradients of one array that is used twice are added up. So such a module belongs to one product in a step: a layer that
is called twice, mapped over by `jax.vmap` with the layer whole, or whose gradients are accumulated over several batches
gets sums in its record, and scales that are too large.
"""

from __future__ import annotations

from typing import Any, TypeVar

import equinox as eqx
import jax

__all__ = ["OverwriteWithGradient", "T", "apply_updates", "partition_for_grad_overwrite"]

T = TypeVar("T")


class OverwriteWithGradient(eqx.Module):
    """A module whose gradient is its value for the next step.

    >>> isinstance(axn.quantization.Fp8DotGeneralOp.init(), axn.quantization.OverwriteWithGradient)
    True
    """


def _overwrites(x: Any) -> bool:
    return isinstance(x, OverwriteWithGradient)


def _stops(x: Any) -> bool:
    return x is None or _overwrites(x)


def partition_for_grad_overwrite(grad: T) -> tuple[T, T]:
    """The gradients that are new values, and the others; each with None in the place of the other.

    Arguments:
        grad: the gradients of a model.

    >>> op = axn.quantization.Fp8DotGeneralOp.init(amax_history_length=2)
    >>> overwrites, grads = axn.quantization.partition_for_grad_overwrite({"op": op, "w": axn.ones({"x": 2})})
    >>> grads
    {'op': None, 'w': NamedArray(float32[x=2], [1. 1.])}
    """
    overwrites = jax.tree.map(lambda x: x if _overwrites(x) else None, grad, is_leaf=_overwrites)
    others = jax.tree.map(lambda x: None if _overwrites(x) else x, grad, is_leaf=_overwrites)
    return overwrites, others


def apply_updates(tree: T, updates: Any, overwrites: Any) -> T:
    """A model with updates added to its arrays, and new values in place of those that are overwritten.

    Arguments:
        tree: the model.
        updates: what to add, in the structure of the model; None where there is nothing to add.
        overwrites: the new values, as `partition_for_grad_overwrite` gives them.

    >>> model = {"w": axn.ones({"x": 2})}
    >>> axn.quantization.apply_updates(model, {"w": axn.ones({"x": 2})}, {"w": None})
    {'w': NamedArray(float32[x=2], [2. 2.])}
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=_stops)
    sides = []
    for name, side in (("updates", updates), ("overwrites", overwrites)):
        found, other = jax.tree.flatten(side, is_leaf=_stops)
        if len(found) != len(leaves):
            raise ValueError(
                f"apply_updates: `{name}` has {len(found)} leaves, the model {len(leaves)}: {other} and {structure}."
            )
        sides.append(found)
    return jax.tree.unflatten(structure, [_applied(*each) for each in zip(leaves, *sides, strict=True)])


def _applied(x: Any, update: Any, overwrite: Any) -> Any:
    if overwrite is not None:
        return overwrite
    return x if update is None else (x + update).astype(x.dtype)
