"""What users type: names, signatures, and one function behind each method."""

from __future__ import annotations

import importlib
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import axonym as axn
from tests.helpers import examples, exports, modules, public_name

pytestmark = pytest.mark.usefixtures("quick_compilation")

OPERATIONS: dict[str, dict[str, Callable[..., Any]]] = {}  # by the module that defines them
for module in modules():
    for name, fn in exports(module).items():
        if inspect.isfunction(fn):
            OPERATIONS.setdefault(fn.__module__, {})[name] = fn


# --- identity ---


@pytest.mark.parametrize("module", OPERATIONS)
def test_functions_keep_their_identity(module: str) -> None:
    """Also those that a factory made: they can be found, pickled, and shown in tracebacks and `help`."""
    for name, fn in OPERATIONS[module].items():
        assert name == fn.__name__ == fn.__qualname__
        assert getattr(importlib.import_module(module), name) is fn
        assert pickle.loads(pickle.dumps(fn)) is fn
        assert list(inspect.signature(fn).parameters) != ["args", "kwargs"], name


SIGNATURES: dict[str, str] = {
    "exp": "(a)",
    "add": "(a, b)",
    "round": "(a, decimals=0)",
    "around": "(a, decimals=0)",
    "divmod": "(a, b)",
    "nan_to_num": "(a, *, nan=0.0, posinf=None, neginf=None)",
    "astype": "(a, dtype)",
    "max": "(array, axis=None, *, where=None)",
    "all": "(array, axis=None, *, where=None)",
    "sum": "(array, axis=None, *, where=None, dtype=None)",
    "mean": "(array, axis=None, *, where=None, dtype=None)",
    "var": "(array, axis=None, *, where=None, ddof=0, dtype=None)",
    "nanstd": "(array, axis=None, *, where=None, ddof=0, dtype=None)",
    "argmax": "(array, axis=None)",
    "cumsum": "(a, axis, dtype=None)",
    "logsumexp": "(array, axis=None, *, where=None)",
    "named": "(a, axis)",
    "make_axes": "(**sizes)",
    "replace_axis": "(axis_spec, old, new)",
}


@pytest.mark.parametrize(("name", "expected"), SIGNATURES.items())
def test_signatures(name: str, expected: str) -> None:
    signature = inspect.signature(public_name(name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)) == expected


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_exports_exist_once(module: Any) -> None:
    names = list(getattr(module, "__all__", ()))
    assert len(names) == len(set(names))
    assert exports(module).keys() >= set(names)


# --- methods ---

METHODS = [
    name
    for name, method in vars(axn.NamedArray).items()
    if not name.startswith("_") and inspect.isfunction(method) and hasattr(axn, name)
]
# Methods that share the name of a function on axes, not on arrays.
OWN_METHODS = {"axis_size", "resolve_axis"}


def test_methods_are_the_functions() -> None:
    assert len(METHODS) > 30
    for name in METHODS:
        if name not in OWN_METHODS:
            assert getattr(axn.NamedArray, name) is getattr(axn, name), name


def test_properties() -> None:
    x = axn.named([1 + 2j], "a")
    assert x.real.tolist() == [1.0] and x.imag.tolist() == [2.0]


def test_annotations_can_be_read() -> None:
    for fn in OPERATIONS.values():
        inspect.signature(fn)
        assert examples(fn), fn


# --- names that code written for Haliax imports ---

