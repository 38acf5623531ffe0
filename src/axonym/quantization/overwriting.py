"""State that is updated through its gradient.

A quantized product keeps a record of the values it has seen, but can return only the product. So the updated record
travels as a gradient: the gradient of a module that derives from `OverwriteWithGradient` is its value for the next
step. A training step separates these from the other gradients, and overwrites the old values with them:

```python
grads = eqx.filter_grad(loss)(model)
overwrites, grads = partition_for_grad_overwrite(grads)
updates, state = optimizer.update(grads, state)
model = apply_updates(model, updates, overwrites)
```

JAX adds up the gradients of an array that is used several times. So use such a module for one product in a step. If a
layer is called twice, or called under a `jax.vmap` that does not map over the layer, its record becomes a sum, and its
scales too large. Gradients of several batches are added up by `accumulate_gradients`, which does not add records.
"""

from __future__ import annotations

from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from ..core import errors

__all__ = ["OverwriteWithGradient", "T", "accumulate_gradients", "apply_updates", "partition_for_grad_overwrite"]

T = TypeVar("T")


class OverwriteWithGradient(eqx.Module):
    """A module whose gradient is its value for the next step.

    >>> isinstance(axn.quantization.Fp8DotGeneralOp.init(), axn.quantization.OverwriteWithGradient)
    True
    """

    def accumulate(self, other: Any) -> Any:
        """Combine the gradients of two batches: the second one, unless a class overrides this.

        The first one may consist of zeros, before the first batch.

        >>> op = axn.quantization.Fp8DotGeneralOp.init(amax_history_length=2)
        >>> op.accumulate(op).input_amax_history
        Array([0., 0.], dtype=float32)
        """
        return other


def _is_overwrite(x: Any) -> bool:
    return isinstance(x, OverwriteWithGradient)


def _is_gradient(x: Any) -> bool:
    """Return whether a leaf is a float, or an array of numbers; the gradient of integers, of dtype float0, is not."""
    return isinstance(x, (float, complex)) or jnp.issubdtype(getattr(x, "dtype", bool), jnp.number)


def _is_update_leaf(x: Any) -> bool:
    return x is None or _is_overwrite(x)


def partition_for_grad_overwrite(grad: T) -> tuple[T, T]:
    """Split gradients into new values of `OverwriteWithGradient` modules and all others, each with None elsewhere.

    >>> op = axn.quantization.Fp8DotGeneralOp.init(amax_history_length=2)
    >>> overwrites, grads = axn.quantization.partition_for_grad_overwrite({"op": op, "w": axn.ones({"x": 2})})
    >>> grads
    {'op': None, 'w': NamedArray(float32[x=2], [1. 1.])}
    """
    return eqx.partition(grad, _is_overwrite, is_leaf=_is_overwrite)


def accumulate_gradients(accumulated: T, gradient: T) -> T:
    """Add the gradients of a batch to the gradients so far; `OverwriteWithGradient` modules say how they combine.

    Leaves that have no gradient stay as they are: None, integers whose gradient is of dtype float0, functions, strings.

    >>> grads = {"op": axn.quantization.Fp8DotGeneralOp.init(amax_history_length=2), "w": axn.ones({"x": 2})}
    >>> total = axn.quantization.accumulate_gradients(grads, grads)
    >>> total["w"], total["op"].input_scale
    (NamedArray(float32[x=2], [2. 2.]), Array([1.], dtype=float32))
    """

    def add(so_far: Any, new: Any) -> Any:
        if _is_overwrite(so_far) and _is_overwrite(new):
            return so_far.accumulate(new)
        if _is_gradient(so_far) and _is_gradient(new):
            return so_far + new
        is_nothing = so_far is None or getattr(so_far, "dtype", None) == jax.dtypes.float0
        return new if is_nothing and new is not None else so_far

    return jax.tree.map(add, accumulated, gradient, is_leaf=_is_update_leaf)


def apply_updates(tree: T, updates: Any, overwrites: Any) -> T:
    """Add updates to a model's arrays, and overwrite its `OverwriteWithGradient` modules with new values.

    Arguments:
        updates: the updates to add, in the structure of the model; None where there is nothing to add.
        overwrites: the new values, from `partition_for_grad_overwrite`.

    >>> model = {"w": axn.ones({"x": 2})}
    >>> axn.quantization.apply_updates(model, {"w": axn.ones({"x": 2})}, {"w": None})
    {'w': NamedArray(float32[x=2], [2. 2.])}
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_update_leaf)
    sides = []
    for name, side in (("updates", updates), ("overwrites", overwrites)):
        found, other = jax.tree.flatten(side, is_leaf=_is_update_leaf)
        if len(found) != len(leaves):
            raise ValueError(
                f"apply_updates: `{name}` has {errors.counted(len(found), 'leaf', 'leaves')}, the model "
                f"{len(leaves)}: {other} and {structure}."
            )
        sides.append(found)
    new = []
    for x, update, overwrite in zip(leaves, *sides, strict=True):
        if overwrite is None and _is_gradient(update):
            new.append((x + update).astype(x.dtype) if hasattr(x, "dtype") else x + update)
        else:
            new.append(x if overwrite is None else overwrite)
    return jax.tree.unflatten(structure, new)
