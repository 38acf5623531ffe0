"""Compare what Muon sends with and without `over`, by which devices exchange whole matrices: 18 MiB of parameters."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import axonym as axn
from axonym import nn

from .communication import bytes_moved
from .harness import Row

Embed, Mlp, Heads = axn.make_axes(embed=256, mlp=1024, heads=256)
FSDP, BOTH = ({"fsdp": 8}, {"embed": "fsdp"}), ({"fsdp": 4, "tensor": 2}, {"embed": "fsdp", "mlp": "tensor"})
CASES: list[tuple[str, int, Any, tuple[Any, Any], bool, float]] = [
    ("fsdp 8", 8, nn.Stacked, FSDP, False, 1.1),
    ("fsdp 8, Explicit", 8, nn.Stacked, FSDP, True, 1.1),
    ("fsdp 8, 12 layers, padded to 16", 12, nn.Stacked, FSDP, False, 2.0),
    ("fsdp 8, layers that are not stacked", 8, nn.BlockSeq, FSDP, False, 2.0),
    ("fsdp 4 x tensor 2", 8, nn.Stacked, BOTH, False, 2.2),  # a way for each mesh axis
]
"""What it is, the number of layers, the mesh and the storage sharding, and the most that may be sent, to the least."""


class Block(eqx.Module):
    up: nn.Linear
    down: nn.Linear
    query: nn.Linear

    @staticmethod
    def init(*, key: jax.Array) -> Block:
        pairs = (Embed, Mlp), (Mlp, Embed), (Embed, Heads)
        keys = jax.random.split(key, 3)
        return Block(*(nn.Linear.init(*ends, key=k, use_bias=False) for ends, k in zip(pairs, keys, strict=True)))


def rows() -> list[Row]:
    """Compare the results of collectives, and the temporaries of the update, on each device."""
    found = []
    for what, layers, stack, (sizes, storage), explicit, limit in CASES:
        mesh = axn.make_mesh(sizes, explicit=explicit)
        with jax.set_mesh(mesh), axn.axis_mapping(storage):
            model = axn.shard(stack.init(axn.Axis("layers", layers), Block)(key=jax.random.key(0)))
            ours, theirs = (_compiled(axn.optim.muon(2e-2, over=over), model) for over in (tuple(sizes), ()))
        least = 2 * sum(x.nbytes for x in jax.tree.leaves(model)) / mesh.size  # there and back
        sent = [sum(moved.bytes for moved in bytes_moved(program).values()) for program in (ours, theirs)]
        found.append(_row(f"{what}: sent, to the least", sent, sent[0] / least, limit))
        held = [program.memory_analysis().temp_size_in_bytes for program in (ours, theirs)]
        found.append(_row(f"{what}: temporaries, to those without", held, held[0] / held[1], 1.0))
        if len(sizes) > 1:  # what `over` avoids: each array goes to the layers, and back, over all mesh axes at once
            whole = {"layers": tuple(sizes)}
            with jax.set_mesh(mesh), axn.axis_mapping(storage):
                at_once = _compiled(axn.optim.muon(2e-2), model, whole)
            sent[1] = sum(moved.bytes for moved in bytes_moved(at_once).values())
            found.append(_row(f"{what}: sent, to both at once", sent, sent[0] / sent[1], 0.17))
    return found


def _row(what: str, sizes: list[int], ratio: float, limit: float) -> Row:
    ours, theirs = (f"{n / 2**20:.1f} MiB" for n in sizes)
    return Row("optimizers", what, ours, theirs, ratio, limit)


def _compiled(tx: Any, model: Any, whole: Any = None) -> Any:
    """Compile an update of parameters in their storage sharding; the state, and what is computed, are in `whole`."""
    state = axn.shard(tx.init(model), whole)
    gradients = jax.tree.map(jnp.ones_like, model)

    def update(gradients: Any, state: Any, model: Any) -> Any:
        updates, state = tx.update(axn.shard(gradients, whole), state, model)
        return axn.shard(updates), axn.shard(state, whole)

    return jax.jit(update).lower(gradients, state, model).compile()
