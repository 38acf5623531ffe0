"""Optimizers of matrices, and the exchange that gives each device whole matrices: `on_matrices`, `muon`, `shampoo`."""

from __future__ import annotations

import collections
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..axis import Axis, AxisSelection
from ..distribution import active_settings, mesh_axes as on_mesh
from ..distribution.active_settings import active_mapping, active_parameter_mapping
from ..distribution.axis_marks import exchanged, is_marking, marked
from ..distribution.mesh_axes import Axes, mesh_axes
from ..linalg import eigh
from ..named_array import NamedArray, is_named_array, wrap
from ..ops._blocks import SCOPE
from ..ops.contraction import dot
from ..ops.creation import zeros
from ..ops.joining import concatenate
from ..ops.shaping import flatten_axes, unflatten_axis
from ..sharding.leaves import Leaf, leaves_of
from ..sharding.mapping import ResourceMapping, normalize_mapping
from ..sharding.meshes import required_mesh
from ..sharding.shard import shard
from .roles import Matrix, Role, roles, roles_of_leaves, with_values

if TYPE_CHECKING:
    import optax

_MATRIX, _ROWS, _COLUMNS, _BATCH = "matrix", "rows", "columns", "batch"


def on_matrices(
    fn: Callable[[NamedArray], NamedArray] | optax.GradientTransformation,
    *,
    over: str | Sequence[str] | None = (),
    storage: ResourceMapping | None = None,
    batch: AxisSelection = (),
    matrix: Mapping[str, Matrix] | None = None,
) -> optax.GradientTransformation:
    """Make an Optax transformation that applies a function to whole matrices, which devices share out among them.

    With `over`, one all-to-all for each mesh axis turns shards of every matrix into some whole matrices on each device,
    and another one brings them back. If devices do not divide the number of matrices, parameters of equal sizes are
    joined, and zero matrices are added.

    Arguments:
        fn: a function of an array of matrices with the axes `matrix`, `rows` and `columns`, which may have further
            batch axes, to an array of the same axes; or an Optax transformation of a dictionary of such arrays, if it
            has a state, which is then sharded over `over`. Zero matrices must give finite ones.
        over: the mesh axes that matrices are shared out over, or None for all that the active mesh has. By default
            matrices stay where they are, and on Explicit mesh axes each device gathers them. The state of `fn` has the
            layout of the exchange: it does not go to another `over` or number of devices.
        storage: the mapping that parameters are stored by; by default the active ones. Batch axes that it shards, such
            as experts, stay sharded.
        batch, matrix: as for `roles`. A parameter that is no matrix is an error: see `optax.partition`.

    >>> layer = axn.nn.Linear.init(axn.Axis("embed", 4), axn.Axis("mlp", 8), key=jax.random.key(0), use_bias=False)
    >>> tx = axn.optim.on_matrices(lambda x: x / axn.linalg.norm(x, axis=("rows", "columns")))
    >>> updates, state = tx.update(layer, tx.init(layer))
    >>> axn.linalg.norm(updates.weight).item()
    1.0
    """
    import optax

    given = mesh_axes(over if over is None or isinstance(over, str) else tuple(over))
    stateful = isinstance(fn, optax.GradientTransformation)
    call: Any = fn
    inner = fn if stateful else optax.stateless(lambda x, _: jax.tree.map(call, x, is_leaf=is_named_array))

    def apply(tree: Any, function: Callable[[dict[str, NamedArray]], Any]) -> tuple[Any, Any]:
        """Apply a function from matrices to matrices and a state."""
        leaves, structure = leaves_of(tree)
        values = [leaf.value for leaf in leaves]
        kept = normalize_mapping({**active_mapping(), **active_parameter_mapping()} if storage is None else storage)
        found = roles_of_leaves(leaves, tree, batch, matrix)
        if no := [r for r in found if r is not None and r.no_matrix]:
            raise ValueError(f"optim.on_matrices: {no[0].path} is no matrix ({no[0].no_matrix}). Use optax.partition.")
        mesh = on_mesh.current_mesh()
        followed = is_marking() and mesh is None  # a report follows names; it knows the mesh later
        if given and not followed:
            mesh = required_mesh("optim.on_matrices", None)
            on_mesh.check_mesh_axes("optim.on_matrices: over", {_MATRIX: given}, mesh)
        sizes = {} if mesh is None else dict(mesh.shape)
        axes = () if followed else tuple(sizes) if over is None else given
        hidden = functools.partial(jax.named_scope, SCOPE) if followed else contextlib.nullcontext
        # Mappings are for the axes of the model, and not for those of matrices.
        with active_settings.activate_here(mapping={}, parameter_mapping={}), jax.named_scope("optimizer"):
            groups = _groups_of_matrices(leaves, found, lambda n: mesh_axes(kept.get(n)), axes, sizes, join=followed)
            with hidden():
                matrices = {group.name: group.exchanged(values) for group in groups}
                if followed and groups:
                    x = matrices[groups[0].name]
                    known = functools.partial(_exchanges, leaves, found, None if storage is None else kept)
                    array = exchanged(x.array, "matrices", _MATRIX, None if over is None else given, known)
                    matrices[groups[0].name] = wrap(marked([array], [x.names])[0], x.names)
            matrices, state = function(matrices)
            with hidden():
                for group in groups:
                    for i, x in zip(group.members, group.returned(matrices[group.name]), strict=True):
                        x = wrap(marked([x.array], [x.names])[0], x.names) if followed else x
                        values[i] = x if isinstance(values[i], NamedArray) else x.array
        return jax.tree.unflatten(structure, values), state

    def init(params: Any) -> Any:
        if not stateful:
            return optax.EmptyState()  # which needs no mesh
        empty = jax.tree.map(jnp.zeros_like, params)
        return apply(empty, lambda matrices: (matrices, inner.init(matrices)))[1]

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        return apply(updates, lambda matrices: inner.update(matrices, state))

    return optax.GradientTransformation(init, update)


