from __future__ import annotations

import json
from pathlib import Path

import pytest

from entrypoint import cli
from jobs.load import load_job, parse_job

FILES = Path(__file__).parents[1] / "jobs" / "convert" / "files"


def convert(*arguments: object) -> int:
    return cli.main(["convert", *(str(each) for each in arguments)])


def test_the_job_is_printed_and_the_report_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(FILES / "toolkit-lora.yaml", "--volume", "/nowhere") == 0
    out, err = capsys.readouterr()
    assert parse_job(out).job.name == "p3r5on_v1"
    assert "mapped:" in err
    assert "not supported:" in err


def test_a_file_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "jobs" / "a.yaml"
    assert convert(FILES / "gui-full.json", "--output", job, "--volume", tmp_path) == 0
    assert load_job(job).job.name == "my_checkpoint"
    before = job.read_text(encoding="utf-8")
    assert capsys.readouterr().out == ""
    assert convert(FILES / "gui-lora.json", "--output", job, "--volume", tmp_path) == 64
    assert job.read_text(encoding="utf-8") == before
    assert "is not overwritten" in capsys.readouterr().err
    assert [path.name for path in job.parent.iterdir()] == ["a.yaml"]


def test_a_link_to_nothing_is_not_overwritten_either(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").symlink_to(tmp_path / "gone.yaml")
    assert convert(FILES / "gui-full.json", "--output", tmp_path / "a.yaml", "--volume", tmp_path) == 64


def test_pictures_are_counted_with_the_repeats_of_their_folders(tmp_path: Path) -> None:
    for name, count in (("img/5_cat", 3), ("img/dog", 2)):
        (tmp_path / name).mkdir(parents=True)
        for number in range(count):
            (tmp_path / name / f"{number}.JPG").touch()
            (tmp_path / name / f"{number}.txt").touch()
    source = json.loads((FILES / "gui-full.json").read_text(encoding="utf-8")) | {
        "train_data_dir": "img",
        "reg_data_dir": "",
        "sample_every_n_epochs": 3,
        "sample_prompts": "a cat",
    }
    (tmp_path / "a.json").write_text(json.dumps(source), encoding="utf-8")
    assert convert(tmp_path / "a.json", "--output", tmp_path / "a.yaml", "--volume", tmp_path / "volume") == 0
    assert load_job(tmp_path / "a.yaml").job.sample.every == 3 * 5  # 17 pictures, 4 a step


def test_what_is_wrong_is_told_with_code_64(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text("{", encoding="utf-8")
    assert convert(tmp_path / "a.json") == 64
    assert "a.json:1: this is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize("gpus", ["0", "two", "-1"])
def test_gpus_is_a_number(gpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        convert(FILES / "gui-full.json", f"--gpus={gpus}")
    assert "is no number of GPUs" in capsys.readouterr().err
