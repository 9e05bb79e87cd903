"""`storage_options` with the names of s3fs, gcsfs and adlfs."""

import json
import os

import pytest
from stillframe._remote import stores
from stillframe._remote.options import config_of


@pytest.fixture(autouse=True)
def no_variables(monkeypatch, tmp_path):
    """Hide the credentials of the person who runs the tests."""
    for name in [*os.environ]:
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


@pytest.mark.parametrize(
    ("scheme", "options", "values"),
    [
        ("s3", {}, {}),
        (
            "s3",
            {"key": "k", "secret": "s", "token": "t", "endpoint_url": "https://h"},
            {
                "access_key_id": "k",
                "secret_access_key": "s",
                "session_token": "t",
                "endpoint": "https://h",
            },
        ),
        (
            "s3",
            {"client_kwargs": {"endpoint_url": "https://h", "region_name": "r"}, "anon": True},
            {"endpoint": "https://h", "region": "r", "skip_signature": True},
        ),
        ("s3", {"key": None, "anon": False}, {}),
        ("s3", {"requester_pays": True, "region": "r"}, {"request_payer": True, "region": "r"}),
        ("gs", {"token": "google_default", "project": "p"}, {}),
        ("gs", {"token": "anon"}, {"skip_signature": True}),
        ("gs", {"token": {"a": 1}}, {"service_account_key": json.dumps({"a": 1})}),
        ("gs", {"token": __file__}, {"application_credentials": __file__}),
        ("gs", {"endpoint_url": "https://h"}, {"base_url": "https://h"}),
        (
            "az",
            {"account_name": "a", "account_key": "k"},
            {"account_name": "a", "account_key": "k"},
        ),
        ("az", {"sas_token": "?sv=1&sig=x"}, {"sas_key": "sv=1&sig=x"}),
        (
            "az",
            {"tenant_id": "t", "client_id": "c", "client_secret": "s"},
            {"tenant_id": "t", "client_id": "c", "client_secret": "s"},
        ),
        (
            "az",
            {"connection_string": "AccountName=a;AccountKey=k==;EndpointSuffix=core.windows.net"},
            {"account_name": "a", "account_key": "k=="},
        ),
        (
            "az",
            {"connection_string": "AccountName=a;AccountKey=k;EndpointSuffix=core.cloudapi.de"},
            {
                "account_name": "a",
                "account_key": "k",
                "endpoint": "https://a.blob.core.cloudapi.de",
            },
        ),
    ],
)
def test_options_have_fsspecs_meaning(scheme, options, values):
    given = dict(options)
    assert config_of(scheme, options).values == values
    assert options == given


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("s3", {"nonsense": "x"}),
        ("s3", {"client_kwargs": {"nonsense": "x"}}),
        ("s3", {"client_options": {"nonsense": "x"}}),
        ("gs", {"nonsense": "x"}),
        ("az", {"nonsense": "x", "account_name": "a"}),
        ("s3", {"profile": "nonsense"}),
    ],
)
def test_unknown_option_is_named(scheme, options):
    with pytest.raises(ValueError, match="nonsense"):
        stores.open_store(f"{scheme}://box/a.pt", options)


@pytest.mark.parametrize(
    ("scheme", "options", "word"),
    [
        ("s3", {"client_kwargs": 7}, "client_kwargs has to be a dict"),
        ("gs", {"token": "no/such/file"}, "token has to be"),
    ],
)
def test_option_that_obstore_cannot_take_is_explained(scheme, options, word):
    with pytest.raises(ValueError, match=word):
        config_of(scheme, options)


def test_plain_http_is_allowed_where_the_endpoint_says_so(monkeypatch):
    assert "allow_http" not in config_of("s3", {"endpoint_url": "https://h"}).client
    assert config_of("s3", {"endpoint_url": "http://h"}).client["allow_http"]
    assert config_of("gs", {"base_url": "http://h"}).client["allow_http"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://h")
    assert config_of("s3", {}).client["allow_http"]
    assert "allow_http" not in config_of("s3", {"endpoint_url": "https://h"}).client
    assert config_of("s3", {"client_kwargs": {"verify": False}}).client[
        "allow_invalid_certificates"
    ]


def test_profile_is_read_from_aws_files(monkeypatch, tmp_path):
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = d\naws_secret_access_key = %e\n"
        "[mine]\naws_access_key_id = k\naws_secret_access_key = s\naws_session_token = t\n"
    )
    (tmp_path / "config").write_text("[profile mine]\nregion = r\n[default]\nregion = q\n")
    mine = {
        "access_key_id": "k",
        "secret_access_key": "s",
        "session_token": "t",
        "region": "r",
    }
    default = {"access_key_id": "d", "secret_access_key": "%e", "region": "q"}
    assert config_of("s3", {"profile": "mine"}).values == mine
    assert config_of("s3", {}).values == default
    assert config_of("s3", {"key": "x"}).values == {"access_key_id": "x"}
    assert config_of("s3", {"anon": True}).values == {"skip_signature": True}
    assert config_of("s3", {"region": "z"}).values == {**default, "region": "z"}
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert config_of("s3", {}).values == mine
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    assert config_of("s3", {}).values == {}
    assert config_of("s3", {"profile": "mine"}).values == mine


def test_profile_without_keys_is_explained(tmp_path):
    (tmp_path / "config").write_text("[profile mine]\nrole_arn = arn\n")
    with pytest.raises(ValueError, match=r"'mine'.*neither assumes roles"):
        config_of("s3", {"profile": "mine"})
    assert config_of("s3", {}).values == {}


def test_damaged_file_of_settings_is_named_and_not_quoted(tmp_path):
    (tmp_path / "credentials").write_text("aws_secret_access_key = hidden\n")
    with pytest.raises(ValueError, match=r"credentials is not") as raised:
        config_of("s3", {})
    assert "hidden" not in str(raised.value)
    assert raised.value.__context__ is None


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_options_of_obstore_itself_are_taken(scheme):
    own = {
        "s3": {"virtual_hosted_style_request": True},
        "gs": {"skip_signature": True},
        "az": {"account_name": "a", "use_emulator": True},
    }[scheme]
    opened, _ = stores.open_store(
        f"{scheme}://box/a.pt", {**own, "client_options": {"timeout": "5s"}}
    )
    assert opened.client == "obstore"
    assert opened._client().client_options["timeout"] == "5s"


def test_account_of_an_azure_url_is_used():
    opened, key = stores.open_store("abfss://box@acc.dfs.core.windows.net/a/b.pt")
    assert key == "a/b.pt"
    assert opened._client().config["account_name"] == "acc"
    assert opened._client().config["container_name"] == "box"
    assert opened.shown(key) == "az://box@acc/a/b.pt"
