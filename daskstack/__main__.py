"""``python -m daskstack``."""

from daskstack.cli import main

if __name__ == "__main__":
    main(prog_name="daskstack")
