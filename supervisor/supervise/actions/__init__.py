"""Actions of runbooks, by what they act on.

Adding an action is adding a subclass of `Action` to one of the files: its verb in YAML is the name
of the class in snake_case, its keys are the fields.
"""
