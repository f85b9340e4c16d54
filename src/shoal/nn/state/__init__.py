"""What the ``state_dict`` of a module holds of its tables: tensors that are read when they are used or saved."""
