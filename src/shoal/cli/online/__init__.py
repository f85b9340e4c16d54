"""Commands for online systems: `shoal up`, `shoal rollback`, `shoal join` and `shoal monitor`."""
