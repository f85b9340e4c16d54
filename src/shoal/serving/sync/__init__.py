"""Fresh rows on their way from a trainer to replicas."""
