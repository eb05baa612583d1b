"""Forecasts of published scaling tables from their first rows: `python -m benchmarks.forecast_tables`."""
