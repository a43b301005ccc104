"""How a chat target is asked to complete a function: the same for learning and for measuring."""

_REQUEST = (
    "Complete this Python function. Answer with the whole function, imports included, in one code "
    "block.\n\n```python\n{stub}\n```"
)


def code_request(stub: str) -> str:
    """The user's turn; the stub is imports, signature and docstring."""
    return _REQUEST.format(stub=stub.strip("\n"))
