"""Times and limits in words."""

import pytest

from lqs.admission.limit_words import duration, in_short
from lqs.config_limits import LimitConfig

S = 10**9


@pytest.mark.parametrize(
    ("time_ns", "words"),
    [
        (0, "0s"),
        (1, "1ms"),
        (999_000_000, "999ms"),
        (S, "1s"),
        (7_660_000_001, "7.661s"),
        (59_999_000_000, "59.999s"),
        (60 * S, "1m0s"),
        (360 * S, "6m0s"),
        (60 * S + 1, "1m1s"),
        (3600 * S, "1h0m0s"),
        (90_061 * S, "25h1m1s"),
    ],
)
def test_a_time_is_written_as_in_openais_headers_and_rounded_up(time_ns: int, words: str) -> None:
    assert duration(time_ns) == words


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (LimitConfig(of="tokens", amount=100), "100 tokens in 1m0s for each key"),
        (LimitConfig(of="requests", amount=5, per="server", period_s=1.0), "5 requests in 1s for all together"),
        (
            LimitConfig(of="compute_s", amount=30, per="tier", period_s=3600.0),
            "30 seconds of compute in 1h0m0s for each tier",
        ),
        (LimitConfig(of="parallel", amount=2, per="model"), "2 at once for each model"),
        (
            LimitConfig(of="tokens", amount=9, tiers=("free",), routes=("chat",)),
            "9 tokens in 1m0s for each key of free, chat",
        ),
    ],
)
def test_a_limit_is_told_in_a_few_words(limit: LimitConfig, words: str) -> None:
    assert in_short(limit) == words
