"""All rules together: one text in, findings out."""

from fledge.data.privacy.emails import find_emails
from fledge.data.privacy.finding import Finding, resolve
from fledge.data.privacy.readable import make_readable


def find(text: str) -> list[Finding]:
    """Identifiers in the text, in order, without overlaps; names and places are not among them."""
    view = make_readable(text)
    found = [*find_emails(view.text)]
    if not found:
        return found
    if view.offsets is not None:
        found = [Finding(f.type, *view.span(f.start, f.end), f.score) for f in found]
    return resolve(found)
