"""``python -m fusermount3_proxy``: the same code, unfrozen."""

import sys

from fusermount3_proxy.cli import main

sys.exit(main())
