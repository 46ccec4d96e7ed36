# SPDX-License-Identifier: Apache-2.0
"""Device code that the CuTe DSL attention kernels of all SMs share: masks, scores, the online softmax, work items."""
