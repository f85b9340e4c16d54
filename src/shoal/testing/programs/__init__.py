"""Programs of others that tests run."""
