#!/usr/bin/env python3
"""Milestone 1: inference with MXNet's own Convolution; `python m1.py --help` says more."""

import sys

from ece408_op import commands

if __name__ == "__main__":
    sys.exit(commands.run("m1"))
