"""Read the documents of --data_files or of the Hugging Face hub, and Tiny Shakespeare."""

import glob
import gzip
import hashlib
import json
import os
import re
import shlex
import sys
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the repository

from show_progress import Place
from write_files import atomic_files

from isogpt.common.files import parse_json
from isogpt.common.packages import needed_by
from isogpt.data.text_files import read_text

SHAKESPEARE = {
    "url": "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "sha256": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
}
# the command that unpacks a file with this extension, and the function of pandas that reads a table
UNPACK = {".gz": "gunzip -k", ".bz2": "bunzip2 -k", ".xz": "xz -dk", ".zst": "zstd -d", ".zip": "unzip"}
PANDAS = {
    ".csv": "read_csv({})",
    ".tsv": 'read_csv({}, sep="\\t")',
    ".json": "read_json({})",
    ".feather": "read_feather({})",
}
KINDS = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
BATCH_ROWS = 1000
BLOCK = 1 << 20  # characters of a .txt file, or bytes of a .parquet file, that are read at once


def read_documents(
    data_files: str, text_key: str = "text", separator: str = "", place: Place | None = None
) -> Iterator[str]:
    """
    Yield the documents of a comma-separated list of files, folders and globs, sorted by path. A .txt file is
    one document, or several with a separator, a .jsonl file contains one per line, a .parquet file one per
    row. All files are streamed, except a .txt file without a separator.

    Args:
        place: records how much has been read.

    Raises:
        ValueError: a file does not exist, has a different extension or cannot be parsed.
    """
    place = place or Place()
    paths = find_files(data_files)
    sizes = [path.stat().st_size for path in paths]
    place.total, place.before = sum(sizes), 0
    readers = {".txt": partial(read_txt, separator=separator), ".jsonl": read_jsonl, ".parquet": read_parquet}
    readers[".jsonl.gz"] = read_gz
    for path, size in zip(paths, sizes, strict=True):
        with open(path, "rb") as place.file:
            documents = readers[kind_of(path)](path, place.file, text_key)
            yield from with_whole_characters(documents, path)
        place.before += size


def find_files(data_files: str) -> list[Path]:
    """The files of --data_files, see `read_documents`, all of which are checked before the first is read."""
    names: dict[str, str] = {}  # by the file that they lead to
    # a file's name may contain a comma; a shell replaces ~ only at the start of a word
    patterns = [data_files] if os.path.exists(data_files) else map(str.strip, data_files.split(","))
    for pattern in map(os.path.expanduser, patterns):
        matches = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        files = set(filter(os.path.isfile, matches))
        if os.path.isdir(pattern):
            files = {name for name in files_in(pattern) if kind_of(Path(name))}
        if not files:
            raise ValueError(f"--data_files: {about_no_files(pattern, matches)}")
        names |= {os.path.realpath(name): name for name in sorted(files)}
    paths = [Path(name) for name in sorted(names.values())]
    for path in paths:
        if not kind_of(path):
            problem = f"{path}: only files that end in {', '.join(KINDS)} can be read"
            raise ValueError(f"{problem}; {how_to_convert(path)}")
    if any(kind_of(path) == ".parquet" for path in paths):
        with needed_by("a .parquet file", "pyarrow"):
            import pyarrow.parquet  # noqa: F401
    return paths


def about_no_files(pattern: str, matches: list[str]) -> str:
    """What is wrong with a pattern that matches no file that can be read, and what to type."""
    problem, example = f"no file matches '{pattern}'", "texts/*.txt,more.jsonl"
    if os.path.isdir(pattern):
        problem = f"the folder '{pattern}' contains no file that ends in {', '.join(KINDS)}"
        if others := sorted(files_in(pattern)):
            return f"{problem}; {how_to_convert(Path(others[0]))}"
    elif links := list(filter(os.path.islink, matches)):
        problem = f"'{links[0]}' is a link to {os.readlink(links[0])}, which does not exist"
    return f"{problem}: type --data_files='{example}' or the like"


def files_in(folder: str) -> Iterator[str]:
    """The files in a folder and in the folders within it; those whose names begin with a dot are left out."""
    return filter(os.path.isfile, glob.glob(os.path.join(glob.escape(folder), "**", "*"), recursive=True))


def kind_of(path: Path) -> str:
    """The extension of a file that can be read; '' for other files."""
    return next(filter(path.name.lower().endswith, KINDS), "")


def with_whole_characters(documents: Iterable[str], path: Path) -> Iterator[str]:
    """
    Replace lone surrogates, which JSON can hold and no UTF-8 text can, as tiktoken does, and report the first
    ones: a tokenizer.json could not store them.
    """
    is_reported = False
    for number, document in enumerate(documents, 1):
        try:
            document.encode()
        except UnicodeEncodeError:
            document = re.sub("[\ud800-\udfff]", "\ufffd", document)
            if not is_reported:
                print(f"note: {path}, document {number}: halves of surrogate pairs are replaced by U+FFFD")
            is_reported = True
        yield document


def how_to_convert(path: Path) -> str:
    """What to type for a file with an unknown extension."""
    name, suffix = shlex.quote(str(path)), path.suffix.lower()
    if suffix in UNPACK:
        return f"type: {UNPACK[suffix]} {name}"
    if suffix in PANDAS:
        source, target = (json.dumps(str(name)) for name in (path, path.with_suffix(".parquet")))
        command = f"import pandas; pandas.{PANDAS[suffix].format(source)}.to_parquet({target})"
        return f"type: python -c {shlex.quote(command)}"
    return f"if {name} contains plain text, rename it to .txt"


