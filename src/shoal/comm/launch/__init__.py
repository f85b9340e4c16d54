"""What a launcher tells a process: its rank, its devices, its settings."""
