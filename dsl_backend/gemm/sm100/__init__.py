# SPDX-License-Identifier: Apache-2.0
"""CuTe DSL kernels of linear layers for SM100 and SM103: tcgen05 fed by TMA, sums in tensor memory."""
