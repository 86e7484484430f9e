"""How slow this machine is: on an emulated one, all that tests wait for takes longer.

Only times in which something must happen are multiplied by it, never those in which nothing may.
"""

from __future__ import annotations

import os

SLOWNESS = float(os.environ.get("FUSERMOUNT3PROXY_TEST_SLOWNESS", "1"))
