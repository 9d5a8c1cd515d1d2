"""
Code shared by the prepare.py scripts: their options, and the two kinds of data sets. read_files.py reads the
text, write_files.py tokenizes it and writes train.bin, val.bin and their metadata.

README.md in this folder describes the files that are read and written.
"""

import os
import shlex
import sys
from argparse import SUPPRESS, ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the repository
import isogpt.common.interrupt  # (first: the other imports take longer)

from download import read_hub, read_shakespeare
from read_files import find_files, read_documents, shown
from train_tokenizer import train_tokenizer
from write_files import Batch, batches_of, tokenize, write_data_set

from isogpt.common.console import visible
from isogpt.common.files import REPOSITORY
from isogpt.data.tokenizer import load
from isogpt.data.vocabulary import CONVERT, Vocabulary, of_characters, tokenizer_in

SAMPLE = 10_000  # characters of the first document, with which a tokenizer is tried


def make_parser(script: str, about: str, defaults: dict) -> ArgumentParser:
    """
    The options that all prepare.py scripts share. The parsed `tokenizer` is what --tokenizer or
    --train_tokenizer says: a number is that of the ids of one to train.
    """
    parser = ArgumentParser(description=about, allow_abbrev=False)
    parser.formatter_class = ArgumentDefaultsHelpFormatter
    parser.set_defaults(**defaults)
    add = parser.add_argument
    add("--data_files", help="files, folders, globs or URLs, separated by commas")
    add("--text_key", default="text", help="key or column of the text")
    add("--out", type=Path, default=Path(script).absolute().parent, help="folder to write to")
    add("--val_fraction", type=float, help="what part goes to val.bin")
    add("--shard_tokens", type=int, default=0, help="of each file; 0: all are in one")
    add("--tokenizer", help="char, an encoding of tiktoken, or a folder that contains one or a run")
    add("--train_tokenizer", dest="tokenizer", default=SUPPRESS, type=int, help="ids of a BPE to train")
    add("--special_tokens", default="True", choices=["True", "False"], help="False: they are text")
    return parser


def run(work: Callable, *args: object, **options: object) -> None:
    """
    Call work(*args, **options), and exit, with a one-line message after Ctrl-C and errors that a user can
    fix.
    """
    isogpt.common.interrupt.raise_interrupt()
    try:
        sys.exit(work(*args, **options))
    except (ImportError, OSError, ValueError, KeyboardInterrupt) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        print("error:", visible(reason), file=sys.stderr)
        sys.exit(1)


def run_on_folder(work: Callable, about: str, **options: dict) -> None:
    """
    `run` a script that changes a data set: work(folder, **options).

    Args:
        about: the description of the script.
        options: the arguments of add_argument, by the option's name.
    """
    parser = ArgumentParser(description=about)
    parser.add_argument("folder", type=Path, help="that contains the data set")
    for name, option in options.items():
        parser.add_argument(f"--{name}", **option)
    run(work, **vars(parser.parse_args()))


# ------------------------------------------------------------------------------------------------------------
# two kinds of data sets: one text, and documents


def prepare_text(script: str, about: str, read: Callable = read_shakespeare, **defaults: object) -> None:
    """
    Write a data set of one text, without end-of-text tokens, to --out or the folder of `script`: the first
    part of the text is train.bin, the rest val.bin.

    Args:
        about: the description of the script.
        read: read(folder of `script`) returns the text and its source, if there are no --data_files.
        defaults: of the options. With the tokenizer char, there is one id per character, in sort order.

    Raises:
        ValueError: the text is too short, or contains a character that the vocabulary lacks.
    """
    defaults = {"val_fraction": 0.1, "tokenizer": "char", "num_proc": 1} | defaults
    args = make_parser(script, about, defaults).parse_args()
    if args.data_files:
        documents = read_documents(find_files(args.data_files), args.text_key)
        text = "\n".join(text for _, text in documents)
        source = {"data_files": shown(args.data_files)}
    else:
        text, source = read(Path(script).parent)
    cut = int(len(text) * (1 - args.val_fraction))
    train, val = text[:cut].encode(), text[cut:].encode()
    write(args, source, [text], [("train", train, []), ("val", val, [])])


