"""What the demo asks: a fixed set, or the lines of a file."""

from pathlib import Path

from fledge.contracts.errors import ArtifactError

PROMPTS = (
    "In three sentences, explain how a young eagle learns to fly.",
    "A train travels at 60 miles an hour for 3 hours. How far does it go?",
    "Write a Python function that returns the largest of three numbers.",
    "Name three rivers, with one fact about each.",
    "A box holds 24 eggs and 5 of them are broken. How many are whole in three such boxes?",
    "Write a Python function that counts the vowels in a string.",
)
"""Two each of chat, math and code, the kinds of task that heads are chosen on. The default target's
answers do not go in circles, which would be easy to draft."""


def read_prompt_file(path: Path) -> tuple[str, ...]:
    """One prompt a line; empty lines do not count."""
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ArtifactError(f"the prompts in {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ArtifactError(f"the prompts in {path} are not text in UTF-8.") from error
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        raise ArtifactError(f"{path} holds no prompt; write one a line.")
    return prompts
