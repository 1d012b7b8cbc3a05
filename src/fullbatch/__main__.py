"""``python -m fullbatch``: the command line."""

from fullbatch.cli import main

if __name__ == "__main__":
    main()
