"""What can go wrong with a call, in words, and how long to wait before the next attempt."""

import email.utils
import json
import math
import random
import socket
import ssl
import time
from dataclasses import dataclass

import httpx

_LONGEST_RETRY_AFTER_S = 3600.0
_REASON_CHARS = 300


class Refused(Exception):
    """The server will never serve this call."""


class Unanswered(Exception):
    """No usable answer came, however often it was asked."""

    def __init__(self, reason: str, *, is_reachable: bool) -> None:
        super().__init__(reason)
        self.is_reachable = is_reachable
        """The server took the call."""


class BadDocument(Exception):
    """The server said yes, but what came with it makes no sense."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses between attempts: they double, with chance in them so that callers spread out."""

    first_s: float = 0.5
    longest_s: float = 30.0

    def pause_s(self, num_failures: int, retry_after_s: float = 0.0) -> float:
        """How long to wait; never shorter than the server asked for."""
        pause_s = min(self.longest_s, self.first_s * 2.0 ** min(num_failures - 1, 30))
        return max(pause_s, retry_after_s) + random.random() * pause_s / 2


def retry_after_s(header: str) -> float:
    """The header of that name in seconds, given as a number or as a date; 0 when it is neither."""
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER_S) if math.isfinite(seconds) else 0.0


def explain_response(response: httpx.Response) -> str:
    """`400: the reason that the server gives`"""
    location = response.headers.get("location")
    if response.is_redirect and location:
        return f"{response.status_code}, a redirect to {location[:_REASON_CHARS]}"
    return explain_status(response.status_code, response.text)


def explain_status(status: int, body: str) -> str:
    """A status and what its body says, in one line that is safe to print."""
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    error = document.get("error", document) if isinstance(document, dict) else None
    said = body
    if isinstance(error, dict):
        said = str(error.get("message") or error.get("detail") or body)
    elif isinstance(error, str):
        said = error
    line = " ".join("".join(c if c.isprintable() else " " for c in said).split())
    return f"{status}: {line[:_REASON_CHARS].rstrip('.')}" if line else str(status)


def explain_transport(error: Exception) -> str:
    """What broke between us and the server."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ConnectionRefusedError):
            return "connection refused"
        if isinstance(seen, socket.gaierror):
            return "no such host"
        if isinstance(seen, ssl.SSLError):
            return f"no secure connection ({seen.reason or seen})"
        seen = seen.__cause__ or seen.__context__
    text = str(error).strip()
    return f"broken connection ({text or type(error).__name__})"
