# SPDX-License-Identifier: Apache-2.0
"""CuTe DSL kernels of softmax for SM90 and later."""
