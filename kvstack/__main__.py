"""Run kvstack as `python -m kvstack`."""

from kvstack.terminal.cli import main

if __name__ == "__main__":
    main()
