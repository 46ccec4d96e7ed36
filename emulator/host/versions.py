# SPDX-License-Identifier: Apache-2.0
"""Which releases of nvidia-cutlass-dsl the host side was tested with.

The run-time functions that its host code calls and the tensor maps that it builds are documented nowhere, so a release
is accepted when the tests, the probe of tensor maps among them, passed with it.
"""

from importlib import metadata

from emulator.errors import Unsupported

PACKAGE = "nvidia-cutlass-dsl"
TESTED = ("4.6.0", "4.8.0", "4.8.1")


def check() -> str:
    """The installed release, if it is a tested one."""
    tested = f"the emulator was tested with {', '.join(TESTED)}"
    try:
        found = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        raise Unsupported(f"{PACKAGE} is not installed; {tested}") from None
    if found not in TESTED:
        raise Unsupported(
            f"{PACKAGE} {found} is installed; {tested}. Its host code and its tensor maps are not documented, and may "
            "differ in another release"
        )
    return found
