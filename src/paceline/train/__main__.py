"""The program of one worker: `python -m paceline.train RUN_DIR`."""

from paceline.train.loop import main

if __name__ == "__main__":
    main()
