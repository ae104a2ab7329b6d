"""`python -m dartspec` is the command `dartspec`."""

from dartspec.cli.main import main

if __name__ == "__main__":
    main()
