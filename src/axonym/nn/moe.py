"""`MoELinear`: a linear layer with separate weights for each expert."""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp

from .. import random
from ..axis import Axis, AxisSpec, Names
from ..core import errors
from ..core.jax_versions import active_platform
from ..core.named_scope import named_call
from ..named_array import NamedArray, named
from ..ops import _kernels
from ..ops._operands import distinct, one_axis, private, require_named
from ..ops.creation import zeros
from ._grouped_matmul import GroupedProduct
from .linear import BOUND, stored_inputs

__all__ = ["MoELinear"]


class MoELinear(eqx.Module):
    """A linear layer of several experts, each of which handles its own group of rows.

    The rows of the input, such as tokens, must be sorted by expert: first the rows of the first expert, as many as
    `group_sizes` says, then the rows of the second, and so on. All experts share the bias.

    Rows and experts can be sharded, by the active mapping or, on Explicit mesh axes, by the arrays' own shardings. Each
    device then multiplies its shard of the rows with its shard of the weights. If experts are sharded, the results are
    summed over their mesh axes; if rows are sharded over the same mesh axes, they are all-gathered first. With
    `dispatch`, experts get their own rows instead, by an all-to-all.

    The fields besides `weight` and `bias` are arguments of `init`.

    >>> Experts, Embed, Mlp = axn.make_axes(experts=2, embed=3, mlp=4)
    >>> layer = axn.nn.MoELinear.init(Experts, Embed, Mlp, key=jax.random.key(0))
    >>> layer.weight.shape
    {'experts': 2, 'embed': 3, 'mlp': 4}
    >>> layer(axn.ones({"tokens": 8, "embed": 3}), axn.named([5, 3], Experts)).shape
    {'tokens': 8, 'mlp': 4}
    """

    weight: NamedArray
    bias: NamedArray | None
    Experts: Axis = eqx.field(static=True)
    In: Axis = eqx.field(static=True)
    Out: Axis = eqx.field(static=True)
    use_gmm: bool = eqx.field(static=True, default=False)

    @staticmethod
    def init(
        Experts: AxisSpec,
        In: Axis,
        Out: Axis,
        *,
        key: jax.Array,
        use_bias: bool = True,
        out_first: bool = False,
        init_scale: float = 1.0,
        use_gmm: bool = False,
    ) -> MoELinear:
        """Make a layer with random weights and a bias of zeros.

        The weights are drawn from a truncated normal distribution with standard deviation 1 / sqrt(size of In).

        Arguments:
            Experts: the axis of the experts.
            In: the axis of the input.
            Out: the axis of the output.
            key: a random key.
            use_bias: whether there is a bias.
            out_first: whether the axis of the output comes before the axis of the input in the weight.
            init_scale: multiplies the standard deviation of the weights.
            use_gmm: whether to use the Pallas kernel megablox, on TPU only, instead of `jax.lax.ragged_dot`. It is
                refused in `dispatch` with sharded experts.

        >>> Experts, Embed, Mlp = axn.make_axes(experts=2, embed=3, mlp=4)
        >>> axn.nn.MoELinear.init(Experts, Embed, Mlp, key=jax.random.key(0), out_first=True).weight.shape
        {'experts': 2, 'mlp': 4, 'embed': 3}
        """
        experts = one_axis("MoELinear", "Experts", Experts)
        distinct("MoELinear", (experts.name, In.name, *(() if In.name == Out.name else (Out.name,))))
        (stored,) = stored_inputs((In,), (Out,))
        axes = (experts, Out, stored) if out_first else (experts, stored, Out)
        weight = random.truncated_normal(key, axes, -BOUND, BOUND) * (init_scale / math.sqrt(In.size))
        return MoELinear(weight, zeros(Out) if use_bias else None, experts, In, Out, use_gmm)

    @property
    def out_first(self) -> bool:
        """Return whether the axis of the output comes before the axis of the input in the weight.

        >>> Experts, Embed, Mlp = axn.make_axes(experts=2, embed=3, mlp=4)
        >>> axn.nn.MoELinear.init(Experts, Embed, Mlp, key=jax.random.key(0)).out_first
        False
        """
        return self.weight.names[-1] != self.Out.name

    @named_call
    def __call__(
        self, inputs: NamedArray, group_sizes: NamedArray | jax.Array, *, key: jax.Array | None = None
    ) -> NamedArray:
        """Multiply each row by the weight of its expert, and add the bias.

        Arguments:
            inputs: a named array with the axis `In` and one axis of rows, sorted by expert.
            group_sizes: the number of rows of each expert. The results for rows after the last group are undefined.
            key: not used.

        >>> Experts, In, Out = axn.make_axes(experts=2, x=1, y=1)
        >>> layer = axn.nn.MoELinear(axn.named([[[1.0]], [[10.0]]], (Experts, In, Out)), None, Experts, In, Out)
        >>> layer(axn.ones({"rows": 3, "x": 1}), axn.named([2, 1], Experts))
        NamedArray(float32[rows=3, y=1], [[ 1.] [ 1.] [10.]])
        """
        require_named("MoELinear", inputs)
        if self.use_gmm and (platform := active_platform()) != "tpu":
            raise ValueError(
                "MoELinear: `use_gmm` selects the Pallas kernel megablox, which runs on TPU only; the devices here are "
                f"{platform.upper()}s. Without `use_gmm`, `jax.lax.ragged_dot` computes the same everywhere."
            )
        if not isinstance(group_sizes, NamedArray):
            group_sizes = named(group_sizes, self.Experts.name)
        kernel = _grouped_kernel(
            inputs.names, self.weight.names, group_sizes.names, self.Experts.name, self.In, self.Out, self.use_gmm
        )
        result = kernel.apply(inputs.array, self.weight.array, group_sizes.array)
        return result if self.bias is None else result + self.bias


