"""The names and parameters that code written for Haliax uses."""

from __future__ import annotations

import inspect
import operator

import pytest

import axonym.haliax as hax

# Methods and functions by their parameters; `=` marks those with a default.
CALLS: dict[str, str] = {
    "blocks, Block, gradient_checkpointing": "nn.BlockSeq",
    "stacked, Block, gradient_checkpointing": "nn.Stacked",
    "Block, module, *, gradient_checkpointing=, prevent_cse=": "nn.BlockSeq.init nn.Stacked.init",
    "init, *args, unroll=, **kwargs": "nn.BlockSeq.fold nn.BlockSeq.scan nn.Stacked.fold nn.Stacked.scan",
    "fn, *, unroll=": "nn.BlockSeq.fold_via nn.BlockSeq.scan_via nn.Stacked.fold_via nn.Stacked.scan_via",
    "fn": "nn.BlockSeq.vmap_via nn.Stacked.vmap_via",
    "*args, **kwargs": "nn.Stacked.vmap",
    "index": "nn.BlockSeq.get_layer nn.Stacked.get_layer",
    "": "nn.BlockSeq.unstacked nn.Linear.flatten_for_export nn.Stacked.unstacked nn.mup.ReparamEnabled "
    "quantization.DefaultDotGeneralOp.init quantization.DotGeneralOp.default quantization.Int8DotGeneralOp.init "
    "state_dict.ModuleWithStateDictSerialization.flatten_for_export",
    "template": "nn.Linear.unflatten_from_export state_dict.ModuleWithStateDictSerialization.unflatten_from_export",
    "state_dict, prefix=": "nn.BlockSeq.from_state_dict nn.Linear.from_state_dict nn.Stacked.from_state_dict "
    "state_dict.ModuleWithStateDictSerialization.from_state_dict",
    "prefix=": "nn.BlockSeq.to_state_dict nn.Linear.to_state_dict nn.Stacked.to_state_dict "
    "quantization.Int8DotGeneralOp.to_state_dict state_dict.ModuleWithStateDictSerialization.to_state_dict",
    "Spatial, In, Out, weight, bias, kernel_size, stride, padding, dilation, groups": "nn.Conv",
    "Spatial, In, Out, weight, bias, kernel_size, stride, padding, output_padding, dilation, groups": "nn."
    "ConvTranspose",
    "Spatial, In, Out, kernel_size, *, stride=, padding=, dilation=, groups=, use_bias=, key": "nn.Conv.init",
    "Spatial, In, Out, kernel_size, *, stride=, padding=, output_padding=, dilation=, groups=, use_bias=, key": "nn."
    "ConvTranspose.init",
    "inputs, *, key=": "nn.Conv.__call__ nn.ConvTranspose.__call__ nn.Linear.__call__",
    "pdrop=, broadcast_axes=, inference=": "nn.Dropout",
    "x, *, inference=, key=": "nn.Dropout.__call__",
    "x, pdrop, broadcast_axes=, *, inference, key=": "nn.dropout",
    "weight, Vocab, Embed, _reparam_cls=": "nn.Embedding",
    "Vocab, Embed, *, init_scale=, key, initializer_range=, reparam_cls=": "nn.Embedding.init",
    "input_ids, *, key=": "nn.Embedding.__call__",
    "input_ids": "nn.Embedding.embed",
    "input_embeds": "nn.Embedding.unembed",
    "new_size, key=": "nn.Embedding.resize_embeddings",
    "axis, weight, bias, eps=, dtype=": "nn.LayerNorm nn.RmsNorm",
    "axis, eps=, *, use_weight=, use_bias=, dtype=": "nn.LayerNorm.init nn.RmsNorm.init",
    "x": "nn.LayerNorm.__call__ nn.RmsNorm.__call__ nn.quick_gelu nn.relu_squared",
    "weight, bias, In, Out, dot_general=, _reparam_cls=": "nn.Linear",
    "In, Out, *, key, use_bias=, out_first=, dot_general=, init_scale=, reparam_cls=": "nn.Linear.init",
    "use_mup=": "nn.Linear.input_reparam nn.Linear.hidden_reparam nn.Linear.output_reparam",
    "activation, layers": "nn.MLP",
    "Input, Output, width, depth, activation=, *, out_first=, use_bias=, use_final_bias=, key, dot_general=, "
    "init_scale=": "nn.MLP.init",
    "x, *, key=": "nn.MLP.__call__",
    "weight, bias, Experts, In, Out, use_gmm": "nn.MoELinear",
    "Experts, In, Out, *, key, use_bias=, out_first=, init_scale=, use_gmm=": "nn.MoELinear.init",
    "inputs, group_sizes, *, key=": "nn.MoELinear.__call__",
    "a": "nn.celu nn.elu nn.hard_sigmoid nn.hard_silu nn.hard_swish nn.hard_tanh nn.leaky_relu nn.log_sigmoid nn.relu "
    "nn.relu6 nn.selu nn.sigmoid nn.silu nn.soft_sign nn.softplus nn.swish",
    "a, approximate=": "nn.gelu",
    "x, axis": "nn.glu",
    "a, axis=": "nn.log_softmax nn.logsumexp nn.softmax",
    "x, axis, *, mean=, variance=, epsilon=, where=": "nn.standardize",
    "x, class_axis, *, dtype=": "nn.one_hot",
    "logits, targets, reduction=, where=, reduction_axis=": "nn.binary_cross_entropy_loss",
    "logits, Label, targets, reduction=, where=, reduction_axis=": "nn.cross_entropy_loss",
    "pred_y, Label, target_y": "nn.cross_entropy_loss_and_log_normalizers",
    "arr, reduction=, reduction_axis=, where=": "nn.reduce_loss",
    "arr, reduction, reduction_axis, where": "nn.loss.maybe_reduce_loss",
    "Window, inputs, stride=, padding=, use_ceil=": "nn.max_pool nn.min_pool",
    "Window, inputs, stride=, padding=, *, use_ceil=, count_include_pad=": "nn.mean_pool",
    "Window, inputs, init, reduce_fn, stride=, padding=, use_ceil=": "nn.pool.pool",
    "Heads, KPos, bias_max=, dtype=": "nn.attention.alibi_attention_bias",
    "QPos, KPos, q_start=, k_start=": "nn.attention.causal_mask",
    "QSeqLen, KSeqLen, prefix_len, q_start=, k_start=": "nn.attention.prefix_lm_mask",
    "mask1, mask2": "nn.attention.combine_masks_and nn.attention.combine_masks_or",
    "KPos, Key, query, key, value, mask=, bias=, attention_dtype=, precision=": "nn.attention.dot_product_attention",
    "Key, KPos, query, key, mask=, bias=, attention_dtype=, precision=, scaling_factor=": "nn.attention."
    "dot_product_attention_weights",
    "axes, dropout_rate, *, key": "nn.attention.dropout_mask",
    "KPos, mask_prob, sample_prob=, *, key": "nn.attention.forgetful_causal_mask",
    "mask, mask_value=": "nn.attention.mask_to_bias",
    "In, Out": "nn.mup.AbstractReparam.init_scale nn.mup.LinearStandardParam nn.mup.InputLinearMup "
    "nn.mup.HiddenLinearMup nn.mup.OutputLinearMup",
    "Embed, Vocab": "nn.mup.EmbeddingMup nn.mup.EmbeddingStandardParam",
    "t": "state_dict.flatten_modules_for_export",
    "t, template": "state_dict.unflatten_modules_from_export",
    "tree, state_dict, prefix=": "state_dict.from_state_dict",
    "tree, prefix=": "state_dict.to_state_dict",
    "t, state_dict, *, unflatten=, prefix=": "state_dict.from_torch_compatible_state_dict",
    "t, *, flatten=, prefix=, filter=": "state_dict.to_torch_compatible_state_dict",
    "model, prefix=": "state_dict.to_numpy_state_dict",
    "path": "state_dict.load_state_dict",
    "state_dict, path": "state_dict.save_state_dict",
    "prefix, leaf": "state_dict.with_prefix",
    "lhs, rhs, dimension_numbers, precision=, preferred_element_type=": "quantization.DefaultDotGeneralOp.__call__ "
    "quantization.DotGeneralOp.__call__ quantization.Fp8DotGeneralOp.__call__ quantization.Int8DotGeneralOp.__call__ "
    "quantization.dot_general_with_precision",
    "amax_history_length=, compute_dtype=": "quantization.Fp8DotGeneralOp.init",
    "compute_dtype, inp, scale, amax_history": "quantization.in_qdq",
    "compute_dtype, out, scale, amax_history": "quantization.out_qdq",
    "targets=, amax_history_length=, compute_dtype=, fp8=, int8=": "quantization.QuantizationConfig",
    "tree, updates, overwrites": "quantization.apply_updates",
    "grad": "quantization.partition_for_grad_overwrite",
    "tree, config": "quantization.quantize_linear_layers",
}

