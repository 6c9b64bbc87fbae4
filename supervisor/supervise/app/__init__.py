"""The supervisor of one run, its parts put together.

`settings` is what a run is started with, `launcher` starts the job, `event_processor` turns events
into decisions and these into deeds, `loop` reads everything in its turn for as long as the job
lives, `foreground` is what the main thread does meanwhile.
"""
