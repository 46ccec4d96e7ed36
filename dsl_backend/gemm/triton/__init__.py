# SPDX-License-Identifier: Apache-2.0
"""What the Triton kernels of linear layers and of experts share."""
