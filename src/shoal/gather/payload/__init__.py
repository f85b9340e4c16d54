"""A peer's payload: its bytes, its codec, its checks."""
