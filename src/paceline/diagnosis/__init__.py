"""Why a run failed or does not go on: hangs found from what workers do, and the report of any failure."""
