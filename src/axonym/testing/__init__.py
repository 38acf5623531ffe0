"""Check that a function computes the same however it is distributed. May change before 1.0."""

from .invariance import ShardInvariance as ShardInvariance, check_shard_invariance as check_shard_invariance
