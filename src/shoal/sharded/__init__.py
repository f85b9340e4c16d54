"""Tables that span processes."""
