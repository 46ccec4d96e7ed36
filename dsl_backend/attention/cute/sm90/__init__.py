# SPDX-License-Identifier: Apache-2.0
"""CuTe DSL attention for SM90: wgmma, TMA, warp specialisation."""
