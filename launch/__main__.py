"""`python -m launch` is `serried`."""

import sys

from .cli import main

sys.exit(main())
