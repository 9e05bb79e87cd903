"""URLs of objects in stores: which paths are remote, and how they are shown and named.

Nothing here imports a client. A URL may hold a password or a signature, so only `shown` of it may
reach a message, a log or a report.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

# Schemes with the same meaning, under the name that the log uses.
_ALIASES = {
    "s3a": "s3",
    "gcs": "gs",
    "abfs": "az",
    "abfss": "az",
    "adl": "az",
    "azure": "az",
}
_AZURE_HOST = re.compile(r"([^.]+)\.(?:dfs|blob)\.[^:]+", re.IGNORECASE)
_REMOTE = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


@dataclass(frozen=True, slots=True, repr=False)
class Url:
    """A URL in its components.

    Attributes:
        scheme: In lower case, with the alias replaced: "s3", "gs" and "az" for those stores.
        bucket: The bucket, container or host (with its port), without user info.
        account: Azure's storage account where the URL names it, else "".
        path: Everything behind the bucket's slash, as it was given: nothing is decoded.
        query: What follows a question mark. It may be a signature.
        user: The user info, which may be a password.
    """

    scheme: str
    bucket: str
    account: str
    path: str
    query: str
    user: str

    @classmethod
    def parse(cls, text: str) -> Url:
        """
        Raises:
            ValueError: It is not a URL.
        """
        match = _REMOTE.match(text)
        if match is None:
            raise ValueError("not a URL: it does not begin with a scheme, such as 's3://'")
        scheme = match[1].lower()
        scheme = _ALIASES.get(scheme, scheme)
        rest, _, query = text[match.end() :].partition("?")
        host, _, path = rest.partition("/")
        user, at, host = host.rpartition("@")
        account = ""
        if scheme == "az" and at and ":" not in user:  # container@account.dfs.core.windows.net
            named = _AZURE_HOST.fullmatch(host)
            user, host, account = "", user, named[1] if named else host
        return cls(scheme, host, account, path, query, user)

    @property
    def root(self) -> str:
        """The URL up to its path, without credentials."""
        host = f"{self.bucket}@{self.account}" if self.account else self.bucket
        return f"{self.scheme}://{host}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.root}/{self.path})"


def _text(path: Any) -> str | None:
    return os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else None


def is_remote(path: Any) -> bool:
    """Return whether `path` is the URL of an object in a store: `scheme://`, but not `file://`."""
    text = _text(path)
    match = _REMOTE.match(text) if text is not None else None
    return match is not None and match[1].lower() != "file"


def shown(url: Any) -> str:
    """Return the URL for messages, logs and reports: as it was given, but without user info, query
    and signature. A local path is returned as it is."""
    text = os.fsdecode(url)
    match = _REMOTE.match(text)
    if match is None:
        return text
    rest = text[match.end() :].partition("?")[0]
    host, slash, path = rest.partition("/")
    user, at, host = host.rpartition("@")
    if at and Url.parse(text).account:
        host = f"{user}@{host}"  # Azure's container, and no user info
    return f"{match[0]}{host}{slash}{path}"


def key(url: Any) -> bytes:
    """Return the URL's name in the log, in which two spellings of one object are the same, and two
    of a checkpoint of several objects.

    Raises:
        ValueError: It is not a URL.
    """
    parsed = Url.parse(os.fsdecode(url))
    return os.fsencode(f"{parsed.root}/{parsed.path.rstrip('/')}")


def refuse_options(path: Any, storage_options: Any) -> None:
    """
    Raises:
        ValueError: There are options of a store for a local path.
    """
    if storage_options:
        raise ValueError(
            f"{shown(path)}: storage_options are for URLs such as s3://bucket/name, not for a local"
            " path"
        )


def local_path(text: str) -> str:
    """Return the local path that a `file://` URL names, and any other text as it is.

    Raises:
        ValueError: The URL names a file of another host.
    """
    match = _REMOTE.match(text)
    if match is None or match[1].lower() != "file":
        return text
    host, slash, path = text[match.end() :].partition("/")
    if host not in ("", "localhost"):
        raise ValueError(f"{text}: a file:// URL has no host; give file:///path")
    return unquote(slash + path)
