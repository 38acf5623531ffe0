"""The compiled function behind `named_jit`, `fsdp` and `sjit`.

There are two ways to call `jax.jit`. As long as every leaf of the arguments is an array, they are passed unchanged, and
there is one Python frame above `jax.jit`. After a call with another leaf, or if something is donated, the arguments are
flattened. For each structure it is then decided once which leaves are donated, kept or static. `jax.jit` gets only the
arrays, and the static leaves are part of the function that it compiles.

Placements are applied inside the compiled function: arguments on the host arrive sharded, and arguments with another
placement are moved. Only arguments on devices outside the mesh are moved before the call, after `jax.jit` has rejected
them.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypedDict, TypeVar, overload

import jax
import numpy as np

from ..core import errors
from ..core.function_cache import FunctionCache
from ..core.jax_versions import is_about_devices
from ..core.parameter_names import parameter_names
from ..core.tree_spec import ARRAYS, PROGRAM_ARRAYS, FlatTree, StaticLeaf, TreeSpec, flatten_arrays, same_static_fields
from ..distribution import active_settings
from ..distribution.mesh_axes import check_mesh_axes
from ..distribution.padded_array import unpadded
from .meshes import current_mesh
from .placement import ComputeMappingOrParameterRule, Placement
from .shard import call_on_mesh, shard_arguments

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")


_INSIDE: contextvars.ContextVar[bool] = contextvars.ContextVar("axonym.inside_compiled", default=False)
"""True while a compiled function is traced: it sees the true sizes of uneven axes, also in results of others it calls.

