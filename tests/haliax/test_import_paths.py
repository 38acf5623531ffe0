"""The imports of code written for Haliax work once `haliax` is changed to `axonym.haliax`, for each module."""

from __future__ import annotations

import importlib
import inspect
import pickle
import subprocess
import sys
from typing import Any

import pytest

import axonym.haliax as hax

# The public names of Haliax 1.4 in each module: those in its `__all__` or defined there, and the types of arguments
# that code imports from it. Left out are:
# - names that a module imports only for its own use, such as `Axis` in `haliax.ops`, and type variables;
# - internal helpers whose names do not begin with an underscore: `index_where`, `axis_spec_to_tuple`,
#   `replace_missing_with_ellipsis`, `to_jax_shape` outside of `jax_utils`, `check_shape`, `raw_array_or_scalar`,
#   `broadcast_arrays_and_return_axes`, `compile_cache`, `maybe_untuple`, `safe_wraps`, `safe_update_wrapper`, and the
#   classes `NamedArrayMeta`, `DTypeCategory` and `WrappedCallable`;
# - the functions of `wrap`, with which Haliax turns positional functions into operations: `lift` does that here;
# - `nn.linear.gmm_sharded`, a Pallas kernel for raw arrays: `MoELinear` has it with `use_gmm=True`;
# - `poly.vander`, which is `hax.vander`, and the constant `DEFAULT_PADDING`;
# - everything in `haliax._src`.
PATHS: dict[str, str] = {
    "axonym.haliax": """
        abs absolute add all allclose amax amin angle any arange arccos arccosh arcsin arcsinh arctan arctan2 arctanh
        are_shape_checks_enabled argmax argmin argsort around array_equal array_equiv auto_sharded Axis axis
        axis_mapping axis_name axis_size AxisSelection AxisSelector AxisSpec bincount bitwise_and bitwise_count
        bitwise_invert bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor broadcast_arrays
        broadcast_axis broadcast_to cbrt ceil clip concat_axes concat_axis_specs concatenate conj conjugate copy core
        cos cosh cumprod cumsum dblock debug deg2rad degrees divide divmod dot ds dslice einsum eliminate_axes
        enable_shape_checks equal exp exp2 expm1 fabs fft fftfreq fftshift field fix flatten flatten_axes float_power
        floor floor_divide fmax fmin fmod fold freeze frexp fsdp full full_like geomspace get greater greater_equal
        haxtyping hfft hof hypot i0 ifft ifftshift ihfft imag index invert irfft is_named_array isclose iscomplex
        isfinite isinf isnan isneginf isposinf isreal jax_utils left_shift less less_equal linspace log log10 log1p
        log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logspace make_axes map max maximum
        mean min minimum mod multiply Named named named_jit NamedArray NamedArrayAxes NamedArrayAxesSpec NamedRef
        nanargmax nanargmin nancumprod nancumsum nanmax nanmean nanmin nanprod nanstd nansum nanvar ndim negative
        new_ref nextafter nn nonzero not_equal ones ones_like packbits pad pad_left partitioning poly polyadd polyder
        polydiv polyfit polyint polymul polysub polyval positive power prod product ptp quantization rad2deg radians
        random ravel real rearrange reciprocal ReductionFunction ref remainder rename repeat replace_axis resolve_axis
        rfft rfftfreq right_shift rint roll roots round rsqrt Scalar scan ScanCheckpointPolicy searchsorted
        selects_axis set_mesh shard shard_with_axis_mapping sign signbit SimpleReductionFunction sin sinc sinh slice
        sort specialized_fns split sqrt square stack state_dict std subtract sum swap take tan tanh tile top_k trace
        tree tree_checkpoint_name tree_util tril trim_zeros triu true_divide trunc types unbind unflatten_axis unique
        unique_all unique_counts unique_inverse unique_values unpackbits updated_slice util vander var vmap where wrap
        zeros zeros_like
    """,
    "axonym.haliax.axis": """
        Axis axis_name axis_size axis_spec_to_shape_dict AxisSelection AxisSelector AxisSpec concat_axes dblock ds
        dslice eliminate_axes intersect_axes is_axis_compatible make_axes PartialAxisSpec PartialShapeDict
        rearrange_for_partial_order replace_axis resolve_axis selects_axis ShapeDict union_axes unsize_axes
        without_axes
    """,
    "axonym.haliax.core": """
        are_shape_checks_enabled Axis axis_name axis_spec_to_shape_dict AxisSelection AxisSelector AxisSpec
        broadcast_arrays broadcast_axis broadcast_to dslice eliminate_axes enable_shape_checks flatten
        flatten_all_axes_but flatten_axes GatherScatterModeStr index IntScalar named NamedArray NamedArrayAxes
        NamedArrayAxesSpec NamedOrNumeric PartialShapeDict PrecisionLike ravel rename roll Scalar selects_axis
        ShapeDict slice split take unbind unflatten_axis updated_slice
    """,
    "axonym.haliax.debug": """
        describe_array diagnose_common_issues IdentityMap ModuleProblems visualize_named_sharding visualize_shardings
    """,
    "axonym.haliax.fft.fft": """
        fft fftfreq fftshift hfft ifft ifftshift ihfft irfft rfft rfftfreq
    """,
    "axonym.haliax.field": """
        field
    """,
    "axonym.haliax.haxtyping": """
        bf16 bool_ Complex complex128 complex64 f16 f32 f64 Float i16 i32 i64 i8 Int Named NamedArrayAxes
        NamedArrayAxesSpec u16 u32 u64 u8 UInt
    """,
    "axonym.haliax.hof": """
        fold map scan ScanCheckpointPolicy ScanCheckpointSpec vmap
    """,
    "axonym.haliax.jax_utils": """
        assert_equal broadcast_one_to_all broadcast_prefix ensure_scalar filter_checkpoint is_in_jit is_jax_array_like
        is_on_mac_metal is_pallas_dslice is_scalarish maybe_rng_split multilevel_scan named_call shaped_rng_split
        Static sync_global_devices to_jax_shape tree_checkpoint_name
    """,
    "axonym.haliax.nn": """
        binary_cross_entropy_loss BlockSeq celu Conv ConvTranspose cross_entropy_loss
        cross_entropy_loss_and_log_normalizers Dropout dropout elu Embedding gelu glu hard_sigmoid hard_silu hard_swish
        hard_tanh LayerNorm leaky_relu Linear log_sigmoid log_softmax logsumexp max_pool mean_pool min_pool MLP
        MoELinear one_hot quick_gelu reduce_loss relu relu6 relu_squared RmsNorm ScanCheckpointPolicy selu sigmoid silu
        soft_sign softmax softplus Stacked standardize swish
    """,
    "axonym.haliax.nn.activations": """
        celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu log_sigmoid quick_gelu relu relu6
        relu_squared selu sigmoid silu soft_sign softplus swish
    """,
    "axonym.haliax.nn.attention": """
        alibi_attention_bias causal_mask combine_masks_and combine_masks_or dot_product_attention
        dot_product_attention_weights dropout_mask forgetful_causal_mask mask_to_bias prefix_lm_mask
    """,
    "axonym.haliax.nn.conv": """
        Conv ConvTranspose
    """,
    "axonym.haliax.nn.dropout": """
        Dropout dropout
    """,
    "axonym.haliax.nn.embedding": """
        Embedding
    """,
    "axonym.haliax.nn.linear": """
        Linear MoELinear
    """,
    "axonym.haliax.nn.loss": """
        binary_cross_entropy_loss cross_entropy_loss cross_entropy_loss_and_log_normalizers maybe_reduce_loss
        reduce_loss UNSPECIFIED Unspecified
    """,
    "axonym.haliax.nn.mlp": """
        DEFAULT_WIDTH_NAME MLP
    """,
    "axonym.haliax.nn.mup": """
        AbstractEmbeddingReparam AbstractLinearReparam AbstractReparam EmbeddingMup EmbeddingStandardParam
        HiddenLinearMup InputLinearMup LinearStandardParam OutputLinearMup ReparamEnabled
    """,
    "axonym.haliax.nn.normalization": """
        LayerNorm LayerNormBase log_softmax logsumexp RmsNorm softmax standardize
    """,
    "axonym.haliax.nn.pool": """
        max_pool mean_pool min_pool pool
    """,
    "axonym.haliax.nn.scan": """
        BlockFoldable BlockSeq FoldFunction ModuleInit ScanCheckpointPolicy ScanCheckpointSpec ScanFunction Stacked
        tree_checkpoint_name VmapFunction
    """,
    "axonym.haliax.ops": """
        allclose array_equal array_equiv bincount clip isclose nonzero packbits pad pad_left searchsorted trace tril
        triu unique unique_all unique_counts unique_inverse unique_values unpackbits where
    """,
    "axonym.haliax.partitioning": """
        auto_sharded axis_mapping current_thread_local_mapping fsdp infer_resource_partitions mesh_context named_jit
        physical_axis_name physical_axis_size PhysicalAxisSpec pspec_for pspec_for_axis ResourceAxis ResourceMapping
        round_axis_for_partitioning set_mesh shard shard_with_axis_mapping sharding_for_axis
    """,
    "axonym.haliax.poly.poly": """
        DEFAULT_POLY_AXIS_NAME poly polyadd polyder polydiv polyfit polyint polymul polysub polyval roots trim_zeros
    """,
    "axonym.haliax.quantization": """
        apply_updates DefaultDotGeneralOp dot_general_with_precision DotGeneralOp Fp8DotGeneralOp in_qdq
        Int8DotGeneralOp out_qdq OverwriteWithGradient partition_for_grad_overwrite QuantizationConfig
        quantize_linear_layers
    """,
    "axonym.haliax.random": """
        ball bernoulli beta categorical cauchy choice exponential gamma gumbel laplace loggamma logistic normal pareto
        permutation poisson rademacher randint t truncated_normal uniform weibull_min
    """,
    "axonym.haliax.ref": """
        freeze get NamedRef new_ref swap
    """,
    "axonym.haliax.specialized_fns": """
        top_k
    """,
    "axonym.haliax.state_dict": """
        flatten_modules_for_export from_state_dict from_torch_compatible_state_dict load_state_dict
        ModuleWithStateDictSerialization save_state_dict StateDict to_numpy_state_dict to_state_dict
        to_torch_compatible_state_dict unflatten_modules_from_export with_prefix
    """,
    "axonym.haliax.tree": """
        flatten leaves map scan_aware_map structure unflatten
    """,
    "axonym.haliax.tree_util": """
        hashable_combine hashable_partition maybe_rng_split resize_axis scan_aware_tree_map tree_flatten tree_leaves
        tree_map tree_structure tree_unflatten
    """,
    "axonym.haliax.types": """
        DType DTypeLike FilterSpec FilterTree GatherScatterModeStr IntScalar Precision PrecisionLike Scalar
    """,
    "axonym.haliax.util": """
        ensure_tuple is_jax_or_hax_array_like is_named_array StringHolderEnum UNSPECIFIED Unspecified
    """,
    "axonym.haliax.wrap": """
        ReductionFunction SimpleReductionFunction
    """,
}

