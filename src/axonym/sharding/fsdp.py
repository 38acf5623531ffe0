"""`fsdp`: parameters rest split, and are gathered where they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import _context
from .jit import named_jit
from .mapping import is_resource_mapping, normalize_mapping
from .placement import ByRole, ByWork, Rule

_USAGE = "use fsdp(fn, parameter_mapping, compute_mapping), or @fsdp(parameter_mapping, compute_mapping)"


def fsdp(*args: Any, parameter_mapping: Any = None, compute_mapping: Any = None, **options: Any) -> Any:
    """Compile a step for fully sharded data parallelism: `named_jit` with one mapping at rest and another at work.

    Between uses, parameters lie as `parameter_mapping` says; so do their gradients and what the optimiser keeps. In
    the step `compute_mapping` is in force. An operation between a parameter and something split over the batch gathers
    the parameter, and leaves a gradient that is split already: one all-gather for each use and one reduce-scatter, on
    any mesh. To gather again in the backward pass rather than keep what was gathered, use `jax.checkpoint`.

    Arguments and results that have an axis of `parameter_mapping` count as parameters, unless `compute_mapping` splits
    another of their axes over the same mesh axis, as it does with batches. The others are placed by `compute_mapping`.
    All may come from the host, or from any other placement.

    Parameters without names rest by a rule (see `axonym.sharding.FSDPShardingRule`), which then places all that
    `compute_mapping` does not split. What is gathered where is then up to the compiler.

    Arguments:
        *args: the function (left out in a decorator), then the two mappings if they are not given by keyword.
        parameter_mapping: where parameters rest, such as `{"embed": "data"}`, or a rule.
        compute_mapping: the mapping in force inside, such as `{"batch": "data"}`.
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
    if isinstance(parameter_mapping, Rule):
        placement, settings = ByWork(parameter_mapping, compute), _context.intern_settings(compute)
    else:
        parameters = normalize_mapping(parameter_mapping, "fsdp")
        placement, settings = ByRole(parameters, compute), _context.intern_settings(compute, parameters)
    return named_jit(
        fn,
        settings or {},
        in_axis_resources=placement,
        out_axis_resources=placement,
        **options,
    )
