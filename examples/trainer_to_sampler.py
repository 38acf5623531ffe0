"""Train on four devices, and sample from the same weights on four others: `python examples/trainer_to_sampler.py`.

A small Llama learns a rhyme under FSDP. Every ten steps its weights go to a mesh of four other devices, where tensor
parallelism writes the rhyme with them. The script prints the bytes that the devices send, and a checksum of all weights
on both sides, which does not depend on how they are sharded.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

import jax
import numpy as np
import small_weights
from models.llama import Llama
from small_weights import LETTERS, PROMPT, RHYME, written

import axonym as axn

try:
    import optax
except ImportError as e:
    raise ImportError(f"{e}. What this example needs is optional: install axonym[examples].") from e

STORED, COMPUTED = {"embed": "fsdp"}, {"batch": "fsdp"}
TENSOR = {"kv_heads": "model", "mlp": "model", "vocab": "model"}
OPTIMIZER = optax.adam(3e-3)
CONFIG = dataclasses.replace(small_weights.CONFIG, KVHeads=axn.Axis("kv_heads", 4))  # one for each device


def start(key: jax.Array) -> tuple[Any, Any]:
    model: Any = Llama.init(CONFIG, key=key)
    return model, OPTIMIZER.init(model)


def step(model: Any, state: Any, tokens: axn.NamedArray) -> tuple[jax.Array, Any, Any]:
    loss, gradients = jax.value_and_grad(Llama.loss)(model, tokens)
    updates, state = OPTIMIZER.update(gradients, state)
    return loss, optax.apply_updates(model, updates), state


def checksum(model: Llama) -> int:
    return sum(axn.sharding.checksums(model).values()) % 2**32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    print(f"training for {args.steps} steps", file=sys.stderr)
    jax.config.update("jax_num_cpu_devices", 8)
    train = axn.make_mesh({"fsdp": 4}, devices=jax.devices()[:4])
    sample = axn.make_mesh({"model": 4}, devices=jax.devices()[4:8])
    letters = np.array([LETTERS.index(c) for c in RHYME], np.int32)
    texts = axn.named(np.stack([np.roll(letters, -9 * i) for i in range(4)]), ("batch", "pos"))
    prompt = axn.named(letters[None, :PROMPT], ("batch", "pos"))

    with jax.set_mesh(train):
        model, state = axn.named_jit(start, STORED)(jax.random.key(0))
    trained = axn.fsdp(step, STORED, COMPUTED)
    sampled = axn.named_jit(written, TENSOR, in_placement=(TENSOR, None))

    # The plan needs the shardings alone, so it is made once.
    plan = axn.transfer(model, axn.shard(jax.eval_shape(lambda: model), TENSOR, sample))
    print(plan)
    print(f"{'step':>4}{'loss':>8}{'sent':>10}{'weights':>12}{'copies':>12}  text")
    for i in range(1, args.steps + 1):
        with jax.set_mesh(train):
            loss, model, state = jax.block_until_ready(trained(model, state, texts))
        if i % 10 == 0:
            copies = plan(model, check=True)
            with jax.set_mesh(sample):
                found = jax.block_until_ready(sampled(copies, prompt))["batch", 0].tolist()
            sent = f"{sum(plan.links.values()) / 2**10:.0f} KiB"
            text = RHYME[:PROMPT] + "".join(LETTERS[j] for j in found)
            print(f"{i:4}{loss:8.3f}{sent:>10}{checksum(model):12}{checksum(copies):12}  {text}")


if __name__ == "__main__":
    main()
