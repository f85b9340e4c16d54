"""The worker's side: connections to all servers, and tables that live there."""
