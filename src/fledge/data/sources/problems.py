"""Why a row or a file cannot be used: inside this package only, counted or turned into an error."""


class RowProblem(Exception):
    """One row is bad; the rows after it may be fine."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        """A few words that are the same for all rows with this problem."""

        self.detail = detail


class StreamProblem(RowProblem):
    """A file cannot be read any further."""
