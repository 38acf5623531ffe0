"""`scalax.utils`: a source of random keys, floating-point types by name, and trees with paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

_FLOATS = {
    "bfloat16": jnp.bfloat16,
    "bf16": jnp.bfloat16,
    **{f"{kind}{bits}": getattr(jnp, f"float{bits}") for kind in ("float", "fp") for bits in (16, 32, 64)},
}

IsLeaf = Callable[[Any], bool] | None


class JaxRNG:
    """Give new random keys with every call.

    >>> rng = scalax.utils.JaxRNG.from_seed(0)
    >>> sorted(rng(("params", "dropout"))), len(rng(3)), rng().shape
    (['dropout', 'params'], 3, (2,))
    """

    global_rng_generator: ClassVar[JaxRNG | None] = None
    """The source of keys of `next_rng`."""

    def __init__(self, rng: jax.Array):
        self.rng = rng

    @classmethod
    def from_seed(cls, seed: int) -> JaxRNG:
        """Make a source of keys from a seed.

        >>> scalax.utils.JaxRNG.from_seed(0).rng.tolist()
        [0, 0]
        """
        return cls(jax.random.PRNGKey(seed))

    def __call__(self, keys: int | Iterable[str] | None = None) -> Any:
        """Return one key; for a number, a tuple of as many; for names, a dictionary with one for each."""
        if keys is None:
            return self(1)[0]
        names = range(keys) if isinstance(keys, int) else tuple(keys)
        self.rng, *made = jax.random.split(self.rng, len(names) + 1)
        return tuple(made) if isinstance(keys, int) else dict(zip(names, made, strict=True))

    @classmethod
    def init_global_rng(cls, seed: int) -> None:
        """Make the source that `next_rng` draws from."""
        cls.global_rng_generator = cls.from_seed(seed)

    @classmethod
    def next_rng(cls, *args: Any, **kwargs: Any) -> Any:
        """Call the source that `init_global_rng` made: return one key, or as the arguments say.

        >>> scalax.utils.JaxRNG.init_global_rng(0)
        >>> len(scalax.utils.JaxRNG.next_rng(2))
        2
        """
        if cls.global_rng_generator is None:
            raise ValueError("JaxRNG.next_rng: there is nothing to draw from yet; call JaxRNG.init_global_rng first.")
        return cls.global_rng_generator(*args, **kwargs)


def get_float_dtype_by_name(dtype: str) -> Any:
    """Return the floating-point type of a name such as bf16, bfloat16, fp32 or float32.

    >>> scalax.utils.get_float_dtype_by_name("bf16").dtype
    dtype(bfloat16)
    """
    return _FLOATS[dtype]


def float_tensor_to_dtype(tensor: Any, dtype: Any) -> Any:
    """Convert an array of floating-point numbers to a type or the type of that name; return all else as it is.

    >>> [scalax.utils.float_tensor_to_dtype(x, "bf16") for x in (jnp.ones(1), 3)]
    [Array([1], dtype=bfloat16), 3]
    """
    if dtype is None or dtype == "" or getattr(tensor, "dtype", None) not in _FLOATS.values():
        return tensor
    return tensor.astype(get_float_dtype_by_name(dtype) if isinstance(dtype, str) else dtype)


def float_to_dtype(tree: Any, dtype: Any) -> Any:
    """Convert the arrays of floating-point numbers in a tree, each as `float_tensor_to_dtype` does.

    >>> scalax.utils.float_to_dtype({"w": jnp.ones(2), "n": jnp.arange(2)}, "bf16")
    {'n': Array([0, 1], dtype=int32), 'w': Array([1, 1], dtype=bfloat16)}
    """
    return jax.tree.map(lambda x: float_tensor_to_dtype(x, dtype), tree)


def tree_path_to_string(path: Sequence[Any], sep: str | None = None) -> Any:
    """Return the keys of a path of JAX as strings: a tuple of them, or one string with a separator between them.

    >>> scalax.utils.tree_path_to_string((jax.tree_util.DictKey("layers"), jax.tree_util.SequenceKey(0)), "/")
    'layers/0'
    """
    keys = tuple([jax.tree_util.keystr((key,), simple=True) for key in path])
    return keys if sep is None else sep.join(keys)


def flatten_tree(xs: Any, is_leaf: IsLeaf = None, sep: str | None = None) -> dict[Any, Any]:
    """Return the leaves of a tree by their paths; without a separator, a path is a tuple of keys.

    >>> scalax.utils.flatten_tree({"layers": [{"w": 1}]}, sep="/")
    {'layers/0/w': 1}
    """
    return {tree_path_to_string(path, sep): leaf for path, leaf in jax.tree.leaves_with_path(xs, is_leaf=is_leaf)}


def named_tree_map(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: IsLeaf = None, sep: str | None = None) -> Any:
    """Map a function over a tree: from the path of a leaf, the leaf, and the leaves of further trees at that path.

    Arguments:
        is_leaf, sep: as in `flatten_tree`.

    >>> scalax.utils.named_tree_map(lambda path, x: f"{path}={x}", {"w": 1}, sep="/")
    {'w': 'w=1'}
    """
    return jax.tree.map_with_path(
        lambda path, *leaves: f(tree_path_to_string(path, sep), *leaves), tree, *rest, is_leaf=is_leaf
    )


def print_pytree_structure(tree: Any, sep: str | None = "/", is_leaf: IsLeaf = None) -> None:
    """Print the path, shape and type of every leaf; the arguments are as in `flatten_tree`.

    >>> scalax.utils.print_pytree_structure({"w": jnp.ones(2), "n": 3})
    n: shape: none, dtype: none
    w: shape: (2,), dtype: float32
    """
    for path, x in flatten_tree(tree, is_leaf, sep).items():
        print(f"{path}: shape: {getattr(x, 'shape', 'none')}, dtype: {getattr(x, 'dtype', 'none')}")
