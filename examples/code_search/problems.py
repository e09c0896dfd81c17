"""What can go wrong, in words for the reader of the page."""


class Problem(Exception):
    """Says what cannot be done and what to do next."""


class Busy(Problem):
    """The gateway asks to come back after so many seconds."""

    def __init__(self, seconds: float, message: str) -> None:
        super().__init__(message)
        self.seconds = seconds
