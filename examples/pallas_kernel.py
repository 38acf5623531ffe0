"""Run a Pallas kernel on sharded arrays, with a partitioning rule, since the compiler cannot look into the kernel.

The kernel normalizes rows, and scales columns. It works on blocks of rows, so rows may be sharded, but `embed` may
not: the names of its axes determine this. A second operation also allows sharded columns. It has two kernels, with a
sum over devices between them.

Both run on four simulated devices, interpreted on a CPU, and are compared with the formula in NumPy:
`python examples/pallas_kernel.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import AxisType

import axonym as axn
from axonym.custom_partitioning import partitioned

jax.config.update("jax_num_cpu_devices", 4)

Row, Embed = axn.make_axes(row=8, embed=16)
ROWS = 2
"""The rows of a block."""
MAPPINGS = [{"row": "data"}, {"row": "data", "embed": "model"}, {"embed": "model"}, {"row": None}]


def in_blocks(kernel, columns, *operands):
    """Call a kernel for each block of rows. Operands are matrices that are cut into blocks, or one row for all."""
    rows = operands[0].shape[0]
    specs = [
        pl.BlockSpec((ROWS, x.shape[1]), lambda i: (i, 0))
        if x.shape[0] == rows
        else pl.BlockSpec(x.shape, lambda i: (0, 0))
        for x in operands
    ]
    call = pl.pallas_call(
        kernel,
        grid=(rows // ROWS,),
        in_specs=specs,
        out_specs=pl.BlockSpec((ROWS, columns), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, columns), operands[0].dtype),
        interpret=jax.default_backend() == "cpu",
    )
    return call(*operands)


# --- rows may be sharded ---


def normalize_kernel(x_ref, scale_ref, out_ref):
    x = x_ref[...]
    out_ref[...] = x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True)) * scale_ref[...]


@partitioned(replicated="embed")
def normalize(x, scale):
    """`embed` is in the result, so it would be passed through, but the kernel needs full rows."""
    x, row = x.rearrange(("row", "embed")), scale.array[None, :]
    return axn.named(in_blocks(normalize_kernel, x.axis_size("embed"), x.array, row), x.names)


# --- both may be sharded: each device sums the squares of its shard ---


def squares_kernel(x_ref, out_ref):
    out_ref[...] = jnp.sum(x_ref[...] ** 2, axis=1, keepdims=True)


def rescale_kernel(size, x_ref, squares_ref, scale_ref, out_ref):
    out_ref[...] = x_ref[...] * jax.lax.rsqrt(squares_ref[...] / size) * scale_ref[...]


@partitioned
def normalize_split(x, scale, *, size):
    """Serve for full arrays and for shards: `psum` over an axis that is replicated returns its argument."""
    x, row = x.rearrange(("row", "embed")), scale.array[None, :]
    squares = axn.psum(in_blocks(squares_kernel, 1, x.array), "embed")
    kernel = functools.partial(rescale_kernel, size)
    return axn.named(in_blocks(kernel, x.axis_size("embed"), x.array, squares, row), x.names)


def main():
    rng = np.random.default_rng(0)
    values, scales = rng.normal(size=(8, 16)).astype(np.float32), rng.normal(size=16).astype(np.float32)
    whole, whole_scale = axn.named(values, (Row, Embed)), axn.named(scales, Embed)
    expected = values / np.sqrt(np.mean(values**2, axis=1, keepdims=True)) * scales
    print(f"normalize: {normalize.explain(whole, whole_scale)}")
    print(f"normalize_split: {normalize_split.explain(whole, whole_scale, size=Embed.size)}")
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
        for mapping in MAPPINGS:
            print(f"{kind.name} mesh axes, {mapping}")
            with jax.set_mesh(mesh), axn.axis_mapping(mapping):
                x, scale = axn.shard(whole), axn.shard(whole_scale)
                for name, fn in (
                    ("normalize", normalize),
                    ("normalize_split", functools.partial(normalize_split, size=Embed.size)),
                ):
                    found = jax.block_until_ready(jax.jit(fn)(x, scale)).array
                    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-6)
                    program = jax.jit(fn).lower(x, scale).compile().as_text()
                    moves = [kind for kind in ("all-gather", "all-reduce") if f" {kind}(" in program]
                    print(f"   {name}: sharded {found.sharding.spec}, moves by {' and '.join(moves) or 'nothing'}")
                    # The first all-gathers sharded columns; the second only adds sums of squares.
                    needed = {"normalize": ["all-gather"], "normalize_split": ["all-reduce"]}[name]
                    assert moves == (needed if mapping.get("embed") else [])


if __name__ == "__main__":
    main()
