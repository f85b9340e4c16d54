"""Work on checkpoints without a table: look into them, compare, check, convert and rewrite them, as a stream."""
