from __future__ import annotations

import re

import pytest

from bootstrap.gpus import MODELS, find_gpu, has_bf16, nearest_names


@pytest.mark.parametrize(
    ("name", "model"),
    [
        # as nvidia-smi prints them
        ("NVIDIA A40", "A40"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB PCIe"),
        ("NVIDIA A800-SXM4-80GB", "A100 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Server"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Max-Q"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("Quadro RTX 6000", "Quadro RTX 6000"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("Tesla T4", "T4"),
        # as people write them
        ("a100 80gb", "A100 80GB"),
        ("A100", "A100 80GB"),
        ("H100", "H100 SXM"),
        ("4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("5090", "RTX 5090"),
        ("NVIDIA GeForce GTX 1660", None),
        ("L400", None),
    ],
)
def test_names(name: str, model: str | None) -> None:
    found = find_gpu(name)
    assert (found.name if found else None) == model


def test_every_model_finds_itself() -> None:
    assert {model.name: find_gpu(model.name) for model in MODELS} == {model.name: model for model in MODELS}
    assert all(re.compile(model.pattern) for model in MODELS)


def test_bf16_came_with_ampere() -> None:
    without = {model.name for model in MODELS if not model.bf16}
    assert {"T4", "V100", "Quadro RTX 8000", "P40"} <= without
    assert {"A40", "L40S", "RTX 3090", "H100 SXM"}.isdisjoint(without)
    assert has_bf16((12, 0))
    assert not has_bf16((7, 5))


def test_a_slip_of_the_pen_is_understood() -> None:
    assert "L40S" in nearest_names("L4OS")
    assert nearest_names("abacus") == []
