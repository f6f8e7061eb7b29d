"""Answers from any OpenAI-compatible server: bounded concurrency, retries, never a torn run.

Knows nothing about files of rows; replies come back as ids of the target's own chat template.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import random
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any

from paceline.data.formats import RowError, read_message
from paceline.data.loops import loop_start
from paceline.data.regenerate import Answer, Ask, Settings
from paceline.data.template import Template

_FATAL = {401: "set OPENAI_API_KEY", 403: "set OPENAI_API_KEY", 404: "check --endpoint and --model"}


class EndpointError(ValueError):
    """The server cannot be used at all; the message has the fix."""


class _TryAgain(Exception):
    """A failure that may pass. ``after``: seconds the server asked to wait."""

    def __init__(self, why: str, after: float | None = None) -> None:
        super().__init__(why)
        self.after = after


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to another host, and make a GET of the POST."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


@dataclass(frozen=True, kw_only=True)
class Client:
    """POSTs to ``url``/v1/chat/completions; the key, if any, is OPENAI_API_KEY.

    408, 409, 425, 429, 5xx, timeouts and broken connections are tried ``tries`` times in all, after
    1, 2, 4, ... times ``pause`` seconds (at most 60, with jitter) or as long as Retry-After says (at
    most 600).
    ``sleep`` waits so many seconds; if it returns something true, nothing is tried any more.
    """

    url: str
    model: str
    tries: int = 6
    pause: float = 1.0
    timeout: float = 600.0
    sleep: Callable[[float], object] = time.sleep

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"endpoint {self.url!r}: start it with http:// or https://")

    @property
    def address(self) -> str:
        """Where requests go; the user may or may not have written /v1."""
        base = self.url.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
        return f"{base}/v1/chat/completions"

    def find(self) -> None:
        """Raise EndpointError if nobody listens there; what is answered does not matter."""
        headers, base = self._headers(), self.address.removesuffix("/chat/completions")
        try:
            _OPENER.open(urllib.request.Request(f"{base}/models", None, headers), None, 10).close()
        except urllib.error.HTTPError as error:
            error.close()
        except urllib.error.URLError as error:
            if isinstance(error.reason, (ConnectionRefusedError, socket.gaierror)):
                raise EndpointError(
                    f"{base}: nobody answers there ({error.reason}); start the server, "
                    "or check --endpoint"
                ) from None
        except (OSError, http.client.HTTPException):
            pass  # slow or rude, but there

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """The server's reply object.

        Raises:
            RowError: this request is refused (4xx), or failed every time.
            EndpointError: wrong address, model or key.
        """
        for attempt in range(self.tries):
            try:
                return self._post({"model": self.model, **body})
            except _TryAgain as error:
                if attempt + 1 == self.tries:
                    raise RowError("endpoint-failed", f"{error}, {self.tries} times") from None
                backoff = min(60.0, self.pause * 2.0**attempt) * random.uniform(0.5, 1.0)
                if self.sleep(backoff if error.after is None else error.after):
                    break
        raise RowError("endpoint-failed", "the run was stopped")

    def _headers(self) -> dict[str, str]:
        key = os.environ.get("OPENAI_API_KEY")
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"} | self._headers()
        request = urllib.request.Request(self.address, json.dumps(body).encode(), headers)
        try:
            with _OPENER.open(request, timeout=self.timeout) as response:
                found = json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                text = _beginning(error)
                after = _retry_after(error.headers.get("Retry-After"))
            if 300 <= error.code < 400:
                where = error.headers.get("Location")
                raise EndpointError(
                    f"{self.address}: HTTP {error.code}, moved to {where}; check --endpoint"
                ) from None
            if error.code in (408, 409, 425, 429) or error.code >= 500:
                raise _TryAgain(f"HTTP {error.code} {text}", after) from None
            if error.code in _FATAL:
                raise EndpointError(
                    f"{self.address}: HTTP {error.code} {text}; {_FATAL[error.code]}"
                ) from None
            raise RowError("endpoint-refused", f"HTTP {error.code} {text}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:  # cut off on the way
            raise _TryAgain(f"{type(error).__name__}: {error}") from None
        except RecursionError:
            raise RowError("endpoint-garbled", "the reply is nested too deeply") from None
        if not isinstance(found, dict):
            raise RowError("endpoint-garbled", "the reply is not an object")
        return found


def _beginning(error: urllib.error.HTTPError) -> str:
    """What a refusal says; nothing, if it breaks off."""
    try:
        return error.read(300).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException):
        return ""


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header: a number, or a date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return min(max(0.0, seconds), 600.0)


class Endpoint:
    """Answers through a Client, ``concurrency`` requests at a time.

    Gives up when nothing but failures comes back: then the server is gone or the wrong one, and the
    rows that are written stay written. A reply that repeats itself is cut where it began to.
    """

    def __init__(
        self, client: Client, template: Template, settings: Settings, *, concurrency: int = 16
    ) -> None:
        self.slots = concurrency
        self._closed = threading.Event()  # set: nobody sleeps any more
        self._client = replace(client, sleep=self._closed.wait)
        self._template, self._settings = template, settings
        self._done: queue.Queue[tuple[Ask, Answer | Exception]] = queue.Queue()
        self._failures = 0  # since the last reply
        self._served = False
        self._fatal: Exception | None = None

    def submit(self, ask: Ask) -> None:
        """Send one request in a thread of its own, which does not keep the process alive."""
        threading.Thread(target=self._work, args=(ask,), daemon=True).start()

    def collect(self) -> list[tuple[Ask, Answer | RowError]]:
        """Wait until a reply is there.

        Raises:
            EndpointError: the server is of no use; run again to resume.
        """
        if self._failures >= max(8, self.slots):  # all of them were reported
            raise EndpointError(
                f"{self._client.address}: the last {self._failures} requests failed; "
                "run again to resume"
            )
        while True:
            if self._fatal is not None and self._done.empty():  # what was answered is kept
                raise self._fatal
            ask, found = self._done.get()
            if isinstance(found, (Answer, RowError)):
                break
            self._fatal = found
        if isinstance(found, Answer):
            self._failures, self._served = 0, True
            return [(ask, found)]
        # One that answers others may refuse a stretch of rows that are too long for it.
        self._failures += found.reason == "endpoint-failed" or not self._served
        return [(ask, found)]

    def close(self) -> None:
        """Drop what is still open."""
        self._closed.set()

    def _work(self, ask: Ask) -> None:
        try:
            self._done.put((ask, self._ask(ask)))
        except Exception as error:  # the caller's thread raises it
            self._done.put((ask, error))

    def _ask(self, ask: Ask) -> Answer:
        settings, tools = self._settings, ask.walk.conversation.tools
        body: dict[str, Any] = {
            "messages": _for_openai(ask.messages),
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": settings.seed_of(ask.key),
        }
        if tools:
            body["tools"] = tools
        if settings.template:
            body["chat_template_kwargs"] = dict(settings.template)
        found = self._client.chat(body)
        try:
            choice = found["choices"][0]
            message = read_message({"role": "assistant"} | choice["message"])
        except (KeyError, IndexError, TypeError) as error:
            raise RowError("endpoint-garbled", f"no choices[0].message ({error!r})") from None
        except RowError as error:
            raise RowError("endpoint-garbled", str(error)) from None
        ended = choice.get("finish_reason") in ("stop", "tool_calls")
        reply = self._template.reply(ask.messages, message, tools, ended=ended)
        ask.prompt_ids = reply.prompt_ids
        ids, finish = reply.response_ids, "stop" if ended else "length"
        if (start := loop_start(ids)) < len(ids):
            ids, finish = ids[:start], "loop"
            text = self._template.tokenizer.decode(ids, skip_special_tokens=True)
            message = {"role": "assistant", "content": text}
        return Answer(response_ids=ids, finish=finish, message=message)


def _for_openai(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool arguments as JSON text, as the protocol has them."""
    out = []
    for message in messages:
        calls = [
            call | {"function": call["function"] | {"arguments": json.dumps(arguments)}}
            for call in message.get("tool_calls", ())
            for arguments in [call["function"]["arguments"]]
        ]
        out.append(message | ({"tool_calls": calls} if calls else {}))
    return out
