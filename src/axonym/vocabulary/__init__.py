"""Draw from logits over a vocabulary that can be sharded, without gathering it.

The draws do not depend on the sharding of any axis.
"""

from .sampling import sample as sample
