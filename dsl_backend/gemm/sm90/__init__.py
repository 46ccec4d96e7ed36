# SPDX-License-Identifier: Apache-2.0
"""CuTe DSL kernels of linear layers for SM90: wgmma fed by TMA."""
