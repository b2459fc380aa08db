"""`python -m slipstream WORDS`: the command, also where nothing is installed."""

import sys

from slipstream.orchestrator.cli.main import main

if __name__ == "__main__":  # processes that are spawned import this module
    sys.exit(main())
