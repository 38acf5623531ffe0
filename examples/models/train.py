"""Train the models of this folder under each mapping: `python examples/models/train.py`.

The models are trained on eight simulated devices. They do not mention devices, and learn the same under every mapping:
the printed losses agree.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import gpt2
import jax
import llama
import mappings
import numpy as np

import axonym as axn

try:
    import optax
except ImportError as e:
    raise ImportError(f"{e}. What this example needs is optional: install axonym[examples].") from e

OPTIMIZER = optax.adam(3e-3)
Batch, Pos, Vocab, Embed, Layers, HeadSize, Mlp = axn.make_axes(
    batch=16, pos=32, vocab=64, embed=64, layers=4, head_size=8, mlp=128
)


def make_gpt2(key: jax.Array) -> gpt2.Gpt2:
    Context, Heads = axn.make_axes(context=32, heads=8)
    sizes = gpt2.Config(
        Vocab=Vocab, Context=Context, Embed=Embed, Layers=Layers, Heads=Heads, HeadSize=HeadSize, Mlp=Mlp
    )
    return gpt2.Gpt2.init(sizes, key=key)


def make_llama(key: jax.Array) -> llama.Llama:
    KVHeads, Group = axn.make_axes(kv_heads=8, group=2)
    sizes = llama.Config(
        Vocab=Vocab, Embed=Embed, Layers=Layers, KVHeads=KVHeads, Group=Group, HeadSize=HeadSize, Mlp=Mlp
    )
    return llama.Llama.init(sizes, key=key)


MODELS = {"gpt2": make_gpt2, "llama": make_llama}


def step(model: Any, state: Any, tokens: axn.NamedArray) -> tuple[jax.Array, Any, Any]:
    """One step of training, which does not say how it is distributed."""
    loss, gradients = jax.value_and_grad(lambda model: model.loss(tokens))(model)
    updates, state = OPTIMIZER.update(gradients, state, model)
    return loss, optax.apply_updates(model, updates), state


def texts(steps: int) -> Iterator[axn.NamedArray]:
    """Texts in which each token is a step ahead of the one before it; the step is the text's own."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        first, stride = rng.integers(0, Vocab.size, (Batch.size, 1)), rng.integers(1, 6, (Batch.size, 1))
        yield axn.named((first + stride * np.arange(Pos.size)[None]) % Vocab.size, (Batch, Pos))


def train(name: str, strategy: str, steps: int) -> list[float]:
    """The loss of each step."""

    def start(key: jax.Array) -> tuple[Any, Any]:
        model = MODELS[name](key)
        return model, OPTIMIZER.init(model)

    # Each device makes its own shards, so none ever holds more.
    model, state = mappings.distributed_init(start, strategy)(jax.random.key(0))
    compiled = mappings.distributed_step(step, strategy)
    losses = []
    for tokens in texts(steps):
        loss, model, state = jax.block_until_ready(compiled(model, state, tokens))
        losses.append(float(loss))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"any of {', '.join(MODELS)}")
    parser.add_argument("--strategies", nargs="*", default=list(mappings.COMPUTE), help="by default all")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)

    with jax.set_mesh(axn.make_mesh({"data": 4, "model": 2})):
        for name in args.models:
            print(f"\n{name}, loss every 5 steps")
            for strategy in args.strategies:
                losses = train(name, strategy, args.steps)
                print(f"{strategy:>9}: {' '.join(f'{loss:.4f}' for loss in losses[::5])}")


if __name__ == "__main__":
    main()
