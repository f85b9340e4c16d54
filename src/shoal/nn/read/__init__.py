"""Reading rows: what a user may call a batch, which groups answer it, and the op with its gradient."""
