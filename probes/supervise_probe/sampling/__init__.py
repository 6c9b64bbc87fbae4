"""Measurements in one step of many: attention, activations, routing, and copies of weights.

On a step that `schedule.py` calls due, the first forward of the outermost module is watched by
hooks and stand-ins that exist during that one call (`watch.py`); nothing is run twice. Compiled
models cannot be watched that way: there two rows of the input are kept, and go once more through
the original module just before the optimizer steps (`side_forward.py`).

Values stay on their device until `runtime/scalars.py` brings them over.
"""
