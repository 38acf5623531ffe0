"""Arguments of all kinds, the names of values in bodies, and what is printed."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import axonym as axn
from axonym.names._walk import steps_of
from tests.names.models import abstract, tokens

X, W = abstract(3, 4), abstract(4, 5)

pytestmark = pytest.mark.usefixtures("promotes_ranks")


def test_arguments_of_all_kinds() -> None:
    def f(params: dict[str, Any], power: int, *, x: jax.Array, name: str = "out") -> dict[str, jax.Array]:
        return {name: x**power @ params["w"]}

    program = axn.names.infer(f, {"w": W}, 2, x=X, names={"params": {"w": "embed mlp"}, "x": "batch _"})
    assert program.results == {"out": ("batch", "mlp")}
    assert program.arguments == (({"w": ("embed", "mlp")}, 2), {"x": ("batch", "embed")})
    assert not program.unknown


def test_named_arrays_among_raw_ones() -> None:
    x = axn.ones({"batch": 3, "embed": 4})
    program = axn.names.infer(lambda x, w: (x * 2, jnp.tanh(x.array @ w)), x, W)
    assert program.results == (("batch", "embed"), ("batch", None))
    assert program.arguments[0] == (("batch", "embed"), ("embed", None))


def test_an_nnx_module() -> None:
    model = nnx.Linear(4, 5, rngs=nnx.Rngs(0))
    program = axn.names.infer(lambda m, x: m(x), model, X, names=({"kernel": "embed mlp"}, "batch _"))
    assert program.results == ("batch", "mlp")


def test_values_in_bodies_have_names() -> None:
    def f(x: jax.Array, ws: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda x, w: (jax.jit(jnp.tanh)(x @ w), x.sum()))
        x, sums = jax.lax.scan(layer, x, ws)
        return jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, x) + sums.sum()

    program = axn.names.infer(f, X, abstract(2, 4, 4), names=("batch embed", "layers _ _"))
    assert program.results == ("batch", "embed")
    assert program.arguments[0][1] == ("layers", "embed", "embed'")
    steps = list(steps_of(program.body))
    names = {step.name: program.names_of(step.results[0]) for step in steps if step.results}
    assert names["dot_general"] == names["tanh"] == names["div"] == ("batch", "embed")
    (scan,) = [step for step in steps if step.name == "scan"]
    assert program.names_of(scan.results[1]) == ("layers",)
    assert scan.bodies[0].jaxpr is scan.params["jaxpr"].jaxpr


def test_functions_on_each_device() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        local = lambda x, w: jax.lax.psum(x @ w, "data")
        return jax.shard_map(local, mesh=mesh, in_specs=(P(None, "data"), P("data")), out_specs=P())(x, w)

    program = axn.names.infer(f, abstract(3, 8), abstract(8, 5), names=("batch embed", "_ mlp"))
    assert program.results == ("batch", "mlp")
    assert not program.mix_ups


def test_slices_and_their_gradients() -> None:
    def f(x: jax.Array) -> jax.Array:
        return ((x[:, 1:] - x[:, :-1]) ** 2).sum() + jnp.sin(jnp.concatenate([x[:, :3], x[:, 3:]], 1)).sum()

    program = axn.names.infer(jax.grad(f), abstract(3, 5), names=("batch pos",))
    assert program.results == ("batch", "pos")
    assert program.known_share == 1


def test_factors() -> None:
    def f(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        y = x.reshape(3, 2, 4)
        return y, y.swapaxes(0, 1), jnp.repeat(y, 2, 1).reshape(3, 16), y.reshape(6, 4), w.reshape(2, 4, 5)

    program = axn.names.infer(f, abstract(3, 8), abstract(8, 5), names=("batch heads*head_dim", "embed mlp"))
    assert program.results == (
        ("batch", "heads", "head_dim"),
        ("heads", "batch", "head_dim"),
        ("batch", None),
        ("batch*heads", "head_dim"),
        ("embed.0", "embed.1", "mlp"),
    )


def test_factors_of_factors() -> None:
    program = axn.names.infer(lambda x: x.reshape(2, 12).reshape(2, 3, 4), abstract(24), names=("a*b*c",))
    assert program.results[0] == "a"


def test_paths_are_what_names_takes() -> None:
    """Keyword arguments are flattened in another order than they are given or declared in."""

    def f(x: jax.Array, *, scale: jax.Array, out: jax.Array, **more: jax.Array) -> jax.Array:
        return x @ out * scale + more["bias"]

    given: dict[str, Any] = {"scale": abstract(), "bias": abstract(5), "out": W}
    program = axn.names.infer(f, X, **given, names={"x": "batch embed"})
    (unnamed,) = program.unknown
    assert unnamed.places == ("axis 0 of bias", "axis 1 of out")
    key, _, entry = unnamed.example.partition(": ")
    names = {"x": "batch embed", key.strip('"'): entry.strip('"').replace("?", "mlp")}
    assert axn.names.infer(f, X, **given, names=names).results == ("batch", "mlp")


def test_a_primitive_without_a_rule_is_counted() -> None:
    program = axn.names.infer(jnp.linalg.eigvals, abstract(3, 4, 4), names=("batch row row",))
    assert program.results in (("batch", None), (None, None))
    program = axn.names.infer(lambda x: jax.lax.linalg.hessenberg(x)[0], abstract(3, 4, 4), names=("batch row row",))
    assert program.results == (None, None, None)
    assert "hessenberg has no rule (1 time)" in str(program)


def test_what_is_printed() -> None:
    def f(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ params["up"]) @ params["down"]

    program = axn.names.infer(f, {"up": W, "down": abstract(5, 4)}, X, names=(None, "batch embed"))
    text = str(program)
    assert "d:f32[batch=3, 5] = dot_general c b  # test_infer.py:" in text
    assert "2 classes of 3 argument axes have no name; name one axis of each:" in text
    assert '"params/down": "? _"' in text
    found = program.unknown[0]
    assert (found.size, found.places) == (5, ("axis 0 of params/down", "axis 1 of params/up"))
    assert repr(program) == "NamedProgram(3 operations, 0 mix-ups)"
    named = axn.names.infer(f, {"up": W, "down": abstract(5, 4)}, X, names=({"down": "mlp out"}, "batch embed"))
    assert str(named).endswith("all axes of the arguments have names")


def test_a_reduction_by_a_function() -> None:
    f = lambda x: jax.lax.reduce(x, 0.0, lambda a, b: a + b * 2, (1,))
    assert axn.names.infer(f, X, names=("batch embed",)).results == ("batch",)


def test_names_of_constants_come_from_their_use() -> None:
    def f(x: jax.Array) -> jax.Array:
        mask = jnp.arange(4) < 2
        return jnp.where(mask, x, 0) + jnp.ones(3)[:, None]

    program = axn.names.infer(f, X, names=("batch embed",))
    assert program.known_share == 1


def test_tokens_index_what_they_look_up() -> None:
    def f(ids: jax.Array, table: jax.Array) -> Any:
        hot = jax.nn.one_hot(ids, 7)
        return table[ids], hot, table.at[ids].add(1.0)

    program = axn.names.infer(f, tokens(3), abstract(7, 4), names=("batch", "vocab embed"))
    assert program.results == (("batch", "embed"), ("batch", "vocab"), ("vocab", "embed"))


def test_weights_in_a_closure_are_said() -> None:
    """A table that NumPy makes is a constant; a JAX array may be a parameter."""
    w, table = jnp.ones((4, 5)), np.ones((3, 4), np.float32)
    program = axn.names.infer(lambda x: jax.jit(lambda x: (x + table) @ w)(x), X, names=("batch embed",))
    assert program.closed_over == ("f32[4, 5]",)
    said = r"1 array (f32[4, 5]) is closed over, and so has no names: pass it as an argument"
    assert str(program).endswith(said)
    with axn.set_mesh(axn.make_mesh({"data": 2})), pytest.warns(UserWarning, match=re.escape(said)):
        axn.names.distribute(lambda x: x @ w, {"batch": "data"}, names="batch embed")(jnp.ones((2, 4)))


def test_parameters_with_the_names_of_arguments_of_infer() -> None:
    def f(x: jax.Array, names: jax.Array, *, allow: jax.Array) -> jax.Array:
        return x @ names * allow

    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'allow'"):
        axn.names.infer(f, X, W, names=("batch embed", "embed mlp"))
    program = axn.names.infer(functools.partial(f, allow=jnp.float32(1)), X, W, names=("batch embed", "embed mlp"))
    assert program.results == ("batch", "mlp")
    step: Any = axn.names.distribute(f, {"batch": "data"}, names={"x": "batch embed", "names": "embed mlp"})
    with axn.set_mesh(axn.make_mesh({"data": 3})):
        assert step(jnp.ones((3, 4)), names=jnp.ones((4, 5)), allow=jnp.float32(1)).sharding.spec == P("data")


def test_a_jitted_function_has_no_line_of_jax() -> None:
    text = str(axn.names.infer(jax.jit(jnp.tanh), X, names=("batch embed",)))
    assert "source_info" not in text


def test_kernels_of_gradients() -> None:
    def loss(kernels: Any, x: jax.Array) -> jax.Array:
        for stride, kernel in enumerate(kernels, 1):
            numbers = ("NHWC", "HWIO", "NHWC")
            x = jnp.tanh(jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=numbers))
        return x.sum()

    kernels = abstract(3, 3, 2, 8), abstract(3, 3, 8, 8)
    names = (("ky kx rgb channels", "down_ky down_kx _ wide"), "batch height width _")
    program = axn.names.infer(jax.grad(loss), kernels, abstract(4, 16, 12, 2), names=names)
    assert program.results == (("ky", "kx", "rgb", "channels"), ("down_ky", "down_kx", "channels", "wide"))
