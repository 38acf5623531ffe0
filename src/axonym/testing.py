"""Check that a function computes the same on every mesh and under every mapping.

How a program is distributed must not change what it computes. Most functions keep this promise automatically; those
with per-device code, their own partitioning or assumptions about shards can break it silently. `check_shard_invariance`
runs a function under many placements and compares.
"""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import math
import random
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from ._tree_spec import flatten_arrays
from .sharding.mapping import axis_mapping
from .sharding.placement import leaves_of
from .sharding.shard import shard

__all__ = ["ShardInvariance", "check_shard_invariance"]


@dataclasses.dataclass(frozen=True)
class ShardInvariance:
    """Hold the outcome of `check_shard_invariance`.

    >>> found = axn.testing.check_shard_invariance(lambda x: x * 2, axn.ones({"batch": 8}), draws=2)
    >>> found.compared + len(found.refusals)
    2
    """

    compared: int
    """Under how many placements the results were compared."""
    refusals: Mapping[str, str]
    """The placements that were refused, as code, and the first line of each message."""


def check_shard_invariance(
    fn: Callable[..., Any],
    *args: Any,
    mesh_axes: Sequence[str] = ("data", "model"),
    draws: int = 50,
    seed: int = 0,
    rtol: float | None = None,
    gradients: bool = True,
    refusals: str | None = None,
) -> ShardInvariance:
    """Check that a function gives the same values and gradients on every mesh and under every mapping.

    The function is compiled and run on one device, and then under meshes and mappings drawn at random: meshes of
    different sizes, with Auto axes, Explicit axes or both, and mappings of the arguments' axes to one mesh axis or two.
    What the function returns is compared each time, values, dtypes and axes, and so are the gradients with respect to
    all floating-point arguments. Random draws are compared like everything else: pass the key as an argument. The first
    difference is reduced to the fewest mapping entries and devices that still show it, and raised as an AssertionError
    that shows the mesh and the mapping as code. An error that the function raises under one of the placements is a
    difference too.

    Some mappings do not fit a function, such as one that shards two axes of a result over the same mesh axis. If the
    library refuses one for that reason, the placement is skipped and listed among the refusals of the result. It is an
    error if every placement is refused.

    Arguments:
        fn: the function. It may use `axonym.shard_map`, which then runs under the drawn mapping.
        *args: its arguments; named arrays among them provide the axes that are mapped.
        mesh_axes: the names of the mesh axes. Include those that the function itself mentions.
        draws: how many placements to draw.
        seed: the same seed draws the same placements.
        rtol: how much floating-point values may differ, relative to the largest value of the array. By default a
            tolerance for the dtype that allows for another order of summation.
        gradients: whether to compare gradients too.
        refusals: a regular expression. Errors with a message in which it is found are refusals too: the function's own,
            of placements that it does not support, or those of JAX for raw arrays on Explicit axes.

    >>> x = axn.random.normal(jax.random.key(0), {"batch": 8, "embed": 4})
    >>> result = axn.testing.check_shard_invariance(lambda x: axn.nn.softmax(x, "embed"), x, draws=3)
    >>> result.compared, dict(result.refusals)
    (3, {})
    """
    draw = _Draw(args, seed)
    if not draw.sizes:
        raise ValueError("check_shard_invariance: no argument has named axes, so there is nothing to map.")
    if draws < 1 or not (meshes := _meshes(mesh_axes)):
        raise ValueError(
            f"check_shard_invariance: there is nothing to compare with {draws} draws on {jax.device_count()} devices. "
            "Several devices can be simulated with `jax.config.update('jax_num_cpu_devices', 8)` before JAX starts."
        )
    check = _Check(fn, args, gradients, rtol, refusals)
    expected = _on_one_device(check, draw, dict.fromkeys(mesh_axes, 1), draws)
    compared, refused = 0, {}
    for placement in draw.placements(meshes, draws):
        try:
            difference = check.difference(expected, placement)
        except _Refusal as refusal:
            refused[str(placement)] = str(refusal)
            continue
        compared += 1
        if difference is not None:
            placement, difference = _smallest(check, expected, placement, difference)
            raise AssertionError(
                f"check_shard_invariance: {getattr(fn, '__name__', fn)} depends on how it is distributed. Under\n"
                f"    {placement}\n{difference.words}"
            ) from difference.error
    if not compared:
        first = "\n    ".join(next(iter(refused.items())))
        raise ValueError(f"check_shard_invariance: every placement was refused, the first:\n    {first}")
    return ShardInvariance(compared, refused)


class _Refusal(Exception):
    """Raised if a placement does not fit the function."""


class _Difference(NamedTuple):
    """A difference from the expected result, and the error, if it is one."""

    words: str
    error: Exception | None = None


