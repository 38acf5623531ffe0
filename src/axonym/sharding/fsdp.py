"""`fsdp`: parameters are stored sharded, and gathered where they are used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, Unpack, overload

from ._compiled_function import CompiledFunction, JitOptions
from .jit import compiled_by_name
from .mapping import ResourceMapping, is_resource_mapping, normalize_mapping
from .placement import ComputeMappingOrStorageRule, Placement, Rule, StorageOrComputeMapping

P = ParamSpec("P")
R = TypeVar("R")


class FsdpOptions(JitOptions, total=False):
    """The arguments of `fsdp` besides the function, by keyword."""

    parameter_mapping: ResourceMapping | Rule
    compute_mapping: ResourceMapping
    donate_args: object
    donate_kwargs: Mapping[str, object] | None
    annotation_shardings: Mapping[str, Placement] | None


_USAGE = "use fsdp(fn, parameter_mapping, compute_mapping), or @fsdp(parameter_mapping, compute_mapping)"


@overload
def fsdp(
    fn: Callable[P, R],
    storage: ResourceMapping | Rule | None = None,
    compute: ResourceMapping | None = None,
    /,
    **options: Unpack[FsdpOptions],
) -> CompiledFunction[P, R]: ...
@overload
def fsdp(
    storage: ResourceMapping | Rule | None = None,
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
    """Compile a step for fully sharded data parallelism: `named_jit` with a storage and a compute mapping.

    Between uses, parameters are sharded by `parameter_mapping`; so are their gradients and what the optimiser keeps. In
    the step `compute_mapping` is active. An operation between a parameter and something sharded along the batch gathers
    the parameter, and leaves a gradient that is sharded already: one all-gather for each use and one reduce-scatter, on
    any mesh. To gather again in the backward pass rather than keep what was gathered, use `jax.checkpoint`.

    Arguments and results that have an axis of `parameter_mapping` count as parameters, unless `compute_mapping` shards
    another of their axes over the same mesh axis, as it does with batches. The others are placed by `compute_mapping`.
    All may come from the host, or from any other placement.

    Parameters without names are stored by a rule (see `axonym.sharding.FSDPShardingRule`), which then places all that
    `compute_mapping` does not shard. The compiler then decides what is gathered where.

    Arguments:
        *args: the function (left out in a decorator), then the two mappings if they are not given by keyword.
        parameter_mapping: the storage mapping, such as `{"embed": "data"}`, or a rule.
        compute_mapping: the mapping that is active inside, such as `{"batch": "data"}`.
        **options: more arguments of `named_jit`.

    >>> step = axn.fsdp(lambda w, x: axn.dot(x, w, axis="embed"), {"embed": "data"}, {"batch": "data"})
    >>> with axn.set_mesh(axn.make_mesh({"data": -1})):
    ...     y = step(axn.ones({"embed": 16, "mlp": 4}), axn.ones({"batch": 16, "embed": 16}))
    >>> y.shape
    {'batch': 16, 'mlp': 4}
    """
    fn: Callable[..., Any] | None = None
    mappings = list(args)
    if mappings and callable(mappings[0]):
        fn = mappings.pop(0)
    if len(mappings) > 2:
        raise TypeError(f"fsdp: too many arguments; {_USAGE}.")
    given = [m for m in (parameter_mapping, compute_mapping) if m is not None]
    if mappings and given and len(mappings) + len(given) > 2:
        raise TypeError(f"fsdp: a mapping is given twice; {_USAGE}.")
    if parameter_mapping is None and mappings:
        parameter_mapping = mappings.pop(0)
    if compute_mapping is None and mappings:
        compute_mapping = mappings.pop(0)
    for name, mapping in (("parameter_mapping", parameter_mapping), ("compute_mapping", compute_mapping)):
        if mapping is None:
            raise TypeError(f"fsdp: `{name}` is missing; {_USAGE}.")
        if not is_resource_mapping(mapping) and not (mapping is parameter_mapping and isinstance(mapping, Rule)):
            raise TypeError(f"fsdp: `{name}` is a resource mapping, got {type(mapping).__name__}; {_USAGE}.")
    compute = normalize_mapping(compute_mapping, "fsdp")
    active: dict[str, Mapping[str, Any]] = {"mapping": compute}
    if isinstance(parameter_mapping, Rule):
        placement = ComputeMappingOrStorageRule(parameter_mapping, compute)
    else:
        active["storage"] = normalize_mapping(parameter_mapping, "fsdp")
        placement = StorageOrComputeMapping(active["storage"], compute)
    make = functools.partial(
        compiled_by_name, active=active, in_placement=placement, out_placement=placement, **options
    )
    return make if fn is None else make(fn)
