"""Sync clients under their specified names: rounds of plain Predict calls, made by the publisher."""