class _GroupOfMatrices(NamedTuple):
    """Parameters whose matrices are exchanged as one array."""

    name: str
    members: tuple[int, ...]
    """The numbers of the leaves."""
    roles: tuple[Role, ...]
    entries: Mapping[str, Axes]
    """The mesh axes that each axis is stored sharded over."""
    over: Axes
    """The mesh axes that matrices are shared out over, in the order in which they are exchanged."""
    shards: int
    explicit: bool
    """True on Explicit mesh axes, over which JAX multiplies no sharded rows and columns, so that these are gathered."""

    def exchanged(self, values: Sequence[Any]) -> NamedArray:
        """Return the matrices, whole, and shared out over the devices."""
        parts = []
        for i, role in zip(self.members, self.roles, strict=True):
            x = values[i] if isinstance(values[i], NamedArray) else wrap(values[i], tuple(role.sizes))
            free = [_inner(role, n) for n in self.free_axes(role)]
            x = _with_axis_of(x.rename({n: _inner(role, n) for n in x.names}), free, _MATRIX)
            parts.append(x if not parts else x.rearrange(parts[0].names))
        x = parts[0] if len(parts) == 1 else concatenate(parts, _MATRIX)
        if more := -x.axis_size(_MATRIX) % self.shards:
            x = concatenate([x, zeros([a.resize(more) if a.name == _MATRIX else a for a in x.axes], x.dtype)], _MATRIX)
        if self.over:
            # XLA would exchange all operands that these were computed from, such as gradients and momentum.
            x = jax.lax.optimization_barrier(self._placed(x, 0))
        for count in range(1, len(self.over) + 1):
            x = self._placed(x, count)
        if self.explicit:
            x = self._placed(x, len(self.over), whole=True)
        role = self.roles[0]
        for part, own in ((_ROWS, role.rows), (_COLUMNS, role.columns)):
            x = _with_axis_of(x, [_inner(role, n) for n in own], part)
        return x.rearrange((_MATRIX, *(n for n in x.names if n not in (_MATRIX, _ROWS, _COLUMNS)), _ROWS, _COLUMNS))

    def returned(self, x: NamedArray) -> Iterator[NamedArray]:
        """Yield the matrices as parameters, in their storage sharding."""
        first = self.roles[0]
        for part, own in ((_ROWS, first.rows), (_COLUMNS, first.columns)):
            x = unflatten_axis(x, part, [Axis(_inner(first, n), first.sizes[n]) for n in own])
        # The first one keeps XLA from exchanging the terms of a sum.
        for count in reversed(range(len(self.over) + 1)):
            x = self._placed(x, count) if self.over or self.explicit else x
        start = 0
        for role in self.roles:
            free = [Axis(_inner(role, n), role.sizes[n]) for n in self.free_axes(role)]
            count = math.prod(a.size for a in free)
            part = x if x.axis_size(_MATRIX) == count else x[_MATRIX, start : start + count]
            part = unflatten_axis(part, _MATRIX, free) if free else part[_MATRIX, 0]
            yield part.rename({_inner(role, n): n for n in role.sizes}).rearrange(tuple(role.sizes))
            start += count

    def free_axes(self, role: Role) -> list[str]:
        """Return the batch axes of a parameter that are not sharded, and so are merged to the axis of matrices."""
        return [n for n in role.batch if not self.entries.get(_inner(role, n))]

    def _placed(self, x: NamedArray, count: int, whole: bool = False) -> NamedArray:
        """Shard matrices as they are after so many exchanges, by their batch axes alone if they are to be whole."""
        axes = {n: a for n, a in self.sharding(count).items() if not whole or n == _MATRIX or n.startswith(_BATCH)}
        return shard(x, PartitionSpec(*(on_mesh.entry_of(axes.get(n, ())) for n in x.names)))

    def sharding(self, count: int) -> dict[str, Axes]:
        """Return the mesh axes that each axis is sharded over after so many exchanges."""
        moved = self.over[:count]
        return {n: tuple(a for a in own if a not in moved) for n, own in self.entries.items()} | {_MATRIX: moved}


