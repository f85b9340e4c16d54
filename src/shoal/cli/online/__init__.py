"""Commands for a system that never stops: `shoal up` and `shoal rollback`."""
