"""What `shoal demo` runs: a stream of clicks, a model, two tables to compare, and a picture."""
