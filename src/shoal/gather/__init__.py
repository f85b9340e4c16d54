"""Peers' updates: store, gather, merge, outer update."""
