"""What a run measures of itself and shows."""
