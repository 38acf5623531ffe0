"""Check that a function computes the same however it is distributed.

How a program is distributed must not change what it computes. Most functions keep this promise automatically;
functions with per-device code, their own partitioning or assumptions about shards can break it silently.
`check_shard_invariance` runs a function under many placements, or as it is placed, and compares, in float64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import linecache
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..core.differences import SCALES, asymmetric, moved_by_rounding, usual_sizes
from ..core.tree_spec import ARRAYS, flatten_arrays, is_key
from ..sharding.mapping import ResourceMapping
from ._diagnosis import Recording, diagnose
from ._placements import (
    AnyPlacement,
    AsPlaced,
    Distribution,
    Draw,
    is_abstract,
    mesh_of,
    meshes_of_several,
    on_one_device,
    under_mapping,
    with_values,
)
from ._widening import WidenedProgram, wide_dtype

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
    scales: tuple[float, ...]
    """The factors of the arguments at which the results were compared: the ones that made no result NaN."""
    own_precision: tuple[str, ...]
    """The operations that could not be evaluated in float64, such as `pallas_call`."""
    ill_conditioned: tuple[str, ...]
    """The results and gradients whose elements differed, but no further than a rounding of the arguments moves them."""


def check_shard_invariance(
    fn: Callable[..., Any],
    *args: Any,
    reference: Callable[..., Any] | None = None,
    mapping: ResourceMapping | None = None,
    mesh_axes: Sequence[str] = ("data", "model"),
    draws: int = 50,
    seed: int = 0,
    rtol: float | None = None,
    gradients: bool = True,
    refusals: str | None = None,
) -> ShardInvariance:
    """Check that a function gives the same values and gradients on every mesh and under every mapping.

    The function runs on one device, and then under meshes and mappings drawn at random: meshes of different sizes, with
    Auto axes, Explicit axes or both, and mappings of the arguments' axes to one mesh axis or two. If no argument is
    named, it runs once, with the shardings that its arguments have. Its results are compared each time, by values,
    dtypes and axes, and so are the gradients with respect to all floating-point arguments. Random draws are compared
    like everything else: pass the key as an argument. The first difference is reduced to the fewest mapping entries and
    devices that still show it, and raised as an AssertionError that shows the mesh and the mapping as code, and where
    the values on the way start to differ. An error that the function raises under one of the placements is a difference
    too.

    All this is evaluated in float64, also where the function casts to another floating-point dtype, so that rounding
    does not hide a difference: at the arguments, and at 1/16 and 16 times the floating-point arguments, since these may
    take other branches. Arrays with equal elements are changed a little first, and arrays of zeros are made
    small positive numbers, so that all shards differ; zeros beside other elements, integers and booleans stay. The
    result says which operations could only be evaluated at their own precision. Ill-conditioned elements, which a
    rounding of the arguments moves in the reference as far as they differ, are no difference; the result says where.

    Some mappings do not fit a function, such as one that shards two axes of a result over the same mesh axis. If the
    library refuses one for that reason, the placement is skipped and listed among the refusals of the result. It is an
    error if every placement is refused.

    Arguments:
        fn: the function. It may use `axonym.shard_map`, which then runs under the drawn mapping.
        *args: its arguments; named arrays among them provide the axes that are mapped. Abstract ones get random
            values, where they say to be.
        reference: another function of the same arguments that gives the right results, such as the plain version of
            per-device code. By default the function itself. It runs on one device.
        mapping: the only mapping to compare under, on the active mesh, instead of drawn ones.
        mesh_axes: the names of the mesh axes. Include the ones that the function itself mentions.
        draws: how many placements to draw.
        seed: the same seed draws the same placements.
        rtol: how much floating-point values may differ, relative to typical values of the array. By default 1e-8, or
            16 times the precision of the operations that are not evaluated in float64.
        gradients: whether to compare gradients too.
        refusals: a regular expression. Errors with a message in which it is found are refusals too: the function's own
            errors for placements that it does not support, or JAX's errors for raw arrays on Explicit axes.

    >>> x = axn.random.normal(jax.random.key(0), {"batch": 8, "embed": 4})
    >>> result = axn.testing.check_shard_invariance(lambda x: axn.nn.softmax(x, "embed"), x, draws=3)
    >>> result.compared, dict(result.refusals)
    (3, {})
    """
    draw, placed, mesh = Draw(args, seed), None, mesh_of(args)
    if mapping is not None:
        if not draw.sizes or mesh is None:
            raise ValueError(
                "check_shard_invariance: a mapping is for named arguments on the active mesh, "
                + ("and no argument is named." if mesh else "and none is active. Use `jax.set_mesh`.")
            )
        placed, mesh_axes = under_mapping(mapping, mesh), mesh.axis_names
    elif not draw.sizes:
        placed = AsPlaced(mesh)
    elif draws < 1 or not meshes_of_several(mesh_axes):
        raise ValueError(
            f"check_shard_invariance: there is nothing to compare with {draws} draws on {jax.device_count()} devices. "
            "Several devices can be simulated with `jax.config.update('jax_num_cpu_devices', 8)` before JAX starts."
        )
    alone = [placed.on_one_device()] if isinstance(placed, AsPlaced) else on_one_device(draw, mesh_axes, draws)
    check = _Check(fn, with_values(args), reference or fn, gradients, rtol, refusals, placed)
    try:
        check.expect(alone)
    except _NotANumber:
        if not any(map(is_abstract, jax.tree.leaves(args))):
            raise
        check = _Check(fn, with_values(args, simple=True), reference or fn, gradients, rtol, refusals, placed)
        check.expect(alone)
    compared, refused = 0, {}
    for placement in [placed] if placed else draw.placements(meshes_of_several(mesh_axes), draws):
        try:
            difference = check.difference(placement)
        except _Refusal as refusal:
            refused[str(placement)] = str(refusal)
            continue
        compared += 1
        if difference is not None:
            if isinstance(placement, Distribution):
                placement, difference = _simplest_failure(check, placement, difference)
            sentence = check.diagnose(placement, difference) if difference.wrong else None
            name = getattr(fn, "__name__", type(fn).__name__)
            raise AssertionError(
                f"check_shard_invariance: {name} depends on how it is distributed. Under\n"
                f"    {placement}\n{difference.words}" + (f"\n{sentence}" if sentence else "")
            ) from difference.error
    if not compared:
        first = "\n    ".join(next(iter(refused.items())))
        raise ValueError(f"check_shard_invariance: every placement was refused, the first:\n    {first}")
    return ShardInvariance(
        compared, refused, check.scales, tuple(sorted(check.own_precision)), tuple(sorted(check.ill_conditioned))
    )


class _Refusal(Exception):
    """Raised if a placement does not fit the function."""


class _NotANumber(ValueError):
    """Raised if elements of the expected results are NaN."""


class _Mismatch(NamedTuple):
    """A difference from the expected result, and the error, if it is one."""

    words: str
    error: Exception | None = None
    wrong: Sequence[int] = ()
    """The positions of the results and gradients that differ."""
    scale: float = 1.0


class _Outcome(NamedTuple):
    """The results and the gradients of a function under a placement."""

    structs: Any
    values: Mapping[float, Sequence[Sequence[np.ndarray]]]
    """By scale, on the host: the copies that devices have of each, which are equal if the function is right."""
    devices: int
    program: WidenedProgram
    recording: Recording


class _Check:
    """A function, its arguments, and how to compare its results."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        reference: Callable[..., Any],
        gradients: bool,
        rtol: float | None,
        refusals: str | None,
        placed: AnyPlacement | None,
    ):
        """Arguments:
        placed: the placement to compare under, if it is the only one.
        """
        self._fn, self._args, self._reference, self._rtol, self._refusals = fn, args, reference, rtol, refusals
        arrays, self._spec = flatten_arrays(args, named=False)
        inexact = [jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays]
        self._wide = [
            asymmetric(np.asarray(x).astype(wide_dtype(x.dtype))) if i else None
            for x, i in zip(arrays, inexact, strict=True)
        ]
        self._differentiated = [gradients and i for i in inexact]
        self.scales: tuple[float, ...] = SCALES
        self.own_precision: dict[str, Any] = {}
        self.ill_conditioned: set[str] = set()
        self._movements: dict[float, Sequence[np.ndarray]] = {}
        self._placed, self._traced = placed, None
        if placed is not None:
            # Before it runs on one device, since what `jax.shard_map` returns keeps the mesh of its first call. An
            # error is raised, or is a refusal, where it runs.
            with contextlib.suppress(Exception):
                self._traced = self._trace(fn, placed)

    def expect(self, placements: Iterable[AnyPlacement]) -> None:
        """Compute the expected results, under the first placement on one device that the reference accepts."""
        first: Exception | None = None
        for placement in placements:
            try:
                self._expect(placement)
                break
            except Exception as error:
                if not self.is_refusal(error):
                    if isinstance(placement, AsPlaced) and self._reference is self._fn:
                        error.add_note(
                            "This was on one device. For a function that does not run there, pass `reference=`. Write "
                            "shardings in it as a `PartitionSpec`, which fits every mesh, and call `jax.shard_map` in "
                            "it, since what that returns keeps the mesh of its first call."
                        )
                    raise
                first = first or error
        else:
            assert first is not None
            raise first
        if self._expected.devices > 1:
            raise ValueError(
                "check_shard_invariance: the function runs on several devices wherever its arguments are. To say what "
                "is right, pass a function that runs on one device: `reference=`."
            )
        values = {scale: [copies[0] for copies in found] for scale, found in self._expected.values.items()}
        self.scales = tuple([scale for scale in self.scales if not any(map(_has_nan, values[scale]))])
        if 1.0 not in self.scales:
            where = next(path for path, x in zip(self._paths(), values[1.0], strict=True) if _has_nan(x))
            raise _NotANumber(
                f"check_shard_invariance: on one device, {where} has elements that are NaN, which would hide every "
                "difference. Pass arguments for which everything is a number, or `gradients=False`."
            )

    def _expect(self, placement: AnyPlacement) -> None:
        """Compute the expected results under a placement on one device."""
        try:
            self._expected, self._one = self._run(self._reference, placement), placement
        except ValueError:
            # Shardings in the reference may name the complete mesh. It is traced there, and they are left out.
            if self._placed is not None:
                with contextlib.suppress(Exception):
                    elsewhere = self._placed.without_mesh()
                    self._expected, self._one = self._run(self._reference, elsewhere), elsewhere
                    return
            raise

    def difference(self, placement: AnyPlacement) -> _Mismatch | None:
        """Return how the results under a placement differ from the expected ones; None if they agree."""
        try:
            found = self._run(self._fn, placement)
        except Exception as error:
            if isinstance(placement, AsPlaced):
                raise
            if self.is_refusal(error):
                raise _Refusal(_first_sentence(str(error))) from error
            return _Mismatch(f"it raises {type(error).__name__}: {error}", error)
        if isinstance(placement, AsPlaced) and found.devices == 1:
            raise ValueError(
                "check_shard_invariance: no argument has named axes, so there is nothing to map, and everything "
                "runs on one device. Shard arguments, such as with `jax.device_put(x, NamedSharding(mesh, spec))`."
            )
        before, after = self._expected.structs, found.structs
        if jax.tree.structure(before) != jax.tree.structure(after):
            trees = [jax.tree.structure(x[0]) for x in (after, before)]
            return _Mismatch(f"the result is another tree: {trees[0]} instead of {trees[1]}")
        for path, a, b in zip(self._paths(), jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            if a.dtype != b.dtype or a.shape != b.shape:
                return _Mismatch(f"{path} is {b.dtype}{list(b.shape)} instead of {a.dtype}{list(a.shape)}")
        own = {**self._expected.program.own_precision, **found.program.own_precision}
        self.own_precision |= own
        default = max([1e-8, *(16 * float(jnp.finfo(d).eps) for d in own.values())])
        rtol = default if self._rtol is None else self._rtol
        for scale in self.scales:
            expected = [copies[0] for copies in self._expected.values[scale]]
            # Rounding errors of large values, which elements may have whose true value is 0.
            noise = 2.0**-43 * _largest_size(expected)
            # An array whose true values are all 0 has nothing but such errors, of what it was computed from.
            of_arguments = 2.0**-43 * scale * _largest_size([x for x in self._wide if x is not None])
            noises = [noise if np.any(x) else max(noise, of_arguments) for x in expected]
            at = "" if scale == 1 else f", at {'1/16' if scale < 1 else '16'} times the arguments"
            wrong: dict[int, str] = {}
            for i, (a, copies, noise) in enumerate(zip(expected, found.values[scale], noises, strict=True)):
                if any(_words_for_difference(a, b, rtol, noise) for b in copies):
                    moved = self._movement(scale)[i]
                    if words := next(
                        filter(None, (_words_for_difference(a, b, rtol, noise, moved) for b in copies)), None
                    ):
                        wrong[i] = words
                    else:
                        self.ill_conditioned.add(self._paths()[i] + at)
            if wrong:
                first = min(wrong)
                return _Mismatch(f"{self._paths()[first]} {wrong[first]}{at}", wrong=[*wrong], scale=scale)
        return None

    def _movement(self, scale: float) -> Sequence[np.ndarray]:
        """Return how far the elements of each expected result move if the arguments change by a rounding."""
        if scale not in self._movements:
            expected = [copies[0] for copies in self._expected.values[scale]]
            floats = [x for x in self._wide if x is not None]

            def run(floats: Sequence[np.ndarray]) -> list[np.ndarray]:
                found = self._run(self._reference, self._one, (scale,), floats=floats)
                return [copies[0] for copies in found.values[scale]]

            self._movements[scale] = moved_by_rounding(floats, expected, run)
        return self._movements[scale]

    def diagnose(self, placement: AnyPlacement, difference: _Mismatch) -> str | None:
        """Return a sentence about the operation that makes results differ, if the values on the way tell."""
        try:
            found = self._run(self._fn, placement, (difference.scale,), recording=True)
            expected = self._run(self._reference, self._one, (difference.scale,), recording=True)
            parameters = [p.name for p in inspect.signature(self._reference).parameters.values() if p.kind < 2]
        except Exception:  # without its cause, the difference is reported all the same
            return None
        # A gradient passes what was computed for the results, so results tell where it begins, if they differ.
        results = len(jax.tree.leaves(self._expected.structs[0]))
        ends = [i for i in difference.wrong if i < results] or difference.wrong
        wrong = [p for i in ends if (p := found.program.origins[i]) is not None]
        paths = [path for path, x in jax.tree.leaves_with_path(self._args) if isinstance(x, ARRAYS)]
        names = [(parameters[p[0].idx :] or [f"args[{p[0].idx}]"])[0] + jax.tree_util.keystr(p[1:]) for p in paths]
        mesh = dict(placement.mesh.shape if isinstance(placement.mesh, Mesh) else placement.mesh or {})
        return diagnose(found.recording, expected.recording, wrong, [n.removesuffix(".array") for n in names], mesh)

    def is_refusal(self, error: Exception) -> bool:
        """Return whether an error says that a placement does not fit, rather than that something is wrong."""
        if self._refusals is not None and re.search(self._refusals, str(error)):
            return True
        if not isinstance(error, ValueError) or not re.search(r"\bmesh\b", str(error)):
            return False
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        raised = linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("raise ")  # not by JAX below it
        return raised and frame.f_globals.get("__name__", "").partition(".")[0] == __name__.partition(".")[0]

    def _run(
        self,
        fn: Callable[..., Any],
        placement: AnyPlacement,
        scales: Sequence[float] = (),
        recording: bool = False,
        floats: Sequence[np.ndarray] | None = None,
    ) -> _Outcome:
        """Return the results and the gradients of a function under a placement, also at other values of its floats."""
        other = iter(floats or ())
        given = [w if w is None or floats is None else next(other) for w in self._wide]
        traced_under = placement.traced_under if isinstance(placement, AsPlaced) else None
        known = self._traced if fn is self._fn and (traced_under or placement) is self._placed else None
        program, structs = known or self._trace(fn, traced_under or placement)
        with placement.active():
            arrays = self._arrays(placement)
            widened = WidenedProgram(program, recording, placement.alone, traced_under is not None)
            values, recorded, devices = {}, {}, 1
            with jax.enable_x64(True):
                for scale in scales or self.scales:
                    wide = list(arrays)
                    for i, (x, w) in enumerate(zip(arrays, given, strict=True)):
                        if w is not None:
                            wide[i] = jax.device_put(w * scale, x.sharding) if x.committed else jnp.asarray(w * scale)
                    results, recorded = widened.run(wide)
                    values[scale] = [_copies_of_devices(x) for x in results]
                    devices = max([devices, *(len(x.sharding.device_set) for x in (*wide, *results))])
        recorded = {i: np.asarray(x) for i, x in recorded.items()}
        return _Outcome(structs, values, devices, widened, Recording(widened.steps, recorded))

    def _trace(self, fn: Callable[..., Any], placement: AnyPlacement) -> tuple[Any, Any]:
        """Return the program of a function under a placement, and what its results and gradients are."""
        with placement.active():
            traced = jax.make_jaxpr(functools.partial(self._results_and_gradients, fn), return_shape=True)
            return traced(self._arrays(placement))

    def _arrays(self, placement: AnyPlacement) -> list[jax.Array]:
        """Return the arrays of the arguments where a placement puts them."""
        return [jnp.asarray(x) for x in flatten_arrays(placement.place(self._args), named=False)[0]]

    def _paths(self) -> list[str]:
        """Return names of all results and gradients."""
        paths = [path for path, _ in jax.tree.leaves_with_path(self._expected.structs)]
        return [("the result", "the gradient")[p[0].idx] + jax.tree_util.keystr(p[1:]) for p in paths]

    def _results_and_gradients(self, fn: Callable[..., Any], arrays: Sequence[Any]) -> Any:
        inexact = list(itertools.compress(arrays, self._differentiated))

        def call(inexact: Sequence[Any]) -> Any:
            replaced = iter(inexact)
            filled = [next(replaced) if c else x for x, c in zip(arrays, self._differentiated, strict=True)]
            return fn(*self._spec.unflatten(filled))

        def total(inexact: Sequence[Any]) -> tuple[jax.Array, Any]:
            results = call(inexact)
            added = jnp.float32(0)
            for x in jax.tree.leaves(results):
                if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact):
                    # A different weight for each element, so that no error cancels out in the gradients.
                    weights = jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
                    x = jnp.real(x) + jnp.imag(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x
                    added += jnp.sum(x.astype(jnp.float32) * weights)
            return added, results

        if not inexact:
            return _arrays_of(call(())), ()
        gradients, results = jax.grad(total, has_aux=True)(inexact)
        return _arrays_of(results), gradients


def _first_sentence(message: str) -> str:
    """Return the first line of a message, with the first of a list that it announces."""
    first, _, rest = message.partition("\n")
    return f"{first.rstrip()} {rest.partition(chr(10))[0].strip()}" if first.rstrip().endswith(":") else first


def _has_nan(x: np.ndarray) -> bool:
    return np.issubdtype(x.dtype, np.inexact) and bool(np.isnan(x).any())


def _largest_size(arrays: Iterable[np.ndarray]) -> float:
    return max([float(np.max(usual_sizes(x), initial=0)) for x in arrays], default=0.0)


def _words_for_difference(a: np.ndarray, b: np.ndarray, rtol: float, noise: float, moved: Any = 0.0) -> str | None:
    """Say how an array differs from the expected one, `a`, whose elements a rounding moved; None if it does not."""
    if not np.issubdtype(a.dtype, np.inexact):
        return None if np.all((a == b) | (moved > 0)) else "has other values"
    if _has_nan(b):
        return "has elements that are NaN"
    typical = float(np.median(sizes)) if (sizes := usual_sizes(a)).size else 0.0
    if np.allclose(b, a, rtol=rtol, atol=rtol * typical + noise + moved):
        return None
    with np.errstate(invalid="ignore"):
        most = np.nanmax(np.abs(a - b))
    return f"differs by up to {most:.3g}, with values up to {np.max(sizes, initial=0.0):.3g}"


def _copies_of_devices(x: jax.Array) -> list[np.ndarray]:
    """Return the copies of an array that devices have. Per-device code may say that they are equal, and be wrong."""
    copies: dict[int, np.ndarray] = {}
    for part in x.addressable_shards if x.size else ():
        copies.setdefault(part.replica_id, np.empty(x.shape, x.dtype))[part.index] = part.data
    return [*copies.values()] or [np.empty(x.shape, x.dtype)]


def _arrays_of(results: Any) -> Any:
    """Return only the arrays of results: random keys as their data, lists as tuples, and nothing static."""

    def data(x: Any) -> Any:
        if isinstance(x, list):
            return tuple(map(_arrays_of, x))
        if isinstance(x, jax.Array) and is_key(x):
            return jax.random.key_data(x)
        if getattr(x, "dtype", None) == jax.dtypes.float0:
            return None  # the gradient of an integer
        return x if isinstance(x, (jax.Array, np.ndarray, bool, int, float, complex)) else None

    return jax.tree.map(data, results, is_leaf=lambda x: isinstance(x, list))


def _simplest_failure(check: _Check, placement: Distribution, difference: _Mismatch) -> tuple[Distribution, _Mismatch]:
    """Return the simplest placement under which the results still differ, and how they differ."""
    for smaller in placement.smaller():
        try:
            found = check.difference(smaller)
        except _Refusal:
            continue
        if found is not None:
            return _simplest_failure(check, smaller, found)
    return placement, difference
