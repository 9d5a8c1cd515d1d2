"""
The source code of Python's standard library at character level: a data set that needs no network. The library
is that of the interpreter that runs this script; the same interpreter always produces the same files.
"""

import platform
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent.parent))  # data/
from bins import prepare_text, run

# Tests and bundled packages; config-* folders, skipped below, differ between builds of the same version.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "_bundled"}


def is_library_source(relative: str) -> bool:
    """Whether a path relative to the library, separated by '/', is code that every build of a version has."""
    *folders, name = relative.split("/")
    is_skipped = any(folder in SKIPPED_FOLDERS or folder.startswith("config-") for folder in folders)
    return not is_skipped and not name.startswith(
        ("test_", "_sysconfigdata", "sitecustomize.", "usercustomize.")
    )


def read_library(library: Path) -> tuple[str, int]:
    """
    Return the source files in `library`, sorted by path and separated by blank lines, and their number. Files
    with non-ASCII characters are skipped, since they would add many rare characters. Raises ValueError if
    there are no files.
    """
    paths = {path.relative_to(library).as_posix(): path for path in library.rglob("*.py") if path.is_file()}
    sources = [paths[name].read_bytes() for name in sorted(paths) if is_library_source(name)]
    texts = [source.decode("ascii") for source in sources if source.isascii()]
    if not texts:
        advice = "use a different Python, or your own text with --data_files="
        raise ValueError(f"no Python sources in {library}, which is perhaps zipped or compiled: {advice}")
    return "\n".join(texts).replace("\r\n", "\n").replace("\r", "\n"), len(texts)


def read_standard_library(folder: Path) -> tuple[str, dict]:
    """Return the text of this interpreter's library and a description of its source; `folder` is unused."""
    library = Path(sysconfig.get_path("stdlib"))
    text, files = read_library(library)
    implementation, version = platform.python_implementation(), platform.python_version()
    print(f"{implementation} {version}: {files:,} files of {library}, {len(text):,} characters")
    print("val.bin contains other files than train.bin, so the losses differ even without overfitting")
    name = "Python standard library"
    return text, {"name": name, "implementation": implementation, "version": version, "files": files}


def main(argv: list[str]) -> None:
    """Write the data set to the folder of this script, or to --out."""
    prepare_text(__file__, __doc__, argv, read_standard_library)


if __name__ == "__main__":
    sys.exit(run(main))
