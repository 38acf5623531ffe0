"""`infer`: name the axes of every value in a program from the names of its arguments."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, AxisType

from ..core.errors import counted, quoted
from ..core.source_lines import Source, frames_of, source
from ..core.tree_spec import PROGRAM_ARRAYS, TreeSpec, flatten_arrays
from ..distribution.active_settings import activate, activate_here
from ..distribution.axis_marks import is_marking
from ..distribution.mesh_axes import NO_MESH, has_manual
from ..named_array import is_named_array
from ._axes import Axis, Meeting, NameReader, fresh, leaves, size_of
from ._sources import LeafNames, names_of_leaves, roots_of
from ._values import Axed, AxisStep, Pointer, dtype_kind
from ._walk import AxisWalk, Body, steps_of

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr


@dataclasses.dataclass(frozen=True)
class MixUp:
    """Two named axes that a program treats as one: found by `infer`.

    >>> x, w = jnp.ones((3, 4)), jnp.ones((4, 4))
    >>> program = axn.names.infer(lambda x, w: x @ w.T, x, w, names=("batch embed", "embed mlp"))
    >>> [found.names for found in program.mix_ups]
    [('embed', 'mlp')]
    """

    names: tuple[str, str]
    said_by: tuple[str, str]
    """Where each name comes from."""
    kind: str
    """`names` if two names meet. Otherwise two roles of one axis are mixed up: see `str` of it."""
    operation: str
    """The primitive that treats them as one; empty if no operation does."""
    source: Source | None
    """The user's line."""

    def __str__(self) -> str:
        a, b = (f"{n!r} ({by})" if by else repr(n) for n, by in zip(self.names, self.said_by, strict=True))
        at = f", at {self.source}" if self.source else ""
        return _TEXTS[self.kind].format(a=a, b=b, operation=self.operation) + at


_TEXTS = {
    "names": "{a} meets {b} in {operation}",
    "side": "{b} stands for the queries where weights are summed over {a}: a mask or bias is transposed",
    "softmax": "a softmax normalizes along {a}, and its weights are summed along the other role of this axis",
    "future": "a mask keeps the positions of {a} that come after the query",
    "mask": "a mask does not vary along {a}, over which its softmax normalizes, so it masks nothing",
    "crossed": "two roles of {a} are exchanged in {operation}",
    "torn": "a reshape exchanges the sizes of {a} and {b} and mixes their elements: transpose instead",
    "sizes": "{a} and {b} have two sizes",
    "outer": "arrays of different ranks give an outer product of {a} with itself in {operation}",
}


@dataclasses.dataclass(frozen=True)
class UnnamedAxes:
    """Axes that are the same and have no name.

    >>> program = axn.names.infer(lambda x: x + 1, jnp.ones((3, 4)), names=("batch _",))
    >>> for found in program.unknown:
    ...     print(found)
    size 4: axis 1 of x: no argument names it
    """

    size: int
    places: tuple[str, ...]
    """The arguments that have it, or the line where it begins."""
    reason: str
    example: str
    """An entry of `names=` with `?` for one of the axes, if an argument has it."""

    def __str__(self) -> str:
        first, *others = self.places
        more = f" and {counted(len(others), 'other')}" if others else ""
        return f"size {self.size}: {first}{more}: {self.reason}"


