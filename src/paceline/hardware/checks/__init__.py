"""The checks of `paceline doctor`: files of facts, tables of what can be wrong with them, and the engine of both."""
