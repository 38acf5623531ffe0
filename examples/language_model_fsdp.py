"""A language model with fully sharded data parallelism, by a rule: `python examples/language_model_fsdp.py`.

The batch is sharded over all devices, and so is every large array of the parameters and of the optimizer state. The
compiler all-gathers a weight where it is used.
"""

import sys

import jax
from jax.sharding import PartitionSpec as P
from language_model import batches, report, start, step

import axonym as axn
from axonym.sharding import FSDPShardingRule

# Eight simulated devices, so that the example runs on any machine.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


def main() -> None:
    jax.set_mesh(axn.make_mesh({"data": -1}))
    print(f"compiling for {jax.device_count()} devices", file=sys.stderr)
    # One dimension of each array is sharded; arrays of fewer than 1024 elements stay replicated.
    rule = FSDPShardingRule("data", min_fsdp_size=1024)

    # The rule also places the optimizer state. Each device makes its own shards.
    params, state = axn.named_jit(start, out_placement=rule)(jax.random.key(0))

    train = axn.named_jit(
        step,
        in_placement=(rule, rule, P("data")),
        out_placement=(P(), rule, rule),
        annotation_shardings={"residual": P("data")},
        donate_args=(True, True, False),
    )
    for i, tokens in enumerate(batches()):
        # On several hosts, each process would load a piece of the batch, and pass it here in the same way.
        batch = axn.sharding.from_process_local_data(tokens)
        value, params, state = jax.block_until_ready(train(params, state, batch))
        report(i, value)

    print("\nparameters, their partition specs, and their shards:")
    for path, x in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        print(f"{name:<18} {x.shape!s:<13} {x.sharding.spec!s:<22} {x.addressable_shards[0].data.shape}")

    leaves = jax.tree.leaves((params, state))
    held = sum(x.addressable_shards[0].data.nbytes for x in leaves)
    print(f"\none device holds {held / sum(x.nbytes for x in leaves):.1%} of parameters and optimizer state")


if __name__ == "__main__":
    main()
