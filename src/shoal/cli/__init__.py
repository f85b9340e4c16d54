"""The command line: each command parses its flags and calls the library."""
