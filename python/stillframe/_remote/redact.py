"""Removes credentials from the errors of clients."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus, urlsplit

from stillframe.errors import StillframeError

HIDDEN = "***"
_LONGEST = 400  # characters; a longer text is cut off
_SHORTEST = 4  # characters; a shorter text is not treated as a secret

# Names of options whose values are credentials.
_SECRET = re.compile(r"key|secret|token|sas|sig$|passw|credential|connection_string", re.IGNORECASE)
# Environment variables of clients, except those that name a file or a URL.
_VARIABLES = re.compile(r"(AWS|AZURE|GOOGLE|GCS|HF)_.*(?<!_FILE)(?<!_CREDENTIALS)(?<!_UR[IL])$")
_WORDS = ("anon", "cloud", "google_default")  # values of gcsfs's option `token` that are no secrets
# Credentials in URLs, headers and signed requests, each with the text to show instead.
_PATTERNS = (
    (re.compile(r"(?<=://)[^/@\s]+@"), f"{HIDDEN}@"),
    (re.compile(r"(?<=\S)\?[\w.-]+=\S*"), f"?{HIDDEN}"),
    (re.compile(r"\b(bearer|basic|sharedkey) \S+", re.IGNORECASE), rf"\1 {HIDDEN}"),
    (re.compile(r"\b(sig|signature|x-amz-[\w-]+|authorization)[=:]\s*\S+", re.IGNORECASE), HIDDEN),
)
# obstore's description of a request that failed.
_REQUEST = re.compile(
    r"Error performing (?P<method>[A-Z]+) (?P<url>https?://\S+) in [^\s,]+"
    r"(?:, after (?P<retries>\d+) retries\b.*?)?\s+- (?P<cause>.*)",
    re.DOTALL,
)
# In a client's error: the HTTP status, the store's answer in XML, and the number of a part.
_STATUS = re.compile(r"status code: (\d+)")
_ANSWER = re.compile(r"<(Code|Message)>(.*?)</\1>", re.DOTALL)
_PART = re.compile(r"[?&]partNumber=(\d+)")


def secrets_of(options: Mapping[str, Any], user: str) -> frozenset[str]:
    """Return the texts that no message may contain. `user` is the user info of the URL."""
    variables = {name: os.environ[name] for name in os.environ if _VARIABLES.match(name)}
    found = {user, *user.split(":"), *_secrets(options), *_secrets(variables)}
    return frozenset(each for each in found if len(each) >= _SHORTEST and each not in _WORDS)


def _secrets(value: Any, is_secret: bool = False) -> Iterator[str]:
    """Yield the credentials in the value of an option, or in the values of a mapping.

    `is_secret`: The name of the option, or of the mapping, says that it holds credentials."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            has_secret_name = _SECRET.search(str(name)) is not None
            yield from _secrets(inner, is_secret or has_secret_name)
    elif is_secret and isinstance(value, (str, bytes)):
        text = os.fsdecode(value)
        yield text
        for each in re.split(r"[;&?]", text):  # Azure's connection strings and signatures
            name, _, inner = each.partition("=")
            if _SECRET.search(name):
                yield inner


def redact(text: str, secrets: Iterable[str]) -> str:
    """Return the text of a client's error as one line of bounded length, without credentials."""
    text = text.partition("\n\nDebug source:")[0]  # obstore's errors end with internal details
    request = _REQUEST.search(text)
    if request is not None:
        host = urlsplit(request["url"]).netloc.rpartition("@")[2]
        tries = f", after {request['retries']} retries" if request["retries"] else ""
        cause = request["cause"].removeprefix("Server returned non-2xx status code: ")
        text = f"{_summarize_xml_error(cause)} ({request['method']}, {host}{tries})"
    else:
        text = _summarize_xml_error(text)
    # Longer secrets come first, because a shorter one may be a part of them.
    for secret in sorted(secrets, key=len, reverse=True):
        for form in (secret, quote(secret, safe=""), quote_plus(secret)):
            text = text.replace(form, HIDDEN)
    for pattern, instead in _PATTERNS:
        text = pattern.sub(instead, text)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _summarize_xml_error(text: str) -> str:
    """Replace the XML at the end of a text by the code and the message in it, if any. The other
    elements of the XML may quote the signed request."""
    found = dict(_ANSWER.findall(text))
    if not found:
        return text.partition("<?xml")[0].partition("<Error>")[0].rstrip(" :")
    before_xml = text.partition("<")[0].rstrip(" :")
    return ": ".join((before_xml, *found.values()))


def failure(doing: str, shown: str, error: BaseException, secrets: Iterable[str]) -> Exception:
    """Return the error to raise in place of a client's error, as `Store` describes it. `doing` is
    the operation, such as "reading bytes 0 to 100", and `shown` the URL."""
    if isinstance(error, StillframeError):
        return error
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror  # without the number and the file name
    cause = redact(text, secrets) or type(error).__name__
    part_match = _PART.search(text)
    if part_match is not None:
        doing = f"{doing} (part {part_match[1]})"
    status_match = _STATUS.search(text)
    status = "" if status_match is None else status_match[1]
    sentence = f"{doing} failed: {cause}"
    if isinstance(error, FileNotFoundError) or status == "404":
        # The store's answer may name another thing that is missing, such as the bucket.
        has_other_code = "Code>" in text and "NoSuchKey" not in text
        if not has_other_code:
            sentence = "no such object"
        return FileNotFoundError(errno.ENOENT, sentence, shown)
    if isinstance(error, PermissionError) or status in ("401", "403"):
        return PermissionError(errno.EACCES, sentence, shown)
    error_number = error.errno if isinstance(error, OSError) else None
    return OSError(error_number or errno.EIO, sentence, shown)
