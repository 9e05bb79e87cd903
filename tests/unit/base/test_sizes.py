"""Sizes are read by one parser, wherever they are given."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
import stillframe
from stillframe._base import sizes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (4096, 4096),
        (np.int64(4096), 4096),
        ("4096", 4096),
        ("300MB", 300_000_000),
        ("300 mb", 300_000_000),
        ("4GiB", 4 * GIB),
        ("1.5 gb", 1_500_000_000),
        ("2.01GB", 2_010_000_000),  # 2.01 * 1000**3 in floating point is slightly different
        ("1.5kib", 1536),
        (".5 MiB", 1 << 19),
        ("5M", 5_000_000),
        ("1TiB", 1 << 40),
    ],
)
def test_a_size_is_an_int_or_a_number_with_a_unit(value, nbytes):
    assert sizes.parse(value, "it") == nbytes


@pytest.mark.parametrize("text", ["", "much", "-1", "300XB", "1.2.3MB", "MB", "nan", "1e400"])
def test_invalid_size_is_refused(text):
    with pytest.raises(ValueError, match=r"it='.*' is not a size: give bytes, or .*'4GiB'"):
        sizes.parse(text, "it")
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        sizes.argparse_size_type()(text)


@pytest.mark.parametrize("value", [1.5, True, None, b"4GiB"])
def test_size_of_another_type_is_refused(value):
    with pytest.raises(TypeError, match="it has to be an int"):
        sizes.parse(value, "it")


def test_size_out_of_bounds_is_refused_with_the_bounds_as_given():
    with pytest.raises(ValueError, match="it has to be at least 1000, not 1B"):
        sizes.parse("1B", "it", least=1000)
    with pytest.raises(ValueError, match="it has to be at most"):
        sizes.parse("1000TiB", "it")
    with pytest.raises(argparse.ArgumentTypeError, match="at least"):
        sizes.argparse_size_type(least=1 << 20)("10KB")


@pytest.mark.parametrize(
    ("nbytes", "decimal", "binary"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (16 << 20, "16.8 MB", "16 MiB"),
        (300_000_000, "300 MB", "286 MiB"),
        (999_999_999, "1 GB", "954 MiB"),
        (3 * GIB // 2, "1.61 GB", "1.5 GiB"),
    ],
)
def test_sizes_are_shown_with_three_digits(nbytes, decimal, binary):
    assert sizes.decimal(nbytes) == decimal
    assert sizes.binary(nbytes) == binary


def test_every_size_argument_accepts_a_string(monkeypatch):
    pytest.importorskip("lightning")
    from stillframe.lightning import AsyncCheckpointIO

    with stillframe.Engine(pool_bytes="64MiB", block_bytes="1MiB") as engine:
        assert engine.stats()["pool_bytes"] == 64 << 20
        assert engine.stats()["block_bytes"] == 1 << 20
        engine.warm_up("2MiB")
        assert engine.stats()["committed_bytes"] == 2 << 20
    monkeypatch.setenv("STILLFRAME_POOL_BYTES", "64 mib")
    with stillframe.Engine() as engine:
        assert engine.stats()["pool_bytes"] == 64 << 20
    AsyncCheckpointIO(pool_bytes="64MiB")
    with pytest.raises(ValueError, match="pool_bytes='lots' is not a size"):
        AsyncCheckpointIO(pool_bytes="lots")