@dataclasses.dataclass(frozen=True)
class _Distribution:
    """A mesh and a mapping."""

    mesh: Mapping[str, int]
    explicit: frozenset[str]
    """The mesh axes that are Explicit; the others are Auto."""
    mapping: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        explicit = f", explicit={self.explicit == set(self.mesh) or sorted(self.explicit)}" if self.explicit else ""
        mapping = {n: axes[0] if len(axes) == 1 else axes for n, axes in self.mapping.items() if axes}
        return f"jax.set_mesh(axn.make_mesh({dict(self.mesh)}{explicit})), axn.axis_mapping({mapping})"

    def make_mesh(self) -> Mesh:
        count = math.prod(self.mesh.values())
        kinds = tuple(AxisType.Explicit if a in self.explicit else AxisType.Auto for a in self.mesh)
        devices = np.array(jax.devices()[:count]).reshape(tuple(self.mesh.values()))
        return Mesh(devices, tuple(self.mesh), axis_types=kinds)

    def smaller(self) -> Iterator[_Distribution]:
        """Yield simpler placements: without one entry, on fewer devices, on Auto axes."""
        for name, axes in self.mapping.items():
            for i in range(len(axes)):
                yield dataclasses.replace(self, mapping={**self.mapping, name: axes[:i] + axes[i + 1 :]})
        for axis, size in self.mesh.items():
            for fewer in range(1, size):
                if size % fewer == 0:
                    yield dataclasses.replace(self, mesh={**self.mesh, axis: fewer})
        for axis in sorted(self.explicit):
            yield dataclasses.replace(self, explicit=self.explicit - {axis})


def _on_one_device(check: _Check, draw: _Draw, mesh: Mapping[str, int], draws: int) -> Any:
    """Return the results on one device, under the first mapping that the function accepts: there, all are the same."""
    first: Exception | None = None
    for placement in (_Distribution(mesh, frozenset(), dict.fromkeys(draw.sizes, ())), *draw.placements([mesh], draws)):
        try:
            return check.run(placement)
        except Exception as error:
            if not check.is_refusal(error):
                raise
            first = first or error
    assert first is not None
    raise first


def _meshes(axes: Sequence[str]) -> list[dict[str, int]]:
    """List the meshes of several devices whose number divides the number of available devices."""
    devices = jax.device_count()
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    shapes = [s for s in itertools.product(divisors, repeat=len(axes)) if devices % math.prod(s) == 0]
    return [dict(zip(axes, shape, strict=True)) for shape in shapes if math.prod(shape) > 1]


class _Draw:
    """Draws random placements for given arguments."""

    def __init__(self, args: Any, seed: int):
        self._rng = random.Random(seed)
        arrays = [leaf for leaf in leaves_of(args)[0] if leaf.names]
        self.sizes: dict[str, int] = {}
        """The size that mesh axes must divide for each name: the gcd, since images and kernels can differ in size."""
        for leaf in arrays:
            for n, s in zip(leaf.names or (), leaf.shape or (), strict=True):
                self.sizes[n] = math.gcd(self.sizes.get(n, 0), s)
        self._together = {
            n: {m for leaf in arrays if n in (leaf.names or ()) for m in leaf.names or ()} for n in self.sizes
        }

    def placements(self, meshes: Sequence[Mapping[str, int]], draws: int) -> Iterator[_Distribution]:
        """Draw placements whose mesh axes divide the axes mapped to them, and that use each once in an array."""
        for _ in range(draws):
            mesh = self._rng.choice(meshes)
            kinds = self._rng.choice(("auto", "explicit", "mixed"))
            explicit = {a for a in mesh if kinds == "explicit" or (kinds == "mixed" and self._rng.random() < 0.5)}
            useful = [a for a, parts in mesh.items() if parts > 1] or list(mesh)
            mapping: dict[str, tuple[str, ...]] = {}
            for name in self._rng.sample(list(self.sizes), len(self.sizes)):
                taken = {a for other in self._together[name] for a in mapping.get(other, ())}
                free = [a for a in useful if a not in taken]
                # JAX cannot shard one axis over mesh axes of different types.
                pairs = [p for p in itertools.permutations(free, 2) if len(explicit.intersection(p)) != 1]
                candidates = [(), *((a,) for a in free), *pairs]
                fitting = [c for c in candidates if self.sizes[name] % math.prod(mesh[a] for a in c) == 0]
                mapping[name] = self._rng.choice(fitting)
            yield _Distribution(mesh, frozenset(explicit), mapping)


