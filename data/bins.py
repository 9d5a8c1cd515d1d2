"""
Code shared by the prepare.py scripts: their options, and the two kinds of data sets. read_files.py reads the
text, write_files.py writes train.bin, val.bin and their metadata.

README.md in this folder describes the files that are read and written.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the repository

from read_files import KINDS, open_hub, read_documents
from show_progress import Place, Progress
from summary import report
from tokenize_documents import batches_of, goes_to_val, tokenize
from train_tokenizer import TRAIN_HELP, number_of_ids, train_tokenizer
from unfinished import complete_moves, only_writer, unfinished_in
from write_files import (
    OF_DATA_SET,
    SplitText,
    SplitWriter,
    atomic_folder,
    dtype_for,
    pack_ids,
    remove_leftovers,
    write_meta,
)

from isogpt.common.console import visible
from isogpt.data.data_folder import read_dict
from isogpt.data.tokenizer import Tokenizer, load
from isogpt.data.vocabulary import Vocabulary, of_characters, tokenizer_in
from isogpt.options.values import problem_of_folder

TOKENIZER_HELP = (
    "char (an id for each character), the name of a tiktoken encoding, a folder with a tokenizer.json of "
    "Hugging Face, or the folder of a training run, whose vocabulary is used"
)
SEPARATOR_HELP = (
    "what stands between the documents of a .txt file in UTF-8, such as <|endoftext|>; without it, the file "
    "is one document"
)
SPECIAL_HELP = (
    "True: the text of a special token, such as <|endoftext|>, becomes this token; False: it is text"
)
SHARD_HELP = (
    "tokens of each of train_000000.bin, train_000001.bin and so on, but the last; 0: all in train.bin"
)
CHECKED = 100_000  # characters with which a tokenizer is checked


def make_parser(description: str, val_fraction: float, tokenizer: str | int) -> argparse.ArgumentParser:
    """
    The options that all prepare.py scripts share. `tokenizer` is the default of --tokenizer, or if it is a
    number, that of --train_tokenizer; the parsed `tokenizer` is what one of the two says.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--data_files", help=f"your own {' '.join(KINDS)} files: comma-separated paths, folders or globs"
    )
    parser.add_argument(
        "--text_key", default="text", help="key (.jsonl) or column (.parquet) of a document's text"
    )
    parser.add_argument(
        "--out", type=Path, help="folder to write to, created if missing; None: that of this script"
    )
    add_val_fraction(parser, val_fraction)
    parser.add_argument("--shard_tokens", type=at_least(0), default=0, help=SHARD_HELP)
    either = parser.add_mutually_exclusive_group()
    is_trained = isinstance(tokenizer, int)
    either.add_argument(
        "--tokenizer", default=argparse.SUPPRESS if is_trained else tokenizer, help=TOKENIZER_HELP
    )
    either.add_argument(
        "--train_tokenizer",
        dest="tokenizer",
        metavar="N",
        type=number_of_ids,
        default=tokenizer if is_trained else argparse.SUPPRESS,
        help=TRAIN_HELP,
    )
    parser.add_argument("--special_tokens", default="True", choices=["True", "False"], help=SPECIAL_HELP)
    return parser


def add_val_fraction(parser: argparse.ArgumentParser, default: float) -> None:
    """Add the option --val_fraction."""
    parser.add_argument(
        "--val_fraction", type=fraction, default=default, help="fraction of the data for val.bin"
    )


def fraction(text: str) -> float:
    """Parse a number between 0 and 1, excluding both."""
    number = float(text)
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1: type a number such as 0.1")
    return number


