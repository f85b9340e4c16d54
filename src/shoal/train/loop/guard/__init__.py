"""Guard rails of a run: when its pushes stop by themselves, and how it is rolled back to an earlier checkpoint."""
