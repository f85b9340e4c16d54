"""A shard on two servers: one leads, the others follow its log, and one of them leads when it has gone."""
