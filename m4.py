#!/usr/bin/env python3
"""Milestone 4: inference with the fastest kernel on the GPU; `python m4.py --help` says more."""

import sys

from ece408_op import commands

if __name__ == "__main__":
    sys.exit(commands.run("m4"))
