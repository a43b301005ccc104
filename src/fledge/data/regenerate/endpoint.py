"""Where a target is served: an OpenAI-compatible URL and the key to it."""

import ipaddress
import os
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from fledge.contracts.errors import ConfigError

DEFAULT_KEY_VARIABLE = "OPENAI_API_KEY"
_ROUTES = ("/chat/completions", "/completions")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A base URL, such as http://localhost:8000/v1, and a key that is never shown."""

    url: str
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, typed: str, api_key: str | None = None, *, option: str = "--url") -> "Endpoint":
        """Accepts the address of a server, its /v1, or the address of one of its routes.

        `option` is what errors call the place where it was typed.
        """
        try:
            parts = urlsplit(typed.strip())
            host, port = parts.hostname, parts.port
            httpx.URL(typed.strip())
        except (ValueError, httpx.InvalidURL) as error:
            raise ConfigError(f"{option} {typed!r} is not a URL: {error}.") from error
        if parts.username is not None or parts.password is not None:
            # The command line ends up in manifests.
            raise ConfigError(
                f"{option} holds a user name or password; leave it out and put the key into an "
                "environment variable (--api-key-env)."
            )
        has_space = any(character.isspace() for character in typed.strip())
        if parts.scheme not in ("http", "https") or not host or has_space:
            raise ConfigError(
                f"{option} {typed!r} is not a URL; it must be like http://localhost:8000/v1."
            )
        if parts.query or parts.fragment:
            raise ConfigError(f"{option} {typed!r} has a query or a fragment; leave it out.")
        path = parts.path.rstrip("/")
        for route in _ROUTES:
            path = path.removesuffix(route)
        address = f"[{host}]" if ":" in host else host
        if port is not None:
            address += f":{port}"
        return cls(f"{parts.scheme}://{address}{path or '/v1'}", api_key)

    @property
    def is_loopback(self) -> bool:
        """It is on this machine, where no proxy is wanted."""
        host = urlsplit(self.url).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    def without_key(self, text: str) -> str:
        """A server's text, which may repeat the key it was sent."""
        return text.replace(self.api_key, "***") if self.api_key else text


def read_api_key(variable: str | None) -> str | None:
    """The key from the environment; a variable that was named must be there."""
    key = os.environ.get(variable or DEFAULT_KEY_VARIABLE, "").strip()
    if variable is not None and not key:
        raise ConfigError(f"--api-key-env names {variable}, which is not set or empty.")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"the key in {variable or DEFAULT_KEY_VARIABLE} holds characters that no HTTP header "
            "can carry."
        )
    return key or None
