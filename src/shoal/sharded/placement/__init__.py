"""Where servers and trainers run: processes of this machine, or a Ray cluster. Rows never pass through here."""
