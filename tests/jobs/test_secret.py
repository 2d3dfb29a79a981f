from __future__ import annotations

import pytest

from jobs import secret
from jobs.problem import Problem

TOKEN = "hf_" + "aB3" * 11 + "x"


@pytest.mark.parametrize("text", [TOKEN, f"x: '{TOKEN}'", "https://me:pass@host/a.zip", "rpa_" + "A1" * 20])
def test_secrets_are_found_and_hidden(text: str) -> None:
    assert list(secret.find(text))
    assert "***" in secret.hidden(text)
    assert "aB3aB3" not in secret.hidden(text)
    assert "pass" not in secret.hidden(text)


@pytest.mark.parametrize("text", ["hf_style", "hf://datasets/me/x", "https://host:80/a@b", "a mask-and-brush photo"])
def test_ordinary_text_is_no_secret(text: str) -> None:
    assert not list(secret.find(text))


def test_names_of_secrets() -> None:
    assert all(map(secret.names_secret, ("token", "hf_token", "HF_TOKEN", "api_key", "password")))
    assert not any(map(secret.names_secret, ("tokens", "trigger", "key", "text_tokens")))


def test_no_part_of_a_problem_shows_a_secret() -> None:
    problem = Problem(TOKEN, TOKEN, TOKEN, excerpt=TOKEN)
    assert TOKEN not in str(secret.without_secrets(problem))
