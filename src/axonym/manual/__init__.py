"""Programs written for one device of many: `shard_map` by name, and collectives that speak the model's language."""
