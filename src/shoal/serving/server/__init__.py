"""The model server: versions, signatures, batches, gRPC and REST."""
