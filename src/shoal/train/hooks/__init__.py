"""Training loop hooks that keep ranks in step."""
