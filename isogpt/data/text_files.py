"""Read a text file: UTF-8, or UTF-16 with a byte order mark. Any other encoding would be a guess."""

import codecs
from pathlib import Path

MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_text(path: Path) -> str:
    """
    Return the text of a file with '\\n' line endings and no byte order mark.

    Raises:
        ValueError: the file is in neither, or it contains the character 0, as binary files do.
    """
    content = path.read_bytes()
    encoding = "utf-16" if content.startswith(MARKS) else "utf-8-sig"
    try:
        text = content.decode(encoding)
        if "\0" in text:
            raise ValueError(f"the character 0 is at {text.index(chr(0)):,}")
    except ValueError as e:
        advice = "save it as UTF-8, for instance with iconv -f cp1252 -t utf-8"
        raise ValueError(f"{path} is not text in UTF-8 ({e}): {advice}") from e
    return text.replace("\r\n", "\n").replace("\r", "\n")
