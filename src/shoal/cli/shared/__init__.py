"""What all commands use: flags, output, signals."""
