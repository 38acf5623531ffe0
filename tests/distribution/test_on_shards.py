"""Each rule for shards against the complete program: values and gradients, for random layouts."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from axonym.core.jax_versions import varying_axes
from axonym.distribution.on_shards import OnShards
from axonym.distribution.operations_on_shards import NeedsCompleteAxes, Shard

SIZES = {"a": 2, "b": 2}
LAYOUTS: list[tuple[str, ...]] = [(), ("a",), ("b",), ("a", "b")]
S = (4, 8)
KEY = jax.random.key(0)


class Case:
    """A function of arrays of some shapes, and the layouts in which it runs without a gather, such as `a, -b`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *shapes: Any,
        kept: Sequence[str] = (),
        refused: Sequence[str] = (),
        draws: int = 2,
    ):
        self.fn, self.shapes, self.kept, self.refused, self.draws = fn, shapes, kept, refused, draws


def _ints(x: Any) -> Any:
    return jnp.round(3 * jnp.abs(lax.stop_gradient(x))).astype(jnp.int32) % 4


def _loop(x: Any) -> Any:
    return lax.scan(lambda c, row: (jnp.tanh(c + row), c * 2), jnp.zeros(x.shape[1:], x.dtype), x)


def _solved_in_steps(x: Any, y: Any) -> Any:
    """Solve a system for each row by conjugate gradients, until the last of them is solved."""
    a = y @ y.T / 8 + 4 * jnp.eye(8)
    return jax.vmap(lambda b: jax.scipy.sparse.linalg.cg(lambda v: a @ v, b, tol=1e-6)[0])(x)


def _summed_until(y: Any) -> Any:
    """Return a row times a number of turns that depends on it."""
    return lax.while_loop(lambda c: c[1] < jnp.sum(y), lambda c: (c[0] + y, c[1] + 0.3), (y, -1.0))[0]


@jax.custom_vjp
def _own(x: Any, w: Any) -> Any:
    return jnp.sum(x, 0) * w


_own.defvjp(
    lambda x, w: (_own(x, w), (x, w)), lambda kept, g: ((3 * g * kept[1])[None] + 0 * kept[0], jnp.sum(kept[0], 0) * g)
)


@jax.custom_jvp
def _own_jvp(x: Any) -> Any:
    return x / jnp.sum(x * x, -1, keepdims=True)


@_own_jvp.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    return _own_jvp(x), 2 * t / jnp.sum(x * x, -1, keepdims=True)


def _ref(x: Any) -> Any:
    ref = jax.new_ref(x * 2)
    ref[...] = ref[...] + jnp.sin(x)
    return ref[...]


def _slope_of_largest(shape: Any) -> Any:
    """Return the gradient of a max pool of rows that are alike."""
    pool = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID")
    of_rows = jax.vjp(pool, jnp.broadcast_to(jnp.sin(jnp.arange(8.0)), shape))[1]
    return of_rows(jnp.arange(16.0).reshape(4, 4))[0]


def _first_row(shape: Any, inserted: Any) -> Any:
    """Return operands of a scatter whose index says a column only, so that it writes from the first row on."""
    window = tuple(range(1, len(shape)))
    return jnp.array([[2]]), jnp.ones(shape), lax.ScatterDimensionNumbers(window, inserted, (1,))


