"""`python -m woodbury`: the command line, which needs the extra `experiments`."""

from woodbury.cli import main

if __name__ == "__main__":
    main()
