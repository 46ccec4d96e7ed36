# SPDX-License-Identifier: Apache-2.0
"""The run-time library that a compiled host function calls."""

from pathlib import Path

from emulator import native

SOURCE = Path(__file__).with_name("runtime.c")
FLAGS = ("-std=c11", "-O1", "-fPIC", "-shared", "-fvisibility=hidden")


def library() -> Path:
    """The built library; building it anew takes a second."""
    return native.build(SOURCE, FLAGS)
