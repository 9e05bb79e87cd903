"""Opens the store of a URL, through obstore or fsspec."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from stillframe import _core
from stillframe._base.urls import Url
from stillframe._remote.fsspec_client import FsspecStore
from stillframe._remote.obstore_client import ObstoreStore
from stillframe._remote.store import Found, Store
from stillframe.errors import ForkError, StillframeError

__all__ = ["Found", "Store", "open_store"]

STORES_KEPT = 8

_OBSTORE_SCHEMES = ("s3", "gs", "az")  # the schemes that obstore serves
# The stores that were opened last, each with the arguments and environment that it was opened with.
# They are kept for their connections and tokens. There is no lock, because a signal handler may
# open a store too.
_kept: list[tuple[object, Store]] = []  # (arguments and environment, store), the newest first


def open_store(url: str, storage_options: Mapping[str, Any] | None = None) -> tuple[Store, str]:
    """Return the store of a URL, and the object's key in it.

    Args:
        storage_options: Options with fsspec's or obstore's names. Missing options come from the
            environment, for instance AWS_ACCESS_KEY_ID.

    Raises:
        ValueError: The URL cannot name an object, or an option is unknown.
        StillframeError: No client for this scheme is installed.
        ForkError: This process was forked from one that had used obstore.
    """
    parsed = Url.parse(url)
    key = parsed.path.rstrip("/")
    if parsed.scheme in _OBSTORE_SCHEMES:
        _check_obstore_url(parsed, key)
    options = dict(storage_options or {})
    root = (parsed.scheme, parsed.user, parsed.bucket, parsed.account, parsed.query)
    arguments = (root, options, _client_environment(), _core.fork_generation())
    for kept_arguments, store in tuple(_kept):  # a copy: a signal handler may change the list
        if kept_arguments == arguments:
            return store, key
    store = _open(parsed, options, url)
    _kept.insert(0, (arguments, store))
    del _kept[STORES_KEPT:]
    return store, key


def check_store_arguments(url: str, storage_options: Mapping[str, Any] | None = None) -> None:
    """Raise the errors that `open_store` would raise, except ForkError. Make no connection."""
    scheme = Url.parse(url).scheme
    if scheme not in _OBSTORE_SCHEMES or importlib.util.find_spec("obstore") is None:
        import fsspec

        with contextlib.suppress(ImportError, ValueError):  # `open_store` raises it with advice
            fsspec.get_filesystem_class(scheme)
            return  # without `open_store`, because fsspec may connect when it opens a store
    with contextlib.suppress(ForkError):
        open_store(url, storage_options)


def _check_obstore_url(url: Url, key: str) -> None:
    """Raise ValueError for a URL that obstore would misread or ignore in part."""
    reason = ""
    if url.user:
        reason = "give credentials as storage_options or in the environment, not in the URL"
    elif url.query:
        reason = "a URL of this scheme has no query"
    elif not url.bucket:
        reason = "the URL names no bucket"
    elif key and not {"", ".", ".."}.isdisjoint(key.split("/")):
        reason = "a key has no empty component, and none that is . or .."
    if reason:
        raise ValueError(f"{url.root}/{key}: {reason}")


def _open(url: Url, options: Mapping[str, Any], user_url: str) -> Store:
    """Return a new store. `user_url` is the URL as the user gave it."""
    if url.scheme not in _OBSTORE_SCHEMES:
        return FsspecStore(url, options, user_url)
    if importlib.util.find_spec("obstore") is not None:
        return ObstoreStore(url, options)
    with contextlib.suppress(StillframeError):  # fsspec has no client for the scheme either
        return FsspecStore(url, options, user_url)
    raise StillframeError(
        f"{url.root}: no client for this store is installed: pip install 'stillframe[remote]'"
    )


def _client_environment() -> dict[str, str]:
    """Return the environment variables that clients read."""
    names = ("AWS_", "AZURE_", "GOOGLE_", "HTTP_", "HTTPS_", "ALL_PROXY", "NO_PROXY")
    return {name: value for name, value in os.environ.items() if name.upper().startswith(names)}