# The functions at the top, by their parameters; `=` marks those with a default.
FUNCTIONS: dict[str, str] = {
    "a": "abs absolute angle arccos arccosh arcsin arcsinh arctan arctanh around bitwise_count bitwise_invert "
    "bitwise_not cbrt ceil conj conjugate copy cos cosh deg2rad degrees exp exp2 expm1 fabs fix floor "
    "frexp i0 imag iscomplex isfinite isinf isnan isneginf isposinf isreal log log10 log1p log2 "
    "logical_not ndim negative positive rad2deg radians real reciprocal rint rsqrt sign signbit sin sinc "
    "sinh sqrt square tan tanh trunc",
    "a, b": "add arctan2 array_equal array_equiv bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift "
    "bitwise_xor divide divmod equal float_power floor_divide fmax fmin fmod greater greater_equal hypot "
    "left_shift less less_equal logaddexp logaddexp2 logical_and logical_or logical_xor maximum minimum "
    "mod multiply nextafter not_equal power remainder right_shift subtract true_divide",
    "array, axis=, *, where=": "all amax amin any max min nanmax nanmin ptp",
    "a, b, rtol=, atol=, equal_nan=": "allclose isclose",
    "axis, *, start=, step=, dtype=": "arange",
    "": "are_shape_checks_enabled",
    "array, axis": "argmax argmin unbind",
    "ax": "axis_name axis_size",
    "x, Counts, *, weights=, minlength=": "bincount",
    "*arrays, require_subset=, ensure_order=": "broadcast_arrays",
    "a, axis": "broadcast_axis named sort",
    "a, axes, ensure_order=, enforce_no_extra_axes=": "broadcast_to",
    "array, a_min, a_max": "clip",
    "a1, a2": "concat_axes concat_axis_specs",
    "axis, arrays": "concatenate stack",
    "a, axis, dtype=": "cumprod nancumprod",
    "a, axis, *, dtype=": "cumsum nancumsum",
    "idx, size": "dblock",
    "start, length": "ds dslice",
    "equation, *arrays, precision=, preferred_element_type=, **axis_aliases": "einsum",
    "axis_spec, to_remove": "eliminate_axes",
    "enabled": "enable_shape_checks",
    "a, axis=, norm=": "fft hfft ifft ihfft irfft rfft",
    "axis, d=": "fftfreq rfftfreq",
    "x, axes=": "fftshift ifftshift",
    "array, new_axis_name": "flatten ravel",
    "ref": "freeze",
    "shape, fill_value, dtype=": "full",
    "a, fill_value, dtype=": "full_like",
    "ref, idx=": "get",
    "array, slices": "index",
    "leaf": "is_named_array",
    "**sizes": "make_axes",
    "array, axis=, *, where=, dtype=": "mean nanmean nanprod nansum prod product sum",
    "array, axis=": "nanargmax nanargmin",
    "array, axis=, *, where=, ddof=, dtype=": "nanstd nanvar std var",
    "value": "new_ref",
    "array, *, size, fill_value=": "nonzero",
    "shape, dtype=": "ones zeros",
    "a, dtype=": "ones_like zeros_like",
    "a, axis, *, bitorder=": "packbits",
    "array, pad_width, *, mode=, constant_values=, **kwargs": "pad",
    "array, axis, new_axis, value=": "pad_left",
    "seq_of_zeros": "poly",
    "p1, p2": "polyadd polydiv polymul polysub",
    "p, m=": "polyder",
    "x, y, deg, rcond=, full=, w=, cov=": "polyfit",
    "p, m=, k=": "polyint",
    "p, x": "polyval",
    "array, renames": "rename",
    "axis_spec, old, new": "replace_axis",
    "axis_spec, axis_selection": "resolve_axis",
    "array, shift, axis": "roll",
    "p": "roots",
    "a, decimals=": "round",
    "a, v, *, side=, sorter=, method=": "searchsorted",
    "selector, selected": "selects_axis",
    "a, axis, new_axes": "split",
    "ref, idx, value": "swap",
    "array, axis, index": "take",
    "arr, axis, k, new_axis=": "top_k",
    "array, axis1, axis2, offset=, dtype=": "trace",
    "array, axis1, axis2, k=": "tril triu",
    "f, trim=": "trim_zeros",
    "array, axis, new_axes": "unflatten_axis",
    "array, Unique, *, axis=, fill_value=": "unique_all unique_counts unique_inverse unique_values",
    "a, axis, *, count=, bitorder=": "unpackbits",
    "array, start, update": "updated_slice",
    "x, degree": "vander",
    "condition, x=, y=, fill_value=, new_axis=": "where",
}

OTHERS = """
Axis AxisSelection AxisSelector AxisSpec NamedArray NamedRef dot flatten_axes rearrange slice unique
"""

IN_AXIS = """
Axis AxisSelection AxisSelector AxisSpec PartialAxisSpec PartialShapeDict ShapeDict axis_name axis_spec_to_shape_dict
concat_axes concat_axis_specs eliminate_axes intersect_axes is_axis_compatible make_axes rearrange_for_partial_order
replace_axis resolve_axis selects_axis union_axes unsize_axes without_axes
"""

IN_NAMED_ARRAY = """
all any argmax argmin argsort array astype at axes axis_indices axis_size broadcast_axis broadcast_to clip conj
conjugate copy cumprod cumsum dot dtype flatten flatten_axes has_axis imag item max mean min nbytes ndim prod product
ptp ravel real rearrange rename resolve_axis round scalar shape size slice sort split std sum take tobytes tolist trace
unbind unflatten_axis updated_slice var
"""


@pytest.mark.parametrize(
    ("name", "parameters"), [(name, parameters) for parameters, names in FUNCTIONS.items() for name in names.split()]
)
def test_existing_calls_are_accepted(name: str, parameters: str) -> None:
    """Every parameter is there, under its name, in its place, and with a default where code relies on one."""
    expected = inspect.signature(eval(f"lambda {parameters.replace('=', '=None')}: None")).parameters
    found = inspect.signature(public_name(name)).parameters
    in_place = [n for n, p in expected.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(found)[: len(in_place)] == in_place
    for n, parameter in found.items():
        if n not in expected and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            assert parameter.default is not parameter.empty, f"{n} is new, and has no default"
    for n, parameter in expected.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            assert parameter.kind in [p.kind for p in found.values()]
        else:
            assert n in found and (parameter.default is parameter.empty or found[n].default is not parameter.empty)


def test_names_at_the_top() -> None:
    assert [name for name in OTHERS.split() if not hasattr(axn, name)] == []


def test_names_in_axis() -> None:
    assert [name for name in IN_AXIS.split() if not hasattr(axn.axis, name)] == []


def test_names_in_named_array() -> None:
    assert [name for name in IN_NAMED_ARRAY.split() if not hasattr(axn.NamedArray, name)] == []


def test_functions_are_not_hidden_by_modules() -> None:
    """`import axonym.poly.poly` leaves `axonym.poly.poly` the function that it is."""
    names = [m.__name__ for m in modules() if m.__name__.count(".") == 1]
    code = f"import axonym\nbefore = dict(vars(axonym))\nfor name in {names!r}: __import__(name)\n"
    code += "assert all(vars(axonym)[name] is value for name, value in before.items() if not name.startswith('_'))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_heavy_is_imported() -> None:
    """What only some users need is imported by what needs it."""
    code = "import sys, axonym; print([m for m in ('treescope', 'optax', 'scipy', 'matplotlib') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    plain = subprocess.run(
        [sys.executable, "-c", code.replace("axonym", "jax")], check=True, capture_output=True, text=True
    ).stdout
    assert loaded == plain
