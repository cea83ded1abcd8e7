"""``python -m penstock`` is the command ``penstock``."""

from .cli import main

if __name__ == "__main__":
    main(prog_name="penstock")
