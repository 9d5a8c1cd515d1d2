"""Tiny Shakespeare in GPT-2's tokens: one text, the first 90% of its characters for training, without end-of-text
tokens. Reads input.txt beside this file, and downloads it first if it is not there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent.parent))
from bins import SHAKESPEARE, fetch_text, parse_arguments, read_as_one_text, report, run, write_bpe_text

FOLDER = Path(__file__).absolute().parent


def main(argv: list[str]) -> None:
    """Writes the data set beside this file."""
    args = parse_arguments(__doc__, argv, data_files=None, text_key="text", tokenizer="gpt2", val_fraction=0.1)
    if args.data_files is not None:
        text, source = read_as_one_text(args.data_files, args.text_key), {"data_files": args.data_files}
    else:
        text, source = fetch_text(FOLDER / "input.txt", **SHAKESPEARE), {"file": "input.txt"}
    report(FOLDER, write_bpe_text(FOLDER, text, source, args.tokenizer, args.val_fraction))


if __name__ == "__main__":
    sys.exit(run(main))
