"""The worker's side: connections to all servers, and the tables on them."""
