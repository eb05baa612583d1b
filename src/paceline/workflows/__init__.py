"""The public Python API: one typed function for each command, values in and values out."""
