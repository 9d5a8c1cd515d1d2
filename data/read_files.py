"""Read the documents of --data_files or of the Hugging Face hub, and Tiny Shakespeare."""

import glob
import gzip
import json
import os
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

from isogpt.common.files import write_whole
from isogpt.common.packages import needed_by

SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
KINDS = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
BATCH_ROWS = 1000
BLOCK = 1 << 20  # characters of a .txt file, or bytes of a .parquet file, that are read at once


def read_documents(data_files: str, text_key: str = "text", separator: str = "") -> Iterator[str]:
    """
    Yield the documents of a comma-separated list of files, folders and globs, sorted by path. A .txt file is
    one document, or several with a separator, a .jsonl file contains one per line, a .parquet file one per
    row; null is none. All files are streamed, except a .txt file without a separator.

    Raises:
        ValueError: there is no file that can be read, or one of them cannot be parsed.
    """
    for path in find_files(data_files):
        count = 0
        try:
            for text in texts_in(path, text_key, separator):
                if not isinstance(text, str | None):
                    raise ValueError(f"no string at '{text_key}' in {str(text)[:200]}: set --text_key=")
                count += 1
                if text is not None:
                    # JSON can hold halves of surrogate pairs, but neither UTF-8 nor a tokenizer.json can
                    yield text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        except Exception as error:  # a damaged file raises nearly anything
            raise ValueError(f"{path}, document {count + 1}: {error}") from error


def find_files(data_files: str) -> list[Path]:
    """The files of --data_files, see `read_documents`."""
    names = set()
    for pattern in data_files.split(","):
        name = os.path.expanduser(pattern)  # a shell replaces ~ only at the start of a word
        if os.path.isdir(name):
            name = os.path.join(glob.escape(name), "**", "*")
        found = [name] if os.path.exists(name) else glob.glob(name, recursive=True)
        files = [file for file in found if file.lower().endswith(KINDS) and os.path.isfile(file)]
        if not files:
            raise ValueError(f"--data_files: '{pattern}' is no file that ends in {', '.join(KINDS)}")
        names.update(files)
    return [Path(name) for name in sorted(names)]


def texts_in(path: Path, text_key: str, separator: str) -> Iterator[object]:
    """Yield the texts of a file; for a record without text_key, the record itself."""
    name = path.name.lower()
    if name.endswith(".txt"):
        yield from separated(path, separator) if separator else [read_text(path)]
    elif name.endswith(".parquet"):
        from pyarrow.parquet import ParquetFile

        # by default, a column of a whole row group would be in memory, which may be as large as the file
        with ParquetFile(path, pre_buffer=False, buffer_size=BLOCK) as table:
            for batch in table.iter_batches(BATCH_ROWS, columns=[text_key]):
                yield from batch[text_key].to_pylist()
    else:  # `datasets` would read a text that is a date as a date, and records of one form only
        with (gzip.open if name.endswith(".gz") else open)(path, "rb") as lines:
            for line in filter(bytes.strip, lines):
                record = json.loads(line)
                yield record.get(text_key, record) if isinstance(record, dict) else record


def read_text(path: Path) -> str:
    """
    Return the text of a file in UTF-8, or in UTF-16 with a byte order mark: any other encoding would be a
    guess. It has '\\n' line endings and no byte order mark.
    """
    with open(path, "rb") as file:
        is_utf16 = file.read(2) in (BOM_UTF16_LE, BOM_UTF16_BE)
    try:
        return path.read_text(encoding="utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeError as e:
        raise ValueError(f"{path} is not text in UTF-8 ({e}): save it as UTF-8") from e


def separated(path: Path, separator: str) -> Iterator[str]:
    """Yield the texts between the separators, without white space at both ends, while the file is read."""
    rest = ""
    with open(path, encoding="utf-8-sig") as file:
        # as much as is left of a long document, which is then searched twice and not once for each block
        while block := file.read(max(BLOCK, len(rest))):
            *documents, rest = (rest + block).split(separator)
            yield from map(str.strip, documents)
    yield rest.strip()


def read_shakespeare(folder: Path) -> tuple[str, dict]:
    """
    Return Tiny Shakespeare and its source: the text of input.txt in `folder`, which is downloaded if it does
    not exist.
    """
    path = folder / "input.txt"
    if not path.exists():
        print(f"downloading {SHAKESPEARE}; without a network, put the text at {path}")
        with urlopen(SHAKESPEARE, timeout=60) as response:
            write_whole(path, response.read())
    return read_text(path), {"file": path.name}


def read_hub(name: str, text_key: str, options: dict) -> Iterator[str]:
    """Stream the documents of a data set of Hugging Face's datasets; `options` are those of load_dataset."""
    with needed_by(f"reading {name}", "datasets"):
        from datasets import load_dataset

    rows = load_dataset(name, split="train", streaming=True, **options)
    for batch in rows.iter(batch_size=BATCH_ROWS):
        if text_key not in batch:
            raise ValueError(f"no column '{text_key}' in {list(batch)}: set --text_key=")
        yield from filter(None, batch[text_key])
