"""The tables in a module's ``state_dict``: tensors whose data is read when they are used or saved."""
