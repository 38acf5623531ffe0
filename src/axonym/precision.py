"""Mixed precision: policies that give the dtypes of parameters, of computations and of results. May change before 1.0.

>>> policy = axn.precision.Policy.parse("params=float32,compute=bfloat16,output=float32")
>>> loss = axn.precision.mixed_precision(policy, lambda model, x: axn.dot(model["w"], x, axis="embed"))
>>> model = policy.cast_to_param({"w": axn.ones({"embed": 2, "mlp": 3})})
>>> loss(model, axn.ones({"embed": 2})).dtype
dtype('float32')

Only floating-point arrays are cast, named, raw and abstract ones. 8-bit floats, integers, booleans, random keys and
Python numbers do not change, nor does the state of quantized products (see `axonym.quantization.overwriting`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .core import errors
from .core.tree_spec import PROGRAM_ARRAYS
from .quantization.overwriting import OverwriteWithGradient

__all__ = ["Policy", "get_policy", "mixed_precision"]

T = TypeVar("T")

_SHORT = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "full": "float32"}
_PARTS = {"param": "params"} | {name: part for part in ("params", "compute", "output") for name in (part, part[0])}


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of a model's parameters, of its computations and of its results.

    >>> policy = axn.precision.Policy(jnp.float32, jnp.bfloat16, jnp.float32)
    >>> print(policy)
    params=float32,compute=bfloat16,output=float32
    """

    param_dtype: Any = jnp.float32
    compute_dtype: Any = jnp.float32
    output_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            dtype = _parsed_dtype(given, given) if isinstance(given, str) else jnp.dtype(given)
            if not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(f"precision: `{field.name}` must be a floating-point dtype, got {dtype}.")
            object.__setattr__(self, field.name, dtype)

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Parse a policy from a string such as "params=float32,compute=bfloat16,output=float32".

        The parts can be written `p`, `c` and `o`, the dtypes `f32`, `bf16`, `f16`, `full` and `half`, which is bfloat16
        on TPU and float16 elsewhere. By default, `params` is float32, `compute` is `params`, and `output` is `compute`.
        A single dtype stands for all three.

        >>> print(axn.precision.Policy.parse("c=bf16"))
        params=float32,compute=bfloat16,output=bfloat16
        """
        if "=" not in text:
            return cls(*(_parsed_dtype(text, text),) * 3)
        given: dict[str, Any] = {}
        for part in text.split(","):
            key, equals, value = (s.strip() for s in part.partition("="))
            if key not in _PARTS or not equals:
                raise ValueError(
                    f"precision: no part {part.strip()!r} in {text!r}; the parts are params=, compute= and output=."
                    + errors.suggestion(key, ("params", "compute", "output"))
                )
            if _PARTS[key] in given:
                raise ValueError(f"precision: {_PARTS[key]!r} is given twice in {text!r}.")
            given[_PARTS[key]] = _parsed_dtype(value, text)
        return get_policy(**given)

    def cast_to_param(self, tree: T) -> T:
        """Cast the floating-point arrays of a tree to the dtype of parameters.

        >>> axn.precision.Policy.parse("p=bf16").cast_to_param(axn.ones({"x": 2})).dtype
        dtype(bfloat16)
        """
        return _cast_tree(tree, self.param_dtype)

    def cast_to_compute(self, tree: T) -> T:
        """Cast the floating-point arrays of a tree to the dtype to compute in.

        >>> policy = axn.precision.Policy.parse("c=bf16")
        >>> [x.dtype for x in policy.cast_to_compute([axn.ones({"x": 2}), axn.arange(axn.Axis("x", 2))])]
        [dtype(bfloat16), dtype('int32')]
        """
        return _cast_tree(tree, self.compute_dtype)

    def cast_to_output(self, tree: T) -> T:
        """Cast the floating-point arrays of a tree to the dtype of results.

        >>> axn.precision.Policy.parse("c=bf16,o=f32").cast_to_output(axn.ones({"x": 2}, jnp.bfloat16)).dtype
        dtype('float32')
        """
        return _cast_tree(tree, self.output_dtype)

    def __str__(self) -> str:
        return f"params={self.param_dtype},compute={self.compute_dtype},output={self.output_dtype}"


def get_policy(
    policy: str | Policy | None = None,
    *,
    params: DTypeLike | None = None,
    compute: DTypeLike | None = None,
    output: DTypeLike | None = None,
) -> Policy:
    """Make a policy from a string, from keywords with the same defaults, or from both; keywords override the string.

    >>> print(axn.precision.get_policy(compute=jnp.bfloat16, output="float32"))
    params=float32,compute=bfloat16,output=float32
    """
    dtypes = {"param_dtype": params, "compute_dtype": compute, "output_dtype": output}
    given: dict[str, Any] = {name: dtype for name, dtype in dtypes.items() if dtype is not None}
    if policy is not None:
        return dataclasses.replace(Policy.parse(policy) if isinstance(policy, str) else policy, **given)
    stored = given.get("param_dtype", jnp.float32)
    computed = given.get("compute_dtype", stored)
    return Policy(stored, computed, given.get("output_dtype", computed))


def mixed_precision(policy: str | Policy, fn: Callable[..., Any] | None = None) -> Any:
    """Cast the arguments of a function to the compute dtype of a policy, and its results to the output dtype.

    The function can be a method: a model's `__call__` then casts the model too. To compile the result, put
    `axonym.named_jit` around it. Gradients with respect to the arguments have the dtypes of the arguments. Without a
    function, this is a decorator.

    >>> @axn.named_jit
    ... @axn.precision.mixed_precision("params=float32,compute=bfloat16,output=float32")
    ... def forward(w, x):
    ...     return axn.dot(w, x, axis="embed")
    >>> forward(axn.ones({"embed": 2, "mlp": 3}), axn.ones({"embed": 2})).dtype
    dtype('float32')
    """
    known = get_policy(policy)
    if fn is None:
        return functools.partial(mixed_precision, known)

    @functools.wraps(fn)
    def cast(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = known.cast_to_compute((args, kwargs))
        return known.cast_to_output(fn(*args, **kwargs))

    return cast


# --- dtypes and casting ---


def _parsed_dtype(name: str, text: str) -> Any:
    if name == "half":  # only then is JAX's backend started
        return jnp.dtype("bfloat16" if jax.default_backend() == "tpu" else "float16")
    try:
        return jnp.dtype(_SHORT.get(name, name))
    except (TypeError, ValueError, SyntaxError):  # NumPy evaluates parts of a name
        known = (*_SHORT.values(), *_SHORT, "half")
        raise ValueError(f"precision: no dtype {name!r}, in {text!r}.{errors.suggestion(name, known)}") from None


def _cast_tree(tree: Any, dtype: np.dtype) -> Any:
    def cast(x: Any) -> Any:
        if not isinstance(x, PROGRAM_ARRAYS) or x.dtype == dtype or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        if x.dtype.itemsize == 1:  # stored in few bits, with a scale that is cast
            return x
        return x.update(dtype=dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.astype(dtype)

    return jax.tree.map(cast, tree, is_leaf=lambda x: isinstance(x, OverwriteWithGradient))
