"""The GPU page, `python -m benchmarks.gpu`: `__main__.py` runs the parts, each module here has the cases of some."""
