"""Why a row or a file cannot be used: inside this package only, counted or turned into an error."""

MAX_DETAIL_CHARS = 300
"""What a row says about itself may be of any length; a message about it is not."""


class RowProblem(Exception):
    """One row is bad; the rows after it may be fine."""

    def __init__(self, kind: str, detail: str) -> None:
        if len(detail) > MAX_DETAIL_CHARS:
            detail = f"{detail[:MAX_DETAIL_CHARS]}..."
        super().__init__(detail)
        self.kind = kind
        """A few words that are the same for all rows with this problem."""

        self.detail = detail


class StreamProblem(RowProblem):
    """A file cannot be read any further."""