def _inner(role: Role, name: str) -> str:
    """Return the name of an axis of a parameter while its matrices are exchanged: by its part, so that none clash."""
    return f"{_ROWS if name in role.rows else _COLUMNS if name in role.columns else _BATCH}: {name}"


def _with_axis_of(x: NamedArray, names: Sequence[str], name: str) -> NamedArray:
    """Merge axes into one; without any, add one of size 1."""
    return flatten_axes(x, names, name) if names else x.broadcast_axis(Axis(name, 1))


def _exchanges(
    leaves: Sequence[Leaf],
    found: Sequence[Role | None],
    storage: Mapping[str, Any] | None,
    over: Axes,
    stored: Callable[[str], Axes],
    sizes: Mapping[str, int],
) -> Iterator[tuple[Any, tuple[str, str, dict[str, int], dict[str, Axes]]]]:
    """Yield the dtype of the matrices, and the kind, mesh axis, sizes and sharding of each exchange of an update.

    What is not known of the storage sharding raises a `ValueError`.
    """
    names = {n for role in found if role is not None for n in role.sizes}
    if reserved := sorted(names & {_MATRIX, _ROWS, _COLUMNS}):
        raise ValueError(f"matrices of a parameter with an axis {reserved[0]!r}, which is a name of theirs")
    for n in sorted(names):
        if left_out := sorted({*stored(n)} - {*over}):
            raise ValueError(f"matrices stored sharded along {n} over {left_out[0]}, which `over` leaves out")
        if storage is not None and mesh_axes(storage.get(n)) != stored(n):
            raise ValueError(f"matrices with `storage` of {n} other than the mapping's")
    for group in _groups_of_matrices(leaves, found, stored, over, sizes):
        first, free = group.roles[0], group.free_axes(group.roles[0])
        count = sum(math.prod(role.sizes[n] for n in group.free_axes(role)) for role in group.roles)
        own = {_MATRIX: count + -count % group.shards}
        own |= {_inner(first, n): size for n, size in first.sizes.items() if n not in free}
        dtype = leaves[group.members[0]].value.dtype
        steps = [(i, i + 1) for i in range(len(group.over))]
        for before, after in (*steps, *((j, i) for i, j in reversed(steps))):
            moved = group.over[min(before, after)]
            if any(moved in axes for axes in group.entries.values()):
                yield dtype, ("all-to-all", moved, own, group.sharding(after))
            elif after < before:  # on the way there, each device takes its own matrices
                yield dtype, ("all-gather", moved, own, group.sharding(after))


