"""Measures links, passes, loaders, collectives and checkpoints, each by its own program.

`values` holds the probes' requests and results, `program` the structure that all programs share.
"""
