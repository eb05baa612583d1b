"""Times real steps of a job on the workers of a launch: `steps` is their program, `values` what it reads and writes."""
