"""Guard rails of a run: stop its pushes automatically, and roll it back to an earlier checkpoint."""
