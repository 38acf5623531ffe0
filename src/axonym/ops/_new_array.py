"""Create arrays, or draw random ones, sharded by the active mapping.

Each device makes its own shard. On Auto mesh axes a constraint on the result is enough. On Explicit mesh axes JAX would
make the complete array on every device and shard it afterwards, so the function is handed to the partitioner together
with the sharding of its result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from ..axis import Axis, Names
from ..core import errors
from ..core.jax_versions import INLINE, is_about_older_mesh
from ..distribution import active_settings, output_sharding
from ..distribution.mesh_axes import (
    axes_of_type,
    current_mesh,
    entries_of,
    entry_of,
    has_explicit,
    mapped_on,
    mesh_around,
    mesh_axes,
    shard_count,
)
from ..distribution.per_device import with_auto_axes
from ..named_array import NamedArray, wrap
from . import _kernels


def new_array(
    what: str, fn: Callable[..., jax.Array], names: Names, sizes: tuple[int, ...], *arrays: Any, **options: Any
) -> NamedArray:
    """Call `fn(*arrays, **options)`, whose arrays are scalars and whose options are hashable, and name its axes."""
    if not active_settings.active_mapping():
        return wrap(fn(*arrays, **options), names)
    return _new_array_kernel(what, fn, names, sizes, len(arrays), tuple(options.items())).apply(*arrays)


@_kernels.shared("names")
def _new_array_kernel(
    what: str,
    fn: Callable[..., jax.Array],
    names: Names,
    sizes: tuple[int, ...],
    count: int,
    options: tuple[tuple[str, Any], ...],
) -> _kernels.Kernel:
    return sharded_kernel(what, functools.partial(fn, **dict(options)), [()] * count, tuple(map(Axis, names, sizes)))


def sharded_kernel(
    what: str, fn: Callable[..., jax.Array], in_names: Sequence[Names], out: tuple[Axis, ...]
) -> _kernels.Kernel:
    """Make a kernel for a positional function whose result is sharded by the active mapping."""

    def kernel(*arrays):
        return _run_sharded(what, fn, in_names, _kernels.as_in_jit(arrays), out)

    kernel.__name__ = kernel.__qualname__ = what
    jitted = jax.jit(kernel, inline=INLINE)

    def call(*arrays: Any) -> Any:
        if active_settings.pads_uneven() and (mesh := current_mesh()) is not None and not has_explicit(mesh):
            from ..sharding.meshes import in_trace

            over = {a: mapped_on(what, a.name, mesh, AxisType.Auto) for a in out}
            odd = [a for a, axes in over.items() if a.size % shard_count(mesh, axes)]
            if odd and not in_trace():  # nothing outside of jit could compute with the result
                raise ValueError(
                    f"{what} on mesh {errors.describe_shape(mesh.shape)}: the mesh axes do not divide "
                    f"{errors.describe_axes([a.name for a in odd], [a.size for a in odd])}, which `uneven='pad'` "
                    "allows inside compiled functions. Make the array in a function compiled by axonym.named_jit, "
                    "which stores it padded."
                )
        try:
            return jitted(*arrays)
        except ValueError as error:  # in an older `with mesh:`, JAX does not compile programs on Explicit axes
            mesh = current_mesh()
            if not (is_about_older_mesh(error) and isinstance(mesh, Mesh)):
                raise
        with jax.set_mesh(mesh):
            return jitted(*arrays)

    return _kernels.Kernel(call, tuple(a.name for a in out))


def _run_sharded(
    what: str, fn: Callable[..., jax.Array], in_names: Sequence[Names], arrays: Sequence[Any], out: tuple[Axis, ...]
) -> jax.Array:
    """Call `fn(*arrays)` so that each device makes its shard of the result by the active mapping."""
    # `import axonym` imports this module, but loads sharding only on use.
    from ..sharding.placement import resolve
    from ..sharding.shard import shard_quietly

    mesh = mesh_around(arrays)
    if mesh.empty:
        return fn(*arrays)
    names, sizes = tuple(a.name for a in out), tuple(a.size for a in out)
    mapping: Any = None
    if manual := axes_of_type(mesh, AxisType.Manual):  # inside `shard_map`, the new array is a shard along these
        active = active_settings.active_mapping()
        mapping = {n: entry_of([a for a in mesh_axes(active.get(n)) if a not in manual]) for n in names}
    # Resolve the mapping first, so that its errors name the operation and the axes.
    leaves, _ = resolve(wrap(jax.ShapeDtypeStruct(sizes, jnp.bool_), names), mapping, mesh, what, pads=True)
    if has_explicit(mesh):
        operands = [(n, entries_of(x)) for n, x in zip(in_names, arrays, strict=True) if n]
        spec = leaves[0].spec
        if spec is None:
            spec = output_sharding.infer_output_spec(what, names, sizes, operands, mesh)
        fn = with_auto_axes(fn, mesh, spec)
    return shard_quietly(wrap(fn(*arrays), names), mapping, what).array
