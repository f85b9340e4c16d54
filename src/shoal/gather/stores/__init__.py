"""Where peers' payloads and window artifacts are stored: a directory, S3-compatible buckets, or memory."""
