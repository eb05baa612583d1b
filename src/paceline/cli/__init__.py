"""The command line: parse, call a function of `paceline`, print. Nothing heavy is loaded before a command needs it."""
