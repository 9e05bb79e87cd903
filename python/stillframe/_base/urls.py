"""URLs of objects in stores: which paths are remote, how they are shown, their names in the log.

A URL may hold a password or a signature. So messages, logs and reports have `shown(url)` instead.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

# Other names of a scheme, each with the name that this package uses.
_ALIASES = {
    "s3a": "s3",
    "gcs": "gs",
    **dict.fromkeys(("abfs", "abfss", "adl", "azure"), "az"),
}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_AZURE_HOST = re.compile(r"([^.]+)\.(?:dfs|blob)\..+", re.IGNORECASE)
_PORT = re.compile(r":\d*$")  # at the end of a host


@dataclass(frozen=True, slots=True, repr=False)
class Url:
    """The components of a URL.

    Attributes:
        scheme: In lower case, and without aliases: "s3", "gs" or "az" for those stores.
        bucket: The bucket or container, or the host with its port.
        account: Azure's storage account, if the URL names it; otherwise "".
        path: Everything between the bucket's slash and the question mark. As in fsspec, it is not
            decoded.
        query: Everything after the question mark; it may be a signature.
        user: User info before the host; it may hold a password.
    """

    scheme: str
    bucket: str
    account: str
    path: str
    query: str
    user: str

    @classmethod
    def parse(cls, url: Any) -> Url:
        """Return the components of a URL. Raise ValueError if `url` is not a URL."""
        text = os.fsdecode(url)
        match = _SCHEME.match(text)
        if match is None:
            raise ValueError("not a URL: it does not begin with a scheme, such as s3://")
        host, _, path = text[match.end() :].partition("/")
        user, at, host = host.rpartition("@")
        # In user:pass/word@host/path, the first slash is in the password: `host` is "user:pass".
        is_password_cut = not at and "@" in path and ":" in _PORT.sub("", host)
        if is_password_cut:
            password_end, _, rest = path.partition("@")
            user = f"{host}/{password_end}"
            host, _, path = rest.partition("/")
        path, _, query = path.partition("?")
        host, _, query_of_host = host.partition("?")  # in a URL without a path
        scheme = match[1].lower()
        scheme = _ALIASES.get(scheme, scheme)
        account = ""
        azure = _AZURE_HOST.fullmatch(host)
        if scheme == "az" and azure is not None and user and ":" not in user:
            # container@account.dfs.core.windows.net
            container, account = user, azure[1]
            user, host = "", container
        return cls(scheme, host, account, path, query or query_of_host, user)

    @property
    def root(self) -> str:
        """The URL up to its path, without user info and query."""
        account = f"@{self.account}" if self.account else ""
        return f"{self.scheme}://{self.bucket}{account}"

    def __repr__(self) -> str:
        return f"Url({self.root}/{self.path})"


def is_remote(path: Any) -> bool:
    """Return whether `path` is the URL of an object in a store: any scheme but `file://`."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        return False
    match = _SCHEME.match(os.fsdecode(path))
    return match is not None and match[1].lower() != "file"


def shown(path: Any) -> str:
    """Return a URL without user info and query, for messages, and a local path as it is."""
    text = os.fsdecode(path)
    if not is_remote(text):
        return text
    url = Url.parse(text)
    if url.account:
        # the part before the @ is the container, not user info
        return text.partition("?")[0]
    return f"{text.partition('://')[0]}://{url.bucket}/{url.path}"


def key(url: Any) -> bytes:
    """Return the URL's name in the log, which is the same for all spellings of an object's URL. A
    slash at the end of the URL makes no difference."""
    parsed = Url.parse(os.fsdecode(url))
    return os.fsencode(f"{parsed.root}/{parsed.path.rstrip('/')}")


def refuse_storage_options(path: Any, storage_options: Any) -> None:
    """Raise ValueError if options of a store were given with a local path."""
    if storage_options:
        raise ValueError(
            f"{shown(path)}: storage_options are for URLs such as s3://bucket/name, not for a local"
            " path"
        )


def local_path_of_file_url(path: str) -> str:
    """Return the local path that a `file://` URL names, and any other path as it is. Raise
    ValueError if the URL names another host."""
    match = _SCHEME.match(path)
    if match is None or match[1].lower() != "file":
        return path
    host, slash, rest = path[match.end() :].partition("/")
    if host not in ("", "localhost"):
        raise ValueError(f"{path}: a file:// URL names no host; write file:///{host}/{rest}")
    return unquote(slash + rest)
