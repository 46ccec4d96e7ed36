# SPDX-License-Identifier: Apache-2.0
"""Kernels of this package that are timed with a change; they import CuTe DSL."""
