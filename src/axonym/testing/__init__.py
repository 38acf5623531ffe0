"""Check that a function computes the same however it is distributed."""

from .invariance import ShardInvariance as ShardInvariance, check_shard_invariance as check_shard_invariance
