"""Check programs where code runs on shards or beside other code: pipelines, `dispatch`, new names, padding, threads."""

from __future__ import annotations

import contextlib
import math
import random
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import axonym as axn
from axonym.schedules import GPipe, OneFOneB
from tests.fuzz.comparing import expect, tolerance
from tests.fuzz.operations import FRESH
from tests.fuzz.programs import SIZES, Program
from tests.fuzz.uneven import all_placements, check_uneven
from tests.helpers import compilations

Batch, Tokens, Layers, Experts = axn.make_axes(batch=8, tokens=2, layers=4, expert=2)
REFUSALS = (
    r"needs all of|no function of each row|uses the numbers of rows|cannot be sharded|is not stored in its shards"
)
"""What code on shards may be refused for, with the axis or the line that needs more."""
accepted = dict[str, int]()
"""How many programs ran, by the kind of check, in this process."""


def close(what: str, found: Any, expected: Any, rtol: float = 3e-3) -> None:
    """Compare trees of arrays, with a tolerance relative to the largest element of each."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.complex128), np.asarray(b, np.complex128)
        scale = float(np.max(np.abs(b), initial=1e-3))
        assert a.shape == b.shape, f"{what}: shape {a.shape} for {b.shape}"
        assert np.allclose(a, b, rtol=rtol, atol=rtol * scale), f"{what}: values {a.tolist()} for {b.tolist()}"


def finite(tree: Any) -> bool:
    return all(bool(np.all(np.isfinite(np.asarray(x)))) for x in jax.tree.leaves(tree))


@contextlib.contextmanager
def refusals_of(kind: str) -> Any:
    """Let refusals pass; count what is not refused."""
    try:
        yield
    except ValueError as refusal:
        if not re.search(REFUSALS, str(refusal)):
            raise
    else:
        accepted[kind] = accepted.get(kind, 0) + 1


# --- kept axes, and dispatch without sharded experts ---


class Layer(eqx.Module):
    """Adds what a program computes of each example, whose inputs stay exact, to a total."""

    shift: axn.NamedArray
    weight: axn.NamedArray
    matrices: axn.NamedArray
    of_example: Callable[..., axn.NamedArray] = eqx.field(static=True)
    dispatches: bool = eqx.field(static=True)
    along: str | None = eqx.field(static=True)
    """The axis along which matrices of the experts are applied, if they are."""

    def __call__(self, carry: Any, expert: axn.NamedArray, *rest: axn.NamedArray) -> Any:
        x, total = carry[0] + self.shift, carry[1]
        y = (self.dispatched if self.dispatches else self.selected)(x, expert, *rest)
        return x, total + self.weight * y

    def dispatched(self, x: axn.NamedArray, expert: axn.NamedArray, *rest: axn.NamedArray) -> axn.NamedArray:
        def of_rows(params: Any, rows: axn.NamedArray, sizes: Any) -> axn.NamedArray:
            matrices, rest = params
            y = axn.vmap(self.of_example, "rows")(rows, *rest)
            if self.along is None:
                return y
            size = y.axis_size(self.along)
            linear = axn.nn.MoELinear(matrices, None, Experts, axn.Axis(self.along, size), axn.Axis("out", size))
            return linear(y, sizes).rename({"out": self.along}).rearrange(y.names)

        return axn.nn.dispatch(of_rows, (self.matrices, rest), x, expert, Experts).rearrange(x.names)

    def selected(self, x: axn.NamedArray, expert: axn.NamedArray, *rest: axn.NamedArray) -> axn.NamedArray:
        y = axn.vmap(axn.vmap(self.of_example, "tokens"), "batch")(x, *rest)
        chosen = axn.nn.one_hot(expert, Experts)
        if self.along is None:
            return (y * axn.sum(chosen, "expert")).rearrange(x.names)
        each = axn.dot(y, self.matrices, axis=self.along).rename({"out": self.along})
        return axn.dot(each, chosen, axis="expert").rearrange(x.names)


def _of_example(program: Program, at: int) -> Callable[..., axn.NamedArray]:
    """Return a function of an input and the others whose result has the axes of the input, and is small."""
    function, names = program.function(), program.inputs[at].names
    eager = np.asarray(program.positional([v.array for v in program.inputs]))
    scale = 1 + float(np.max(np.abs(eager), initial=0.0))

    def of_example(x: axn.NamedArray, *rest: axn.NamedArray) -> axn.NamedArray:
        inputs = list(rest)
        inputs.insert(at, x)
        y = function(*inputs)
        y = (axn.real(y) if jnp.iscomplexobj(y.array) else y).astype("float32")
        gone = [n for n in y.names if n not in names or y.axis_size(n) != x.axis_size(n)]
        y = axn.tanh(axn.sum(y, gone) / scale) if gone else axn.tanh(y / scale)
        return (y + axn.zeros_like(x)).rearrange(names)

    return of_example


def check_code_on_shards(program: Program, seed: int) -> None:
    """Run a program as the layers of a pipeline and in `dispatch`, with kept axes; compare with one device.

    The first operations of it alone, if all are refused.
    """
    rng = random.Random(seed)
    kind = rng.choice(["kept", "kept", "dispatch in a pipeline", "dispatch", "dispatch"])
    steps = len(program.steps)
    for last in sorted({steps - 1, steps // 2, rng.randrange(steps), min(1, steps - 1), 0})[::-1]:
        shorter, before = program.up_to(last), accepted.get(kind, 0)
        _check_on_shards(shorter, random.Random(seed), kind)
        if accepted.get(kind, 0) > before:
            return


def _check_on_shards(program: Program, rng: random.Random, kind: str) -> None:
    fitting = [
        i
        for i, v in enumerate(program.inputs)
        if v.array.dtype == np.float32 and not v.array.weak_type and v.array.size
    ]
    if not fitting:
        return
    at = rng.choice(fitting)
    numbers = np.random.default_rng(rng.getrandbits(32))
    x, names = program.inputs[at].array, program.inputs[at].names
    sizes = dict(zip(names, x.shape, strict=True))
    draws = numbers.integers(-8, 9, (8, 2, *x.shape)) / 4
    given = axn.named(jnp.asarray(draws, jnp.float32), (Batch, Tokens, *names))
    rest = [v for i, v in enumerate(program.named_inputs()) if i != at]
    expert = axn.named(jnp.asarray(numbers.integers(0, 3, (8, 2)), jnp.int32), (Batch, Tokens))
    coefficients = axn.named(jnp.asarray(numbers.normal(size=(2, *x.shape)), jnp.float32), (Tokens, *names))
    dispatches, along = kind != "kept", rng.choice([None, names[0]]) if len(names) == 1 else None

    def layer_of(rng: np.random.Generator, layers: Sequence[axn.Axis]) -> Any:
        shape = [a.size for a in layers]
        n = 1 if along is None else sizes[along]
        matrix = Experts, axn.Axis(along or "in", n), axn.Axis("out", n)
        return Layer(
            axn.named(jnp.asarray(rng.integers(-1, 2, shape), jnp.float32), tuple(layers)),
            axn.named(jnp.asarray(rng.normal(size=(*shape, *x.shape)), jnp.float32), (*layers, *names)),
            axn.named(jnp.asarray(rng.normal(size=(*shape, 2, n, n)), jnp.float32), (*layers, *matrix)),
            _of_example(program, at),
            dispatches,
            along,
        )

    def on_one_device(layer: Layer) -> Layer:
        return Layer(layer.shift, layer.weight, layer.matrices, layer.of_example, False, along)

    def loss_of(out: Any, coefficients: axn.NamedArray) -> Any:
        return axn.sum(out[1] * coefficients).scalar()

    kept = rng.choice([n for n, size in {**sizes, "tokens": 2}.items() if size % 2 == 0])
    other = [n for n in (*names, "tokens") if n != kept and {**sizes, "tokens": 2}[n] % 2 == 0]
    explicit = rng.choice([True, False])
    if kind == "dispatch":
        layer = layer_of(numbers, ())
        mapping: dict[str, Any] = rng.choice(
            [{"batch": "data", kept: "model"}, {"batch": ("data", "model")}, {"tokens": "model", "batch": "data"}]
        )
        mesh = axn.make_mesh({"data": 2, "model": 2}, explicit=explicit, devices=jax.devices()[:4])

        def loss_of_layer(layer: Layer, x: axn.NamedArray, coefficients: axn.NamedArray) -> Any:
            return loss_of(layer((x, axn.zeros_like(x)), expert, *rest), coefficients)

        def reference_of_layer(layer: Layer, *args: Any) -> Any:
            return loss_of_layer(on_one_device(layer), *args)

        loss, reference = loss_of_layer, reference_of_layer
    else:
        layer = axn.nn.Stacked(layer_of(numbers, (Layers,)), Layers)
        mapping = {"layers": "stage", "batch": "data", kept: "model"}
        keep = [kept]
        if other and rng.random() < 0.3:  # two kept axes
            keep.append(rng.choice(other))
            mapping = {"layers": "stage", kept: "data", keep[1]: "model"}
        mesh = axn.make_mesh({"stage": 2, "data": 2, "model": 2}, explicit=explicit)
        make = rng.choice([GPipe, OneFOneB])
        schedule = make(rng.choice([2, 4]), keep_sharded=keep)

        def loss_of_layers(
            layers: Any, x: axn.NamedArray, coefficients: axn.NamedArray, schedule: Any = schedule
        ) -> Any:
            return layers.fold(
                (x, axn.zeros_like(x)), expert, *rest, schedule=schedule, then=loss_of, then_args=(coefficients,)
            )

        def reference_of_layers(layers: Any, *args: Any) -> Any:
            return loss_of_layers(axn.nn.Stacked(on_one_device(layers.stacked), Layers), *args, schedule=None)

        loss, reference = loss_of_layers, reference_of_layers

    args = layer, given, coefficients
    expected = jax.jit(jax.value_and_grad(reference, (0, 1, 2)))(*args)
    if not finite(expected):
        return
    with refusals_of(kind), jax.set_mesh(mesh), axn.axis_mapping(mapping):
        found = jax.block_until_ready(jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*axn.shard(args)))
        close(f"{kind}, {mapping}, explicit={explicit}, along={along}", found, expected)


# --- padding: results beside gradients, names that the mapping lacks, rematerialisation, meshes of two axes ---


def check_padded(program: Program, seed: int) -> None:
    """Compare results, and the gradients beside them, of arguments that are stored padded, with one device."""
    rng = random.Random(seed)
    if np.dtype(program.coarsest()) != np.float32:
        return
    inputs = program.named_inputs()
    names = sorted({n for x in inputs for n in x.names if SIZES[n] > 1})
    if not names:
        return
    own = rng.sample(names, min(len(names), rng.choice([1, 2])))
    over = rng.choice([["x", "y"], ["y", "x"]]) if len(own) > 1 else [rng.choice(["x", ("x", "y")])]
    stored = {n: n if rng.random() < 0.5 else f"stored {n}" for n in own}
    floats = [i for i, x in enumerate(inputs) if x.dtype == np.float32]
    function = program.function()

    def renamed(x: axn.NamedArray, to: Mapping[str, str]) -> axn.NamedArray:
        return x.rename({n: s for n, s in to.items() if n in x.names and n != s})

    back = {s: n for n, s in stored.items()}

    def step(*arrays: axn.NamedArray) -> Any:
        def loss(*chosen: axn.NamedArray) -> Any:
            given = dict(zip(floats, chosen, strict=True))
            y = function(*(renamed(given.get(i, x), back) for i, x in enumerate(arrays)))
            weights = np.cos(np.arange(y.size, dtype=np.float32)).reshape(y.array.shape)
            z = axn.real(y) if jnp.iscomplexobj(y.array) else y
            return axn.sum(z.astype("float32") * axn.named(weights, y.names)).scalar(), y

        loss = jax.checkpoint(loss) if rematerialises else loss
        chosen = [arrays[i] for i in floats]
        return jax.grad(loss, tuple(range(len(floats))), has_aux=True)(*chosen) if floats else loss()[1]

    rematerialises = rng.random() < 0.5
    expected = jax.jit(step)(*inputs)
    if not finite(expected):
        return
    mapping = {stored[n]: axes for n, axes in zip(own, over, strict=True)}
    mesh_sizes = rng.choice([{"x": 3, "y": 2}, {"x": 4, "y": 2}, {"x": 2, "y": 3}])
    mesh = axn.make_mesh(mesh_sizes, devices=jax.devices()[: math.prod(mesh_sizes.values())])

    def on_stored(*arrays: axn.NamedArray) -> Any:
        return jax.tree.map(lambda x: renamed(x, stored), step(*arrays), is_leaf=axn.is_named_array)

    what = f"padded on {mesh_sizes}, {mapping}, remat={rematerialises}"
    with refusals_of("padded"), jax.set_mesh(mesh), axn.axis_mapping(mapping, uneven="pad"):
        found = axn.named_jit(on_stored)(*axn.shard([renamed(x, stored) for x in inputs]))
        close(what, axn.unshard(jax.block_until_ready(found)), expected)


def check_uneven_operations(program: Program, seed: int) -> None:
    """Run one operation of the table on uneven shards."""
    of = random.Random(seed).choice(all_placements())
    found = check_uneven(of)
    assert found is None or "[hlo verifier]" in found, f"{of}: {found}"  # slices beside slices: docs/compiler_bugs.md


# --- names that the mapping lacks, and threads ---


TRANSFORMS = {"vmap", "associative_scan", "scan", "fold", "cond"}


def check_new_names(drawn: Program, seed: int) -> None:
    """Check that new axis names, which the mapping lacks, compile nothing, and give the same values.

    Functions of users, in transforms, see the names. They are left out.
    """
    rng, shorter = random.Random(seed), (drawn.up_to(i) for i in reversed(range(len(drawn.steps))))
    program = next((p for p in shorter if not {step.kind for step in p.steps} & TRANSFORMS), None)
    if program is None:
        return

    def results(suffix: str) -> axn.NamedArray:
        scope: dict[str, Any] = {"axn": axn, "jax": jax}
        named = "|".join([*SIZES, *FRESH])
        exec(re.sub(f"'({named})'", rf"'\1{suffix}'", program.body()), scope)
        return scope["program"](*(axn.named(x.array, [n + suffix for n in x.names]) for x in program.named_inputs()))

    mesh = axn.make_mesh({"data": 4, "model": 2}, explicit=rng.choice([True, False]))
    with jax.set_mesh(mesh), axn.axis_mapping({"elsewhere": "data"}):
        first = results("")
        with compilations() as again:
            results("")
        with compilations() as renamed:
            other = results(" of late")
    assert other.names == tuple(f"{n} of late" for n in first.names)
    counts = [sum("backend_compile" in event for event in events) for events in (renamed, again)]
    assert counts[0] <= counts[1], f"new names compile {counts[0]} programs, where the same ones compile {counts[1]}"
    same = np.array_equal(np.asarray(other.array), np.asarray(first.array), equal_nan=other.dtype.kind in "fc")
    assert same, "new names give other values"


def check_threads(program: Program, seed: int) -> None:
    """Run the program in two threads at once, each with devices and a mapping of its own, and then one by one."""
    function, inputs, rng = program.function(), program.named_inputs(), random.Random(seed)
    expected, both, explicit = function(*inputs), threading.Barrier(2), rng.choice([True, False])
    mappings = rng.choice([({"a": "data"}, {"b": "data"}), ({"a": "data", "b": "model"}, {"b": "data", "a": "model"})])

    def run(i: int, waits: bool = True) -> Any:
        mesh = axn.make_mesh({"data": 2, "model": 2}, explicit=explicit, devices=jax.devices()[4 * i : 4 * i + 4])
        found = list[Any]()
        with jax.set_mesh(mesh), axn.axis_mapping(mappings[i]):
            for way in (lambda: function, lambda: jax.jit(function), lambda: axn.named_jit(function)):
                if waits:
                    both.wait(60)
                try:
                    found.append(jax.block_until_ready(way()(*axn.shard(inputs))))
                except ValueError as refusal:
                    if not re.search("mesh ax|cannot be sharded", str(refusal)):
                        raise
                    found.append(None)
                assert axn.current_mapping() == mappings[i], f"in a thread, {axn.current_mapping()} for {mappings[i]}"
        return found

    with ThreadPoolExecutor(2) as pool:
        threads = [*pool.map(run, range(2))]
    for i, results in enumerate(threads):
        for x, alone in zip(results, run(i, waits=False), strict=True):
            assert (x is None) == (alone is None), f"in a thread, {x} for {alone}"
            if x is not None:
                expect("in a thread", x.array, expected.array, rtol=tolerance(program.coarsest()))
                here, there = x.array.sharding, alone.array.sharding
                assert here.is_equivalent_to(there, x.array.ndim), f"in a thread, {here} for {there} alone"
