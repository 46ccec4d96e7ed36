# SPDX-License-Identifier: Apache-2.0
"""CuTe DSL kernels that quantise."""
