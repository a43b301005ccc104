"""`python -m fledge`: the same program as the `fledge` command."""

import sys

from fledge.cli.main import main

sys.exit(main())
