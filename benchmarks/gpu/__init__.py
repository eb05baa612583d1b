"""The GPU page: what one machine with a GPU does with Paceline; `python -m benchmarks.gpu`.

`__main__.py` runs the parts and writes the page. A part is a module with `measure(notes)`, which runs in a process of its
own: `law.py`, `steps.py`, `recipes.py`, `machine.py`, `recovery.py`. `notes.py` is what a part writes its results to.
"""
