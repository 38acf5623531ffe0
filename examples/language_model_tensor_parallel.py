"""A language model under FSDP with tensor parallelism, by rules: `python examples/language_model_tensor_parallel.py`.

The devices are a grid. Its rows, "data", split the batch, and the parameters where they rest. Its columns, "model",
split the heads of the attention and the hidden units: what one device computes of a layer, no other in its row does.
"""

import jax
from jax.sharding import PartitionSpec as P
from language_model import batches, init, report, start, step

import axonym as axn
from axonym.sharding import FSDPShardingRule, TreePathShardingRule

# Eight simulated devices, so that the example runs on any machine.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# What the paths say of tensor parallelism, and a rule without paths for the rest: look-up table, output, and optimiser
# state that mirrors them. Norms are small, and stay whole. The first axis of what `layers` holds counts the layers.
PARAMETERS = TreePathShardingRule(
    (r"attn/[qkv]$|mlp/up$", P(None, "data", "model")),
    (r"attn/o$|mlp/down$", P(None, "model", "data")),
    (r".*", FSDPShardingRule("data", min_fsdp_size=1024)),
)

# Where the values lie that the model gives a name: the residual stream is split over the batch alone, the inside of a
# layer over the model axis too.
ACTIVATIONS = {
    "residual": P("data"),
    "heads": P("data", None, "model"),
    "hidden": P("data", None, "model"),
}


def main() -> None:
    jax.set_mesh(axn.make_mesh({"data": -1, "model": 2}))
    params, state = axn.named_jit(start, out_axis_resources=PARAMETERS)(jax.random.key(0))

    train = axn.named_jit(
        step,
        in_axis_resources=(PARAMETERS, PARAMETERS, P("data")),
        out_axis_resources=(P(), PARAMETERS, PARAMETERS),
        annotation_shardings=ACTIVATIONS,
        donate_args=(True, True, False),
    )
    for i, tokens in enumerate(batches()):
        batch = axn.sharding.from_process_local_data(tokens, mesh_axes="data")
        value, params, state = jax.block_until_ready(train(params, state, batch))
        report(i, value)

    print("\nwhere the layers lie, and what one device holds of them:")
    for path, x in jax.tree.leaves_with_path(params["layers"]):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        print(f"{name:<11} {x.shape!s:<13} {x.sharding.spec!s:<26} {x.addressable_shards[0].data.shape}")

    # A rule can be asked before anything is made, here about abstract parameters.
    shardings = axn.sharding.infer_resource_partitions(jax.eval_shape(init, jax.random.key(0)), PARAMETERS)
    print("\nthe rule says of the table:", shardings["table"].spec)


if __name__ == "__main__":
    main()
