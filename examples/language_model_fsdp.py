"""A language model under fully sharded data parallelism, by a rule: `python examples/language_model_fsdp.py`.

The batch is split over all devices. So is every large array of the parameters and of the optimiser: each device keeps
an eighth of them, and the compiler gathers a weight where it is used.
"""

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
    # Whichever axis of an array can be split; arrays of fewer than 1024 elements stay whole on every device.
    rule = FSDPShardingRule("data", min_fsdp_size=1024)

    # The rule serves for the state of the optimiser too. Compiled with it, `start` makes every array in parts.
    params, state = axn.named_jit(start, out_axis_resources=rule)(jax.random.key(0))

    train = axn.named_jit(
        step,
        in_axis_resources=(rule, rule, P("data")),
        out_axis_resources=(P(), rule, rule),
        annotation_shardings={"residual": P("data")},
        donate_args=(True, True, False),
    )
    for i, tokens in enumerate(batches()):
        # On several hosts each would load a part of the batch, and pass it here in the same way.
        batch = axn.sharding.from_process_local_data(tokens)
        value, params, state = jax.block_until_ready(train(params, state, batch))
        report(i, value)

    print("\nwhere parameters lie, and what one device holds of them:")
    for path, x in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        print(f"{name:<18} {x.shape!s:<13} {x.sharding.spec!s:<22} {x.addressable_shards[0].data.shape}")

    leaves = jax.tree.leaves((params, state))
    held = sum(x.addressable_shards[0].data.nbytes for x in leaves)
    print(f"\none device holds {held / sum(x.nbytes for x in leaves):.1%} of parameters and optimiser")


if __name__ == "__main__":
    main()
