"""`shoal ps`: parameter servers."""
