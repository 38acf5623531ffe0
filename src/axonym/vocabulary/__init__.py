"""Drawing from logits over a vocabulary, which may be sharded and which no device gathers.

What is drawn does not depend on how axes are sharded.
"""

from .sampling import sample as sample
