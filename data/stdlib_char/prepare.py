"""
The source code of Python's standard library at character level: a data set that needs no network. The library
is that of the interpreter that runs this script; the same interpreter always produces the same files.
"""

import platform
import re
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent.parent))  # data/
from bins import prepare_text, run

# Tests and bundled packages, and what differs between builds of the same version.
SKIPPED = re.compile(
    r"(^|/)(tests?|idle_test|__pycache__|site-packages|dist-packages|_bundled|config-[^/]*)/"
    r"|(^|/)(test_|_sysconfigdata|sitecustomize\.|usercustomize\.)[^/]*$"
)


def read_library(library: Path) -> tuple[str, int]:
    """
    Return the source files in `library`, sorted by path and separated by blank lines, and their number. Files
    with non-ASCII characters are skipped, since they would add many rare characters.
    """
    paths = {path.relative_to(library).as_posix(): path for path in library.rglob("*.py") if path.is_file()}
    sources = [paths[name].read_bytes() for name in sorted(paths) if not SKIPPED.search(name)]
    texts = [source.decode("ascii") for source in sources if source.isascii()]
    return "\n".join(texts).replace("\r\n", "\n").replace("\r", "\n"), len(texts)


def read_standard_library(folder: Path) -> tuple[str, dict]:
    """Return the text of this interpreter's library and a description of its source; `folder` is unused."""
    library = Path(sysconfig.get_path("stdlib"))
    text, files = read_library(library)
    implementation, version = platform.python_implementation(), platform.python_version()
    print(f"{implementation} {version}: {files:,} files of {library}, {len(text):,} characters")
    facts = {"implementation": implementation, "version": version, "files": files}
    return text, {"name": "Python standard library"} | facts


if __name__ == "__main__":
    sys.exit(run(prepare_text, __file__, __doc__, read_standard_library))