CASES: dict[str, Case] = {
    # position for position
    "elementwise": Case(
        lambda x, y: jnp.sin(x) * y + jnp.where(x > 0, x, y) - jnp.clip(x, -1, 1), S, S, kept=["a,b|a,b"]
    ),
    "of a smaller one": Case(lambda x, y: x * y, S, (1, 8), kept=["a,b|,b", "a,|,"]),
    "integers": Case(lambda x: _ints(x) ^ (_ints(x) << 1), S, kept=["a,b"]),
    "one layout or another": Case(lambda x, y: x * y, S, S, kept=["a,|,b", "ab,|,"]),
    "a choice": Case(lambda x, y: lax.select_n(x[0, 0] > 0, x, y), S, S),
    "layouts of types": Case(lambda x: lax.bitcast_convert_type(lax.stop_gradient(x), jnp.uint32), S, kept=["a,b"]),
    "running sums": Case(lambda x: jnp.cumsum(x, 1), S, kept=["a,"], refused=[",a"]),
    "running logs": Case(lambda x: lax.cumlogsumexp(x, axis=1), S, kept=["a,"], refused=[",a"]),
    "sorted": Case(lambda x: jnp.sort(x, 1), S, refused=[",a"]),
    "sorted along one element": Case(
        lambda x, y: lax.sort((x[..., None], y[..., None]), dimension=2, num_keys=1)[1], S, S, kept=["a,|,", "a,|,b"]
    ),
    "reversed": Case(lambda x: x * lax.rev(x, (1,)), S, kept=["a,"], refused=[",a"]),
    "argmax": Case(lambda x: jnp.argmax(x, 1), S, kept=["a,"], refused=[",a"]),
    "top": Case(lambda x: lax.top_k(x, 2), S, refused=[",a"]),
    # places that no operand says
    "columns first": Case(lambda x: jnp.reshape(x, (4, 2, 4), order="F"), S, kept=["a,b", ",a"]),
    "columns first, in a row": Case(lambda x: jnp.ravel(x, order="F"), S, kept=[",a"], refused=["a,"]),
    "largest of alike rows": Case(lambda x: x * _slope_of_largest(x.shape), S, kept=["a,"]),
    "added to the first row": Case(lambda x: lax.scatter_add(x, *_first_row((1,), (0, 1))), S, refused=["a,"]),
    "the first row": Case(lambda x: x * lax.scatter(jnp.zeros(S), *_first_row((1,), (0, 1))), S, kept=["a,"]),
    "two of a column": Case(lambda x: x * lax.scatter(jnp.zeros(S), *_first_row((1, 2), (1,))), S, kept=["a,"]),
    # reductions
    "sums": Case(lambda x: jnp.sum(x * x, 1), S, kept=["a,b", ",ab"]),
    "all": Case(lambda x: jnp.mean(jnp.sin(x)), S, kept=["a,b", "ab,"]),
    "largest": Case(lambda x: jnp.max(x, 1) + jnp.min(x), S, kept=["a,b", ",ab"]),
    "largest of equal ones": Case(lambda x: jnp.max(jnp.round(x), 1), S, kept=["a,b", ",ab"]),
    "largest integers": Case(lambda x: jnp.max(_ints(x), 1) + jnp.min(_ints(x)), S, kept=["a,b", ",ab"]),
    "products": Case(lambda x: jnp.prod(x, 1), S, kept=["a,"], refused=[",a"]),
    "any": Case(lambda x: x * jnp.any(x > 1.5, 1, keepdims=True), S, kept=["a,b", ",ab"]),
    "any and all": Case(lambda x: x * (1 + jnp.all(x > -1, 0)[None] + jnp.all(x > 3)), S, kept=["a,b", "ab,"]),
    "or of bits": Case(lambda x: x * lax.reduce_or(_ints(x), (1,))[:, None], S, kept=["a,"], refused=[",a"]),
    "softmax": Case(lambda x: jax.nn.softmax(x, 1) + jax.nn.logsumexp(x, 0)[None], S, kept=["a,b", ",ab"]),
    "variance": Case(lambda x: x - jnp.var(x, 0, keepdims=True), S, kept=["a,b"]),
    # layout
    "transposed": Case(lambda x: x.T, S, kept=["a,b", "ab,"]),
    "broadcast": Case(lambda x: jnp.broadcast_to(x[:, None], (4, 3, 8)) * jnp.ones((4, 3, 8)), S, kept=["a,b"]),
    "squeezed": Case(lambda x: lax.squeeze(x, (1,)), (4, 1, 8), kept=["a,,b"]),
    "merged": Case(lambda x: jnp.tanh(x.reshape(32)).reshape(8, 4), S, kept=["a,"], refused=[",a"]),
    "divided": Case(lambda x: x.reshape(4, 4, 2) * x.reshape(2, 2, 8, 1)[0, 0, 0, 0], S),
    "divided in the middle": Case(lambda x: x.reshape(4, 2, 4), S, kept=["a,b"], refused=[",ab"]),
    "torn": Case(lambda x: x.reshape(8, 6), (12, 4), refused=["a,"]),
    "tiled": Case(lambda x: jnp.tile(x, (1, 3)), S, kept=["a,"]),
    "a slice": Case(lambda x: x[:, 1:5] * x[:, ::2], S, kept=["a,"], refused=[",a"]),
    "a dynamic slice": Case(lambda x: lax.dynamic_slice(x, (0, _ints(x)[0, 0]), (4, 3)), S, refused=[",a"]),
    "pieces": Case(lambda x: jnp.split(x, 2, 1), S, kept=["a,"], refused=[",a"]),
    "one piece": Case(lambda x: lax.split(x, (8,), 1), S, kept=["a,b"]),
    "padded": Case(lambda x: lax.pad(x, 0.5, [(0, 0, 0), (1, 2, 1)]), S, kept=["a,"], refused=[",a"]),
    "shifted": Case(lambda x: lax.pad(x, 0.0, [(0, 0, 0), (1, -1, 0)]), S, kept=["a,"], refused=[",a"]),
    "shifted by a window": Case(
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 1), (1, 1), [(0, 0), (1, -1)]), S, kept=["a,"], refused=[",a"]
    ),
    "joined": Case(lambda x, y: jnp.concatenate([x, y], 1), S, (4, 2), kept=["a,|a,"], refused=[",a|,"]),
    "stacked": Case(lambda x, y: jnp.stack([x, y], 1), S, S, kept=["a,b|a,b"]),
    "unstacked": Case(lambda x: jnp.unstack(x, axis=1), S, kept=["a,"], refused=[",a"]),
    "updated": Case(lambda x, y: lax.dynamic_update_slice(x, y, (0, 2)), S, (4, 3), kept=["a,|a,"], refused=[",a|,"]),
    "rolled": Case(lambda x: jnp.roll(x, 1, 1), S, kept=["a,"], refused=[",a"]),
    # products
    "product": Case(lambda x, y: x @ y, S, (8, 4), kept=["a,b|b,", ",a|a,b", "a,|,b"], refused=["a,|,a"]),
    "product of batches": Case(lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (4, 2, 8), (4, 8, 2), kept=["a,,b|a,b,"]),
    "gram": Case(lambda x: x @ x.T, S, kept=[",ab"], refused=["a,"]),
    "groups": Case(
        lambda x, w: lax.ragged_dot(x, w, jnp.array([3, 1], jnp.int32)), (4, 8), (2, 8, 2), kept=[",a|,a,b"],
        refused=["a,|,,", ",|a,,"],
    ),
    "convolution": Case(
        lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME"), (4, 2, 8), (4, 2, 3), kept=["a,b,|,b,", ",,|a,,"],
        refused=[",,a|,,"],
    ),
    "convolution of groups": Case(
        lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME", feature_group_count=2), (4, 4, 8), (4, 2, 3),
        refused=["a,,|,,"],
    ),
    # windows, look-ups, matrices
    "windows": Case(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID"), S, kept=["a,"], refused=[",a"]
    ),
    "looked up": Case(lambda x, i: x[_ints(i)], S, (8,), kept=[",b|a"], refused=["a,|"]),
    "taken along": Case(lambda x, i: jnp.take_along_axis(x, _ints(i), 1), S, (4, 3), kept=["a,|a,"], refused=[",a|,"]),
    "rows added": Case(lambda x, y, i: x.at[_ints(i)].add(y), S, (8, 8), (8,), kept=[",|a,|a", ",b|a,b|a", ",b|,b|"]),
    "rows set": Case(lambda x, y: x.at[jnp.array([1, 3])].set(y), S, (2, 8), kept=[",b|,b"], refused=["a,|,"]),
    "rows multiplied": Case(
        lambda x, y: x.at[jnp.array([1, 3])].mul(y, unique_indices=True), S, (2, 8), kept=[",b|,b"]
    ),
    "some of a row": Case(lambda x, y: x.at[jnp.array([1, 3]), 2:5].add(y), S, (2, 3), refused=[",a|,"]),
    "frequencies": Case(lambda x: jnp.real(jnp.fft.fft(x, axis=1)), S, refused=[",a"], draws=0),
    "cholesky": Case(
        lambda x: jnp.linalg.cholesky(x @ jnp.swapaxes(x, 1, 2) + 9 * jnp.eye(4)[None]), (4, 4, 8), kept=["a,,"]
    ),
    "solved": Case(
        lambda x, y: jnp.linalg.solve(x + 9 * jnp.eye(4)[None], y), (4, 4, 4), (4, 4, 2),
        kept=["a,,|a,,", "a,,|,,", ",,|a,,", "a,,|a,,b"], refused=[",a,|,,"],
    ),
    "solved in steps": Case(_solved_in_steps, S, (8, 8), kept=["a,|,", "ab,|,"]),
    "solved by a function": Case(
        lambda x, y: lax.custom_linear_solve(lambda v: v * (2 + x**2), y, lambda _, b: b / (2 + x**2), symmetric=True),
        S, S,
        kept=["a,b|a,b", "a,b|,", ",|a,b", "a,|,b"],
    ),
    "several at once": Case(lambda x, y: lax.optimization_barrier((x * 2, y * 3)), S, S, kept=["a,b|a,b", "a,|,a"]),
    "triangular": Case(
        lambda x, y: lax.linalg.triangular_solve(x + 9 * jnp.eye(4)[None], y, left_side=True), (4, 4, 4), (4, 4, 2),
        kept=["a,,|a,,"],
    ),
    # positions
    "counted": Case(lambda x: x * jnp.arange(8.0)[None] + lax.broadcasted_iota(jnp.float32, S, 0), S, kept=["a,b"]),
    "random": Case(lambda x: x * jax.random.normal(KEY, x.shape), S, kept=["a,b"]),
    "keys": Case(
        lambda x: x * jax.vmap(lambda k: jax.random.uniform(k, (8,)))(jax.random.split(KEY, 4)), S, kept=["a,b"]
    ),
    "its size": Case(lambda x: x / x.shape[1], S, kept=["a,b"]),
    "a mask": Case(lambda x: jnp.where(jnp.arange(4)[:, None] >= jnp.arange(8)[None], x, 0), S, kept=["a,b"]),
    # functions
    "a function": Case(lambda x: jax.jit(lambda y: jnp.sum(jnp.sin(y), 0))(x), S, kept=["a,b"]),
    "computed again": Case(lambda x: jax.checkpoint(lambda y: y * jnp.sum(jnp.sin(y), 0)[None])(x), S, kept=["a,b"]),
    "a loop": Case(_loop, S, kept=[",a"], refused=["a,"]),
    "a loop that sums": Case(
        lambda x: lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y + jnp.sum(y, 1, keepdims=True)), x), S, kept=["a,b"]
    ),
    "a loop of some turns for each": Case(
        lambda x: x * jax.vmap(_summed_until)(lax.stop_gradient(x)), S, kept=["a,", "ab,", "a,b"]
    ),
    "a loop of no turns": Case(
        lambda x: lax.scan(lambda c, y: (c * y[None], (c, y)), x, jnp.zeros((0, 8)))[0] * 2, S, kept=["a,b"]
    ),
    "a branch": Case(lambda x: lax.cond(x[0, 0] > 0, lambda y: y * 2, lambda y: jnp.sin(y), x), S),
    "a branch of layouts": Case(
        lambda x: lax.cond(jnp.sum(x) > 0, lambda y: y * 2, lambda y: jnp.ones_like(y), x), S, kept=["a,b"]
    ),
    "relu": Case(lambda x: jax.nn.relu(x) + jax.nn.gelu(x), S, kept=["a,b"]),
    "its own derivative": Case(_own, S, (8,), kept=["a,b|b", "a,|"]),
    "its own forward derivative": Case(_own_jvp, S, kept=["a,b"]),
    "an inner gradient": Case(lambda x: jax.grad(lambda y: jnp.sum(jnp.sin(y) * jnp.sum(y)))(x), S, kept=["a,b"]),
    "a reference": Case(_ref, S, kept=["a,b"]),
}  # fmt: skip


