"""`python -m merger`, the same as the `merger` command."""

import sys

from merger.cli import main

sys.exit(main())