def at_least(least: int) -> Callable[[str], int]:
    """A parser of integers, in which 100_000 may be written for 100000, that are not smaller than `least`."""

    def integer(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is smaller than {least}")
        return int(text)

    return integer


def cut_for(n: int, val_fraction: float, unit: str) -> int:
    """
    Return how many of n characters or tokens train.bin gets: the first ones. Raises ValueError if one of the
    files would be empty.
    """
    cut = int(n * (1 - val_fraction))
    if not 0 < cut < n:
        problem = f"--val_fraction={val_fraction} leaves train.bin or val.bin empty ({unit} in all: {n:,})"
        advice = "use files with more text" + (", or set --val_fraction=0.1 or the like" if n > 1 else "")
        raise ValueError(f"{problem}: {advice}")
    return cut


def run(main: Callable[[list[str]], None]) -> int:
    """
    Call main(arguments) and return the exit status: 1, with a one-line message, for errors that a user can
    fix.
    """
    # SystemExit, unlike a kill, removes the temporary files
    before = {
        number: signal.signal(number, lambda number, _: sys.exit(128 + number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        main(sys.argv[1:])
        return 0
    except (ImportError, OSError, ValueError) as error:
        print("error:", visible(" ".join(str(error).split())), file=sys.stderr)
        return 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ------------------------------------------------------------------------------------------------------------
# two kinds of data sets: one text, and documents


def prepare_text(
    script: str,
    description: str,
    argv: list[str],
    read: Callable[[Path], tuple[str, dict]],
    tokenizer: str = "char",
) -> None:
    """
    Parse `argv` and write a data set of one text, without end-of-text tokens, to --out or the folder of
    `script`: the first part of the text is train.bin, the rest val.bin.

    Args:
        read: read(folder of `script`) returns the text and its source, if there are no --data_files.
        tokenizer: the default of --tokenizer. With char, there is one id per character, in sort order.

    Raises:
        ValueError: the text is too short, or contains a character that the vocabulary lacks.
    """
    args = make_parser(description, val_fraction=0.1, tokenizer=tokenizer).parse_args(argv)
    if args.data_files is None:
        text, source = read(Path(script).absolute().parent)
    else:
        text = "\n".join(read_documents(args.data_files, args.text_key))
        source = {"data_files": args.data_files}
    cut = cut_for(len(text), args.val_fraction, "characters")
    digest = hashlib.sha256(text.encode()).hexdigest()
    source |= {"characters": len(text), "sha256": digest, "val_fraction": args.val_fraction}
    if args.tokenizer == "char":
        vocabulary = of_characters({c: i for i, c in enumerate(sorted(set(text)))})
    elif isinstance(args.tokenizer, int):
        vocabulary = train_tokenizer([text], args.tokenizer)
    else:
        vocabulary = vocabulary_named(args.tokenizer)
    loaded = load(vocabulary, args.special_tokens == "True")
    note_on_loss([text], loaded)
    folder = folder_to_write(script, args)
    texts, counts = {"train": SplitText(), "val": SplitText()}, {}
    with only_writer(folder):
        complete_moves(folder)
        with atomic_folder(folder) as temporary:
            for split, part in (("train", text[:cut]), ("val", text[cut:])):
                writer = SplitWriter(temporary, split, args.shard_tokens)
                writer.write(pack_ids(loaded.encode(part), loaded.n_ids))
                writer.close()
                texts[split].add(part.encode())
                counts[f"{split}_tokens"] = writer.tokens
            meta = write_meta(temporary, vocabulary, loaded.n_ids, source, texts, **counts)
        remove_leftovers(folder)
    report(folder, meta)


def prepare_documents(
    script: str,
    description: str,
    argv: list[str],
    dataset: str,
    selection: dict,
    rows: int = 0,
    tokenizer: str | int = "gpt2",
    **options: Any,
) -> None:
    """
    Parse `argv` and write the documents of a Hugging Face data set, or of --data_files, to --out or the
    folder of `script`. The documents keep their order, and each is followed by the end-of-text token.

    Args:
        selection: arguments of datasets.load_dataset that select a part or version; recorded in meta.json.
        rows: expected number of documents; 0 if unknown.
        tokenizer: the default of --tokenizer, or the number of ids that --train_tokenizer trains by default.
        options: other arguments of datasets.load_dataset.

    Raises:
        ValueError: there are fewer than two documents, or the tokenizer lacks an end-of-text token.
    """
    parser = make_parser(description, val_fraction=0.0005, tokenizer=tokenizer)
    parser.add_argument("--seed", type=int, default=1337, help="seed of the choice of documents for val.bin")
    parser.add_argument(
        "--num_proc", type=at_least(1), default=cores(), help="number of tokenizing processes"
    )
    parser.add_argument("--document_separator", default="", help=SEPARATOR_HELP)
    args = parser.parse_args(argv)
    place = Place()

    def open_documents() -> tuple[Iterator[str], int | None]:
        if args.data_files is None:
            return open_hub(dataset, selection, options, args.text_key, rows)
        return read_documents(args.data_files, args.text_key, args.document_separator, place), None

    if args.tokenizer == "char":
        raise ValueError(
            "--tokenizer=char is for one text: use the prepare.py of data/shakespeare_char, or for documents "
            "--train_tokenizer=257, which has an id for each byte"
        )
    if isinstance(args.tokenizer, int):
        vocabulary = train_tokenizer(open_documents()[0], args.tokenizer)
    else:
        vocabulary = vocabulary_named(args.tokenizer)
    if load(vocabulary).end_of_text is None:
        problem = f"the tokenizer contains no {vocabulary.end_of_text} to end documents with"
        advice = "set --tokenizer=gpt2, or use the prepare.py of data/shakespeare, for one text"
        raise ValueError(f"{problem}: {advice}")
    source = {"data_files": args.data_files} if args.data_files else {"dataset": dataset, **selection}
    folder = folder_to_write(script, args)
    with only_writer(folder):
        arguments = what_decides(args, source, vocabulary)
        if complete_moves(folder) == arguments:
            print(f"note: {folder} is complete: an earlier start, interrupted at its end, had prepared it")
            meta = read_dict(folder / "meta.json")
        else:
            source |= {"val_fraction": args.val_fraction, "seed": args.seed}
            meta = write_documents(folder, args, arguments, vocabulary, source, open_documents, place)
    report(folder, meta)


def write_documents(
    folder: Path,
    args: argparse.Namespace,
    arguments: dict,
    vocabulary: Vocabulary,
    source: dict,
    open_documents: Callable[[], tuple[Iterator[str], int | None]],
    place: Place,
) -> dict:
    """
    Tokenize the documents and write them, or only the rest if an earlier start has written some of them.

    Args:
        arguments: see Unfinished.
        source: what meta.json records of the text's origin.
        open_documents: returns the documents and their number, None if it is unknown.
        place: records how much of the files has been read.

    Returns:
        the content of meta.json.
    """
    special_tokens = args.special_tokens == "True"
    tokenizer = load(vocabulary, special_tokens)

    def is_val(index: int) -> bool:
        return goes_to_val(args.seed, index, args.val_fraction)

    with unfinished_in(folder, arguments, args.shard_tokens, dtype_for(tokenizer.n_ids)) as unfinished:
        documents, total = open_documents()
        first = list(islice(documents, 100))
        note_on_loss(list(filter(None, first)), tokenizer)
        documents = filter(None, chain(first, documents))
        if not unfinished.skip(documents, is_val):
            documents = filter(None, open_documents()[0])
        batches = batches_of(documents, is_val, unfinished.documents)
        with (
            closing(tokenize(batches, vocabulary, special_tokens, args.num_proc)) as tokenized,
            closing(Progress(place, total, unfinished.documents, unfinished.tokens)) as progress,
        ):
            for batch, ids in tokenized:
                unfinished.write(batch, ids)
                progress.show(unfinished.documents, unfinished.tokens)
        if (count := unfinished.documents) < 2:
            advice = "data/shakespeare/prepare.py splits one text" if count else "use files with more text"
            raise ValueError(
                f"2 non-empty documents or more are needed, but there is {count or 'none'}: {advice}"
            )
        return unfinished.finish(vocabulary, tokenizer.n_ids, source)


def what_decides(args: argparse.Namespace, source: dict, vocabulary: Vocabulary) -> dict:
    """The arguments that determine the files, by which an unfinished data set is recognized."""
    names = ("text_key", "document_separator", "special_tokens", "seed", "val_fraction", "shard_tokens")
    meaning = json.dumps(vocabulary.describe(), sort_keys=True).encode()
    tokenizer = f"{vocabulary.name} {hashlib.sha256(meaning).hexdigest()}"
    return {"source": source.copy(), "tokenizer": tokenizer} | {name: getattr(args, name) for name in names}


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def folder_to_write(script: str, args: argparse.Namespace) -> Path:
    """
    The folder of `script`, or --out, which is created. Raises ValueError if it contains files that would be
    read as shards of the data set that is to be written.
    """
    if problem := problem_of_folder("--out", str(args.out or "")):
        raise ValueError(problem)
    folder = args.out.expanduser() if args.out else Path(script).absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    files = [
        path
        for split in ("train", "val")
        for end in ("bin", "npy")
        for path in folder.glob(f"{split}*.{end}")
    ]
    foreign = sorted(path for path in files if not OF_DATA_SET.fullmatch(path.name))
    if foreign and args.shard_tokens:
        raise ValueError(f"{foreign[0]} would be read as a shard: move it away, or set a different --out=")
    return folder


# ------------------------------------------------------------------------------------------------------------
# the vocabulary


def vocabulary_named(name: str) -> Vocabulary:
    """
    The vocabulary that --tokenizer names: of a folder with a tokenizer.json, of a training run's folder, of
    one of these files itself, or an encoding of tiktoken. Raises ValueError if there is none.
    """
    name = os.path.expanduser(name)
    path = Path(name)
    is_part = path.name in ("tokenizer.json", "ckpt.pt") or path.suffix == ".model"
    folder = path.parent if is_part and path.is_file() else path
    if not folder.is_dir():
        if path.is_file() or os.sep in name:
            problem = "it is a file" if path.is_file() else "no such folder"
            raise ValueError(f"--tokenizer={name}: {problem}: give a folder that contains a tokenizer.json")
        return Vocabulary("tiktoken", name)
    if vocabulary := tokenizer_in(folder):
        return vocabulary
    # these import torch, which takes seconds
    from isogpt.checkpoint.run_vocabulary import vocabulary_of_run
    from isogpt.checkpoint.search import newest_checkpoint
    from isogpt.checkpoint.source import open_checkpoint

    newest, reports = newest_checkpoint(str(folder))
    if not newest:
        problem = f"--tokenizer={name} contains neither a tokenizer.json nor a checkpoint"
        raise ValueError("; ".join([problem, *reports]))
    return vocabulary_of_run(open_checkpoint(newest).run, folder)


def note_on_loss(texts: list[str], tokenizer: Tokenizer) -> None:
    """Print a note if a tokenizer does not keep the text, for instance its capital letters."""
    for line in filter(None, map(str.strip, "\n".join(texts)[:CHECKED].splitlines())):
        decoded = tokenizer.decode(tokenizer.encode(line))
        if line not in decoded:  # tokens may be added at the start and the end
            print(f"note: the tokenizer does not keep the text: {line[:60]!r} becomes {decoded[:60]!r}")
            return