def _groups_of_matrices(
    leaves: Sequence[Leaf],
    found: Sequence[Role | None],
    stored: Callable[[str], Axes],
    over: Axes,
    mesh: Mapping[str, int],
    join: bool = False,
) -> list[_GroupOfMatrices]:
    """Return each parameter as a group, or several of equal sizes as one if that leaves fewer devices idle.

    Arguments:
        stored: returns the mesh axes that an axis is stored sharded over.
        join: whether to join all of equal sizes.
    """
    explicit = on_mesh.has_explicit(on_mesh.mesh_around())
    alike: dict[Any, list[tuple[int, Role]]] = collections.defaultdict(list)
    for i, role in enumerate(found):
        if role is None:
            continue
        entries = {_inner(role, n): stored(n) if over or explicit else () for n in role.sizes}
        own = [a for a in over if not any(a in entries[_inner(role, n)] for n in role.batch)]
        shards = math.prod(mesh[a] for a in own)
        # Mesh axes are exchanged one after another, as XLA replicates arrays that two of them leave at once: of those
        # of one axis, the minor ones first. Those that shard no axis come before them, since they take no exchange and
        # leave less to the others.
        minor = {a: max([e.index(a) for e in entries.values() if a in e], default=math.inf) for a in own}
        order = tuple(sorted(own, key=minor.__getitem__, reverse=True))
        free = {n for n in role.batch if not entries[_inner(role, n)]}
        count = math.prod(role.sizes[n] for n in free)
        sizes = frozenset((_inner(role, n), size) for n, size in role.sizes.items() if n not in free)
        alone = i if count % shards == 0 and not join else None
        alike[tuple(entries.items()), order, shards, sizes, leaves[i].value.dtype, alone].append((i, role))
    groups = []
    for (entries, order, shards, *_), members in alike.items():
        numbers, of = zip(*members, strict=True)
        groups.append(_GroupOfMatrices(leaves[numbers[0]].path, numbers, of, dict(entries), order, shards, explicit))
    return groups


# --- Muon and Shampoo ---


class _MatrixOptions(TypedDict, total=False):
    """The arguments of `muon` and `shampoo` besides their own."""

    adam: optax.GradientTransformation | None
    weight_decay: float
    over: str | Sequence[str] | None
    storage: ResourceMapping | None
    batch: AxisSelection
    matrix: Mapping[str, Matrix] | None


