"""Secrets by the shapes their issuers gave them: keys, tokens, private keys, passwords in URLs.

Nothing here measures randomness: hashes, ids and Base64 look as random as keys do. Placeholders in
tutorials ("sk-xxxx", "...EXAMPLE") are no secrets.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from fledge.data.privacy.finding import Finding


class _Shape(NamedTuple):
    """A token's shape; a group in the pattern is the secret where names around it are none."""

    anchor: str
    """A part that every such token has: looking for it is much cheaper than matching."""

    pattern: str


_WORD = "A-Za-z0-9_-"
_AWS_SECRET = r"(?i:aws_?secret_?(?:access_?)?key)[\"']?\s{0,3}[=:]\s{0,3}[\"']?([A-Za-z0-9/+]{40})"
_PASSWORD_IN_URL = (
    r"(?:[a-z][a-z0-9+.-]{1,20})://([^\s/:@<>{}$\"'`\[\]]{0,64}:[^\s/@<>{}$\"'`\[\]]{1,128})(?=@)"
)
_SHAPES = (
    _Shape("AKIA", r"AKIA[A-Z2-7]{16}"),
    _Shape("ASIA", r"ASIA[A-Z2-7]{16}"),
    _Shape("ghp_", r"ghp_[A-Za-z0-9]{36,255}"),
    _Shape("gho_", r"gho_[A-Za-z0-9]{36,255}"),
    _Shape("ghu_", r"ghu_[A-Za-z0-9]{36,255}"),
    _Shape("ghs_", r"ghs_[A-Za-z0-9]{36,255}"),
    _Shape("ghr_", r"ghr_[A-Za-z0-9]{36,255}"),
    _Shape("github_pat_", r"github_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{59}"),
    _Shape("glpat-", rf"glpat-[{_WORD}]{{20,255}}"),
    _Shape("xox", r"xox[abeoprs]-[A-Za-z0-9-]{10,255}"),
    _Shape("xapp-", r"xapp-[0-9]-[A-Za-z0-9-]{10,255}"),
    _Shape("hooks.slack.com", r"hooks\.slack\.com/services/T\w{6,12}/B\w{6,12}/\w{20,30}"),
    _Shape("discord", r"discord(?:app)?\.com/api/webhooks/[0-9]{15,21}/[A-Za-z0-9_-]{60,80}"),
    _Shape("sk_live_", r"sk_live_[A-Za-z0-9]{16,255}"),
    _Shape("sk_test_", r"sk_test_[A-Za-z0-9]{16,255}"),
    _Shape("rk_live_", r"rk_live_[A-Za-z0-9]{16,255}"),
    _Shape("rk_test_", r"rk_test_[A-Za-z0-9]{16,255}"),
    _Shape("whsec_", r"whsec_[A-Za-z0-9+/]{24,128}={0,2}"),
    _Shape("sk-", r"sk-[A-Za-z0-9]{32,255}"),
    _Shape("sk-", rf"sk-(?:proj|svcacct|admin|None)-[{_WORD}]{{20,255}}"),
    _Shape("sk-ant-", rf"sk-ant-[a-z0-9]{{3,12}}-[{_WORD}]{{20,255}}"),
    _Shape("sk-or-", r"sk-or-v1-[0-9a-f]{64}"),
    _Shape("AIza", rf"AIza[{_WORD}]{{35}}"),
    _Shape("GOCSPX-", rf"GOCSPX-[{_WORD}]{{28}}"),
    _Shape("ya29.", rf"ya29\.[{_WORD}]{{20,512}}"),
    _Shape("hf_", r"hf_[A-Za-z0-9]{34,64}"),
    _Shape("npm_", r"npm_[A-Za-z0-9]{36}"),
    _Shape("pypi-", rf"pypi-AgE[{_WORD}]{{50,512}}"),
    _Shape("dop_v1_", r"dop_v1_[0-9a-f]{64}"),
    _Shape("dckr_pat_", rf"dckr_pat_[{_WORD}]{{27}}"),
    _Shape("SG.", rf"SG\.[{_WORD}]{{22}}\.[{_WORD}]{{43}}"),
    _Shape("AC", r"AC[0-9a-f]{32}"),
    _Shape("SK", r"SK[0-9a-f]{32}"),
    _Shape("-us", r"[0-9a-f]{32}-us[0-9]{1,2}"),
    _Shape("key-", r"key-[0-9a-f]{32}"),
    _Shape("shp", r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}"),
    _Shape("sq0", rf"sq0(?:atp|csp)-[{_WORD}]{{22,43}}"),
    _Shape("dapi", r"dapi[0-9a-f]{32}(?:-[0-9])?"),
    _Shape("ATATT3", rf"ATATT3[={_WORD}]{{100,255}}"),
    _Shape("lin_api_", r"lin_api_[A-Za-z0-9]{40}"),
    _Shape("ntn_", r"ntn_[A-Za-z0-9]{40,60}"),
    _Shape("secret_", r"secret_[A-Za-z0-9]{43}"),
    _Shape("gsk_", r"gsk_[A-Za-z0-9]{40,64}"),
    _Shape("xai-", r"xai-[A-Za-z0-9]{60,100}"),
    _Shape("r8_", r"r8_[A-Za-z0-9]{37}"),
    _Shape("pplx-", r"pplx-[A-Za-z0-9]{40,64}"),
    _Shape("glsa_", r"glsa_[A-Za-z0-9]{32}_[0-9a-f]{8}"),
    _Shape("sntrys_", r"sntrys_[A-Za-z0-9+/=_]{40,255}"),
    _Shape("NRAK-", r"NRAK-[A-Z0-9]{27}"),
    _Shape("hvs.", rf"hvs\.[{_WORD}]{{24,255}}"),
    _Shape("PMAK-", r"PMAK-[0-9a-f]{24}-[0-9a-f]{34}"),
    _Shape("figd_", rf"figd_[{_WORD}]{{40}}"),
    _Shape("sbp_", r"sbp_[0-9a-f]{40}"),
    _Shape("AGE-SECRET-KEY-", r"AGE-SECRET-KEY-1[02-9AC-HJ-NP-Z]{58}"),
    _Shape(":AA", rf"[0-9]{{8,10}}:AA[{_WORD}]{{33}}"),
    _Shape("ecret", _AWS_SECRET),
    _Shape("ECRET", _AWS_SECRET),
    _Shape("AccountKey=", r"AccountKey=([A-Za-z0-9+/]{86}==)"),
    _Shape("SharedAccessKey=", r"SharedAccessKey=([A-Za-z0-9+/]{43}=)"),
    _Shape("sig=", r"sig=([A-Za-z0-9%]{43,60}%3D)"),
    _Shape("://", _PASSWORD_IN_URL),
    _Shape("eyJ", rf"(?<![_-])eyJ[{_WORD}]{{8,4096}}\.eyJ[{_WORD}]{{8,8192}}\.[{_WORD}]{{16,999}}"),
)  # fmt: skip

