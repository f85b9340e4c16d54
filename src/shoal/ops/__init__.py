"""Distribution ops: pure functions on tensors, each with its gradient."""
