"""Measurements of links, passes, loaders, collectives and checkpoints on this hardware."""
