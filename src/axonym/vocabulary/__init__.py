"""Operations over an axis that is large and split among devices: a vocabulary, which none of them gathers.

Each device finds what its own part has to offer, and only that meets: the candidates of a top-k, one candidate for a
token, three numbers for a loss. What comes out does not depend on how axes are split.
"""

from ..ops.reductions import argmax as argmax
from .losses import (
    cross_entropy as cross_entropy,
    cross_entropy_and_log_normalizers as cross_entropy_and_log_normalizers,
)
from .sampling import sample as sample
from .selecting import top_k as top_k
