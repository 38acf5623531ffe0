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

    >>> from axonym.scalax.utils import JaxRNG
    >>> rng = JaxRNG.from_seed(0)
    >>> sorted(rng(("params", "dropout"))), len(rng(3)), rng().shape
    (['dropout', 'params'], 3, (2,))
    """

    global_rng_generator: ClassVar[JaxRNG | None] = None
    """What `next_rng` draws from."""

    def __init__(self, rng: jax.Array):
        """Arguments:
        rng: the key that all others are split from.
        """
        self.rng = rng

    @classmethod
    def from_seed(cls, seed: int) -> JaxRNG:
        """Make one from a seed.

        Arguments:
            seed: the seed.

        >>> from axonym.scalax.utils import JaxRNG
        >>> JaxRNG.from_seed(0).rng.tolist()
        [0, 0]
        """
        return cls(jax.random.PRNGKey(seed))

    def __call__(self, keys: int | Iterable[str] | None = None) -> Any:
        """One key; for a number a tuple of as many; for names a dictionary with one for each."""
        names = None if keys is None or isinstance(keys, int) else tuple(keys)
        count = 1 if keys is None else keys if isinstance(keys, int) else len(names or ())
        self.rng, *made = jax.random.split(self.rng, count + 1)
        return made[0] if keys is None else tuple(made) if names is None else dict(zip(names, made, strict=True))

    @classmethod
    def init_global_rng(cls, seed: int) -> None:
        """Start what `next_rng` draws from.

        Arguments:
            seed: the seed.

        >>> from axonym.scalax.utils import JaxRNG
        >>> JaxRNG.init_global_rng(0)
        """
        cls.global_rng_generator = cls.from_seed(seed)

    @classmethod
    def next_rng(cls, *args: Any, **kwargs: Any) -> Any:
        """Draw from what `init_global_rng` started, as a call does.

        Arguments:
            *args: how many keys, or their names; one by default.
            **kwargs: the same by keyword.

        >>> from axonym.scalax.utils import JaxRNG
        >>> JaxRNG.init_global_rng(0)
        >>> len(JaxRNG.next_rng(2))
        2
        """
        if cls.global_rng_generator is None:
            raise ValueError("JaxRNG.next_rng: there is nothing to draw from yet; call JaxRNG.init_global_rng first.")
        return cls.global_rng_generator(*args, **kwargs)


def get_float_dtype_by_name(dtype: str) -> Any:
    """The floating-point type of a name.

    Arguments:
        dtype: the name, such as bf16, bfloat16, fp32 or float32.

    >>> from axonym.scalax.utils import get_float_dtype_by_name
    >>> get_float_dtype_by_name("bf16").dtype
    dtype(bfloat16)
    """
    return _FLOATS[dtype]


def float_tensor_to_dtype(tensor: Any, dtype: Any) -> Any:
    """Convert an array of floating-point numbers; everything else is returned as it is.

    Arguments:
        tensor: anything.
        dtype: the type or its name. None and the empty name convert nothing.

    >>> from axonym.scalax.utils import float_tensor_to_dtype
    >>> float_tensor_to_dtype(jnp.ones(2), "bf16").dtype.name, float_tensor_to_dtype(3, "bf16")
    ('bfloat16', 3)
    """
    if dtype is None or dtype == "" or getattr(tensor, "dtype", None) not in _FLOATS.values():
        return tensor
    return tensor.astype(get_float_dtype_by_name(dtype) if isinstance(dtype, str) else dtype)


def float_to_dtype(tree: Any, dtype: Any) -> Any:
    """Convert the arrays of floating-point numbers in a tree.

    Arguments:
        tree: any tree.
        dtype: the type or its name. None and the empty name convert nothing.

    >>> from axonym.scalax.utils import float_to_dtype
    >>> jax.tree.map(lambda x: x.dtype.name, float_to_dtype({"w": jnp.ones(2), "n": jnp.arange(2)}, "bf16"))
    {'n': 'int32', 'w': 'bfloat16'}
    """
    return jax.tree.map(lambda x: float_tensor_to_dtype(x, dtype), tree)


def tree_path_to_string(path: Sequence[Any], sep: str | None = None) -> Any:
    """The keys of a path as strings: a tuple of them, or one string with a separator between them.

    Arguments:
        path: a path, as JAX has it.
        sep: the separator.

    >>> from axonym.scalax.utils import tree_path_to_string
    >>> tree_path_to_string((jax.tree_util.DictKey("layers"), jax.tree_util.SequenceKey(0)), "/")
    'layers/0'
    """
    keys = tuple([jax.tree_util.keystr((key,), simple=True) for key in path])
    return keys if sep is None else sep.join(keys)


def flatten_tree(xs: Any, is_leaf: IsLeaf = None, sep: str | None = None) -> dict[Any, Any]:
    """The leaves of a tree by their paths.

    Arguments:
        xs: any tree.
        is_leaf: what else counts as a leaf.
        sep: what separates the keys of a path, which is a tuple of them without it.

    >>> from axonym.scalax.utils import flatten_tree
    >>> flatten_tree({"layers": [{"w": 1}]}, sep="/")
    {'layers/0/w': 1}
    """
    return {tree_path_to_string(path, sep): leaf for path, leaf in jax.tree.leaves_with_path(xs, is_leaf=is_leaf)}


def named_tree_map(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: IsLeaf = None, sep: str | None = None) -> Any:
    """Map a function of the path of a leaf and the leaf over a tree.

    Arguments:
        f: the function, of the path, the leaf, and the leaves of the other trees there.
        tree: any tree.
        *rest: more trees.
        is_leaf: what else counts as a leaf.
        sep: what separates the keys of a path, which is a tuple of them without it.

    >>> from axonym.scalax.utils import named_tree_map
    >>> named_tree_map(lambda path, x: f"{path}={x}", {"w": 1}, sep="/")
    {'w': 'w=1'}
    """
    return jax.tree.map_with_path(
        lambda path, *leaves: f(tree_path_to_string(path, sep), *leaves), tree, *rest, is_leaf=is_leaf
    )


def print_pytree_structure(tree: Any, sep: str | None = "/", is_leaf: IsLeaf = None) -> None:
    """Print the path, shape and type of every leaf.

    Arguments:
        tree: any tree.
        sep: what separates the keys of a path.
        is_leaf: what else counts as a leaf.

    >>> from axonym.scalax.utils import print_pytree_structure
    >>> print_pytree_structure({"w": jnp.ones(2), "n": 3})
    n: shape: none, dtype: none
    w: shape: (2,), dtype: float32
    """
    for path, x in flatten_tree(tree, is_leaf, sep).items():
        print(f"{path}: shape: {getattr(x, 'shape', 'none')}, dtype: {getattr(x, 'dtype', 'none')}")
