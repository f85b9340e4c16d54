"""What training a model will need on 1 to 1,000 hosts: memory, network and time, from costs measured here."""
