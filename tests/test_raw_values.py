"""Values without names where a named array is expected: errors name the argument and the way out."""

from __future__ import annotations

import ast
import inspect
import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import axonym as axn
from axonym import nn
from axonym.nn.attention import dot_product_attention
from tests.helpers import examples, exports, modules

VALUES = {"raw": np.ones((2, 3), "float32"), "str": "causal", "None": None, "list": [1.0, 2.0], "dict": {"a": 1}}
CALLING = "cond fori_loop scan fold switch while_loop associative_scan map".split()
"""Functions that pass the values on to a function of the user, whose errors are its own."""


def functions() -> dict[str, Any]:
    """Return the public functions that have an example, each once."""
    found: dict[int, Any] = {}
    for module in modules(native=True):
        for name, function in exports(module).items():
            if callable(function) and not inspect.isclass(function) and name not in CALLING and examples(function):
                found.setdefault(id(function), (f"{module.__name__}.{name}", function))
    return dict(found.values())


def call_in_example(name: str, function: Any) -> tuple[list[Any], dict[str, Any], list[Any]]:
    """Return the arguments of the first call in the example of a function, and those that are named arrays."""
    known: dict[str, Any] = {"axn": axn, "jax": jax, "jnp": jnp, "np": np}

    def value(node: ast.expr) -> Any:
        return eval(compile(ast.Expression(node), name, "eval"), known)

    for example in examples(function):
        tree = ast.parse(example.source)
        for node in ast.walk(tree):
            starred = isinstance(node, ast.Call) and any(isinstance(a, ast.Starred) for a in node.args)
            if isinstance(node, ast.Call) and not starred and ast.unparse(node.func).split(".")[-1] == name:
                try:
                    args = [value(a) for a in node.args]
                    kwargs = {k.arg: value(k.value) for k in node.keywords if k.arg is not None}
                except NameError:  # of a comprehension
                    continue
                places: list[Any] = [i for i, a in enumerate(args) if isinstance(a, axn.NamedArray)]
                if not places:
                    continue
                parameters = list(inspect.signature(function).parameters.values())
                more = [p.name for p in parameters[len(args) :] if "NamedArray" in str(p.annotation)]
                return args, kwargs, [*places, *more]
        if not isinstance(tree.body[-1], ast.Expr):
            exec(compile(tree, name, "exec"), known)
    return [], {}, []


FUNCTIONS = functions()


@pytest.mark.parametrize("part", range(8))
def test_other_values_in_place_of_a_named_array(part: int) -> None:
    """Each named array in the call of an example, and each optional one, is replaced by each of the other values."""
    tried = 0
    for name in [*FUNCTIONS][part::8]:
        function = FUNCTIONS[name]
        given = call_in_example(name.rpartition(".")[2], function)
        for place, value in itertools.product(given[2], VALUES.values()):
            args: Any = [*given[0]]
            kwargs: Any = dict(given[1])
            (args if isinstance(place, int) else kwargs)[place] = value
            tried += 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    function(*args, **kwargs)
                except (TypeError, ValueError) as e:
                    assert len(str(e)) > 15 and "has no attribute" not in str(e), f"{name}: {place}, {value!r}"
                except Exception as e:
                    raise AssertionError(f"{name}: {place}, {value!r}") from e
    assert tried > 50


RAW: Any = np.ones((4, 4), "float32")
Q: Any = axn.ones({"batch": 2, "pos": 4, "head_size": 8})
K = Q.rename({"pos": "key_pos"})
LOGITS: Any = axn.ones({"batch": 2, "vocab": 5})
LABELS: Any = axn.zeros({"batch": 2}, "int32")


def attend(**options: Any) -> Any:
    return dot_product_attention(Q, K, K, "key_pos", "head_size", **options)


def model() -> Any:
    return nn.Linear.init({"head_size": 8}, {"out": 3}, key=jax.random.key(0))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: attend(mask=RAW), ["`mask`", "ndarray", "axonym.named(mask, ('pos', 'key_pos'))"]),
        (lambda: attend(bias=RAW), ["`bias`", "ndarray", "axonym.named(array, axes)"]),
        (lambda: attend(mask="causal"), ["`mask`", "Causal('pos')"]),
        (lambda: attend(mask=True), ["`mask`", "Causal('pos')"]),
        (lambda: attend(is_causal=True), ["is_causal", "mask=axonym.nn.attention.Causal('pos')"]),
        (lambda: attend(attn_mask=LOGITS), ["attn_mask", "`mask`"]),
        (lambda: axn.concatenate([LOGITS, RAW], "batch"), ["`arrays[1]`", "ndarray", "axonym.named"]),
        (lambda: axn.stack([LOGITS, RAW], axn.Axis("n", 2)), ["`arrays[1]`", "ndarray", "axonym.named"]),
        (lambda: axn.updated_slice(RAW, {"x": 0}, LABELS), ["`array`", "ndarray"]),
        (lambda: jax.jit(model())(Q), ["axonym.named_jit(model)", "equinox.filter_jit(model)"]),
        (lambda: axn.make_axes("a", "b"), ["make_axes(a=8, b=8)"]),  # pyright: ignore[reportArgumentType]
        (lambda: axn.make_mesh({"data": 64}), ["there are 8", "jax.config.update('jax_num_cpu_devices', 64)"]),
        (lambda: optax.softmax_cross_entropy_with_integer_labels(LOGITS, LABELS), ["axonym.nn.cross_entropy_loss"]),
        (lambda: optax.softmax_cross_entropy(LOGITS, LOGITS), ["axonym.nn.cross_entropy_loss"]),
        (lambda: nn.Conv.init("h", {"c": 3, "d": 2}, {"f": 4}, 3, key=jax.random.key(0)), ["`In`", "one axis"]),
    ],
)  # fmt: skip
def test_the_way_out(call: Any, words: list[str]) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    for word in words:
        assert word in str(raised.value)


def test_layers_with_single_axes_take_dictionaries() -> None:
    conv = nn.Conv.init(("h",), {"c": 3}, {"f": 4}, 3, key=jax.random.key(0))
    assert conv.weight.shape == {"f": 4, "c": 3, "h": 3}
    experts = nn.MoELinear.init({"experts": 2}, {"c": 3}, {"f": 4}, key=jax.random.key(0))
    assert experts.weight.shape == {"experts": 2, "c": 3, "f": 4}


def test_a_module_is_named_by_its_type(auto_mesh: jax.sharding.Mesh) -> None:
    """And not by all that it holds."""
    with axn.set_mesh(auto_mesh), pytest.warns(UserWarning) as warned:
        run: Any = axn.named_jit(model(), {"head_siz": "data"})
        run(Q)
    (message,) = [str(w.message) for w in warned]
    assert message.startswith("named_jit(Linear): ") and "Did you mean 'head_size'?" in message