The call of such a function drops the padding, and not its program, which JAX keeps for calls elsewhere.
"""


_flatten = jax.tree_util.default_registry.flatten
"""The function behind `jax.tree.flatten`, without its Python frame."""


class JitOptions(TypedDict, total=False):
    """Arguments that are passed on to `jax.jit`."""

    keep_unused: bool
    device: object  # `jax.Device`, which type checkers take for a variable
    backend: str | None
    inline: bool
    compiler_options: dict[str, str | int | float | bool] | None


class CompiledFunction(Generic[P, R]):
    """A function compiled by `named_jit`, `fsdp` or `sjit`. Call it like the function, or lower and trace it.

    >>> type(axn.named_jit(lambda x: x * 2)).__name__
    'CompiledFunction'
    """

    __name__: str

    def __init__(
        self,
        what: str,
        fn: Callable[P, R],
        *,
        active: Mapping[str, Any],
        arguments: Sequence[tuple[str, Placement]] = (),
        results: Callable[[Any, Any], Any] | None = None,
        donate: tuple[Any, Any] = (None, None),
        static_argnums: int | Sequence[int] | None = None,
        static_leaves: bool = True,
        around: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
        jit_options: Mapping[str, Any] | None = None,
    ):
        """Arguments:
        what: the public function that made it, for messages.
        fn: the function.
        active: settings to use inside, in place of the caller's.
        arguments: placements to apply to the arguments one after another, each with a label for messages.
        results: a function of the arguments and the results, which returns the results sharded.
        donate: which positional and keyword arguments may be overwritten: tree prefixes of booleans or functions.
        static_argnums: as in `jax.jit`; only without `static_leaves`.
        static_leaves: leaves of the arguments and results that are not arrays are static.
        around: a context entered around each call, such as a mesh.
        jit_options: more arguments of `jax.jit`.
        """
        self._what = what
        self._fn: Callable[..., Any] = fn
        self._active = active
        self._settings = active_settings.changed(None, **active)
        self._around_last: tuple[Any, Any] = None, None
        """The settings that were active around the last call, and the settings that it activated instead."""
        self._arguments = [(label, placement) for label, placement in arguments if placement is not None]
        self._results = results
        self._donate = donate
        self._static_argnums = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums or ())
        self._static_leaves = static_leaves
        self._around = around
        self._options = dict(jit_options or {})
        self._programs = FunctionCache()
        self._latest: dict[Any, _Program] = {}
        """The program called last for each structure of the arguments."""
        self._last: tuple[Any, _Program | None] = jax.tree.structure(None), None
        """The structure of the last call, and its program."""
        # As long as all leaves are arrays, and nothing is donated, arguments are not inspected.
        self._unseen = donate == (None, None)
        self._direct = around is None
        self._always_direct = self._direct and not active
        self._donates_by_leaf = any(map(callable, jax.tree.leaves(donate, is_leaf=callable)))
        static = {"static_argnums": self._static_argnums} if self._static_argnums else {}
        self._jitted = jax.jit(self._make_jitted(checks=static_leaves), **static, **self._options)
        self._unchecked = jax.jit(self._make_jitted(checks=False), **static, **self._options)
        # Without the attributes of a callable object: its own `_fn` or `_what` would replace this one's.
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        # If no context is entered around the call, this is the only frame above `jax.jit`.
        if self._always_direct or (self._direct and active_settings.ACTIVE.value is None):
            unseen = self._unseen  # another thread may change it
            try:
                result: Any = self._jitted(*args, **kwargs) if unseen else self._call_flat(args, kwargs)
            except Exception as error:
                elsewhere = isinstance(error, ValueError) and is_about_devices(error)
                if not elsewhere and not (unseen and self._has_static(error, args, kwargs)):
                    raise
            else:
                result = result.tree() if isinstance(result, FlatTree) else result
                return unpadded(result) if _INSIDE.get() else result
        with self._surroundings():
            place = self.placed if self._arguments else None
            result = call_on_mesh(self._what, self._call, args, kwargs, place, [p for _, p in self._arguments])
            return unpadded(result) if _INSIDE.get() else result

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
        """Lower the function for these arguments, which may be abstract: see `jax.jit(f).lower`.

        Call the compiled program like the function, with the same non-array arguments.

        >>> compiled = axn.named_jit(lambda x, n: x * n).lower(axn.ones({"x": 2}), 3).compile()
        >>> compiled(axn.ones({"x": 2}), 3)
        NamedArray(float32[x=2], [3. 3.])
        """
        return self._stage("lower", args, kwargs)

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Traced:
        """Trace the function for these arguments, which may be abstract: see `jax.jit(f).trace`.

        >>> axn.named_jit(lambda x: x * 2).trace(axn.ones({"x": 2})).jaxpr is not None
        True
        """
        return self._stage("trace", args, kwargs)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: CompiledFunction[Concatenate[S, Q], R], instance: S, owner: type | None = None
    ) -> BoundCompiledFunction[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundCompiledFunction(self, instance)

    def __repr__(self) -> str:
        return f"{self._what}({errors.called(self._fn)})"

    # --- active settings ---

    @contextlib.contextmanager
    def _surroundings(self):
        """Activate around the call only the settings that its program depends on.

        Inside, the function's own settings replace the caller's, so the replaced ones must not count. All others stay
        active.
        """
        outer = active_settings.active_settings()
        seen, wanted = self._around_last
        if seen is not outer:
            settings = active_settings.changed(outer, **self._active)
            wanted = None if settings is self._settings else settings
            self._around_last = outer, wanted
        with (
            contextlib.nullcontext() if self._around is None else self._around(),
            contextlib.nullcontext() if wanted is outer else active_settings.activate(wanted),
        ):
            yield

    def _run(self, args: Any, kwargs: Any) -> Any:
        """Run the function while it is traced, and return its result, sharded."""
        outer = active_settings.active_settings()
        settings = active_settings.changed(outer, **self._active) if self._active else outer
        with contextlib.nullcontext() if settings is outer else active_settings.activate(settings):
            mesh = None if settings is None else current_mesh()
            if settings is not None and mesh is not None:
                for mapping in (settings.mapping, settings.parameter_mapping):
                    check_mesh_axes(self._what, mapping, mesh)
            args, kwargs = unpadded(self.placed(args, kwargs))
            # A copy of the tree, since the function may consume it: Equinox's `State` is used once.
            seen = None if self._results is None else jax.tree.map(lambda x: x, (args, kwargs))
            inside = _INSIDE.set(True)
            try:
                result = self._fn(*args, **kwargs)
            finally:
                _INSIDE.reset(inside)
            return result if self._results is None else self._results(seen, result)

    @property
    def active(self) -> Mapping[str, Any]:
        """Return the settings that are active inside, by name.

        >>> axn.named_jit(lambda x: x, {"batch": "data"}).active
        {'mapping': {'batch': 'data'}}
        """
        return self._active

    @property
    def placed_by_rule(self) -> bool:
        """Return whether a rule places parameters, in place of a mapping.

        >>> axn.fsdp(lambda x: x, axn.sharding.FSDPShardingRule("data"), {"batch": "data"}).placed_by_rule
        True
        """
        return any(isinstance(placement, ComputeMappingOrParameterRule) for _, placement in self._arguments)

    def placed(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments, sharded by their placements.

        >>> with axn.set_mesh(axn.make_mesh({"data": -1})):
        ...     (x,), _ = axn.named_jit(lambda x: x, in_placement={"x": "data"}).placed((axn.ones({"x": 16}),), {})
        >>> x.array.sharding.spec
        P('data',)
        """
        for label, placement in self._arguments:
            args, kwargs = shard_arguments(
                self._fn, args, kwargs, placement, f"{self._what} ({label})", self._static_argnums
            )
        return args, kwargs

    # --- unflattened arguments ---

    def _make_jitted(self, *, checks: bool) -> Callable[..., Any]:
        """Compile the function that takes the arguments unchanged.

        Arguments:
            checks: whether to refuse leaves that may be Python numbers, which JAX converted to arrays.
        """

        @functools.wraps(self._fn, updated=())
        def jitted(*args, **kwargs):
            if not self._static_leaves:
                return self._run(args, kwargs)
            if checks:
                leaves, structure = jax.tree.flatten((args, kwargs))
                if not all(map(_is_surely_array, leaves)) or TreeSpec(structure, ()).static_fields:
                    raise _AmbiguousArgumentsError
            return _flat_result(self._run(args, kwargs))

        return jitted

    def _has_static(self, error: Exception, args: Any, kwargs: Any) -> bool:
        """Return whether a call with unflattened arguments failed because a leaf is static."""
        if not self._static_leaves:
            return False
        leaves = jax.tree.leaves((args, kwargs))
        if not isinstance(error, _AmbiguousArgumentsError) and all(map(_has_values, leaves)):
            return False
        self._unseen = False
        return True

    def _call(self, args: Any, kwargs: Any) -> Any:
        if self._unseen:
            try:
                result = self._jitted(*args, **kwargs)
            except Exception as error:
                if not self._has_static(error, args, kwargs):
                    raise
            else:
                return _result_as_tree(result)
        return _result_as_tree(self._call_flat(args, kwargs))

    # --- arguments by structure ---

    def _call_flat(self, args: Any, kwargs: Any) -> Any:
        # The list distinguishes a call with keywords from one with a dictionary.
        leaves, structure = _flatten([args, kwargs] if kwargs else args)
        last, program = self._last
        if structure != last:
            program = self._latest.get(structure)
        arrays = None if program is None else program.arrays(leaves, structure)
        if program is None or arrays is None:
            program = self._find_program(args, kwargs, _has_values)
            leaves = jax.tree.leaves((args, kwargs))
            if not self._donates_by_leaf:
                program.expect(leaves, structure)
                # Static fields are part of the structure, so one that changes at each call would fill this.
                if len(self._latest) >= 256:
                    self._latest.clear()
                self._latest[structure] = program
                self._last = structure, program
            arrays = program.picked(leaves)
        if not program.unflattened:
            return program.jitted(*arrays)
        try:
            return program.jitted(*args, **kwargs)
        except _AmbiguousArgumentsError:  # they were checked to be arrays
            return self._unchecked(*args, **kwargs)

    def _find_program(self, args: Any, kwargs: Any, is_array: Callable[[Any], bool]) -> _Program:
        """Return the program for the arguments of a call, whose leaves are static if they are no arrays."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        donates = self._donates(args, kwargs, len(leaves))
        slots = [None if is_array(leaf) else _checked_static_leaf(StaticLeaf(leaf)) for leaf in leaves]
        spec = TreeSpec(structure, slots)
        donated = tuple([d for d, slot in zip(donates, slots, strict=True) if slot is None])
        return self._programs.find((spec, donated), (), lambda: self._make_program(spec, donated, leaves))

    def _make_program(self, spec: TreeSpec, donated: tuple[bool, ...], leaves: list[Any]) -> _Program:
        if self._donate == (None, None) and not spec.static_leaves and not spec.static_fields:
            sure = not self._static_leaves or all(map(_is_surely_array, leaves))
            return _Program(spec, donated, self._jitted if sure else self._unchecked, unflattened=True)

        def split(kept_arrays, donated_arrays=()):  # `Stage.by_parameter` uses these names
            sources = {True: iter(donated_arrays), False: iter(kept_arrays)}
            return _flat_result(self._run(*spec.unflatten(next(sources[d]) for d in donated)))

        # JAX names the program after it, in profiles and dumps.
        split.__name__ = split.__qualname__ = getattr(self._fn, "__name__", "function")
        return _Program(spec, donated, jax.jit(split, donate_argnums=1, **self._options), unflattened=False)

    def _stage(self, stage: str, args: Any, kwargs: Any) -> Any:
        with self._surroundings():
            if not self._static_leaves:
                return getattr(self._jitted, stage)(*args, **kwargs)
            program = self._find_program(args, kwargs, _is_array)
            if program.unflattened:
                try:
                    made = getattr(program.jitted, stage)(*args, **kwargs)
                except _AmbiguousArgumentsError:  # they were checked to be arrays
                    made = getattr(self._unchecked, stage)(*args, **kwargs)
                return Stage(made, None) if isinstance(made.out_info, FlatTree) else made
            return Stage(getattr(program.jitted, stage)(*program.picked(jax.tree.leaves((args, kwargs)))), program)

    def _donates(self, args: Any, kwargs: Any, count: int) -> Sequence[bool]:
        """Return whether each leaf of the arguments may be overwritten."""
        for_args, for_kwargs = self._donate
        if for_args is None and not for_kwargs:
            return (False,) * count
        if for_args is None or isinstance(for_args, bool) or callable(for_args):
            for_args = (for_args or False,) * len(args)
        if not kwargs and not for_kwargs and len(for_args) <= len(args):
            prefix: Any = ((*for_args, *(False,) * (len(args) - len(for_args))), {})
        else:
            names = parameter_names(self._fn, len(args), kwargs)
            wanted = dict(zip(parameter_names(self._fn, len(for_args)), for_args, strict=True)) | (for_kwargs or {})
            known = [*names, *kwargs]
            if unknown := [name for name in wanted if name not in known]:
                raise ValueError(
                    f"{self._what}: {errors.quoted(unknown)} is to be donated, but is not an argument of the "
                    f"call, which has {', '.join(known)}.{errors.suggestions(unknown, known)}"
                )
            prefix = tuple([wanted.get(n, False) for n in names]), {n: wanted.get(n, False) for n in kwargs}
        spread = jax.tree.broadcast(prefix, (args, kwargs), is_leaf=callable)
        return [
            bool(d(leaf)) if callable(d) else d
            for d, leaf in zip(jax.tree.leaves(spread), jax.tree.leaves((args, kwargs)), strict=True)
        ]


class _Program:
    """The compiled code for arguments of one spec."""

    def __init__(self, spec: TreeSpec, donated: tuple[bool, ...], jitted: Any, *, unflattened: bool):
        self.spec = spec
        self.jitted = jitted
        self.unflattened = unflattened
        """Whether the compiled function takes the arguments unchanged, rather than lists of kept and donated arrays."""
        self._donated = donated
        self._donates = any(donated)
        static = [(i, s.value) for i, s in enumerate(spec.slots) if isinstance(s, StaticLeaf)]
        # Only these are compared: `==` of other values may be slow, or return an array.
        self._static = [(i, value, type(value) in (int, float, str)) for i, value in reversed(static)]
        self._types: list[type] = []
        self._structure = TreeSpec(None, ())
        self._has_static_fields = False

    def expect(self, leaves: list[Any], structure: Any) -> None:
        """Remember the types and the structure of the leaves of a call: the next call probably has the same."""
        self._types, self._structure = list(map(type, leaves)), TreeSpec(structure, ())
        self._has_static_fields = bool(self._structure.static_fields)

    def arrays(self, leaves: list[Any], structure: Any) -> tuple[list[Any], ...] | None:
        """Return the arrays among the leaves if this program certainly fits the leaves, else None.

        It is certain if the leaves are as expected: the same static values, and arrays otherwise.
        """
        if list(map(type, leaves)) != self._types:
            return None
        for i, value, compares in self._static:
            # From the last one on, so that positions before it stay right.
            leaf = leaves.pop(i)
            # Zero is not certain, since 0.0 and -0.0 are equal.
            if leaf is not value and not (compares and leaf == value and leaf != 0):
                return None
        if self._has_static_fields and not same_static_fields(structure, self._structure):
            return None
        return self.apart(leaves) if self._donates else (leaves,)

    def picked(self, leaves: list[Any]) -> tuple[list[Any], ...]:
        """Return the arrays among leaves that match this program: the kept ones and the donated ones."""
        return self.apart([leaf for leaf, slot in zip(leaves, self.spec.slots, strict=True) if slot is None])

    def apart(self, arrays: list[Any]) -> tuple[list[Any], ...]:
        """Split arrays into the kept ones and the donated ones."""
        if not self._donates:
            return (arrays,)
        both = list(zip(arrays, self._donated, strict=True))
        return [x for x, d in both if not d], [x for x, d in both if d]


def _is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array; NumPy's strings do not count."""
    return isinstance(leaf, PROGRAM_ARRAYS) and not isinstance(leaf, np.character)


