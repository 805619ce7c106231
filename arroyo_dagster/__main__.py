"""`python -m arroyo_dagster` is the same as `arroyo-dagster`."""

from arroyo_dagster.cli import main

if __name__ == "__main__":
    main(prog_name="python -m arroyo_dagster")
