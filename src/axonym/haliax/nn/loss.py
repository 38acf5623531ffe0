"""Loss functions, with Haliax's parameters."""

from ...nn import loss as _loss
from ...nn.loss import (
    UNSPECIFIED as UNSPECIFIED,
    Unspecified as Unspecified,
    binary_cross_entropy_loss as binary_cross_entropy_loss,
    cross_entropy_loss as cross_entropy_loss,
)
from .._signatures import with_parameters as _with_parameters

cross_entropy_loss_and_log_normalizers = _with_parameters(
    _loss.cross_entropy_loss_and_log_normalizers, logits="pred_y", targets="target_y"
)
maybe_reduce_loss = reduce_loss = _with_parameters(
    _loss.reduce_loss, "array", "reduction", "reduction_axis", array="arr"
)
