"""Read a text file: UTF-8, or what a byte order mark names. Any other encoding would be a guess."""

import codecs
import re
from pathlib import Path

# by the mark at the beginning of the file; UTF-32's begins with UTF-16's
MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
FEW = 0.1  # at most this part of a text's bytes is not ASCII if its language has Latin letters
# quotation marks, dashes and the ellipsis of Windows-1252; in ISO 8859-1 these bytes mean nothing
OF_WINDOWS = re.compile(rb"[\x84\x85\x91\x92\x93\x94\x96\x97]")
ASCII = bytes(range(128))


def read_text(path: Path) -> str:
    """
    Return the text of a file with '\\n' line endings and no byte order mark.

    Raises:
        ValueError: the file is not in UTF-8, and no byte order mark says what else; or it contains the
            character 0, as binary files do.
    """
    content = path.read_bytes()
    encoding = next((name for mark, name in MARKS.items() if content.startswith(mark)), "utf-8")
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        problem = f"{path} is not {encoding.upper()}: byte {error.start:,} is 0x{content[error.start]:02x}"
        raise ValueError(f"{problem}. {about_windows(path, content) or 'Save it as UTF-8'}") from error
    if "\0" in text:
        advice = "it is a binary file, or text in UTF-16 without a byte order mark"
        if content[1::2].count(0) > len(content) / 4:  # Latin letters
            advice = f"it is probably UTF-16: iconv -f UTF-16LE -t UTF-8 {path} > utf8.txt"
        raise ValueError(f"{path} contains the character 0 at {text.index(chr(0)):,}: {advice}")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def about_windows(path: Path, content: bytes) -> str:
    """
    How to convert a text that is probably in Windows-1252, with a piece of it for the user to check; else ''.
    """
    mark = OF_WINDOWS.search(content)
    if not mark or len(content.translate(None, ASCII)) > FEW * len(content):
        return ""
    try:
        piece = content.decode("cp1252")[max(0, mark.start() - 20) : mark.start() + 20]
    except UnicodeDecodeError:
        return ""
    return f"If this looks right: {piece!r}, type: iconv -f cp1252 -t utf-8 {path} > utf8.txt"