_COMPILED = tuple(
    (shape.anchor, re.compile(rf"(?<![A-Za-z0-9])(?:{shape.pattern})(?![A-Za-z0-9])"))
    for shape in _SHAPES
)
# Prose has no underscores, and half of the anchors have one.
_WITHOUT_UNDERSCORE = tuple(entry for entry in _COMPILED if "_" not in entry[0])
_DUMMY = re.compile(r"EXAMPLE|[xX]{6}|\*{4}|(?i:your)")
_MIN_DISTINCT = 6
_DUMMY_PASSWORDS = frozenset(
    ("password", "passwd", "pass", "pwd", "secret", "changeme", "token", "example", "mypassword")
)
_KEY_MARKER = re.compile(r"-----(BEGIN|END) (?:[A-Z0-9]{2,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_KEY_LINE = re.compile(r"[A-Za-z0-9+/]{16,}")
_KEY_LINES = re.compile(r"(?:\s{0,8}[A-Za-z0-9+/]{20,}={0,2})*+")


def find_secrets(text: str) -> Iterator[Finding]:
    """Every token of a known shape, private key, and user with password in a URL."""
    for anchor, pattern in _COMPILED if "_" in text else _WITHOUT_UNDERSCORE:
        if anchor in text:
            for match in pattern.finditer(text):
                group = pattern.groups
                if not _is_dummy(match[group]):
                    yield Finding("secret", *match.span(group), 0.98)
    if "PRIVATE KEY" in text:
        yield from _find_private_keys(text)


def _find_private_keys(text: str) -> Iterator[Finding]:
    """Blocks from BEGIN to END; from BEGIN over the lines of the key where END was cut off."""
    markers = list(_KEY_MARKER.finditer(text))
    for i, marker in enumerate(markers):
        if marker[1] == "END":
            continue
        following = markers[i + 1] if i + 1 < len(markers) else None
        lines = _KEY_LINES.match(text, marker.end())
        assert lines is not None
        if following is not None and following[1] == "END":
            has_key = _KEY_LINE.search(text, marker.end(), following.start()) is not None
            end = following.end()
        else:
            has_key, end = bool(lines[0]), lines.end()
        if has_key:
            yield Finding("secret", marker.start(), end, 1.0)


def _is_dummy(token: str) -> bool:
    if ":" in token and "." not in token.partition(":")[0]:
        user, _, password = token.partition(":")
        if password.lower() in _DUMMY_PASSWORDS or password == user:
            return True
        if len(password) < 2 * _MIN_DISTINCT:
            return bool(_DUMMY.search(token))
    return bool(_DUMMY.search(token)) or len(set(token)) < _MIN_DISTINCT
