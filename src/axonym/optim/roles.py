"""Say which parameters are matrices, and apply a transformation to each layer of a stack: what layers say by name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..axis import Axis, AxisSelection, AxisSelector, Names, axes_of_spec, name_of, selectors
from ..core import errors
from ..distribution.mesh_axes import entries_of, mesh_around, reshard
from ..named_array import NamedArray, is_named_array, wrap
from ..nn.batch_norm import BatchNorm
from ..nn.embedding import Embedding
from ..nn.linear import stored_inputs
from ..nn.normalization import LayerNormBase
from ..ops.creation import arange
from ..sharding.leaves import Leaf, leaves_of, parent_nodes
from ..transforms._mapped_axis import spmd_axes
from ..tree import LayerStack

if TYPE_CHECKING:
    import optax

Matrix = tuple[AxisSelection, AxisSelection] | None
"""The axes of the rows (inputs) and the columns (outputs) of a matrix; None for a parameter that is not a matrix."""


@dataclasses.dataclass(frozen=True)
class Role:
    """The axes of one parameter as an optimizer of matrices sees them.

    >>> print(axn.optim.Role("w", {"layers": 2, "embed": 4, "mlp": 8}, rows=("embed",), columns=("mlp",)))
    embed=4 x mlp=8   each of layers=2
    """

    path: str
    sizes: Mapping[str, int]
    rows: Names = ()
    """The axes of the input, which the layer sums over."""
    columns: Names = ()
    """The axes of the output."""
    no_matrix: str = ""
    """The reason why the parameter is not a matrix; empty for matrices."""

    @property
    def batch(self) -> Names:
        """Return the axes along which each index has its own matrix.

        >>> axn.optim.Role("w", {"layers": 2, "embed": 4, "mlp": 8}, rows=("embed",), columns=("mlp",)).batch
        ('layers',)
        """
        return tuple(n for n in self.sizes if n not in (*self.rows, *self.columns))

    def __str__(self) -> str:
        if self.no_matrix:
            return f"no matrix: {self.no_matrix}"
        rows, columns, each = (
            " ".join(f"{n}={self.sizes[n]}" for n in part) for part in (self.rows, self.columns, self.batch)
        )
        return f"{rows} x {columns}" + (f"   each of {each}" if each else "")


class Roles(tuple[Role, ...]):
    """The roles of all parameters of a model, in the order of its leaves; printed as a table.

    >>> axn.optim.Roles([axn.optim.Role("w", {"embed": 4, "mlp": 8}, rows=("embed",), columns=("mlp",))])
    w  embed=4 x mlp=8
    """

    def __str__(self) -> str:
        width = max((len(role.path) for role in self), default=0)
        return "\n".join(f"{role.path:{width}}  {role}" for role in self)

    __repr__ = __str__


def roles(model: Any, *, batch: AxisSelection = (), matrix: Mapping[str, Matrix] | None = None) -> Roles:
    """Return the role of each parameter: which of its axes are the rows, the columns and the batch of matrices.

    Layers say it by their axes `In` and `Out`, and each index of any other axis (`layers`, `experts`) has a matrix of
    its own. Embeddings, norms, biases and the layer that predicts tokens, whose output is an axis that an embedding
    looks up, are no matrices. Another array with two axes or more is an error that asks for `matrix`.

    Arguments:
        model: the parameters, or a tree of the same structure, such as gradients.
        batch: axes of layers that are batch axes, too, as heads are if each head is to be one matrix.
        matrix: roles of parameters whose path contains a pattern, as in `TreePathShardingRule`: the rows and the
            columns, or None for no matrix. The first pattern that is found decides.

    >>> Embed, Mlp = axn.make_axes(embed=4, mlp=8)
    >>> layers = axn.nn.Stacked.init(axn.Axis("layers", 2), axn.nn.Linear)(Embed, Mlp, key=jax.random.key(0))
    >>> print(axn.optim.roles(layers))
    stacked/weight  embed=4 x mlp=8   each of layers=2
    stacked/bias    no matrix: Linear.bias
    """
    leaves, _ = leaves_of(model)
    found = roles_of_leaves(leaves, model, batch, matrix)
    if unused := [p for p in matrix or {} if not any(re.search(p, leaf.path) for leaf in leaves)]:
        hint = errors.suggestions(unused, [leaf.path for leaf in leaves])
        raise ValueError(f"optim.roles: no path of the parameters contains {errors.quoted(unused)}.{hint}")
    named = {n for role in found if role is not None for n in role.sizes}
    if missing := [n for n in map(name_of, selectors(batch)) if n not in named]:
        raise ValueError(errors.missing_axes("optim.roles: batch", missing, sorted(named)))
    return Roles(role for role in found if role is not None)


def dimension_numbers(params: Any, *, batch: AxisSelection = (), matrix: Mapping[str, Matrix] | None = None) -> Any:
    """Tell Optax's own Muon which axes are rows and columns: a value of its `muon_weight_dimension_numbers`.

    The arguments are as for `roles`; pass some with `functools.partial`.

    >>> import optax
    >>> tx = optax.contrib.muon(2e-2, muon_weight_dimension_numbers=axn.optim.dimension_numbers)
    >>> layer = axn.nn.Linear.init(axn.Axis("embed", 4), axn.Axis("mlp", 8), key=jax.random.key(0))
    >>> axn.optim.dimension_numbers(layer).weight.array
    MuonDimensionNumbers(reduction_axis=(1,), output_axis=(0,))
    """
    from optax.contrib import MuonDimensionNumbers

    def numbers(role: Role | None) -> Any:
        if role is not None and not role.no_matrix:
            at = [*role.sizes]
            return MuonDimensionNumbers(*(tuple([at.index(n) for n in own]) for own in (role.rows, role.columns)))

    return with_values(params, map(numbers, roles_of_leaves(leaves_of(params)[0], params, batch, matrix)))


def with_values(tree: Any, values: Iterable[Any]) -> Any:
    """Return a tree of the same structure, whose leaves have these values in place of their arrays."""
    leaves, structure = leaves_of(tree)
    found = [jax.tree.map(lambda _, v=value: v, leaf.value) for leaf, value in zip(leaves, values, strict=True)]
    return jax.tree.unflatten(structure, found)


def roles_of_leaves(
    leaves: Sequence[Leaf], tree: Any, batch: AxisSelection = (), matrix: Mapping[str, Matrix] | None = None
) -> list[Role | None]:
    """Return the role of each leaf; None for a leaf that is not an array, such as one that Optax has masked."""
    parents = [parent_nodes(leaf.keys, tree) for leaf in leaves]
    looked_up = {node.Vocab.name for nodes in parents for node in nodes if isinstance(node, Embedding)}
    told_batch = {name_of(n) for n in selectors(batch)}
    found: list[Role | None] = []
    for leaf, nodes in zip(leaves, parents, strict=True):
        if leaf.shape is None:
            found.append(None)
            continue
        names = leaf.names or tuple(f"dimension {i}" for i in range(len(leaf.shape)))
        layer: Any = nodes[-1] if nodes else None
        field = str(getattr(leaf.keys[-1], "name", "")) if leaf.keys else ""
        told = next((m for pattern, m in (matrix or {}).items() if re.search(pattern, leaf.path)), ...)
        rows, columns, why = (), (), ""
        if told is None:
            why = "matrix= says so"
        elif told is not ...:
            rows, columns = (tuple(map(name_of, selectors(axes))) for axes in told)
            what = f"optim.roles: {leaf.path}"
            if missing := [n for n in (*rows, *columns) if n not in names]:
                raise ValueError(errors.missing_axes(what, missing, names, leaf.shape))
            errors.distinct(what, (*rows, *columns))
        elif field == "weight" and hasattr(layer, "In") and hasattr(layer, "Out"):
            ins, outs = axes_of_spec(layer.In), axes_of_spec(layer.Out)
            # A convolution sums over its window, too.
            inputs = {a.name for a in stored_inputs(ins, outs)} | set(map(name_of, getattr(layer, "Spatial", ())))
            outputs = {a.name for a in outs}
            # In the order of the array, so that renamed or reordered axes give the same matrices.
            rows, columns = (tuple(n for n in names if n in part - told_batch) for part in (inputs, outputs))
            if getattr(layer, "groups", 1) > 1:
                why = f"{type(layer).__name__}.weight has groups, whose outputs see different inputs"
            elif predicted := looked_up & outputs:
                why = f"predicts {', '.join(sorted(predicted))}"
            elif not rows or not columns:
                why = f"{type(layer).__name__}.weight has no {'columns' if rows else 'rows'}"
        else:
            own = [n for n in names if n not in axes_of_stacks(nodes)]
            is_bias = field == "bias" and hasattr(layer, "Out")
            why = f"{type(layer).__name__}.{field}" if field else "a vector"
            if len(own) >= 2 and not is_bias and not isinstance(layer, (Embedding, LayerNormBase, BatchNorm)):
                described = errors.describe_axes(leaf.names, leaf.shape) if leaf.names else f"of shape {leaf.shape}"
                pair = f"({own[0]!r}, {own[1]!r})" if leaf.names else "None"
                raise ValueError(
                    f"optim.roles: {leaf.path} {described} is in no layer with axes `In` and `Out`, so it is not known "
                    "which axes are the rows and the columns of matrices. Say it with "
                    f"`matrix={{{re.escape(leaf.path)!r}: {pair}}}`, or that it is no matrix, with None."
                )
        sizes = dict(zip(names, leaf.shape, strict=True))
        found.append(Role(leaf.path, sizes, no_matrix=why) if why else Role(leaf.path, sizes, rows, columns))
    return found


def axes_of_stacks(nodes: Sequence[Any]) -> dict[str, None]:
    """Return the axes of the layers in stacks of layers among nodes of a tree."""
    blocks = [getattr(node, "Block", None) for node in nodes if isinstance(node, LayerStack)]
    return dict.fromkeys(block.name for block in blocks if isinstance(block, Axis))


# --- layers of a stack, each by itself ---


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

    The second updates by random gradients are compared with those of `per_layer`.

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
