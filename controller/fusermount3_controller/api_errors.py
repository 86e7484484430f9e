"""What the API server answers to those who come too late: what they ask for is done, or is not there any more."""

import contextlib
from collections.abc import Iterator

from lightkube import ApiError

NOT_FOUND, CONFLICT = 404, 409


@contextlib.contextmanager
def already(code: int) -> Iterator[None]:
    """Take an answer with this code as success: somebody else has done it. Raises ApiError for any other."""
    try:
        yield
    except ApiError as error:
        if error.status.code != code:
            raise
