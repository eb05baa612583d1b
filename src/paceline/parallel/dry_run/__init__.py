"""A step on a mesh without devices: what it would compute, send and keep in memory."""
