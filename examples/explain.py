"""Explain a training step under three mappings, before it runs anywhere.

    python examples/explain.py
    python -m axonym.insight examples/explain.py:case --mesh data=64,model=8 --mapping fsdp --chip v5p

The first compares the mappings on eight simulated devices. The second explains one of them on a mesh of 512 devices,
which are simulated too: nothing runs, so it takes seconds on a laptop.
"""

import sys

import jax

import axonym as axn
from axonym import insight, nn

Batch, Pos, Embed, Mlp = axn.make_axes(batch=512, pos=64, embed=256, mlp=1024)

data = {"batch": "data"}
fsdp = ({"embed": "data", "mlp": "model"}, {"batch": "data", "mlp": "model"})  # stored, and computed
tensor = {"mlp": ("data", "model")}


Weights = dict[str, axn.NamedArray]


def loss(weights: Weights, x: axn.NamedArray) -> jax.Array:
    hidden = nn.gelu(axn.dot(x, weights["up"], axis="embed"))
    return axn.mean(axn.square(axn.dot(hidden, weights["down"], axis="mlp") - x)).scalar()


def step(weights: Weights, x: axn.NamedArray) -> tuple[jax.Array, Weights]:
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


def case():
    """The step and its arguments. They are abstract: they have axes and dtypes, and no values."""
    weights = jax.eval_shape(lambda: {"up": axn.ones((Embed, Mlp)), "down": axn.ones((Mlp, Embed))})
    return step, weights, jax.eval_shape(lambda: axn.ones((Batch, Pos, Embed)))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    step, *arguments = case()
    mappings = {"data": data, "fsdp": fsdp, "tensor": tensor}
    mesh = axn.make_mesh({"data": 4, "model": 2})
    print(f"comparing the mappings {', '.join(mappings)} on the mesh {dict(mesh.shape)}", file=sys.stderr)
    print(insight.compare(step, arguments, mappings, mesh=mesh, by="partitioner"))
