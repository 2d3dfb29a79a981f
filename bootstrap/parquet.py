"""Pictures and captions in parquet tables, as ``datasets`` pushes them to the hub, become one zip of picture files."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bootstrap.images import image_format
from bootstrap.volume import flush_folder, own_parts

CAPTION_COLUMNS = ("text", "caption", "captions", "prompt", "description", "en_text", "label_text")
ROWS = 16  # read at a time: each may hold a picture of several MB
_ENDINGS = {"JPEG": "jpg", "JPEG2000": "jp2", "TIFF": "tif", "HEIF": "heic"}


class ParquetError(Exception):
    """Tables without pictures; the message says what they have."""


def to_zip(tables: Sequence[Path], target: Path, say: Callable[[str], None]) -> None:
    """Writes ``00000001.jpg``, ``00000001.txt`` and so on, of the tables' rows in order, as ``target``.

    Pictures are stored as they are. Raises ParquetError, OSError.
    """
    import pyarrow
    import pyarrow.parquet

    part = target.with_name(f".{target.name}.{own_parts()}.part")
    try:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as archive:
            number = 0
            for path in tables:
                table = pyarrow.parquet.ParquetFile(path)
                picture, caption = columns(table.schema_arrow)
                wanted = [picture, caption] if caption else [picture]
                for batch in table.iter_batches(batch_size=ROWS, columns=wanted):
                    for row in batch.to_pylist():
                        number += 1
                        _add(archive, number, row[picture], row.get(caption) if caption else None)
            say(f"{number} pictures of {len(tables)} parquet tables as {target.name}")
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(target)
    except pyarrow.ArrowException as error:
        raise ParquetError(f"cannot be read ({error})") from error
    finally:
        part.unlink(missing_ok=True)
    flush_folder(target.parent)


def columns(schema: Any) -> tuple[str, str | None]:
    """Which column holds pictures and which, if any, captions. Raises ParquetError."""
    import pyarrow

    def holds_pictures(kind: Any) -> bool:
        named = pyarrow.types.is_struct(kind) and "bytes" in [field.name for field in kind]
        return bool(named or pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind))

    def holds_text(kind: Any) -> bool:
        return bool(pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind))

    pictures = [field.name for field in schema if holds_pictures(field.type)]
    texts = [field.name for field in schema if holds_text(field.type)]
    if not pictures:
        raise ParquetError(f"has no column of pictures; it has {', '.join(schema.names)}")
    picture = "image" if "image" in pictures else pictures[0]
    known = [name for name in CAPTION_COLUMNS if name in texts]
    return picture, known[0] if known else texts[0] if len(texts) == 1 else None


def _add(archive: zipfile.ZipFile, number: int, picture: Any, caption: Any) -> None:
    data = picture.get("bytes") if isinstance(picture, dict) else picture
    if data is None:
        raise ParquetError(f"has no picture in row {number}" + (f", only {picture!r:.80}" if picture else ""))
    form = image_format(data[:16])
    ending = _ENDINGS.get(form, form.lower()) if form else "jpg"  # what is none is named when it is decoded
    archive.writestr(f"{number:08}.{ending}", data)
    if caption is not None:
        archive.writestr(f"{number:08}.txt", str(caption))
