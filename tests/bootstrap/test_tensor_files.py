"""safetensors files: what we write others read, what others write we read, and no damaged one passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from bootstrap import tensor_files
from bootstrap.tensor_files import (
    DTYPES,
    Rows,
    TensorFileError,
    bytes_of,
    load_rows,
    make_header,
    open_tensors,
    read_header,
    read_into,
    read_tensors,
    write_from,
    write_tensors,
)


def some_tensors() -> dict[str, torch.Tensor]:
    tensors = {f"of.{name}": torch.arange(12).reshape(4, 3).to(dtype) for name, dtype in DTYPES.items()}
    return tensors | {"scalar": torch.tensor(7.5), "empty": torch.zeros(0, 5), "odd": torch.ones(3, dtype=torch.uint8)}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    def raw(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
        return tensor.dtype, tuple(tensor.shape), bytes(bytes_of(tensor.contiguous()))

    return {name: raw(tensor) for name, tensor in a.items()} == {name: raw(tensor) for name, tensor in b.items()}


def raw_file(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_the_official_reader_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, some_tensors(), {"title": "Ä"})
    assert same(safetensors.torch.load_file(path), some_tensors())
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"title": "Ä"}


def test_we_read_what_the_official_writer_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(some_tensors(), path, {"format": "pt"})
    assert same(read_tensors(path), some_tensors())
    assert read_header(path).metadata == {"format": "pt"}


def test_a_file_without_tensors(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", {})
    assert read_tensors(tmp_path / "x") == {}


def test_tensors_need_not_be_contiguous_or_without_gradient(tmp_path: Path) -> None:
    tensors = {"across": torch.arange(6.0).reshape(2, 3).T, "trained": torch.ones(2, requires_grad=True)}
    write_tensors(tmp_path / "x", tensors)
    assert same(read_tensors(tmp_path / "x"), {name: t.detach().contiguous() for name, t in tensors.items()})


def test_a_header_says_where_things_will_lie() -> None:
    start, header = make_header({"a": (torch.bfloat16, (3, 5)), "b": (torch.float32, ())}, {"k": "v"})
    assert len(start) % 8 == 0
    assert header.tensors["a"].offset == len(start)
    assert header.tensors["a"].row_bytes == 10
    assert header.tensors["b"].offset == len(start) + 30
    assert header.size == len(start) + 34


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a tensor of 7 rows between two others."""
    path = tmp_path_factory.mktemp("rows") / "x.safetensors"
    write_tensors(path, {"before": torch.ones(5), "x": torch.arange(21).reshape(7, 3), "after": torch.ones(5)})
    return path


@given(start=st.integers(0, 7), data=st.data())
def test_some_rows_are_those_of_the_whole(rows: Path, start: int, data: st.DataObject) -> None:
    stop = data.draw(st.integers(start, 7))
    with open_tensors(rows) as reader:
        assert torch.equal(reader.read("x", start, stop), reader.read("x")[start:stop])


def test_rows_that_are_not_there_are_not_the_next_tensors(rows: Path) -> None:
    with open_tensors(rows) as reader, pytest.raises(AssertionError):
        reader.read("x", 3, 8)


def test_large_tensors_come_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "BLOCK", 7)
    path = tmp_path / "x"
    data = bytearray(range(50))
    with path.open("w+b") as file:
        write_from(file.fileno(), memoryview(data), 3)
        read = bytearray(50)
        read_into(file.fileno(), memoryview(read), 3)
        assert read == data
        with pytest.raises(OSError, match="ends at byte 53, 3 bytes too early"):
            read_into(file.fileno(), memoryview(read), 6)


def test_who_loads_is_told_of_each_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "READ", 16)
    write_tensors(tmp_path / "x", {"x": torch.arange(24.0)})
    target, told = torch.zeros(24), []
    load_rows(tmp_path / "x", [Rows(target, "x")], lambda: told.append(target.count_nonzero().item()))
    assert torch.equal(target, torch.arange(24.0))
    assert len(told) == 6


def test_a_read_tensor_has_memory_of_its_own(rows: Path) -> None:
    with open_tensors(rows) as reader:
        reader.read("x").zero_()
        assert reader.read("x").sum() == sum(range(21))


# ---------------------------------------------------------------- damage

DAMAGE = {
    "empty": b"",
    "shorter than a length": b"\x08\x00",
    "header longer than the file": (100).to_bytes(8, "little") + b"{}",
    "a web page": b"<!DOCTYPE html><html><body>Access denied</body></html>",
    "a pickle": b"\x80\x04" + b"x" * 100,
}


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE.keys())
def test_another_kind_of_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    with pytest.raises(TensorFileError, match=r"weights\.safetensors is not a whole safetensors file"):
        read_header(path)


HEADERS = {
    "no JSON": b"{'a': 1}   ",
    "a list": [],
    "an entry without offsets": {"a": {"dtype": "F32", "shape": [1]}},
    "an unknown dtype": {"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}},
    "shape and bytes disagree": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
    "a negative offset": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}},
    "negative sizes": {"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}},
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS.keys())
def test_a_damaged_header(header: object, tmp_path: Path) -> None:
    with pytest.raises(TensorFileError, match="damaged safetensors header"):
        read_header(raw_file(tmp_path / "x", header, bytes(4)))


@pytest.mark.parametrize("change", [-1, 1, -20])
def test_a_file_that_was_cut_or_grew(change: int, tmp_path: Path) -> None:
    """Half a download is the commonest of all."""
    path = tmp_path / "x"
    write_tensors(path, some_tensors())
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + bytes(change))
    with pytest.raises(TensorFileError, match="cut or overwritten"):
        read_header(path)
