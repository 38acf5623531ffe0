"""Say which parameters are matrices, and which of their axes are rows, columns and batch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from ..axis import Axis, AxisSelection, Names, axes_of_spec, name_of, selectors
from ..core import errors
from ..nn.batch_norm import BatchNorm
from ..nn.embedding import Embedding
from ..nn.linear import stored_inputs
from ..nn.normalization import LayerNormBase
from ..sharding.leaves import Leaf, leaves_of, parent_nodes
from ..tree import LayerStack

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

    Layers with axes `In` and `Out` say it themselves: rows are the axes of the input, columns those of the output, and
    each index of any other axis (`layers`, `experts`) has a matrix of its own. Embeddings, norms, biases and the layer
    that predicts tokens, whose output is an axis that an embedding looks up, are no matrices. Another array with two
    axes or more is an error that asks for `matrix`.

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
