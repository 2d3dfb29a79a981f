"""What an error in the trainer is told as."""

from __future__ import annotations

from torch._dynamo.exc import InternalTorchDynamoError

from bootstrap.outcome import CRASH
from bootstrap.whereabouts import Place
from trainer.train import failure


def test_a_compiler_that_fails_is_told_with_the_way_without_it() -> None:
    outcome = failure(InternalTorchDynamoError("AssertionError"), Place.unwatched())
    assert outcome.code == CRASH
    assert "plan: { compile: false }" in outcome.reason


def test_another_error_is_not_blamed_on_the_compiler() -> None:
    assert "compile" not in failure(ZeroDivisionError("division by zero"), Place.unwatched()).reason
