# SPDX-License-Identifier: Apache-2.0
"""The list of operator families. A family is a package of that name with a module `family` (see runtime/family.py)."""

NAMES = ("attention", "experts", "linear", "norm", "sampling", "softmax")
# Whose records a file of tuned configurations may have (runtime/tuned.py).
TUNED = ("attention", "experts", "linear", "scaled-linear", "norm", "sampling", "softmax")
