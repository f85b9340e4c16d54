"""Exports: versions of a net and its tables that a model server can load."""
