# %% [markdown]
# # A tour of named arrays
#
# This is a notebook in the form of a program. Run it, `python examples/named_arrays_tour.py`, or open it cell by cell:
# VS Code shows a button above each `# %%`, and Jupytext opens it in Jupyter.
#
# It starts by naming axes and ends by sharding arrays over eight devices. `tour.py` is the short form.

# %%
import jax
import jax.numpy as jnp
import numpy as np

import axonym as axn

# Without an accelerator there are eight simulated devices; where there is one, this changes nothing.
jax.config.update("jax_num_cpu_devices", 8)

# %% [markdown]
# ## Making arrays
#
# An axis is a name and a size. A named array is a JAX array and the names of its axes. `print` shows what it is, and
# `.array` has the numbers.

# %%
Batch, Pos, Embed = axn.make_axes(batch=2, pos=3, embed=4)
x = axn.arange((Batch, Pos, Embed))
print(x)
print(x.array)

# %% [markdown]
# Arrays are made from axes, or from what there is already by naming it. Sizes are checked.

# %%
print(axn.zeros(Embed), axn.full((Batch, Embed), 0.5), axn.random.normal(jax.random.key(0), (Batch, Embed)))
print(axn.named(np.eye(4, dtype=np.float32), ("embed", "out")))

# %% [markdown]
# ## Reading
#
# Names, sizes and positions are asked for by name. A named array without axes is a scalar.

# %%
print(x.shape, x.ndim, x.dtype)
print(x.axis_size("pos"), x.resolve_axis("pos"), x.has_axis("heads"))
print(x.max().item(), x.mean("pos").shape)

# %% [markdown]
# ## Broadcasting
#
# Operands meet by name. An axis that one of them lacks is filled in, and order does not matter. In plain JAX the second
# line would need `scale[None, None, :]` and `offset[:, None, None]`.

# %%
scale, offset = axn.arange(Embed), axn.arange(Batch)
print(x * scale + offset)
transposed = x.rearrange(("embed", "pos", "batch"))
print(axn.array_equal(x, transposed), (x - transposed).max().item())

# %% [markdown]
# An outer product has to be meant: one operand has to have all the axes, unless you say otherwise.

# %%
query, key = axn.arange(Pos), axn.arange(Pos.alias("key_pos"))
causal = query.broadcast_axis(key.axes) >= key
print(causal.rearrange(("pos", "key_pos")).array.astype(int))

# %% [markdown]
# ## Contractions
#
# `dot` is told what to sum over. Everything else is matched by name and kept, so there are no transposes and no batch
# dimensions to keep track of. `einsum` says what stays.

# %%
x = axn.random.normal(jax.random.key(1), (Batch, Pos, Embed))
w = axn.random.normal(jax.random.key(2), (Embed, axn.Axis("mlp", 8)))
h = axn.dot(x, w, axis="embed")
print(h, axn.dot(h, w, axis="mlp"))
print(axn.dot(x, x.rename({"pos": "key_pos"}), axis="embed"))
print(axn.einsum("{embed mlp} -> ... mlp", x, w), axn.einsum("-> batch mlp", x, w))

# %% [markdown]
# ## Indexing
#
# Axes and indices in turn. An integer takes its axis away, a slice keeps it, and a named array of integers puts its own
# axes in the place of the one it indexes: that is all that a look-up is.

# %%
print(x["batch", 0], x["pos", 1:, "embed", ::2])
table = axn.arange((axn.Axis("vocab", 10), Embed))
tokens = axn.named([[1, 2, 3], [4, 5, 6]], (Batch, Pos))
print(table["vocab", tokens])

# %% [markdown]
# An axis that the index shares with the array is matched: here each row of the batch has a position of its own. Updates
# make a new array.

# %%
last = axn.named([2, 0], Batch)
print(x["pos", last])
print(axn.zeros(Pos).at["pos", 1].set(5.0).array)

# %% [markdown]
# ## Rearranging
#
# One expression puts axes in another order, splits and merges them. In braces, axes are found by name.

# %%
print(x.rearrange(("embed", ...)))
print(axn.rearrange(x, "batch pos (heads size) -> batch heads pos size", heads=2))
print(axn.rearrange(x, "{batch pos} -> (tokens: batch pos) ..."))
first, second = axn.split(x, "pos", (Pos.resize(2), Pos.resize(1)))
print(first, second, axn.concatenate([second, first], "pos"))