# The modules that `import haliax as hax` makes attributes; `fft`, `field` and `poly` are functions there, as here.
MODULES = """
axis core debug haxtyping hof jax_utils nn ops partitioning quantization random ref specialized_fns state_dict tree
tree_util types util wrap
"""


@pytest.mark.parametrize("module", PATHS)
def test_what_code_imports_is_there(module: str) -> None:
    for name in PATHS[module].split():
        exec(f"from {module} import {name}", {})


def test_modules_are_attributes() -> None:
    """Of the package, before anything else imports them."""
    code = "import types, axonym.haliax as hax\n"
    code += f"print(all(type(getattr(hax, n)) is type(types) for n in {MODULES.split()}))"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert shown == "True\n"


def test_unknown_names_stay_unknown() -> None:
    assert hax.axis.ds is hax.ds
    with pytest.raises(AttributeError, match=r"module 'axonym\.haliax\.axis' has no attribute 'slices'"):
        hax.axis.slices  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("merged", "lost", "won", "expected"),
    [
        (("b", "d"), "a", "", "bcd"),
        (("c", "a"), "", "", "abcd"),
        (("b",), "c", "e", "abed"),
        ((hax.Axis("a", 2), "b"), "d", "e", "abce"),
    ],
)
@pytest.mark.parametrize("front", [False, True])
def test_flatten_all_axes_but(merged: Any, lost: str, won: str, expected: str, front: bool) -> None:
    """What comes back has the order of the original, and new axes where the lost ones were."""
    x = hax.arange({"a": 2, "b": 3, "c": 4, "d": 5})
    flat, restore = hax.core.flatten_all_axes_but(x, "rows", merged, reorder_to_front=front)
    assert set(flat.names) == {"rows", *x.names} - set(hax.axis_name(merged))
    assert flat.names[0] == "rows" or not front
    found = restore(hax.sum(flat, tuple(lost)).broadcast_axis(dict.fromkeys(won, 6)))
    assert found.names == tuple(expected)
    assert hax.array_equal(found, hax.sum(x, tuple(lost)).broadcast_axis(dict.fromkeys(won, 6)))


@pytest.mark.parametrize("path", PATHS)
def test_functions_can_be_pickled(path: str) -> None:
    module = importlib.import_module(path)
    for name in PATHS[path].split():
        if inspect.isfunction(fn := getattr(module, name)):
            assert pickle.loads(pickle.dumps(fn)) is fn, name
