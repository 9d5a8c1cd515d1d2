"""Tiny Shakespeare at character level: 1.1 million characters, 65 different ones. Reads input.txt beside this file,
and downloads it first if it is not there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent.parent))
from bins import SHAKESPEARE, fetch_text, parse_arguments, read_as_one_text, report, run, write_char_dataset

FOLDER = Path(__file__).absolute().parent


def main(argv: list[str]) -> None:
    """Writes the data set beside this file."""
    args = parse_arguments(__doc__, argv, data_files=None, text_key="text", val_fraction=0.1)
    if args.data_files is not None:
        text, source = read_as_one_text(args.data_files, args.text_key), {"data_files": args.data_files}
    else:
        text, source = fetch_text(FOLDER / "input.txt", **SHAKESPEARE), {"file": "input.txt"}
    report(FOLDER, write_char_dataset(FOLDER, text, source, args.val_fraction))


if __name__ == "__main__":
    sys.exit(run(main))
