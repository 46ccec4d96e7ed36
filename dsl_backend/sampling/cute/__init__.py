# SPDX-License-Identifier: Apache-2.0
"""CuTe DSL kernels of the sampler for SM90 and later."""
