# SPDX-License-Identifier: Apache-2.0
"""Experts in Triton, for SMs without CuTe DSL kernels."""
