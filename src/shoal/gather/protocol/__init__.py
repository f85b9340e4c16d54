"""The gather itself: agree, fetch, exchange, merge, decide."""
