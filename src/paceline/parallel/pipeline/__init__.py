"""How a model's layers are found and measured for a dry run."""
