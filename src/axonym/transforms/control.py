"""`while_loop`, `fori_loop`, `cond` and `switch` on trees of named arrays.

JAX's own functions take named arrays too, since they are trees. These add the benefits of names: if the order of axes
differs between two steps or two branches, it is aligned, since order is only layout, and errors describe real
differences by path and axis. Values that are not arrays, such as a function in a module, are passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, TypeVarTuple, overload

import jax
import jax.numpy as jnp
import numpy as np

from ..core.function_cache import Functions, HeldArrays, WithArrays, jitted_as
from ..core.tree_spec import ARRAYS_AND_NUMBERS, FlatTree, TreeSpec, flatten_arrays
from ..named_array import NamedArray, NamedOrNumeric, describe_array, raw
from ._carry import CARRY, MismatchMessages, conform_to_spec, run_settled

C = TypeVar("C")
"""A carry."""
R = TypeVar("R")
Ts = TypeVarTuple("Ts")


@overload
def while_loop(cond_fn: Callable[[Any], Any], body_fn: Callable[[Any], Any], init: complex) -> Any: ...
@overload
def while_loop(cond_fn: Callable[[C], Any], body_fn: Callable[[C], C], init: C) -> C: ...
def while_loop(cond_fn: Callable[[Any], Any], body_fn: Callable[[Any], Any], init: Any) -> Any:
    """Repeat `body_fn` for as long as `cond_fn` of the carry holds: `jax.lax.while_loop` by name.

    The carry keeps its axes, sizes and dtypes; only the order of axes may change. A carry that goes in replicated and
    comes out sharded is sharded from the start.

    >>> axn.while_loop(lambda x: x.sum() < 100, lambda x: 2 * x, axn.ones({"x": 3}))
    NamedArray(float32[x=3], [64. 64. 64.])
    """
    arrays, spec = flatten_arrays(init, ARRAYS_AND_NUMBERS)
    functions = Functions(body_fn, cond_fn)
    return spec.unflatten(functions.compiled(_build_while, None, spec)(functions.arrays, arrays))


def _build_while(functions: WithArrays, _: None, spec: TreeSpec) -> Callable[..., Any]:
    def run(held: HeldArrays, arrays: list[Any]) -> list[Any]:
        body_fn, cond_fn = functions(held)

        def going(carry: list[Any]) -> Any:
            return _raw_condition("while_loop", "the condition", cond_fn(spec.unflatten(carry)))

        def body(carry: list[Any]) -> list[Any]:
            types = [jax.typeof(c) for c in carry]
            return conform_to_spec("while_loop", CARRY, spec, types, body_fn(spec.unflatten(carry)), settles=True)

        return run_settled(lambda start: jax.lax.while_loop(going, body, start), "while_loop", arrays)

    return jitted_as("while_loop", run)


@overload
def fori_loop(
    lower: NamedOrNumeric, upper: NamedOrNumeric, body_fn: Callable[[Any, Any], Any], init: complex
) -> Any: ...
@overload
def fori_loop(lower: NamedOrNumeric, upper: NamedOrNumeric, body_fn: Callable[[Any, C], C], init: C) -> C: ...
def fori_loop(lower: NamedOrNumeric, upper: NamedOrNumeric, body_fn: Callable[[Any, Any], Any], init: Any) -> Any:
    """Repeat `body_fn(i, carry)` from `lower` up to, but not including, `upper`: `jax.lax.fori_loop` by name.

    The carry keeps its axes, sizes and dtypes; only the order of axes may change. Where both bounds are numbers, the
    loop can be differentiated.

    >>> axn.fori_loop(0, 3, lambda i, x: x + i, axn.ones({"x": 2}))
    NamedArray(float32[x=2], [4. 4.])
    """
    arrays, spec = flatten_arrays(init, ARRAYS_AND_NUMBERS)
    bounds = _raw_condition("fori_loop", "`lower`", lower), _raw_condition("fori_loop", "`upper`", upper)
    # Static bounds are part of the program: JAX differentiates a loop only if it knows the number of steps.
    static = tuple(map(int, bounds)) if all(isinstance(bound, (int, np.integer)) for bound in bounds) else None
    functions = Functions(body_fn)
    return spec.unflatten(functions.compiled(_build_fori, static, spec)(functions.arrays, bounds, arrays))


def _build_fori(functions: WithArrays, static: tuple[int, ...] | None, spec: TreeSpec) -> Callable[..., Any]:
    def run(held: HeldArrays, bounds: tuple[Any, Any], arrays: list[Any]) -> list[Any]:
        (body_fn,) = functions(held)

        def body(i: Any, carry: list[Any]) -> list[Any]:
            types = [jax.typeof(c) for c in carry]
            return conform_to_spec("fori_loop", CARRY, spec, types, body_fn(i, spec.unflatten(carry)), settles=True)

        lower, upper = bounds if static is None else static
        return run_settled(lambda start: jax.lax.fori_loop(lower, upper, body, start), "fori_loop", arrays)

    return jitted_as("fori_loop", run)


def cond(pred: NamedOrNumeric, true_fn: Callable[[*Ts], R], false_fn: Callable[[*Ts], R], *operands: *Ts) -> R:
    """Call one of two functions with the operands: `jax.lax.cond` by name.

    Both must return the same tree of the same axes; the result has them in the order of `true_fn`. The predicate is a
    scalar or a named array without axes, traced or not.

    >>> x = axn.arange(axn.Axis("x", 3))
    >>> axn.cond(x.sum() > 2, lambda x: x * 10, lambda x: -x, x)
    NamedArray(int32[x=3], [ 0 10 20])
    """
    return _choose_branch("cond", _raw_condition("cond", "the predicate", pred), (true_fn, false_fn), operands)


def switch(index: NamedOrNumeric, branches: Sequence[Callable[[*Ts], R]], *operands: *Ts) -> R:
    """Call one of several functions with the operands: `jax.lax.switch` by name.

    All must return the same tree of the same axes; the result has them in the order of the first branch. An index out
    of range is clamped.

    >>> x = axn.arange(axn.Axis("x", 3))
    >>> axn.switch(1, [lambda x: x, lambda x: x + 1, lambda x: -x], x)
    NamedArray(int32[x=3], [1 2 3])
    """
    if not branches:
        raise ValueError("switch: expected at least one branch.")
    return _choose_branch("switch", _raw_condition("switch", "the index", index), branches, operands)


def _choose_branch(what: str, which: Any, branches: Sequence[Callable[..., Any]], operands: tuple[Any, ...]) -> Any:
    arrays, spec = flatten_arrays(operands, ARRAYS_AND_NUMBERS)
    functions = Functions(*branches)
    return functions.compiled(_build_choice, what, spec)(functions.arrays, which, arrays).tree()


def _build_choice(functions: WithArrays, what: str, spec: TreeSpec) -> Callable[..., Any]:
    def run(held: HeldArrays, which: Any, arrays: list[Any]) -> FlatTree:
        branches = functions(held)
        names = [f"branch {i}" for i in range(len(branches))]
        names = ["the true branch", "the false branch"] if what == "cond" else names
        agreed: list[tuple[str, TreeSpec, list[Any]]] = []  # the result of the branch that is traced first

        def positional(name: str, branch: Callable[..., Any]) -> Callable[[list[Any]], list[Any]]:
            def call(arrays: list[Any]) -> list[Any]:
                result = branch(*spec.unflatten(arrays))
                if not agreed:
                    outputs, out_spec = flatten_arrays(result, ARRAYS_AND_NUMBERS)
                    agreed.append((name, out_spec, [jax.typeof(x) for x in outputs]))
                    return outputs
                first, out_spec, types = agreed[0]
                words = MismatchMessages(
                    "result",
                    f"of {first} is",
                    f"of {name} is",
                    f"is in {first} only",
                    f"is in {name} only",
                    "Place both alike, for example with `axonym.shard(..., {before})`.",
                )
                return conform_to_spec(what, words, out_spec, types, result)

            return call

        calls = [positional(name, branch) for name, branch in zip(names, branches, strict=True)]
        outputs = jax.lax.cond(which, *calls, arrays) if what == "cond" else jax.lax.switch(which, calls, arrays)
        return FlatTree(outputs, agreed[0][1].weak(spec))

    return jitted_as(what, run)


def _raw_condition(what: str, which: str, x: Any) -> Any:
    """Return the raw array of an argument that must be a scalar."""
    if isinstance(x, NamedArray) and x.names:
        text = (
            f"{what}: {which} must be a scalar, got {describe_array(x)}. Reduce it with `axonym.all` or `axonym.any`."
        )
        raise TypeError(text)
    array: Any = raw(x)
    if jnp.ndim(array):
        raise TypeError(f"{what}: {which} must be a scalar, got an array of shape {jnp.shape(array)}.")
    return array