class NamedProgram:
    """A traced program whose axes have names: the result of `infer`. Printed, it lists the operations.

    >>> f = lambda x, w: jnp.tanh(x @ w)
    >>> x, w = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((4, 16), "float32")
    >>> program = axn.names.infer(f, x, w, names=("batch embed", "embed mlp"))
    >>> program.results
    ('batch', 'mlp')
    >>> print(program)
    a:f32[batch=8, embed=4]  # x
    b:f32[embed=4, mlp=16]  # w
    c:f32[batch=8, mlp=16] = dot_general a b  # ...
    d:f32[batch=8, mlp=16] = tanh c  # ...
    return d
    all axes of the arguments have names
    """

    def __init__(self, traced: Traced, walk: AxisWalk, body: Body, met: Sequence[Meeting]):
        self.traced = traced
        """The program, and the trees of its arguments and results."""
        self.body = body
        """The steps of the program: one for each equation, with the steps of the functions that it calls."""
        self._walk = walk
        self.given_names = walk.given
        """The names of each argument's axes, also of those of size 1."""
        self._names = NameReader()
        found = dict[MixUp, None]()
        for m in met:
            two, pair = m.kind == "sizes", (m.left, m.right)
            a, b = (self._names.axis((f,)) or "?" for f in pair)
            left, right = (f"size {f.size} by {f.source}" if two else f.source for f in pair)
            operation, line = ("", None) if two else (m.at.name, source_of(m.at))
            found[MixUp((a, b), (left, right), m.kind, operation, line)] = None
        self._mix_ups = tuple(found)

    def names_of(self, value: Axed) -> tuple[str | None, ...]:
        """Return the names of the axes of a value of the program; None for an axis whose name is not known.

        >>> program = axn.names.infer(lambda x: x.T, jnp.ones((3, 4)), names=("batch _",))
        >>> [program.names_of(step.results[0]) for step in program.body.steps]
        [(None, 'batch')]
        """
        return self._names.array(value.dims)

    @property
    def arguments(self) -> Any:
        """The positional arguments and those by keyword, with its names in place of each array.

        >>> w = {"w": jnp.ones((4, 2))}
        >>> axn.names.infer(lambda x, p: x @ p["w"], jnp.ones((3, 4)), w, names=("batch embed", None)).arguments
        ((('batch', 'embed'), {'w': ('embed', None)}), {})
        """
        return self._tree(self.traced.given, self.body.arguments)

    @property
    def results(self) -> Any:
        """The results, with its names in place of each array.

        >>> axn.names.infer(lambda x: {"sum": x.sum(1)}, jnp.ones((3, 4)), names=("batch embed",)).results
        {'sum': ('batch',)}
        """
        return self._tree(self.traced.returned, self.body.results)

    def _tree(self, spec: TreeSpec, values: Sequence[Axed]) -> Any:
        tree = spec.unflatten([self.names_of(x) for x in values])
        return jax.tree.map(lambda x: x.array if is_named_array(x) else x, tree, is_leaf=is_named_array)

    @property
    def mix_ups(self) -> tuple[MixUp, ...]:
        """The pairs of named axes that the program treats as one, and roles of an axis that it mixes up.

        >>> axn.names.infer(lambda x, y: x + y, jnp.ones(3), jnp.ones(3), names=("batch", "batch")).mix_ups
        ()
        """
        return self._mix_ups

    @property
    def unknown(self) -> tuple[UnnamedAxes, ...]:
        """The axes without a name, each with the reason: first the axes of arguments.

        >>> [found.size for found in axn.names.infer(lambda x: x + 1, jnp.ones((3, 4))).unknown]
        [3, 4]
        """
        # By class, since axes that must be one need one name: it is asked for where a user can give it, in an argument.
        found: dict[tuple[int, ...], tuple[int, list[str], str, str]] = {}
        for place, value in zip(self.traced.paths, self.body.arguments, strict=True):
            for i, axis in self._unnamed(value):
                words = [name or "_" for name in self.names_of(value)]
                example = f'"{place}": "{" ".join([*words[:i], "?", *words[i + 1 :]])}"'
                known = found.setdefault(_class_of(axis), (size_of(axis), [], "no argument names it", example))
                known[1].append(f"axis {i} of {place}")
        for step in steps_of(self.body):
            for value in () if step.bodies else step.results:
                for _, axis in self._unnamed(value):
                    if _class_of(axis) not in found:
                        why = "of a constant that meets no named axis" if value.constant else f"made by {step.name}"
                        found[_class_of(axis)] = (size_of(axis), [str(source_of(step) or "the program")], why, "")
        return tuple(UnnamedAxes(size, tuple(places), *rest) for size, places, *rest in found.values())

    def _unnamed(self, value: Axed) -> Iterator[tuple[int, Axis]]:
        for i, (axis, name) in enumerate(zip(value.dims, self.names_of(value), strict=True)):
            if axis and name is None:
                yield i, axis

    @property
    def closed_over(self) -> tuple[str, ...]:
        """The arrays that the function uses without being passed them, such as weights in a closure.

        `names=` cannot name them, and `distribute` replicates them: pass them as arguments.

        >>> w = jnp.ones((4, 2))
        >>> axn.names.infer(lambda x: x @ w, jnp.ones((3, 4)), names=("batch embed",)).closed_over
        ('f32[4, 2]',)
        """
        called = [p for step in steps_of(self.body) if step.bodies for p in step.params.values()]
        holders = (self.traced.jaxpr, *(x for p in called for x in (p if isinstance(p, tuple) else (p,))))
        arrays = {id(x): x for holder in holders for x in getattr(holder, "consts", ()) if isinstance(x, jax.Array)}
        return tuple(f"{_written_dtype(x.aval)}{[*x.shape]}" for x in arrays.values() if x.ndim)

    @property
    def known_share(self) -> float:
        """The share of the axes of all values, except axes of size 1, that have a name.

        >>> axn.names.infer(lambda x: x + 1, jnp.ones((3, 4)), names=("batch _",)).known_share
        0.5
        """
        values = [*self.body.arguments, *(x for step in steps_of(self.body) for x in step.results)]
        names = [name for x in values for name, axis in zip(self.names_of(x), x.dims, strict=True) if axis]
        return 1.0 if not names else sum(name is not None for name in names) / len(names)

    def __repr__(self) -> str:
        steps = sum(1 for _ in steps_of(self.body))
        return f"NamedProgram({counted(steps, 'operation')}, {counted(len(self.mix_ups), 'mix-up')})"

    def __str__(self) -> str:
        count = itertools.count()
        arguments: Sequence[Any] = self.body.jaxpr.invars
        known: dict[Any, str] = {v: _letters_of(next(count)) for v in (*arguments, *self.body.jaxpr.constvars)}
        given = zip(arguments, self.body.arguments, self.traced.paths, strict=True)
        lines = [f"{self._described(known[v], v, x)}  # {path}" for v, x, path in given]
        lines += self._lines(self.body, "", known, count)
        returned: Sequence[Any] = self.body.jaxpr.outvars
        lines.append(f"return {' '.join(_written_literal(v) or known[v] for v in returned)}")
        lines += [f"mix-up: {mix_up}" for mix_up in self.mix_ups]
        lines += self._asked()
        lines += [said_of_closed_over(self.closed_over)] if self.closed_over else []
        unknown = self._walk.unknown_primitives.items()
        return "\n".join([*lines, *(f"{name} has no rule ({counted(n, 'time')})" for name, n in unknown)])

    def _lines(self, body: Body, indent: str, known: dict[Any, str], count: Iterator[int]) -> Iterator[str]:
        for step in body.steps:
            inputs: Sequence[Any] = step.eqn.invars
            operands = [_written_literal(v) or known[v] for v in inputs]
            for v in step.eqn.outvars:
                known[v] = _letters_of(next(count))
            results = [self._described(known[v], v, x) for v, x in zip(step.eqn.outvars, step.results, strict=True)]
            line = f"{indent}{' '.join(results)} = {step.name} {' '.join(operands)}".rstrip()
            yield f"{line}  # {where}" if (where := source_of(step)) else line
            for inner in step.bodies:
                given = inner.jaxpr.invars
                if any(x is not y for x, y in zip(inner.results, step.results, strict=False)):  # a loop or branch
                    known |= {v: _letters_of(next(count)) for v in given}
                    own = zip(given, inner.arguments, strict=True)
                    yield f"{indent}    given " + " ".join(self._described(known[v], v, x) for v, x in own)
                else:
                    known |= dict(zip(given, operands, strict=True))
                known |= {v: _letters_of(next(count)) for v in inner.jaxpr.constvars}
                yield from self._lines(inner, indent + "    ", known, count)

    def _described(self, variable: str, var: Any, value: Axed) -> str:
        sizes = zip(self.names_of(value), var.aval.shape, strict=True)
        return (
            f"{variable}:{_written_dtype(var.aval)}[{', '.join(str(n) if a is None else f'{a}={n}' for a, n in sizes)}]"
        )

    def _asked(self) -> Iterator[str]:
        """Yield what the user completes to name the remaining axes of arguments."""
        classes = [u for u in self.unknown if u.example]
        if not classes:
            yield "all axes of the arguments have names"
            return
        count = sum(len(u.places) for u in classes)
        of = f"{counted(len(classes), 'class', 'classes')} of {counted(count, 'argument axis', 'argument axes')}"
        yield f"{of} {'has' if len(classes) == 1 else 'have'} no name; name one axis of each:"
        for u in classes:
            more = f", and {counted(len(u.places) - 1, 'other axis', 'other axes')}" if len(u.places) > 1 else ""
            yield f"    {u.example},  # {u.size}{more}"


