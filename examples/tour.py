"""A short tour of Axonym: named axes, indexing, operations, JAX's transformations, and sharded arrays.

It runs on any machine and prints what it does: `python examples/tour.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np

import axonym as axn

# Eight simulated devices, so that the last part of the tour runs on any machine.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


def section(title: str) -> None:
    print(f"\n{title}\n{'-' * len(title)}")


def named_arrays() -> None:
    section("Arrays with named axes")
    Batch, Embed = axn.make_axes(batch=8, embed=16)
    x = axn.named(jnp.arange(128.0).reshape(8, 16), (Batch, Embed))
    print("axes:      ", x.shape)
    print("zeros:     ", axn.zeros((Batch, Embed)).shape)

    # Operands meet by name: their order does not matter, and an axis that one of them lacks is broadcast.
    bias = axn.arange(Embed)
    transposed = x.rearrange(("embed", "batch"))
    np.testing.assert_array_equal((x + bias + transposed).array, 2 * x.array + jnp.arange(16)[None, :])
    print("broadcast: ", (x + bias + transposed).shape)

    # Mistakes are found by name too.
    try:
        axn.sum(x, "embedd")
    except ValueError as error:
        print("an error:  ", error)


def indexing() -> None:
    section("Indexing by name")
    Batch, Embed = axn.make_axes(batch=8, embed=16)
    x = axn.named(jnp.arange(128.0).reshape(8, 16), (Batch, Embed))
    print("one row:   ", x["batch", 0].shape)
    print("two axes:  ", x["batch", 1:3, "embed", axn.ds(4, 4)].shape)

    # A named index array is a gather. Its axes take the place of the indexed one.
    tokens = axn.named(jnp.array([3, 1, 4]), axn.Axis("position", 3))
    print("a look-up: ", x["batch", tokens].shape)
    print("an update: ", float(axn.sum(x.at["batch", 0].set(0.0)["batch", 0]).array))


def operations() -> None:
    section("Operations")
    Batch, Embed, Mlp = axn.make_axes(batch=8, embed=16, mlp=32)
    x = axn.named(jnp.linspace(-1.0, 1.0, 128).reshape(8, 16), (Batch, Embed))
    w = axn.ones((Embed, Mlp))

    print("reduce:    ", x.mean("embed").shape, axn.max(x, ("batch", "embed")).shape)
    print("contract:  ", axn.dot(x, w, axis=Embed).shape)
    print("einsum:    ", axn.einsum("... embed, embed mlp -> ... mlp", x, w).shape)

    values, indices = axn.top_k(x, "embed", 2)
    print("top two:   ", values.shape, indices.array.dtype)

    # Reshapes name what they split and what they merge.
    heads = axn.rearrange(x, "b (heads size) -> b heads size", heads=4)
    print("split:     ", heads.shape)
    print("merge:     ", x.flatten_axes(("batch", "embed"), "all").shape)
    print("rename:    ", x.rename({"embed": "feature"}).shape)
    print("choose:    ", axn.where(x > 0, x, 0.0).shape)


def attention(query: axn.NamedArray, key: axn.NamedArray, value: axn.NamedArray) -> axn.NamedArray:
    """Attention over "key", for any other axes in any order: batch, heads, or none."""
    scores = axn.dot(query, key, axis="size") / query.resolve_axis("size").size ** 0.5
    weights = axn.exp(scores - axn.max(scores, "key"))
    return axn.dot(weights / axn.sum(weights, "key"), value, axis="key")


def transformations() -> None:
    section("JAX's transformations")
    Batch, Heads, Query, Size = axn.make_axes(batch=2, heads=4, query=6, size=8)
    Key = axn.Axis("key", 6)
    k1, k2, k3 = jax.random.split(jax.random.key(0), 3)
    q = axn.named(jax.random.normal(k1, (2, 4, 6, 8)), (Batch, Heads, Query, Size))
    k = axn.named(jax.random.normal(k2, (2, 4, 6, 8)), (Batch, Heads, Key, Size))
    v = axn.named(jax.random.normal(k3, (2, 4, 6, 8)), (Batch, Heads, Key, Size))

    # A named array is a pytree: jit, grad and the others take and return it as they do any other.
    y = jax.jit(attention)(q, k, v)
    print("attention: ", y.shape)
    gradient = jax.grad(lambda q: axn.sum(attention(q, k, v) ** 2).array)(q)
    print("gradient:  ", gradient.shape)

    # The function never mentioned batch or heads, so it works without them.
    print("one head:  ", attention(*(a["batch", 0, "heads", 0] for a in (q, k, v))).shape)


def layer(x: axn.NamedArray, w_in: axn.NamedArray, w_out: axn.NamedArray) -> tuple[axn.NamedArray, axn.NamedArray]:
    hidden = axn.tanh(axn.dot(x, w_in, axis="embed"))
    return x + axn.dot(hidden, w_out, axis="mlp"), hidden


def sharded() -> None:
    section(f"Sharded arrays, on {jax.device_count()} devices")
    Batch, Embed, Mlp = axn.make_axes(batch=8, embed=16, mlp=32)
    k1, k2, k3 = jax.random.split(jax.random.key(0), 3)
    x = axn.named(jax.random.normal(k1, (8, 16)), (Batch, Embed))
    w_in = axn.named(jax.random.normal(k2, (16, 32)), (Embed, Mlp))
    w_out = axn.named(jax.random.normal(k3, (32, 16)), (Mlp, Embed))
    expected, _ = layer(x, w_in, w_out)

    # A mapping says which axes are sharded over which mesh axes. The layer is the same under every mapping, on Auto and
    # Explicit mesh axes. What is printed is how its hidden array is sharded.
    for explicit in (False, True):
        mesh = axn.make_mesh({"data": 4, "model": 2}, explicit=explicit)
        for mapping in ({"batch": "data"}, {"batch": "data", "mlp": "model"}):
            with jax.set_mesh(mesh):
                y, hidden = jax.block_until_ready(axn.named_jit(layer, mapping)(x, w_in, w_out))
            np.testing.assert_allclose(y.array, expected.array, rtol=1e-4, atol=1e-4)
            print(f"{'Explicit' if explicit else 'Auto':<11}", mapping, hidden.array.sharding.spec)

    # FSDP: parameters are stored sharded, and all-gathered where they are used.
    step = axn.fsdp(layer, {"embed": "data"}, {"batch": "data"})
    with jax.set_mesh(axn.make_mesh({"data": 8})):
        y, hidden = jax.block_until_ready(step(x, w_in, w_out))
    np.testing.assert_allclose(y.array, expected.array, rtol=1e-4, atol=1e-4)
    print(f"{'fsdp:':<11}", hidden.array.sharding.spec)


if __name__ == "__main__":
    named_arrays()
    indexing()
    operations()
    transformations()
    sharded()
