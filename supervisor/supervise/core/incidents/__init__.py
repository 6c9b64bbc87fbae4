"""An incident from its first breach to its end, and what is asked before anything is done."""
