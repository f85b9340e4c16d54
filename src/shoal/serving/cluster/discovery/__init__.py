"""Discovery of the training cluster: a small interface by which workers and parameter servers find each other."""
