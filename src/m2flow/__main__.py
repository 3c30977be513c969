"""`python -m m2flow` is the command line."""

from m2flow.cli.app import main

if __name__ == "__main__":
    main()
