"""What clients are told, and the headers that go with it."""

import pytest

from lqs.errors import (
    BadRequest,
    ConfigError,
    LqsError,
    ModelFileError,
    PromptTooLong,
    RequestRefused,
    Unauthorized,
    clamp_retry_after,
)


def test_a_refusal_names_its_reason_and_when_to_come_back() -> None:
    error = RequestRefused("queue_full", "full", retry_after_s=3.2)
    assert (error.status, error.type, error.code) == (429, "rate_limit_error", "queue_full")
    assert error.headers == {
        "x-lqs-reason": "queue_full",
        "Retry-After": "4",
        "retry-after-ms": "3200",
    }


@pytest.mark.parametrize("reason", ["draining", "no_device", "model_loading", "queue_timeout"])
def test_what_the_server_cannot_do_now_is_503(reason: str) -> None:
    error = RequestRefused(reason, "later", retry_after_s=1)
    assert (error.status, error.type) == (503, "overloaded_error")
    assert int(error.headers["Retry-After"]) >= 1
    assert ("Connection" in error.headers) == (reason == "draining")


@pytest.mark.parametrize(("wait_s", "told"), [(-5, "1"), (0, "1"), (0.2, "1"), (1.01, "2"), (9999, "120")])
def test_retry_after_is_whole_seconds_within_what_clients_honour(wait_s: float, told: str) -> None:
    headers = RequestRefused("queue_full", "full", retry_after_s=wait_s).headers
    assert headers["Retry-After"] == told
    assert headers["retry-after-ms"].isdecimal()
    assert 1 <= clamp_retry_after(wait_s) <= 120


def test_a_prompt_that_is_too_long_is_told_the_true_numbers() -> None:
    error = PromptTooLong(70, 64)
    assert error.code == "context_length_exceeded"
    assert error.status == 400
    assert "64" in error.message
    assert "70" in error.message
    assert error.headers["x-should-retry"] == "false"
    assert "at least 70" in PromptTooLong(70, 64, is_exact=False).message


def test_a_missing_key_is_told_how_to_send_one() -> None:
    error = Unauthorized()
    assert error.status == 401
    assert error.headers["WWW-Authenticate"].startswith("Bearer")


def test_the_code_can_be_more_precise_than_the_class() -> None:
    assert BadRequest("no", param="seed", code="bad_seed").code == "bad_seed"
    assert BadRequest("no").code == "invalid_value"
    assert LqsError("no").reason is None


def test_start_errors_carry_their_exit_code() -> None:
    assert (ConfigError.exit_code, ModelFileError.exit_code) == (2, 1)
