"""Explanations: a rule that did not fire or act at a step, and the difference of two policies."""