def _optimizer_of_matrices(
    learning_rate: Any,
    momentum: optax.GradientTransformation,
    fn: Callable[[NamedArray], NamedArray] | optax.GradientTransformation,
    adam: optax.GradientTransformation | None = None,
    weight_decay: float = 0.0,
    batch: AxisSelection = (),
    matrix: Mapping[str, Matrix] | None = None,
    **exchange: Any,
) -> optax.GradientTransformation:
    """Make an optimizer: for matrices momentum, `on_matrices(fn)`, and weight decay; for other parameters Adam."""
    import optax

    def labels(params: Any) -> Any:
        roles(params, batch=batch, matrix=matrix)  # checks the arguments
        found = roles_of_leaves(leaves_of(params)[0], params, batch, matrix)
        return with_values(params, ["other" if role is None or role.no_matrix else "matrix" for role in found])

    of_matrices = optax.chain(
        momentum,
        on_matrices(fn, batch=batch, matrix=matrix, **exchange),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
    others = optax.adamw(learning_rate, weight_decay=0.0) if adam is None else adam
    return optax.partition({"matrix": of_matrices, "other": others}, labels)


def muon(
    learning_rate: Any,
    *,
    beta: float = 0.95,
    nesterov: bool = True,
    steps: int = 5,
    consistent_rms: float | None = None,
    **options: Unpack[_MatrixOptions],
) -> optax.GradientTransformation:
    """Make the Muon optimizer: matrices are updated by their orthogonalized momentum, other parameters by Adam.

    Updates of matrices are those of `optax.contrib.muon` if it is told the rows and columns: see `roles`.

    Arguments:
        learning_rate: a number, or a schedule of Optax.
        beta: the decay of the momentum.
        nesterov: whether momentum is Nesterov's.
        steps: the number of Newton-Schulz steps.
        consistent_rms: scales updates to this root mean square, as AdamW has about 0.2; by default they are scaled by
            sqrt(max(1, columns / rows)).
        **options: `adam`, the optimizer of parameters that are no matrices, by default AdamW with the learning rate and
            no decay; `weight_decay`, the decay of matrices, times the learning rate, by default none; and `over`,
            `storage`, `batch` and `matrix`, as for `on_matrices`.

    >>> layer = axn.nn.Linear.init(axn.Axis("embed", 4), axn.Axis("mlp", 8), key=jax.random.key(0))
    >>> tx = axn.optim.muon(2e-2)
    >>> updates, state = tx.update(layer, tx.init(layer), layer)
    >>> updates.weight.shape
    {'mlp': 8, 'embed': 4}
    """
    import optax

    def scaled(matrices: NamedArray) -> NamedArray:
        """Move singular values near one by Newton-Schulz steps, and scale matrices by their sizes."""
        x, (*_, rows, columns) = matrices.array, matrices.array.shape
        x = x.mT if rows > columns else x
        x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-8)
        a, b, c = (jnp.asarray(k, x.dtype) for k in (3.4445, -4.7750, 2.0315))
        for _ in range(steps):
            gram = x @ x.mT
            x = a * x + (b * gram + c * (gram @ gram)) @ x
        width = math.sqrt(max(1, columns / rows))
        scale = width if consistent_rms is None else math.sqrt(max(rows, columns)) * consistent_rms
        return wrap(scale * (x.mT if rows > columns else x), matrices.names)

    def init(params: Any) -> Any:
        return optax.EmaState(jnp.zeros([], jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.ema, beta, 1)
        ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count) if nesterov else count)
        if nesterov:
            now = optax.tree.bias_correction(updates, beta, count)
            ahead = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)
        return ahead, optax.EmaState(count, mu)

    return _optimizer_of_matrices(learning_rate, optax.GradientTransformation(init, update), scaled, **options)


def shampoo(
    learning_rate: Any, *, beta: float = 0.95, epsilon: float = 1e-6, **options: Unpack[_MatrixOptions]
) -> optax.GradientTransformation:
    """Make the Shampoo optimizer: gradients of matrices are divided by roots of the statistics of rows and columns.

    The statistics of a matrix are kept by the device that has the matrix: see `on_matrices`.

    Arguments:
        beta: the decay of the statistics.
        epsilon: the share of the largest eigenvalue that is added to all.
        learning_rate, **options: as for `muon`.

    >>> layer = axn.nn.Linear.init(axn.Axis("embed", 4), axn.Axis("mlp", 8), key=jax.random.key(0))
    >>> tx = axn.optim.shampoo(2e-2)
    >>> updates, state = tx.update(layer, tx.init(layer), layer)
    >>> updates.weight.shape
    {'mlp': 8, 'embed': 4}
    """
    import optax

    def squares(x: NamedArray, side: str) -> NamedArray:
        return dot(x, x.rename({side: f"{side} of others"}), axis=_COLUMNS if side == _ROWS else _ROWS)

    def init(params: Any) -> Any:
        return {name: {side: squares(x, side) for side in (_ROWS, _COLUMNS)} for name, x in params.items()}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        new, found = {}, {}
        for name, x in updates.items():
            new[name] = {side: beta * s + (1 - beta) * squares(x, side) for side, s in state[name].items()}
            found[name] = x
            for side, statistics in new[name].items():  # multiply by the inverse fourth root
                values, vectors = eigh(statistics, (side, f"{side} of others"), "eigenvalues")
                values = values.clip(0) + epsilon * values.max("eigenvalues") + jnp.finfo(x.dtype).tiny
                projected = dot(found[name], vectors, axis=side) * values**-0.25
                found[name] = dot(projected, vectors, axis="eigenvalues").rearrange(x.names)
        return found, new

    inner = optax.GradientTransformation(init, update)
    return _optimizer_of_matrices(learning_rate, optax.identity(), inner, **options)
