"""Admission filters, which decide whether a new id gets a row."""
