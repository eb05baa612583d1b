"""Why a run failed or does not go on: notes that workers leave, hangs found from their states, and the report.

Workers use it under every launcher, and `paceline launch` for what only the one who started them knows.
"""
