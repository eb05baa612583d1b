"""Virtual shards through a model, together where that gives the same result, or one by one."""