def _has_values(leaf: Any) -> bool:
    """Return whether a leaf is an array that a program can be called with; it can be lowered for abstract ones, too."""
    return _is_array(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct)


def _is_surely_array(leaf: Any) -> bool:
    """Return whether a leaf is an array that `jax.jit` can distinguish from a Python number."""
    if not _is_array(leaf):
        return False
    # A tracer of a Python boolean is not weakly typed, as one of a number is.
    return leaf.ndim > 0 or not (leaf.dtype == bool or getattr(leaf, "weak_type", False))


class _AmbiguousArgumentsError(Exception):
    """Raised while tracing if `jax.jit` could not tell the arguments from another program's."""


def _checked_static_leaf(leaf: StaticLeaf) -> StaticLeaf:
    return leaf.checked("named_jit: an argument or result that is not an array")


def _flat_result(result: Any) -> Any:
    """Return a result in the form of compiled functions: arrays alone, or arrays and a spec with the static leaves."""
    arrays, spec = flatten_arrays(result, (*ARRAYS, np.generic), named=False)
    static = list(map(_checked_static_leaf, spec.static_leaves))
    return FlatTree(arrays, spec) if static else result


# --- methods ---


class BoundCompiledFunction(Generic[P, R]):
    """A compiled method of one object.

    It is a tree that contains the object, so as an argument it is identified by its arrays, not by its identity.
    """

    __name__: str

    def __init__(self, function: CompiledFunction[..., R], instance: Any):
        functools.update_wrapper(self, function, updated=())
        self.__func__ = function
        self.__self__ = instance

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.__func__(self.__self__, *args, **kwargs)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
        """See `CompiledFunction.lower`."""
        return self.__func__.lower(self.__self__, *args, **kwargs)

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Traced:
        """See `CompiledFunction.trace`."""
        return self.__func__.trace(self.__self__, *args, **kwargs)