def infer(
    fn: Callable[..., Any], /, *args: Any, names: Any = None, allow: Collection[str] = (), **kwargs: Any
) -> NamedProgram:
    """Trace a function, and name the axes of every value in it from the names of its arguments.

    Arguments:
        fn: any function of arrays and trees. It is traced, and neither compiled nor run.
        args, kwargs: its arguments; arrays may be abstract. Those that are not arrays are part of the program. What it
            uses without being passed it has no names: see `NamedProgram.closed_over`.
        names: names for the arguments: a tuple with an entry for each positional argument, or a dictionary from
            parameters to entries. An entry is a tree prefix of the argument, whose leaves are strings such as
            `"batch pos"`, with `_` for an axis without a name, or tuples, or None; or a dictionary from patterns of
            paths to these. An axis of size 1 has no name. Named arrays, also those inside, annotations and the metadata
            of Flax need no names here. A name such as `heads*head_dim` names an axis that the function splits, and
            `pos'` is the role of keys of `pos`.
        allow: kinds of mix-ups that are meant, such as `["future"]` for a mask that keeps only what comes later.

    >>> program = axn.names.infer(lambda x: x.sum(0), jnp.ones((3, 4)), names=("batch embed",))
    >>> program.results
    ('embed',)
    """
    return inferred(fn, args, kwargs, names, allow)


