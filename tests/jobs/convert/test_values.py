from __future__ import annotations

import pytest

from jobs.convert.sd_scripts import literal
from jobs.convert.values import DEV, base_of, drawn_of, name_of, optimizer_of, path_here, resolution_of


@pytest.mark.parametrize(
    ("model", "base"),
    [
        ("D:\\models\\flux1-dev.safetensors", DEV),
        ("/x/flux1-dev-fp8.safetensors", DEV),
        ("flux_dev.sft", DEV),
        ("black-forest-labs/FLUX.1-dev", DEV),
        ("/x/flux1-schnell.safetensors", "black-forest-labs/FLUX.1-schnell"),
        ("flux1-krea-dev.safetensors", "black-forest-labs/FLUX.1-Krea-dev"),
        ("me/my-flux", "me/my-flux"),
        ("/x/flux1-dev-mine.safetensors", "/x/flux1-dev-mine.safetensors"),
        ("D:/x/mine.safetensors", "models/mine.safetensors"),
        ("", DEV),
    ],
)
def test_bases(model: str, base: str) -> None:
    assert base_of(model)[0] == base


@pytest.mark.parametrize(
    ("path", "here", "copied"),
    [
        ("/workspace/img", "/workspace/img", False),
        ("C:\\a\\b c", "datasets/b c", True),
        ("\\\\server\\share\\pics", "datasets/pics", True),
        ("../pics", "datasets/pics", True),
        ("~/pics/", "datasets/pics", True),
        ("./datasets/pics", "datasets/pics", False),
        ("C:\\", "datasets/C", True),
        ("..", "datasets/..", True),
    ],
)
def test_paths(path: str, here: str, copied: bool) -> None:
    found, remark = path_here(path, "datasets")
    assert found == here
    assert ("copy" in remark) == copied


def test_prompts_with_options() -> None:
    drawn = drawn_of("a cat -- really --w 768 --h 1024 --n low quality, bad --d 5 --g 3.5 --l 1")
    assert drawn.prompt == "a cat -- really"
    assert drawn.options == {"width": 768, "height": 1024, "seed": 5, "guidance": 3.5}
    assert drawn.others == {"n": "low quality, bad", "l": "1"}
    assert drawn_of("a cat --l 3.5").options == {"guidance": 3.5}
    assert drawn_of("--w 5").prompt == ""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("0.9,0.99", [0.9, 0.99]), ("(1e-30, 1e-3)", [1e-30, 1e-3])],
        *[("True", True), ("7", 7), ("1e-8", 1e-8), ("none", "none")],
    ],
)
def test_options_are_read_as_python_would(text: str, value: object) -> None:
    assert literal(text) == value


@pytest.mark.parametrize(
    ("value", "size"),
    [
        *[("512,512", 512), ("768x512", 624), (1024, 1024), ([512, 768], 624), ("30", 64)],
        *[("x", None), ([1, 2, 3], None), (-5, None)],
    ],
)
def test_resolutions(value: object, size: int | None) -> None:
    assert resolution_of(value) == size


def test_optimizers_by_their_names_there() -> None:
    names = {
        "adamw8bit": "AdamW8bit",
        "PagedAdamW": "PagedAdamW32bit",
        "PRODIGY": "Prodigy",
        "torch.optim.Adam": "torch.optim.Adam",
    }
    for name, ours in names.items():
        chosen = optimizer_of(name)
        assert chosen is not None
        assert chosen.name == ours
    assert optimizer_of("DAdaptAdam") is None


def test_names() -> None:
    assert name_of("My LoRA (v2)!") == "My-LoRA-v2"
    assert name_of("...") == "converted"
    assert name_of("Ünï") == "n"
