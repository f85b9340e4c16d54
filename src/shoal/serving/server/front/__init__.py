"""The native front end: HTTP/2 without the interpreter lock, Python once per batch."""
