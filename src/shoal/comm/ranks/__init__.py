"""Exchange of bytes, integers and tensors between ranks; every wait has a deadline."""
