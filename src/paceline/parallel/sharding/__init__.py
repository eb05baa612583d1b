"""A model spread over a mesh: its layers, its initial weights."""
