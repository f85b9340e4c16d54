"""A shard on several servers: one leads, the others follow its log, and one of them takes over if it fails."""
