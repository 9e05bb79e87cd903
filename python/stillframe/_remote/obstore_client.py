"""S3, Google Cloud Storage and Azure through obstore.

obstore retries failed requests itself and does not report each retry. So `PieceIterator` logs long
waits.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from stillframe._base import threads
from stillframe._base.urls import Url
from stillframe._remote import unfinished
from stillframe._remote.options import config_of
from stillframe._remote.redact import redact, secrets_of
from stillframe._remote.store import (
    MIB,
    PART_BYTES,
    STALE_S,
    Buffer,
    Found,
    KeyGroup,
    PieceIterator,
    Store,
    fork_error,
    key_group_of,
    part_bytes,
)

log = logging.getLogger("stillframe")

PARTS_AT_A_TIME = 4  # the parts of one object that are sent at the same time
ONE_REQUEST_BYTES = MIB  # an object up to this size is not uploaded in parts
# Limits for the retries of one request, with pauses that grow.
RETRIES = 10
RETRY_S = 180.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 15.0
REQUEST_S = 120.0  # the time limit of a request of PART_BYTES; larger requests get more
CLEANING_PAUSE_S = 3600.0  # the least time from one clean-up in a store to the next

# A metadata field with the id of the upload that made the object. The name has only letters,
# because some proxies pass no others.
_MARK = "stillframeupload"
# `_core.fork_generation()` of the process that started obstore's threads; None: obstore is unused.
_threads_generation: int | None = None


def _import_obstore() -> Any:
    """Return the package obstore, which is imported only when it is needed."""
    import obstore.exceptions
    import obstore.store

    return obstore


class ObstoreStore(Store):
    """A store behind obstore."""

    client = "obstore"

    def __init__(self, url: Url, options: Mapping[str, Any]) -> None:
        global _threads_generation
        super().__init__(url, options)
        was_forked = _threads_generation not in (None, self._generation)
        if was_forked:  # obstore's threads do not exist in this process
            raise fork_error()
        self._url = url
        self._config = config_of(url.scheme, options)
        if url.account:
            self._config.values.setdefault("account_name", url.account)
        self._secrets |= secrets_of(self._config.values, "")
        self._clients: dict[int, Any] = {}  # obstore's clients, by their timeouts in seconds
        # when `_remove_stale_uploads` last started a thread, by time.monotonic()
        self._cleaned_s = -math.inf
        self._client(PART_BYTES)  # raises ValueError for wrong options
        _threads_generation = self._generation  # obstore may have started threads now

    def _client(self, nbytes: int = 0) -> Any:
        """Return a client for requests of up to `nbytes`; 0: for short requests."""
        timeout_s = round(REQUEST_S * max(1.0, nbytes / PART_BYTES))
        if timeout_s not in self._clients:
            self._clients[timeout_s] = self._open(timeout_s)
        return self._clients[timeout_s]

    def _open(self, timeout_s: int) -> Any:
        """Return a new client of obstore with this timeout for a request."""
        pauses = {
            "init_backoff": timedelta(seconds=FIRST_PAUSE_S),
            "max_backoff": timedelta(seconds=LONGEST_PAUSE_S),
        }
        try:
            return _import_obstore().store.from_url(
                f"{self._url.scheme}://{self._url.bucket}",
                config=self._config.values,
                client_options={"timeout": timedelta(seconds=timeout_s), **self._config.client},
                retry_config={
                    "max_retries": RETRIES,
                    "retry_timeout": timedelta(seconds=max(RETRY_S, timeout_s)),
                    "backoff": pauses,
                },
            )
        except Exception as error:
            cause = redact(str(error), self._secrets)
        # Raised outside the handler, so that it does not refer to obstore's error with credentials.
        raise ValueError(f"storage_options of {self._root}: {cause}")

    def _put(self, key: str, feed: PieceIterator, nbytes: int | None) -> None:
        obstore = _import_obstore()
        if nbytes is not None and nbytes <= ONE_REQUEST_BYTES:
            obstore.put(self._client(), key, b"".join(feed), use_multipart=False)
            return
        part = part_bytes(nbytes)
        mark = uuid.uuid4().hex
        try:
            obstore.put(
                self._client(part),
                key,
                feed,
                use_multipart=True,
                chunk_size=part,
                max_concurrency=PARTS_AT_A_TIME,
                attributes={_MARK: mark},
            )
        except Exception:
            if not feed.ended or not self._has_mark(key, mark):
                raise
            # The object is complete: only the store's answer to the last request was lost.
            log.info("stillframe: %s is there, although the upload failed", self.shown(key))

    def _has_mark(self, key: str, mark: str) -> bool:
        """Return whether the upload with this mark made the object; False if the request fails."""
        with contextlib.suppress(Exception):
            found = _import_obstore().get(self._client(), key, options={"head": True})
            return bool(found.attributes.get(_MARK) == mark)
        return False

    def _get(self, key: str, start: int, end: int, version: str) -> Buffer:
        obstore = _import_obstore()
        if not version:
            return obstore.get_range(self._client(), key, start=start, end=end)
        options = {"range": (start, end), "if_match": version}
        try:
            return obstore.get(self._client(), key, options=options).bytes()
        except obstore.exceptions.PreconditionError:
            raise OSError(errno.ESTALE, "the object was replaced meanwhile") from None

    def _find(self, key: str) -> Found:
        return _object_info_of(_import_obstore().head(self._client(), key))

    def _list(self, prefix: str) -> Iterator[Sequence[Found]]:
        for page in _import_obstore().list(self._client(), prefix=prefix or None):
            yield [_object_info_of(meta) for meta in page]

    def _delete(self, keys: Iterable[str]) -> None:
        obstore = _import_obstore()
        try:
            obstore.delete(self._client(), [*keys])
        except FileNotFoundError:
            for key in keys:  # obstore stopped at a missing object, so go on one by one
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(self._client(), key)

    def _remove_stale_uploads(self, key: str) -> None:
        if self._url.scheme != "s3":
            return  # `unfinished` serves only S3
        if self._config.values.get("skip_signature"):
            return  # there are no credentials to list uploads with
        if time.monotonic() - self._cleaned_s < CLEANING_PAUSE_S:
            return
        self._cleaned_s = time.monotonic()
        thread = threading.Thread(
            target=self._abort_stale_uploads,
            args=(key_group_of(key),),
            name="sf-clean",
            daemon=True,
        )
        threads.start(thread)

    def _abort_stale_uploads(self, group: KeyGroup) -> None:
        """Abort stale uploads to the keys of a group, and log their URLs."""
        config, endpoint = self._client().config, self._config.endpoint
        verify = not self._config.client.get("allow_invalid_certificates")
        with contextlib.suppress(Exception):  # a failed clean-up is no error
            # `*group` is its directory and its suffix.
            for key in unfinished.abort_stale_uploads(
                config, endpoint, *group, STALE_S, verify=verify
            ):
                name = self.shown(key)
                log.info("stillframe: aborted an upload to %s, left by a killed process", name)


def _object_info_of(meta: Mapping[str, Any]) -> Found:
    modified_s = meta["last_modified"].timestamp()
    return Found(meta["path"], meta["size"], modified_s, meta["e_tag"] or "")
