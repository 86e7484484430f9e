"""The refusal of a request, by whichever process refuses it."""


class Refusal(Exception):
    """A request is refused, or failed and left nothing behind: `errno`, and the `text` for the user."""

    def __init__(self, errno: int, text: bytes, *, warnings: tuple[bytes, ...] = ()) -> None:
        super().__init__(errno, text)
        self.errno = errno
        self.text = text
        self.warnings = warnings