OTHERS = """
nn.Dropout.is_active nn.Embedding.reparam nn.Linear.reparam nn.MLP.In nn.MLP.Out nn.MoELinear.out_first
nn.ScanCheckpointPolicy nn.Stacked.Layers nn.loss.UNSPECIFIED nn.loss.Unspecified
nn.mup.AbstractEmbeddingReparam.unembed_active_scale nn.mup.AbstractLinearReparam nn.mup.AbstractReparam.active_scale
nn.mup.AbstractReparam.lr_scale nn.scan.BlockFoldable nn.scan.CarryT nn.scan.FoldFunction nn.scan.M nn.scan.M_co
nn.scan.M_contra nn.scan.ModuleInit nn.scan.OutputT_co nn.scan.P nn.scan.S nn.scan.ScanFunction nn.scan.VmapFunction
quantization.OverwriteWithGradient state_dict.StateDict
"""


@pytest.mark.parametrize(("parameters", "names"), CALLS.items(), ids=[names.split()[0] for names in CALLS.values()])
def test_existing_calls_are_accepted(parameters: str, names: str) -> None:
    """Every parameter is there, under its name, in its place, and with a default where code relies on one."""
    expected = inspect.signature(eval(f"lambda {parameters.replace('=', '=None')}: None")).parameters.values()
    for name in names.split():
        found = inspect.signature(operator.attrgetter(name)(hax)).parameters
        own = [p for n, p in found.items() if n not in ("self", "cls")]
        for place, parameter in enumerate(expected):
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                assert own[place].name == parameter.name and own[place].kind is parameter.kind, name
            elif parameter.kind is parameter.KEYWORD_ONLY:
                assert parameter.name in found, name
            else:
                assert parameter.kind in [p.kind for p in own], name
        needed = {p.name for p in expected if p.default is p.empty}
        assert {p.name for p in own if p.default is p.empty} <= needed, name


def test_names() -> None:
    for name in OTHERS.split():
        operator.attrgetter(name)(hax)


# --- at the top ---

# The functions at the top, by their parameters; `=` marks those with a default.
AT_THE_TOP: dict[str, str] = {
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
    "equation, *arrays, precision=, preferred_element_type=, _dot_general=, **axis_aliases": "einsum",
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

CLASSES_AT_THE_TOP = """
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
    ("name", "parameters"), [(name, parameters) for parameters, names in AT_THE_TOP.items() for name in names.split()]
)
def test_existing_calls_at_the_top_are_accepted(name: str, parameters: str) -> None:
    """Every parameter is there, under its name, in its place, and with a default where code relies on one."""
    expected = inspect.signature(eval(f"lambda {parameters.replace('=', '=None')}: None")).parameters
    found = inspect.signature(getattr(hax, name)).parameters
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
    assert [name for name in CLASSES_AT_THE_TOP.split() if not hasattr(hax, name)] == []


def test_names_in_axis() -> None:
    assert [name for name in IN_AXIS.split() if not hasattr(hax.axis, name)] == []


def test_names_in_named_array() -> None:
    assert [name for name in IN_NAMED_ARRAY.split() if not hasattr(hax.NamedArray, name)] == []
