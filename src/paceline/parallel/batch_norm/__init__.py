"""Batch normalisation with the statistics of one virtual shard each, or of the global batch."""
