"""Errors of clients without the credentials that their texts may hold."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

from stillframe.errors import StillframeError

# Names of options, and of variables of the environment, whose values are credentials.
_SECRET = re.compile(r"key|secret|token|sas|passw|credential|connection_string|auth", re.IGNORECASE)
_VARIABLES = ("AWS_", "AZURE_", "GOOGLE_", "GCS_", "HF_")
_SHORTEST = 4  # shorter values are no secrets, and would be found everywhere
_HIDDEN = "***"
# Credentials that no option has: in a URL, in a header, and in a signed request that is quoted.
_PATTERNS = [
    (re.compile(r"(?<=://)[^/@\s'\"<>]+@"), f"{_HIDDEN}@"),
    (re.compile(r"(?<=[A-Za-z0-9/])\?[^\s'\"<>)]+"), "?***"),
    (re.compile(r"(?i)\b(bearer|basic|sharedkey)\s+\S+"), rf"\1 {_HIDDEN}"),
    (
        re.compile(r"(?i)\b(sig|signature|x-amz-\w[\w-]*|authorization)\s*[=:]\s*[^\s&,<>'\"]+"),
        _HIDDEN,
    ),
]
_ANSWER = re.compile(r"<(Code|Message)>(.*?)</\1>", re.DOTALL)
_LONGEST = 400


def secrets_of(options: Mapping[str, Any], user: str) -> frozenset[str]:
    """Return the texts that no message may hold: the secret options, those of the environment, and
    the user info of a URL."""
    found = set(_values(options))
    found.update(_values({k: v for k, v in os.environ.items() if k.startswith(_VARIABLES)}))
    found.update((user, *user.split(":")))
    return frozenset(each for each in found if len(each) >= _SHORTEST)


def _values(options: Any, secret: bool = False) -> Iterator[str]:
    if isinstance(options, Mapping):
        for name, value in options.items():
            yield from _values(value, secret or _SECRET.search(str(name)) is not None)
    elif isinstance(options, (list, tuple)):
        for value in options:
            yield from _values(value, secret)
    elif secret and isinstance(options, (str, bytes)):
        text = os.fsdecode(options)
        yield text
        yield from re.split(r"[;&=\s]", text)  # the fields of a connection string or signature


def redact(text: str, secrets: Iterable[str]) -> str:
    """Return the text of a client's error in one short line, without credentials."""
    text = text.partition("\n\nDebug source:")[0]
    if answer := dict(_ANSWER.findall(text)):
        # The rest of a store's answer may quote the signed request.
        text = text[: text.find("<")].rstrip(" :-") + ": " + ": ".join(answer.values())
    for secret in sorted(secrets, key=len, reverse=True):
        for form in {secret, quote(secret, safe=""), quote_plus(secret)}:
            text = text.replace(form, _HIDDEN)
    for pattern, instead in _PATTERNS:
        text = pattern.sub(instead, text)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def failure(doing: str, shown: str, error: BaseException, secrets: Iterable[str]) -> Exception:
    """Return the error to raise in place of a client's own, whose text may hold credentials.

    Args:
        doing: What failed, such as "reading the bytes 0 to 100".
        shown: The URL, without credentials.
    """
    cause = redact(_text(error), secrets) or type(error).__name__
    name = type(error).__name__
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, f"{doing}: no such object", shown)
    sentence = f"{doing} failed: {cause}"
    if isinstance(error, PermissionError) or name in (
        "PermissionDeniedError",
        "UnauthenticatedError",
    ):
        return PermissionError(errno.EACCES, sentence, shown)
    if isinstance(error, StillframeError):
        return error
    number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
    return OSError(number, sentence, shown)


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return str(error.strerror)
    return str(error)
