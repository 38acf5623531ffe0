"""Compile operations, once for each combination of names.

Dispatching `jax.lax` primitives one by one from Python is slow, and so is matching operands by name. Both happen once
for each operation, operand names and static arguments: a *kernel* is one inlined `jax.jit` function over raw arrays,
found again by one dictionary lookup. A kernel is inlined into a program that is being traced, so
hand-written positional code compiles to the same program.

Outside of jit, operations that differ only in names run one compiled function: see `shared`.

Names and axes are checked inside the kernel, which means once for each new shape. Shapes, dtypes, shardings and the
mesh are part of jit's own cache key, so no decision made there can go stale.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, PartitionSpec

from ..axis import Axis, AxisSelection, AxisSelector, Names, name_of, names_without, selectors
from ..core import errors
from ..core.jax_versions import INLINE, is_staged
from ..distribution import active_settings, output_sharding
from ..distribution.active_settings import ACTIVE, Entry, Settings, active_mapping, intern_settings, is_mapped
from ..distribution.axis_marks import is_marking, marked, marked_results
from ..distribution.axis_rules import AxisRule, names_of_results
from ..distribution.fsdp_ops import run_gathering_parameters
from ..distribution.mesh_axes import (
    AnyMesh,
    axes_in,
    check_mapped,
    entry_of,
    explicit_mesh,
    has_explicit,
    mapped_axes,
    mesh_around,
    replicate_along,
    reshard,
    shard_count,
)
from ..distribution.operation_scope import operation_scope, unmarked
from ..distribution.padded_array import refuse_padded
from ..distribution.per_device import run_per_device
from ..distribution.policy import Successors
from ..named_array import NamedArray, wrap_result

CACHE_SIZE = 8192


class Kernel:
    """A compiled positional function, and the names of its result.

    Arguments:
        call: the function.
        names: the axes of its result, or a tuple of them for several.
        shared: the same function compiled for any names, for operations that run at once: see `shared`.
        numbers: the number that stands there for each name.
    """

    __slots__ = ("_shared_under", "call", "names", "numbers", "shared")

    def __init__(
        self,
        call: Callable[..., Any],
        names: Any,
        shared: Callable[..., Any] | None = None,
        numbers: Mapping[str, str] = MappingProxyType({}),
    ):
        self.call = call
        self.names = names
        self.shared = shared
        self.numbers = numbers
        self._shared_under: tuple[Settings | None, Callable[..., Any]] = None, call

    def apply(self, *arrays: Any) -> Any:
        """Call the function, and name the axes of its result or results."""
        # Apart from finding the kernel, this is all the Python code of an eager operation: every frame counts here.
        shared = self.shared
        if shared is not None:
            for x in arrays:
                if type(x) not in _concrete and _is_staged(x):
                    break
            else:
                if active_settings.activated and (settings := ACTIVE.value) is not None:
                    known, under = self._shared_under
                    shared = under if known is settings else self._call_under(settings, shared)
                try:
                    result = shared(*arrays)
                except (FloatingPointError, jax.errors.JaxRuntimeError):
                    raise  # from running the program, not from its checks
                except Exception as error:
                    refused = error
                else:
                    if type(result) in _concrete:
                        return NamedArray(result, (), self.names)
                    return wrap_result(result, self.names)
                refuse_padded(arrays)
                self.call(*arrays)  # raises the error in the user's terms
                raise refused
        try:
            return wrap_result(self.call(*arrays), self.names)
        except Exception:
            refuse_padded(arrays)
            raise

    def _call_under(self, settings: Settings, shared: Callable[..., Any]) -> Callable[..., Any]:
        """Return the shared function under what settings say of these names; `call` if the surroundings count, too."""
        call = self.call
        if not (settings.environment or settings.kept or settings.mapped or settings.marked):
            compute, stored = (
                {number: mapping[name] for name, number in self.numbers.items() if name in mapping}
                for mapping in (settings.mapping, settings.parameter_mapping)
            )
            if settings.mapping and not compute:
                compute = {"#": None}  # there is a mapping, by which each new array is replicated
            own = intern_settings(mapping=compute, parameter_mapping=stored, uneven=settings.uneven)

            def call(*arrays: Any) -> Any:
                with ACTIVE(own):
                    return shared(*arrays)

        self._shared_under = settings, call
        return call


_concrete: set[type] = {int, float}
"""Types of operands that are not traced: cheaper to check than `isinstance`."""


def _is_staged(x: Any) -> bool:
    if isinstance(x, Tracer):
        return is_staged(x)
    # JAX hides the class of its arrays, so it is learned from the first one.
    if isinstance(x, jax.Array):
        _concrete.add(type(x))
    return False


class UnknownAxes(Exception):
    """Raised if a kernel cannot be built because an operand lacks the selected axes."""

    def __init__(self, what: str, missing: Sequence[str], names: Names, operand: int = 0):
        super().__init__(what, missing)
        self.what, self.missing, self.names, self.operand = what, missing, names, operand


def cached(build: Callable[..., Kernel]) -> Callable[..., Kernel]:
    """Decorate a function that builds kernels from hashable static arguments, so that each is built once.

    The cache is bounded: the least recently used kernels are dropped. It distinguishes 1, 1.0 and True. For a selection
    with unknown axes, it returns a kernel that raises the error when it is called, because the message shows the
    sizes, which are known only then.
    """

    @functools.lru_cache(maxsize=CACHE_SIZE, typed=True)
    @functools.wraps(build)
    def lookup(*key):
        try:
            return build(*key)
        except UnknownAxes as error:
            refused = error.with_traceback(None)

        def refuse(*arrays: Any) -> None:
            shape = jnp.shape(arrays[refused.operand])
            raise ValueError(errors.missing_axes(refused.what, refused.missing, refused.names, shape))

        return Kernel(refuse, None)

    return lookup


def shared(*holders: str) -> Callable[[Callable[..., Kernel]], Callable[..., Kernel]]:
    """Decorate a builder as `cached` does, and let kernels that differ only in names share one compiled function.

    Names only determine which axes are the same, and what the active mapping says of each. So the builder is called
    with numbers for the names, "#0" for the first that occurs, and that kernel runs where operations run at once: on
    arrays, also under `jax.grad` and `jax.vmap` outside of jit. There, the mapping has these numbers for names, and
    nothing of other names, so what it says of these compiles nothing anew. The kernel makes the same checks. If it
    raises an error, the kernel of the actual names is called, which raises it in the user's terms. That kernel also
    runs where an operation becomes part of a program, because its scope contains the names: see `operation_scope`.

    Use it for builders that only compare names. Builders that sort names, or parse a text with names, use `cached`.

    Arguments:
        holders: the parameters of the builder that hold names: as strings, in axes, in tuples of these, or in objects
            with a method `renamed`, which takes a function of names, axes and tuples of them.
    """

    def decorate(build: Callable[..., Kernel]) -> Callable[..., Kernel]:
        own = cached(build)
        numbered = functools.lru_cache(maxsize=CACHE_SIZE, typed=True)(build)
        parameters = [*inspect.signature(build).parameters]
        holds = [parameter in holders for parameter in parameters]

        @functools.lru_cache(maxsize=CACHE_SIZE, typed=True)
        @functools.wraps(build)
        def lookup(*key):
            numbers: dict[str, str] = {}
            # A last parameter `*values` stands for all further parts of the key.
            held = [holds[min(i, len(holds) - 1)] for i in range(len(key))]
            replaced = [_numbered_key(x, numbers) if h else x for x, h in zip(key, held, strict=True)]
            if not any(_mentions_names(x, numbers) for x, h in zip(key, held, strict=True) if not h):
                try:
                    kernel = numbered(*replaced)
                    names = _restored_names(kernel.names, {number: name for name, number in numbers.items()})
                except (TypeError, ValueError, KeyError, UnknownAxes):
                    pass  # the builder refuses these arguments, and does so again below, or it invents names
                else:
                    return Kernel(functools.partial(_call, own, key), names, kernel.call, numbers)
            return own(*key)

        return lookup

    return decorate


def _numbered_key(x: Any, numbers: dict[str, str]) -> Any:
    """Replace the names in a part of a key by numbers, in the order in which they first occur."""
    if isinstance(x, str):
        return numbers.setdefault(x, f"#{len(numbers)}")
    if isinstance(x, Axis):
        return Axis(_numbered_key(x.name, numbers), x.size)
    if hasattr(x, "renamed"):
        return x.renamed(lambda part: _numbered_key(part, numbers))
    return tuple(_numbered_key(part, numbers) for part in x) if isinstance(x, tuple) else x


def _mentions_names(x: Any, names: Collection[str]) -> bool:
    """Return whether a part of a key that should hold no names contains one of these names."""
    if type(x) is tuple:
        return any(_mentions_names(part, names) for part in x)
    return isinstance(x, Axis) or (isinstance(x, str) and x in names)


def _restored_names(numbers: Any, names: Mapping[str, str]) -> Any:
    """Return the names of one or several results from their numbers."""
    if isinstance(numbers, tuple):
        return tuple(_restored_names(number, names) for number in numbers)
    # Equal names are one object everywhere, which Python compares first.
    return sys.intern(names[numbers])


def _call(build: Callable[..., Kernel], key: tuple[Any, ...], *arrays: Any) -> Any:
    return build(*key).call(*arrays)


def select(what: str, names: Names, selection: AxisSelection | None, operand: int = 0) -> Names:
    """Return the selected names, all of which must exist; None selects every axis."""
    if selection is None:
        return names
    chosen = tuple(name_of(s) for s in selectors(selection, lambda found: errors.not_a_selector(found, names)))
    missing = [n for n in chosen if n not in names]
    if missing:
        raise UnknownAxes(what, missing, names, operand)
    return errors.distinct(what, chosen)


def select_one(what: str, names: Names, selector: AxisSelector, operand: int = 0) -> str:
    """Return the only selected name."""
    chosen = select(what, names, selector, operand)
    if len(chosen) != 1:
        raise ValueError(f"{what}: expected one axis, got {errors.describe_axes(chosen)}.")
    return chosen[0]


def one_selector(what: str, axis: Any) -> Any:
    """Return the one axis that a user selected, in a form that can be part of a cache key."""
    if axis is None or isinstance(axis, (str, Axis, int)):
        return axis  # None and positions are rejected later, where the axes of the array are known
    chosen = selectors(axis)
    if len(chosen) != 1:
        raise ValueError(f"{what}: expected one axis, got {errors.describe_axes(map(name_of, chosen))}.")
    return chosen[0]


def hashable(selection: AxisSelection | None) -> Any:
    """Return a selection in a form that can be part of a cache key."""
    if selection is None or isinstance(selection, (str, Axis, tuple)):
        return selection
    found = selection if isinstance(selection, list) else [selection]
    if all(isinstance(s, (str, Axis, int, float)) for s in found):
        return tuple(found)  # numbers are rejected where the names of the axes are known
    return selectors(selection)


def make_kernel(
    what: str,
    fn: Callable[..., Any],
    in_names: Sequence[Names],
    out_names: Any,
    uses: Mapping[str, str] | None = None,
    *,
    successors: Successors = MappingProxyType({}),
    product: bool = False,
    same_sizes: bool = True,
    selection: AxisSelection | None = None,
    mesh_aware: bool = False,
    per_device: Callable[..., Any] | None = None,
    on_auto: Literal["", "replicated", "per device"] = "",
    by_products: Callable[..., Any] | None = None,
    keep_unused: bool = True,
) -> Kernel:
    """Make a kernel for one operation on operands of the given names.

    Arguments:
        what: the public name of the operation; it names the compiled function and starts every message.
        fn: the positional function.
        in_names: the axes of each operand; `()` for a scalar.
        out_names: the axes of the result, or a tuple of them where `fn` returns a tuple.
        uses, successors, product: what it does to these axes: see `AxisRule`, from which its distribution follows.
        same_sizes: whether an axis must have one size in all operands.
        selection: the axes that the user selected, whose sizes, if given, are checked.
        mesh_aware: whether `fn` itself sets the sharding of its result on Explicit mesh axes.
        per_device: a function of the operands that is tried first. If one of them is a parameter in its storage
            sharding, it runs the operation per device; if not, it returns None: see `axonym.distribution.fsdp_ops`.
        on_auto, by_products: see `_along`.
        keep_unused: whether operands whose values are not used are kept, because the sharding of the result follows
            from them (`iscomplex` of floats, say). From jax 0.12 on this keeps alive the arrays that `fn` closes over.
    """
    rule = AxisRule(in_names, out_names, uses, dict(successors), product)
    if rule.by_index and rule.gathers:
        per_device = functools.partial(run_gathering_parameters, fn, in_names, names_of_results(out_names)[0])
    if rule.along:
        fn, mesh_aware = _along(what, fn, rule, on_auto, by_products), True
    sized = [s for s in selectors(selection) if isinstance(s, Axis)]
    all_names = dict.fromkeys(unmarked(n) for names in (*in_names, *names_of_results(out_names)) for n in names)

    def kernel(*arrays):
        check_operands(what, in_names, arrays, same_sizes)
        check_selection(what, in_names, arrays, sized)
        check_mapped(what, all_names)
        arrays = as_in_jit(arrays)
        with jax.named_scope(operation_scope(what, in_names, out_names, arrays, rule=rule)):
            if not is_marking():
                return compute(*arrays)
            return marked_results(compute(*marked(arrays, in_names)), out_names)

    def compute(*arrays):
        if mesh_aware:
            return fn(*arrays)
        if per_device is not None and (result := per_device(*arrays)) is not None:
            return result
        return output_sharding.call_with_output_sharding(what, fn, rule, arrays)

    kernel.__name__ = kernel.__qualname__ = what
    return Kernel(jax.jit(kernel, inline=INLINE, keep_unused=keep_unused), out_names)


def as_in_jit(arrays: Sequence[Any]) -> list[jax.Array]:
    """Convert operands to JAX arrays, as `jax.jit` would, also under `jax.disable_jit`."""
    return [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in arrays]


@shared("names", "axis")
def axis_kernel(
    fn: Callable[..., Any], what: str, names: Names, axis: AxisSelector, options: Sequence[str], *values: Any
) -> Kernel:
    """Make a kernel for a function along one axis, which the result keeps; the options and their values are static."""
    position, keywords = names.index(select_one(what, names, axis)), dict(zip(options, values, strict=True))
    return make_kernel(what, lambda x: fn(x, axis=position, **keywords), (names,), names, selection=axis)


def _along(
    what: str, fn: Callable[..., Any], rule: AxisRule, on_auto: str, by_products: Callable[..., Any] | None
) -> Callable[..., Any]:
    """Return a function for an operation, such as a transform, that needs all of some axes; the others are its batch.

    The partitioner knows little about such operations: it gathers batches that could stay sharded, and is unreliable
    for the axes they run along. On Explicit mesh axes the names determine what to do: the axes that the operation runs
    along are replicated, each device computes its shard of the batch, and the result is sharded as for any operation.

    Arguments:
        fn: the positional function. Every result has all batch axes. As it is called with a shard of the batch, it
            takes sizes from its operands.
        on_auto: what happens on Auto mesh axes, too: see `_on_auto_axes`. With "replicated", these axes are replicated;
            with "per device", each device computes its shard of the batch, as the active mapping shards it. Needed
            where XLA fails to partition the operation along sharded axes, or ends the process.
        by_products: the same function as a sum of products. Needed where `fn` is mapped over an axis on a mesh with
            Explicit axes: JAX cannot shard the grouped convolution that `jax.vmap` makes, and the mesh axes of that
            axis do not become manual inside `shard_map`. Also used where no mapping says how a batch is sharded.
    """
    in_names, out_names, along = rule.operands, rule.results, rule.along
    if on_auto:
        fn = _on_auto_axes(fn, rule, on_auto == "per device", by_products)

    def positional(*arrays):
        if by_products is not None and is_mapped() and has_explicit(mesh_around(arrays)):
            return output_sharding.call_with_output_sharding(what, by_products, rule, arrays)
        mesh = explicit_mesh(arrays)
        if mesh is None:
            return fn(*arrays)
        if any(t != AxisType.Explicit for t in mesh.axis_types):
            # JAX cannot differentiate a `shard_map` over some of the mesh axes only.
            return output_sharding.call_with_output_sharding(what, fn, rule, arrays)
        several, specs = output_sharding.infer_output_specs(what, fn, rule, arrays, mesh)
        layouts = out_names if several else (out_names,)
        entries = {n: e for names, spec in zip(layouts, specs, strict=True) for n, e in zip(names, spec, strict=True)}
        batch = {n for names in in_names for n in names if n not in along}

        def local(names: Names) -> PartitionSpec:
            return PartitionSpec(*(entries.get(n) if n in batch else None for n in names))

        out_specs = tuple(map(local, layouts))
        found = run_per_device(fn, arrays, [*map(local, in_names)], out_specs if several else out_specs[0], mesh)
        # Devices return whole axes where the operation runs along them; the mapping may shard these again.
        results = [reshard(y, spec, mesh) for y, spec in zip(found if several else [found], specs, strict=True)]
        return tuple(results) if several else results[0]

    return positional


def _on_auto_axes(
    fn: Callable[..., Any], rule: AxisRule, per_device: bool, by_products: Callable[..., Any] | None
) -> Callable[..., Any]:
    """Return a function that avoids what the partitioner does wrongly along some axes of its operands and results.

    XLA adds up the shards of a convolution along a sharded axis over all mesh axes, also over mesh axes along which the
    devices have equal shards; on a mesh with one axis there are none. So the axes that the operation runs along are
    replicated. If operands share a batch axis, or are mapped over, XLA does the same whichever axis is sharded, fails,
    or ends the process, so then each device computes its shard of the batch, as the active mapping shards it. Without a
    mapping, the operation is computed as a sum of products, which keeps the sharding of the batch.
    """
    in_names, out_names, along = rule.operands, rule.results, rule.along
    shared = {n for n in out_names if n not in along and sum(n in names for names in in_names) > 1}

    def kept(names: Names, x: jax.Array, mesh: AnyMesh) -> jax.Array:
        return replicate_along(x, [n in along for n in names], mesh)

    def call(*arrays):
        mesh = mesh_around()
        large = sum(size > 1 for size in mesh.shape.values())
        if AxisType.Auto not in mesh.axis_types or not large:
            return fn(*arrays)
        if AxisType.Manual not in mesh.axis_types and (shared or is_mapped() or (per_device and active_mapping())):
            if by_products is not None and not active_mapping():
                return by_products(*arrays)
            pairs = zip(in_names, arrays, strict=True)
            sizes = {n: size for names, x in pairs for n, size in zip(names, x.shape, strict=True)}
            entries: dict[str, Entry] = {}
            for n in (n for n in out_names if n not in along):  # one that its mesh axes do not divide is replicated
                entry = entry_of([a for a in mapped_axes(n) if a not in axes_in(entries.values())])
                entries[n] = entry if sizes[n] % shard_count(mesh, entry) == 0 else None
            specs = [PartitionSpec(*map(entries.get, names)) for names in (*in_names, out_names)]
            return run_per_device(fn, arrays, specs[:-1], specs[-1], mesh)
        if per_device:
            return fn(*arrays)
        if large < 2:
            # Values are wrong even there if both operands are one value, sharded: the kernel must be replicated.
            return fn(arrays[0], *[kept(names, x, mesh) for names, x in zip(in_names[1:], arrays[1:], strict=True)])
        found = fn(*[kept(names, x, mesh) for names, x in zip(in_names, arrays, strict=True)])
        if isinstance(found, (tuple, list)):
            return tuple(kept(names, x, mesh) for names, x in zip(out_names, found, strict=True))
        return kept(out_names, found, mesh)

    return call


def map_over(fn: Callable[..., Any], over: Names, in_names: Sequence[Names], out_names: Names) -> Callable[..., Any]:
    """Map a positional function over some axes, the first one outermost; operands may lack some of them.

    Arguments:
        fn: the function of operands without these axes; its result lacks them too.
        in_names: the axes of each operand, with the axes that are mapped over.
        out_names: the same for the result.
    """
    for depth in reversed(range(len(over))):
        name, outer = over[depth], over[:depth]
        in_axes = tuple(position_without(names, name, outer) for names in in_names)
        fn = jax.vmap(fn, in_axes=in_axes, out_axes=position_without(out_names, name, outer))
    return fn


def position_without(names: Names, name: str, removed: Names) -> int | None:
    """Return the position of a name among the names without some; None if it is not one of them."""
    return names_without(names, *removed).index(name) if name in names else None


def check_operands(what: str, in_names: Sequence[Names], arrays: Sequence[Any], same_sizes: bool = True) -> None:
    """Check that every operand has as many axes as names, and that an axis has one size throughout."""
    seen: dict[str, tuple[int, int]] = {}
    for position, (names, x) in enumerate(zip(in_names, arrays, strict=True)):
        if isinstance(x, (list, tuple, dict)):
            raise TypeError(
                f"{what}: expected a named array or a number, got {type(x).__name__}. Name the axes of a list of "
                "numbers with axonym.named([1, 2], axes)."
            )
        shape = jnp.shape(x)  # under `jax.disable_jit`, a Python number is not converted to an array
        if len(names) != len(shape):
            if not names:
                raise TypeError(
                    f"{what}: an operand has no axis names but shape {shape}. Only scalars go without names: "
                    "name its axes with axonym.named(array, axes)."
                )
            raise ValueError(f"{what}: {errors.wrong_rank(names, shape)}")
        if not same_sizes:
            continue
        for name, size in zip(names, shape, strict=True):
            first, known = seen.setdefault(name, (position, size))
            if known != size:
                places = [(f"operand {first}", known), (f"operand {position}", size)]
                raise ValueError(errors.size_mismatch(what, name, places))


def check_selection(what: str, in_names: Sequence[Names], arrays: Sequence[Any], sized: Sequence[Axis]) -> None:
    """Check the sizes of axes that the user selected with a size."""
    for axis in sized:
        found = next(x.shape[n.index(axis.name)] for n, x in zip(in_names, arrays, strict=True) if axis.name in n)
        if found != axis.size:
            places = [("the array", found), ("the argument", axis.size)]
            raise ValueError(errors.size_mismatch(what, axis.name, places))


def align(x: jax.Array, names: Names, out_names: Names) -> jax.Array:
    """Return `x` with its axes in the order of `out_names`, and an axis of size one for each name that it lacks."""
    order = tuple(names.index(n) for n in out_names if n in names)
    if order != tuple(range(len(names))):
        x = jax.lax.transpose(x, order)
    if len(names) < len(out_names):
        x = jax.lax.expand_dims(x, [i for i, n in enumerate(out_names) if n not in names])
    return x


def transpose_to(x: jax.Array, names: Names, out_names: Names) -> jax.Array:
    """Return `x` with its axes in another order; the same array if it already has that order."""
    return x if names == out_names else jax.lax.transpose(x, tuple(names.index(n) for n in out_names))


def broadcast_names(what: str, all_names: Sequence[Names]) -> Names:
    """Return the axes of the first operand that has the axes of all operands."""
    union = set().union(*all_names)
    for names in all_names:
        if len(names) == len(union):
            return names
    listed = " and ".join(errors.describe_axes(n) for n in all_names if n)
    raise ValueError(
        f"{what}: cannot broadcast {listed}: no operand has all the axes, so the result would be an outer product, "
        "as by `meshgrid`. If that is meant, say so with `broadcast_axis` on one operand, or "
        "`axonym.broadcast_arrays(..., require_subset=False)`. If two of the axes are the same, give them one name "
        "with `rename`."
    )
