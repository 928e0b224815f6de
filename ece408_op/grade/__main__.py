"""``python -m ece408_op.grade`` is ``ece408-grade``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
