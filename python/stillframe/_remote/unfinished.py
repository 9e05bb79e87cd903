"""Aborts unfinished uploads to S3: a program that `abort_stale_uploads` runs in a process of its
own.

obstore cannot list unfinished uploads, so the program uses botocore. It has a process of its own,
because importing botocore takes 0.3 s and holds a training's interpreter lock for up to 0.1 s at a
time. It imports nothing else of stillframe, because that would import torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

_ANSWER_S = 10.0  # the time limit of a request
_LONGEST_S = 300.0  # the time limit of the program

# Arguments of botocore, by obstore's names.
_BOTOCORE = {
    "access_key_id": "aws_access_key_id",
    "secret_access_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
    "region": "region_name",
    "default_region": "region_name",
}


def abort_stale_uploads(
    config: Mapping[str, str],
    endpoint: str | None,
    directory: str,
    suffix: str,
    age_s: float,
    *,
    verify: bool,
) -> list[str]:
    """Abort uploads to keys with this suffix in a directory, if they began `age_s` seconds ago or
    earlier. Return the aborted keys. Without botocore, do nothing.

    Args:
        config: The configuration of obstore's client, with the bucket.
        endpoint: The server's URL; None: AWS.
        verify: Refuse a server with an invalid certificate.
    """
    if importlib.util.find_spec("botocore") is None:
        return []
    if getattr(sys, "frozen", False):
        return []  # sys.executable is the user's program, and no interpreter
    arguments = {
        "client": {_BOTOCORE[name]: config[name] for name in _BOTOCORE if name in config},
        "endpoint": endpoint,
        "verify": verify,
        "bucket": config["bucket"],
        "prefix": f"{directory}/" if directory else "",
        "suffix": suffix,
        "age_s": age_s,
    }
    done = subprocess.run(
        [sys.executable, "-P", __file__],  # -P: this directory is not searched for modules
        input=json.dumps(arguments),  # on the command line all users would see the credentials
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=_LONGEST_S,
        check=False,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


# ---- in the process of its own ----


def _client(arguments: Mapping[str, Any]) -> Any:
    """Return botocore's client for S3."""
    import botocore.session
    from botocore.config import Config

    session = botocore.session.get_session()
    region = os.environ.get("AWS_REGION") or session.get_config_variable("region") or "us-east-1"
    return session.create_client(
        "s3",
        **{"region_name": region, **arguments["client"]},
        endpoint_url=arguments["endpoint"],
        verify=None if arguments["verify"] else False,  # None: as the environment says
        config=Config(
            connect_timeout=_ANSWER_S,
            read_timeout=_ANSWER_S,
            retries={"total_max_attempts": 1},  # the first attempt is the only one
        ),
    )


def _abort_and_yield_keys(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Abort stale uploads, and yield the key of each."""
    client = _client(arguments)
    bucket, prefix = arguments["bucket"], arguments["prefix"]
    stale_before = datetime.now(UTC) - timedelta(seconds=arguments["age_s"])
    pages = client.get_paginator("list_multipart_uploads")
    for page in pages.paginate(Bucket=bucket, Prefix=prefix, Delimiter="/"):
        for upload in page.get("Uploads", ()):
            key = upload["Key"]
            is_in_directory = "/" not in key.removeprefix(prefix)
            has_suffix = os.path.splitext(key)[1] == arguments["suffix"]
            if is_in_directory and has_suffix and upload["Initiated"] < stale_before:
                client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload["UploadId"])
                yield key


if __name__ == "__main__":
    os.nice(19)  # the lowest priority, because a training runs meanwhile
    for aborted in _abort_and_yield_keys(json.load(sys.stdin)):
        print(json.dumps(aborted), flush=True)
