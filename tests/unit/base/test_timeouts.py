"""The check of timeouts."""

from __future__ import annotations

import fractions
import math

import pytest
from stillframe._base import arguments


@pytest.mark.parametrize("timeout", [0, 1.5, -1, math.inf, fractions.Fraction(1, 2)])
def test_timeout_in_seconds_is_accepted(timeout):
    assert arguments.seconds(timeout) == timeout


def test_timeout_of_none_waits_forever():
    assert arguments.seconds(None) is None


@pytest.mark.parametrize("timeout", [True, False, "1", [1], 1j])
def test_timeout_that_is_no_number_is_refused(timeout):
    with pytest.raises(TypeError, match="number of seconds"):
        arguments.seconds(timeout)


def test_timeout_of_nan_is_refused():
    with pytest.raises(ValueError, match="nan"):
        arguments.seconds(math.nan)
