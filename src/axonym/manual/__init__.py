"""Per-device programs: `shard_map` by name, and collectives over logical axes. May change before 1.0."""
