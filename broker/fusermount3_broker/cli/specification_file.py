"""The file that `cdi generate` writes, and the one that it refers to."""

import stat
from pathlib import Path


def is_missing(proxy: Path) -> bool:
    """Return whether there is no such file; False also where this user may not look: others may be able to."""
    try:
        return not stat.S_ISREG(proxy.stat().st_mode)
    except PermissionError:
        return False
    except OSError:
        return True


def write(output: Path, text: str) -> None:
    """Write the file, so that whoever reads it finds all of it or what was there before. Raises OSError.

    A pipe, a device or a link such as /dev/stdout stays what it is, and gets the text.
    """
    if output.is_symlink() or (output.exists() and not output.is_file()):
        with output.open("w") as stream:
            stream.write(text)
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f"{output.name}.new")  # engines read files that end in .json or .yaml
    unfinished.write_text(text)
    unfinished.replace(output)