@_kernels.shared("names", "weight_names", "size_names", "experts", "In", "Out")
def _grouped_kernel(
    names: Names, weight_names: Names, size_names: Names, experts: str, In: Axis, Out: Axis, use_gmm: bool
) -> _kernels.Kernel:
    what = "MoELinear"
    _kernels.select(what, names, In.name)
    _kernels.select(what, size_names, experts, operand=2)
    rows = [n for n in names if n != In.name]
    if len(rows) != 1:
        raise ValueError(
            f"{what}: the input must have one axis of rows besides {In.name!r}, but has {errors.describe_axes(rows)}. "
            f"Merge them with `axonym.flatten_axes(inputs, {tuple(rows)}, 'rows')`, or map over all but one with "
            "`axonym.vmap`."
        )
    (stored,) = (a.name for a in stored_inputs((In,), (Out,)))
    if {*weight_names} != {experts, stored, Out.name}:
        expected = errors.describe_axes((experts, stored, Out.name))
        raise ValueError(
            f"{what}: the axes of the weight are {errors.describe_axes(weight_names)}, and should be {expected}. "
            "Apply stacked layers with `axonym.vmap` or `axonym.scan` over their axis."
        )
    if len(size_names) != 1:
        raise ValueError(f"{what}: `group_sizes` has axes {errors.describe_axes(size_names)}, and needs {experts!r}.")
    product = GroupedProduct(names, weight_names, rows[0], experts, (In.name, stored), Out.name, use_gmm)
    distinct(what, product.out_names)

    def positional(x, weight, sizes):
        return product.by_partitioner(x, weight, _checked(what, product, x, weight, sizes))

    def per_device(x, weight, sizes):
        return product.by_device(x, weight, _checked(what, product, x, weight, sizes))

    # Private names, since the summed axis can have the name of the output, and the sizes must not influence the
    # sharding of the result.
    in_names = (
        tuple(private("the input", (n,))[0] if n == In.name else n for n in names),
        tuple(n if n == Out.name else private("the weight", (n,))[0] for n in weight_names),
        private("group_sizes", size_names),
    )
    return _kernels.make_kernel(what, positional, in_names, product.out_names, per_device=per_device, gathers=True)


def _checked(what: str, product: GroupedProduct, x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return the sizes as signed integers that can count all rows."""
    for name, given, stored in (
        (product.summed[0], x.shape[product.names.index(product.summed[0])], product.summed[1]),
        (product.groups, sizes.shape[0], product.groups),
    ):
        own = weight.shape[product.weight_names.index(stored)]
        if given != own:
            raise ValueError(errors.size_mismatch(what, name, [("the argument", given), ("the layer", own)]))
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(f"{what}: `group_sizes` must be integers, got {sizes.dtype}.")
    return sizes.astype(jnp.int32)
