"""`python -m appliance` is the command line."""

import sys

from appliance.cli import main

sys.exit(main())
