"""The configuration of an obstore client, made from fsspec's `storage_options`."""

from __future__ import annotations

import configparser
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The next three tables translate names into obstore's names.

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
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
# Options of obstore that name an endpoint.
_ENDPOINTS = (
    "endpoint",
    "endpoint_url",
    "aws_endpoint",
    "aws_endpoint_url",
    "azure_endpoint",
    "azure_storage_endpoint",
    "base_url",
    "google_base_url",
)
# Environment variables that name an endpoint, by scheme.
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
    config.client.update(_pop_dict_option(rest, "client_options"))
    if rest.pop("anon", False):
        config.values["skip_signature"] = True
    translate = {
        "s3": _translate_s3_options,
        "gs": _translate_gcs_options,
        "az": _translate_azure_options,
    }[scheme]
    translate(rest, config)
    config.values.update(rest)
    endpoints = [value for name, value in config.values.items() if name.lower() in _ENDPOINTS]
    endpoints += [os.environ[name] for name in _ENDPOINT_VARIABLES[scheme] if os.environ.get(name)]
    if endpoints:
        config.endpoint = str(endpoints[0])  # obstore uses the first
        if config.endpoint.startswith("http://"):
            config.client.setdefault("allow_http", True)
    return config


def _rename_options(
    source: dict[str, Any], names: Mapping[str, str], target: dict[str, Any]
) -> None:
    """Move options from `source` to `target`. `names` has their new names, by the old ones."""
    for name, new_name in names.items():
        if name in source:
            target[new_name] = source.pop(name)


def _pop_dict_option(rest: dict[str, Any], name: str) -> dict[str, Any]:
    """Remove and return an option that is a dict; {} if it is not given."""
    value = rest.pop(name, {})
    if not isinstance(value, Mapping):
        raise ValueError(f"storage_options: {name} has to be a dict, not {type(value).__name__}")
    return dict(value)


# Each of the next functions serves one scheme: it moves fsspec's options from `rest` into `config`.
# The options that stay in `rest` have obstore's names.


def _translate_s3_options(rest: dict[str, Any], config: Config) -> None:
    profile = rest.pop("profile", None)
    client_kwargs = _pop_dict_option(rest, "client_kwargs")
    _rename_options(client_kwargs, _S3_CLIENT, config.values)
    _rename_options(rest, _S3, config.values)
    if client_kwargs.pop("verify", True) is False:
        config.client["allow_invalid_certificates"] = True
    if client_kwargs:
        unknown = ", ".join(sorted(client_kwargs))
        raise ValueError(f"storage_options: client_kwargs has no {unknown} here")
    needs_credentials = not {"access_key_id", "skip_signature"} & config.values.keys()
    if needs_credentials:
        _add_credentials_from_aws_files(profile, config.values)


def _add_credentials_from_aws_files(profile: str | None, values: dict[str, Any]) -> None:
    """Add the credentials in AWS's files to `values`, because obstore does not read these files. If
    `profile` is None, credentials in the environment come first."""
    if profile is None and any(map(os.environ.get, _OTHER_CREDENTIALS)):
        return  # obstore finds the credentials in the environment
    section = profile or os.environ.get("AWS_PROFILE") or "default"
    settings = {
        **_read_ini_section("AWS_CONFIG_FILE", "~/.aws/config", f"profile {section}", section),
        **_read_ini_section("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", section),
    }
    if "aws_access_key_id" in settings:
        for name_in_file, obstore_name in {"region": "region", **_S3_CLIENT}.items():
            if name_in_file in settings:
                values.setdefault(obstore_name, settings[name_in_file])
    elif profile is not None:
        raise ValueError(
            f"storage_options: the profile {profile!r} has no aws_access_key_id in AWS's files, and"
            " obstore neither assumes roles nor signs in: put the credentials into the environment"
            " (aws configure export-credentials)"
        )


def _read_ini_section(variable: str, default: str, *names: str) -> dict[str, str]:
    """Return the first section of a file that is called one of `names`; {} if there is none. The
    environment variable has the path of the file; without it the path is `default`."""
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


def _translate_gcs_options(rest: dict[str, Any], config: Config) -> None:
    rest.pop("project", None)  # not needed for objects
    _rename_options(rest, {"endpoint_url": "base_url"}, config.values)
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


def _translate_azure_options(rest: dict[str, Any], config: Config) -> None:
    fields: dict[str, str] = {}
    for field_text in str(rest.pop("connection_string", "")).split(";"):
        name, _, value = field_text.partition("=")
        if value:
            fields[name.strip().lower()] = value.strip()
    _rename_options(fields, _AZURE_CONNECTION, config.values)
    suffix = fields.get("endpointsuffix", "core.windows.net")
    if suffix != "core.windows.net" and "account_name" in config.values:
        scheme = fields.get("defaultendpointsprotocol", "https")
        host = f"{config.values['account_name']}.blob.{suffix}"
        config.values.setdefault("endpoint", f"{scheme}://{host}")
    _rename_options(rest, {"sas_token": "sas_key"}, config.values)
    if "sas_key" in config.values:
        config.values["sas_key"] = str(config.values["sas_key"]).removeprefix("?")
