"""The detectors: one file per kind, the file name is the YAML `kind`, the fields are its keys.

Pure: no clock, no chance, no disk; a watch is a function of what it was fed. Files that begin with
an underscore are shared helpers and no kinds.

What holds for all of them:
- A reading is OK, UNKNOWN or BREACH. An absent, NaN or infinite sample is UNKNOWN to all kinds but
  `nonfinite`, and never enters a window. To `paired` an absent one is a step without an evaluation:
  its reading stands.
- `raw` is the code of the sample alone; `for`, `m_of_n` and `clear` come after it.
- A step that is not newer than the last is not taken: UNKNOWN, and nothing changes.
- `rewind(step)` is exactly never having seen what came after `step`, with the verdict begun anew,
  over at least one window back; further back there is less to go by, so it may be UNKNOWN.
"""
