"""The command line, thin over the rest."""
