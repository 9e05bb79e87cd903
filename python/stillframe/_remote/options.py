"""The configuration of an obstore client, made from fsspec's `storage_options`."""

from __future__ import annotations

import configparser
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The next four tables translate names into obstore's names.

# Options of s3fs.
_S3 = {
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "endpoint_url": "endpoint",
    "requester_pays": "request_payer",
}
# Options of s3fs in `client_kwargs`. AWS's files use the names with aws_ too.
_S3_CLIENT = {
    "endpoint_url": "endpoint",
    "region_name": "region",
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
# Fields of an Azure connection string, in lower case here.
_AZURE_CONNECTION = {
    "accountname": "account_name",
    "accountkey": "account_key",
    "sharedaccesssignature": "sas_key",
    "blobendpoint": "endpoint",
}
# If one of these variables is set, AWS's files are read only for an explicit `profile`.
_OTHER_CREDENTIALS = (
    *("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
)
# Options of obstore that name an endpoint, and environment variables that do so, by scheme.
_ENDPOINTS = (
    *("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url"),
    *("azure_endpoint", "azure_storage_endpoint", "base_url", "google_base_url"),
)
_ENDPOINT_VARIABLES = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": (),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}


@dataclass(repr=False)
class Config:
    """Arguments of an obstore client."""

    values: dict[str, Any] = field(default_factory=dict)  # with obstore's names
    client: dict[str, Any] = field(default_factory=dict)  # options of the HTTP client
    endpoint: str | None = None  # the server's URL; None: the scheme's own server


def config_of(scheme: str, options: Mapping[str, Any]) -> Config:
    """Return the configuration for a scheme: "s3", "gs" or "az". Raise ValueError if an option of
    fsspec has no counterpart in obstore.

    Other options go to obstore unchanged. obstore refuses unknown names, and takes missing options
    from the environment.
    """
    config = Config()
    rest = {name: value for name, value in options.items() if value is not None}
    config.client.update(_mapping(rest, "client_options"))
    if rest.pop("anon", False):
        config.values["skip_signature"] = True
    {"s3": _s3, "gs": _gs, "az": _az}[scheme](rest, config)
    config.values.update(rest)
    # obstore uses the first endpoint.
    endpoints = [value for name, value in config.values.items() if name.lower() in _ENDPOINTS]
    endpoints += [os.environ[name] for name in _ENDPOINT_VARIABLES[scheme] if os.environ.get(name)]
    if endpoints:
        config.endpoint = str(endpoints[0])
        if config.endpoint.startswith("http://"):
            config.client.setdefault("allow_http", True)
    return config


def _move(source: dict[str, Any], names: Mapping[str, str], target: dict[str, Any]) -> None:
    """Move options from `source` to `target` and rename them, both as `names` says."""
    for name in names.keys() & source.keys():
        target[names[name]] = source.pop(name)


def _mapping(rest: dict[str, Any], name: str) -> dict[str, Any]:
    """Remove and return an option that is a dict; {} if it is not given."""
    value = rest.pop(name, {})
    if not isinstance(value, Mapping):
        raise ValueError(f"storage_options: {name} has to be a dict, not {type(value).__name__}")
    return dict(value)


# Each of the next functions serves one scheme: it moves fsspec's options from `rest` into `config`.
# The options that stay in `rest` have obstore's names.


def _s3(rest: dict[str, Any], config: Config) -> None:
    profile = rest.pop("profile", None)
    inner = _mapping(rest, "client_kwargs")
    _move(inner, _S3_CLIENT, config.values)
    _move(rest, _S3, config.values)
    if inner.pop("verify", True) is False:
        config.client["allow_invalid_certificates"] = True
    if inner:
        raise ValueError(f"storage_options: client_kwargs has no {', '.join(sorted(inner))} here")
    if not {"access_key_id", "skip_signature"} & config.values.keys():
        _read_files(profile, config.values)


def _read_files(profile: str | None, values: dict[str, Any]) -> None:
    """Add the credentials in AWS's files, which obstore does not read, to `values`. If `profile` is
    None, credentials in the environment come first."""
    if profile is None and any(map(os.environ.get, _OTHER_CREDENTIALS)):
        return
    name = profile or os.environ.get("AWS_PROFILE") or "default"
    found = {
        **_section("AWS_CONFIG_FILE", "~/.aws/config", f"profile {name}", name),
        **_section("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", name),
    }
    if "aws_access_key_id" in found:
        for theirs, ours in {"region": "region", **_S3_CLIENT}.items():
            if theirs in found:
                values.setdefault(ours, found[theirs])
    elif profile is not None:
        raise ValueError(
            f"storage_options: the profile {profile!r} has no aws_access_key_id in AWS's files, and"
            " obstore neither assumes roles nor signs in: put the credentials into the environment"
            " (aws configure export-credentials)"
        )


def _section(variable: str, default: str, *names: str) -> dict[str, str]:
    """Return the first of the sections `names` of a file; {} if it has none of them. The path of
    the file is in the environment variable, or else is `default`."""
    parser = configparser.RawConfigParser()
    file = os.path.expanduser(os.environ.get(variable, default))
    try:
        parser.read(file)
        is_valid = True
    except configparser.Error:
        is_valid = False
    # Raised outside the handler: configparser's error quotes a line, which may be a secret.
    if not is_valid:
        raise ValueError(f"storage_options: {file} is not a file of AWS's settings")
    for name in names:
        if parser.has_section(name):
            return dict(parser[name])
    return {}


def _gs(rest: dict[str, Any], config: Config) -> None:
    rest.pop("project", None)  # not needed for objects
    _move(rest, {"endpoint_url": "base_url"}, config.values)
    token = rest.pop("token", "google_default")
    if token == "anon":
        config.values["skip_signature"] = True
    elif isinstance(token, Mapping):
        config.values["service_account_key"] = json.dumps(dict(token))
    elif isinstance(token, (str, os.PathLike)) and os.path.exists(token):
        config.values["application_credentials"] = os.fspath(token)
    elif token not in ("google_default", "cloud"):
        raise ValueError(
            "storage_options: token has to be 'google_default', 'cloud', 'anon', the path of a JSON"
            " file with credentials, or its content as a dict; an access token is a bearer_token"
        )


def _az(rest: dict[str, Any], config: Config) -> None:
    pairs = (each.partition("=") for each in str(rest.pop("connection_string", "")).split(";"))
    fields = {name.strip().lower(): value.strip() for name, _, value in pairs if value}
    _move(fields, _AZURE_CONNECTION, config.values)
    suffix = fields.get("endpointsuffix", "core.windows.net")
    if suffix != "core.windows.net" and "account_name" in config.values:
        scheme = fields.get("defaultendpointsprotocol", "https")
        host = f"{config.values['account_name']}.blob.{suffix}"
        config.values.setdefault("endpoint", f"{scheme}://{host}")
    _move(rest, {"sas_token": "sas_key"}, config.values)
    if "sas_key" in config.values:
        config.values["sas_key"] = str(config.values["sas_key"]).removeprefix("?")
