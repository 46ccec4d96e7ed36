# SPDX-License-Identifier: Apache-2.0
"""Conversions that Triton kernels of several families share."""
