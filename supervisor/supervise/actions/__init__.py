"""Actions of runbooks, one file per verb. The file name is the verb, the fields are its keys."""