def inferred(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], names: Any, allow: Collection[str] = ()
) -> NamedProgram:
    """Infer the names of a call, whatever the parameters of the function are called."""
    said = zip(jax.tree.leaves((args, kwargs)), names_of_leaves(fn, args, kwargs, names), strict=True)
    names_of_arrays = [own for leaf, own in said if isinstance(leaf, PROGRAM_ARRAYS)]
    # In a derivative, an axis that the function renames has its later name, up to the argument that has the first one.
    return follow(trace(fn, args, kwargs), names_of_arrays, allow, renames=False)


def follow(
    traced: Traced, names: Sequence[LeafNames], allow: Collection[str] = (), renames: bool = True
) -> NamedProgram:
    """Follow the names of the arguments' arrays through a traced program.

    Arguments:
        renames: whether an axis that has a name gets another one where a named operation calls it so.
    """
    allowed = {allow} if isinstance(allow, str) else set(allow)
    if unknown := sorted(allowed - _TEXTS.keys()):
        raise ValueError(f"allow=: {quoted(unknown)} is no kind of mix-up. The kinds are {quoted(_TEXTS)}.")
    walk, body = _walked_program(traced, names, renames)
    met = walk.settle()
    # What JAX splits evenly is taken for one axis, until its parts have different names.
    while separate := walk.axes.slices_among(met):
        other, other_body = _walked_program(traced, names, renames, walk.axes.separate | separate)
        fewer = other.settle()
        if len(fewer) >= len(met):
            break
        walk, body, met = other, other_body, fewer
    return NamedProgram(traced, walk, body, [m for m in met if m.kind not in allowed])


