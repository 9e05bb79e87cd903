"""The `storage_options` of a URL, with fsspec's meaning, as the configuration of an obstore client.

Without options the client takes the credentials of the environment.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Options = Mapping[str, Any]

_S3_NAMES = {
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "endpoint_url": "endpoint",
    "requester_pays": "request_payer",
}
_S3_CLIENT_NAMES = {
    "endpoint_url": "endpoint",
    "region_name": "region",
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
_AZURE_NAMES = {"sas_token": "sas_key"}
_CONNECTION_NAMES = {
    "accountname": "account_name",
    "accountkey": "account_key",
    "sharedaccesssignature": "sas_key",
    "blobendpoint": "endpoint",
}
# Variables that name an endpoint, by scheme.
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": (),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}


@dataclass(repr=False)
class Config:
    """What an obstore client is made with.

    Attributes:
        values: Its configuration, in obstore's names.
        client: Options of the HTTP client.
        provider: A function that obstore asks for credentials.
    """

    values: dict[str, Any] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)
    provider: Callable[[], Any] | None = None


def config_of(scheme: str, options: Options) -> Config:
    """Return the configuration for a scheme of `urls.Url`: "s3", "gs" or "az".

    Names that fsspec's file systems do not have are obstore's own.

    Raises:
        ValueError: obstore has nothing for an option, and the message names it.
    """
    config = Config()
    rest = dict(options)
    config.client.update(_mapping(rest.pop("client_options", None), "client_options"))
    if rest.pop("anon", False):
        config.values["skip_signature"] = True
    {"s3": _s3, "gs": _gs, "az": _az}[scheme](rest, config)
    config.values.update({name: value for name, value in rest.items() if value is not None})
    endpoint = next(
        (config.values[name] for name in ("endpoint", "base_url") if name in config.values),
        next((os.environ[name] for name in _ENDPOINTS[scheme] if os.environ.get(name)), ""),
    )
    if str(endpoint).startswith("http://"):
        config.client.setdefault("allow_http", True)
    return config


def _rename(rest: dict[str, Any], names: Mapping[str, str], values: dict[str, Any]) -> None:
    for name, theirs in names.items():
        if (value := rest.pop(name, None)) is not None:
            values[theirs] = value


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"storage_options: {name} has to be a dict, not {type(value).__name__}")
    return dict(value)


def _s3(rest: dict[str, Any], config: Config) -> None:
    profile = rest.pop("profile", None)
    inner = _mapping(rest.pop("client_kwargs", None), "client_kwargs")
    _rename(inner, _S3_CLIENT_NAMES, config.values)
    _rename(rest, _S3_NAMES, config.values)
    if inner.pop("verify", True) is False:
        config.client["allow_invalid_certificates"] = True
    if inner:
        raise ValueError(f"storage_options: obstore has no client_kwargs {_names(inner)}")
    own = not {"access_key_id", "skip_signature"} & config.values.keys()
    if profile is not None:
        if importlib.util.find_spec("boto3") is None:
            raise ValueError(
                "storage_options: profile needs boto3, which reads AWS's configuration files."
                " Install it, or give key and secret"
            )
        _boto3(str(profile), config)
    elif own and _has_aws_files() and importlib.util.find_spec("boto3") is not None:
        _boto3(None, config)


def _has_aws_files() -> bool:
    """Return whether credentials come from AWS's files, which obstore does not read."""
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return False
    if os.environ.get("AWS_PROFILE"):
        return True
    file = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    return os.path.exists(os.path.expanduser(file))


def _boto3(profile: str | None, config: Config) -> None:
    import boto3
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        session = boto3.Session(profile_name=profile)
        config.provider = Boto3CredentialProvider(session)
    except Exception as error:
        if profile is None:
            return  # obstore asks the machine's metadata service
        raise ValueError(f"storage_options: profile {profile!r}: {error}") from None
    if session.region_name and "region" not in config.values:
        config.values["region"] = session.region_name


def _gs(rest: dict[str, Any], config: Config) -> None:
    rest.pop("project", None)  # only bucket lists and new buckets need one
    _rename(rest, {"endpoint_url": "base_url"}, config.values)
    token = rest.pop("token", None)
    if token is None or token in ("google_default", "cloud"):
        return
    if token == "anon":
        config.values["skip_signature"] = True
    elif isinstance(token, Mapping):
        config.values["service_account_key"] = json.dumps(dict(token))
    elif isinstance(token, (str, os.PathLike)) and os.path.exists(token):
        config.values["application_credentials"] = os.fspath(token)
    else:
        raise ValueError(
            "storage_options: token has to be 'google_default', 'cloud', 'anon', a JSON file of"
            " credentials that exists, or its content as a dict; obstore takes an access token as"
            " bearer_token"
        )


def _az(rest: dict[str, Any], config: Config) -> None:
    fields = _connection(rest.pop("connection_string", None))
    suffix = fields.pop("endpointsuffix", "core.windows.net")
    protocol = fields.pop("defaultendpointsprotocol", "https")
    _rename(fields, _CONNECTION_NAMES, config.values)
    if "account_name" in config.values and suffix != "core.windows.net":
        account = config.values["account_name"]
        config.values.setdefault("endpoint", f"{protocol}://{account}.blob.{suffix}")
    _rename(rest, _AZURE_NAMES, config.values)
    if "sas_key" in config.values:
        config.values["sas_key"] = str(config.values["sas_key"]).removeprefix("?")


def _connection(text: Any) -> dict[str, Any]:
    """Return the fields of Azure's connection string, with names in lower case."""
    pairs = (each.partition("=") for each in str(text or "").split(";"))
    return {name.strip().lower(): value.strip() for name, _, value in pairs if value}


def _names(options: Mapping[str, Any]) -> str:
    return ", ".join(sorted(options))
