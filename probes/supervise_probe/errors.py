"""Errors that the probe raises on purpose; none of them reaches the job."""


class Refused(Exception):  # noqa: N818, it is an answer and not a fault
    """A command that cannot be carried out; the text is one sentence for people, `facts` for us."""

    def __init__(self, message: str, **facts: object) -> None:
        super().__init__(message)
        self.facts = facts
