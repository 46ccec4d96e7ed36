# SPDX-License-Identifier: Apache-2.0
"""Triton kernels: the floor under every SM that has nothing better, and interpreted on a CPU in the tests."""
