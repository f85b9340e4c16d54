"""Tools that inspect, compare, verify, convert and rewrite checkpoints as streams, without a table."""
