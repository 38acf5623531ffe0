"""Activation functions.

They have the names of the functions in `jax.nn`, and are elementwise, except for `glu`. They take named arrays, raw
arrays, numbers and trees of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ..axis import AxisSelector, Names
from ..core import errors
from ..core.jax_versions import varying_axes
from ..named_array import NamedArray
from ..ops import _kernels
from ..ops._op_types import F, is_tree, map_tree, publish, unary
from ..ops._operands import as_float, require_named, scalar
from ..ops.elementwise import elementwise_kernel

A = TypeVar("A")


def _apply_activation(fn: Callable[..., Any], name: str, a: Any, *scalars: Any, **options: Any) -> Any:
    if isinstance(a, NamedArray):
        in_names = (a.names, *[()] * len(scalars))
        return elementwise_kernel(fn, name, in_names, False, 1, *options.items()).apply(a.array, *scalars)
    if is_tree(a):
        return map_tree(lambda leaf: _apply_activation(fn, name, leaf, *scalars, **options), a)
    return fn(a, *scalars, **options)


def _make_activation(like: F, name: str, fn: Callable[..., Any], summary: str, shown: str, parameter: str = "a") -> F:
    def op(a: Any) -> Any:
        return _apply_activation(fn, name, a)

    def op_of_x(x: Any) -> Any:
        return _apply_activation(fn, name, x)

    doc = f"""{summary}

    Arguments:
        {parameter}: a named array, a scalar, a raw array, or a tree of them.

    >>> axn.nn.{name}(axn.named([-1., 2.], "x"))
    NamedArray(float32[x=2], [{shown}])
    """
    return publish(op if parameter == "a" else op_of_x, name, __name__, doc)


def _in_floats(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Wrap a positional function that fails for integers, or is wrong for small or unsigned ones."""
    return lambda x: fn(as_float(jnp.asarray(x)))


def _hard_tanh(x: Any) -> jax.Array:
    if jnp.issubdtype(jnp.result_type(x), jnp.unsignedinteger):  # in which -1 is the largest number
        return jnp.minimum(x, 1)
    return jax.nn.hard_tanh(x)


# --- the table: name, positional function, summary, results for -1 and 2 ---

# fmt: off
hard_sigmoid = _make_activation(unary, "hard_sigmoid", jax.nn.hard_sigmoid, "Compute the piecewise linear sigmoid: relu6(x + 3) / 6.", "0.3333 0.8333")
hard_silu = _make_activation(unary, "hard_silu", jax.nn.hard_silu, "Multiply each element by its hard sigmoid.", "-0.3333 1.6667")
hard_tanh = _make_activation(unary, "hard_tanh", _hard_tanh, "Clamp each element to the range from -1 to 1.", "-1. 1.")
log_sigmoid = _make_activation(unary, "log_sigmoid", _in_floats(jax.nn.log_sigmoid), "Compute the logarithm of the sigmoid.", "-1.3133 -0.1269")
mish = _make_activation(unary, "mish", _in_floats(jax.nn.mish), "Multiply each element by the tanh of its softplus.", "-0.3034 1.944 ")
quick_gelu = _make_activation(unary, "quick_gelu", lambda x: x * jax.nn.sigmoid(1.702 * x), "Approximate GELU with a sigmoid: x * sigmoid(1.702 x).", "-0.1542 1.9357", "x")
relu = _make_activation(unary, "relu", jax.nn.relu, "Replace negative elements by zero: max(x, 0).", "0. 2.")
relu6 = _make_activation(unary, "relu6", jax.nn.relu6, "Clamp each element to the range from 0 to 6.", "0. 2.")
relu_squared = _make_activation(unary, "relu_squared", _in_floats(lambda x: jnp.square(jax.nn.relu(x))), "Compute the square of `relu`.", "0. 4.", "x")
selu = _make_activation(unary, "selu", jax.nn.selu, "Compute the scaled exponential linear unit, which keeps the mean and variance of its input.", "-1.1113 2.1014")
sigmoid = _make_activation(unary, "sigmoid", _in_floats(jax.nn.sigmoid), "Compute the logistic function: 1 / (1 + exp(-x)).", "0.2689 0.8808")
silu = _make_activation(unary, "silu", _in_floats(jax.nn.silu), "Multiply each element by its sigmoid.", "-0.2689 1.7616")
soft_sign = _make_activation(unary, "soft_sign", _in_floats(jax.nn.soft_sign), "Divide each element by one plus its absolute value.", "-0.5 0.6667")
softplus = _make_activation(unary, "softplus", jax.nn.softplus, "Compute a smooth relu: log(1 + exp(x)).", "0.3133 2.1269")
squareplus = _make_activation(unary, "squareplus", _in_floats(jax.nn.squareplus), "Compute a smooth relu without exp: (x + sqrt(x * x + 4)) / 2.", "0.618 2.4142")
# fmt: on