def _parsed(layouts: str) -> list[tuple[tuple[str, ...], ...]]:
    return [tuple(tuple(entry) for entry in one.split(",")) for one in layouts.split("|")]


def _random_layouts(case: Case, rng: random.Random) -> list[tuple[tuple[str, ...], ...]]:
    found = []
    for shape in case.shapes:
        own = list[tuple[str, ...]]()
        for n in shape:
            fitting = [a for a in LAYOUTS if n % 2 ** len(a) == 0 and not any({*a} & {*b} for b in own)]
            own.append(rng.choice(fitting))
        found.append(tuple(own))
    return found


def _on_shards(
    case: Case, layouts: Sequence[tuple[tuple[str, ...], ...]], gathers: bool, sums: bool = False
) -> Callable[..., Any]:
    """Return the function, run on shards and with complete results."""

    def on_device(*here: Any) -> Any:
        runner = OnShards(SIZES, {("a",): "rows", ("b",): "cols", ("a", "b"): "both"}, gathers=gathers, sums=sums)
        whole = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in case.shapes]
        flat = lambda *xs: jax.tree.leaves(case.fn(*xs))
        program = jax.make_jaxpr(flat)(*whole)
        found = [
            runner.moved(None, x, x.over)
            for x in runner.run(program.jaxpr, program.consts, [Shard(*x) for x in zip(here, layouts, strict=True)])
        ]
        specs[:] = [PartitionSpec(*(a or None for a in x.over)) for x in found]
        return [lax.pcast(x.here, tuple({"a", "b"} - varying_axes(x.here)), to="varying") for x in found]

    specs: list[PartitionSpec] = []

    def run(*xs: Any) -> list[Any]:
        mesh = jax.sharding.get_abstract_mesh()
        in_specs = tuple(PartitionSpec(*(a or None for a in own)) for own in layouts)
        # All devices return what they have, of which one counts where they have the same.
        stacked = jax.shard_map(
            lambda *here: [x[None] for x in on_device(*here)], mesh=mesh, in_specs=in_specs,
            out_specs=PartitionSpec(("a", "b")),
        )  # fmt: skip
        return [_joined(x, spec) for x, spec in zip(stacked(*xs), specs, strict=True)]

    return run


