"""Run kvstack as `python -m kvstack`."""

import os
import sys

# `-m` puts the current directory before all that is installed: a stray `uvicorn.py` there is not to be run.
if not sys.flags.safe_path and sys.path[0] in {"", os.getcwd()}:  # noqa: PTH109 - as `-m` spells it
    del sys.path[0]

from kvstack.terminal.cli import main

if __name__ == "__main__":
    main()