# --- activations with options ---


def celu(a: A, alpha: float = 1.0) -> A:
    """Replace negative elements by alpha * (exp(x / alpha) - 1), which tends to minus `alpha`.

    >>> axn.nn.celu(axn.named([-1., 2.], "x"))
    NamedArray(float32[x=2], [-0.6321 2. ])
    """
    return _apply_activation(jax.nn.celu, "celu", a, scalar("celu", "alpha", alpha))


def elu(a: A, alpha: float = 1.0) -> A:
    """Replace negative elements by alpha * (exp(x) - 1), which tends to minus `alpha`.

    >>> axn.nn.elu(axn.named([-1., 2.], "x"))
    NamedArray(float32[x=2], [-0.6321 2. ])
    """
    return _apply_activation(jax.nn.elu, "elu", a, scalar("elu", "alpha", alpha))


def leaky_relu(a: A, negative_slope: float = 0.01) -> A:
    """Multiply negative elements by a small slope.

    >>> axn.nn.leaky_relu(axn.named([-1., 2.], "x"))
    NamedArray(float32[x=2], [-0.01 2. ])
    """
    return _apply_activation(jax.nn.leaky_relu, "leaky_relu", a, scalar("leaky_relu", "negative_slope", negative_slope))


def gelu(a: A, approximate: bool = True) -> A:
    """Multiply each element by the probability that a standard normal variable is below it.

    Arguments:
        approximate: whether to approximate that probability with a hyperbolic tangent, as in GPT-2.

    >>> axn.nn.gelu(axn.named([-1., 2.], "x")), axn.nn.gelu(axn.named([-1., 2.], "x"), approximate=False)
    (NamedArray(float32[x=2], [-0.1588 1.9546]), NamedArray(float32[x=2], [-0.1587 1.9545]))
    """
    return _apply_activation(_gelu, "gelu", a, approximate=approximate)


def _gelu(x: Any, approximate: bool) -> jax.Array:
    if approximate or not varying_axes(x):
        return jax.nn.gelu(x, approximate)
    x = as_float(jnp.asarray(x))
    return 0.5 * x * _erfc(-x * np.sqrt(0.5).astype(x.dtype))


@jax.custom_jvp
def _erfc(x: jax.Array) -> jax.Array:
    """Compute the complementary error function, with a gradient that also works inside `shard_map` on jax 0.12.

    There, JAX's evaluates a polynomial of a device-varying value, which it refuses.
    """
    return jax.lax.erfc(x)


@_erfc.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (change,) = primals, tangents
    return _erfc(x), change * jnp.exp(-x * x) * np.array(-2 / np.sqrt(np.pi), x.dtype)


# --- not elementwise ---


def glu(x: NamedArray, axis: AxisSelector) -> NamedArray:
    """Multiply the first half of an axis by the sigmoid of the second half.

    Arguments:
        axis: the axis, of even size; in the result it is half as long.

    >>> axn.nn.glu(axn.named([1., 2., 0., 0.], "x"), "x")
    NamedArray(float32[x=2], [0.5 1. ])
    """
    return _glu_kernel(require_named("glu", x).names, _kernels.one_selector("glu", axis)).apply(x.array)


@_kernels.shared("names", "axis")
def _glu_kernel(names: Names, axis: AxisSelector) -> _kernels.Kernel:
    position = names.index(_kernels.select_one("glu", names, axis))

    def positional(a):
        if a.shape[position] % 2:
            described = errors.describe_axes(names, a.shape)
            raise ValueError(
                f"glu: axis {names[position]!r} of {described} must have an even size, to be divided into halves."
            )
        return jax.nn.glu(as_float(a), position)

    return _kernels.make_kernel("glu", positional, (names,), names, selection=axis)
