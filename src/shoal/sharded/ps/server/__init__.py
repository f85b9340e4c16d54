"""One shard: its tables, its log, its checkpoints, its sockets."""
