"""Who am I, and how bytes reach the others."""