# %% [markdown]
# ## Functions of named arrays
#
# A function works on the axes that it names, and leaves others alone. This one is an attention for one head, or for
# many, with or without a batch.


# %%
def attention(query: axn.NamedArray, key: axn.NamedArray, value: axn.NamedArray) -> axn.NamedArray:
    """For each query, the mean of the values, weighted by how well their keys fit."""
    scores = axn.dot(query, key, axis="size") / query.axis_size("size") ** 0.5
    return axn.dot(axn.nn.softmax(scores, "key_pos"), value, axis="key_pos")


heads = axn.rearrange(x, "batch pos (heads size) -> batch heads pos size", heads=2)
keys = heads.rename({"pos": "key_pos"})
print(attention(heads, keys, keys))
print(attention(heads["batch", 0, "heads", 0], keys["batch", 0, "heads", 0], keys["batch", 0, "heads", 0]))

# %% [markdown]
# JAX's transformations take named arrays as they are. `scalar()` hands `jax.grad` the raw number that it wants.

# %%
gradient = jax.jit(jax.grad(lambda q: axn.sum(attention(q, keys, keys) ** 2).scalar()))(heads)
print(gradient)

# %% [markdown]
# `axn.vmap` and `axn.scan` go along an axis by name. They are for what names alone do not do: to make many layers at
# once, and to go through them one after the other.


# %%
def make_layer(key: jax.Array) -> dict[str, axn.NamedArray]:
    """The weights of one layer."""
    return {"w": axn.random.normal(key, (Embed, Embed.alias("out"))) / Embed.size, "b": axn.zeros(Embed.alias("out"))}


def apply_layer(x: axn.NamedArray, layer: dict[str, axn.NamedArray]) -> axn.NamedArray:
    """What one layer makes of its input."""
    return axn.tanh(axn.dot(x, layer["w"], axis="embed") + layer["b"]).rename({"out": "embed"})


Layers = axn.Axis("layers", 3)
layers = axn.vmap(make_layer, Layers)(jax.random.split(jax.random.key(3), Layers.size))
print(layers["w"], axn.fold(apply_layer, Layers)(x, layers))
running, totals = axn.scan(lambda total, step: (total + step, total + step), "pos")(axn.zeros((Batch, Embed)), x)
print(running, totals)

# %% [markdown]
# ## Errors
#
# A mistake is found when the line is reached, or when the function is traced. The error says what there is and what to
# do, in your names.

# %%
mistakes = {
    "a slip of the pen": lambda: x.sum("emebd"),
    "two sizes": lambda: x + axn.ones({"embed": 5}),
    "an outer product": lambda: axn.ones(Pos) + axn.ones(Embed),
    "out of range": lambda: x["pos", 3],
    "not an order": lambda: axn.rearrange(x, "{batch embed} -> batch embed"),
    "no names": lambda: x + jnp.ones(4),
}
for what, mistake in mistakes.items():
    try:
        mistake()
    except (ValueError, IndexError, TypeError) as error:
        print(f"{what}: {error}")

# %% [markdown]
# ## On many devices
#
# A mesh is a grid of devices with named axes. A mapping says which axes of arrays are sharded over which mesh axes.
# Functions do not change, since they do not mention devices.

# %%
Batch = axn.Axis("batch", 16)
mesh = axn.make_mesh({"data": -1, "model": 2 if jax.device_count() % 2 == 0 else 1})
x, w = axn.ones((Batch, Embed)), axn.ones((Embed, axn.Axis("mlp", 8)))


def layer(x: axn.NamedArray, w: axn.NamedArray) -> axn.NamedArray:
    return axn.tanh(axn.dot(x, w, axis="embed"))


for mapping in ({"batch": "data"}, {"mlp": "model"}, {"batch": "data", "mlp": "model"}):
    with jax.set_mesh(mesh), axn.axis_mapping(mapping):
        y = jax.block_until_ready(axn.named_jit(layer)(axn.shard(x), axn.shard(w)))
    print(mapping, y, y.array.sharding.spec)

# %% [markdown]
# A mapping that does not fit is an error before anything runs.

# %%
with jax.set_mesh(mesh):
    try:
        axn.shard({"x": x, "w": w}, {"mlp": "modle"})
    except ValueError as error:
        print(error)

# %% [markdown]
# From here: `docs/partitioning.md` on meshes and mappings, `docs/nn.md` on networks, `examples/image_classifier.py` and
# `examples/mixture_of_experts.py` for whole trainings.
