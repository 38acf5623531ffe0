"""Functions of named arrays that `jax.export` serializes, and another process loads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax import export

import axonym as axn
from axonym import nn
from tests.helpers import assert_named

Batch, Pos, Embed, Mlp = axn.make_axes(batch=3, pos=5, embed=4, mlp=6)


def drawn(seed: int, *axes: axn.Axis) -> axn.NamedArray:
    rng = np.random.default_rng(seed)
    return axn.named(rng.normal(size=[a.size for a in axes]).astype(np.float32), axes)


def layer(x: axn.NamedArray, w: axn.NamedArray) -> dict[str, Any]:
    hidden = axn.tanh(axn.dot(x, w, axis="embed"))
    return {"hidden": hidden, "means": (hidden.mean("batch"), hidden.shape)}


def exported(fn: Callable[..., Any], *args: Any) -> Any:
    """Serialize a function, and return the loaded one."""
    fn = fn if isinstance(fn, jax.stages.Wrapped) else jax.jit(fn)
    return export.deserialize(export.export(fn)(*args).serialize())


def loaded_elsewhere(code: str, blob: Any, folder: Path, devices: int = 1) -> str:
    """Return the output of a separate process, in which `fn` is the serialized function."""
    path = folder / "function.bin"
    path.write_bytes(blob)
    start = f"""
import jax
jax.config.update("jax_num_cpu_devices", {devices})
import axonym as axn, numpy as np
fn = jax.export.deserialize(bytearray(open({str(path)!r}, "rb").read()))
"""
    command = [sys.executable, "-W", "error", "-c", start + code]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_another_process_loads_it(tmp_path: Path) -> None:
    blob = export.export(jax.jit(layer))(drawn(0, Batch, Embed), drawn(1, Embed, Mlp)).serialize()
    found = loaded_elsewhere(
        """
