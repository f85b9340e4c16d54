"""Reading rows: the accepted forms of a batch, the calls of groups that answer it, and the op with its gradient."""
