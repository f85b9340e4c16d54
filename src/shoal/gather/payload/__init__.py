"""What a peer sends: its bytes, its codec, its checks."""
