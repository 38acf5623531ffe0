"""Train a convolutional network to read digits: `python examples/image_classifier.py`.

The images are the 1797 handwritten digits of 8 by 8 pixels that come with scikit-learn. The network does not mention
devices: a mapping from its axes to mesh axes distributes it. With `--mapping data`, each device has its own images.
With `--mapping height`, two devices share an image: one has the upper half, one the lower, and the compiler exchanges
the rows at the border. Without an accelerator, there are eight simulated devices.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import PartitionSpec

import axonym as axn
from axonym import nn

if __name__ == "__main__":
    print("importing scikit-learn", file=sys.stderr)

try:
    import optax
    from sklearn.datasets import load_digits
except ImportError as e:
    raise ImportError(f"{e}. What this example needs is optional: install axonym[examples].") from e

# Without an accelerator there are eight simulated devices; where there is one, this changes nothing.
jax.config.update("jax_num_cpu_devices", 8)

Height, Width, Gray, Digit = axn.make_axes(height=8, width=8, gray=1, digit=10)
TEST_IMAGES = 384
"""How many images are kept for the test, a number that many numbers of devices divide."""

MAPPINGS: dict[str, dict[str, Any]] = {
    "data": {"batch": ("data", "rows")},
    "height": {"batch": "data", "height": "rows"},
}


class Classifier(eqx.Module):
    """Two convolutions, each followed by pooling, and a linear layer on what is left of the image."""

    first: nn.Conv
    second: nn.Conv
    dropout: nn.Dropout
    head: nn.Linear

    @staticmethod
    def init(*, key: jax.Array) -> Classifier:
        Edges, Shapes = axn.make_axes(edges=32, shapes=64)
        keys = jax.random.split(key, 3)
        return Classifier(
            first=nn.Conv.init((Height, Width), Gray, Edges, kernel_size=3, padding="SAME", key=keys[0]),
            second=nn.Conv.init((Height, Width), Edges, Shapes, kernel_size=3, padding="SAME", key=keys[1]),
            dropout=nn.Dropout(0.3),
            head=nn.Linear.init((Shapes, Height.resize(2), Width.resize(2)), Digit, key=keys[2]),
        )

    def __call__(self, images: axn.NamedArray, *, key: jax.Array | None = None) -> axn.NamedArray:
        """A score for each digit. In training, a key says what dropout drops."""
        x = self.pooled(nn.relu(self.first(images)))
        x = self.pooled(nn.relu(self.second(x)))
        return self.head(self.dropout(x, key=key))

    def pooled(self, x: axn.NamedArray) -> axn.NamedArray:
        """The image at half the size."""
        return nn.max_pool(x, {"height": 2, "width": 2}, stride=2)


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images with values from 0 to 1, and what they show, in an order that is random but always the same."""
    data: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return (data.images[order] / 16).astype(np.float32), data.target[order].astype(np.int32)


def batch_of(images: np.ndarray, labels: np.ndarray) -> tuple[axn.NamedArray, axn.NamedArray]:
    """Arrays from the host, with names."""
    return axn.named(images[:, None], ("batch", Gray, Height, Width)), axn.named(labels, "batch")


def epoch(images: np.ndarray, labels: np.ndarray, size: int, seed: int) -> Iterator[tuple[axn.NamedArray, ...]]:
    """All images once, in batches in a random order. What does not fill a batch is left out."""
    order = np.random.default_rng(seed).permutation(len(labels))
    for start in range(0, len(order) - size + 1, size):
        chosen = order[start : start + size]
        yield batch_of(images[chosen], labels[chosen])


def show(image: np.ndarray) -> str:
    """An image in text: a darker character for more ink."""
    return "\n".join("".join(" .:-=+*#%@"[int(9 * pixel)] * 2 for pixel in row) for row in image)


def make_step(optimizer: optax.GradientTransformation) -> Callable[..., tuple[jax.Array, Classifier, Any]]:
    """A step of training: from a batch to the loss, the new model, and the new state of the optimizer."""

    def step(model: Classifier, state: Any, images: axn.NamedArray, labels: axn.NamedArray, key: jax.Array) -> Any:
        def loss(model: Classifier) -> jax.Array:
            return nn.cross_entropy_loss(model(images, key=key), Digit, labels).scalar()

        value, gradients = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimizer.update(gradients, state)
        return value, eqx.apply_updates(model, updates), state

    return step


def read(model: Classifier, images: axn.NamedArray) -> axn.NamedArray:
    """The digit that each image shows, to all that the model knows."""
    return axn.argmax(eqx.nn.inference_mode(model)(images), Digit)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a convolutional network to read digits.")
    parser.add_argument("--mapping", choices=MAPPINGS, default="data", help="how the work is shared (default: data)")
    parser.add_argument("--epochs", type=int, default=15, help="how often each image is seen (default: 15)")
    parser.add_argument("--batch", type=int, default=64, help="images in a step (default: 64)")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate (default: 0.002)")
    args = parser.parse_args()
    if not 0 < args.batch <= 1024 or args.batch % jax.device_count():
        parser.error(f"--batch is at most 1024 and a multiple of the {jax.device_count()} devices, got {args.batch}")
    return args


def main() -> None:
    args = parse_arguments()
    mapping = MAPPINGS[args.mapping]
    mesh = axn.make_mesh({"data": -1, "rows": 2 if jax.device_count() % 2 == 0 else 1})
    print(f"mesh {dict(mesh.shape)}, mapping {mapping}")
    images, labels = digits()
    test = batch_of(images[:TEST_IMAGES], labels[:TEST_IMAGES])
    images, labels = images[TEST_IMAGES:], labels[TEST_IMAGES:]
    optimizer = optax.adam(args.rate)

    # The mapping shards images and labels, and is active inside, for the convolutions. Parameters are replicated: the
    # weight of a convolution has axes of the same names as an image, and is too small to shard.
    placements = {"images": mapping, "labels": mapping}
    train = axn.named_jit(make_step(optimizer), mapping, in_placement=placements, out_placement=PartitionSpec())
    predict = axn.named_jit(read, mapping)

    with jax.set_mesh(mesh):
        test_images, test_labels = axn.shard(test, mapping)
        print(f"of {test_images}, each device has {test_images.array.addressable_shards[0].data.shape}")

        model = Classifier.init(key=jax.random.key(0))
        state = optimizer.init(eqx.filter(model, eqx.is_array))
        started = time.perf_counter()
        for i in range(args.epochs):
            losses = []
            for j, batch in enumerate(epoch(images, labels, args.batch, seed=i)):
                key = jax.random.key(1000 * i + j)
                value, model, state = jax.block_until_ready(train(model, state, *batch, key))
                losses.append(float(value))
            right = axn.equal(predict(model, test_images), test_labels).mean().item()
            print(f"epoch {i + 1:>2}: loss {np.mean(losses):.3f}, {right:.1%} of {TEST_IMAGES} test images right")
        print(f"{time.perf_counter() - started:.0f} s of training")
        seen = predict(model, test_images)

    wrong = np.flatnonzero(axn.to_host(axn.not_equal(seen, test_labels)).array)
    if len(wrong):
        first = wrong[0]
        picture = show(axn.to_host(test_images).array[first, 0])
        print(f"\nread as {seen.array[first]}, but is {test_labels.array[first]}:\n{picture}")


if __name__ == "__main__":
    main()
