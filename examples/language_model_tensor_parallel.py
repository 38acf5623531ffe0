"""A language model with FSDP and tensor parallelism, by rules: `python examples/language_model_tensor_parallel.py`.

The batch, and the parameters in storage, are sharded over the mesh axis "data". The heads of the attention and the
hidden features are sharded over "model", so the devices along it compute different heads and features of a layer.
"""

import sys

import jax
from jax.sharding import PartitionSpec as P
from language_model import batches, init, report, start, step

import axonym as axn
from axonym.sharding import FSDPShardingRule, TreePathShardingRule

# Eight simulated devices, so that the example runs on any machine.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# Paths decide for tensor parallelism, and a rule by size for other parameters: the look-up table and the output. Norms
# are small, and stay replicated. The optimizer state has the same paths. The first dimension of `layers` counts layers.
PARAMETERS = TreePathShardingRule(
    (r"attn/[qkv]$|mlp/up$", P(None, "data", "model")),
    (r"attn/o$|mlp/down$", P(None, "model", "data")),
    (r".*", FSDPShardingRule("data", min_fsdp_size=1024)),
)

# Placements of the activations that the model names: the residual stream is sharded over the batch alone, heads and
# hidden features over the model axis too.
ACTIVATIONS = {
    "residual": P("data"),
    "heads": P("data", None, "model"),
    "hidden": P("data", None, "model"),
}


def main() -> None:
    jax.set_mesh(axn.make_mesh({"data": -1, "model": 2}))
    print(f"compiling for {jax.device_count()} devices", file=sys.stderr)
    params, state = axn.named_jit(start, out_placement=PARAMETERS)(jax.random.key(0))

    train = axn.named_jit(
        step,
        in_placement=(PARAMETERS, PARAMETERS, P("data")),
        out_placement=(P(), PARAMETERS, PARAMETERS),
        annotation_shardings=ACTIVATIONS,
        donate_args=(True, True, False),
    )
    for i, tokens in enumerate(batches()):
        batch = axn.sharding.from_process_local_data(tokens, mesh_axes="data")
        value, params, state = jax.block_until_ready(train(params, state, batch))
        report(i, value)

    print("\nparameters of the layers, their partition specs, and their shards:")
    for path, x in jax.tree.leaves_with_path(params["layers"]):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        print(f"{name:<11} {x.shape!s:<13} {x.sharding.spec!s:<26} {x.addressable_shards[0].data.shape}")

    # A rule can be asked before anything is made, here about abstract parameters.
    shardings = axn.sharding.infer_resource_partitions(jax.eval_shape(init, jax.random.key(0)), PARAMETERS)
    print("\nthe rule says of the table:", shardings["table"].spec)


if __name__ == "__main__":
    main()
