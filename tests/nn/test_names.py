"""The names and parameters that code written for Haliax uses."""

from __future__ import annotations

import inspect
import operator

import pytest

import axonym as axn
import axonym.quantization
import axonym.state_dict

# What is called, by its parameters; `=` marks those with a default.
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
quantization.OverwriteWithGradient quantization.T state_dict.StateDict
"""


@pytest.mark.parametrize(("parameters", "names"), CALLS.items(), ids=[names.split()[0] for names in CALLS.values()])
def test_existing_calls_are_accepted(parameters: str, names: str) -> None:
    """Every parameter is there, under its name, in its place, and with a default where code relies on one."""
    expected = inspect.signature(eval(f"lambda {parameters.replace('=', '=None')}: None")).parameters.values()
    for name in names.split():
        found = inspect.signature(operator.attrgetter(name)(axn)).parameters
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
        operator.attrgetter(name)(axn)
