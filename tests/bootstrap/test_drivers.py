from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from bootstrap import drivers
from bootstrap.drivers import branch, least_driver, torch_cuda


@pytest.mark.parametrize(
    ("line", "cuda"),
    [
        ("cuda: Optional[str] = '13.0'", "13.0"),
        ('cuda = "12.6"', "12.6"),
        ("cuda: Optional[str] = None", ""),
        ("git_version = '13.0'", ""),
    ],
)
def test_the_cuda_of_torch_is_read_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, cuda: str
) -> None:
    (tmp_path / "version.py").write_text(f"__all__ = ['cuda', 'hip']\n__version__ = '2.13.0'\n{line}\nhip = None\n")
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(drivers.importlib.util, "find_spec", lambda name: spec)
    assert torch_cuda() == cuda


def test_torch_itself_says_the_same() -> None:
    import torch

    assert torch_cuda() == (torch.version.cuda or "")


def test_no_torch_needs_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers.importlib.util, "find_spec", lambda name: None)
    assert torch_cuda() == ""


def test_the_least_driver() -> None:
    assert [least_driver(cuda) for cuda in ("11.8", "12.8", "13.0", "99.0", "")] == [450, 525, 580, None, None]
    assert [branch(driver) for driver in ("580.95.05", "")] == [580, None]