def prepare_documents(script: str, about: str, dataset: str, selection: dict, **defaults: object) -> None:
    """
    Write the documents of a Hugging Face data set, or of --data_files, to --out or the folder of `script`.
    The documents keep their order, and each is followed by the end-of-text token.

    Args:
        about: the description of the script.
        selection: arguments of datasets.load_dataset that select a part or version; recorded in meta.json.
        defaults: of the options.

    Raises:
        ValueError: there are fewer than two documents, or the tokenizer lacks an end-of-text token.
    """
    from tqdm import tqdm

    defaults = {"val_fraction": 0.0005, "tokenizer": "gpt2", "document_separator": ""} | defaults
    parser = make_parser(script, about, defaults)
    add = parser.add_argument
    add("--seed", type=int, default=1337, help="which documents go to val.bin")
    add("--num_proc", type=int, default=os.cpu_count(), help="processes that tokenize")
    add("--document_separator", help="between the documents of a .txt file")
    args = parser.parse_args()
    if args.tokenizer == "char":  # all documents would be read for their characters
        raise ValueError("--tokenizer=char is for one text: see 'Your own text' in data/README.md")

    if args.data_files:
        files = find_files(args.data_files)
        read = partial(read_documents, files, args.text_key, args.document_separator)
        source = {"data_files": shown(args.data_files)}
    else:
        read = partial(read_hub, dataset, args.text_key, selection)
        source = {"dataset": dataset, **selection}
    source["seed"] = args.seed
    pause = 0.1 if sys.stderr.isatty() else 60  # seconds
    counted = tqdm(read(), unit=" documents", unit_scale=True, mininterval=pause, delay=pause)
    texts = (text for _, text in read())
    write(args, source, texts, batches_of(counted, args.seed, args.val_fraction))


def write(args: Namespace, source: dict, documents: Iterable[str], batches: Iterable[Batch]) -> None:
    """
    Write a data set, and print the command that trains on it on a CPU.

    Args:
        source: what meta.json records of the text's origin.
        documents: those of `batches`, for a vocabulary that is made from the text.
    """
    if not 0 < args.val_fraction < 1 or args.num_proc < 1:
        raise ValueError("--val_fraction must be between 0 and 1, and --num_proc 1 or more")
    vocabulary = find_vocabulary(args.tokenizer, documents)
    make_tokenizer = partial(load, vocabulary, args.special_tokens == "True")
    tokenizer = make_tokenizer()
    if vocabulary.name == "tokenizer.json":
        text = next(iter(documents), "")[:SAMPLE].strip()
        with suppress(ValueError):  # the text cannot be encoded, which `tokenize` reports
            if text not in tokenizer.decode(tokenizer.encode(text)):
                changes = "capital letters or line breaks"
                print(f"note: the tokenizer does not keep the text, for instance {changes}")
    parts = tokenize(batches, tokenizer, make_tokenizer, args.num_proc)
    folder = args.out.expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    source["val_fraction"] = args.val_fraction
    meta = write_data_set(folder, vocabulary, tokenizer, source, parts, args.shard_tokens)
    train, val = meta["train_tokens"], meta["val_tokens"]
    print(f"{folder}: {train:,} tokens for training, {val:,} for validation, {vocabulary.name}")
    name = str(folder).removeprefix(f"{Path(__file__).parent}{os.sep}")
    dataset, out_dir = shlex.quote(name), shlex.quote(f"out-{folder.name}")
    command = f"config/train_small.py --dataset={dataset} --out_dir={out_dir}"
    for ending in ("", "_fast"):  # the latter for a CPU
        config = f"config/train_{name}{ending}.py"
        if (REPOSITORY / config).exists():
            command = config
    print(f"next: python train.py {command}")


def find_vocabulary(name: str | int, documents: Iterable[str]) -> Vocabulary:
    """
    The vocabulary of --tokenizer: the characters of the documents, that of a folder with a tokenizer.json, or
    of a training run, or an encoding of tiktoken. If `name` is a number, one with so many ids is trained on
    the documents. Raises ValueError if there is none.
    """
    if name == "char":
        characters = sorted(set().union(*documents))
        return of_characters({character: i for i, character in enumerate(characters)})
    if isinstance(name, int):
        return train_tokenizer(documents, name)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return Vocabulary("tiktoken", name)
    if vocabulary := tokenizer_in(folder):
        return vocabulary
    # these import torch, which takes seconds
    from isogpt.checkpoint.run_vocabulary import vocabulary_of_run
    from isogpt.checkpoint.search import find_checkpoint
    from isogpt.checkpoint.source import open_checkpoint

    newest, reports = find_checkpoint(str(folder))
    if not newest:
        problem = f"{folder} has no tokenizer.json and no checkpoint: type {CONVERT.format(str(folder))}"
        raise ValueError("; ".join([problem, *reports]))
    return vocabulary_of_run(open_checkpoint(newest).run, folder)
