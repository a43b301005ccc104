"""E-mail addresses, also written as `name (at) example (dot) org` or with `%40`.

Not addresses: the user of `git@host`, files such as `icon@2x.png`, package versions
(`react@18.2.0`), and products of matrices (`A@B.sum()`).
"""

import re
import string
from collections.abc import Iterator

from fledge.data.privacy.finding import Finding

# Letters of Latin alphabets, but not of scripts that are written without spaces: those would run
# into the address.
_LETTERS = string.ascii_letters + "".join(map(chr, range(0xC0, 0x250)))
_LOCAL_CHARACTERS = _LETTERS + string.digits + "._%+-'"
_MAX_LOCAL_LEN = 64

_ALNUM = r"A-Za-z0-9\u00c0-\u024f"
_LABEL = rf"[{_ALNUM}](?:[{_ALNUM}-]{{0,61}}[{_ALNUM}])?"
_DOMAIN = rf"(?:{_LABEL}\.){{1,5}}[A-Za-z]{{2,24}}"
_AT_DOMAIN = re.compile(rf"(?:@|%40)({_DOMAIN})(?![A-Za-z0-9(@])")
_SPELLED_OUT = re.compile(
    rf"(?<![{_ALNUM}._-])[{_ALNUM}][{_ALNUM}._+-]{{0,63}} ?[\[({{] ?at ?[\])}}] ?"
    r"[A-Za-z0-9-]{1,63}(?: ?(?:\.|[\[({] ?(?:dot|punkt|point|punto|ponto) ?[\])}]) ?"
    r"[A-Za-z0-9-]{2,63}){1,4}(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_FILE_ENDINGS = frozenset(
    (
        *("png", "jpg", "jpeg", "gif", "svg", "webp", "ico", "bmp", "css", "scss", "js", "jsx"),
        *("tsx", "mjs", "json", "html", "htm", "xml", "txt", "csv", "dll", "exe", "jar", "whl"),
        *("tgz", "lock", "yml", "yaml", "toml"),
    )
)


def find_emails(text: str) -> Iterator[Finding]:
    """Every address in the text."""
    if "@" in text or "%40" in text:
        for match in _AT_DOMAIN.finditer(text):
            start = _start_of_local_part(text, match.start())
            if start is not None and _is_address(text[start : match.start()], match[1]):
                yield Finding("email", start, match.end(), 0.95)
    if "at)" in text or "at]" in text or "at}" in text or "at )" in text or "at ]" in text:
        for match in _SPELLED_OUT.finditer(text):
            yield Finding("email", match.start(), match.end(), 0.9)


def _start_of_local_part(text: str, at: int) -> int | None:
    before = text[max(0, at - _MAX_LOCAL_LEN) : at]
    local = before[len(before.rstrip(_LOCAL_CHARACTERS)) :].lstrip("._%+-'")
    return at - len(local) if local else None


def _is_address(local: str, domain: str) -> bool:
    ending = domain.rpartition(".")[2]
    if local == "git" or local.endswith("."):
        return False
    if ending.lower() in _FILE_ENDINGS or not (ending.islower() or ending.isupper()):
        return False
    # A product of matrices: both sides are names of one letter or are written in capitals.
    is_product = len(local) == 1 and len(domain.partition(".")[0]) == 1
    return not is_product
