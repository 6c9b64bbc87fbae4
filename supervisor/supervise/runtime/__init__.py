"""The supervisor of one run: its loop, its job, its inputs and outputs.

`settings` is what a run is started with, `launcher` starts the job, `processor` turns events into
decisions and these into actions, `loop` reads all inputs in turn for as long as the job lives, and
`foreground` is the main thread beside it.
"""
