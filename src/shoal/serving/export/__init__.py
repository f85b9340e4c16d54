"""A net and its tables as versions that a model server loads."""
