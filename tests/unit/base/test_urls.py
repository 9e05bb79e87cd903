"""URLs: which paths are remote, how they are shown, and which ones are the same."""

from pathlib import Path

import pytest
from stillframe._base import urls
from stillframe._base.urls import Url


@pytest.mark.parametrize(
    ("path", "remote"),
    [
        ("s3://bkt/a.pt", True),
        (b"s3://bkt/a.pt", True),
        ("S3A://bkt/a.pt", True),
        ("hdfs://host:8020/a.pt", True),
        ("memory://a.pt", True),
        ("file:///a.pt", False),
        ("FILE:///a.pt", False),
        ("a.pt", False),
        (Path("a.pt"), False),
        ("dir/s3://bkt/a.pt", False),
        ("3s://bkt/a.pt", False),
        (7, False),
        (None, False),
    ],
)
def test_url_with_a_scheme_is_remote(path, remote):
    assert urls.is_remote(path) is remote


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bkt/a b/c#?x.pt", "s3://bkt/a b/c#"),
        ("s3a://bkt/a.pt", "s3a://bkt/a.pt"),
        ("ftp://user:pass@host:21/a@b.pt", "ftp://host:21/a@b.pt"),
        ("ftp://user@host/a.pt", "ftp://host/a.pt"),
        ("ftp://user:p@ss@host/a.pt", "ftp://host/a.pt"),
        ("ftp://user:pa/ss@host/a@b.pt", "ftp://host/a@b.pt"),
        ("ftp://user:pa?ss@host/a.pt", "ftp://host/a.pt"),
        ("ftp://user:pa/s?s@host/a.pt", "ftp://host/a.pt"),
        ("ftp://host:21/a@b.pt", "ftp://host:21/a@b.pt"),
        ("https://host/a.pt?sig=abc", "https://host/a.pt"),
        ("https://host?sig=abc/d", "https://host/d"),
        (
            "abfs://box@acc.dfs.core.windows.net/a.pt?sv=1",
            "abfs://box@acc.dfs.core.windows.net/a.pt",
        ),
        ("az://box:key@acc.dfs.core.windows.net/a.pt", "az://acc.dfs.core.windows.net/a.pt"),
        ("memory://a.pt", "memory://a.pt/"),
        ("dir/user:pass@x?y", "dir/user:pass@x?y"),
    ],
)
def test_shown_url_has_no_credentials(url, shown):
    assert urls.shown(url) == shown


def test_spellings_of_one_object_have_one_key():
    def keys(*spellings):
        return {urls.key(each) for each in spellings}

    assert keys("s3://bkt/a", "s3a://bkt/a", "S3://bkt/a", b"s3://bkt/a") == {b"s3://bkt/a"}
    assert keys("gs://bkt/a", "gcs://bkt/a") == {b"gs://bkt/a"}
    assert keys("az://box/a", "abfs://box/a", "azure://box/a") == {b"az://box/a"}
    assert keys("abfss://box@acc.dfs.core.windows.net/a") == {b"az://box@acc/a"}
    assert keys("ftp://u:p@host/a", "ftp://host/a?x=1", "ftp://host/a") == {b"ftp://host/a"}
    assert len(keys("s3://bkt/a", "s3://bkt/A", "s3://other/a", "gs://bkt/a")) == 4


def test_repr_has_no_credentials():
    url = Url.parse("ftp://user:pass@host/a.pt?sig=abc")
    assert (url.user, url.query) == ("user:pass", "sig=abc")
    assert repr(url) == "Url(ftp://host/a.pt)"


def test_text_without_a_scheme_is_refused():
    with pytest.raises(ValueError, match="does not begin with a scheme"):
        urls.key("bkt/a.pt")


def test_file_url_is_a_local_path():
    assert urls.local_path_of_file_url("file:///data/a%20b.pt") == "/data/a b.pt"
    assert urls.local_path_of_file_url("file://localhost/data/a.pt") == "/data/a.pt"
    assert urls.local_path_of_file_url("data/a%20b.pt") == "data/a%20b.pt"
    with pytest.raises(ValueError, match="names no host"):
        urls.local_path_of_file_url("file://data/a.pt")
