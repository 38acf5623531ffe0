"""Per-device programs: `shard_map` by name, and collectives over logical axes."""
