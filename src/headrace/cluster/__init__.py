"""A cluster: nodes that serve and follow shards in a shared store, and take over from each other."""