out = fn.call(axn.ones({"batch": 3, "embed": 4}), axn.ones({"embed": 4, "mlp": 6}))
mean, shape = out["means"]
print(out["hidden"].axes == axn.make_axes(batch=3, mlp=6), mean.names, end=" ")
print(type(shape).__name__, [int(n) for n in shape.values()])
print(out["hidden"].names[0] is axn.zeros({"batch": 1}).names[0], np.ptp(mean.array) == 0)
""",
        blob,
        tmp_path,
    )
    assert found == "True ('mlp',) dict [3, 6]\nTrue True"


def test_values_and_gradients_are_the_same() -> None:
    x, w = drawn(0, Batch, Embed), drawn(1, Embed, Mlp)
    loaded = exported(layer, x, w)
    assert_named(loaded.call(x, w)["hidden"], layer(x, w)["hidden"], rtol=1e-6)

    def loss(x: axn.NamedArray) -> jax.Array:
        return axn.sum(axn.tanh(x)).scalar()

    blob = export.export(jax.jit(loss))(x).serialize(vjp_order=1)
    assert_named(jax.grad(export.deserialize(blob).call)(x), jax.grad(loss)(x), rtol=1e-6)


def test_names_are_part_of_how_it_is_called() -> None:
    loaded = exported(layer, drawn(0, Batch, Embed), drawn(1, Embed, Mlp))
    with pytest.raises(
        ValueError, match=r"\('rows', 'embed'\).*in the invocation.*\('batch', 'embed'\).*when exported"
    ):
        loaded.call(drawn(0, Batch.alias("rows"), Embed), drawn(1, Embed, Mlp))


# --- sizes left open ---


def open_sizes() -> axn.NamedArray:
    sizes = cast(Any, export.symbolic_shape("b, p", constraints=["p >= 2"]))
    return axn.NamedArray(jax.ShapeDtypeStruct((*sizes, 4), np.float32), ("batch", "pos", "embed"))


def attention(x: axn.NamedArray) -> axn.NamedArray:
    keys = x.rename({"pos": "key_pos"})
    return nn.attention.dot_product_attention(x, keys, keys, "key_pos", "embed", mask=nn.attention.Causal("pos"))


OPERATIONS: dict[str, Callable[[axn.NamedArray], Any]] = {
    "dot": lambda x: axn.dot(x, drawn(1, Embed, Mlp), axis="embed"),
    "reduction": lambda x: x.mean(("batch", "pos")),
    "softmax": lambda x: nn.softmax(x, "pos"),
    "shorter": lambda x: x["pos", 1:] * x["pos", :-1],
    "without the first": lambda x: x["batch", 1:],
    "cumsum": lambda x: axn.cumsum(x, "pos"),
    "sort": lambda x: axn.sort(x, "pos"),
    "merge": lambda x: x.flatten_axes(("batch", "pos"), "row"),
    "split": lambda x: axn.rearrange(x, "batch pos (a c) -> pos (r: c batch) a", a=2),
    "last": lambda x: x["pos", -1],
    "slice": lambda x: (x["pos", 1:], x["pos", :-1], x["pos", :2], x["pos", :]),
    "roll": lambda x: axn.roll(x, 1, "pos"),
    "arange": lambda x: x * axn.arange(x.resolve_axis("pos")),
    "update": lambda x: x.at["pos", 0].set(1.0),
    "sizes": lambda x: (x.axis_size("pos") * 1.0, x.size * 1.0),
    "vmap": lambda x: axn.vmap(lambda row: row.max(), "batch")(x),
    "scan": lambda x: axn.scan(lambda c, row: (c + row, c * row), "pos")(axn.zeros_like(x["pos", 0]), x),
    "fold": lambda x: axn.fold(lambda c, row: c + row, "pos")(axn.zeros_like(x["pos", 0]), x),
    "attention": attention,
    "gradient": lambda x: axn.grad(lambda x: (x * x).mean())(x),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_sizes_can_be_left_open(name: str) -> None:
    x, fn = drawn(0, Batch, Pos, Embed), OPERATIONS[name]
    found, expected = exported(fn, open_sizes()).call(x), fn(x)
    for f, e in zip(axn.tree.leaves(found), axn.tree.leaves(expected), strict=True):
        if isinstance(e, axn.NamedArray):
            assert_named(f, e, rtol=1e-5, atol=1e-6)
        else:
            assert f == e


def test_what_an_open_size_does_not_allow() -> None:
    with pytest.raises(ValueError, match=r"axis 'pos' has the symbolic size p, so a slice of it has no stride"):
        export.export(jax.jit(lambda x: x["pos", ::2]))(open_sizes())


# --- on several devices ---


def test_a_sharded_function(mesh: jax.sharding.Mesh, tmp_path: Path) -> None:
    mapping = {"batch": "data", "mlp": "model"}

    def product(x: axn.NamedArray, w: axn.NamedArray) -> axn.NamedArray:
        return axn.dot(x, w, axis="embed")

    with jax.set_mesh(mesh):
        x, w = axn.shard((drawn(0, Batch.resize(8), Embed), drawn(1, Embed, Mlp)), mapping)
        compiled = export.export(axn.named_jit(product, mapping))(x, w)
        found: Any = export.deserialize(compiled.serialize()).call(x, w)
    assert compiled.nr_devices == 8
    assert_named(found, product(x, w), rtol=1e-6)
    assert found.array.sharding.spec == jax.P("data", "model")

    # The process that loads it brings a mesh of its own.
    explicit = mesh.axis_types[0] == jax.sharding.AxisType.Explicit
    code = f"""
jax.set_mesh(axn.make_mesh({dict(mesh.shape)!r}, explicit={explicit}))
x, w = axn.shard((axn.ones({{"batch": 8, "embed": 4}}), axn.ones({{"embed": 4, "mlp": 6}})), {mapping!r})
y = fn.call(x, w)
print(y.names, y.array.sharding.spec, float(y.min().scalar()), float(y.max().scalar()))
"""
    printed = loaded_elsewhere(code, compiled.serialize(), tmp_path, devices=8)
    assert printed == "('batch', 'mlp') P('data', 'model') 4.0 4.0"


def test_a_model_by_its_arrays() -> None:
    """The classes of a model are no part of a file, its named arrays are."""
    model = nn.Linear.init(Embed, Mlp, key=jax.random.key(0))
    arrays, structure = jax.tree.flatten(model, is_leaf=axn.is_named_array)

    def call(arrays: list[axn.NamedArray], x: axn.NamedArray) -> axn.NamedArray:
        return jax.tree.unflatten(structure, arrays)(x)

    x = drawn(0, Batch, Embed)
    assert_named(exported(call, arrays, x).call(arrays, x), model(x), rtol=1e-6)
