"""`distribute`: run a function of raw arrays under a mapping, by the names that `infer` finds.

The function is traced, and its program runs with sharding constraints in it. JAX's partitioner decides about everything
between them, so few are needed: arguments and results are placed by their names, and so is each result of a product,
also in the bodies of loops and branches. To constrain other values too would gather more under FSDP, as the state of
an optimizer has the names of parameters. Functions with rules of their own for derivatives stay as they are.

On Explicit mesh axes, the program runs as on Auto ones, in one `jax.sharding.auto_axes`; its results have the shardings
of their names.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, Unpack

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr
from jax.sharding import AxisType, PartitionSpec
from jax.tree_util import DictKey

from ..core import errors
from ..core.tree_spec import PROGRAM_ARRAYS, flatten_arrays
from ..distribution.active_settings import (
    Entry,
    activate,
    active_mapping,
    active_parameter_mapping,
    active_settings,
    active_uneven,
    changed,
)
from ..distribution.axis_rules import AxisRule
from ..distribution.mesh_axes import AnyMesh, axes_of_type, current_mesh, has_explicit, has_manual, shard_count
from ..distribution.operation_scope import operation_scope
from ..distribution.per_device import with_auto_axes
from ..named_array import is_named_array, raw, wrap
from ..sharding._compiled_function import CompiledFunction, JitOptions
from ..sharding.jit import misspelled
from ..sharding.mapping import ResourceMapping, normalize_mapping
from ..sharding.placement import Leaf, ParameterOrComputeMapping, check_entries, drop_manual, resolve
from ..sharding.shard import shard_quietly, warn_without_mesh
from ._values import Axed, AxisStep
from ._walk import Body, steps_of
from .inferring import NamedProgram, inferred, said_of_closed_over, source_of

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

P = ParamSpec("P")
R = TypeVar("R")

OptionalNames = Sequence[str | None]

PRODUCTS = {"dot_general": "dot", "ragged_dot_general": "ragged_dot", "conv_general_dilated": "conv"}
"""The primitives whose results are constrained, and what they are called in profiles and reports."""

_WITH_OWN_RULES = {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "shard_map"}
"""The primitives whose functions stay as they are."""


class DistributeOptions(JitOptions, total=False):
    """The arguments of `named_jit` that `distribute` has too."""

    donate_args: Any
    donate_kwargs: Mapping[str, Any] | None
    uneven: Literal["replicate"] | None


class DistributedFunction(CompiledFunction[P, R]):
    """A function compiled by `distribute`."""

    under: Callable[[ResourceMapping, ResourceMapping | None], DistributedFunction[P, R]] | None
    """Compiles it under other mappings, for reports; None if it has mappings of its own."""
    named: Callable[[Sequence[Any], Mapping[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    """Returns arguments as named arrays, sharded as in a call. An axis without a name is `_`."""


def distribute(
    fn: Callable[P, R],
    mapping: ResourceMapping | None = None,
    parameter_mapping: ResourceMapping | None = None,
    *,
    names: Any = None,
    allow: Collection[str] = (),
    **options: Unpack[DistributeOptions],
) -> DistributedFunction[P, R]:
    """Compile a function of raw arrays to run under a mapping: `named_jit` for code without names.

    The axes of its values get names from its arguments, as `infer` finds them. Arguments, results and products
    are then sharded by their names: gradients and the state of an optimizer are sharded like the parameters. It works
    on any mesh, in `jax.jit`, `jax.grad`, `jax.vmap` and loops, and the function does not change.

    Axes that no name reaches are replicated, with a warning. If the program treats two named axes as one, or mixes up
    the positions of queries and keys, that is an error.

    Arguments:
        fn: any function of arrays and trees, such as a loss, or a whole training step.
        mapping: the mapping of its axes, such as `{"batch": "data", "mlp": "model"}`; by default the active one, which
            may also be for other functions: a key of this one that names no axis is an error.
        parameter_mapping: the mapping that parameters, their gradients and the state of their optimizer are stored by,
            as in `fsdp`, such as `{"embed": "data"}`; by default like everything else.
        names: the names of the arguments' axes: see `infer`.
        allow: kinds of mix-ups that are meant, as in `infer`; of two names, the first one counts.
        **options: more arguments of `named_jit`. `uneven` is "replicate" or None, as raw arrays are not stored padded.

    >>> def loss(w, x):
    ...     return (jnp.tanh(x @ w) ** 2).mean()
    >>> gradient = axn.names.distribute(
    ...     jax.grad(loss), {"batch": "data", "mlp": "model"}, names=("embed mlp", "batch embed")
    ... )
    >>> with axn.set_mesh(axn.make_mesh({"data": 2, "model": 4})):
    ...     print(gradient(jnp.ones((8, 16)), jnp.ones((4, 8))).sharding.spec)
    P(None, 'model')
    """
    mappings = {"mapping": mapping, "parameter_mapping": parameter_mapping}
    mappings = {name: normalize_mapping(m, "distribute") for name, m in mappings.items() if m is not None}
    own = {name for m in mappings.values() for name, entry in m.items() if entry is not None}
    if (uneven := options.get("uneven")) not in (None, "replicate"):
        raise ValueError(
            f"distribute: `uneven` is 'replicate' or None, got {uneven!r}. Raw arrays are not stored padded: give such "
            "an axis a size that its mesh axes divide, or map it elsewhere."
        )
    active: dict[str, Any] = {**mappings, **({"uneven": uneven} if uneven else {})}

    @functools.wraps(fn, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        program = inferred(fn, args, kwargs, names, allow)
        arrays, _ = flatten_arrays((args, kwargs), PROGRAM_ARRAYS, named=False)
        what = f"distribute({errors.called(fn)})"
        if program.mix_ups:
            lines = "".join(f"\n  {m}" for m in program.mix_ups)
            kinds = [*dict.fromkeys(m.kind for m in program.mix_ups)]
            raise ValueError(
                f"{what}: the program mixes up axes:{lines}\nCorrect it; or, if two names mean one axis, use one of "
                f"them in `names`; or, if it is meant, pass `allow={kinds}`; of two names, the first one counts."
            )
        return program.traced.returned.unflatten(_Distributed(what, program, own).run(arrays))

    def under(mapping: ResourceMapping, parameter_mapping: ResourceMapping | None) -> DistributedFunction[P, R]:
        return distribute(fn, mapping, parameter_mapping, names=names, allow=allow, **options)

    def named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        program = inferred(fn, args, kwargs, names)
        arrays, spec = flatten_arrays((tuple(args), dict(kwargs)), PROGRAM_ARRAYS, named=False)
        with activate(changed(active_settings(), **active)):
            tree = spec.unflatten(_Distributed(made.__name__, program).arguments(arrays))
        # The array of an argument that was named already is now a named array.
        return jax.tree.map(lambda x: raw(x) if is_named_array(raw(x)) else x, tree, is_leaf=is_named_array)

    donate = options.get("donate_args"), options.get("donate_kwargs")
    jit_options = {name: options[name] for name in options.keys() - DistributeOptions.__annotations__}
    made = DistributedFunction("distribute", run, active=active, donate=donate, jit_options=jit_options)
    made.under, made.named = None if mappings else under, named
    return made


class _Distributed:
    """A program under the active mappings, while it is traced."""

    def __init__(self, what: str, program: NamedProgram, own: Set[str] = frozenset()):
        self._what, self._own = what, own
        self._program = program
        values = [*program.body.arguments, *(x for step in steps_of(program.body) for x in step.results)]
        self._names = {name for x in values for name in program.names_of(x) if name is not None}
        shapes: Any = [v.aval.shape for v in program.traced.jaxpr.jaxpr.invars]  # pyright: ignore[reportAttributeAccessIssue]
        arguments = zip(program.body.arguments, shapes, strict=True)
        self._given = {x for value, shape in arguments for x in zip(program.names_of(value), shape, strict=True)}
        """The names of the arguments' axes, each with its size."""
        self._given_names = {name for names in program.given_names for name in names}
        self._compute = self._with_joined(active_mapping())
        self._stored = self._with_joined(active_parameter_mapping())
        self._rule = ParameterOrComputeMapping(self._stored, self._compute)
        mesh = current_mesh()
        can_place = mesh is not None and axes_of_type(mesh, AxisType.Auto, AxisType.Explicit)
        self._mesh = mesh if can_place and (self._compute or self._stored) else None
        self._problems: list[str] = []

    def _with_joined(self, mapping: Mapping[str, Entry]) -> Mapping[str, Entry]:
        """Return the mapping with joined axes, such as `heads*head_dim`, which are sharded like their first factor."""
        joined = {name: mapping.get(name.partition("*")[0]) for name in self._names if "*" in name}
        return {**{name: entry for name, entry in joined.items() if entry is not None}, **mapping}

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the results of the program."""
        jaxpr, mesh, program = self._program.traced.jaxpr, self._mesh, self._program
        with activate(changed(active_settings(), mapping=self._compute, parameter_mapping=self._stored)):
            self._check()
            arrays = [*map(raw, self.arguments(arrays))]

            def whole(*arrays: Any) -> tuple[Any, ...]:
                inner = self._spliced(program.body)
                if self._problems:
                    raise ValueError(f"{self._what}: " + "\n  ".join(dict.fromkeys(self._problems)))
                return tuple(eval_jaxpr(inner, jaxpr.consts, *arrays))

            paths = [f"result {i}" for i in range(len(program.body.results))]
            run: Any = whole
            if mesh is not None and has_explicit(mesh):
                specs = self._specs("results", jaxpr.out_avals, program.body.results, paths)
                run = with_auto_axes(whole, mesh, [specs.get(path, PartitionSpec()) for path in paths])
            return [*map(raw, self._placed("results", run(*arrays), program.body.results, paths))]

    def _check(self) -> None:
        """Check that keys of the mapping name axes, and name the arrays that are not sharded though it may be for them.

        The active mapping may be for other functions too, so only a name in it that is like another one is told.
        """
        mapped = {**self._compute, **self._stored}
        if current_mesh() is None and any(mapped.values()):
            warn_without_mesh(self._what, None, None)
        large, given = (
            {p for n in names if n for p in (n, *n.split("*"))} for names in (self._names, self._given_names)
        )
        if wrong := sorted(self._own - large - given):
            raise ValueError(
                f"{self._what}: {errors.quoted(wrong)} of the mapping names no axis of the program, which has "
                f"{errors.quoted(sorted(large)) or 'no names'}.{errors.suggestions(wrong, large)} Correct it, or leave "
                "it out; a mapping for several functions can be active around the call instead."
            )
        for name, hint in misspelled([*active_mapping(), *active_parameter_mapping()], large).items():
            errors.warn(
                f"{self._what}: {name!r} of the mapping names no axis of the program that is larger than 1.{hint}"
            )
        if self._program.closed_over:
            errors.warn(f"{self._what}: {said_of_closed_over(self._program.closed_over)}.")
        unknown = [u for u in self._program.unknown if u.reason == "no argument names it"]
        if unknown:
            lines = "".join(f"\n  {u}" for u in unknown)
            errors.warn(
                f"{self._what}: {errors.counted(len(unknown), 'axis has no name', 'axes have no name')}, so no mapping "
                f"shards {'it' if len(unknown) == 1 else 'them'}:{lines}\nName each once in `names`; a name that is in "
                "no mapping says that it is replicated."
            )

    # --- arguments and results ---

    def arguments(self, arrays: Sequence[Any]) -> list[Any]:
        """Return arguments sharded by their names, as named arrays if they have any."""
        paths = self._program.traced.paths
        count = Counter(paths)  # the keys 1 and "1" have one path
        paths = [path if count[path] == 1 else f"{path} ({i})" for i, path in enumerate(paths)]
        return self._placed("arguments", arrays, self._program.body.arguments, paths)

    def _named(self, values: Sequence[Axed], arrays: Sequence[Any], paths: Sequence[str]) -> dict[str, Any]:
        """Return the arrays of which any axis has a name, with their names, by their paths."""
        found = {}
        for path, x, value in zip(paths, arrays, values, strict=True):
            if any(names := self._program.names_of(value)):
                found[path] = wrap(x, tuple("_" if n is None else n for n in names))
        return found

    def _placed(self, which: str, arrays: Sequence[Any], values: Sequence[Axed], paths: Sequence[str]) -> list[Any]:
        named = self._named(values, arrays, paths)
        if self._mesh is not None:
            named = shard_quietly(named, self._specs(which, arrays, values, paths), self._what)
        return [named.get(path, x) for path, x in zip(paths, arrays, strict=True)]

    def _specs(
        self, which: str, arrays: Sequence[Any], values: Sequence[Axed], paths: Sequence[str]
    ) -> dict[str, PartitionSpec]:
        """Return where the arrays with names lie, by their paths."""
        named = self._named(values, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays], paths)
        leaves, _ = resolve(named, self._rule, self._mesh, f"{self._what} ({which})")
        return {leaf.keys[0].key: leaf.spec or PartitionSpec() for leaf in leaves}

    # --- the program ---

    def _spliced(self, body: Body) -> Jaxpr:
        """Return a function with constraints; the same object if it has no products."""
        known: dict[Any, Axed] = dict(zip(body.jaxpr.invars, body.arguments, strict=True))
        eqns: list[JaxprEqn] = []
        for step in body.steps:
            if step.name == "fft":
                eqns.append(self._fft(step, known.get(step.eqn.invars[0])))
            elif step.name in PRODUCTS:
                eqns += self._product(step, [known.get(v) if not hasattr(v, "val") else None for v in step.eqn.invars])
            else:
                eqns.append(self._with_bodies(step))
            known.update(zip(step.eqn.outvars, step.results, strict=True))
        same = len(eqns) == len(body.steps) and all(a is s.eqn for a, s in zip(eqns, body.steps, strict=True))
        return body.jaxpr if same else body.jaxpr.replace(eqns=eqns)

    def _with_bodies(self, step: AxisStep) -> JaxprEqn:
        """Return an equation with constraints in the functions that it calls."""
        if not step.bodies or step.name in _WITH_OWN_RULES:
            return step.eqn
        bodies, params = {id(body.jaxpr): body for body in step.bodies}, dict(step.params)
        for key, value in params.items():
            if type(value) is tuple:
                found = tuple([self._replaced(x, bodies) for x in value])
                params[key] = value if all(map(operator.is_, found, value)) else found
            else:
                params[key] = self._replaced(value, bodies)
        same = all(params[key] is value for key, value in step.params.items())
        return step.eqn if same else step.eqn.replace(params=params)

    def _replaced(self, value: Any, bodies: Mapping[int, Body]) -> Any:
        jaxpr = getattr(value, "jaxpr", value)
        if id(jaxpr) not in bodies:
            return value
        new = self._spliced(bodies[id(jaxpr)])
        return value if new is jaxpr else new if isinstance(value, Jaxpr) else value.replace(jaxpr=new)

    def _product(self, step: AxisStep, operands: Sequence[Axed | None]) -> Iterator[JaxprEqn]:
        """Yield a product with its result constrained, and operands that have the role of a key."""
        eqn, (result,) = step.eqn, step.eqn.outvars
        names: list[Any] = [
            (None,) * len(step.shape_of(i)) if x is None else self._program.names_of(x) for i, x in enumerate(operands)
        ]
        out_names: Any = self._program.names_of(step.results[0])
        if not any(n is None for layout in (*names, out_names) for n in layout):
            arrays: list[Any] = [v.aval for v in eqn.invars]
            what: Any = PRODUCTS[step.name]
            rule = AxisRule(names, out_names, product=what == "dot")
            scope = operation_scope(what, names, (out_names,), arrays, has_own_gradients=True, rule=rule)
            source: Any = eqn.source_info
            eqn = eqn.replace(source_info=source.replace(name_stack=source.name_stack.extend(scope)))
        if self._mesh is None:
            yield eqn
            return
        invars = list(eqn.invars)
        for i, roles in enumerate(_names_of_roles(step, names, out_names)):
            if roles != names[i] and (moved := self._constraint(step, invars[i], roles)) is not None:
                yield moved.replace(invars=[invars[i]])
                invars[i] = moved.outvars[0]
        constraint = self._constraint(step, result, out_names)
        if constraint is None:
            yield eqn.replace(invars=invars)
        else:
            before: list[Any] = constraint.invars
            yield eqn.replace(invars=invars, outvars=before)
            yield constraint.replace(outvars=[result])

    def _fft(self, step: AxisStep, x: Axed | None) -> JaxprEqn:
        """Return a Fourier transform in which each device transforms its own rows, which XLA would all-gather."""
        var: Any = step.eqn.invars[0]
        kept = len(var.aval.shape) - len(step.params["fft_lengths"])
        names = () if x is None else self._program.names_of(x)[:kept]
        if self._mesh is None or has_manual(self._mesh) or not any(names):
            return step.eqn
        spec = self._spec(step, names, var.aval.shape[:kept])
        if spec is None or not any(spec):
            return step.eqn
        transform = functools.partial(jax.lax.fft, **step.params)
        eqn = _as_equation(step, jax.shard_map(transform, in_specs=spec, out_specs=spec), var)
        return eqn.replace(invars=step.eqn.invars, outvars=step.eqn.outvars)

    def _constraint(self, step: AxisStep, var: Any, names: OptionalNames) -> JaxprEqn | None:
        """Return an equation that constrains a value by its names, with variables of its own; None if none has one."""
        spec = self._spec(step, names, var.aval.shape) if any(names) else None
        if spec is None:
            return None
        free = PartitionSpec.UNCONSTRAINED
        spec = PartitionSpec(*(free if n is None else e for n, e in zip(names, spec, strict=True)))
        return _as_equation(step, lambda x: jax.lax.with_sharding_constraint(x, spec), var)

    def _spec(self, step: AxisStep, names: OptionalNames, shape: Sequence[int]) -> PartitionSpec | None:
        """Return where axes of a value lie by their names; None, with the problems recorded, if they cannot."""
        mesh = current_mesh()
        assert mesh is not None
        known = tuple("_" if n is None else n for n in names)
        at = DictKey(f"{step.name} at {source_of(step) or 'an unknown line'}")
        leaf = Leaf((at,), None, known, tuple(shape))
        mapping = self._rule.place(leaf, mesh)
        entries = [self._entry(mapping.get(n), n, size, mesh) for n, size in zip(known, shape, strict=True)]
        if problems := check_entries(leaf, entries, mesh):
            self._problems += problems
            return None
        return drop_manual(PartitionSpec(*entries), mesh)

    def _entry(self, entry: Entry, name: str, size: int, mesh: AnyMesh) -> Entry:
        """Return the entry of an axis; None for a part of a named axis, such as a slice, that it does not divide."""
        must_fit = (name, size) in self._given and active_uneven() != "replicate"
        return entry if must_fit or size % shard_count(mesh, entry) == 0 else None


def _as_equation(step: AxisStep, fn: Callable[[Any], Any], var: Any) -> JaxprEqn:
    """Return a function of a value as an equation, with variables of its own, on the line of a step."""
    abstract = jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, weak_type=var.aval.weak_type)
    (eqn,) = jax.make_jaxpr(fn)(abstract).eqns
    return eqn.replace(source_info=step.eqn.source_info)


def _names_of_roles(
    step: AxisStep, names: Sequence[OptionalNames], out_names: OptionalNames
) -> Sequence[OptionalNames]:
    """Return the names of the operands of a product, with the names of the keys' role in place of the axis itself.

    If positions meet positions, one of them are the keys, which have another name in the result, and in the operand
    that is multiplied with values.
    """
    if step.name != "dot_general":
        return names
    found = [list(n) for n in names]
    (left_summed, right_summed), (left_batch, right_batch) = step.params["dimension_numbers"]
    # Weights times values: the summed positions are keys. Queries times keys: free positions are keys in the result.
    for i, j in zip(left_summed, right_summed, strict=True):
        a, b = names[0][i], names[1][j]
        found[0][i], found[1][j] = _key_of(a, b), _key_of(b, a)
    used = {*left_summed, *left_batch}, {*right_summed, *right_batch}
    free = [(k, i) for k in (0, 1) for i in range(len(names[k])) if i not in used[k]]
    for (k, i), out in zip(free, out_names[len(left_batch) :], strict=True):
        found[k][i] = _key_of(names[k][i], out)
    return [tuple(n) for n in found]


def _key_of(name: str | None, other: str | None) -> str | None:
    """Return the other name if it is the role of a key of this axis."""
    return other if name is not None and other is not None and other.rstrip("'") == name else name
