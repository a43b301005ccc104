"""All rules together: one text in, findings out."""

import re

from fledge.data.privacy.emails import find_emails
from fledge.data.privacy.finding import Finding, resolve
from fledge.data.privacy.ibans import find_ibans
from fledge.data.privacy.letter_ids import find_letter_ids
from fledge.data.privacy.network import find_addresses
from fledge.data.privacy.numbers import find_numbers
from fledge.data.privacy.readable import make_readable
from fledge.data.privacy.secret_shapes import find_secrets
from fledge.data.privacy.wallets import find_wallets

# Cards, phone numbers, IBANs and national ids have at least four digits close to each other.
_DIGITS = re.compile(r"[0-9](?:[^0-9\n]{0,6}[0-9]){3}")


def find(text: str) -> list[Finding]:
    """Identifiers in the text, in order, without overlaps; names and places are not among them."""
    view = make_readable(text)
    found = [*find_emails(view.text), *find_secrets(view.text), *find_addresses(view.text)]
    found += find_wallets(view.text)
    if _DIGITS.search(view.text):
        found += [*find_numbers(view.text), *find_letter_ids(view.text), *find_ibans(view.text)]
    if not found:
        return found
    found = resolve(found)
    if view.offsets is None:
        return found
    return [Finding(f.type, *view.span(f.start, f.end), f.score) for f in found]
