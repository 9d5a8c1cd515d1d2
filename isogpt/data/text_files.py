"""Read a text file: UTF-8, or UTF-16 with a byte order mark. Any other encoding would be a guess."""

from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from pathlib import Path


def read_text(path: Path) -> str:
    """
    Return the text of a file with '\\n' line endings and no byte order mark. Raises ValueError if the file is
    in neither encoding.
    """
    content = path.read_bytes()  # once: it may be a pipe
    is_utf16 = content.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
    try:
        text = content.decode("utf-16" if is_utf16 else "utf-8-sig")
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeError as e:
        raise ValueError(f"{path} is not text in UTF-8 ({e}): save it as UTF-8") from e
