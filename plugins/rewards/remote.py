"""A reward from a server: each sample is sent by HTTP, and the server says what it is worth.

For judges and graders that run somewhere else. The request is a POST of JSON with the fields `task_id`, `prompt`,
`response`, `answer`, `turns`, `num_tokens`, `finish_reason`, `metadata` and `state`; the reply is JSON with a number,
or null to abstain, under `field`. Nothing but the standard library is needed, and nothing but JSON is read.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any, Literal

from rollstock import REQUIRED, ConfigError, Environment, Reward, Sample, hookimpl, option

MAX_REPLY_BYTES = 1 << 20
_PASSING = (408, 425, 429)  # statuses below 500 that may be gone at the next attempt


@dataclass(kw_only=True)
class RemoteConfig:
    """Options of the `remote` reward."""

    url: str = option(REQUIRED, "where samples are sent: https://..., or http:// on this machine")
    timeout_s: float = option(5.0, "seconds to wait for a reply", minimum=0.001, maximum=1e5)
    max_retries: int = option(
        2,
        "times that a sample is sent again after a status 5xx, no reply, or none that can be read",
        minimum=0,
        maximum=100,
    )
    backoff_s: float = option(
        0.5, "seconds before a sample is sent again; twice as many each further time", minimum=0, maximum=1e4
    )
    field: str = option("score", "where in the reply the number is; a dotted path")
    token_variable: str = option(
        "", "environment variable with a bearer token for the server, so that it is in no file; empty: none"
    )
    allow_http: bool = option(False, "send samples, and the token, to another machine without encryption")
    on_failure: Literal["raise", "abstain"] = option(
        "raise",
        "after the last attempt: raise (the sample has no score, and is named in the log with the reason) or abstain "
        "(the other rewards decide alone)",
    )

    def __post_init__(self) -> None:
        try:
            parts = urllib.parse.urlsplit(self.url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # of a port that is none, or half an IPv6 address
            is_address = False
        if not is_address or not self.url.isascii() or not self.url.isprintable() or " " in self.url:
            shown = "" if "@" in self.url else f" {self.url!r}"  # it may have a password in it
            raise ValueError(f"`url`{shown} is no address of the form https://host/path")
        if not all(self.field.split(".")):
            raise ValueError(
                f"`field` {self.field!r} names no place in a reply: write one, such as score or result.value"
            )
        if parts.username or parts.password:
            raise ValueError("`url` has a password in it, which would be written to config.yaml: use `token_variable`")
        if parts.scheme == "http" and not (self.allow_http or is_loopback(parts.hostname or "")):
            raise ValueError(
                f"`url` sends samples to {parts.hostname} without encryption: use https, or allow it by `allow_http`"
            )


class Remote(Reward[RemoteConfig]):
    """Asks a server about each sample."""

    def setup(self, environment: Environment[Any]) -> None:
        """Read the token. Raises ConfigError if its variable is not set, or cannot be sent."""
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        name = self.config.token_variable
        if name:
            token = os.environ.get(name, "").strip()
            if not token.isascii() or not token.isprintable() or not token:
                raise ConfigError(f"token_variable: the environment has no token of plain characters in {name!r}")
            self._headers["Authorization"] = f"Bearer {token}"
        handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
        if is_loopback(urllib.parse.urlsplit(self.config.url).hostname or ""):
            handlers.append(urllib.request.ProxyHandler({}))  # a proxy has another machine for this one
        self._opener = urllib.request.build_opener(*handlers)

    def score(self, sample: Sample) -> float | None:
        """What the server says. Raises RuntimeError, or abstains, when every attempt failed, and ValueError at once for
        a request that it refuses."""
        body = json.dumps(_request(sample)).encode()
        limit = self.config.max_retries
        for attempt in range(limit + 1):
            try:
                return self._ask(body)
            except _FailedAttempt as failure:
                if attempt < limit:
                    time.sleep(min(60.0, self.config.backoff_s * 2.0**attempt))
                    continue
                if self.config.on_failure == "abstain":
                    return None
                raise RuntimeError(f"{self.config.url} {failure}, in each of {limit + 1} attempts") from failure
        raise AssertionError("the last attempt returns or raises")

    def _ask(self, body: bytes) -> float | None:
        request = urllib.request.Request(self.config.url, data=body, headers=self._headers, method="POST")
        deadline = time.monotonic() + self.config.timeout_s
        try:
            with self._opener.open(request, timeout=self.config.timeout_s) as reply:
                return self._read(_all_of(reply, deadline))
        except urllib.error.HTTPError as error:
            with error:
                if error.code < 500 and error.code not in _PASSING:
                    raise ValueError(f"{self.config.url} refused the sample: {error.code} {error.reason}") from error
                raise _FailedAttempt(f"answered {error.code} {error.reason}") from error
        except TimeoutError as error:
            raise _FailedAttempt(f"did not answer within {self.config.timeout_s:g} s") from error
        except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise ValueError(f"{self.config.url} is not who it says: {reason.verify_message}") from error
            if isinstance(reason, TimeoutError):
                raise _FailedAttempt(f"did not answer within {self.config.timeout_s:g} s") from error
            raise _FailedAttempt(f"cannot be reached ({type(reason).__name__}: {reason})") from error

    def _read(self, text: bytes) -> float | None:
        """The number in a reply."""
        try:
            value: Any = json.loads(text)
            for name in self.config.field.split("."):
                value = value[name]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _FailedAttempt(f"sent a reply without a number at `{self.config.field}`: {text[:80]!r}") from error
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _FailedAttempt(f"sent {str(value)[:80]!r} at `{self.config.field}`, which is no number")
        if not abs(value) <= sys.float_info.max:  # NaN, an infinity, or a whole number that no float can hold
            raise _FailedAttempt(f"sent {str(value)[:80]!r} at `{self.config.field}`, which is no finite number")
        return float(value)


class _FailedAttempt(Exception):  # noqa: N818  # it ends an attempt, and is told as part of another sentence
    """An attempt came to nothing; the next may not."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A server that sends us elsewhere shall not choose who gets samples and the token."""

    def redirect_request(self, *_: Any) -> None:
        """No other request: the status is an error."""
        return


def is_loopback(host: str) -> bool:
    """Whether a host is this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _request(sample: Sample) -> dict[str, Any]:
    task = sample.task
    return {
        "task_id": task.id,
        "prompt": task.prompt,
        "answer": task.answer,
        "metadata": task.metadata,
        "response": sample.response,
        "turns": sample.turns,
        "num_tokens": sample.num_tokens,
        "finish_reason": sample.finish_reason,
        "state": sample.state,
    }


def _all_of(reply: Any, deadline: float) -> bytes:
    """The whole reply. A server that sends a byte now and then is ended by the deadline, not by its next byte."""
    text = b""
    while piece := reply.read1(1 << 16):
        text += piece
        if len(text) > MAX_REPLY_BYTES:
            raise _FailedAttempt(f"sent more than {MAX_REPLY_BYTES} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError
    return text


@hookimpl
def rollstock_reward() -> type[Reward[Any]]:
    """The class of this plugin."""
    return Remote