class _Check:
    """A function, its arguments, and how to compare its results."""

    def __init__(
        self, fn: Callable[..., Any], args: Sequence[Any], gradients: bool, rtol: float | None, refusals: str | None
    ):
        self._fn, self._args, self._rtol, self._refusals = fn, args, rtol, refusals
        arrays, self._spec = flatten_arrays(args, named=False)
        self._differentiated = [gradients and jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays]

    def run(self, placement: _Distribution) -> Any:
        """Return the results and the gradients under a placement, on the host."""
        with jax.set_mesh(placement.make_mesh()), axis_mapping(placement.mapping):
            arrays, _ = flatten_arrays(shard(self._args), named=False)
            results = jax.block_until_ready(jax.jit(self._results_and_gradients)(arrays))
            return jax.tree.map(_on_host, results)

    def difference(self, expected: Any, placement: _Distribution) -> _Difference | None:
        """Return how the results under a placement differ from those expected; None if they agree."""
        try:
            found = self.run(placement)
        except Exception as error:
            if self.is_refusal(error):
                raise _Refusal(str(error).partition("\n")[0]) from error
            return _Difference(f"it raises {type(error).__name__}: {error}", error)
        for what, before, after in zip(("the result", "the gradient"), expected, found, strict=True):
            if jax.tree.structure(before) != jax.tree.structure(after):
                return _Difference(
                    f"{what} is another tree: {jax.tree.structure(after)} instead of {jax.tree.structure(before)}"
                )
            for (path, a), b in zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True):
                if words := self._words(a, b):
                    return _Difference(f"{what}{jax.tree_util.keystr(path)} {words}")
        return None

    def is_refusal(self, error: Exception) -> bool:
        """Return whether an error says that a placement does not fit, rather than that something is wrong."""
        if self._refusals is not None and re.search(self._refusals, str(error)):
            return True
        if not isinstance(error, ValueError) or not re.search(r"\bmesh\b", str(error)):
            return False
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        raised = linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("raise ")  # not by JAX below it
        return raised and frame.f_globals.get("__name__", "").startswith(f"{__package__}.")

    def _results_and_gradients(self, arrays: Sequence[Any]) -> Any:
        inexact = list(itertools.compress(arrays, self._differentiated))

        def call(inexact: Sequence[Any]) -> Any:
            replaced = iter(inexact)
            filled = [next(replaced) if c else x for x, c in zip(arrays, self._differentiated, strict=True)]
            return self._fn(*self._spec.unflatten(filled))

        def total(inexact: Sequence[Any]) -> tuple[jax.Array, Any]:
            results = call(inexact)
            raw = [x for x in jax.tree.leaves(results) if isinstance(x, jax.Array)]
            return sum([_weighted(x) for x in raw if jnp.issubdtype(x.dtype, jnp.inexact)], jnp.float32(0)), results

        if not inexact:
            return _arrays_of(call(())), ()
        gradients, results = jax.grad(total, has_aux=True)(inexact)
        return _arrays_of(results), gradients

    def _words(self, a: np.ndarray, b: np.ndarray) -> str | None:
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"is {b.dtype}{list(b.shape)} instead of {a.dtype}{list(a.shape)}"
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) or not jnp.issubdtype(a.dtype, jnp.inexact):
            return None if np.array_equal(a, b) else "has other values"
        wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
        a, b, epsilon = a.astype(wide), b.astype(wide), float(jnp.finfo(a.dtype).eps)
        rtol = 64 * epsilon**0.9 if self._rtol is None else self._rtol
        scale = float(np.max(np.abs(a[np.isfinite(a)]), initial=0.0))
        if np.allclose(a, b, rtol=rtol, atol=rtol * scale, equal_nan=True):
            return None
        with np.errstate(invalid="ignore"):
            most = np.nanmax(np.abs(a - b)) if np.isfinite(a - b).any() else np.nan
        return f"differs by up to {most:.3g}, with values up to {scale:.3g}"


def _on_host(x: jax.Array) -> np.ndarray:
    # jax 0.10 raises an error for empty arrays that were computed sharded over Explicit axes.
    return np.asarray(x) if x.size else np.empty(x.shape, x.dtype)


def _weighted(x: jax.Array) -> jax.Array:
    """Sum an array with a different weight for each element, so that no error cancels out in the gradients."""
    weights = jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
    x = jnp.real(x) + jnp.imag(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x
    return jnp.sum(x.astype(jnp.float32) * weights)


def _arrays_of(results: Any) -> Any:
    """Return only the arrays of results: random keys as their data, and nothing static."""

    def data(x: Any) -> Any:
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key_data(x)
        return x if isinstance(x, (jax.Array, np.ndarray, bool, int, float, complex)) else None

    return jax.tree.map(data, results)


def _smallest(
    check: _Check, expected: Any, placement: _Distribution, difference: _Difference
) -> tuple[_Distribution, _Difference]:
    """Return the simplest placement under which the results still differ, and how they differ."""
    for smaller in placement.smaller():
        try:
            found = check.difference(expected, smaller)
        except _Refusal:
            continue
        if found is not None:
            return _smallest(check, expected, smaller, found)
    return placement, difference
