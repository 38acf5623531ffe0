"""Write operations with their own partitioning: with a scalar operand, a scalar and an array, and a device's index.

Each runs on four simulated devices, on Auto and Explicit mesh axes, with rows sharded, columns sharded, both, and
neither, and is compared with NumPy: `python examples/custom_partitioning.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import axonym as axn
from axonym.custom_partitioning import partitioned

jax.config.update("jax_num_cpu_devices", 4)

Batch, Vocab = axn.make_axes(batch=4, vocab=8)
MAPPINGS = [{"batch": "rows", "vocab": "cols"}, {"batch": "rows"}, {"vocab": "cols"}, {"batch": None}]


# --- a scalar, which is replicated, and does not affect the sharding of the result ---


@partitioned
def scaled(x, factor):
    """One function serves for full arrays and for shards."""
    return x * factor


@partitioned(reduced="vocab")
def scaled_total(x, factor):
    return axn.psum(axn.sum(x, "vocab"), "vocab") * factor


@partitioned("b v, -> b", reduced="v")
def scaled_total_of_raw(x, factor):
    """Do the same for raw arrays, with the rule as a string: a scalar is the blank after the comma."""
    return axn.psum(jnp.sum(x, -1), "v") * factor


# --- a scalar and a second array, of which a device has its shard ---


@partitioned
def rescaled(x, by_example, factor):
    assert by_example.shape["batch"] == x.shape["batch"] and jnp.shape(factor) == ()
    return x * by_example * factor


# --- the index of a device: adds 0, 100 or 200, by its index along the sharded axes ---


@partitioned
def with_place(x):
    return x + 100 * (axn.axis_index("batch") + axn.axis_index("vocab"))


def print_places(found, values, mapping):
    """Print what each device added, and its shard."""
    rows, columns = (n if mapping.get(n) else f"{n} (full)" for n in ("batch", "vocab"))
    print(f"      device  {rows:14}  {columns:14}  adds")
    for part in sorted(found.array.addressable_shards, key=lambda part: part.device.id):
        batch, vocab = (f"{s.start or 0} to {(s.stop or size) - 1}" for s, size in zip(part.index, (4, 8), strict=True))
        (added,) = np.unique(np.round(np.asarray(part.data) - values[part.index]))
        print(f"      {part.device.id:<6}  {batch:14}  {vocab:14}  {added:.0f}")


def verify(what, found, expected):
    """Block, compare, and print the sharding of the result."""
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-6)
    print(f"   {what} is as on one device, sharded {found.sharding.spec}")


def main():
    values = np.random.default_rng(0).normal(size=(Batch.size, Vocab.size)).astype(np.float32)
    factors = np.arange(1, 5, dtype=np.float32)
    whole, by_example = axn.named(values, (Batch, Vocab)), axn.named(factors, Batch)
    for operation, args in (
        (scaled, (whole, 2.0)),
        (scaled_total, (whole, 2.0)),
        (scaled_total_of_raw, (values, 2.0)),
        (rescaled, (whole, by_example, 2.0)),
        (with_place, (whole,)),
    ):
        print(f"{operation.__name__}: {operation.explain(*args)}")
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 2), ("rows", "cols"), axis_types=(kind, kind))
        for mapping in MAPPINGS:
            print(f"{kind.name} mesh axes, {mapping}")
            with jax.set_mesh(mesh), axn.axis_mapping(mapping):
                x, by = axn.shard(whole), axn.shard(by_example)
                verify("scaled", jax.jit(scaled)(x, 2.0).array, values * 2)
                verify("scaled_total", jax.jit(scaled_total)(x, 2.0).array, values.sum(1) * 2)
                verify("scaled_total_of_raw", jax.jit(scaled_total_of_raw)(x.array, 2.0), values.sum(1) * 2)
                verify("rescaled", jax.jit(rescaled)(x, by, 2.0).array, values * factors[:, None] * 2)
                found = jax.jit(with_place)(x)
                starts = (np.arange(a.size) // (a.size // 2) * bool(mapping.get(a.name)) for a in (Batch, Vocab))
                verify("with_place", found.array, values + 100 * np.add.outer(*starts))
                print_places(found, values, mapping)
                # Only the totals need communication.
                program = jax.jit(rescaled).lower(x, by, 2.0).compile().as_text()
                assert "all-gather" not in program and "all-reduce" not in program


if __name__ == "__main__":
    main()
