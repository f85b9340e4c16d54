"""Third-party programs that tests run."""
