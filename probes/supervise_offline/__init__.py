"""Reads files that a job wrote, with the job's interpreter but in a process of its own.

The supervisor and the probe import nothing of it: each program is run by its path,
`python -I .../supervise_offline/checkpoint`. Needs only torch. Python 3.9.
"""
