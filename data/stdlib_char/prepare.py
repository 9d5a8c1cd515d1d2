"""Python's own source code at character level: a data set that needs no network. It is the standard library of the
interpreter that runs this script; the same interpreter always gives the same bytes."""

import os
import platform
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent.parent))
from bins import parse_arguments, read_as_one_text, report, run, write_char_dataset

FOLDER = Path(__file__).absolute().parent
# Tests and bundled packages are not the library; config-* folders hold what differs between two builds of a version.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "_bundled"}


def is_library_source(relative: str) -> bool:
    """Whether a path below the library ('/' between its parts) is code that every build of a version has."""
    *folders, name = relative.split("/")
    return (
        name.endswith(".py")
        and not name.startswith(("test_", "_sysconfigdata"))
        and name not in ("sitecustomize.py", "usercustomize.py")
        and not any(folder in SKIPPED_FOLDERS or folder.startswith("config-") for folder in folders)
    )


def read_library(library: Path) -> tuple[str, int]:
    """The sources in `library`, sorted by path, a blank line between two, and their number. Files that are not pure
    ASCII are left out: they would add many rare characters. ValueError if there are none."""
    found = {}
    for parent, _, names in os.walk(library):
        for name in names:
            relative = (Path(parent) / name).relative_to(library).as_posix()
            if is_library_source(relative):
                found[relative] = Path(parent) / name
    sources = [found[relative].read_bytes() for relative in sorted(found)]
    texts = [source.decode("ascii") for source in sources if source.isascii()]
    if not texts:
        raise ValueError(
            f"no Python sources in {library}: this interpreter's library is zipped or compiled; "
            "use another Python, or name your own text with --data_files="
        )
    return "\n".join(texts).replace("\r\n", "\n").replace("\r", "\n"), len(texts)


def main(argv: list[str]) -> None:
    """Writes the data set beside this file."""
    args = parse_arguments(__doc__, argv, data_files=None, text_key="text", val_fraction=0.1)
    if args.data_files is not None:
        text, source = read_as_one_text(args.data_files, args.text_key), {"data_files": args.data_files}
    else:
        library = Path(sysconfig.get_path("stdlib"))
        text, files = read_library(library)
        source = {
            "name": "Python standard library",
            "implementation": platform.python_implementation(),
            "version": platform.python_version(),
            "files": files,
        }
        print(f"{source['implementation']} {source['version']}: {files:,} files of {library}, {len(text):,} characters")
    report(FOLDER, write_char_dataset(FOLDER, text, source, args.val_fraction))


if __name__ == "__main__":
    sys.exit(run(main))
