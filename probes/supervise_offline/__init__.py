"""Looks at what a job left behind, in the job's own interpreter but beside the job.

Nothing here is imported by the supervisor or by the probe: each folder is run as a program,
`python -I .../supervise_offline/checkpoint`. Needs torch, and nothing of ours. Python 3.9.
"""
