"""Random numbers that belong to virtual shards: the same whichever worker draws them."""
