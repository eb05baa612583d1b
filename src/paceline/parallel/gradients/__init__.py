"""Gradients of several workers or shards: their sums, in buckets, and their norms."""
