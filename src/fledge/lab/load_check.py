"""Looks at a server once before it is measured, so that what is wrong is said in words."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx

from fledge.contracts.errors import ConfigError
from fledge.data.regenerate.endpoint import Endpoint
from fledge.data.regenerate.failures import explain_response, explain_transport
from fledge.lab.load_answer import Counting, Failure
from fledge.lab.load_http import BUSY, NOT_A_STREAM, HttpDriver
from fledge.lab.load_prompts import user_prompt
from fledge.lab.load_query import Query

_PROBE = user_prompt("Count from one to ten.")
_PROBE_TOKENS = 16
_HALF_ANSWERS = ("stream", "timeout", "empty")


def open_driver(
    endpoint: Endpoint,
    query: Query,
    *,
    model: str | None,
    count_tokens: Callable[[str], int] | None = None,
) -> HttpDriver:
    """A driver for a server that streams answers, its model known and its counting chosen."""
    driver = HttpDriver(endpoint, query, count_tokens=count_tokens)
    try:
        driver.refine(replace(query, model=model or only_model(driver)))
        driver.refine(replace(driver.query, counting=_check(driver, bool(count_tokens))))
    except BaseException:
        with driver:
            raise
    return driver


def only_model(driver: HttpDriver) -> str:
    """The model that the server has, when it has but one."""
    url = driver.endpoint.url
    try:
        response = driver.get("/models")
    except httpx.TransportError as error:
        raise ConfigError(_unreachable(url, explain_transport(error))) from error
    if not response.is_success:
        reason = driver.endpoint.without_key(explain_response(response))
        kind = f"http {response.status_code}"
        raise ConfigError(_refusal(driver, Failure(kind=kind, reason=reason), "/models"))
    names = _model_names(response)
    if len(names) != 1:
        shown = ", ".join(names) or "none"
        raise ConfigError(f"{url}/models lists {shown}; name the one to measure with --model.")
    return names[0]


def _model_names(response: httpx.Response) -> list[str]:
    try:
        document: Any = response.json()
        return [str(entry["id"]) for entry in document["data"]]
    except (ValueError, KeyError, TypeError):
        return []


def _check(driver: HttpDriver, has_tokenizer: bool) -> Counting:
    """How tokens can be counted; refuses a server that cannot be measured."""
    raw = driver.ask(_PROBE, _PROBE_TOKENS)
    fallback: Counting = "tokenizer" if has_tokenizer else "chunks"
    if raw.failure is not None and raw.failure.kind in ("http 400", "http 422"):
        # Some servers do not know how to report usage in a stream.
        driver.refine(replace(driver.query, counting=fallback))
        again = driver.ask(_PROBE, _PROBE_TOKENS)
        raw = again if again.failure is None else raw
    answer = driver.read(raw)
    if answer.failure is not None and answer.failure.kind not in _HALF_ANSWERS:
        raise ConfigError(_refusal(driver, answer.failure, driver.query.route))
    if answer.failure is not None:
        raise ConfigError(
            f"{driver.endpoint.url}{driver.query.route} gave no whole answer to a first request: "
            f"{answer.failure.reason}."
        )
    if driver.query.counting == "usage" and answer.num_tokens:
        return "usage"
    return fallback


def _refusal(driver: HttpDriver, failure: Failure, path: str) -> str:
    url = driver.endpoint.url
    if failure.kind == "connection":
        return _unreachable(url, failure.reason)
    if failure.kind in ("http 401", "http 403"):
        return (
            f"{url}{path} refused the key ({failure.reason}); put the right one into the "
            "environment (OPENAI_API_KEY, or the variable that --api-key-env names)."
        )
    if failure.kind == NOT_A_STREAM:
        return (
            f"{url}{path} answered in one piece ({failure.reason}) where a stream of events was "
            "asked for; times of tokens can be taken from a streaming server only."
        )
    if failure.kind == BUSY:
        return (
            f"{url}{path} takes no requests yet ({failure.reason}); run the same command again "
            "when it does."
        )
    return (
        f"{url}{path} answered a first request with {failure.reason}; check the address and "
        f"--model ({url}/models lists what is served)."
    )


def _unreachable(url: str, reason: str) -> str:
    return f"{url} cannot be reached: {reason}; check the address, and that the server runs."