def _walked_program(
    traced: Traced, names: Sequence[LeafNames], renames: bool, separate: frozenset[int] = frozenset()
) -> tuple[AxisWalk, Body]:
    walk, jaxpr = AxisWalk(separate, renames), traced.jaxpr.jaxpr
    walk.given = [set(own.names or ()) for own in names]
    arguments: list[Axed] = []
    for var, own in zip(jaxpr.invars, names, strict=True):
        shape: Any = var.aval.shape  # pyright: ignore[reportAttributeAccessIssue]
        pairs = zip(own.names or (None,) * len(shape), shape, strict=True)
        dims = tuple(fresh(n) if name is None else walk.axes.axis(name, n, own.source) for name, n in pairs)
        points = (Pointer(),) if dtype_kind(var) in ("i", "u") else None
        arguments.append(Axed(walk.axes.distinct(dims), points=points))
    owners = [path.partition("/")[0] for path in traced.paths]  # none in a report, whose named arrays may have any size
    walk.axes.check_given((of, [f for axis in x.dims for f in axis]) for of, x in zip(owners, arguments, strict=False))
    # A walk makes many objects and drops none, so to look for garbage would double its time.
    collects = gc.isenabled()
    gc.disable()
    try:
        body = walk.run(jaxpr, arguments, constants=traced.jaxpr.consts)
    finally:
        if collects:
            gc.enable()
    return walk, body


def _class_of(axis: Axis) -> tuple[int, ...]:
    return tuple(map(id, leaves(axis)))


# --- traced programs ---


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced program, and the trees of its arguments and results."""

    jaxpr: ClosedJaxpr
    given: TreeSpec
    """The tree of the positional arguments and those by keyword."""
    returned: TreeSpec
    paths: tuple[str, ...]
    """The path of each array in the arguments."""


def trace(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Traced:
    """Trace a function with abstract arguments, without a mapping, and with shardings in no types."""
    given, static = flatten_arrays((args, dict(kwargs)), PROGRAM_ARRAYS, named=False)
    returned: list[TreeSpec] = []

    def flat(*arrays: Any) -> list[Any]:
        args, kwargs = static.unflatten(arrays)
        found, spec = flatten_arrays(fn(*args, **kwargs), PROGRAM_ARRAYS, named=False)
        returned[:] = [spec]
        return found

    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False)) for x in given]
    own_marks = activate_here(marked=not is_marking())  # a report marks the program that it traces itself
    # Constraints by a `PartitionSpec` need the active mesh; its axes are Auto here, so that no type has a sharding.
    active = jax.sharding.get_abstract_mesh()
    types = (AxisType.Auto,) * len(active.axis_names)
    without = active.empty or has_manual(active)
    mesh = NO_MESH if without else AbstractMesh(active.axis_sizes, active.axis_names, axis_types=types)
    with activate(None), own_marks, jax.sharding.use_abstract_mesh(mesh):
        closed = jax.make_jaxpr(flat)(*abstract)
    parameters = {root.keys: root.path for root in roots_of(fn, args, kwargs)}
    leaves = jax.tree_util.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]
    paths = [(parameters[keys[:2]], keys[2:]) for keys, leaf in leaves if isinstance(leaf, PROGRAM_ARRAYS)]
    parts = [(path, jax.tree_util.keystr(keys, simple=True, separator="/")) for path, keys in paths]
    return Traced(closed, static, returned[0], tuple("/".join(filter(None, own)) for own in parts))


def source_of(step: AxisStep) -> Source | None:
    """Return the user's line of a step."""
    frames = list(frames_of(step.eqn))
    own = source(frames)
    outer = None if step.outer is None else source_of(step.outer)
    if own is None or outer is None or step.outer is None:
        return own or outer
    called = step.outer.params.get("name")
    if called is None:
        return own
    # JAX traces a function of a library once, for the first of its callers, so its lines may come from another call.
    return own if own.function.rpartition(".")[2] == called else outer


# --- how a program is written ---


def said_of_closed_over(arrays: Sequence[str]) -> str:
    """Return what to do about arrays that a function closes over."""
    shown = ", ".join(arrays[:3]) + (", ..." if len(arrays) > 3 else "")
    one = len(arrays) == 1
    return (
        f"{counted(len(arrays), 'array')} ({shown}) {'is' if one else 'are'} closed over, and so "
        f"{'has' if one else 'have'} no names: pass {'it as an argument' if one else 'them as arguments'}"
    )


def _written_literal(var: Any) -> str:
    return str(var.val) if hasattr(var, "val") else ""


def _letters_of(number: int) -> str:
    """Return a, b, ..., z, ba, bb, ..."""
    more, last = divmod(number, 26)
    return (_letters_of(more) if more else "") + chr(ord("a") + last)


def _written_dtype(aval: Any) -> str:
    return aval.str_short(short_dtypes=True).partition("[")[0]
