import pytest

from grader.intake.redaction import redact


@pytest.mark.parametrize(
    "secret",
    [
        "https://user:hunter2@github.com/u/R",
        "fatal: https://hunter2@github.com/u/R not found",
        "ghp_hunter2aaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "github_pat_hunter2aaaaaaaaaaaaaaaaaaaaaaaa",
        "password = hunter2",
        "PASSWORD: hunter2; next",
        "api_key=hunter2",
        "-----BEGIN RSA PRIVATE KEY-----\nhunter2\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_secrets_are_taken_out(secret: str) -> None:
    assert "hunter2" not in redact(secret)
    assert "[redacted]" in redact(secret)


@pytest.mark.parametrize(
    "text", ["https://github.com/u/R/tree/28d8951", "git@github.com:u/R.git", "the token is long", "tokens[3] == 4"]
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


def test_what_stands_around_a_secret_stays() -> None:
    assert redact("line 3: password = hunter2, see main.cc") == "line 3: password = [redacted], see main.cc"
