"""Neural-network layers over named axes, as Equinox modules. Every layer accepts a `key`, whether it uses it or not.

>>> Batch, Embed, Mlp = axn.make_axes(batch=2, embed=3, mlp=4)
>>> layer = axn.nn.Linear.init(Embed, Mlp, key=jax.random.key(0))
>>> axn.nn.relu(layer(axn.ones((Batch, Embed)))).shape
{'batch': 2, 'mlp': 4}
"""

import typing as _typing

from . import (
    attention as attention,
    conv as conv,
    loss as loss,
    mup as mup,
    normalization as normalization,
    pool as pool,
    scan as scan,
)
from .activations import (
    celu as celu,
    elu as elu,
    gelu as gelu,
    glu as glu,
    hard_sigmoid as hard_sigmoid,
    hard_silu as hard_silu,
    hard_tanh as hard_tanh,
    leaky_relu as leaky_relu,
    log_sigmoid as log_sigmoid,
    mish as mish,
    quick_gelu as quick_gelu,
    relu as relu,
    relu6 as relu6,
    relu_squared as relu_squared,
    selu as selu,
    sigmoid as sigmoid,
    silu as silu,
    soft_sign as soft_sign,
    softplus as softplus,
    squareplus as squareplus,
)
from .batch_norm import BatchNorm as BatchNorm, RunningStatistics as RunningStatistics, with_state as with_state
from .conv import Conv as Conv, ConvTranspose as ConvTranspose
from .dropout import Dropout as Dropout, dropout as dropout
from .embedding import Embedding as Embedding, one_hot as one_hot
from .linear import Linear as Linear
from .loss import (
    binary_cross_entropy_loss as binary_cross_entropy_loss,
    cross_entropy_loss as cross_entropy_loss,
    cross_entropy_loss_and_log_normalizers as cross_entropy_loss_and_log_normalizers,
    reduce_loss as reduce_loss,
)
from .mlp import MLP as MLP
from .moe import MoELinear as MoELinear
from .normalization import (
    GroupNorm as GroupNorm,
    LayerNorm as LayerNorm,
    RmsNorm as RmsNorm,
    log_softmax as log_softmax,
    softmax as softmax,
    standardize as standardize,
)
from .pool import max_pool as max_pool, mean_pool as mean_pool, min_pool as min_pool
from .routing import (
    dispatch as dispatch,
    limit_capacity as limit_capacity,
    load_balancing_loss as load_balancing_loss,
    router_z_loss as router_z_loss,
)
from .scan import BlockSeq as BlockSeq, ScanCheckpointPolicy as ScanCheckpointPolicy, Stacked as Stacked

if not _typing.TYPE_CHECKING:  # so that type checkers refuse a name that does not exist

    def __getattr__(name: str) -> object:
        from ..core.lazy_loading import missing_name

        raise AttributeError(missing_name(__name__, name, globals()))
