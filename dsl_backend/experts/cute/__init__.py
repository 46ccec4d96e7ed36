# SPDX-License-Identifier: Apache-2.0
"""Experts by CuTe DSL kernels: routing, two grouped GEMMs, and the sum over a token's experts."""