def read_txt(path: Path, file: BinaryIO, text_key: str, separator: str = "") -> Iterator[str]:
    """
    Yield the text of the file. With a separator, yield the texts between them, without white space at both
    ends, while the file is read. `text_key` is unused.
    """
    if not separator:
        yield read_text(path)
        return
    document, seen = [], ""
    try:
        with TextIOWrapper(file, encoding="utf-8-sig") as text:
            while block := text.read(BLOCK):
                *ends, rest = (seen + block).split(separator)
                for end in ends:
                    yield "".join([*document, end]).strip()
                    document = []
                begun = max(0, len(rest) - len(separator) + 1)  # from here on, a separator may have begun
                document.append(rest[:begun])
                seen = rest[begun:]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}): save it as UTF-8") from error
    yield "".join([*document, seen]).strip()


def read_jsonl(path: Path, file: BinaryIO, text_key: str) -> Iterator[str]:
    """Yield the string at `text_key` of each line; skip blank lines."""
    yield from texts_of(records_of(path, file), path, text_key)


def read_gz(path: Path, file: BinaryIO, text_key: str) -> Iterator[str]:
    """Like `read_jsonl`, for a compressed file."""
    try:
        with gzip.open(file) as lines:
            yield from read_jsonl(path, lines, text_key)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: not readable as gzip ({error})") from error


def records_of(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    """Yield (place, record) of each line of a .jsonl file that is not blank."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield f"{path}:{number}", parse_json(line)
            except ValueError as error:  # invalid JSON or UTF-8
                raise ValueError(f"{path}:{number}: not JSON ({error})") from error


def read_parquet(path: Path, file: BinaryIO, text_key: str) -> Iterator[str]:
    """Yield the column `text_key`; `file` is unused, since reading it is slower than the path."""
    import pyarrow.parquet

    try:
        # by default, a column of a whole row group would be in memory, which may be as large as the file
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=BLOCK) as table:
            # None reads all columns, for the error message
            columns = [text_key] if text_key in table.schema_arrow.names else None
            batches = table.iter_batches(batch_size=BATCH_ROWS, columns=columns)
            records = (record for batch in batches for record in batch.to_pylist())
            rows = ((f"{path}, row {number}", record) for number, record in enumerate(records, 1))
            yield from texts_of(rows, path, text_key)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not readable as Parquet ({error})") from error


def texts_of(records: Iterable[tuple[str, Any]], path: Path, text_key: str) -> Iterator[str]:
    """
    Yield record[text_key] of each (place, record), and report how many records contain null there.

    Raises:
        ValueError: a record is not a dict with a string or null there.
    """
    nulls = 0
    for place, record in records:
        if not isinstance(record, dict) or not isinstance(record.get(text_key, 0), str | None):
            problem = f"{place}: no string at '{text_key}' in {str(record)[:200]}"
            raise ValueError(f"{problem}; {advice_on(record)}")
        if record[text_key] is None:
            nulls += 1
        else:
            yield record[text_key]
    if nulls:
        print(f"note: {path}: left out the records with null at '{text_key}', {nulls:,} in all")


def advice_on(record: Any) -> str:
    """What to type if a record contains no text at the key: another key, or how to join several texts."""
    values = record if isinstance(record, dict) else {}
    keys = [key for key, value in values.items() if isinstance(value, str)]
    join = "write one text for each record, as 'Chats and instructions' in data/README.md shows"
    if not keys:
        return join
    return f"set --text_key={keys[0]}" + (f" or {', '.join(keys[1:])}, or {join}" if len(keys) > 1 else "")


def read_shakespeare(folder: Path) -> tuple[str, dict]:
    """
    Return Tiny Shakespeare and its source: the text of input.txt in `folder`, which is downloaded if it does
    not exist. Raises ValueError if the download fails or has a different SHA-256.
    """
    path, url = folder / "input.txt", SHAKESPEARE["url"]
    if not path.exists():
        print(f"downloading {url}")
        try:
            with urlopen(url, timeout=60) as response, atomic_files(folder, path.name) as files:
                data = response.read()
                if hashlib.sha256(data).hexdigest() != SHAKESPEARE["sha256"]:
                    raise OSError(f"{len(data):,} bytes that are not the expected text")
                files[path.name].write(data)
        except OSError as error:
            advice = f"put the text at {path}, or use your own with --data_files="
            raise ValueError(f"could not download {url} ({error}); {advice}") from error
    return read_text(path), {"file": path.name}


def open_hub(
    name: str, selection: dict, options: dict, text_key: str, rows: int
) -> tuple[Iterator[str], int | None]:
    """
    Open a Hugging Face data set. Returns the documents and their number, None if it is unknown. For the
    arguments see `prepare_documents`.
    """
    with needed_by(f"downloading {name}", "datasets"):
        from datasets import load_dataset

    dataset = load_dataset(name, split="train", **selection, **options)
    total = getattr(dataset, "num_rows", None)
    if rows and total != rows:  # the hub converts some large data sets to Parquet only in part
        print(f"note: the hub contains {total} documents, not {rows}")
    return read_hub(dataset, text_key), total


def read_hub(dataset: Any, text_key: str) -> Iterator[str]:
    """Yield the column `text_key` of a Hugging Face data set."""
    for batch in dataset.iter(batch_size=BATCH_ROWS):  # much faster than row by row
        if text_key not in batch:
            raise ValueError(f"no column '{text_key}' in {list(batch)}; set --text_key=")
        yield from batch[text_key]
