"""Read the documents of --data_files."""

import glob
import io
import json
import os
from collections.abc import Iterable, Iterator

import fsspec
from fsspec.implementations.local import LocalFileSystem

from isogpt.common.console import shortened
from isogpt.data.text_files import decode, endings_of, kind_of, known_of, shown
from isogpt.options.values import is_url, without_credentials

FileSystem = fsspec.AbstractFileSystem
Document = tuple[str, str]  # where it is, for messages, and its text

BATCH_ROWS = 1000
BLOCK = 1 << 20  # characters of a .txt file, or bytes of any other, that are read at once


# ------------------------------------------------------------------------------------------------------------
# which files


def find_files(data_files: str) -> dict[str, FileSystem]:
    """
    Find the files of --data_files: a comma-separated list of files, folders and globs, and of URLs of these
    for fsspec. A note says which are left out of a folder, and which are read as text without being a .txt.

    Returns:
        the file system of each file, sorted by path.

    Raises:
        ValueError: there is no file, or a URL cannot be opened.
    """
    found = {}
    for pattern in data_files.split(","):
        try:
            files, paths, is_folder = expand(pattern)
        except Exception as error:  # file systems raise nearly anything
            # what is missing for fsspec may be so for another reason, such as HTTP's status 403
            reason = isinstance(error, FileNotFoundError) and error.__cause__ or error
            problem = f"{pattern} cannot be opened: {type(reason).__name__}: {reason}"
            raise ValueError(f"--data_files: {without_credentials(problem)}") from error
        if is_folder:
            paths = known_of(paths, shown(pattern))
        if not paths:
            raise ValueError(f"--data_files: there is no file at {shown(pattern)!r}")
        found |= dict.fromkeys(paths, files)
    # by what it is: links, such as one to a folder above, lead to a file again
    once = {identity(path, found[path]): path for path in sorted(found, reverse=True)}
    found = {path: found[path] for path in sorted(once.values())}
    if others := endings_of(found):
        print(f"note: read as text: {shortened(others, 10)}; records must be in .jsonl or .parquet files")
    return found


def identity(path: str, files: FileSystem) -> str:
    """What paths to one file have in common."""
    return os.path.realpath(path) if isinstance(files, LocalFileSystem) else path


def expand(pattern: str) -> tuple[FileSystem, list[str], bool]:
    """The file system of a file, folder, glob or URL, the files there, and whether it is a folder."""
    files, name = LocalFileSystem(), os.path.expanduser(pattern)  # a shell replaces ~ only in front
    if is_url(pattern):
        files, name = fsspec.url_to_fs(pattern)
    if isinstance(files, LocalFileSystem):  # a glob of fsspec would find hidden files, and follow no links
        is_folder = os.path.isdir(name)
        if is_folder:
            name = os.path.join(glob.escape(name), "**", "*")
        paths = [name] if os.path.exists(name) else glob.glob(name, recursive=True)
        return files, [path for path in paths if os.path.isfile(path)], is_folder
    try:
        found = {name: files.info(name)}
    except FileNotFoundError:
        found = files.glob(name, detail=True)
        if not found:
            raise
    is_folder = found.get(name, {}).get("type") == "directory"
    if is_folder:
        found = files.find(name, detail=True)
    return files, [path for path, info in found.items() if info["type"] == "file"], is_folder


# ------------------------------------------------------------------------------------------------------------
# their documents


def read_documents(
    files: dict[str, FileSystem], text_key: str = "text", separator: str = ""
) -> Iterator[Document]:
    """
    Yield the documents of files. A .jsonl file contains one per line, a .parquet file one per row; null is
    none. Any other file is a document in UTF-8, or several with a separator. All files are streamed, except
    a text without a separator.

    Raises:
        ValueError: one of the files cannot be read or parsed.
    """
    for path, file_system in files.items():
        yield from documents_of(path, texts_in(file_system, path, text_key, separator), text_key)


def documents_of(source: str, texts: Iterable[object], text_key: str) -> Iterator[Document]:
    """
    Yield the texts of a file, or of a data set of the hub, with their places; null is none.

    Raises:
        ValueError: the source cannot be read or parsed, or does not contain texts.
    """
    count = 0
    try:
        for text in texts:
            if not isinstance(text, str | None):
                raise ValueError(f"no string at '{text_key}' in {str(text)[:200]}: set --text_key=")
            count += 1
            if text is not None:
                # JSON can hold halves of surrogate pairs, but neither UTF-8 nor a tokenizer.json can
                text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
                yield f"{shown(source)}, document {count}", text
    except Exception as error:  # a damaged file, or a stream that breaks, raises nearly anything
        advice = f"; simplecache::{shown(source)} is downloaded first" if is_url(source) else ""
        problem = f"{shown(source)}, document {count + 1}: {error}{advice}"
        raise ValueError(without_credentials(problem) if advice else problem) from error


def check_column(text_key: str, columns: Iterable[str]) -> None:
    """Raise ValueError if none of the columns is called text_key."""
    if text_key not in columns:
        raise ValueError(f"no column '{text_key}' in {list(columns)}: set --text_key=")


def texts_in(files: FileSystem, path: str, text_key: str, separator: str) -> Iterator[object]:
    """Yield the texts of a file; for a record without text_key, the record itself."""
    compression = "gzip" if shown(path).lower().endswith(".gz") else None
    opened = files.open(path, "rb", compression=compression)
    with io.BufferedReader(opened, BLOCK) as file:  # fsspec's own search for the end of a line is slow
        if kind_of(path) == ".parquet":
            from pyarrow.parquet import ParquetFile

            # by default, a column of a whole row group would be in memory, which may be as large as the file
            table = ParquetFile(file, pre_buffer=False, buffer_size=BLOCK)
            check_column(text_key, table.schema_arrow.names)
            for batch in table.iter_batches(BATCH_ROWS, columns=[text_key]):
                yield from batch[text_key].to_pylist()
        elif kind_of(path) == ".jsonl":
            # `datasets` would read a text that is a date as a date, and records of one form only
            for line in filter(bytes.strip, file):
                record = json.loads(line)
                yield record.get(text_key, record) if isinstance(record, dict) else record
        else:
            yield from separated(file, separator) if separator else [decode(file.read(), shown(path))]


def separated(file: io.BufferedReader, separator: str) -> Iterator[str]:
    """Yield the texts between the separators, without white space at both ends, while the file is read."""
    rest = ""
    text = io.TextIOWrapper(file, encoding="utf-8-sig")
    # as much as is left of a long document, which is then searched twice and not once for each block
    while block := text.read(max(BLOCK, len(rest))):
        *documents, rest = (rest + block).split(separator)
        yield from map(str.strip, documents)
    yield rest.strip()