def _joined(x: Any, spec: PartitionSpec) -> Any:
    """Put the shards of all devices together; of those that are the same, take the mean, so that gradients add up."""
    x = x.reshape(2, 2, *x.shape[1:])
    used = {a for entry in spec for a in (entry or ())}
    for at, axis in ((1, "b"), (0, "a")):
        if axis not in used:
            x = (
                jnp.mean(x, at, keepdims=True)
                if jnp.issubdtype(x.dtype, jnp.inexact)
                else x[(slice(None),) * at + (slice(0, 1),)]
            )
    for i, entry in enumerate(spec):
        for name in reversed(entry or ()):
            at = "ab".index(name)
            x = jnp.concatenate(jnp.split(x, x.shape[at], at), i + 2)
    return x[0, 0]


def _weighted(found: Sequence[Any]) -> Any:
    return sum(
        jnp.sum(jnp.sin(x) * (1 + jnp.arange(x.size).reshape(x.shape) / x.size))
        for x in found
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ) + jnp.zeros(())


def _both(fn: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
    def run(*xs: Any) -> Any:
        found, transposed = jax.vjp(lambda *xs: (lambda ys: (_weighted(ys), ys))(fn(*xs)), *xs)
        total, values = found
        zeros = [
            np.zeros(x.shape, x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jax.dtypes.float0) for x in values
        ]
        return values, transposed((jnp.ones_like(total), zeros))

    return run


def _check(name: str, layouts: Sequence[tuple[tuple[str, ...], ...]], gathers: bool, sums: bool = False) -> None:
    case = CASES[name]
    rng = np.random.default_rng(0)
    xs = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in case.shapes]
    expected = _complete_result(name)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        try:
            found = jax.block_until_ready(jax.jit(_both(_on_shards(case, layouts, gathers, sums)))(*xs))
        except ValueError as error:
            if name == "its own derivative" or not gathers:
                raise
            raise AssertionError(f"{name} over {layouts}") from error
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5, err_msg=f"{name} over {layouts}")


@functools.cache
def _complete_result(name: str) -> Any:
    rng = np.random.default_rng(0)
    xs = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in CASES[name].shapes]
    return jax.jit(_both(lambda *xs: jax.tree.leaves(CASES[name].fn(*xs))))(*xs)


@pytest.mark.parametrize("name", CASES)
def test_shards_give_what_the_complete_program_gives(name: str) -> None:
    case, rng = CASES[name], random.Random(name)
    for layouts in case.kept:
        _check(name, _parsed(layouts), gathers=False, sums=bool(rng.getrandbits(1)))
    for _ in range(case.draws):
        layouts = _random_layouts(case, rng)
        _check(name, layouts, gathers=True, sums=bool(rng.getrandbits(1)))
    for layouts in case.refused:
        with pytest.raises(NeedsCompleteAxes, match=r"in test_on_shards.py:\d+ needs all of '(rows|cols|both)'"):
            _check(name, _parsed(layouts), gathers=False)
