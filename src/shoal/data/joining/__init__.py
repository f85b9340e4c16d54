"""Joining two live streams: impressions, and the actions that label them minutes or hours later."""
