"""Real steps of a job on the workers of a launch: `probe` has `steps` time them, `recorder` records what they compute,
`rows` reads tables of what others timed."""
