"""Which samples come next, read ahead, and the same order on every worker."""
