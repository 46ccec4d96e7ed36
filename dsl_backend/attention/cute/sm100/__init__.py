# SPDX-License-Identifier: Apache-2.0
"""CuTe DSL attention for SM100 and SM103: tcgen05, tensor memory, TMA, warp specialisation."""
