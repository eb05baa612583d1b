"""The checks of `paceline doctor`: functions that say what is wrong, or that nothing is."""
