"""What is known of a loss function: how its values of several shards combine, and what it calls and changes."""
