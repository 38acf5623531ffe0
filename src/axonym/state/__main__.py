"""`python -m axonym.state verify PATH ...` checks checkpoints without loading them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .file_checksums import verify


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify the checkpoints that the command line names; the exit status is 1 if any is damaged."""
    parser = argparse.ArgumentParser(prog="python -m axonym.state")
    command = parser.add_subparsers(required=True).add_parser("verify", help="check checkpoints without loading them")
    command.add_argument("paths", nargs="+", metavar="PATH", help="the folder of a checkpoint")
    status = 0
    for path in parser.parse_args(arguments).paths:
        print(f"Reading {path}.", file=sys.stderr, flush=True)  # which takes long if it is large
        try:
            verify(path)
            print(f"{path} is as it was written.")
        except (ValueError, OSError) as e:
            print(str(e).removeprefix("verify: "), file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
