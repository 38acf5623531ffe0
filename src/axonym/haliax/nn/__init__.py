"""Neural-network layers."""

# ruff: noqa: I001
# fmt: off
from ...nn import (
    BlockSeq as BlockSeq, celu as celu, Conv as Conv,
    ConvTranspose as ConvTranspose,
    elu as elu, Embedding as Embedding, gelu as gelu, glu as glu, hard_sigmoid as hard_sigmoid,
    hard_silu as hard_silu, hard_tanh as hard_tanh,
    leaky_relu as leaky_relu, Linear as Linear, log_sigmoid as log_sigmoid, log_softmax as log_softmax,
    MLP as MLP,
    one_hot as one_hot, quick_gelu as quick_gelu, relu as relu,
    relu6 as relu6, relu_squared as relu_squared,
    selu as selu, sigmoid as sigmoid, silu as silu, soft_sign as soft_sign, softmax as softmax,
    softplus as softplus, squareplus as squareplus,
)
from ...nn import conv as conv, mup as mup
from ..hof import ScanCheckpointPolicy as ScanCheckpointPolicy
from . import (
    activations as activations, array_stacked as array_stacked, attention as attention,
    embedding as embedding, linear as linear, loss as loss, mlp as mlp,
    normalization as normalization, pool as pool, scan as scan,
)
from .dropout import Dropout as Dropout, dropout as dropout  # after the module of that name
from .activations import hard_swish as hard_swish, swish as swish
from .linear import MoELinear as MoELinear
from .loss import (
    binary_cross_entropy_loss as binary_cross_entropy_loss, cross_entropy_loss as cross_entropy_loss,
    cross_entropy_loss_and_log_normalizers as cross_entropy_loss_and_log_normalizers, reduce_loss as reduce_loss,
)
from .normalization import (
    LayerNorm as LayerNorm, RmsNorm as RmsNorm, logsumexp as logsumexp, standardize as standardize,
)
from .ragged_dot import ragged_dot as ragged_dot
from .scan import Stacked as Stacked
from .pool import max_pool as max_pool, mean_pool as mean_pool, min_pool as min_pool
# fmt: on
