"""The stability record: what an auditor checks of a run, months later."""
