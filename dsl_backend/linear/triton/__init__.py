# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of linear layers, for GPUs without CuTe DSL kernels."""
