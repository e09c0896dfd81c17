"""`python -m appliance` is the command line."""

import sys

from appliance.cli.main import main

sys.exit(main())
