"""The parts of `shoal demo`: a stream of clicks, a model, two tables to compare, and plots."""
