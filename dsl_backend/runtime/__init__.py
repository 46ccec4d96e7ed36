# SPDX-License-Identifier: Apache-2.0
"""How kernels come to exist: targets, compilation, caches. It contains nothing of an operator."""
