"""A worker's process: its group, torch's settings, number formats, seeds, memory."""
