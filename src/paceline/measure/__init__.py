"""Real steps of a job on the workers of a launch: `steps` times them, `recorder` records what they compute."""
