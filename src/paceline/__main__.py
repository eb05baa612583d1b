"""The command line as a program: `python -m paceline`."""

from paceline.cli.commands import main

if __name__ == "__main__":
    main()
