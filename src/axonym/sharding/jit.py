"""`named_jit`: `jax.jit` that shards arguments and results by name; and `fsdp`, which stores parameters sharded.

Results are constrained inside the program. How a call is compiled is in `_compiled_function`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar, Unpack, overload

import jax

from ..core import errors
from ._compiled_function import CompiledFunction, JitOptions
from .annotations import hashable_annotations
from .leaves import leaves_of
from .mapping import ResourceMapping, Uneven, as_mapping, check_uneven, normalize_mapping
from .meshes import current_mesh
from .placement import ComputeMappingOrParameterRule, ParameterOrComputeMapping, Placement, Rule, advise_paths, axes_of
from .shard import needs_mesh, store, warn_without_mesh

P = ParamSpec("P")
R = TypeVar("R")

Donation: TypeAlias = bool | Callable[[Any], bool] | Sequence[Any] | Mapping[str, Any] | None
"""A tree prefix that says which arguments may be overwritten."""


class StepOptions(JitOptions, total=False):
    """The arguments that `named_jit` and `fsdp` share."""

    donate_args: Donation
    donate_kwargs: Mapping[str, Any] | None
    annotation_shardings: Mapping[str, Placement] | None
    uneven: Uneven


class NamedJitOptions(StepOptions, total=False):
    """The arguments of `named_jit` besides the function and the mapping."""

    in_placement: Placement
    out_placement: Placement


class FsdpOptions(StepOptions, total=False):
    """The arguments of `fsdp` besides the function, by keyword."""

    parameter_mapping: ResourceMapping | Rule
    compute_mapping: ResourceMapping


@overload
def named_jit(
    fn: Callable[P, R], mapping: ResourceMapping | None = None, **options: Unpack[NamedJitOptions]
) -> CompiledFunction[P, R]: ...
@overload
def named_jit(
    fn: None = None, mapping: ResourceMapping | None = None, **options: Unpack[NamedJitOptions]
) -> Callable[[Callable[P, R]], CompiledFunction[P, R]]: ...
def named_jit(
    fn: Callable[P, R] | None = None,
    mapping: ResourceMapping | None = None,
    *,
    in_placement: Placement = None,
    out_placement: Placement = None,
    donate_args: Donation = None,
    donate_kwargs: Mapping[str, Any] | None = None,
    annotation_shardings: Mapping[str, Placement] | None = None,
    uneven: Uneven = None,
    **jit_options: Unpack[JitOptions],
) -> CompiledFunction[P, R] | Callable[[Callable[P, R]], CompiledFunction[P, R]]:
    """Compile a function, with a mapping active inside it and its arguments and results sharded by name.

    Arguments can be anything: leaves that are not arrays (strings, functions, Python numbers, fields of models) are
    static, and a call with another value compiles again. The same holds for results. A method's object is an argument
    too. If it is not a pytree, it is static, and the program compiled for it keeps it alive. A function keeps its
    latest 256 programs.

    Arguments:
        fn: the function, method or class to compile. Without it, `named_jit` is a decorator.
        mapping: the mapping that is active inside. By default the mapping around the call.
        in_placement: the placement of the arguments: one for all of them, a tuple with one for each positional
            parameter, or a dictionary with some by parameter. Arguments without one keep their sharding. In a tuple
            or dictionary, None is the active mapping.
        out_placement: the placement of the results; `mapping` by default.
        donate_args: which positional arguments may be overwritten: a tree prefix of booleans for each.
        donate_kwargs: which keyword arguments may be: a dictionary of such prefixes.
        annotation_shardings: the placements of annotated values: see `axonym.sharding.with_sharding_annotation`.
        uneven: what to do inside with axes that their mesh axes do not divide: see `axonym.axis_mapping`. With "pad",
            results are stored padded. Arguments that are stored padded have their true size inside in any case.
        **jit_options: more arguments of `jax.jit`.

    >>> mesh = axn.make_mesh({"data": -1})
    >>> with axn.set_mesh(mesh):
    ...     y = axn.named_jit(lambda x: x * 2, {"batch": "data"})(axn.ones({"batch": 16}))
    >>> y.array.sharding.spec
    P('data',)
    """
    active: dict[str, Any] = {}
    if mapping is not None:
        if not isinstance(mapping, Mapping):
            raise TypeError(
                f"named_jit: `mapping` is made active inside, so it is a resource mapping, not a "
                f"{type(mapping).__name__}.{as_mapping(mapping)}"
            )
        active["mapping"] = normalize_mapping(mapping, "named_jit")
    make = functools.partial(
        _compile_named_jit,
        "named_jit",
        active=active,
        in_placement=in_placement,
        out_placement=out_placement,
        donate_args=donate_args,
        donate_kwargs=donate_kwargs,
        annotation_shardings=annotation_shardings,
        uneven=uneven,
        **jit_options,
    )
    return make if fn is None else make(fn)


_USAGE = "use fsdp(fn, parameter_mapping, compute_mapping), or @fsdp(parameter_mapping, compute_mapping)"


@overload
def fsdp(
    fn: Callable[P, R],
    parameters: ResourceMapping | Rule | None = None,
    compute: ResourceMapping | None = None,
    /,
    **options: Unpack[FsdpOptions],
) -> CompiledFunction[P, R]: ...
@overload
def fsdp(
    parameters: ResourceMapping | Rule | None = None,
    compute: ResourceMapping | None = None,
    /,
    **options: Unpack[FsdpOptions],
) -> Callable[[Callable[P, R]], CompiledFunction[P, R]]: ...
def fsdp(
    *args: Any,
    parameter_mapping: ResourceMapping | Rule | None = None,
    compute_mapping: ResourceMapping | None = None,
    **options: Any,
) -> Any:
    """Compile a step for fully sharded data parallelism: `named_jit` with a parameter and a compute mapping.

    Between uses, `parameter_mapping` shards parameters, their gradients and the optimizer state. Axes that it does not
    mention are stored as `compute_mapping` shards them: by `{"embed": "data"}` and `{"batch": "data", "mlp": "model"}`,
    a weight with embed and mlp is stored over both mesh axes.

    In the step, `compute_mapping` is active. An operation between a parameter and an array sharded along the batch
    all-gathers the parameter and reduce-scatters its gradient: the program asks for one of each for each use, on any
    mesh. (The compiler for TPUs makes an all-reduce of a reduce-scatter over a whole square or cubic slice.) To gather
    again in the backward pass instead of keeping gathered parameters, use `jax.checkpoint`.

    An argument or result with an axis of `parameter_mapping` counts as a parameter, unless `compute_mapping` shards
    another of its axes over the same mesh axis, as in a batch. `compute_mapping` places everything else.
    Arguments can come from the host, or from any other placement.

    To store parameters without names, pass a rule (see `axonym.sharding.FSDPShardingRule`), which then places
    everything that `compute_mapping` does not shard. In that case the compiler decides which arrays are gathered where.

    Arguments:
        *args: the function (left out in a decorator), then the two mappings if they are not given by keyword.
        parameter_mapping: the mapping that parameters are stored by, such as `{"embed": "data"}`, or a rule. None for
            an axis stores it replicated.
        compute_mapping: the mapping that is active inside, such as `{"batch": "data"}`.
        **options: more arguments of `named_jit`.

    >>> step = axn.fsdp(lambda w, x: axn.dot(x, w, axis="embed"), {"embed": "data"}, {"batch": "data"})
    >>> with axn.set_mesh(axn.make_mesh({"data": -1})):
    ...     y = step(axn.ones({"embed": 16, "mlp": 4}), axn.ones({"batch": 16, "embed": 16}))
    >>> y.shape
    {'batch': 16, 'mlp': 4}
    """
    for option in ("in_placement", "out_placement", "in_shardings", "out_shardings"):
        if option in options:
            raise TypeError(
                f"fsdp: `{option}` is not an option: the two mappings place arguments and results. To place them in "
                "another way, shard them before, or use axonym.named_jit."
            )
    fn, *positional = args if args and callable(args[0]) else (None, *args)
    mappings: dict[str, Any] = {"parameter_mapping": parameter_mapping, "compute_mapping": compute_mapping}
    left = [name for name, mapping in mappings.items() if mapping is None]
    if len(positional) > len(left):
        wrong = "too many arguments" if len(positional) > 2 else "a mapping is given twice"
        raise TypeError(f"fsdp: {wrong}; {_USAGE}.")
    mappings |= zip(left, positional, strict=False)
    for name, mapping in mappings.items():
        if mapping is None:
            raise TypeError(f"fsdp: `{name}` is missing; {_USAGE}.")
        if not isinstance(mapping, Mapping) and not (name == "parameter_mapping" and isinstance(mapping, Rule)):
            raise TypeError(
                f"fsdp: `{name}` is a resource mapping, got {type(mapping).__name__}; {_USAGE}.{as_mapping(mapping)}"
            )
    parameters, compute = mappings["parameter_mapping"], normalize_mapping(mappings["compute_mapping"], "fsdp")
    active: dict[str, Any] = {"mapping": compute}
    if isinstance(parameters, Rule):
        placement = ComputeMappingOrParameterRule(parameters, compute)
    else:
        active["parameter_mapping"] = normalize_mapping(parameters, "fsdp")
        placement = ParameterOrComputeMapping(active["parameter_mapping"], compute)
    make = functools.partial(
        _compile_named_jit, "fsdp", active=active, in_placement=placement, out_placement=placement, **options
    )
    return make if fn is None else make(fn)


def _compile_named_jit(
    what: str,
    fn: Callable[P, R],
    active: Mapping[str, Any],
    in_placement: Placement,
    out_placement: Placement,
    donate_args: Donation = None,
    donate_kwargs: Mapping[str, Any] | None = None,
    annotation_shardings: Mapping[str, Placement] | None = None,
    uneven: Uneven = None,
    **jit_options: Unpack[JitOptions],
) -> CompiledFunction[P, R]:
    """Compile a function with the arguments of `named_jit`, but with active settings instead of a mapping."""
    for reserved in ("in_shardings", "out_shardings", "donate_argnums", "donate_argnames"):
        if reserved in jit_options:
            instead = "donate_args" if "donate" in reserved else f"{reserved.split('_')[0]}_placement"
            raise TypeError(f"{what}: `{reserved}` works by position; use `{instead}`.")
    for needless in ("static_argnums", "static_argnames"):
        if needless in jit_options:
            raise TypeError(f"{what}: `{needless}` is not needed: non-array arguments are always static.")
    if annotation_shardings is not None:
        active = {**active, "annotations": hashable_annotations(annotation_shardings)}
    check_uneven(what, uneven)
    active = {**active, **({"uneven": uneven} if uneven else {})}

    title = f"{what}({errors.called(fn)})"

    def results(arguments: Any, result: Any) -> Any:
        if current_mesh() is None and needs_mesh(placements := [in_placement, out_placement]):
            warn_without_mesh(title, placements, (arguments, result))
        _warn_if_misspelled(title, active, (arguments, result))
        return store(result, out_placement, f"{what} (results)")

    return CompiledFunction(
        what,
        fn,
        active=active,
        arguments=[("arguments", in_placement)],
        results=results,
        donate=(
            _checked_donation(what, "donate_args", donate_args),
            _checked_donation(what, "donate_kwargs", donate_kwargs),
        ),
        jit_options=jit_options,
    )


def _warn_if_misspelled(title: str, active: Mapping[str, Any], seen: Any) -> None:
    """Warn of mappings that apply to no argument and no result.

    A compute mapping may be for axes that exist only inside, so warn only if one of its names resembles an axis
    outside. A parameter mapping is for arguments, so any key of it may be misspelled.
    """
    compute, parameters = active.get("mapping", {}), active.get("parameter_mapping", {})
    leaves, mesh = leaves_of(seen)[0], current_mesh()
    known = axes_of(leaves)
    # A rule sees the path within an argument.
    arguments = [dataclasses.replace(leaf, keys=leaf.keys[3:]) for leaf in leaves if leaf.keys[0].idx == 0]
    near = {n: errors.suggestion(n, known) for n in compute} if known.isdisjoint(compute) else {}
    near = {n: hint for n, hint in near.items() if hint} | misspelled(parameters, known)
    if near:
        errors.warn(
            f"{title}: {errors.quoted(near)} of its mapping names no axis of the arguments or results, "
            f"which have {', '.join(sorted(map(repr, known))) or 'no named axes'}."
            + ("".join(near.values()) if known else advise_paths(arguments, parameters.values(), mesh))
        )


def misspelled(names: Collection[str], known: Collection[str]) -> dict[str, str]:
    """Return the names of a mapping that are probably misspelled, each with a hint.

    Several models may share a mapping, so a name without an axis is a mistake only if it is very similar to the name
    of an axis, or if no name of the mapping has an axis.
    """
    free, none = set(known).difference(names), set(known).isdisjoint(names)
    hints = {n: errors.suggestion(n, free, 0.8) for n in names if n not in known}
    return {n: hint for n, hint in hints.items() if hint or none}


def _checked_donation(what: str, argument: str, donate: Any) -> Any:
    """Return the tree prefixes that say which arguments may be overwritten, with False for None."""

    def checked(may: Any) -> Any:
        if may is None or isinstance(may, bool) or callable(may):
            return may or False
        raise TypeError(
            f"{what}: `{argument}` takes True or False for each argument, not numbers of arguments, as in "
            f"`donate_args=(True, False)` or `donate_kwargs={{'state': True}}`; got {donate!r}."
        )

    return None if donate is None else jax.tree.map(checked, donate, is_leaf=lambda x: x is None or callable(x))