jax.tree_util.register_pytree_with_keys(
    BoundCompiledFunction,
    lambda method: (((jax.tree_util.GetAttrKey("__self__"), method.__self__),), method.__func__),
    lambda function, children: BoundCompiledFunction(function, *children),
)


# --- ahead of time ---


class Stage:
    """A stage of `jax.stages` for a function with static leaves or donated arguments. Call it like the function.

    All other attributes come from JAX's stage.
    """

    def __init__(self, stage: Any, program: _Program | None):
        self._stage = stage
        self._program = program
        """The program for the arguments; None if they are passed unchanged."""

    @property
    def out_info(self) -> Any:
        """Return the result of the function with abstract arrays."""
        return _result_as_tree(self._stage.out_info)

    def by_parameter(self, values: Sequence[Any]) -> dict[str, Sequence[Any]]:
        """Split values for the arrays of the arguments by the parameters of the program, which are lists of arrays."""
        lists = () if self._program is None else self._program.apart(list(values))
        return dict(zip(("kept_arrays", "donated_arrays"), lists, strict=False))

    def lower(self, *args: Any, **kwargs: Any) -> Stage:
        """See `jax.stages.Traced.lower`."""
        return Stage(self._stage.lower(*args, **kwargs), self._program)

    def compile(self, *args: Any, **kwargs: Any) -> Stage:
        """See `jax.stages.Lowered.compile`."""
        return Stage(self._stage.compile(*args, **kwargs), self._program)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._program is None:
            return _result_as_tree(self._stage(*args, **kwargs))
        arrays, spec = flatten_arrays((args, kwargs), PROGRAM_ARRAYS, named=False)
        if spec != self._program.spec:
            raise TypeError(
                "named_jit: this program was compiled for different arguments: pass the same tree structure and the "
                "same non-array values."
            )
        return _result_as_tree(self._stage(*self._program.apart(arrays)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


def _result_as_tree(result: Any) -> Any:
    return result.tree() if isinstance(result, FlatTree) else result
