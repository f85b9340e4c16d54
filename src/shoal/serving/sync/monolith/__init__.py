"""The sync client of Monolith's interface: its rounds are plain Predict calls, made by the publisher."""
